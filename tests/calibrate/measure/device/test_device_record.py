"""`calibrate device` on a CPU: what it keeps, how it goes on, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

from calibrate.measure.device import session
from calibrate.measure.device.plan import device_plan
from calibrate.measure.device.session import DeviceOptions, measure_device
from calibrate.measure.errors import MeasureError, StoppedError
from calibrate.records.device_record import Case, DeviceRecord, Kind, load_device_record
from ddpsim.errors import DdpsimError

STEP = Case(kind="step", model="resnet18", batch=1, size=64)
KERNELS = (
    Case(kind="launch", variant="operator"),
    Case(kind="product", shape=(16, 32, 64)),
    Case(kind="convolution", shape=(1, 8, 8, 8, 3, 1, 1)),
    Case(kind="memory", variant="gelu", shape=(2**14,)),
    Case(kind="optimizer", variant="adamw fused", shape=(4, 256)),
)
PLAN = (*KERNELS, STEP, Case(kind="ddp", model="resnet18", batch=1, size=64))


def options(path: Path, **changes: Any) -> DeviceOptions:
    chosen: dict[str, Any] = {"device": "cpu", "plan": KERNELS, "rounds": 1, "trace": False}
    return DeviceOptions(path, 60.0, **(chosen | changes))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DeviceRecord]:
    path = tmp_path_factory.mktemp("device") / "record.json"
    return path, measure_device(options(path, plan=PLAN))


def test_every_case_is_in_the_file(measured: tuple[Path, DeviceRecord]) -> None:
    path, record = measured
    assert load_device_record(path) == record
    assert [m.case for m in record.measurements] == list(PLAN)
    assert record.skipped == {}
    assert all(min(s) > 0 for m in record.measurements for s in m.samples_s.values())


def test_work_is_counted(measured: tuple[Path, DeviceRecord]) -> None:
    """2 m k n of a product; of a 3x3 convolution 2 x 9 a multiply-add of each input channel."""
    (product,), (convolution,) = measured[1].of("product"), measured[1].of("convolution")
    assert (product.flops, product.moved_bytes) == (2 * 16 * 32 * 64, 4 * (16 * 96 + 32 * 64))
    assert convolution.flops == 2 * 9 * 8 * 8 * 8 * 8


def test_a_step_tells_when_gradients_are_ready(measured: tuple[Path, DeviceRecord]) -> None:
    """The last layer's first and the first layer's last, within the backward."""
    (step,) = measured[1].of("step")
    assert set(step.samples_s) == {"forward", "backward", "optimizer"}
    ready = [part for part in step.ready if part is not None]
    assert len(ready) == 62
    assert 0 < min(ready) == min(ready[-2:]) < ready[0] == max(ready) <= 1


def test_stopped_at_any_case_it_is_whole_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, begun = tmp_path / "record.json", list[Case]()

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def watch(case: Case, bench: Any) -> Any:
            begun.append(case)
            if len(begun) == 3:
                raise KeyboardInterrupt
            return run(case, bench)

        return watch

    runners = {kind: watched(run) for kind, run in session.RUNNERS.items()}
    monkeypatch.setattr(session, "RUNNERS", runners)
    with pytest.raises(StoppedError, match="the same command with --resume goes on"):
        measure_device(options(path))
    assert [m.case for m in load_device_record(path).measurements] == list(KERNELS[:2])
    record = measure_device(options(path, resume=True))
    assert begun[3:] == list(KERNELS[2:])
    assert [m.case for m in record.measurements] == list(KERNELS)


def test_later_rounds_add_samples(tmp_path: Path) -> None:
    path, plan = tmp_path / "record.json", KERNELS[:1]
    once = measure_device(options(path, plan=plan)).measurements[0]
    twice = measure_device(options(path, plan=plan, rounds=2, resume=True)).measurements[0]
    assert (once.rounds, twice.rounds) == (1, 2)
    for part, samples in once.samples_s.items():
        assert twice.samples_s[part][: len(samples)] == samples
        assert len(twice.samples_s[part]) == 2 * len(samples)


def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "free_memory_bytes", lambda: 2**20)
    record = measure_device(options(tmp_path / "a.json", plan=(STEP,)))
    assert record.skipped == {str(STEP): "needs 91.0 MiB or more, and 256 KiB may be used"}
    spent = DeviceOptions(tmp_path / "b.json", 1e-9, device="cpu", plan=KERNELS)
    assert set(measure_device(spent).skipped.values()) == {"the time budget is spent"}


def test_what_torch_cannot_do_is_left_out(tmp_path: Path) -> None:
    """SyncBatchNorm's kernels are CUDA's alone; the rest is measured."""
    plan = (Case(kind="sync_batch_norm", shape=(1, 2, 2)), KERNELS[0])
    record = measure_device(options(tmp_path / "record.json", plan=plan))
    assert [m.case for m in record.measurements] == [KERNELS[0]]
    assert "batch_norm_stats" in record.skipped[str(plan[0])]


@pytest.mark.parametrize("key", ["machine", "torch"])
def test_another_machine_or_torch_is_refused(
    key: str, measured: tuple[Path, DeviceRecord], tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    document = json.loads(measured[0].read_text())
    here = document["environment"][key]
    document["environment"][key] = "other"
    path.write_text(json.dumps(document))
    before = path.read_bytes()
    with pytest.raises(MeasureError) as raised:
        measure_device(options(path, resume=True))
    said = f"{path} was measured with {key} other, but this machine has {here}: name another file"
    assert str(raised.value) == said
    assert path.read_bytes() == before


def test_what_is_there_is_not_written_over(
    measured: tuple[Path, DeviceRecord], tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(measured[0].read_bytes())
    with pytest.raises(MeasureError, match="is there already: go on from it with --resume"):
        measure_device(options(path))
    path.write_text("{}")
    with pytest.raises(DdpsimError, match="not of the kind to be written"):
        measure_device(options(path))


@pytest.mark.parametrize("gpu", [False, True])
def test_the_plan_names_each_case_once_and_begins_with_kernels(gpu: bool) -> None:
    rates = ("fp32", "tf32", "fp16", "bf16") if gpu else ("fp32",)
    plan = list(device_plan(rates, gpu=gpu))
    assert len(set(map(str, plan))) == len(plan)
    order: list[Kind] = ["launch", "product", "convolution", "memory", "optimizer", "step", "ddp"]
    assert list(dict.fromkeys(case.kind for case in plan))[: len(order)] == order
    assert len({case.model for case in plan if case.kind == "step"}) == 17
