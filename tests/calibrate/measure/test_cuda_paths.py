"""What calibrate does on GPUs, call by call, with a stand-in for CUDA and NCCL.

No GPU is needed, and nothing is told of one: times here are a CPU's (`tests/helpers/cuda_standin`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

from measured.measuring import recorded

from calibrate.fit.device.fit import fit_device
from calibrate.fit.profile import fit_profile
from calibrate.measure.cluster.plan import Options
from calibrate.measure.ddp.rounds import measure_rounds
from calibrate.measure.errors import MeasureError
from calibrate.measure.ranks.launch import local, run
from calibrate.records.device_record import load_device_record
from calibrate.records.record import COPIES_BACK, COPIES_IN, HALF, RESTED, Kind, Record
from calibrate.records.rounds import RoundOptions, Rounds, load_rounds
from calibrate.records.variant import Variant
from calibrate.validate.validate import validate
from ddpsim import load_scenario, simulate
from ddpsim.scenario.catalog import device_table

pytestmark = pytest.mark.usefixtures("warm_python")

HERE = Path(__file__).parents[2]
STANDIN = HERE / "helpers" / "cuda_standin"
GUIDE = HERE.parent / "docs" / "how-to" / "calibrate.md"
A100 = "NVIDIA A100-SXM4-80GB"
MIB, GIB = 2**20, 2**30
_BESIDE_EACH_OTHER: tuple[Kind, ...] = ("compute",)
_FEW = {"most_repetitions": 2, "time_budget_s": 300.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpus")


@pytest.fixture(scope="module", autouse=True)
def standin() -> object:
    """On the path of the ranks that are started, and not in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STANDIN)
        yield patch


@pytest.fixture(scope="module")
def record(folder: Path) -> Record:
    """Everything but what needs more than a few MiB, then compute beside all-reduces."""
    path = folder / "record.json"
    recorded(2, Options(output=path, memory_budget_bytes=32 * MIB, **_FEW))
    beside = Options(
        output=path, memory_budget_bytes=2 * GIB, only=_BESIDE_EACH_OTHER, resume=True, **_FEW
    )
    return recorded(2, beside)


