"""What a benchmark's file says of collectives: ranks, times, and whether the two agree.

An all-reduce's bus bandwidth is 2(n-1)/n of its algorithm bandwidth, so that a row tells how many
ranks n it is of; a reduce-scatter's and an all-gather's is (n-1)/n, and a broadcast's is the same.
Source: nccl-tests doc/PERFORMANCE.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.text import ForeignFile
from ddpsim.units import format_bytes

Layout = tuple[int, int]  # nodes, GPUs of each
Operation = Literal["all_reduce", "broadcast", "reduce_scatter", "all_gather"]

_LAYOUT = re.compile(r"\s*(\d{1,7})\s*[xX*]\s*(\d{1,4})\s*")
_MOST_DIGITS = 13  # of a figure, as number() takes them
_DOUBLE = 1e-9  # of a figure: what doubles lose
_CALLED: dict[Operation, str] = {
    "all_reduce": "an all-reduce",
    "broadcast": "a broadcast",
    "reduce_scatter": "a reduce-scatter",
    "all_gather": "an all-gather",
}
_TURNS: dict[Operation, int] = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
LEAST_BYTES = 2**20  # smaller messages stay in caches
_ENOUGH = 3  # sizes from LEAST_BYTES up, to tell of those of DDP
FAR_APART = 1.5  # assumed: published logs of quiet networks stay below it


class OtherCollectiveError(ImportFailedError):
    """A file holds collectives, but none of the operation that was asked for."""


class NoLayoutError(ImportFailedError):
    """A file does not tell its layout; `ranks` is how many its rows tell, None if they do not."""

    def __init__(self, path: str, message: str, line: int, ranks: int | None) -> None:
        self.ranks = ranks
        super().__init__(path, message, line)


@dataclass(frozen=True)
class AllReduceLog:
    """All-reduce times by message size, on `nodes` x `gpus_per_node` ranks.

    `samples` are (size in bytes, time in seconds), by rising size, one per size (the median) once
    the whole file is read; `gpus` the names of the GPUs, where they are told; `warnings` what of
    the file is not used. `out_of_place` are the same of another buffer, where they were measured
    too; `ranks_listed`: the file says its layout itself. A log of another collective has its times
    in the same way.
    """

    source: str
    kind: str
    nodes: int
    gpus_per_node: int
    samples: tuple[tuple[int, float], ...]
    gpus: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    out_of_place: tuple[tuple[int, float], ...] = ()
    ranks_listed: bool = True

    @property
    def spread(self) -> float | None:
        """How far two times of one size lie apart, in and out of place; None: it is not told.

        Pooled standard deviation of their logarithms, from 1 MiB up where enough sizes are.
        """
        by_size = self._ratios()
        usual = [ratio for size, ratio in by_size.items() if size >= LEAST_BYTES]
        ratios = usual if len(usual) >= _ENOUGH else [*by_size.values()]
        squares = [math.log(ratio) ** 2 / 2 for ratio in ratios]
        return math.sqrt(sum(squares) / len(squares)) if squares else None

    @property
    def apart(self) -> tuple[int, ...]:
        """The sizes at which in place and out of place differ by more than 1.5 x."""
        ratios = self._ratios().items()
        return tuple(size for size, ratio in ratios if max(ratio, 1 / ratio) > FAR_APART)

    @property
    def range_bytes(self) -> tuple[int, int]:
        """The least and the largest size measured."""
        return self.samples[0][0], self.samples[-1][0]

    @property
    def range_in_words(self) -> str:
        """The least and the largest size measured: "1 KiB to 1 GiB"."""
        return " to ".join(map(format_bytes, self.range_bytes))

    def covers(self, size_bytes: int) -> bool:
        """Whether a message size lies within the measured ones."""
        low, high = self.range_bytes
        return low <= size_bytes <= high

    def _ratios(self) -> dict[int, float]:
        other = dict(self.out_of_place)
        return {size: time_s / other[size] for size, time_s in self.samples if size in other}

    @property
    def world_size(self) -> int:
        """Ranks that took part."""
        return self.nodes * self.gpus_per_node


class Bandwidths(NamedTuple):
    """Bandwidths of a row as printed; `where` begins a message, empty where `line` says it."""

    algbw: str
    busbw: str
    line: int = 0
    where: str = ""


def parse_layout(text: str) -> Layout:
    """Nodes and GPUs of each in "2x8"; raises ValueError."""
    match = _LAYOUT.fullmatch(text)
    layout = (int(match[1]), int(match[2])) if match else (0, 0)
    if not all(layout):
        raise ValueError(f"{text!r} is no layout: wanted nodes x GPUs of each, such as 2x8")
    return layout


def named_layout(layout: Layout) -> str:
    """2x8, as `--layout` takes it."""
    return f"{layout[0]}x{layout[1]}"


@dataclass(frozen=True)
class Benchmark(ForeignFile):
    """A benchmark's file: whose times are wanted of it, and the layout of one that lists none."""

    operation: Operation
    layout: Layout | None

    def other(self, message: str, line: int = 0) -> OtherCollectiveError:
        """The error of a file that holds other collectives than the wanted one."""
        return OtherCollectiveError(self.name, message, line)

    def layout_of(self, ranks: int | None, lacks: str, line: int = 0) -> Layout:
        """The layout that a caller states for a file that lists none.

        `ranks` is how many its rows tell, `lacks` what it does not say. Raises ImportFailedError
        where no layout is stated, or one of another number of ranks.
        """
        problem = f"{lacks}; it is of {ranks} ranks" if ranks else lacks
        if self.layout is None:
            how = f"state nodes x GPUs of each, such as --layout 1x{ranks or 8}, or write it as CSV"
            columns = "size_bytes,time_us,nodes,gpus_per_node"
            raise NoLayoutError(self.name, f"{problem}; {how}: {columns}", line, ranks)
        stated = self.layout[0] * self.layout[1]
        if ranks and ranks != stated:
            differ = f"but {named_layout(self.layout)} are {stated}"
            raise self.wrong(f"{problem}, {differ}; state the layout that was measured", line)
        return self.layout

    def check_bus_factor(self, row: Bandwidths, ranks: int, called: str) -> None:
        """The printed digits must agree with the number of ranks, `called` so in the message.

        Another factor is of another collective, or of another number of ranks.
        """
        algbw, busbw, operation = float(row.algbw), float(row.busbw), self.operation
        expected = bus_factor(operation, ranks)
        if not algbw or _has_factor(row, expected):
            return
        is_known = any(_has_factor(row, bus_factor(other, ranks)) for other in _CALLED)
        raise (self.other if is_known else self.wrong)(
            f"{row.where}busbw/algbw is {busbw / algbw:.5g}, but {_CALLED[operation]} of the "
            f"{ranks} ranks {called} has {expected:.5g}; wanted the log of {operation}_perf, with "
            "all its ranks; calibrate import takes others with --operation",
            row.line,
        )


