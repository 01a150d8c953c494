"""What all_reduce_perf and its kin of nccl-tests write: their text, and the JSON of `-J FILE`.

DDP reduces in place, so the in-place half of a row is read. The text's table has a `root` after
`redop` or, in older versions, none, and four columns of statistics in each half where every
iteration was timed (`-I`). Source: nccl-tests src/common.cu, src/util.cu and doc/PERFORMANCE.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from ddpsim.errors import ImportFailedError, shown
from ddpsim.files import json_of
from ddpsim.importers.measured import (
    Bandwidths,
    Layout,
    Measured,
    Operation,
    check_bus_factor,
    layout_of_ranks,
    named_layout,
    ranks_of,
)
from ddpsim.importers.nccl.text import (
    NO_DEVICES,
    Device,
    Line,
    TextRow,
    check_one_group,
    check_operation,
    check_program,
    device_lists,
    has_rows,
    is_another,
    is_figure,
    layout_of,
    only_layout,
    only_runs_of,
    operation_called,
    plain_lines,
    program_of,
    table_rows,
)
from ddpsim.importers.text import listed, number, whole

_MOST_ROWS = 100_000
_TOLD = 0.1  # GB/s, from which on two digits are printed
_FASTEST_S, _NEAR = 1e-6, 1.2
_FAILED = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)\s+FAILED")


class _Row(NamedTuple):
    size_bytes: int
    time_s: float
    bandwidths: Bandwidths
    kind: str = ""  # data type and operation
    out_of_place_s: float | None = None


def read_text_log(
    name: str, texts: Sequence[str], wanted: str, operation: Operation, layout: Layout | None
) -> Measured:
    """The text of one or several runs on the same ranks; raises ImportFailedError.

    Runs of other collectives are left out if some are of `operation`. `layout` is that of a log
    without a list of devices.
    """
    if sum(map(has_rows, texts)) > _MOST_ROWS:
        raise ImportFailedError(name, f"holds more than {_MOST_ROWS:,} rows; keep one run a file")
    lines, notes = only_runs_of(name, operation, plain_lines(texts))
    _check_said(name, lines, operation)
    found = table_rows(lines)
    left_out = _left_out(name, found, operation)
    rows = [row for each in found if each.is_whole and (row := _text_row(name, each, operation))]
    if not rows:
        whole_row = "whole result row" if left_out else "result row"
        raise ImportFailedError(name, f"holds no {whole_row}; wanted {wanted}")
    rows, in_ms = _in_seconds(name, rows)
    runs = device_lists(name, lines, found)
    if runs:
        layout = only_layout(name, {layout_of(name, devices) for devices in runs})
    else:
        ranks = ranks_of(row.bandwidths for row in rows) if operation == "all_reduce" else None
        layout = layout_of_ranks(name, ranks, layout, NO_DEVICES, rows[0].bandwidths.line)
    devices = [device for run in runs for device in run]
    measured = _measured(name, operation, layout, rows, devices)
    return measured._replace(warnings=(*notes, *in_ms, *_warnings(name, left_out)))


def read_json(name: str, text: str, operation: Operation) -> Measured:
    """What `-J` writes; raises ImportFailedError."""
    try:
        data = json_of(text)
    except ValueError as error:
        raise ImportFailedError(
            name, f"this is not JSON ({error}): was the run cut off before its end?"
        ) from None
    results = data.get("results") if isinstance(data, dict) else None
    if not isinstance(results, list) or not isinstance(data.get("config"), dict):
        raise ImportFailedError(
            name, f"holds no results and config; wanted what `{operation}_perf -J FILE` writes"
        )
    command = data.get("args")
    program = command[0] if isinstance(command, list) and command else ""
    check_program(name, 0, program, operation)
    rows = [_json_row(name, i, row, operation) for i, row in enumerate(results, 1)]
    measured = [row for row in rows if row.size_bytes]
    if not measured:
        raise ImportFailedError(name, "its results are empty: nothing was measured")
    devices = _json_devices(name, data["config"])
    nodes, processes = layout_of(name, devices)
    threads, gpus = (
        whole(name, 0, data["config"].get(key, 1), key) for key in ("nthreads", "ngpus")
    )
    return _measured(name, operation, (nodes, processes * threads * gpus), measured, devices)


def _measured(
    name: str,
    operation: Operation,
    layout: Layout,
    rows: Sequence[_Row],
    devices: Sequence[Device],
) -> Measured:
    check_one_group(name, devices)
    kinds = list(dict.fromkeys(row.kind for row in rows))
    if len(kinds) > 1:  # each has a speed of its own, and their mean is nobody's
        raise ImportFailedError(
            name,
            f"holds {operation} of several kinds ({', '.join(kinds)}); keep the rows of one, as "
            f"{operation}_perf -d float -o sum writes them",
        )
    called = "that are listed" if devices else f"of layout {named_layout(layout)}"
    for row in rows:
        check_bus_factor(name, row.bandwidths, operation, layout[0] * layout[1], called)
    return Measured(
        layout,
        [(row.size_bytes, row.time_s) for row in rows],
        tuple(sorted({device.gpu for device in devices if device.gpu})),
        out_of_place=tuple((row.size_bytes, t) for row in rows if (t := row.out_of_place_s)),
        ranks_listed=bool(devices),
    )


def _processors_time(name: str, line: int, what: str) -> ImportFailedError:
    return ImportFailedError(
        name, f"{what}: -C measures the processor's; wanted a run without it", line
    )


def _check_right(name: str, line: int, wrong: object, what: str) -> None:
    """Raise ImportFailedError where elements of a sum were wrong; N/A, null, -1: nobody looked."""
    if wrong not in ("N/A", None, -1) and number(name, line, wrong, what):
        raise ImportFailedError(
            name,
            f"{what} is {wrong}: so many elements of the sum came out wrong, and the time of a "
            "broken all-reduce tells nothing; find what is broken and measure again",
            line,
        )


# --- text ----------------------------------------------------------------------------------------


def _check_said(name: str, lines: Iterable[Line], operation: Operation) -> None:
    """What lines other than rows say of a test must be the collective, timed by GPUs, and right."""
    for line in lines:
        if program := program_of(line):
            check_program(name, line.number, program, operation)
        if line.text.startswith("#") and "redop" in line.text and "cputime" in line.text:
            raise _processors_time(name, line.number, "its times are cputime")
        if match := _FAILED.match(line.text):  # older versions count wrong sums at the end alone
            _check_right(name, line.number, match[1], "the number of out of bounds values")


def _left_out(name: str, rows: Sequence[TextRow], operation: Operation) -> list[int]:
    """The lines of rows that NCCL's text broke, and of the last one if it was cut off."""
    for row in rows:
        if is_figure("".join(row.cells[3:4])):
            other = "this row is of another collective (it has no redop)"
            raise is_another(name, row.line, other, operation)
        if not row.is_whole and not row.interrupted and row is not rows[-1]:
            has = f"has {len(row.cells)} of {row.wanted} columns"
            if len(row.cells) >= row.wanted:
                has = f"has {shown(row.root)} as its root, which is no number"
            raise ImportFailedError(
                name, f"this row {has}: it is damaged; remove the row", row.line
            )
    return [row.line for row in rows if not row.is_whole]