@pytest.fixture(scope="module")
def profile(record: Record, folder: Path) -> Path:
    path = folder / "cluster.json"
    fitted = fit_profile([record], "gpus", ["record.json"])
    path.write_text(fitted.model_dump_json(by_alias=True), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def rounds(folder: Path) -> tuple[Path, Rounds]:
    path = folder / "rounds.json"
    options = RoundOptions(
        output=path,
        model="measure_helpers:two_layers",
        variants=(Variant(), Variant(comm_hook="fp16_compress"), Variant(accumulation_steps=2)),
        rounds=(3, 3),
    )
    run(measure_rounds, options, 2)
    return path, load_rounds(path)


def profiled(path: Path, *options: str) -> dict[str, Any]:
    """A model's profile, measured by a process with the stand-in."""
    paths = (STANDIN, HERE / "helpers", HERE.parent)
    command = [sys.executable, "-m", "calibrate", "profile", "measure_helpers:two_layers"]
    subprocess.run(
        [*command, *options, "--iterations", "3", "-o", str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=True,
    )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_a_record_of_two_gpus(record: Record) -> None:
    here = record.environment
    assert (here.backend, here.device, here.library) == ("nccl", A100, "2.27.5")
    assert here.machine == A100
    kinds = {m.kind for m in record.measurements}
    assert kinds >= {"all_reduce", "point_to_point", "ddp_hook", "device_cast", "optimizer"}
    variants = {m.variant for m in record.measurements}
    assert {"layer alone", "layer with all_reduce", "gemm with all_reduce"} <= variants
    # of a host's clock, which a GPU does not wait for; of gloo; of a link's shaper
    assert not variants & {COPIES_IN, COPIES_BACK, f"alone{HALF}", RESTED}


def test_a_profile_of_two_gpus(profile: Path) -> None:
    cluster = json.loads(profile.read_text(encoding="utf-8"))
    assert cluster["backend"] == "nccl"
    assert cluster["interference"]["compute_slowdown"]["value"] >= 1


def test_the_guides_scenario_joins_both_profiles(profile: Path, folder: Path) -> None:
    model = profiled(folder / "model.json", "--optimizer", "adamw", "--batch", "32")
    assert model["measured"]["device"] == A100
    text = GUIDE.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    scenario = folder / "scenario.yaml"
    scenario.write_text(text.replace("nodes: 8", "nodes: 1").replace("node: 8", "node: 2"))
    found = load_scenario(scenario)
    assert found.cluster.device.name == "a100-sxm-80gb"
    result = simulate(found)
    assert result.iteration_time_s.p50 > 0
    memory = result.memory_bytes_per_gpu
    assert memory.total == model["measured"]["peak_memory"]["bytes"] + memory.buckets
    assert not any("was measured on" in warning for warning in result.warnings)
    others = (
        ("NVIDIA A100-SXM4-80GB", "t4", ("model.json", "profile gpus"), f"was measured on {A100}"),
        ("name: adamw", "name: sgd", ("the optimizer's time",), "that of adamw"),
    )
    for own, other, subjects, said in others:
        another = folder / "another.yaml"
        another.write_text(scenario.read_text().replace(own, other))
        warnings = simulate(load_scenario(another)).warnings
        for subject in subjects:
            assert any(w.startswith(subject) and said in w for w in warnings), (warnings, subject)


@pytest.mark.parametrize("device", ["auto", "cuda:1"])
def test_a_model_on_a_gpu(device: str, tmp_path: Path) -> None:
    model = profiled(tmp_path / "model.json", "--device", device)
    assert A100 in model["measured"]["source"]
    assert model["measured"]["peak_memory"] == {"bytes": 2**28, "of": "tensors on the device"}
    assert set(model["measured"]["ddp_hook_s"]) == {None}


_DEVICE = """
from pathlib import Path
from calibrate.measure.device.session import DeviceOptions, measure_device
from calibrate.measure.ranks.launch import local, run
from calibrate.records.device_record import Case
step = Case(kind="step", model="resnet18", batch=2, size=64)
plan = [Case(kind="launch", variant=v) for v in ("operator", "step", "kernel", "graph")]
for rate in ("fp32", "tf32", "fp16", "bf16"):
    plan.append(Case(kind="product", precision=rate, shape=(32, 32, 32)))
    plan.append(Case(kind="convolution", precision=rate, shape=(2, 8, 8, 8, 3, 1, 1)))
plan += [
    Case(kind="convolution", precision="bf16", shape=(2, 8, 8, 8, 3, 1, 1), channels_last=True),
    Case(kind="memory", variant="copy", shape=(2**16,)),
    Case(kind="optimizer", variant="sgd foreach", shape=(4, 1024)),
    *(step.model_copy(update={"precision": p}) for p in ("fp32", "bf16")),
    step.model_copy(update={"precision": "amp-bf16", "channels_last": True}),
    Case(kind="ddp", model="resnet18", batch=1, size=64),
    Case(kind="grad_scaler", model="resnet18", precision="amp-fp16", batch=1, size=64),
]
measure_device(DeviceOptions(Path("record.json"), 300, rounds=1, plan=plan, trace=False))
"""


def test_a_device_record_of_a_gpu_gives_a_device_file(tmp_path: Path) -> None:
    paths = (STANDIN, HERE / "helpers", HERE.parent)
    subprocess.run(
        [sys.executable, "-c", _DEVICE],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd=tmp_path,
        check=True,
    )
    record = load_device_record(tmp_path / "record.json")
    assert (record.environment.device, record.capability) == (A100, (8, 0))
    assert set(record.skipped) == {"launch graph fp32"}  # there is no graph without CUDA
    assert {m.peak_bytes for m in record.of("step")} == {2**28}
    fitted = fit_device(record, None, "record.json").file
    assert (fitted.name, fitted.kind, fitted.architecture) == (A100, "gpu", "ampere")
    assert set(fitted.peak_flops) == {"fp32", "tf32", "fp16", "bf16"}
    assert fitted.measured.steps == {"fp32": 1, "bf16": 2}
    assert fitted.intra_node == device_table("a100-sxm-80gb")["intra_node"]
    (tmp_path / "device.json").write_text(fitted.model_dump_json(by_alias=True))
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        "schema: ddpsim/1\nworkload: {model: resnet50, batch_per_rank: 64, precision: amp-bf16}\n"
        "cluster: {nodes: 2, gpus_per_node: 8, device: device.json}\n"
    )
    result = simulate(load_scenario(scenario))
    told = {p.input: p.trust for p in result.provenance}
    assert told["compute time"] == told["compute efficiency"] == "measured"


def test_rounds_of_two_gpus_are_held_against_their_profile(
    rounds: tuple[Path, Rounds], profile: Path
) -> None:
    path, measured = rounds
    assert measured.environment.device == A100
    assert not measured.oversubscribed  # two ranks on two cores, but they compute on GPUs
    assert all(parameter.ddp_hook_s == () for parameter in measured.parameters)
    held = validate([path], profile)
    assert held.figures is not None
    assert held.figures.cases == held.figures.buckets_agree == 3
    assert validate([path]).figures is not None


def test_a_device_without_a_preset_needs_one_named(
    rounds: tuple[Path, Rounds], folder: Path
) -> None:
    path = folder / "l40.json"
    path.write_text(rounds[0].read_text(encoding="utf-8").replace(A100, "NVIDIA L90"))
    with pytest.raises(Exception, match=r"no device preset is known for 'NVIDIA L90': .*--device"):
        validate([path])
    assert validate([path], device="l4").figures is not None


@pytest.mark.parametrize(
    ("gpus", "visible", "backend"), [("1", "3", "nccl"), ("1", "", "gloo"), ("2", "0,1", "nccl")]
)
def test_the_backend_is_that_of_the_devices_that_ranks_see(
    gpus: str,
    visible: str,
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A launcher may show each rank its own device alone."""
    monkeypatch.setenv("STANDIN_GPUS", gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = Options(output=tmp_path / "r.json", only=("jitter",), most_repetitions=1)
    assert recorded(2, options).environment.backend == backend
    told = "1 CUDA device for 2 ranks here: gloo on the CPU is measured" in capfd.readouterr().out
    assert told == (backend == "gloo")


def test_ranks_that_share_a_gpu_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_GPUS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("STANDIN_GPU", "7")
    with pytest.raises(MeasureError, match=r"ranks 0 and 1 have the same GPU \(\S+ GPU-7\)"):
        recorded(2, Options(output=tmp_path / "r.json", only=("jitter",)))


def test_ranks_of_one_host_that_count_as_nodes_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where each GPU has a torchrun of its own."""
    options = Options(output=tmp_path / "r.json", only=("jitter",), most_repetitions=1)
    local(2, "calibrate.measure.cluster.session", options, nodes=2)
    assert "warning   nodes 0 and 1 are both on " in capfd.readouterr().out


@pytest.mark.parametrize("error", ["AcceleratorError", "DistBackendError"])
def test_a_gpu_that_failed_ends_the_measurement(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can do nothing any more: what it cannot do is not left out task by task."""
    monkeypatch.setenv("STANDIN_FAILS", f"1 {error}")
    options = Options(
        output=tmp_path / "r.json", only=("jitter", "device_copy"), most_repetitions=1, timeout_s=10
    )
    said = {
        "AcceleratorError": "the GPU of rank 1 failed: CUDA error: it fell off the bus. What was",
        "DistBackendError": "NCCL of rank 1 failed: NCCL error in: here Duplicate GPU detected",
    }
    with pytest.raises(MeasureError, match=said[error]):
        recorded(2, options)
