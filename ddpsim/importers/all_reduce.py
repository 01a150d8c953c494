"""Measured all-reduce times: nccl-tests' logs, as text or JSON, and our CSV."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ddpsim.errors import ImportFailedError
from ddpsim.importers.nccl.devices import only_layout
from ddpsim.importers.nccl.tests_log import Measured, read_json, read_text_log
from ddpsim.importers.text import header_of, number, read_text, table, whole
from ddpsim.scenario.quantity import SourceFile
from ddpsim.units import format_bytes_per_s

__all__ = ["AllReduceLog", "read_all_reduce"]

_LEAST_BYTES = 2**20  # smaller messages stay in caches
_FASTEST_BUSBW = 20e12  # bytes per second, assumed: NVLink 5 has 0.9e12 a direction
_OF_RCCL = re.compile(r"\s*(?:\[\s*\{|numCycle,)")  # -Z json and -Z csv
_CSV_COLUMNS = ("size_bytes", "time_us", "nodes", "gpus_per_node")


@dataclass(frozen=True)
class AllReduceLog:
    """All-reduce times by message size, on `nodes` x `gpus_per_node` ranks.

    `samples` are (size in bytes, time in seconds), by rising size, one per size (the median);
    `gpus` the names of the GPUs, where they are told; `warnings` what of the file is not used.
    """

    source: str
    kind: str
    nodes: int
    gpus_per_node: int
    samples: tuple[tuple[int, float], ...]
    gpus: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks that took part."""
        return self.nodes * self.gpus_per_node


def read_all_reduce(source: SourceFile) -> AllReduceLog:
    """Read a log, whichever of the known formats it has; raises ImportFailedError."""
    text = read_text(source, "an nccl-tests log or our CSV", of_many_programs=True)
    if _OF_RCCL.match(text):
        raise ImportFailedError(
            source.given, "is what rccl-tests writes with -Z; wanted what it prints on the screen"
        )
    if text.lstrip().startswith("{"):
        return _log(source.given, "nccl-tests JSON", read_json(source.given, text))
    lines = text.splitlines()
    header = header_of(lines, _CSV_COLUMNS)
    if header is not None:
        return _log(source.given, "all-reduce CSV", _read_csv(source.given, lines, header))
    wanted = (
        "nccl-tests' table (size count type redop ... busbw), its JSON (-J) "
        f"or CSV ({','.join(_CSV_COLUMNS)})"
    )
    return _log(source.given, "nccl-tests log", read_text_log(source.given, lines, wanted))


def _read_csv(name: str, lines: list[str], header: int) -> Measured:
    samples, layouts = [], set()
    for line, row in table(name, lines[header:], _CSV_COLUMNS, header + 1):
        size, nodes, gpus = (
            whole(name, line, row[key], key) for key in ("size_bytes", "nodes", "gpus_per_node")
        )
        time_us = number(name, line, row["time_us"], "time_us", above_zero=True)
        samples.append((size, time_us * 1e-6))
        layouts.add((nodes, gpus))
    return Measured(only_layout(name, layouts), samples)


def _check_speed(name: str, ranks: int, samples: Sequence[tuple[int, float]]) -> None:
    """Times that no link can reach are of another unit, or of something else."""
    for size, time_s in samples:
        busbw = 2 * (ranks - 1) / ranks * size / time_s
        if size >= _LEAST_BYTES and busbw > _FASTEST_BUSBW:
            raise ImportFailedError(
                name,
                f"says that {size} bytes took {time_s * 1e6:g} us on {ranks} ranks, which no link "
                f"can reach (a bus bandwidth of {format_bytes_per_s(busbw)} a rank); is the time "
                "in microseconds?",
            )


def _log(name: str, kind: str, measured: Measured) -> AllReduceLog:
    times: dict[int, list[float]] = defaultdict(list)
    for size, time_s in measured.samples:
        times[size].append(time_s)
    by_size = tuple((size, median(times[size])) for size in sorted(times))
    _check_speed(name, measured.layout[0] * measured.layout[1], measured.samples)
    return AllReduceLog(name, kind, *measured.layout, by_size, measured.gpus, measured.warnings)
