"""Timeline to Result: the slowest rank's steady steps, in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from ddpsim.result.metrics import (
    BreakdownNs,
    Step,
    is_reduced,
    longest_wait,
    percentile,
    steps_of,
)
from ddpsim.result.model import (
    Bottleneck,
    Brief,
    BucketTimes,
    CollectiveTimes,
    CriticalPart,
    Distribution,
    Memory,
    Result,
)
from ddpsim.result.timeline import CommSpan, Timeline
from ddpsim.units import NS_PER_S, format_duration

# of the compute: a cause that costs less would shorten the step less than compute 10 % faster
_WORTH_NAMING = 1 - 1 / 1.1
_NEARLY_ALL = 0.95  # of a wait
_PACED = 1e-4  # of a step: rounding, over all of them


@dataclass(frozen=True)
class Context:
    """What a result needs of its job, beside the timeline and the figures that it takes over.

    `network` names what limits a collective, `broadcast` what is sent before the forward, `reduced`
    what an all-reduce of gradients sends. `ranks_of`: the ranks of a rank's group, in words.
    `names`: of the first and the last parameter of each bucket. `batches_s`: in which a loader
    makes those of a step; 0: there is none.
    `network_saves_s`: by how much a step is shorter where the network takes no time;
    `host_saves_s`: where the host takes none.
    """

    samples_per_rank: int
    world_size: int
    compute_only_s: float
    memory: Memory
    network: Callable[[CommSpan], str]
    broadcast: str
    reduced: str
    ranks_of: Callable[[str, int], str]
    knows_warmup: bool
    names: Mapping[int, tuple[str, str]]
    optimizes_on_host: bool
    network_saves_s: Callable[[], float]
    host_saves_s: Callable[[], float]
    batches_s: float


@dataclass(frozen=True)
class SteadyStep:
    """The slowest rank's steady steps: the length of each, and ticks summed over all of them."""

    lengths_ns: Sequence[int]
    comm_ns: int
    exposed_ns: int

    @classmethod
    def of(cls, timeline: Timeline) -> SteadyStep:
        """Takes the figures of a timeline."""
        steps = steady_steps(timeline)
        exposed_ns = sum(step.breakdown().exposed_comm for step in steps)
        comm_ns = sum(step.comm_ns() for step in steps)
        return cls([step.length_ns for step in steps], comm_ns, exposed_ns)

    @property
    def mean_s(self) -> float:
        """Mean length, in seconds."""
        return sum(self.lengths_ns) / len(self.lengths_ns) / NS_PER_S

    @property
    def exposed_s(self) -> float:
        """Mean exposed communication, in seconds."""
        return self.exposed_ns / len(self.lengths_ns) / NS_PER_S

    def brief(
        self, samples_per_rank: int, world_size: int, compute_only_s: float, memory: Memory
    ) -> Brief:
        """The figures of the step, in seconds."""
        count = len(self.lengths_ns)
        lengths_s = [length_ns / NS_PER_S for length_ns in self.lengths_ns]
        times = Distribution(self.mean_s, *(percentile(lengths_s, p) for p in (10, 50, 90)))
        per_gpu = samples_per_rank / times.mean
        return Brief(
            times,
            throughput_samples_per_s=per_gpu * world_size,
            throughput_per_gpu=per_gpu,
            scaling_efficiency=compute_only_s / times.mean,
            comm_time_s=self.comm_ns / count / NS_PER_S,
            exposed_comm_s=self.exposed_s,
            world_size=world_size,
            memory_bytes_per_gpu=memory,
        )


def steady_steps(timeline: Timeline) -> list[Step]:
    """The slowest rank's steady steps; those that repeat exactly are the same one again."""
    return _steps(timeline)[1]


def _steps(timeline: Timeline) -> tuple[list[Step], list[Step]]:
    """The slowest rank's warm-up, and its steady steps."""
    steps = steps_of(timeline.slowest)
    return steps[: timeline.warmup], steps[timeline.warmup :] + steps[-1:] * timeline.repeats


def lengths_ns(timeline: Timeline) -> list[int]:
    """Ticks of each steady step on the slowest rank."""
    lengths = [end - begin for begin, end in pairwise([0, *timeline.slowest.step_ends_ns])]
    return lengths[timeline.warmup :] + lengths[-1:] * timeline.repeats


def mean_step_s(timeline: Timeline) -> float:
    """Mean length of the steady steps on the slowest rank, in seconds."""
    return SteadyStep(lengths_ns(timeline), 0, 0).mean_s


