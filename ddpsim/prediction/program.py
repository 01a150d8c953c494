"""The training loop that every rank of a scenario runs, and the arithmetic around its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING, Literal

from ddpsim.engine.program import Loader, Program
from ddpsim.errors import InputError
from ddpsim.provenance import Provenance
from ddpsim.reliability.operation import best_interval_s
from ddpsim.result.training import (
    Pause,
    Training,
    epoch_of,
    learning_rate_of,
    paused_s,
)
from ddpsim.scenario.catalog import are_other_devices
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.links import InterNode
from ddpsim.scenario.options.training_loop import CheckpointWrite
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.ddp.costs import COUNTED_S, PYTHON_COLLECTIVE_S
from ddpsim.strategies.select import select, without_backward, without_data_parallelism
from ddpsim.strategies.training_loop.around_steps import STAGED_BYTES_PER_S, input_rate
from ddpsim.units import format_bytes_per_s, format_duration, to_ns
from ddpsim.workload.arithmetic import arithmetic_of
from ddpsim.workload.model import Model
from ddpsim.workload.optimizer import optimizer_state_bytes

if TYPE_CHECKING:
    from ddpsim.importers.profiles.cluster import Overheads
    from ddpsim.prediction.job import Job

_SHARE_OF_NIC = 0.5  # of a node's NICs that a checkpoint takes at most, assumed: its flows' half
# of the usual network: one of eight NICs, or as much; a slower line than 100 Gbit/s is no NIC that
# such nodes have several of (assumed)
_LITTLE, _NIC_BYTES_PER_S = 1 / 8, 12.5e9
_HOST_LINK = "PCIe x16 of the generation that goes with the device's architecture"


def compile_program(
    scenario: Scenario,
    model: Model,
    overheads: Overheads | None = None,
    *,
    ddp: bool = True,
    evaluates: bool = False,
    ddp_factor: float = 1.0,
    host_factor: float = 1.0,
    warmup: int | None = None,
) -> Program:
    """The loop that a scenario's ranks run; with `ddp` False, the same module on one device.

    `warmup`: steps of warm-up on one device; None: as many as with DDP.
    `evaluates`: the loop of an evaluation, whose batches have no gradients.
    `overheads`: DDP's own cost where it was measured; `ddp_factor` multiplies all of it;
    `host_factor` multiplies everything that the host does.
    """
    context = StrategyContext(scenario, model, overheads, ddp_factor, host_factor)
    if ddp:
        strategy = without_backward(context) if evaluates else select(context)
    else:
        strategy = without_data_parallelism(context, warmup)
    is_gloo = scenario.ddp.backend == "gloo"
    return Program(
        strategy,
        warmup=strategy.warmup,
        iterations=ceil(scenario.run.iterations / strategy.period) * strategy.period,
        loader=_loader(scenario),
        blocking=scenario.cluster.device.kind == "cpu",
        comm_workers=2 if is_gloo else 1,
        comm_spins=not is_gloo,
    )


def _loader(scenario: Scenario) -> Loader | None:
    data = scenario.workload.data
    if data is None:
        return None
    batch_s = scenario.workload.batch_per_rank / data.rate_samples_per_s
    return Loader(to_ns(batch_s), data.workers * data.prefetch)


def training_of(
    scenario: Scenario, model: Model, step_s: float, pauses: tuple[Pause, ...] = ()
) -> Training:
    """The arithmetic around a step of `step_s`, and pauses between steps."""
    workload, steps = scenario.workload, scenario.ddp.accumulation_steps
    ranks, batch = scenario.cluster.world_size, workload.batch_per_rank
    if scenario.cluster.algorithm == "data_parallel":  # one process deals its batch out
        ranks, batch = 1, batch * ranks
    whole, tokens = ranks * batch * steps, workload.tokens_per_sample
    epoch, rate = None, None
    if data := workload.dataset:
        drops = data.drop_last
        whole_s = step_s + paused_s(pauses)
        epoch = epoch_of(data.samples, ranks, batch, steps, drop_last=drops, step_s=whole_s)
    if base := workload.learning_rate:
        warmup = None if epoch is None else ceil(base.warmup_epochs * epoch.steps)
        rate = learning_rate_of(base.base_batch, whole, base.value, warmup)
    return Training(
        global_batch=whole,
        micro_batch=workload.batch_per_rank,
        accumulation_steps=steps,
        tokens_per_s=None if tokens is None else whole * tokens / step_s,
        mfu=mfu_of(scenario, model, step_s),
        epoch=epoch,
        learning_rate=rate,
        pauses=pauses,
    )


def mfu_of(scenario: Scenario, model: Model, step_s: float) -> float | None:
    """MFU by the model's FLOPs and the peak of its arithmetic; None where devices differ."""
    cluster = scenario.cluster
    if model.flops is None or any(other.device for other in (cluster.other_nodes or {}).values()):
        return None
    rate = arithmetic_of(scenario.workload.precision, cluster.device).rate
    flops = model.flops * scenario.ddp.accumulation_steps
    return flops / (step_s * cluster.device.peak_flops_per_s[rate])


