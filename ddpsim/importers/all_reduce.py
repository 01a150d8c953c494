"""Measured all-reduce times: nccl-tests' text logs, and our CSV.

nccl-tests prints two column layouts: the older `size count type redop | time algbw busbw error`
twice, the newer with `root` after `redop` and `#wrong` for `error`. DDP reduces in place, so the
second, in-place half is read. Source: nccl-tests src/common.cu and doc/PERFORMANCE.md.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from ddpsim.errors import ImportFailedError
from ddpsim.importers.text import header_of, number, read_text, table, whole
from ddpsim.scenario.quantity import SourceFile

__all__ = ["AllReduceLog", "read_all_reduce"]

_DEVICE = re.compile(r"^#\s+Rank\s+(\d+)\s+.*?\bPid\s+\d+\s+on\s+(\S+)\s+device")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z0-9_]+\s+\S+\s+")
_LEAST_ALGBW = 0.1  # GB/s: below it the two digits that are printed say little of a ratio
_CSV_COLUMNS = ("size_bytes", "time_us", "nodes", "gpus_per_node")


@dataclass(frozen=True)
class AllReduceLog:
    """All-reduce times by message size, on `nodes` x `gpus_per_node` ranks.

    `samples` are (size in bytes, time in seconds), by rising size, one per size (the median).
    """

    source: str
    kind: str
    nodes: int
    gpus_per_node: int
    samples: tuple[tuple[int, float], ...]

    @property
    def world_size(self) -> int:
        """Ranks that took part."""
        return self.nodes * self.gpus_per_node


def read_all_reduce(source: SourceFile) -> AllReduceLog:
    """Read a log, whichever of the known formats it has; raises ImportFailedError."""
    lines = read_text(source, "an nccl-tests log or our CSV").splitlines()
    header = header_of(lines, _CSV_COLUMNS)
    if header is None:
        return _read_nccl_tests(source.given, lines)
    return _read_csv(source.given, lines, header)


def _read_csv(name: str, lines: list[str], header: int) -> AllReduceLog:
    samples, layouts = [], set()
    for line, row in table(name, lines[header:], _CSV_COLUMNS, header + 1):
        size, nodes, gpus = (
            whole(name, line, row[key], key) for key in ("size_bytes", "nodes", "gpus_per_node")
        )
        time_us = number(name, line, row["time_us"], "time_us", above_zero=True)
        samples.append((size, time_us * 1e-6))
        layouts.add((nodes, gpus))
    return _log(name, "all-reduce CSV", _only(name, layouts), samples)


def _only(name: str, layouts: set[tuple[int, int]]) -> tuple[int, int]:
    if len(layouts) > 1:
        raise ImportFailedError(
            name, "holds several layouts (nodes, gpus_per_node); keep one a file"
        )
    return layouts.pop()


def _read_nccl_tests(name: str, lines: list[str]) -> AllReduceLog:
    rows = list(_rows(name, lines))
    if not rows:
        raise ImportFailedError(
            name,
            "holds no result row; wanted nccl-tests' table (size count type redop ... busbw) "
            f"or CSV ({','.join(_CSV_COLUMNS)})",
        )
    layout = _only(name, {_layout(name, hosts) for hosts in _device_lists(name, lines)})
    _check_bus_factor(name, rows, layout[0] * layout[1])
    return _log(name, "nccl-tests log", layout, [(size, time_s) for _, size, time_s, _ in rows])


def _rows(name: str, lines: Iterable[str]) -> Iterator[tuple[int, int, float, float]]:
    """(line, size in bytes, in-place seconds, busbw / algbw) of every result row."""
    has_root = False
    for line, text in enumerate(lines, 1):
        if text.startswith("#"):
            has_root = " root " in text if "redop" in text else has_root
            continue
        if not _ROW.match(text):
            continue  # warnings and NCCL INFO lines stand between the rows
        cells = text.split()
        first = 5 if has_root else 4
        if len(cells) < first + 8:
            raise ImportFailedError(
                name, f"this row has {len(cells)} of {first + 8} columns: is it cut off?", line
            )
        size = int(number(name, line, cells[0], "size"))
        if size == 0:
            continue  # fewer bytes than one element a rank, as nccl-tests rounds them
        time_us = number(name, line, cells[first + 4], "in-place time", above_zero=True)
        algbw = number(name, line, cells[first + 5], "in-place algbw")
        busbw = number(name, line, cells[first + 6], "in-place busbw")
        factor = busbw / algbw if algbw >= _LEAST_ALGBW else math.nan
        yield line, size, time_us * 1e-6, factor


def _device_lists(name: str, lines: Iterable[str]) -> list[dict[str, str]]:
    """The hosts by rank of every run in a log: a rank that comes again begins the next run."""
    runs: list[dict[str, str]] = []
    for match in filter(None, map(_DEVICE.match, lines)):
        if not runs or match[1] in runs[-1]:
            runs.append({})
        runs[-1][match[1]] = match[2]
    if not runs:
        raise ImportFailedError(
            name,
            "does not list its devices ('#  Rank  0 ... on HOST device 0'), so its ranks are not "
            f"known; write it as CSV: {','.join(_CSV_COLUMNS)}",
        )
    return runs


def _layout(name: str, hosts: dict[str, str]) -> tuple[int, int]:
    nodes = len(set(hosts.values()))
    if len(hosts) % nodes:
        raise ImportFailedError(
            name, f"lists {len(hosts)} ranks on {nodes} nodes, which are not alike"
        )
    return nodes, len(hosts) // nodes


def _check_bus_factor(name: str, rows: list[tuple[int, int, float, float]], ranks: int) -> None:
    """An all-reduce's busbw is 2(n-1)/n algbw: another factor is another collective."""
    factors = [factor for *_, factor in rows if not math.isnan(factor)]
    expected = 2 * (ranks - 1) / ranks
    if factors and abs(median(factors) - expected) > 0.1 * expected:
        raise ImportFailedError(
            name,
            f"busbw/algbw is {median(factors):.2f}, but an all-reduce of {ranks} ranks has "
            f"{expected:.2f}; wanted the log of all_reduce_perf",
        )


def _log(
    name: str, kind: str, layout: tuple[int, int], samples: list[tuple[int, float]]
) -> AllReduceLog:
    times: dict[int, list[float]] = defaultdict(list)
    for size, time_s in samples:
        times[size].append(time_s)
    by_size = tuple((size, median(times[size])) for size in sorted(times))
    return AllReduceLog(name, kind, *layout, by_size)