def spread_of_means(timeline: Timeline, steps: int) -> tuple[float, float]:
    """10th and 90th percentile of the mean over so many steady steps, in seconds."""
    lengths = lengths_ns(timeline)
    starts = range(0, len(lengths), steps)
    means_s = [sum(lengths[i : i + steps]) / steps / NS_PER_S for i in starts]
    return percentile(means_s, 10), percentile(means_s, 90)


def summarise(timeline: Timeline, context: Context, **figures: Any) -> Result:
    """Build the result of a simulation; `figures`: those of it that no timeline holds."""
    slowest = timeline.slowest_rank
    warmup, steady = _steps(timeline)
    most = max(len(step.comm) for step in steady)  # some strategies send nothing in others
    communicating = typical_step([step for step in steady if len(step.comm) == most])
    breakdown = sum((step.breakdown() for step in steady), BreakdownNs())
    lengths, comm_ns = [step.length_ns for step in steady], sum(step.comm_ns() for step in steady)
    brief = SteadyStep(lengths, comm_ns, breakdown.exposed_comm).brief(
        context.samples_per_rank, context.world_size, context.compute_only_s, context.memory
    )
    shown_warmup = warmup if context.knows_warmup else []
    return Result(
        **{field.name: getattr(brief, field.name) for field in fields(Brief)},
        **figures,
        prediction_interval_s=None,
        breakdown_s=breakdown.seconds(len(steady)),
        skew_s=_mean(sum(step.skew_ns() for step in steady), steady),
        overlap_fraction=1 - brief.exposed_comm_s / brief.comm_time_s if comm_ns else None,
        buckets=_buckets(communicating, context.names),
        bottleneck=_bottleneck(breakdown, slowest, timeline.late_peers_ns, steady, context),
        critical_path=tuple(
            CriticalPart(link.kind, link.start_ns / NS_PER_S, link.end_ns / NS_PER_S)
            for link in typical_step(steady).critical_path()
        ),
        stragglers=(),
        warmup_s=tuple(step.length_ns / NS_PER_S for step in shown_warmup),
        next_steps=(),
        collectives=_collectives(communicating, lambda group: context.ranks_of(group, slowest)),
    )


