"""What DDP adds to a profiled model's step, and what the model suffers from all-reduces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

import torch
import torch.distributed as dist
from measured.measuring import profiled
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.clock import Clock
from calibrate.measure.ddp.loops import logged, start_log
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.profile import (
    Document,
    ProfileOptions,
    profile_in_job,
    scale_profile,
    write_profile,
)
from calibrate.measure.model.samples import Samples, hook_cost_s
from calibrate.measure.model.training import Training
from calibrate.measure.ranks.job import process_group
from calibrate.measure.ranks.launch import run
from calibrate.records.rounds import Beside
from ddpsim import load_scenario, simulate
from ddpsim.importers.profiles.model import read_profile
from ddpsim.scenario.quantity import SourceFile

pytestmark = pytest.mark.usefixtures("warm_python")


def test_a_profile_holds_the_step_with_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.10 times as long as without, by steps taken in turns; within the noise it is not told."""

    def steps(*with_ddp: float) -> Iterator[float]:
        for seconds in with_ddp:
            yield from (seconds, 1.0)

    def measured(*with_ddp: float) -> Document:
        taken, kinds = steps(*with_ddp), list[bool]()

        def step_s(training: Training) -> float:
            kinds.append(isinstance(training.model, DistributedDataParallel))
            return next(taken)

        monkeypatch.setattr("calibrate.measure.model.profile.step_s", step_s)
        document = profiled("two_layers")
        assert kinds == [True, False] * len(with_ddp)
        assert not dist.is_initialized()
        return document

    document = measured(9, 9, 9, 1.11, 1.10, 1.09)  # the first three warm up
    told = document["measured"]
    iteration_s = median(seconds for (seconds,) in told["iterations_s"])
    assert told["with_ddp_s"] == pytest.approx(1.1 * iteration_s)
    assert "with_ddp_s" not in measured(9, 9, 9, 1.5, 1.1, 0.9)["measured"]
    scaled = scale_profile(document, "cpu-core", "h100-sxm-80gb")
    assert scaled["measured"]["with_ddp_s"] is None


def test_ranks_profile_together_and_the_first_writes(tmp_path: Path) -> None:
    """What all-reduces within a machine cost a tiny model may be too little to tell."""
    options = ProfileOptions(
        output=tmp_path / "model.json", model="measure_helpers:two_layers", iterations=3
    )
    run(profile_in_job, options, 2)
    document = json.loads(options.output.read_text())
    measured = document["measured"]
    read = read_profile(SourceFile("model.json", options.output))
    assert read.batch_per_rank == measured["batch_per_rank"] == 16
    assert all(p.ready_s for p in read.parameters)
    if read.interference_exponent is None:
        assert "suffers beside all-reduces is not in this profile" in measured["warnings"][-1]
    else:
        assert read.interference_exponent == (
            measured["interference_exponent"],
            measured["interference_exponent_stderr"],
        )
    scaled = scale_profile(document, "cpu-core", "h100-sxm-80gb")
    assert scaled["measured"]["interference_exponent"] is None


@pytest.mark.usefixtures("alone")
def test_a_profile_of_ranks_tells_how_the_model_fares_beside_all_reduces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Enough rounds of both to tell, made up."""
    rows = tuple((1.0 + i / 1000, 1.0 + i / 1000) for i in range(9))

    def times(factor: float) -> tuple[tuple[float, float], ...]:
        return tuple((factor * a, factor * b) for a, b in rows)

    made_up = Beside(
        layers_s=rows, layers_beside_s=times(2), backward_s=rows, backward_beside_s=times(4)
    )
    steps: list[bool] = []

    class MadeUp:
        def __init__(self, *_: object) -> None: ...

        def step(self, *, warm: bool) -> None:
            steps.append(warm)

        def measured(self) -> Beside:
            return made_up

    monkeypatch.setattr("calibrate.measure.model.profile.BesideAllReduces", MadeUp)
    path = tmp_path / "model.json"
    options = ProfileOptions(output=path, model="measure_helpers:two_layers", iterations=30)
    measured = profile_in_job(options)["measured"]
    assert measured["interference_exponent"] == pytest.approx(2, rel=1e-3)
    assert measured["interference_exponent_stderr"] > 0
    written = json.loads(path.read_text())["measured"]
    assert written["interference_exponent"] == measured["interference_exponent"]
    assert steps == [True] * 9 + [False] * 30


@pytest.mark.usefixtures("alone")
def test_a_profile_is_kept_whatever_becomes_of_it_beside_all_reduces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank without the memory for them is told; where another dies, the rest is in the file."""
    path = tmp_path / "model.json"
    options = ProfileOptions(output=path, model="measure_helpers:two_layers", iterations=3)

    class Dying:
        def __init__(self, *_: object) -> None: ...

        def step(self, *, warm: bool) -> None:
            raise dist.DistNetworkError(f"gone, warm: {warm}")

    def lacking(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError

    class Outlasted(Dying):
        def step(self, *, warm: bool) -> None: ...

        def measured(self) -> None:
            return None

    def beside(made: Callable[..., object]) -> Any:
        monkeypatch.setattr("calibrate.measure.model.profile.BesideAllReduces", made)
        path.unlink(missing_ok=True)
        return profile_in_job(options)["measured"]

    (warning,) = beside(lacking)["warnings"]
    assert warning.endswith("stand for it: rank 0 has no memory for it; give a smaller --batch")
    assert beside(Outlasted)["warnings"] == []  # one rank has nobody to reduce with
    with pytest.raises(MeasureError, match=rf"lost contact .* All but how .* is in {path}, if it"):
        beside(Dying)
    assert read_profile(SourceFile("model.json", path)).interference_exponent is None


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_every_optimizer_steps_under_ddp_too(optimizer: Any) -> None:
    document = profiled("two_layers", device="auto", optimizer=optimizer)
    assert document["measured"]["optimizer_s"] > 0
    assert None not in document["measured"]["ddp_hook_s"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "branched",
            "parameter idle.weight and 1 other got no gradient, which DDP takes with find",
        ),
        ("of_one_model", "weight is the same parameter in each model that the function returns"),
        ("growing", "the function must return the same model each time that it is called (Runtim"),
        ("synchronised", "SyncBatchNorm layers only work with GPU modules"),
    ],
)
def test_a_profile_without_ddps_own_work_says_why(name: str, said: str, tmp_path: Path) -> None:
    document = profiled(name, batch=8)
    measured = document["measured"]
    assert "with_ddp_s" not in measured
    assert set(measured["ddp_hook_s"]) == {None}
    missing = "DDP's own work is not in this profile (with_ddp_s, ddp_hook_s): "
    assert measured["warnings"][-1].startswith(missing + said)
    write_profile(document, tmp_path / "profile.json")
    read = read_profile(SourceFile("profile.json", tmp_path / "profile.json"))
    assert read.warnings == tuple(measured["warnings"])


