"""Tables of the OSU micro-benchmarks: osu_allreduce and osu_bcast, with -f or without.

They time MPI's collectives (or with the xCCL suite NCCL's), from one buffer to another, and do not
say on how many ranks. Source: the benchmarks' util/osu_util_mpi.c and README.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpsim.errors import ImportFailedError
from ddpsim.importers.measured import (
    Layout,
    Measured,
    Operation,
    OtherCollectiveError,
    layout_of_ranks,
)
from ddpsim.importers.text import number

_TITLE = re.compile(
    r"#\s*OSU\s+(?P<library>\S{1,40})\s{1,8}(?P<test>\S.{0,60}?)\s{1,8}Latency Test"
)
_HEADER = re.compile(r"#\s*Size\b.*Latency\s*\(us\)")
_ROW = re.compile(r"(?:^|[^\w\s.]|Z(?=\s))\s*(\d+)((?:\s+[\d.]+)+)\s*$")  # behind a label or none
_TESTS: dict[Operation, str] = {"all_reduce": "Allreduce", "broadcast": "Broadcast"}
_NO_RANKS = "is of the OSU micro-benchmarks, which do not print their ranks"


def is_of_osu(lines: Sequence[str]) -> bool:
    """Whether a line is the title that the benchmarks print."""
    return any(_TITLE.search(line) for line in lines)


def read_osu(
    name: str, lines: Sequence[str], operation: Operation, layout: Layout | None
) -> Measured:
    """The average latencies of a table, on ranks of `layout`; raises ImportFailedError."""
    if operation not in _TESTS:  # whose sizes are those of one rank's part
        raise OtherCollectiveError(name, f"is of OSU, of which {operation} is not read")
    titles = [(i, found) for i, line in enumerate(lines, 1) if (found := _TITLE.search(line))]
    wanted = _TESTS[operation]
    of_it = [(i, found) for i, found in titles if found["test"] == wanted]
    if not of_it:
        line, found = titles[0]
        raise OtherCollectiveError(
            name, f"is of OSU's {found['test']} test; wanted its {wanted} test", line
        )
    if len(of_it) > 1:
        raise ImportFailedError(
            name, f"holds {len(of_it)} tables of OSU's {wanted} test; keep one a file", of_it[1][0]
        )
    first, title = of_it[0]
    end = min((i for i, _ in titles if i > first), default=len(lines) + 1)
    samples = _rows(name, lines[first : end - 1], first + 1)
    if not samples:
        raise ImportFailedError(name, "this table of the OSU micro-benchmarks has no row", first)
    layout = layout_of_ranks(name, None, layout, _NO_RANKS, first)
    others = [f"OSU's {found['test']} test (line {i})" for i, found in titles if i != first]
    only = f"{name}: {operation} is read; the file also holds {', '.join(others)}"
    return Measured(
        layout,
        samples,
        warnings=(*([only] if others else []), _what_it_times(name, title["library"])),
        ranks_listed=False,
    )


def _rows(name: str, lines: Sequence[str], first: int) -> list[tuple[int, float]]:
    """Size and average latency, the first column of each: no other has that place."""
    samples: list[tuple[int, float]] = []
    has_header = False
    for line, text in enumerate(lines, first):
        has_header = has_header or _HEADER.search(text) is not None
        found = _ROW.search(text) if has_header else None
        if found and (size := int(number(name, line, found[1], "size"))):
            time_us = number(name, line, found[2].split()[0], "latency", above_zero=True)
            samples.append((size, time_us * 1e-6))
    return samples


def _what_it_times(name: str, library: str) -> str:
    """MPI's title names a device's library, such as MPI-CUDA, where buffers may lie on the GPU."""
    of = f"{library.partition('-')[0]}'s collectives"
    where = " and in the host's memory" if library == "MPI" else ""
    return f"{name}: OSU times {of}, out of place{where}; DDP reduces in place on the GPU"