def typical_step(steps: list[Step]) -> Step:
    """The step of median length (the lower of the two in the middle)."""
    return sorted(steps, key=lambda step: step.length_ns)[(len(steps) - 1) // 2]


def _mean(ticks: int, steps: list[Step]) -> float:
    return ticks / len(steps) / NS_PER_S


def _buckets(step: Step, names: Mapping[int, tuple[str, str]]) -> tuple[BucketTimes, ...]:
    """Buckets of the last backward, where every micro-batch reduces its gradients.

    A bucket may take several all-reduces, the last of which alone counts its parameters.
    """
    origin_ns = step.backward_start_ns
    first: dict[int, CommSpan] = {}
    last: dict[int, CommSpan] = {}
    for span in _launched(step):
        if span.bucket >= 0:
            goes_on = span.bucket in last and not last[span.bucket].num_params
            first[span.bucket] = first[span.bucket] if goes_on else span
            last[span.bucket] = span
    return tuple(
        BucketTimes(
            index=index,
            size_bytes=span.size_bytes,
            num_params=span.num_params,
            ready_s=(first[index].ready_ns - origin_ns) / NS_PER_S,
            start_s=(first[index].met_ns - origin_ns) / NS_PER_S,
            end_s=(span.end_ns - origin_ns) / NS_PER_S,
            **dict(zip(("first", "last"), names.get(index, ()), strict=False)),
        )
        for index, span in sorted(last.items())
    )


def _collectives(step: Step, ranks_of: Callable[[str], str]) -> tuple[CollectiveTimes, ...]:
    origin_ns = step.start_ns
    return tuple(
        CollectiveTimes(
            operation=span.operation,
            size_bytes=span.wire_bytes,
            group=ranks_of(span.group),
            cause=span.cause,
            ready_s=(span.ready_ns - origin_ns) / NS_PER_S,
            start_s=(span.met_ns - origin_ns) / NS_PER_S,
            end_s=(span.end_ns - origin_ns) / NS_PER_S,
        )
        for span in _launched(step)
    )


def _launched(step: Step) -> list[CommSpan]:
    """Collectives of a step in the order of their launch; those of gloo may end in another."""
    return sorted(step.comm, key=lambda span: span.number)


def _bottleneck(
    breakdown: BreakdownNs,
    slowest: int,
    late_peers_ns: Sequence[int],
    steps: list[Step],
    context: Context,
) -> Bottleneck:
    """What would shorten the step most: the largest cost, if more than compute 10 % faster saves.

    A loader that every step waits for, or whose batches take as long as a step, sets the pace,
    whatever else is longer. Communication costs no more than the step would save without it: the
    rest is time that the host needs anyway. A rank that is always the slowest waits for nobody: its
    cost shows on the others, on the median one where half of the ranks are slow.
    """
    whole, late_ns = breakdown.total, late_peers_ns[slowest]
    waiting_ns = sorted(late_peers_ns)[len(late_peers_ns) // 2] - late_ns
    copies_ns = sum(step.input_copies_ns() for step in steps)
    causes = {
        "communication": breakdown.exposed_comm - late_ns,
        "stragglers": max(waiting_ns, late_ns),
        "data": breakdown.data_wait,
        "inputs": copies_ns,
        "host": sum(step.host_bound_ns() for step in steps),
        "optimizer": breakdown.optimizer if context.optimizes_on_host else 0,
    }
    causes["host"] = _idle_for_host_ns(causes, len(steps), context)
    hides_host_ns = _host_beside_network_ns(causes, len(steps), context)
    causes["communication"] -= hides_host_ns
    causes["host"] += hides_host_ns
    waits_for_data = _waits_for_data(breakdown, steps, context)
    kind = "data" if waits_for_data else max(causes, key=lambda cause: causes[cause])
    share = causes[kind] / whole
    compute = breakdown.forward + breakdown.backward_compute + breakdown.optimizer
    if causes[kind] < _WORTH_NAMING * compute and not waits_for_data:
        return Bottleneck("compute", f"compute takes {compute / whole:.1%} of the step")
    cost = f"{format_duration(_mean(causes[kind], steps))} a step ({share:.1%})"
    if kind == "communication":
        return Bottleneck("communication", f"{_exposed(steps, context)}{cost}")
    if kind == "stragglers":
        one = f"rank {slowest} is last: the median rank waits {cost}"
        in_turns = f"ranks are late in turns: each waits for others {cost}"
        return Bottleneck("stragglers", in_turns if late_ns > waiting_ns else one)
    if kind in ("inputs", "data"):
        paced = f"the batches of a step take {format_duration(context.batches_s)}"
        waits = f"the data loader: {f'no batch is ready for {cost}' if causes['data'] else paced}"
        copies = f"the inputs' copies to the device take {cost}"
        return Bottleneck("data", copies if kind == "inputs" else waits)
    if kind == "optimizer":
        return Bottleneck("host", f"the host's optimizer takes {cost}")
    halts = any(span.kind == "device_wait" for step in steps for span in step.host)
    late = "waits for the device, and launches late after it" if halts else "launches too slowly"
    hidden = ", communication or not" if hides_host_ns else ""
    return Bottleneck("host", f"the host {late}: the device idles {cost}{hidden}")


def _idle_for_host_ns(causes: Mapping[str, int], steps: int, context: Context) -> int:
    """What the device idles for its host; beside a busy network, what a host of no time saves."""
    idle_ns, exposed_ns = causes["host"], causes["communication"]
    if not exposed_ns <= idle_ns < 2 * exposed_ns:
        return idle_ns
    return min(idle_ns, max(0, round(steps * context.host_saves_s() * NS_PER_S)))


def _host_beside_network_ns(causes: Mapping[str, int], steps: int, context: Context) -> int:
    """Time in all steps' exposed communication that the host needs anyway to catch up."""
    exposed_ns = causes["communication"]
    if not causes["host"] or exposed_ns < max(causes.values()):
        return 0
    saved_s = max(0.0, min(context.network_saves_s(), exposed_ns / NS_PER_S))
    return max(0, exposed_ns - round(steps * saved_s * NS_PER_S))


def _waits_for_data(breakdown: BreakdownNs, steps: list[Step], context: Context) -> bool:
    """Whether every step waits for its batch, or takes as long as the loader needs for one."""
    if not context.batches_s:
        return False
    mean_s = _mean(sum(step.length_ns for step in steps), steps)
    if abs(mean_s - context.batches_s) <= _PACED * context.batches_s:
        return True
    return bool(breakdown.data_wait) and all(step.breakdown().data_wait for step in steps)


def _exposed(steps: list[Step], context: Context) -> str:
    """What limits the kind of collective that steps wait for longest, and what part of the wait."""
    kinds: dict[str, list[Step]] = {}
    for step in (step for step in steps if step.exposed_ns(step.comm)):
        collective = longest_wait(step, context.broadcast, context.reduced).longest
        of_gradients = is_reduced(collective, context.reduced)
        kinds.setdefault(context.reduced if of_gradients else collective.cause, []).append(step)
    longest = max(kinds.values(), key=lambda those: sum(s.exposed_ns(s.comm) for s in those))
    wait = longest_wait(typical_step(longest), context.broadcast, context.reduced)
    share = f"{wait.share:.0%} of " if wait.share < _NEARLY_ALL else ""
    return f"{context.network(wait.longest)}: {wait.words}, {share}"
