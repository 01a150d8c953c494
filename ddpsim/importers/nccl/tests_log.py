"""What all_reduce_perf of nccl-tests writes: its text, and the JSON of `-J FILE`.

DDP reduces in place, so the in-place half of a row is read. The text's table has a `root` after
`redop` or, in older versions, none, and four columns of statistics in each half where every
iteration was timed (`-I`). Source: nccl-tests src/common.cu, src/util.cu and doc/PERFORMANCE.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from ddpsim.errors import ImportFailedError, shown
from ddpsim.importers.nccl.devices import check_one_group, device_lists, layout_of, only_layout
from ddpsim.importers.nccl.text import Device, Line, TextRow, is_figure, plain_lines, table_rows
from ddpsim.importers.text import listed, number, whole

__all__ = ["Measured", "read_json", "read_text_log"]

_STARTING = re.compile(r"^#\s*Collective test starting:\s*(\S+)")
_FAILED = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)\s+FAILED")
_OTHERS = (
    *("all_gather", "alltoall", "alltoallv", "alltoallv2", "bisection", "broadcast", "gather"),
    *("hypercube", "reduce", "reduce_scatter", "scatter", "sendrecv"),
)
_OTHER_TEST = re.compile(rf"({'|'.join(_OTHERS)})_perf")
_OTHER_NAMES = {other.replace("_", ""): other for other in _OTHERS}
_MOST_DIGITS = 13  # of a figure, as number() takes them
_DOUBLE = 1e-9  # of a figure: what doubles lose


class Measured(NamedTuple):
    """Ranks as nodes and GPUs of each, (bytes, seconds) of their all-reduces, and the GPUs' names.

    No name: it is not told. `warnings`: what of the file is not used.
    """

    layout: tuple[int, int]
    samples: list[tuple[int, float]]
    gpus: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class _Row(NamedTuple):
    where: str  # begins a message; empty where a line says it
    line: int
    size_bytes: int
    time_s: float
    algbw: str
    busbw: str
    kind: str = ""  # data type and operation


def read_text_log(name: str, texts: Sequence[str], wanted: str) -> Measured:
    """The text of one or several runs on the same ranks; raises ImportFailedError."""
    lines = plain_lines(texts)
    _check_said(name, lines)
    found = table_rows(lines)
    left_out = _left_out(name, found)
    rows = [row for each in found if each.is_whole and (row := _text_row(name, each))]
    if not rows:
        whole_row = "whole result row" if left_out else "result row"
        raise ImportFailedError(name, f"holds no {whole_row}; wanted {wanted}")
    _check_all_right(name, lines)
    runs = device_lists(name, lines, found)
    layout = only_layout(name, {layout_of(name, devices) for devices in runs})
    measured = _measured(name, layout, rows, [device for run in runs for device in run])
    return measured._replace(warnings=_warnings(name, left_out))


def read_json(name: str, text: str) -> Measured:
    """What `-J` writes; raises ImportFailedError."""
    try:
        data = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ImportFailedError(
            name, f"this is not JSON ({error}): was the run cut off before its end?"
        ) from None
    results = data.get("results") if isinstance(data, dict) else None
    if not isinstance(results, list) or not isinstance(data.get("config"), dict):
        raise ImportFailedError(
            name, "holds no results and config; wanted what `all_reduce_perf -J FILE` writes"
        )
    command = data.get("args")
    _check_test(name, 0, command[0] if isinstance(command, list) and command else "")
    rows = [_json_row(name, i, row) for i, row in enumerate(results, 1)]
    measured = [row for row in rows if row.size_bytes]
    if not measured:
        raise ImportFailedError(name, "its results are empty: nothing was measured")
    devices = _json_devices(name, data["config"])
    return _measured(name, _json_layout(name, data["config"], devices), measured, devices)


def _measured(
    name: str, layout: tuple[int, int], rows: Sequence[_Row], devices: Sequence[Device]
) -> Measured:
    check_one_group(name, devices)
    _check_one_kind(name, rows)
    for row in rows:
        _check_bus_factor(name, row, layout[0] * layout[1])
    gpus = sorted({device.gpu for device in devices if device.gpu})
    return Measured(layout, [(row.size_bytes, row.time_s) for row in rows], tuple(gpus))


def _check_one_kind(name: str, rows: Sequence[_Row]) -> None:
    """Each type and operation has a speed of its own, and their mean is nobody's."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    if len(kinds) > 1:
        raise ImportFailedError(
            name,
            f"holds all-reduces of several kinds ({', '.join(kinds)}); keep the rows of one, as "
            "all_reduce_perf -d float -o sum writes them",
        )


def _check_bus_factor(name: str, row: _Row, ranks: int) -> None:
    """An all-reduce's busbw is 2(n-1)/n algbw, as near as the printed digits tell.

    Another factor is of another collective, or of another number of ranks.
    """
    algbw, busbw = float(row.algbw), float(row.busbw)
    if not algbw:
        return
    factor, expected = busbw / algbw, 2 * (ranks - 1) / ranks
    doubt = _half_a_digit(row.busbw) + expected * _half_a_digit(row.algbw)
    if abs(busbw - expected * algbw) > doubt + _DOUBLE * busbw:
        raise ImportFailedError(
            name,
            f"{row.where}busbw/algbw is {factor:.5g}, but an all-reduce of the {ranks} ranks that "
            f"are listed has {expected:.5g}; wanted the log of all_reduce_perf, with all its ranks",
            row.line,
        )


