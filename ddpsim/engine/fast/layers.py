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
from ddpsim.engine.fast.trials import TrialStep, TrialWork
from ddpsim.strategies.instructions import Await, Communicate, Compute, Record

_FEWEST, _LONGEST = 5, 64  # layers that are worth it; parts of one
_TIMES = 4  # that a part may come in one layer
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
    found, place = [], 0
    while place < len(keys):
        length, count = _longest_run(keys, place, places[keys[place]])
        if count < _FEWEST:
            place += 1
            continue
        found.append(_layers(parts, keys, records, place, length, count))
        place = found[-1].end
    return tuple(found)


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
        after = np.asarray(part.offset_ns - last_ns).tobytes()
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