@pytest.mark.parametrize("name", ["uncopyable", "lazy", "stepping_in_backward", "of_pairs"])
def test_what_ddp_takes_is_measured_under_it(name: str) -> None:
    measured = profiled(name)["measured"]
    assert measured["warnings"] == measured["never_ready"] == []
    assert None not in measured["ddp_hook_s"]


def test_the_collectives_of_synchronised_layers_are_said_to_be_left_out(tmp_path: Path) -> None:
    said = "2 layers of SyncBatchNorm: the collectives of each, one in forward and one in backward"
    document, path = profiled("synchronised"), tmp_path / "profile.json"
    told = document["measured"]["warnings"]
    assert told[0].startswith(said)
    write_profile(document, path)
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"profile": str(path), "batch_per_rank": 4},
        "ddp": {"backend": "gloo"},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "cpu-core"},
    }
    warnings = simulate(load_scenario(scenario)).warnings
    assert {f"{path}: {warning}" for warning in told} <= set(warnings)


def test_a_profile_tells_what_ddps_hooks_take(tmp_path: Path) -> None:
    """A copy of 8 MB takes longer than one of 4 kB; scaled to another device none is known."""
    document = profiled("large_and_small")
    write_profile(document, tmp_path / "profile.json")
    read = read_profile(SourceFile("profile.json", tmp_path / "profile.json"))
    hook_s = {p.name: p.ddp_hook_s or 0.0 for p in read.parameters}
    assert list(hook_s) == ["0.weight", "1.weight"]
    assert hook_s["0.weight"] > hook_s["1.weight"] >= 0
    scaled = scale_profile(document, "cpu-core", "h100-sxm-80gb")
    assert scaled["measured"]["ddp_hook_s"] is None
    assert not dist.is_initialized()


def test_ddp_sums_up_what_it_logs_between_iterations_and_in_none() -> None:
    """It would otherwise, as each forward begins: a cost that a user's iterations do not have."""
    model = torch.nn.Linear(4, 4)
    with process_group("gloo"):
        ddp = DistributedDataParallel(model)
        start_log(ddp)
        for _ in range(3):
            ddp(torch.ones(2, 4)).sum().backward()
        assert ddp._get_ddp_logging_data().get("forward_compute_time", 0) == 0
        log = logged(ddp)
    assert min(log.forward_s, log.backward_compute_s, log.comm_s) > 0
    assert log.bucket_bytes == (4 * 20,)


def test_what_it_costs_to_look_at_a_hook_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, where looking takes as long as the hooks."""
    monkeypatch.setattr("calibrate.measure.model.samples._look_s", lambda: 1e3)
    assert set(profiled("two_layers")["measured"]["ddp_hook_s"]) == {0.0}


@pytest.mark.parametrize(
    ("device", "seen_s", "cost_s"), [("cpu", 0.0, 1e-4), ("cuda", 0.0, 0.0), ("cuda", 1.0, 1e-4)]
)
def test_a_gpu_that_is_behind_hides_what_hooks_cost_its_host(
    device: str, seen_s: float, cost_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny parameters tell the host's cost; a backward that hooks did not lengthen had none."""
    tiny = Samples(backward_s=[0.1], hooked_backward_s=[0.101], order=[*"abcdefghij"])
    module = "calibrate.measure.model.samples"
    monkeypatch.setattr(f"{module}.measure_iterations", lambda *_: tiny)
    if device == "cuda":  # a clock of this host, as there is no GPU
        monkeypatch.setattr(f"{module}.Clock", lambda _: Clock(torch.device("cpu")))
        monkeypatch.setattr(torch.nn.Module, "to", lambda module, _: module)
        monkeypatch.setattr(f"{module}.torch.ones", lambda n, **_: torch.zeros(n))
    backward_s = [0.1] * 3
    hooked_s = [seconds + seen_s for seconds in backward_s]
    measured = Samples(backward_s=backward_s, hooked_backward_s=hooked_s, order=["a", "b"])
    assert hook_cost_s(torch.device(device), measured) == pytest.approx(cost_s)