def _warnings(name: str, left_out: Sequence[int]) -> tuple[str, ...]:
    if not left_out:
        return ()
    rows, lines = ("row is", "line") if len(left_out) == 1 else ("rows are", "lines")
    said = f"{len(left_out)} {rows} left out, broken or cut off: {lines} {listed(left_out)}"
    return (f"{name}: {said}",)


def _text_row(name: str, row: TextRow, operation: Operation) -> _Row | None:
    """None for 0 bytes: fewer than one element a rank, as nccl-tests rounds them."""
    line, cells, in_place = row.line, row.cells, row.in_place
    size = int(number(name, line, cells[0], "size"))
    if size == 0:
        return None
    check_operation(name, line, "this row", cells[3], row.root or "", operation)
    time_us = number(name, line, in_place[0], "in-place time", above_zero=True)
    number(name, line, in_place[1], "in-place algbw")
    number(name, line, in_place[2], "in-place busbw")
    if row.counted:
        _check_right(name, line, in_place[3], "in-place #wrong")
    bandwidths = Bandwidths(in_place[1], in_place[2], line)
    out_of_place_s = _seconds(row.out_of_place[0])
    return _Row(size, time_us * 1e-6, bandwidths, " ".join(cells[2:4]), out_of_place_s)


def _in_seconds(name: str, rows: list[_Row]) -> tuple[list[_Row], tuple[str, ...]]:
    """Rows with their times in seconds: until 2019 nccl-tests printed milliseconds.

    The bandwidths tell. Raises ImportFailedError where they do not, and no link is so fast.
    """
    told = [
        row.size_bytes / (row.time_s * algbw * 1e9)
        for row in rows
        if (algbw := float(row.bandwidths.algbw)) >= _TOLD
    ]
    if not told and max(row.time_s for row in rows) < _FASTEST_S:
        raise ImportFailedError(
            name, "its times are below 1 us, perhaps of milliseconds; needs rows from 1 MiB up"
        )
    if not told or not 1 / _NEAR < median(told) / 1000 < _NEAR:
        return rows, ()
    scaled = [
        row._replace(
            time_s=row.time_s * 1000,
            out_of_place_s=row.out_of_place_s and row.out_of_place_s * 1000,
        )
        for row in rows
    ]
    return scaled, (f"{name}: its times are milliseconds, as its bandwidths say",)


