"""Rows of a page's tables: its buckets, and the parts of the step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ddpsim.report.page.looks import LOOK_OF_PART, Look
from ddpsim.report.text import PARTS
from ddpsim.result.model import BucketTimes, Result
from ddpsim.result.storyboard import CapChoice
from ddpsim.units import NS_PER_S

_MOST_ROWS = 300  # of a table of buckets


@dataclass(frozen=True, slots=True)
class BucketRow:
    """A bucket of the table; seconds."""

    bucket: BucketTimes
    in_flight_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the breakdown."""

    name: str
    time_s: float
    share: float
    look: Look


def bucket_rows(choice: CapChoice) -> list[BucketRow]:
    """The buckets of a choice, on its slowest rank; the first 300."""
    slowest = choice.step.ranks[0]
    in_flight_ns, exposed_ns = Counter[int](), Counter[int]()  # a bucket may take several
    for comm in slowest.collectives:
        in_flight_ns[comm.span.bucket] += comm.span.end_ns - comm.span.joined_ns
        exposed_ns[comm.span.bucket] += sum(end - start for start, end in comm.exposed)
    return [
        BucketRow(b, in_flight_ns[b.index] / NS_PER_S, exposed_ns[b.index] / NS_PER_S)
        for b in choice.result.buckets[:_MOST_ROWS]
    ]


def parts(result: Result) -> list[Part]:
    """The parts of the mean step, with their shares of it."""
    whole_s = result.iteration_time_s.mean
    named = ((key, name, getattr(result.breakdown_s, key)) for key, name in PARTS.items())
    return [Part(name, s, s / whole_s, LOOK_OF_PART[key]) for key, name, s in named]


def rows_left_out(choice: CapChoice) -> int:
    """Buckets that the table does not list."""
    return max(0, len(choice.result.buckets) - _MOST_ROWS)
