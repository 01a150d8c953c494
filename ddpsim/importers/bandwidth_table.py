"""Tables of stas00's all_reduce_bench.py: payload, busbw and algbw of torch's all-reduces.

They say on how many ranks, and not on how many nodes. Source: stas00/ml-engineering,
network/benchmarks/all_reduce_bench.py, where 1 GBps is 1e9 bytes per second.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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

_HEADER = re.compile(r"payload\s*\|\s*busbw\s*\|\s*algbw\b")
_TITLE = re.compile(r"bandwidth of (\w+) over (\d{1,7}) ranks")
_GPU = re.compile(r"hardware:\s{0,80}(?:.{0,300}?name='([^']{1,80})'|(\S.{0,80}?) node\b)")
_ROW = re.compile(
    r"(?<![\w.])(\d{1,6})\s*([KMGT]iB)\s*\|\s*([\d.]+)\s*GBps\s*\|\s*([\d.]+)\s*GBps\b"
)
_NO_NODES = "does not say on how many nodes its ranks were"


def is_bandwidth_table(lines: Sequence[str]) -> bool:
    """Whether a line is the header of such a table."""
    return any(_HEADER.search(line) for line in lines)


def read_bandwidth_table(
    name: str, lines: Sequence[str], operation: Operation, layout: Layout | None
) -> Measured:
    """The times of a table's all-reduces, on ranks of `layout`; raises ImportFailedError."""
    titles = [(i, found) for i, line in enumerate(lines, 1) if (found := _TITLE.search(line))]
    _check_one_all_reduce(name, lines, titles, operation)
    rows = [(i, found) for i, line in enumerate(lines, 1) if (found := _ROW.search(line))]
    told = [
        (int(parse_bytes(f"{found[1]} {found[2]}")), Bandwidths(found[4], found[3], i))
        for i, found in rows
    ]
    for _, row in told:
        number(name, row.line, row.algbw, "algbw")
        number(name, row.line, row.busbw, "busbw")
    timed = [(size, row) for size, row in told if float(row.algbw)]
    if not timed:
        raise ImportFailedError(name, "holds no row with a bandwidth below payload, busbw, algbw")
    ranks = int(titles[0][1][2]) if titles else ranks_of(row for _, row in timed)
    layout = layout_of_ranks(name, ranks, layout, _NO_NODES, titles[0][0] if titles else 0)
    for _, row in timed:
        called = f"of layout {named_layout(layout)}"
        check_bus_factor(name, row, "all_reduce", layout[0] * layout[1], called)
    gpus = {found[1] or found[2] for line in lines if (found := _GPU.search(line))}
    return Measured(
        layout,
        [(size, size / (float(row.algbw) * 1e9)) for size, row in timed],
        tuple(sorted(gpus)),
        _left_out(name, [row.line for _, row in told if not float(row.algbw)]),
        ranks_listed=False,
    )


def _check_one_all_reduce(
    name: str,
    lines: Sequence[str],
    titles: Sequence[tuple[int, re.Match[str]]],
    operation: Operation,
) -> None:
    if operation != "all_reduce":
        raise ImportFailedError(
            name, f"holds all-reduces alone (all_reduce_bench.py), no {operation}"
        )
    for line, title in titles:
        if title[1] != "all_reduce":
            raise OtherCollectiveError(
                name, f"is of {title[1]}; wanted a table of all_reduce", line
            )
    headers = [i for i, line in enumerate(lines, 1) if _HEADER.search(line)]
    if len(headers) > 1:
        raise ImportFailedError(name, "holds several tables; keep one a file", headers[1])


def _left_out(name: str, lines: Sequence[int]) -> tuple[str, ...]:
    if not lines:
        return ()
    said = f"rows whose algbw is printed as 0 are left out: lines {listed(lines)}"
    return (f"{name}: {said}",)
