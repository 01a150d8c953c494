"""`fit-device`: figures that made a record are found again, and a real core's steps predicted."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from outcome import Outcome

pytest.importorskip("scipy", reason="fitting needs scipy")

from calibrate.fit.device.fit import errors_of_halves, fit_device
from calibrate.fit.device.steps import (
    FLOOR,
    MEMORY,
    Linearised,
    MeasuredStep,
    figures_of,
    halves,
    measured_steps,
    reaching,
)
from calibrate.records.device_record import (
    Case,
    DeviceMeasurement,
    DeviceRecord,
    load_device_record,
)
from calibrate.records.record import Environment
from ddpsim import load_scenario, simulate
from ddpsim.errors import ImportFailedError
from ddpsim.scenario.device import Device

DATA = Path(__file__).parents[2] / "data" / "devices" / "epyc-core.json.gz"
MODELS = (("resnet50", 64, 224), ("bert-large", 8, 512), ("vit_l_16", 64, 224), ("gpt2", 1, 8))
# of steps, as the plan has them: half convolutions in channels last too
FORMATS: tuple[tuple[tuple[Any, bool], ...], ...] = (
    (("fp32", False), ("amp-bf16", False)),
    (("fp32", False), ("amp-bf16", False), ("amp-bf16", True)),
)
OTHER_SHAPES = 1.2  # how much faster the kernels' shapes are than those of layers
GPU = Device.model_validate(
    {
        "peak_flops": {"fp32": "20 TFLOP/s", "bf16": "300 TFLOP/s"},
        "matmul_efficiency": {"fp32": 0.8, "bf16": 0.6},
        "convolution_efficiency": {"fp32": 0.5, "bf16": 0.35},
        "memory": "80 GiB",
        "memory_bandwidth": "2 TB/s",
        "memory_efficiency": 0.8,
        "optimizer_efficiency": 0.9,
        "kernel_floor": "3 us",
        "launch": "4 us",
        "operator": "12 us",
    }
)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> DeviceRecord:
    """One core of an AMD EPYC, measured in three minutes beside the work of others."""
    path = tmp_path_factory.mktemp("core") / "record.json"
    path.write_bytes(gzip.decompress(DATA.read_bytes()))
    return load_device_record(path)


def only(record: DeviceRecord, models: Collection[str]) -> DeviceRecord:
    """The record without steps of other models than these."""
    kept = tuple(m for m in record.measurements if not m.case.model or m.case.model in models)
    return record.model_copy(update={"measurements": kept})


def kernel(kind: Any, seconds: dict[str, float], **case: Any) -> DeviceMeasurement:
    work = {key: case.pop(key) for key in ("flops", "moved_bytes") if key in case}
    samples = {part: (s,) for part, s in seconds.items()}
    return DeviceMeasurement(case=Case(kind=kind, **case), samples_s=samples, **work)


def made_record(device: Device) -> DeviceRecord:
    """What a device of such figures would measure, were the estimate right."""
    bandwidth = device.memory_bandwidth_bytes_per_s
    optimizer_s = 3 * 4e9 / device.optimizer_bytes_per_s
    found = [
        kernel("launch", {"host": 5e-6, "kernel": device.kernel_floor_s}, variant="operator"),
        kernel("launch", {"host": device.launch_s, "kernel": 1e-6}, variant="kernel"),
        kernel("memory", {"kernel": 4e9 / bandwidth}, shape=(10**9,), moved_bytes=4e9),
        kernel("optimizer", {"step": optimizer_s}, variant="sgd foreach", moved_bytes=4e9),
    ]
    for rate, peak in device.peak_flops_per_s.items():
        best = {"kernel": 1e12 / peak}
        found.append(kernel("product", best, precision=rate, shape=(0,), flops=1e12))
        for shape in ((1,), (2,)):
            usual_s = 1e12 / (OTHER_SHAPES * peak * device.efficiency(rate))
            conv_s = 1e12 / (OTHER_SHAPES * peak * device.efficiency(rate, convolution=True))
            work: dict[str, Any] = {"precision": rate, "shape": shape, "flops": 1e12}
            found.append(kernel("product", {"kernel": usual_s}, **work))
            parts = {"forward": conv_s, "backward": 2 * conv_s}
            found.append(kernel("convolution", parts, **work))
    for name, batch, size in MODELS:
        for precision, channels_last in FORMATS[name == "resnet50"]:
            case = Case(kind="step", model=name, precision=precision, batch=batch, size=size)
            case = case.model_copy(update={"channels_last": channels_last})
            empty = DeviceMeasurement(case=case, samples_s={"forward": (1.0,)})
            parts_s = MeasuredStep(empty, on_gpu=True).predicted_s(device)
            named = zip(("forward", "backward", "optimizer"), parts_s, strict=True)
            samples = {part: (seconds,) for part, seconds in named}
            found.append(DeviceMeasurement(case=case, samples_s=samples))
    here = Environment(
        created="2026-01-01T00:00:00+00:00",
        machine="a GPU",
        device="a GPU",
        torch="2.13.0",
        backend="nccl",
        library="2.27.5",
        variables={},
        details={},
    )
    return DeviceRecord(environment=here, memory_bytes=80 * 2**30, measurements=tuple(found))


def test_figures_that_made_a_record_are_found_again() -> None:
    """As far as steps tell of them: they lean on kernels that are a fifth faster."""
    fitted = fit_device(made_record(GPU), None, "made.json").file
    assert fitted.peak_flops == pytest.approx(GPU.peak_flops_per_s)
    assert fitted.matmul_efficiency == pytest.approx(GPU.matmul_efficiency, rel=0.12)
    assert fitted.convolution_efficiency == pytest.approx(GPU.convolution_efficiency, rel=0.12)
    assert fitted.memory_efficiency == pytest.approx(0.8, rel=0.12)
    assert fitted.optimizer_efficiency == pytest.approx(0.9)
    assert fitted.operator_s == pytest.approx(12e-6, rel=0.05)
    assert (fitted.launch_s, fitted.kernel_floor_s) == (GPU.launch_s, GPU.kernel_floor_s)
    assert fitted.intra_node is None  # no preset has that name


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_the_linearised_form_is_the_estimate_near_a_device(kind: str) -> None:
    """Shortest kernels that some rows take, and none takes."""
    steps = [step for step in measured_steps(made_record(GPU)) if step.model != "bert-large"]
    steps = [MeasuredStep(step.measurement, on_gpu=kind == "gpu") for step in steps]
    for floor_s in (30e-6, 0.0):
        device = GPU.model_copy(update={"kind": kind, "kernel_floor_s": floor_s})
        form, there = Linearised.of(device, steps), figures_of(device)
        near = {key: 1.1 * each if key[0] == "product" else each for key, each in there.items()}
        near |= {MEMORY: there[MEMORY] / 1.1, FLOOR: 0.95 * floor_s}
        for reached, off in ((there, 1e-9), (near, 0.02)):
            on = reaching(device, reached)
            estimated = [seconds for step in steps for seconds in step.predicted_s(on)[:2]]
            assert form.seconds(reached) == pytest.approx(estimated, rel=off)


def test_half_of_the_models_predict_the_others_on_a_real_core(core: DeviceRecord) -> None:
    """The claim of docs/how-to/calibrate.md."""
    errors = [abs(error) for _, error in errors_of_halves(core)]
    assert len(errors) == len(measured_steps(core))
    assert len({step.model for step in measured_steps(core)}) == 14
    assert median(errors) <= 0.15


def test_a_device_file_of_half_of_the_models_predicts_another_by_itself(
    core: DeviceRecord, tmp_path: Path
) -> None:
    """From the file alone: a scenario that names it, and the step that was measured."""
    fit, predicted = next(halves(measured_steps(core)))
    fitted = fit_device(only(core, fit), "a core", "core.json").file
    path = tmp_path / "device.json"
    path.write_text(fitted.model_dump_json(by_alias=True))
    step = next(s for s in measured_steps(core) if s.model in predicted and s.model != "vgg16")
    case = step.measurement.case
    scenario = {
        "schema": "ddpsim/1",
        "workload": step.workload.model_dump(exclude_unset=True),
        "ddp": {"backend": "gloo"},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "device": str(path)},
    }
    result = simulate(load_scenario(scenario))
    assert result.iteration_time_s.mean == pytest.approx(sum(step.parts_s), rel=0.3), case
    told = {p.input: (p.trust, p.source) for p in result.provenance}
    trust, source = told["compute efficiency"]
    assert trust == told["compute time"][0] == "measured"
    assert source.endswith(
        f"set by {fitted.measured.steps['fp32']} steps in {fitted.measured.record}"
    )


def test_single_figures_of_a_device_file_can_be_changed(core: DeviceRecord, tmp_path: Path) -> None:
    """What was measured no longer holds of another rate; of another launch it does."""
    fitted = fit_device(only(core, ()), "a core", "core.json").file
    (tmp_path / "device.json").write_text(fitted.model_dump_json(by_alias=True))
    scenario = tmp_path / "scenario.yaml"

    def device(change: str) -> Device:
        scenario.write_text(
            "schema: ddpsim/1\nddp: {backend: gloo}\n"
            "workload: {model: resnet50, batch_per_rank: 2}\n"
            "cluster: {nodes: 1, gpus_per_node: 1, device: {preset: device.json, " + change + "}}\n"
        )
        return load_scenario(scenario).cluster.device

    assert device("launch: 1 us").measured == fitted.measured
    assert device("memory_bandwidth: 1 TB/s").measured is None


def test_a_record_without_kernels_says_what_to_do(core: DeviceRecord) -> None:
    empty = core.model_copy(update={"measurements": ()})
    with pytest.raises(ImportFailedError, match="holds no matrix product: go on with --resume"):
        fit_device(empty, None, "core.json")


def test_the_command_prints_each_step_beside_its_error(
    core: DeviceRecord, tmp_path: Path, cli: Callable[..., Outcome]
) -> None:
    record, output = tmp_path / "record.json", tmp_path / "device.json"
    few = only(core, {"resnet18", "resnet34"})
    record.write_text(few.model_dump_json(by_alias=True))
    outcome = cli("calibrate", "fit-device", str(record), "-o", str(output))
    assert outcome.err == ""
    assert outcome.out.startswith(f"{output}: use it as cluster.device\n")
    assert "each predicted from the other half of the models: median error" in outcome.out
    assert outcome.out.count("  step resnet") == len(few.of("step"))
    refused = cli("calibrate", "fit-device", str(output), "-o", str(tmp_path / "other.json"))
    assert "is no ddpsim.device-record/1 record" in refused.err
