"""Chrome trace files read back, with nothing of the code that wrote them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

Interval = tuple[int, int]


class Slice(NamedTuple):
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]
    category: str


@dataclass
class Read:
    """Slices and arrows of a file, by their track (pid, tid); whole nanoseconds."""

    header: dict[str, Any]
    tracks: dict[tuple[int, int], list[Slice]] = field(default_factory=lambda: defaultdict(list))
    names: dict[tuple[int, int], str] = field(default_factory=dict)
    flows: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def slices(self) -> list[Slice]:
        return [piece for track in self.tracks.values() for piece in track]

    def of(self, *names: str) -> list[Interval]:
        return [(s.start_ns, s.end_ns) for s in self.slices if s.name in names]

    def ticks(self, *names: str) -> int:
        return sum(end - start for start, end in self.of(*names))

    def communication(self) -> list[Interval]:
        starts = ("nccl", "gloo:", "all_reduce", "broadcast")
        return [(s.start_ns, s.end_ns) for s in self.slices if s.name.startswith(starts)]


@lru_cache(maxsize=4)  # of one trace, whose files several checks read
def read(text: str) -> Read:
    """Exactly, or as Perfetto does it: it multiplies floats by 1000 and cuts."""
    document = json.loads(text, parse_float=Decimal, parse_constant=_refuse)
    found = Read({key: value for key, value in document.items() if key != "traceEvents"})
    is_merged = "schemaVersion" not in document

    def ns(value: Decimal) -> int:
        if is_merged:
            assert round(float(value) * 1000.0) == int(float(value) * 1000.0)
            return int(float(value) * 1000.0)
        assert value.as_tuple().exponent == -3
        return int(value * 1000)

    for event in document["traceEvents"]:
        track = event["pid"], event["tid"]
        if event["ph"] == "X":
            start_ns, lasts_ns = ns(event["ts"]), ns(event["dur"])
            assert start_ns >= 0
            assert lasts_ns > 0
            place = start_ns, start_ns + lasts_ns
            piece = Slice(event["name"], *place, event.get("args", {}), event.get("cat", ""))
            found.tracks[track].append(piece)
        elif event["ph"] == "M":
            if event["name"] == "thread_name":
                found.names[track] = event["args"]["name"]
        else:
            assert event["ph"] in "stf"
            found.flows[event["id"]].append({**event, "at_ns": ns(event["ts"])})
    return found


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def covered(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in union(intervals))


def both(some: Iterable[Interval], others: Iterable[Interval]) -> int:
    some, others = list(some), list(others)
    return covered(some) + covered(others) - covered([*some, *others])
