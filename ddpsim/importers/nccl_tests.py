"""What all_reduce_perf of nccl-tests writes: its text, and the JSON of `-J FILE`.

DDP reduces in place, so the in-place half of a row is read. The text's table has a `root` after
`redop` or, in older versions, none, and four columns of statistics in each half where every
iteration was timed (`-I`). Source: nccl-tests src/common.cu, src/util.cu and doc/PERFORMANCE.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from statistics import median
from typing import Any, NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.text import number, whole

__all__ = ["Measured", "only_layout", "read_json", "read_text_log"]

_DEVICE = re.compile(r"^#\s+Rank\s+(\d+)\s+.*?\bPid\s+\d+\s+on\s+(\S+)\s+device")
_GROUP = re.compile(r"\sGroup\s+(\d+)\s")
_STARTING = re.compile(r"^#\s*Collective test starting:\s*(\S+)")
_GPU = re.compile(r"\sdevice\s+\S+\s+\[[^]]*\]\s+(\S.*?)\s*$")
_FAILED = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)\s+FAILED")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z0-9_]+\s+\S+\s+")
_OTHERS = (
    *("all_gather", "alltoall", "alltoallv", "alltoallv2", "bisection", "broadcast", "gather"),
    *("hypercube", "reduce", "reduce_scatter", "scatter", "sendrecv"),
)
_OTHER_TEST = re.compile(rf"({'|'.join(_OTHERS)})_perf")
_OTHER_NAMES = {other.replace("_", ""): other for other in _OTHERS}
_LEAST_ALGBW = 0.1  # GB/s: below it the two digits that are printed say little of a ratio
_HALF = 4  # columns: time algbw busbw error


class Measured(NamedTuple):
    """Ranks as nodes and GPUs of each, (bytes, seconds) of their all-reduces, and the GPUs' names.

    No name: it is not told.
    """

    layout: tuple[int, int]
    samples: list[tuple[int, float]]
    gpus: tuple[str, ...] = ()


class _Row(NamedTuple):
    size_bytes: int
    time_s: float
    bus_factor: float  # busbw / algbw; nan where the figures are too small to tell
    kind: str = ""  # data type and operation


def read_text_log(name: str, lines: Sequence[str], wanted: str) -> Measured:
    """The text of one or several runs on the same ranks; raises ImportFailedError."""
    rows = list(_text_rows(name, lines))
    if not rows:
        raise ImportFailedError(name, f"holds no result row; wanted {wanted}")
    _check_all_right(name, lines)
    layout = only_layout(name, {_layout(name, hosts) for hosts in _device_lists(name, lines)})
    listed = [line for line in lines if _DEVICE.match(line)]
    _check_one_group(name, {match[1] for line in listed if (match := _GROUP.search(line))})
    gpus = sorted({match[1] for line in listed if (match := _GPU.search(line))})
    return _measured(name, layout, rows)._replace(gpus=tuple(gpus))


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
    layout, devices = _json_layout(name, data["config"]), data["config"]["devices"]
    _check_one_group(name, {str(each["group"]) for each in devices if "group" in each})
    gpus = sorted({str(each["device_info"]).strip() for each in devices if each.get("device_info")})
    return _measured(name, layout, measured)._replace(gpus=tuple(gpus))


def only_layout(name: str, layouts: set[tuple[int, int]]) -> tuple[int, int]:
    """The one layout of a file; raises ImportFailedError where there are several."""
    if len(layouts) > 1:
        raise ImportFailedError(
            name, "holds several layouts (nodes, gpus_per_node); keep one a file"
        )
    return layouts.pop()


def _measured(name: str, layout: tuple[int, int], rows: Sequence[_Row]) -> Measured:
    _check_one_kind(name, rows)
    _check_bus_factor(name, rows, layout[0] * layout[1])
    return Measured(layout, [(row.size_bytes, row.time_s) for row in rows])


def _check_one_kind(name: str, rows: Sequence[_Row]) -> None:
    """Each type and operation has a speed of its own, and their mean is nobody's."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    if len(kinds) > 1:
        raise ImportFailedError(
            name,
            f"holds all-reduces of several kinds ({', '.join(kinds)}); keep the rows of one, as "
            "all_reduce_perf -d float -o sum writes them",
        )


def _check_bus_factor(name: str, rows: Sequence[_Row], ranks: int) -> None:
    """An all-reduce's busbw is 2(n-1)/n algbw: another factor is another collective."""
    factors = [row.bus_factor for row in rows if not math.isnan(row.bus_factor)]
    expected = 2 * (ranks - 1) / ranks
    if factors and abs(median(factors) - expected) > 0.1 * expected:
        raise ImportFailedError(
            name,
            f"busbw/algbw is {median(factors):.2f}, but an all-reduce of {ranks} ranks has "
            f"{expected:.2f}; wanted the log of all_reduce_perf",
        )


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