def _seconds(time_us: Any) -> float | None:
    """A time that nothing is priced by: None where it is not told."""
    try:
        seconds = float(time_us) * 1e-6
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if 0 < seconds < math.inf else None


# --- JSON ----------------------------------------------------------------------------------------


def _json_row(name: str, index: int, row: Any, operation: Operation) -> _Row:
    """A row of results; one of 0 bytes stands for what nccl-tests rounded to nothing."""
    here = f"result {index}"
    in_place = row.get("in_place") if isinstance(row, dict) else None
    if not isinstance(in_place, dict):
        raise ImportFailedError(name, f"{here} has no in_place times, and DDP reduces in place")
    if "time" not in in_place:
        raise _processors_time(name, 0, f"{here} has no time")
    other = operation_called(str(row.get("experiment_name", "")))
    if other and other != operation:
        raise is_another(name, 0, f"{here} is of {other}", operation)
    check_operation(name, 0, here, row.get("redop"), row.get("root", ""), operation)
    size = int(number(name, 0, row.get("size"), f"size of {here}"))
    if size == 0:
        return _Row(0, 0.0, Bandwidths("0", "0"))
    time_us = number(name, 0, in_place["time"], f"in_place time of {here}", above_zero=True)
    algbw, busbw = (
        str(number(name, 0, in_place.get(key), f"{key} of {here}")) for key in ("alg_bw", "bus_bw")
    )
    _check_right(name, 0, in_place.get("nwrong", 0), f"nwrong of {here}")
    kind = " ".join(str(row[key]) for key in ("type", "redop") if key in row)
    other_half = row.get("out_of_place")
    out_of_place_s = _seconds(other_half.get("time")) if isinstance(other_half, dict) else None
    bandwidths = Bandwidths(algbw, busbw, where=f"{here}: ")
    return _Row(size, time_us * 1e-6, bandwidths, kind, out_of_place_s)


def _json_devices(name: str, config: dict[str, Any]) -> list[Device]:
    """One a process, whatever the GPUs of a process."""
    devices = config.get("devices")
    is_list = isinstance(devices, list) and all(isinstance(each, dict) for each in devices)
    if not is_list or not devices:
        raise ImportFailedError(name, "its config lists no devices, so its ranks are not known")
    keys = ("hostname", "device", "device_hex", "group", "device_info")
    told = [[each.get(key) for key in keys] for each in devices]
    return [
        Device(rank, *("" if value is None else str(value).strip() for value in each))
        for rank, each in enumerate(told)
    ]