def bus_factor(operation: Operation, ranks: int) -> float:
    """busbw/algbw of a collective of so many ranks."""
    turns = _TURNS.get(operation)
    return turns * (ranks - 1) / ranks if turns else 1.0


def _has_factor(row: Bandwidths, factor: float) -> bool:
    """Whether the digits of a row agree with this busbw/algbw."""
    algbw, busbw = float(row.algbw), float(row.busbw)
    doubt = _half_a_digit(row.busbw) + factor * _half_a_digit(row.algbw)
    return abs(busbw - factor * algbw) <= doubt + _DOUBLE * busbw


def reads_below(row: Bandwidths) -> bool:
    """Whether busbw is above zero and below algbw, as of no all-reduce of two ranks or more."""
    try:
        algbw, busbw = float(row.algbw), float(row.busbw)
    except ValueError:
        return False
    return busbw > 0 and busbw + _half_a_digit(row.busbw) < algbw - _half_a_digit(row.algbw)


def ranks_of(rows: Iterable[Bandwidths]) -> int | None:
    """How many ranks all-reduced, where the digits of busbw/algbw leave one number alone."""
    least, most = 2.0, math.inf
    for row in rows:
        algbw, busbw = float(row.algbw), float(row.busbw)
        off, bus_off = _half_a_digit(row.algbw), _half_a_digit(row.busbw)
        if algbw <= off:
            continue
        least = max(least, _ranks_at((busbw - bus_off) / (algbw + off)))
        most = min(most, _ranks_at((busbw + bus_off) / (algbw - off)))
    first = math.ceil(least - _DOUBLE) if least < math.inf else 0
    return first if first and first <= most + _DOUBLE and first + 1 > most else None


def _ranks_at(factor: float) -> float:
    return 2 / (2 - factor) if factor < 2 else math.inf


def _half_a_digit(printed: str) -> float:
    """How far a printed number may be off: half of its last digit."""
    mantissa, _, power = printed.lower().partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(power or 0)
    return 0.5 * 10.0 ** -max(decimals, -_MOST_DIGITS)