def _half_a_digit(printed: str) -> float:
    """By how much a printed number may be off: half of its last digit."""
    mantissa, _, power = printed.lower().partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(power or 0)
    return 0.5 * 10.0 ** -max(decimals, -_MOST_DIGITS)


def _check_test(name: str, line: int, program: object) -> None:
    """Raise ImportFailedError where the program that ran, or its path, is another test's."""
    if match := _OTHER_TEST.match(PurePath(str(program)).name):
        raise _is_another(name, line, f"is of {match[0]}")


def _check_reduces_to_all(name: str, line: int, row: str, redop: object, root: object) -> None:
    """An all-reduce has an operation and no root, which is then -1 or not told."""
    to = str(root).strip() or "-1"
    if redop == "none" or to != "-1":
        given = f"redop {redop}, root {to}"
        raise _is_another(name, line, f"{row} is of another collective ({given})")


def _is_another(name: str, line: int, what: str) -> ImportFailedError:
    return ImportFailedError(name, f"{what}; wanted the log of all_reduce_perf", line)


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


def _check_said(name: str, lines: Iterable[Line]) -> None:
    """What lines other than rows say of a test must be an all-reduce that GPUs timed."""
    for line in lines:
        if match := _STARTING.match(line.text):
            _check_test(name, line.number, match[1])
        if line.text.startswith("#") and "redop" in line.text and "cputime" in line.text:
            raise _processors_time(name, line.number, "its times are cputime")


def _check_all_right(name: str, lines: Iterable[Line]) -> None:
    """Older versions count wrong sums at the end alone."""
    for line in lines:
        if match := _FAILED.match(line.text):
            _check_right(name, line.number, match[1], "the number of out of bounds values")


def _left_out(name: str, rows: Sequence[TextRow]) -> list[int]:
    """The lines of rows that NCCL's text broke, and of the last one if it was cut off."""
    for row in rows:
        if is_figure("".join(row.cells[3:4])):
            raise _is_another(name, row.line, "this row is of another collective (it has no redop)")
        if not row.is_whole and not row.interrupted and row is not rows[-1]:
            raise _is_damaged(name, row)
    return [row.line for row in rows if not row.is_whole]


def _is_damaged(name: str, row: TextRow) -> ImportFailedError:
    has = f"has {len(row.cells)} of {row.wanted} columns"
    if len(row.cells) >= row.wanted:
        has = f"has {shown(row.root)} as its root, which is no number"
    return ImportFailedError(name, f"this row {has}: it is damaged; remove the row", row.line)


def _warnings(name: str, left_out: Sequence[int]) -> tuple[str, ...]:
    if not left_out:
        return ()
    rows, lines = ("row is", "line") if len(left_out) == 1 else ("rows are", "lines")
    said = f"{len(left_out)} {rows} left out, broken or cut off: {lines} {listed(left_out)}"
    return (f"{name}: {said}",)


def _text_row(name: str, row: TextRow) -> _Row | None:
    """None for 0 bytes: fewer than one element a rank, as nccl-tests rounds them."""
    line, cells, in_place = row.line, row.cells, row.in_place
    size = int(number(name, line, cells[0], "size"))
    if size == 0:
        return None
    _check_reduces_to_all(name, line, "this row", cells[3], row.root or "")
    time_us = number(name, line, in_place[0], "in-place time", above_zero=True)
    number(name, line, in_place[1], "in-place algbw")
    number(name, line, in_place[2], "in-place busbw")
    if row.counted:
        _check_right(name, line, in_place[3], "in-place #wrong")
    return _Row("", line, size, time_us * 1e-6, in_place[1], in_place[2], " ".join(cells[2:4]))


# --- JSON ----------------------------------------------------------------------------------------


def _json_row(name: str, index: int, row: Any) -> _Row:
    """A row of results; one of 0 bytes stands for what nccl-tests rounded to nothing."""
    here = f"result {index}"
    in_place = row.get("in_place") if isinstance(row, dict) else None
    if not isinstance(in_place, dict):
        raise ImportFailedError(name, f"{here} has no in_place times, and DDP reduces in place")
    if "time" not in in_place:
        raise _processors_time(name, 0, f"{here} has no time")
    called = "".join(filter(str.isalnum, str(row.get("experiment_name", "")))).lower()
    if other := _OTHER_NAMES.get(called.removesuffix("perf")):
        raise _is_another(name, 0, f"{here} is of {other}")
    _check_reduces_to_all(name, 0, here, row.get("redop"), row.get("root", ""))
    size = int(number(name, 0, row.get("size"), f"size of {here}"))
    if size == 0:
        return _Row("", 0, 0, 0.0, "0", "0")
    time_us = number(name, 0, in_place["time"], f"in_place time of {here}", above_zero=True)
    algbw, busbw = (
        str(number(name, 0, in_place.get(key), f"{key} of {here}")) for key in ("alg_bw", "bus_bw")
    )
    _check_right(name, 0, in_place.get("nwrong", 0), f"nwrong of {here}")
    kind = " ".join(str(row[key]) for key in ("type", "redop") if key in row)
    return _Row(f"{here}: ", 0, size, time_us * 1e-6, algbw, busbw, kind)


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


def _json_layout(name: str, config: dict[str, Any], devices: Sequence[Device]) -> tuple[int, int]:
    nodes, processes = layout_of(name, devices)
    threads, gpus = (whole(name, 0, config.get(key, 1), key) for key in ("nthreads", "ngpus"))
    return nodes, processes * threads * gpus
