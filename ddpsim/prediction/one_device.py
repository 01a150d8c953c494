"""A step on one device alone: what DDP's own work takes there, and the naive answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from ddpsim.cluster.cost import SingleRankCost
from ddpsim.cluster.process_groups import cost_of
from ddpsim.cluster.transfers import ProcessGroup, duration_ns
from ddpsim.engine.program import Program
from ddpsim.engine.request import Request
from ddpsim.engine.run import run_settled, settled
from ddpsim.errors import InputError
from ddpsim.prediction.program import compile_program
from ddpsim.result.metrics import steps_of
from ddpsim.result.model import Baselines
from ddpsim.result.summary import mean_step_s
from ddpsim.result.timeline import Timeline
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.workload import NO_LONGER_WITH_DDP
from ddpsim.units import NS_PER_S
from ddpsim.workload.model import Model, Work

if TYPE_CHECKING:
    from ddpsim.prediction.job import Job
    from ddpsim.strategies.instructions import Communicate

_MOST = 1024.0  # times as long as priced
_CLOSE_S = 1e-9
_TRIES = 100
_SHARD_THE_OPTIMIZER = (
    *("zero1", "deepspeed", "distributed_optimizer"),
    *("fully_shard", "hsdp", "fsdp1", "parameter_server"),
)


def on_one_rank(program: Program, *, tells: bool = True) -> Timeline:
    """Steady steps of a rank that is alone, and never waits for data.

    Without `tells` the timeline may hold only the moments at which steps begin and end.
    """
    alone = Request(replace(program, loader=None, iterations=2), SingleRankCost(), 1)
    return run_settled(settled(alone), tells=tells).timeline


def as_measured(ddp: Ddp) -> Ddp:
    """The options with which a step under DDP on one device is measured: none is tuned."""
    return ddp.having(
        strategy="ddp",
        zero1=None,
        bucket_cap_mb=None,
        gradient_as_bucket_view=False,
        comm_hook="none",
        join=None,
        accumulation_steps=1,
    )


def times_as_priced(
    program_with: Callable[[float], Program], bare: Program, measured_s: float, key: str
) -> float:
    """The ratio of DDP's own work in a measured step to what it is priced at.

    `program_with(f)`: the loop with a ratio of f; `bare`: the loop without DDP. 0 where launching
    the collectives alone makes the step as long. Raises InputError, at the scenario's `key`, for a
    step that is no longer than without DDP, or longer than with a ratio of 1024.
    """

    @cache
    def step_s(times: float) -> float:
        return mean_step_s(on_one_rank(program_with(times).steady(), tells=False))

    low, high = 0.0, 1.0
    while step_s(high) < measured_s:
        low, high = high, 2 * high
        if high > _MOST:
            raise InputError(
                key,
                f"{measured_s:g} s cannot be DDP's own work, which would take over {_MOST:g} times "
                "as long as it is priced; is it the step of one device alone?",
            )
    if measured_s <= mean_step_s(on_one_rank(bare, tells=False)):
        raise InputError(key, f"{measured_s:g} s {NO_LONGER_WITH_DDP}")
    if step_s(low) > measured_s:
        return 0.0
    return _crossing(step_s, measured_s, low, high)


def _crossing(step_s: Callable[[float], float], wanted_s: float, low: float, high: float) -> float:
    """Finds the argument of a step as long as wanted; the step grows with it, mostly linearly."""
    low_s, high_s = step_s(low), step_s(high)
    middle = high
    for attempt in range(_TRIES):
        if high_s - low_s <= _CLOSE_S:
            break
        share = (wanted_s - low_s) / (high_s - low_s) if attempt % 2 == 0 else 0.5
        middle = low + share * (high - low)
        middle_s = step_s(middle)
        if abs(middle_s - wanted_s) <= _CLOSE_S:
            break
        if middle_s < wanted_s:
            low, low_s = middle, middle_s
        else:
            high, high_s = middle, middle_s
    return middle


def baselines(job: Job) -> Baselines:
    """Seconds of a step by compute alone, with all communication after it, and with all hidden.

    The last is the least a step can take. A host that is behind catches up while its device waits
    for communication, so what that adds is counted from a step without the host. An optimizer that
    runs beside the backward is hidden too.
    """
    optimizer, ddp = _of_a_rank(job), job.scenario.ddp
    bare = _timeline(job, optimizer)
    if ddp.overlaps_optimizer or ddp.optimizer_in_backward:
        optimizer = Work(0.0)
    host = 1.0 if job.program.blocking else 0.0
    least, device = _timeline(job, optimizer), _timeline(job, optimizer, host=host, tells=True)
    comm_ns = Counter[ProcessGroup]()  # groups may send at once
    for each in (*job.sent, *_sent_back(job)):
        transfer = cost_of(job.network.cost, each.group).transfer(each.operation, each.size_bytes)
        comm_ns[each.group] += duration_ns(transfer)
    steps = job.program.strategy.period * NS_PER_S
    longest_s = max(comm_ns.values(), default=0) / steps
    uncovered_s = max(0.0, longest_s - _covering_ns(job, device) / NS_PER_S)
    compute_s, least_s, device_s = map(mean_step_s, (bare, least, device))
    all_s = compute_s + sum(comm_ns.values()) / steps
    return Baselines(compute_s, all_s, max(least_s, device_s + uncovered_s))


def bare_timeline(job: Job, compute: float = 1.0, host: float = 1.0) -> Timeline:
    """The step of one device, without DDP and without a loader, and with a rank's own optimizer.

    `compute` and `host`: factors on the model's work, and on all that the host does.
    """
    return _timeline(job, _of_a_rank(job), compute, host)


def _timeline(
    job: Job, optimizer: Work, compute: float = 1.0, host: float = 1.0, *, tells: bool = False
) -> Timeline:
    """Simulate a job on one rank; jobs that differ in their network alone share it."""
    model = replace(job.model, optimizer=optimizer)
    model = model if compute == 1 else model.stretched(compute)
    if job.parts is None:
        return on_one_rank(_alone(job, model, host), tells=tells)
    variant = optimizer, compute, host, tells
    program = partial(_alone, job, model, host)
    return job.parts.alone(job, variant, lambda: on_one_rank(program(), tells=tells))


def _alone(job: Job, model: Model, host: float = 1.0) -> Program:
    warmup = job.program.strategy.warmup
    return compile_program(
        job.scenario, model, job.overheads, ddp=False, host_factor=host, warmup=warmup
    )


def _of_a_rank(job: Job) -> Work:
    """The work of a rank's optimizer: of its share where the optimizer is sharded."""
    if job.scenario.ddp.strategy not in _SHARD_THE_OPTIMIZER:
        return job.model.optimizer
    share = _optimizer(job.program)
    if not 0 < share.device_s < _optimizer(_alone(job, job.model)).device_s:
        return job.model.optimizer  # the host's, or that of a hook
    return share


