"""Traces of several ranks of one job, aligned by their steps and by their collectives.

The rank that joins a collective last waits for nobody: its time is the transfer's, and what the
others take longer is their wait. Ranks leave a collective together, which tells how far their
clocks are apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.kineto.measured import KinetoStep, MeasuredCollective
from ddpsim.importers.kineto.trace import KinetoTrace, read_trace
from ddpsim.scenario.quantity import SourceFile

_SUFFIXES = (".json", ".json.gz")
_SLOWER = 1.08  # times the others' compute: GPUs of a kind differ by 1.5 % (published)

Ranks = Mapping[int, Sequence[KinetoStep]]  # the same steps of each rank


@dataclass(frozen=True)
class RankTraces:
    """What the traces of a job's ranks say together, in seconds; medians over steps.

    `steps`: by rank, those that every rank recorded; `transfers`: of each of them.
    """

    source: str
    world_size: int | None
    traces: Mapping[int, KinetoTrace]
    steps: Mapping[int, tuple[KinetoStep, ...]]
    transfers: tuple[tuple[Transfer, ...], ...]

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the job was recorded."""
        return len(self.traces) == (self.world_size or 1)

    @property
    def on_gpu(self) -> bool:
        """Whether all are of GPUs."""
        return all(trace.on_gpu for trace in self.traces.values())

    @cached_property
    def _every(self) -> list[KinetoStep]:
        return [step for of_rank in self.steps.values() for step in of_rank]

    @property
    def step_s(self) -> float:
        """Of all ranks and steps."""
        return median(step.length_s for step in self._every)

    @property
    def data_wait_s(self) -> float:
        """The wait for a batch, of all ranks and steps."""
        return median(step.loader_s for step in self._every)

    @property
    def exposed_s(self) -> float:
        """Collectives with no compute of the model under way; on a CPU the main thread's waits.

        Of usual ranks: one that is slow waits for nobody.
        """
        slow = self.straggler[0] if self.straggler else None
        usual = [step for rank, steps in self.steps.items() if rank != slow for step in steps]
        if self.on_gpu:
            return median(
                max(0.0, sum(each.duration_s for each in step.collectives) - step.beside_comm_s)
                for step in usual
            )
        return median(step.parts.exposed_comm for step in usual)

    @property
    def looks_for_unused(self) -> bool:
        """Whether DDP reduces its map of used parameters: an int32 of each."""
        return any(
            each.operation == "all_reduce"
            and each.dtype == "int32"
            and each.elements == len(step.gradients)
            for step in self._every
            for each in step.collectives
        )

    @property
    def reads_values(self) -> bool:
        """Whether the host waits in every step to read a value from the device."""
        return all(step.reads for step in self._every)

    @cached_property
    def compute_s(self) -> dict[int, float]:
        """By rank, its own work of a step."""
        return {rank: median(s.busy_s for s in of_rank) for rank, of_rank in self.steps.items()}

    @property
    def typical_rank(self) -> int:
        """The rank whose work is the median one."""
        order = sorted(self.traces, key=lambda rank: self.compute_s[rank])
        return order[(len(order) - 1) // 2]

    @property
    def typical(self) -> KinetoTrace:
        """The trace of that rank."""
        return self.traces[self.typical_rank]

    @property
    def busy_s(self) -> tuple[tuple[float, ...], ...]:
        """Each rank's own work in each step, [step][rank]."""
        return tuple(
            zip(*([s.busy_s for s in of_it] for of_it in self.steps.values()), strict=True)
        )

    @property
    def straggler(self) -> tuple[int, float] | None:
        """The rank that computes longer than the others, and how many times: always.

        In every micro-batch of every step. None: there is no such rank.
        """
        if len(self.compute_s) < 2:
            return None
        slowest = max(self.compute_s, key=lambda rank: self.compute_s[rank])
        others = [seconds for rank, seconds in self.compute_s.items() if rank != slowest]
        times = self.compute_s[slowest] / median(others) if median(others) else 1.0
        place = list(self.steps).index(slowest)
        is_always = all(
            micro[place].busy_s == max(each.busy_s for each in micro)
            for steps in zip(*self.steps.values(), strict=True)
            for micro in zip(*(step.micro_batches for step in steps), strict=True)
        )
        return (slowest, times) if times > _SLOWER and is_always else None

    @property
    def interference(self) -> float | None:
        """How many times as long the same work takes beside a collective.

        None where nothing ran both ways, or noise hides it: a collective makes no work faster.
        """
        known = [trace.both_ways for trace in self.traces.values()]
        beside_s, alone_s = (sum(times) for times in zip(*known, strict=True))
        return beside_s / alone_s if beside_s > alone_s else None

    @property
    def all_reduces(self) -> tuple[tuple[int, float], ...]:
        """Bytes and time alone of each all-reduce of gradients, in the order of a step.

        None of a single rank, whose times hold its waits.
        """
        return self._reduced() if len(self.traces) > 1 else ()

    @property
    def points(self) -> dict[int, float]:
        """Seconds of an all-reduce by its bytes, alone on the links; of one rank with its waits."""
        by_size: dict[int, list[float]] = defaultdict(list)
        for each in (each for of_step in self.transfers for each in of_step):
            if each.operation == "all_reduce" and each.size_bytes and each.alone_s:
                by_size[each.size_bytes].append(each.alone_s)
        return {size: median(by_size[size]) for size in sorted(by_size)}

    def _reduced(self) -> tuple[tuple[int, float], ...]:
        found: dict[tuple[int, int], list[float]] = defaultdict(list)
        for each in (each for of_step in self.transfers for each in of_step):
            if each.of_gradients and each.size_bytes:
                found[each.size_bytes, each.number].append(each.alone_s)
        return tuple((size, median(times)) for (size, _), times in found.items())


def read_rank_traces(source: SourceFile) -> RankTraces:
    """Read a folder with one trace a rank, or one trace; raises ImportFailedError."""
    traces = _by_rank(source)
    sizes = {trace.world_size for trace in traces.values()}
    if len(sizes) > 1:
        raise ImportFailedError(
            source.given, "its traces are of jobs of different sizes; keep one job"
        )
    steps = _common_steps(source, traces)
    _check_alike(source, steps)
    found = tuple(map(tuple, transfers(steps)))
    return RankTraces(source.given, sizes.pop(), traces, steps, found)


def _by_rank(source: SourceFile) -> dict[int, KinetoTrace]:
    found: dict[int, KinetoTrace] = {}
    for file in files_of(source):
        trace = read_trace(file)
        rank = 0 if trace.rank is None else trace.rank
        if rank in found:
            raise ImportFailedError(file.given, f"is of rank {rank}, as {found[rank].source} is")
        found[rank] = trace
    return dict(sorted(found.items()))


def files_of(source: SourceFile) -> list[SourceFile]:
    """The traces of a folder, or the one trace; raises ImportFailedError where there is none."""
    if not source.path.is_dir():
        return [source]
    names = sorted(file.name for file in source.path.iterdir() if file.name.endswith(_SUFFIXES))
    if not names:
        raise ImportFailedError(
            source.given, f"holds no trace: no file ends in {' or '.join(_SUFFIXES)}"
        )
    return [SourceFile(str(Path(source.given) / name), source.path / name) for name in names]


def _common_steps(
    source: SourceFile, traces: Mapping[int, KinetoTrace]
) -> dict[int, tuple[KinetoStep, ...]]:
    """The steps that every rank recorded, by their names."""
    named = {rank: {s.name: s for s in trace.steps} for rank, trace in traces.items()}
    first = next(iter(named.values()))
    common = [name for name in first if all(name in steps for steps in named.values())]
    if not common:
        raise ImportFailedError(
            source.given, "its traces have no step in common; record the same steps on every rank"
        )
    return {rank: tuple(steps[name] for name in common) for rank, steps in named.items()}


def _check_alike(source: SourceFile, steps: Mapping[int, tuple[KinetoStep, ...]]) -> None:
    counts = {
        sum(each.of_gradients for each in step.collectives)
        for of_rank in steps.values()
        for step in of_rank
    }
    if len(steps) > 1 and len(counts) > 1:
        raise ImportFailedError(
            source.given,
            f"its steps hold {min(counts)} to {max(counts)} all-reduces of gradients; record whole "
            "steps of one job, alike on every rank",
        )


class Transfer(NamedTuple):
    """One collective of a step: from when the last rank had joined until it ended.

    `alone_s`: what it would have taken with no other in flight, each of which gets an equal part of
    the link. By rank, `late_s`: how long it had waited for the last one; `lag_s`: how long after
    the end it left; `delay_s`: how long a thread took to begin it. `number`: its place among those
    of its operation and size in the step.
    """

    operation: str
    size_bytes: int
    number: int
    of_gradients: bool
    start_s: float
    end_s: float
    alone_s: float
    late_s: dict[int, float]
    lag_s: dict[int, float]
    delay_s: dict[int, float]

    @property
    def duration_s(self) -> float:
        """From the last rank's joining to the end."""
        return self.end_s - self.start_s


def clocks_apart_s(ranks: Ranks) -> dict[int, float]:
    """How far each rank's clock is ahead of the first one's: 0 where nothing tells."""
    first = next(iter(ranks.values()))
    own = {key: each.end_s for step in enumerate(first) for key, each in _keyed(*step)}
    apart: dict[int, float] = {}
    for rank, steps in ranks.items():
        seen = [
            each.end_s - own[key]
            for step in enumerate(steps)
            for key, each in _keyed(*step)
            if key in own
        ]
        apart[rank] = median(seen) if seen else 0.0
    return apart


def transfers(ranks: Ranks) -> list[list[Transfer]]:
    """Transfers of each step that every rank recorded, in the order of their ends."""
    apart_s = clocks_apart_s(ranks)
    count = len(next(iter(ranks.values())))
    return [_of_step(number, ranks, apart_s) for number in range(count)]


def _of_step(step: int, ranks: Ranks, apart_s: Mapping[int, float]) -> list[Transfer]:
    seen: dict[tuple[object, ...], dict[int, MeasuredCollective]] = defaultdict(dict)
    for rank, steps in ranks.items():
        for key, each in _keyed(step, steps[step]):
            seen[key][rank] = each
    found = [
        _met(key[-1], by_rank, apart_s)  # type: ignore[arg-type]
        for key, by_rank in seen.items()
        if len(by_rank) == len(ranks)
    ]
    return _as_if_alone(sorted(found, key=lambda each: each.end_s))


def _keyed(
    number: int, step: KinetoStep
) -> Iterator[tuple[tuple[object, ...], MeasuredCollective]]:
    """Collectives by step, operation, size and their place among those."""
    seen: Counter[tuple[str, int]] = Counter()
    for each in sorted(step.collectives, key=lambda each: each.start_s):
        what = each.operation, each.size_bytes
        yield (number, *what, seen[what]), each
        seen[what] += 1


def _met(
    number: int, by_rank: Mapping[int, MeasuredCollective], apart_s: Mapping[int, float]
) -> Transfer:
    one = next(iter(by_rank.values()))
    shortest_s = min(each.duration_s for each in by_rank.values())
    begun_s = max(each.start_s - apart_s[rank] for rank, each in by_rank.items())
    left_s = min(each.end_s - apart_s[rank] for rank, each in by_rank.items())
    if one.operation == "all_reduce" and begun_s < left_s:  # clocks may be farther apart than told
        shortest_s = min(shortest_s, left_s - begun_s)
    end_s = begun_s + shortest_s
    return Transfer(
        *(one.operation, one.size_bytes, number, one.of_gradients, begun_s, end_s, shortest_s),
        late_s={rank: begun_s - each.start_s + apart_s[rank] for rank, each in by_rank.items()},
        lag_s={
            rank: max(0.0, each.end_s - apart_s[rank] - end_s) for rank, each in by_rank.items()
        },
        delay_s={rank: each.delay_s for rank, each in by_rank.items()},
    )


def _as_if_alone(found: Sequence[Transfer]) -> list[Transfer]:
    """Each gets an equal part of the link while several are in flight."""
    changes: Counter[float] = Counter()
    for each in found:
        changes[each.start_s] += 1
        changes[each.end_s] -= 1
    share_s: dict[float, float] = {}  # what one that was always in flight has got by then
    got_s, flying, before_s = 0.0, 0, 0.0
    for moment_s in sorted(changes):
        got_s += (moment_s - before_s) / flying if flying else 0.0
        share_s[moment_s], before_s = got_s, moment_s
        flying += changes[moment_s]
    return [each._replace(alone_s=share_s[each.end_s] - share_s[each.start_s]) for each in found]