def _check_one_group(name: str, groups: set[str]) -> None:
    if len(groups) > 1:
        raise ImportFailedError(
            name,
            f"lists devices of {len(groups)} groups, which reduced side by side "
            "(NCCL_TESTS_SPLIT): how many ranks a time is of is not known; wanted a run of one",
        )


def _processors_time(name: str, line: int, what: str) -> ImportFailedError:
    return ImportFailedError(
        name, f"{what}: -C measures the processor's; wanted a run without it", line
    )


def _bus_factor(algbw: float, busbw: float) -> float:
    return busbw / algbw if algbw >= _LEAST_ALGBW else math.nan


def _check_right(name: str, line: int, wrong: object, what: str) -> None:
    """Raise ImportFailedError where elements of a sum were wrong; N/A, null, -1: nobody looked."""
    if wrong not in ("N/A", None, -1) and number(name, line, wrong, what):
        raise ImportFailedError(
            name,
            f"{what} is {wrong}: so many elements of the sum came out wrong, and the time of a "
            "broken all-reduce tells nothing; find what is broken and measure again",
            line,
        )


def _check_all_right(name: str, lines: Iterable[str]) -> None:
    """Older versions count wrong sums at the end alone."""
    for line, text in enumerate(lines, 1):
        if match := _FAILED.match(text):
            _check_right(name, line, match[1], "the number of out of bounds values")


# --- text ----------------------------------------------------------------------------------------


def _text_rows(name: str, lines: Iterable[str]) -> Iterator[_Row]:
    before, half, counted = 4, _HALF, False
    for line, text in enumerate(lines, 1):
        if text.startswith("#"):
            if match := _STARTING.match(text):
                _check_test(name, line, match[1])
            if "redop" in text:
                if "cputime" in text:
                    raise _processors_time(name, line, "its times are cputime")
                before = 5 if " root " in text else 4
                half = 2 * _HALF if " i_min " in text else _HALF
                counted = "#wrong" in text  # older versions have the largest error there
            continue
        if not _ROW.match(text):
            continue  # warnings and NCCL INFO lines stand between the rows
        cells = text.split()
        if len(cells) < before + 2 * half:
            raise ImportFailedError(
                name,
                f"this row has {len(cells)} of {before + 2 * half} columns: is it cut off?",
                line,
            )
        size = int(number(name, line, cells[0], "size"))
        if size == 0:
            continue  # fewer bytes than one element a rank, as nccl-tests rounds them
        _check_reduces_to_all(name, line, "this row", cells[3], cells[4] if before > 4 else "")
        in_place = cells[before + half :]
        time_us = number(name, line, in_place[0], "in-place time", above_zero=True)
        algbw = number(name, line, in_place[1], "in-place algbw")
        busbw = number(name, line, in_place[2], "in-place busbw")
        if counted:
            _check_right(name, line, in_place[3], "in-place #wrong")
        kind = " ".join(cells[2:4])
        yield _Row(size, time_us * 1e-6, _bus_factor(algbw, busbw), kind)


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
            "known; write it as CSV: size_bytes,time_us,nodes,gpus_per_node",
        )
    return runs


def _layout(name: str, hosts: dict[str, str]) -> tuple[int, int]:
    nodes = len(set(hosts.values()))
    if len(hosts) % nodes:
        raise ImportFailedError(
            name, f"lists {len(hosts)} ranks on {nodes} nodes, which are not alike"
        )
    return nodes, len(hosts) // nodes


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
        return _Row(0, 0.0, math.nan)
    time_us = number(name, 0, in_place["time"], f"in_place time of {here}", above_zero=True)
    algbw = number(name, 0, in_place.get("alg_bw"), f"alg_bw of {here}")
    busbw = number(name, 0, in_place.get("bus_bw"), f"bus_bw of {here}")
    _check_right(name, 0, in_place.get("nwrong", 0), f"nwrong of {here}")
    kind = " ".join(str(row[key]) for key in ("type", "redop") if key in row)
    return _Row(size, time_us * 1e-6, _bus_factor(algbw, busbw), kind)


def _json_layout(name: str, config: dict[str, Any]) -> tuple[int, int]:
    """Its devices list one entry a process, whatever the GPUs of a process."""
    devices = config.get("devices")
    is_list = isinstance(devices, list) and all(isinstance(each, dict) for each in devices)
    if not is_list or not devices:
        raise ImportFailedError(name, "its config lists no devices, so its ranks are not known")
    hosts = {str(i): str(each.get("hostname")) for i, each in enumerate(devices)}
    nodes, processes = _layout(name, hosts)
    threads, gpus = (whole(name, 0, config.get(key, 1), key) for key in ("nthreads", "ngpus"))
    return nodes, processes * threads * gpus