def _optimizer(program: Program) -> Work:
    """The work of a rank's optimizer in a steady step."""
    every = (work for step in program.steady_period for work in step.works)
    works = [work for work in every if work.kind == "optimizer"]
    steps = program.strategy.period * NS_PER_S
    device_ns, host_ns = sum(work.device_ns for work in works), sum(work.host_ns for work in works)
    return Work(device_ns / steps, 0, host_ns / steps)


def _sent_back(job: Job) -> list[Communicate]:
    """The broadcasts of updated parameters in a period: ZeRO-1's, and those of servers."""
    launched = (each for step in job.program.steady_period for each in step.sent)
    of_optimizer = (each for each in launched if each.operation == "broadcast")
    return [each for each in of_optimizer if "parameter" in each.cause]


def _covering_ns(job: Job, bare: Timeline) -> float:
    """The time that may hide communication: backwards that reduce; all passes that gather."""
    step, sent = steps_of(bare.slowest)[-1], job.sent
    gathers = any(each.operation == "all_gather" and each.bucket < 0 for each in sent)
    if gathers or _sent_back(job):
        parts = step.breakdown()
        return parts.forward + parts.backward_compute
    backwards = sum(launched.bucket == 0 and launched.num_params > 0 for launched in sent)
    return backwards / job.program.strategy.period * step.backward_ns()
