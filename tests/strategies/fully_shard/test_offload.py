"""CPUOffloadPolicy: what leaves the device, what the copies take, and what is refused."""

from __future__ import annotations

import pytest

from ddpsim.errors import ScenarioError
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.strategies.instructions import Communicate, Compute, Synchronize

SCENARIO = "scenarios/llama-8b-offload.yaml"
FEW = ("workload.model=gpt2", "run.iterations=1")
HALF = ("ddp.fully_shard.mixed_precision={param: float16}",)
POLICY = "ddp.fully_shard.offload_policy"


def job(*settings: str) -> Job:
    return resolve(load_scenario(SCENARIO, [*FEW, *settings]))


def sent(job: Job, operation: str) -> list[Communicate]:
    step = job.program.steady_step
    return [i for i in step if isinstance(i, Communicate) and i.operation == operation]


def test_shards_gradients_and_states_leave_the_device() -> None:
    """16 bytes a parameter over 4 ranks; what is whole stays, and shards on their way."""
    offloaded, resident = job(), job(f"{POLICY}=null")
    on_host, on_device = offloaded.memory(), resident.memory()
    assert (on_host.parameters, on_host.gradients, on_host.optimizer) == (0, 0, 0)
    left = on_device.parameters + on_device.gradients + on_device.optimizer
    assert left == pytest.approx(16 / 4 * sum(p.numel for p in resident.model.parameters), rel=0.01)
    on_their_way = on_host.buckets - on_device.buckets
    assert 0 <= on_their_way <= left / 4


def test_copies_take_their_bytes_over_the_link() -> None:
    """Of float32 shards: ahead of each all-gather, and after each reduction."""
    slow, fast = (job(f"{POLICY}={{host_link: {rate} GB/s}}") for rate in (1, 1000))
    for operation, moment in (("all_gather", "before_ns"), ("reduce_scatter", "after_ns")):
        for one, other in zip(sent(slow, operation), sent(fast, operation), strict=True):
            shard_bytes = one.size_bytes / 4 * (2 if operation == "all_gather" else 1)
            more_s = (getattr(one, moment) - getattr(other, moment)) / 1e9
            assert more_s == pytest.approx(shard_bytes / 1e9, rel=0.05)


def test_the_host_optimizes_while_the_device_idles() -> None:
    """28 bytes an element of fused AdamW, a quarter on each rank, and the dispatch of DTensors."""
    found = {rate: job(f"{POLICY}={{host_optimizer: {rate} GB/s}}") for rate in (7, 14)}
    took_ns = {}
    for rate, one in found.items():
        *_, before, optimizer, after, _ = one.program.steady_step
        assert isinstance(before, Synchronize)
        assert isinstance(after, Synchronize)
        assert isinstance(optimizer, Compute)
        took_ns[rate] = optimizer.device_ns
    parameters = found[7].model.parameters
    moved_bytes = 28 / 4 * sum(p.numel for p in parameters)
    assert took_ns[7] - took_ns[14] == pytest.approx(moved_bytes / 7 - moved_bytes / 14, rel=0.01)
    dispatched_ns = (took_ns[7] - moved_bytes / 7) / len(parameters)
    assert 10e3 < dispatched_ns < 60e3


def test_a_copy_kept_on_the_device_does_not_come_from_the_host_again() -> None:
    kept = job("ddp.fully_shard.reshard_after_forward=2")
    whole, again = (
        [i.before_ns for i in sent(kept, "all_gather") if i.group == group]
        for group in ("world", "kept")
    )
    assert again[0] < whole[0] / 4  # the root
    assert max(again[1:]) < min(whole[1:]) / 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cluster.device=cpu-core", "ddp.backend=gloo"], "parameters of a CPU .* are on the host"),
        (["workload.clip_grad_norm={}"], "clip_grad_norm would run on the host"),
        ([*HALF, "workload.precision=amp-fp16"], "grad_scaler would run on the host"),
        (["ddp.accumulation_steps=2", "ddp.no_sync=false"], "adds gradients on the host"),
        ([f"{POLICY}=OffloadPolicy"], "'OffloadPolicy' is no offload policy; write CPUOffload"),
        ([f"{POLICY}={{link: 25 GB/s}}"], "offload_policy.link: unknown key"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        job(*settings)
