"""Traces of gradient accumulation: each micro-batch has its own times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from logs.kineto_scenarios import STEP, read
from logs.kineto_writer import MAIN, Step, Writer

from ddpsim.errors import ImportFailedError, ScenarioError
from ddpsim.importers.kineto.measured import KinetoStep
from ddpsim.recorded.replay import replay

REDUCED = {0: 10, 3: 320}
ELEMENTS = sum(REDUCED.values())


def micro_batch(writer: Writer, step: Step) -> None:
    """A step's forward and backward under DDP, without an optimizer."""
    began, before = writer.now, len(writer.events)
    writer.now += 2.0
    writer.op("DistributedDataParallel.forward", began, MAIN)
    writer.step(replace(step, optimizer=[]))
    marks = ("Optimizer.step", "ProfilerStep")
    new = writer.events[before:]
    writer.events[before:] = [e for e in new if not e["name"].startswith(marks)]


def saved(path: Path, *micro_batches: Step, count: int = 3) -> Path:
    """Steps of some micro-batches, each with one optimizer step."""
    writer = Writer(world_size=2)
    for number in range(count):
        began = writer.now
        for each in micro_batches:
            micro_batch(writer, each)
        at = writer.now
        writer.kernel(20.0, MAIN, 1.0)
        writer.op("Optimizer.step#SGD.step", at, MAIN)
        writer.now += 5000.0  # the device has done all of it
        writer.op(f"ProfilerStep#{number}", began, MAIN)
    return writer.save(path)


def slower(times: float) -> Step:
    forward = [times * kernel for kernel in STEP.forward]
    return replace(STEP, forward=forward, loader_us=30.0)


LAST = replace(STEP, reduced=REDUCED)


def device_us(step: KinetoStep) -> list[float]:
    return [
        1e6 * sum(piece.device_s for piece in (*each.forward, *each.backward))
        for each in step.micro_batches
    ]


def test_each_micro_batch_has_its_own_times(tmp_path: Path) -> None:
    step = read(saved(tmp_path / "t.json", slower(1), slower(3), LAST)).typical
    whole = sum(STEP.forward) + sum(map(sum, STEP.backward))
    assert device_us(step) == pytest.approx([whole, whole + 2 * sum(STEP.forward), whole])
    assert step.device_s == pytest.approx(1e-6 * (3 * whole + 2 * sum(STEP.forward) + 20.0))
    assert step.loader_s == pytest.approx(60e-6)
    assert step.reductions == 1
    assert step.bucket_elements == tuple(REDUCED.values())
    assert step.typical_micro_batch.busy_s == pytest.approx(1e-6 * whole)


def test_all_micro_batches_that_reduce_are_told(tmp_path: Path) -> None:
    step = read(saved(tmp_path / "t.json", LAST, LAST)).typical
    assert step.reductions == 2
    assert step.bucket_elements == tuple(REDUCED.values())
    assert [sum(c.of_gradients for c in each.collectives) for each in step.micro_batches] == [2, 2]


@pytest.mark.parametrize(
    ("micro_batches", "ddp"),
    [
        ([slower(1), slower(3), LAST], {"backend": "nccl", "accumulation_steps": 3}),
        ([LAST, LAST], {"backend": "nccl", "accumulation_steps": 2, "no_sync": False}),
    ],
)
def test_they_are_replayed_as_recorded(
    tmp_path: Path, micro_batches: list[Step], ddp: dict[str, object]
) -> None:
    found = replay(saved(tmp_path / "t.json", *micro_batches))
    told = found.document["ddp"]
    assert {key: told[key] for key in ddp} == ddp
    assert ("no_sync" in told) == ("no_sync" in ddp)
    traced = found.traced.forward + found.traced.backward_compute
    assert found.simulated.forward + found.simulated.backward_compute == pytest.approx(
        traced, rel=0.05
    )


def test_what_are_no_micro_batches_of_one_model_is_refused(tmp_path: Path) -> None:
    fewer = replace(STEP, backward=STEP.backward[:2])
    with pytest.raises(ImportFailedError, match="forwards and backwards of 2 to 4 gradients"):
        read(saved(tmp_path / "t.json", fewer, LAST))
    with pytest.raises(ScenarioError, match="is 2, but a traced step has 3 micro-batches"):
        replay(saved(tmp_path / "t.json", LAST, LAST, LAST), ["ddp.accumulation_steps=2"])
