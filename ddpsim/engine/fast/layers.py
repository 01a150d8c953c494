"""Equal layers of a step, of which the first few tell when all others end.

A layer is a run of parts that comes again, as a transformer's blocks do. What it does follows from
a few moments before it. Once all of these stand as many ticks later than they stood a layer before,
all in the next layer is as much later too, and so on to the last: works take as long, and a
collective is the longest path through its messages. That holds as long as no host is late, whose
launches come as much later with each layer, or less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.cluster.transfers import ProcessGroup
from ddpsim.engine.fast.collectives import InFlight, Remembered
from ddpsim.engine.fast.evaluator import Evaluator
from ddpsim.engine.fast.slow_periods import SlowPeriods
from ddpsim.engine.fast.threads import Threads
from ddpsim.engine.fast.trials import TrialStep, TrialWork
from ddpsim.strategies.instructions import Await, Communicate, Compute, Record

_FEWEST, _LONGEST = 5, 64  # layers that are worth it; parts of one
_TIMES = 4  # that a part may come in one layer
_ALL = 2  # sorts of figures of a _Standing
_Part = TrialStep | TrialWork


class Layers(NamedTuple):
    """From part `begin` on, `times` times `length` parts that differ in their numbers alone.

    Each is launched `host_ns` after the one before, a number or [trials, 1]. It sends so many
    collectives, in these groups, and has so many Records, the first of which has the number
    `first_record`; `sent_back` and `recorded_back` are how far back it refers to earlier ones.
    """

    begin: int
    length: int
    times: int
    host_ns: Ticks | float
    sent: int
    recorded: int
    first_record: int
    groups: frozenset[ProcessGroup]
    sent_back: int
    recorded_back: int

    @property
    def end(self) -> int:
        """The part after the last."""
        return self.begin + self.length * self.times

    def records_of(self, number: int) -> range:
        """Numbers of the Records in one layer, which is counted from 0."""
        first = self.first_record + number * self.recorded
        return range(first, first + self.recorded)


class _Key(NamedTuple):
    """What a part is, equal where parts differ in their numbers alone, and how far it refers."""

    part: Hashable
    sent_back: int = 0
    recorded_back: int = 0


def layers_of(parts: Sequence[_Part]) -> tuple[Layers, ...]:
    """Find a step's runs of equal layers, which all trials have."""
    keys = list(_keys(parts))
    records = [0, *accumulate(isinstance(part.first, Record) for part in parts)]
    places: dict[_Key, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    runs, place = [], 0
    while place < len(keys):
        length, count = _longest_run(keys, place, places[keys[place]])
        if count < _FEWEST:
            place += 1
            continue
        runs.append(_layers(parts, keys, records, place, length, count))
        place = runs[-1].end
    return tuple(runs)


def _longest_run(keys: Sequence[_Key], place: int, alike: Sequence[int]) -> tuple[int, int]:
    """How long a layer is that begins here, and how often it comes one after the other."""
    longest = 1, 1
    first = bisect_left(alike, place)
    for later in alike[first + 1 : first + 1 + _TIMES]:
        length, count = later - place, 1
        if length > _LONGEST:
            break
        layer = keys[place:later]
        while keys[place + count * length : place + (count + 1) * length] == layer:
            count += 1
        longest = max(longest, (length, count), key=lambda run: run[0] * (run[1] - 1))
    return longest


def _layers(
    parts: Sequence[_Part],
    keys: Sequence[_Key],
    records: Sequence[int],
    begin: int,
    length: int,
    count: int,
) -> Layers:
    """`records`: how many there are before each part."""
    later = begin + length
    layer = [part.first for part in parts[begin:later]]
    sent = [each for each in layer if isinstance(each, Communicate)]
    return Layers(
        *(begin, length, count),
        host_ns=parts[later].offset_ns - parts[begin].offset_ns,
        sent=len(sent),
        recorded=records[later] - records[begin],
        first_record=records[begin],
        groups=frozenset(each.group for each in sent),
        sent_back=max(key.sent_back for key in keys[begin:later]),
        recorded_back=max(key.recorded_back for key in keys[begin:later]),
    )


def _keys(parts: Sequence[_Part]) -> Iterator[_Key]:
    """One that comes once for what a host waits in, and for marks."""
    sent, recorded = 0, 0
    last_ns: Ticks | float = 0.0
    for place, part in enumerate(parts):
        later_ns = part.offset_ns - last_ns
        after = later_ns if isinstance(later_ns, float) else later_ns.tobytes()
        last_ns = part.offset_ns
        match part.first:
            case Compute() if isinstance(part, TrialWork):
                offsets_ns = part.offsets_ns - part.offset_ns
                yield _Key((after, offsets_ns.tobytes(), part.device_ns.tobytes()))
            case Communicate() as first:
                waits_for = 0 if first.waits_for is None else recorded - first.waits_for
                follows = 0 if first.follows is None else sent - first.follows
                place_in_step = first.number - sent
                yield _Key((after, first.group, place_in_step, _sizes(part)), follows, waits_for)
                sent += 1
            case Await(number):
                yield _Key((after, Await), sent - number)
            case Record(number):
                yield _Key((after, Record, number - recorded))
                recorded += 1
            case _:
                yield _Key(place)


def _sizes(part: _Part) -> Hashable:
    """What each trial sends, and its own work around it."""
    each = part.each if isinstance(part, TrialStep) else ()
    sent = (launch for launch in each if isinstance(launch, Communicate))
    return tuple((i.operation, i.size_bytes, i.before_ns, i.after_ns) for i in sent)


class _Standing(NamedTuple):
    """The moments at which ranks stand after a layer.

    `figures`: all that later parts depend on, in ticks since `first_ns`, [trials, 1]: streams and
    what the layer refers to; then the rest, asked for where these stand as they did after the layer
    before. `counted`: how long ranks have waited in this step.
    """

    first_ns: Ticks
    figures: list[list[Ticks]]
    counted: Ticks

    def is_like(self, before: _Standing) -> bool:
        """Whether all stands as it did a layer before, but for one number of ticks."""
        return len(self.figures) == _ALL and self.stands_as(before)

    def stands_as(self, before: _Standing) -> bool:
        """Whether that holds of what was asked for last."""
        place = len(self.figures) - 1
        if place >= len(before.figures):
            return False
        ours, theirs = self.figures[place], before.figures[place]
        return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


class Layered(Evaluator):
    """An evaluator whose moments are [trials, ranks]. `_was_late`: a host's launch since then.

    `_counts`: how long ranks wait is asked: `_now`, in this step.
    """

    _shape: tuple[int, int]
    _comm: InFlight | Threads
    _slow: SlowPeriods
    _collectives: Remembered
    _counts: bool
    _now: Ticks
    _was_late = False

    def _but_for_equal(self, parts: Sequence[_Part], runs: Sequence[Layers]) -> Iterator[_Part]:
        """The parts of a step, without those of layers whose ends are known by earlier ones."""
        place = 0
        for layers in runs:
            yield from parts[place : layers.begin]
            yield from self._first_of(parts, layers)
            place = layers.end
        yield from parts[place:]

    def _first_of(self, parts: Sequence[_Part], layers: Layers) -> Iterator[_Part]:
        before: _Standing | None = None
        for number in range(layers.times):
            begin, self._was_late = layers.begin + number * layers.length, False
            yield from parts[begin : begin + layers.length]
            after = self._after(layers, number, before)
            if before and after.is_like(before):
                by_ns = after.first_ns - before.first_ns
                late_ns = layers.host_ns - by_ns
                if not (late_ns.any() if self._was_late else (late_ns > 0).any()):
                    waited_ns = after.counted - before.counted
                    self._go_on(layers, number, by_ns, waited_ns)
                    return
            before = after

    def _after(self, layers: Layers, number: int, before: _Standing | None) -> _Standing:
        """After so many layers and this one."""
        first_ns = self._stream_ns[:, :1]
        standing = _Standing(first_ns, [self._referred_to(layers, number)], self._counted())
        if before and standing.stands_as(before):
            standing.figures.append(self._to_come(layers))
        return standing

    def _referred_to(self, layers: Layers, number: int) -> list[Ticks]:
        """Streams, and the last Records and ends of collectives."""
        last = layers.records_of(number).stop
        seen = [self._stream_ns]
        seen += [self._recorded_ns[i] for i in range(last - layers.recorded_back, last)]
        sent = self._sent[len(self._sent) - max(1, layers.sent_back) :]
        seen += [collective.ends_ns for _, collective in sent]
        return [ns - self._stream_ns[:, :1] for ns in seen]

    def _go_on(self, layers: Layers, number: int, by_ns: Ticks, waited_ns: Ticks) -> None:
        """All layers after this one, each as long as it was."""
        left = layers.times - 1 - number
        sent = self._sent[len(self._sent) - layers.sent :]
        for later in range(1, left + 1):
            for launched, collective in sent:
                self._sent.append((launched, collective.later(later * by_ns)))
                self._collectives.add(self._sent[-1][1])
            for i in layers.records_of(number):
                moment_ns = self._recorded_ns[i] + later * by_ns
                self._recorded_ns[i + later * layers.recorded] = moment_ns
        self._stream_ns = self._stream_ns + left * by_ns
        self._put_off(layers, left * by_ns, left * waited_ns)

    def _counted(self) -> Ticks:
        """How long ranks have waited in this step, and been in collectives."""
        if not self._counts:
            return np.zeros(0)
        counted = self._now.copy()
        counted[0] = self._comm.comm_ns
        return counted

    def _to_come(self, layers: Layers) -> list[Ticks]:
        """All else that later parts depend on, in ticks since the first rank's stream."""
        now_ns, comm = self._stream_ns, self._comm
        seen_ns = comm.standing(layers.groups, now_ns) if isinstance(comm, InFlight) else []
        seen_ns += self._slow.standing(now_ns)
        return [ns - now_ns[:, :1] for ns in seen_ns] + self._slow.factors()

    def _put_off(self, layers: Layers, by_ns: Ticks, waited_ns: Ticks) -> None:
        """All of that is so much later, and ranks have waited so much more."""
        self._slow.put_off(np.repeat(by_ns[:, 0], self._shape[1]))
        if isinstance(self._comm, InFlight):
            self._comm.put_off(layers.groups, by_ns)
            if self._counts:
                self._now += waited_ns
                self._comm.comm_ns += waited_ns[0]