def device_warnings(scenario: Scenario, model: Model, step_s: float) -> Iterator[str]:
    """Warns of a machine with another device, of NICs left out, and of more than the peak."""
    cluster = scenario.cluster
    if cluster.machine and are_other_devices(cluster.machine.device, cluster.device.name):
        yield (
            f"cluster.machine: {cluster.machine.name} has {cluster.machine.device}; its links are "
            f"taken for {cluster.device.name}"
        )
    yield from _one_nic_of_many(cluster)
    mfu = mfu_of(scenario, model, step_s)
    if not mfu or mfu <= 1 or cluster.device.kind != "gpu":
        return
    if is_bound_by_peak(scenario):
        yield (
            f"MFU {mfu:.0%}: the device would do more than its peak; look at step_time (of one "
            "micro-batch), batch_per_rank and precision"
        )
    else:
        rate = arithmetic_of(scenario.workload.precision, cluster.device).rate
        yield f"MFU {mfu:.0%} is of the {rate} peak; convolutions run in TF32 above it"


def is_bound_by_peak(scenario: Scenario) -> bool:
    """Whether no MFU exceeds 1: on a GPU whose convolutions are no faster than its products."""
    device = scenario.cluster.device
    arithmetic = arithmetic_of(scenario.workload.precision, device)
    return device.kind == "gpu" and arithmetic.convolution_rate(device) == arithmetic.rate


def _one_nic_of_many(cluster: Cluster) -> Iterator[str]:
    """Warns of one stated NIC for many GPUs where the device's usual machine has several."""
    stated, usual = cluster.inter_node, cluster.device.inter_node
    link = cluster.link("inter_node")
    if cluster.machine or cluster.nodes == 1 or not (stated and usual):
        return
    if not isinstance(link, InterNode):
        return
    rate, usual_rate = stated.bandwidth_bytes_per_s, usual.bandwidth_bytes_per_s
    if not rate or not usual_rate or "nics_per_node" in stated.model_fields_set:
        return
    gpus, nics = round(cluster.gpus_per_node * link.shared_by), usual.nics_per_node
    is_a_nic = rate >= _NIC_BYTES_PER_S and link.transport != "tcp"
    is_little = is_a_nic and rate <= _LITTLE * usual_rate * min(nics, gpus)
    if (rate >= usual_rate or is_little) and nics > 1 and gpus > 1:
        yield (
            f"cluster.inter_node: one NIC of {format_bytes_per_s(rate)} serves all {gpus} GPUs of "
            f"a node; machines with {cluster.device.name} have {nics} x "
            f"{format_bytes_per_s(usual_rate)}: state nics_per_node"
        )


def loop_provenance(scenario: Scenario) -> Iterator[Provenance]:
    """Tells the origin of the rates between host and device."""
    workload, staged = scenario.workload, format_bytes_per_s(STAGED_BYTES_PER_S)
    if copied := workload.input_copy:
        rate = format_bytes_per_s(input_rate(copied, scenario.cluster.device))
        buffer = "" if copied.pinned else f", after {staged} into a staging buffer (assumed)"
        if copied.bandwidth_bytes_per_s:
            yield Provenance("workload.input_copy", f"{rate}{buffer}", "stated")
        else:
            yield Provenance("workload.input_copy", f"{rate}, {_HOST_LINK}{buffer}", "assumed")
    if scenario.copies_through_host:
        link = format_bytes_per_s(scenario.cluster.device.host_link_bytes_per_s)
        yield Provenance("gloo's copies to the host and back", f"{link}, {_HOST_LINK}", "assumed")
    if workload.checkpoint_write and scenario.cluster.device.kind == "gpu":
        copied_to = f"{staged} from the device to its host, before what the storage takes"
        yield Provenance("workload.checkpoint_write", copied_to, "assumed")


def pauses_of(job: Job) -> tuple[Pause, ...]:
    """Evaluations and checkpoints, which come between steps now and then."""
    return (*_evaluations(job), *_checkpoints(job))


def _evaluations(job: Job) -> Iterator[Pause]:
    """The evaluation, if any: each rank's batches without gradients, as torch deals them out."""
    scenario = job.scenario
    if not (evaluation := scenario.workload.evaluation):
        return
    program = compile_program(
        scenario, job.model, job.overheads, evaluates=True, ddp_factor=job.ddp_times
    )
    a_rank = ceil(evaluation.samples / scenario.cluster.world_size)
    batches = ceil(a_rank / scenario.workload.batch_per_rank)
    time_s = batches * replace(job, program=program).step_s()
    yield Pause("evaluation", evaluation.every, time_s, batches=batches)


