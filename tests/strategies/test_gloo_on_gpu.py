"""gloo on GPU tensors: copies to the host and back, and a host that waits."""

from __future__ import annotations

from itertools import pairwise

import pytest

import ddpsim
from ddpsim.prediction.resolve import resolve
from ddpsim.strategies.instructions import Await, Communicate, Synchronize

SCENARIO = "scenarios/gloo-on-gpus.yaml"
FEW = "run.iterations=1"


def test_every_collective_is_copied_down_and_up_and_waited_for() -> None:
    """PCIe x16 of an A100's generation carries 24 GB/s; no copy is shorter than a kernel."""
    job = resolve(ddpsim.load_scenario(SCENARIO, [FEW]))
    step = job.program.step(5)
    sent = [each for each in step if isinstance(each, Communicate)]
    assert {each.operation for each in sent} == {"all_reduce", "broadcast"}
    for each in sent:
        copied_ns = max(3000, round(each.size_bytes / 24))
        assert (each.before_ns, each.after_ns) == (copied_ns, copied_ns)
    followers = [after for before, after in pairwise(step) if isinstance(before, Await)]
    assert followers == len(sent) * [Synchronize()]


def test_it_is_sent_after_the_copy() -> None:
    flat, alone = (
        ddpsim.simulate(
            ddpsim.load_scenario(SCENARIO, [FEW, "ddp.strategy=naive_flat", f"ddp.backend={name}"])
        ).collectives[0]
        for name in ("gloo", "nccl")
    )
    assert flat.ready_s - alone.ready_s == pytest.approx(flat.size_bytes / 24e9, abs=1e-4)
