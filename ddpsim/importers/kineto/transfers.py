"""Collectives of several ranks, aligned: what each takes once all ranks have joined it.

The rank that joins a collective last waits for nobody: its time is the transfer's, and what the
others take longer is their wait. Ranks leave a collective together, which tells how far their
clocks are apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ddpsim.importers.kineto.measured import KinetoStep, MeasuredCollective

Ranks = Mapping[int, Sequence[KinetoStep]]  # the same steps of each rank


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
    """Of each step, in the order of their ends; those that every rank recorded."""
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
