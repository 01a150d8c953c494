"""Tables of two other benchmarks, which tell on how many ranks they ran, or not even that.

OSU's osu_allreduce and osu_bcast, with -f or without, time MPI's collectives (or with the xCCL
suite NCCL's), from one buffer to another. Source: the benchmarks' util/osu_util_mpi.c and README.
stas00's all_reduce_bench.py prints payload, busbw and algbw of torch's all-reduces. Source:
stas00/ml-engineering, network/benchmarks/all_reduce_bench.py, where 1 GBps is 1e9 bytes per second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ddpsim.errors import ImportFailedError
from ddpsim.importers.measured import (
    Bandwidths,
    Layout,
    Measured,
    Operation,
    OtherCollectiveError,
    check_bus_factor,
    layout_of_ranks,
    named_layout,
    ranks_of,
)
from ddpsim.importers.text import listed, number
from ddpsim.units import parse_bytes

_OSU = re.compile(r"#\s*OSU\s+(?P<library>\S{1,40})\s{1,8}(?P<test>\S.{0,60}?)\s{1,8}Latency Test")
_LATENCIES = re.compile(r"#\s*Size\b.*Latency\s*\(us\)")
_LATENCY = re.compile(r"(?:^|[^\w\s.]|Z(?=\s))\s*(\d+)((?:\s+[\d.]+)+)\s*$")  # a label before it
_TESTS: dict[Operation, str] = {"all_reduce": "Allreduce", "broadcast": "Broadcast"}
_NO_RANKS = "is of the OSU micro-benchmarks, which do not print their ranks"

_BANDWIDTHS = re.compile(r"payload\s*\|\s*busbw\s*\|\s*algbw\b")
_TITLE = re.compile(r"bandwidth of (\w+) over (\d{1,7}) ranks")
_GPU = re.compile(r"hardware:\s{0,80}(?:.{0,300}?name='([^']{1,80})'|(\S.{0,80}?) node\b)")
_BANDWIDTH = re.compile(
    r"(?<![\w.])(\d{1,6})\s*([KMGT]iB)\s*\|\s*([\d.]+)\s*GBps\s*\|\s*([\d.]+)\s*GBps\b"
)
_NO_NODES = "does not say on how many nodes its ranks were"

_Found = list[tuple[int, re.Match[str]]]


def read_table(
    name: str, lines: Sequence[str], operation: Operation, layout: Layout | None
) -> tuple[str, Measured] | None:
    """The kind of a table and its times, on ranks of `layout`; None for another text.

    Raises ImportFailedError.
    """
    if titles := _found(_OSU, lines):
        return "OSU table", _read_osu(name, lines, titles, operation, layout)
    if headers := _found(_BANDWIDTHS, lines):
        if len(headers) > 1:
            raise ImportFailedError(name, "holds several tables; keep one a file", headers[1][0])
        told = _read_bandwidths(name, lines, operation, layout)
        return "all_reduce_bench.py table", told
    return None


def _found(wanted: re.Pattern[str], lines: Iterable[str]) -> _Found:
    """Lines that hold it, by their numbers."""
    return [(i, found) for i, line in enumerate(lines, 1) if (found := wanted.search(line))]


def _read_osu(
    name: str, lines: Sequence[str], titles: _Found, operation: Operation, layout: Layout | None
) -> Measured:
    """Average latencies, the first column below a title and a header."""
    if operation not in _TESTS:  # whose sizes are those of one rank's part
        raise OtherCollectiveError(name, f"is of OSU, of which {operation} is not read")
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
    begins = next((i for i, _ in _found(_LATENCIES, lines[: end - 1]) if i > first), end)
    samples = [
        (size, number(name, i, row[2].split()[0], "latency", above_zero=True) * 1e-6)
        for i, row in _found(_LATENCY, lines[: end - 1])
        if i >= begins and (size := int(number(name, i, row[1], "size")))
    ]
    if not samples:
        raise ImportFailedError(name, "this table of the OSU micro-benchmarks has no row", first)
    layout = layout_of_ranks(name, None, layout, _NO_RANKS, first)
    others = [f"OSU's {found['test']} test (line {i})" for i, found in titles if i != first]
    only = f"{name}: {operation} is read; the file also holds {', '.join(others)}"
    # MPI's title names a device's library, such as MPI-CUDA, where buffers may lie on the GPU
    times = f"{name}: OSU times {title['library'].partition('-')[0]}'s collectives, out of place"
    times += " and in the host's memory" if title["library"] == "MPI" else ""
    warnings = (*([only] if others else []), f"{times}; DDP reduces in place on the GPU")
    return Measured(layout, samples, warnings=warnings, ranks_listed=False)


def _read_bandwidths(
    name: str, lines: Sequence[str], operation: Operation, layout: Layout | None
) -> Measured:
    if operation != "all_reduce":
        raise ImportFailedError(
            name, f"holds all-reduces alone (all_reduce_bench.py), no {operation}"
        )
    titles = _found(_TITLE, lines)
    for line, title in titles:
        if title[1] != "all_reduce":
            raise OtherCollectiveError(
                name, f"is of {title[1]}; wanted a table of all_reduce", line
            )
    rows: list[tuple[int, Bandwidths, float]] = []
    left_out = []
    for i, row in _found(_BANDWIDTH, lines):
        algbw = number(name, i, row[4], "algbw")
        number(name, i, row[3], "busbw")
        if algbw:
            size = int(parse_bytes(f"{row[1]} {row[2]}"))
            rows.append((size, Bandwidths(row[4], row[3], i), algbw))
        else:
            left_out.append(i)
    if not rows:
        raise ImportFailedError(name, "holds no row with a bandwidth below payload, busbw, algbw")
    ranks = int(titles[0][1][2]) if titles else ranks_of(row for _, row, _ in rows)
    layout = layout_of_ranks(name, ranks, layout, _NO_NODES, titles[0][0] if titles else 0)
    for _, bandwidths, _ in rows:
        called = f"of layout {named_layout(layout)}"
        check_bus_factor(name, bandwidths, "all_reduce", layout[0] * layout[1], called)
    none = f"{name}: rows whose algbw is printed as 0 are left out: lines {listed(left_out)}"
    return Measured(
        layout,
        [(size, size / (algbw * 1e9)) for size, _, algbw in rows],
        tuple(sorted({found[1] or found[2] for _, found in _found(_GPU, lines)})),
        (none,) if left_out else (),
        ranks_listed=False,
    )