def _checkpoints(job: Job) -> Iterator[Pause]:
    """Ranks of one copy of the model save their parts: to the host, then to storage or a node."""
    scenario = job.scenario
    if not (write := scenario.workload.checkpoint_write):
        return
    cluster = scenario.cluster
    writers, model = scenario.sharding_ranks if scenario.ddp.shards_model else 1, job.model
    state_bytes = optimizer_state_bytes(scenario.workload.optimizer, model.used)
    buffers_bytes = sum(buffer.size_bytes for buffer in model.buffers)
    computed_bytes = (model.gradient_bytes + state_bytes) / writers + buffers_bytes
    size_bytes = round(write.size_bytes or computed_bytes)
    nic_bytes_per_s = _node_bytes_per_s(job)
    moved_s = _moved_s(write, size_bytes, writers, cluster.gpus_per_node, nic_bytes_per_s)
    read_s = _moved_s(write, size_bytes, cluster.world_size, cluster.gpus_per_node, nic_bytes_per_s)
    copied_s = 0.0 if cluster.device.kind == "cpu" else size_bytes / STAGED_BYTES_PER_S
    pause = Pause("checkpoint", 1, copied_s + moved_s, size_bytes=size_bytes, read_s=read_s)
    if write.mode != "sync":
        sent_bytes = size_bytes * min(writers, cluster.gpus_per_node)
        slowed_s = _slowed_s(job, sent_bytes / nic_bytes_per_s, moved_s)
        pause = replace(pause, time_s=copied_s + slowed_s, write_s=moved_s)
    yield replace(pause, every=_every(job, write.every, pause))


def _moved_s(
    write: CheckpointWrite, size_bytes: int, ranks: int, a_node: int, nic_bytes_per_s: float
) -> float:
    """Seconds of the slowest of rank, node and storage, if so many ranks write or read at once."""
    on_node = size_bytes * min(ranks, a_node)
    if write.mode == "neighbour":
        return on_node / (_SHARE_OF_NIC * nic_bytes_per_s)
    limits = (
        (size_bytes, write.bandwidth_bytes_per_s),
        (on_node, write.node_bandwidth_bytes_per_s),
        (size_bytes * ranks, write.total_bandwidth_bytes_per_s),
    )
    return max(sent / rate for sent, rate in limits if rate)


def _node_bytes_per_s(job: Job) -> float:
    """What all NICs of a node carry; infinite where no link between nodes is known."""
    link = job.scenario.cluster.link("inter_node")
    if not isinstance(link, InterNode) or not link.bandwidth_bytes_per_s:
        return inf
    return link.nics_per_node * link.bandwidth_bytes_per_s


def _slowed_s(job: Job, on_nic_s: float, moved_s: float) -> float:
    """How much longer steps take while a checkpoint is written: it has its part of the NICs."""
    share = min(on_nic_s / moved_s, _SHARE_OF_NIC) if moved_s else 0.0
    if not share or job.scenario.cluster.nodes == 1:
        return 0.0
    step_s = job.step_s()
    return moved_s * (job.step_s(network=1 / (1 - share)) / step_s - 1)


def _every(job: Job, every: int | Literal["auto"], pause: Pause) -> int:
    """The steps between checkpoints: as stated, or those at which the mean time is least."""
    reliability, cluster, step_s = job.scenario.reliability, job.scenario.cluster, job.step_s()
    if every != "auto" or reliability is None:
        return int(every)
    failures_per_s = reliability.crash_per_s(cluster.world_size, cluster.nodes)
    if (spot := reliability.spot) and spot.notice_s < pause.time_s + pause.write_s:
        failures_per_s += cluster.nodes * spot.per_node_s
    if not failures_per_s:
        raise InputError(
            "workload.checkpoint_write.every",
            "auto needs failures that lose work, and the notice is long enough to save; write a "
            "number of steps",
        )
    interval_s = best_interval_s(pause.time_s, 1 / failures_per_s)
    return max(1, round(interval_s / step_s), ceil(pause.write_s / step_s))


def cost_provenance(scenario: Scenario) -> Provenance:
    """What the strategy's own work is priced by."""
    ddp = scenario.ddp
    if ddp.is_ddp:
        reducer = "torch's reducer: kernels and bytes; host time per hook measured on CPU tensors"
        return Provenance("DDP's own cost", reducer, "published")
    if policy := ddp.host_copies:
        stated = policy.host_link_bytes_per_s
        link = format_bytes_per_s(stated or scenario.cluster.device.host_link_bytes_per_s)
        of_link = "as stated" if stated else _HOST_LINK
        optimizer = format_bytes_per_s(policy.host_optimizer_bytes_per_s)
        priced = f"copies at {link}, {of_link}; the host's optimizer at {optimizer}"
        name = "CPUOffload" if ddp.strategy == "fsdp1" else "CPUOffloadPolicy"
        return Provenance(name, priced, "stated" if stated else "assumed")
    if ddp.shards_model:
        hooks = "host time of its hooks measured on CPU tensors; copies by their bytes"
        return Provenance(f"cost of {ddp.strategy}", hooks, "published")
    call = f"{format_duration(PYTHON_COLLECTIVE_S)} a call of torch.distributed"
    counted = f"{format_duration(COUNTED_S)} of each hook for each parameter; "
    calls = (
        f"{counted if ddp.zero.counts_in_hooks else ''}{call}; copies and divisions by their bytes"
    )
    return Provenance(f"cost of {ddp.strategy}", calls, "assumed")
