"""What all_reduce_perf and its kin of nccl-tests write: their text, and the JSON of `-J FILE`.

DDP reduces in place, so the in-place half of a row is read. The text's table has a `root` after
`redop` or, in older versions, none, and four columns of statistics in each half where every
iteration was timed (`-I`). Launchers and terminals put something before each line: labels (`srun
--label`, `mpirun --tag-output`), times (`kubectl logs --timestamps`), marks of quoting, colours.
nccl-tests writes a row in parts, and some launchers label each of them. With NCCL_DEBUG=INFO NCCL
writes lines of its own, also into a row, whose rest then stands below. Who publishes a table may
set it in Markdown, without `#`. Newer versions name the collective in a banner; in older ones the
rows tell it by their operation, root and bandwidths. Source: nccl-tests src/common.cu, src/util.cu
and doc/PERFORMANCE.md.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import PurePath
from statistics import median
from typing import Any, NamedTuple

from ddpsim.errors import ImportFailedError, shown
from ddpsim.files import json_of
from ddpsim.importers.measured import (
    AllReduceLog,
    Bandwidths,
    Benchmark,
    Layout,
    Operation,
    OtherCollectiveError,
    named_layout,
    ranks_of,
    reads_below,
)
from ddpsim.importers.text import listed, uncoloured

_TYPE = r"(?:char|u?int\d*|half|b?float\d*|double|\w{0,20}e\dm\d\w{0,20})"
_ROW = re.compile(rf"\d+\s+\d+\s+{_TYPE}(?!\S)")
_START = re.compile(rf"#(?!wrong)|(?<![\w.-]){_ROW.pattern}")
_FIGURE = re.compile(r"N/A|-?[\d.]+(?:e[+-]?\d+)?")
_FIGURES = re.compile(
    rf"(?<![\w.-])\d+[ \t|]+\d+[ \t|]+{_TYPE}(?:[ \t|]+(?:[a-z]+|-?[\d.]+(?:e[-+]\d+)?|N/A)){{7}}"
)
_OF_NCCL = re.compile(r"(?<!\S)(\S+?):\d+:\d+ \[\w+\] (?:\S+ )?NCCL ")
_LABELS_AT_THE_END = re.compile(r"(?:\[[^][]{0,80}\]\s{0,8}){1,8}$")
_DEVICE = re.compile(
    r"#\s+Rank\s+(?P<rank>\d{1,9})\s+(?:Group\s+(?P<group>\d{1,9})\s+)?(?:.{0,200}?\bPid\s+\d+\s+)?on\s+"
    r"(?P<host>\S{1,253})\s+device\s+(?P<ordinal>\S{1,20})(?:\s+\[(?P<bus>[^]]{0,40})\](?P<gpu>.*))?"
)
_STARTING = re.compile(r"^#\s*Collective test starting:\s*(\S+)")
_BEGINS = re.compile(r"^#\s*(?:Collective test starting:|nThread\s+\d|(?:nccl|rccl)-tests version)")
_OPERATIONS = (
    *("all_gather", "all_reduce", "alltoall", "alltoallv", "alltoallv2", "bisection"),
    *("broadcast", "gather", "hypercube", "reduce", "reduce_scatter", "scatter", "sendrecv"),
)
_PROGRAM = re.compile(rf"({'|'.join(_OPERATIONS)})_perf")
_CALLED = {operation.replace("_", ""): operation for operation in _OPERATIONS}
_NO_DEVICES = "does not list its devices ('#  Rank  0 ... on HOST device 0')"
_AS_CSV = "write it as CSV: size_bytes,time_us,nodes,gpus_per_node"
_MOST_ROWS = 100_000
_PRECISE_GB_S = 0.1  # from which on two digits are printed
_FASTEST_S, _NEAR = 1e-6, 1.2
_FAILED = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)\s+FAILED")


class Line(NamedTuple):
    """A line of a log from its `#` or its row on; `interrupted` where text of NCCL is cut off."""

    number: int
    text: str
    interrupted: bool = False


class Device(NamedTuple):
    """What a rank runs on; what is not told is empty."""

    rank: int
    host: str
    ordinal: str
    bus: str
    group: str
    gpu: str


class TextRow(NamedTuple):
    """A row's cells: size, count, type, redop, mostly a root, and two halves of figures.

    `has_root` is what the header says, None without one; `half` the columns of a half; `counted`
    where its last figure counts wrong elements (older versions: the largest error).
    """

    line: int
    cells: tuple[str, ...]
    has_root: bool | None = None
    half: int = 4  # time algbw busbw error
    counted: bool = False
    interrupted: bool = False

    @property
    def root(self) -> str | None:
        """The root, or None in a table without one; an all-reduce's is -1."""
        has_root = self.has_root
        if has_root is None:
            has_root = self.cells[4:5] == ("-1",) or len(self.cells) == 5 + 2 * self.half
        return "".join(self.cells[4:5]) if has_root else None

    @property
    def wanted(self) -> int:
        """The cells of a whole row."""
        return (4 if self.root is None else 5) + 2 * self.half

    @property
    def is_whole(self) -> bool:
        """Whether all cells are there, and no other text stuck to the root."""
        root = self.root
        is_clean = root is None or re.fullmatch(r"-?\d+", root) is not None
        return is_clean and len(self.cells) >= self.wanted

    @property
    def out_of_place(self) -> tuple[str, ...]:
        """The figures of the out-of-place half."""
        return self.cells[self.wanted - 2 * self.half : self.wanted - self.half]

    @property
    def in_place(self) -> tuple[str, ...]:
        """The figures of the in-place half."""
        return self.cells[self.wanted - self.half : self.wanted]


def has_rows(text: str) -> bool:
    """Whether rows of nccl-tests stand in a text, with a header or without."""
    return _FIGURES.search(text) is not None


def _plain_lines(texts: Iterable[str]) -> list[Line]:
    """The lines of a log without prefixes, colours and NCCL's own text."""
    bare = [uncoloured(text) for text in texts]
    hosts = {device["host"] for text in bare if (device := _DEVICE.search(text))}
    return [_plain(number, text, hosts) for number, text in enumerate(bare, 1)]


def _table_rows(lines: Sequence[Line]) -> list[TextRow]:
    """All rows in a log; the rest of one that was interrupted is sought in the lines below it."""
    rows: list[TextRow] = []
    header = TextRow(0, ())
    for line in lines:
        if "redop" in line.text and (line.text.startswith("#") or "busbw" in line.text):
            # -I puts four columns of statistics behind each half
            half = 8 if " i_min " in line.text else 4
            header = TextRow(0, (), " root " in line.text, half, "#wrong" in line.text)
        elif _ROW.match(line.text):
            cells = tuple(line.text.split())
            rows.append(
                header._replace(line=line.number, cells=cells, interrupted=line.interrupted)
            )
        elif rows and not rows[-1].is_whole:
            # the figures that end a line below it, if they are of the row
            rest = tuple(takewhile(_is_figure, reversed(line.text.split())))[::-1]
            cells = rows[-1].cells + rest
            if len(cells) <= rows[-1].wanted:  # too many where the break went through a number
                rows[-1] = rows[-1]._replace(cells=cells)
    return rows


def _device_of(text: str) -> Device | None:
    """The device that a line lists."""
    match = _DEVICE.match(text)
    if not match:
        return None
    texts = match.group("host", "ordinal", "bus", "group", "gpu")
    return Device(int(match["rank"]), *((value or "").strip() for value in texts))


def _is_figure(cell: str) -> bool:
    return _FIGURE.fullmatch(cell) is not None


def _plain(number: int, text: str, hosts: Collection[str]) -> Line:
    before = _before_nccl(text, hosts)
    is_framed = before.lstrip().startswith("|")  # a row of a Markdown table
    bare = before.replace("|", " ") if is_framed else before
    if match := _START.search(bare):  # what stands before it may come again within a row
        label, bare = bare[: match.start()].strip(), bare[match.start() :]
        is_label = label and not all(map(_is_figure, label.split()))
        bare = bare.replace(label, " ") if is_label else bare
    return Line(number, bare, before != text)


def _before_nccl(text: str, hosts: Collection[str]) -> str:
    """Text up to `HOST:PID:TID [GPU] NCCL `; the end of a row may stick to the host."""
    match = _OF_NCCL.search(text) if " NCCL " in text else None
    if not match:
        return text
    host = match[1]
    if host not in hosts:
        host = max((name for name in hosts if host.endswith(name)), key=len, default=host)
    return _LABELS_AT_THE_END.sub("", text[: match.end(1) - len(host)])


class _Run(NamedTuple):
    """The lines of a run, and its collective; empty: the rows do not agree on one."""

    lines: list[Line]
    operation: str

    def may_be(self, operation: Operation) -> bool:
        """Whether it is of this collective, as far as its rows tell."""
        return operation in self.operation.split(" or ")


def _only_runs_of(file: Benchmark, lines: Sequence[Line]) -> tuple[list[Line], tuple[str, ...]]:
    """The lines of the runs of a collective, and a note that names the others.

    All lines, where there is none: their checks say what they are of instead.
    """
    runs = _runs(lines)
    if not any(run.may_be(file.operation) for run in runs):
        return [*lines], ()
    wanted = [run for run in runs if run.may_be(file.operation) or not run.operation]
    others = [run for run in runs if run.operation and not run.may_be(file.operation)]
    names = [f"{run.operation} (from line {run.lines[0].number})" for run in others]
    note = f"{file.name}: {file.operation} is read; the file also holds {', '.join(names)}"
    return [line for run in wanted for line in run.lines], (note,) if names else ()


def _program_of(line: Line) -> str | None:
    match = _STARTING.match(line.text)
    return match[1] if match else None


def _check_program(file: Benchmark, line: int, program: object) -> None:
    """Raise ImportFailedError where the program that ran, or its path, is another test's."""
    match = _PROGRAM.match(PurePath(str(program)).name)
    if match and match[1] != file.operation:
        raise _is_another(file, line, f"is of {match[0]}")


def _check_operation(file: Benchmark, line: int, row: str, redop: object, root: object) -> None:
    """What reduces has an operation; a broadcast alone a root, which is else -1 or not told.

    Raises ImportFailedError.
    """
    to = str(root).strip() or "-1"
    reduces = file.operation in ("all_reduce", "reduce_scatter")
    has_root = file.operation == "broadcast"
    if (redop != "none", to != "-1") != (reduces, has_root):
        given = f"redop {redop}, root {to}"
        raise _is_another(file, line, f"{row} is of another collective ({given})")


def _is_another(file: Benchmark, line: int, what: str) -> OtherCollectiveError:
    remedy = f"wanted the log of {file.operation}_perf; calibrate import takes others"
    return file.other(f"{what}; {remedy} with --operation", line)


def _runs(lines: Sequence[Line]) -> list[_Run]:
    """A run begins with a banner below the rows of another."""
    parts: list[list[Line]] = [[]]
    has_rows = False
    rows_at = {row.line for row in _table_rows(lines)}
    for line in lines:
        if has_rows and _BEGINS.match(line.text):
            parts.append([])
            has_rows = False
        has_rows = has_rows or line.number in rows_at
        parts[-1].append(line)
    return [_Run(part, _operation(part)) for part in parts]


def _operation(lines: Sequence[Line]) -> str:
    for program in filter(None, map(_program_of, reversed(lines))):
        if match := _PROGRAM.match(PurePath(program).name):
            return match[1]
    operations = {_operations_of(row) for row in _table_rows(lines) if row.is_whole}
    return operations.pop() if len(operations) == 1 else ""


def _operations_of(row: TextRow) -> str:
    """The collective of a whole row, as near as its cells tell it."""
    if _is_figure(row.cells[3]):
        return "a collective without redop"
    root = row.root or "-1"
    if row.cells[3] == "none":
        return "all_gather or alltoall" if root == "-1" else "broadcast"
    if root != "-1":
        return "reduce"
    _, algbw, busbw, *_ = row.in_place
    return "reduce_scatter" if reads_below(Bandwidths(algbw, busbw)) else "all_reduce"


def _device_lists(
    file: Benchmark, lines: Iterable[Line], rows: Iterable[TextRow]
) -> list[tuple[Device, ...]]:
    """The devices of every run that lists them: a rank that comes again begins the next run."""
    rows_at = {row.line for row in rows}
    runs: list[dict[int, Device]] = []
    has_rows = False
    for line in lines:
        has_rows = has_rows or line.number in rows_at
        if device := _device_of(line.text):
            before = runs[-1].get(device.rank) if runs else None
            if before and not has_rows:
                raise file.wrong(
                    f"each process ran alone (rank {device.rank} is listed twice, on {before.host} "
                    f"and {device.host}): nccl-tests was built without MPI; build it with MPI=1, "
                    "or if a run ended before its first row, remove its lines",
                    line.number,
                )
            if before or not runs:
                runs.append({})
                has_rows = False
            runs[-1][device.rank] = device
    for run in runs:
        missing = [*islice((rank for rank in range(max(run)) if rank not in run), 10)]
        if missing:
            raise file.wrong(
                f"lists ranks {listed(sorted(run))}, but others are missing ({listed(missing)}), "
                f"so how many there are is not known; list all of them, or {_AS_CSV}"
            )
    return [tuple(run.values()) for run in runs]


def _listed_layout(file: Benchmark, devices: Sequence[Device]) -> tuple[int, int]:
    """Nodes and devices of each; raises ImportFailedError where they are not alike."""
    ranks: dict[tuple[str, str, str], int] = {}
    for device in devices:  # two ranks on one GPU are two nodes of one name, or nothing of DDP's
        place = (device.host, device.ordinal, device.bus)
        if device.ordinal and ranks.setdefault(place, device.rank) != device.rank:
            raise file.wrong(
                f"lists device {device.ordinal} [{device.bus}] of {device.host} for ranks "
                f"{ranks[place]} and {device.rank}: if two nodes go by this name, as nccl-tests "
                f"cuts names at the first dot, name them apart in the list, or {_AS_CSV}"
            )
    of_node = Counter(device.host for device in devices)
    if len(set(of_node.values())) > 1:
        raise file.wrong(f"lists {len(devices)} ranks on {len(of_node)} nodes, which are not alike")
    return len(of_node), len(devices) // len(of_node)


def only_layout(file: Benchmark, layouts: set[tuple[int, int]]) -> tuple[int, int]:
    """The one layout of a file; raises ImportFailedError where there are several."""
    if len(layouts) > 1:
        raise file.wrong("holds several layouts (nodes, gpus_per_node); keep one a file")
    return layouts.pop()


class _Row(NamedTuple):
    size_bytes: int
    time_s: float
    bandwidths: Bandwidths
    kind: str = ""  # data type and operation
    out_of_place_s: float | None = None


def read_text_log(file: Benchmark, texts: Sequence[str], wanted: str) -> AllReduceLog:
    """The text of one or several runs on the same ranks; raises ImportFailedError.

    Runs of other collectives are left out if some are of the wanted one.
    """
    if sum(map(has_rows, texts)) > _MOST_ROWS:
        raise file.wrong(f"holds more than {_MOST_ROWS:,} rows; keep one run a file")
    lines, notes = _only_runs_of(file, _plain_lines(texts))
    _check_comments(file, lines)
    table = _table_rows(lines)
    left_out = _left_out(file, table)
    rows = [row for each in table if each.is_whole and (row := _text_row(file, each))]
    if not rows:
        whole_row = "whole result row" if left_out else "result row"
        raise file.wrong(f"holds no {whole_row}; wanted {wanted}")
    rows, in_ms = _in_seconds(file, rows)
    runs = _device_lists(file, lines, table)
    if runs:
        layout = only_layout(file, {_listed_layout(file, devices) for devices in runs})
    else:
        ranks = ranks_of(row.bandwidths for row in rows) if file.operation == "all_reduce" else None
        layout = file.layout_of(ranks, _NO_DEVICES, rows[0].bandwidths.line)
    devices = [device for run in runs for device in run]
    log = _log(file, "nccl-tests log", layout, rows, devices)
    return replace(log, warnings=(*notes, *in_ms, *_warnings(file, left_out)))


def read_json(file: Benchmark, text: str) -> AllReduceLog:
    """What `-J` writes; raises ImportFailedError."""
    try:
        data = json_of(text)
    except ValueError as error:
        cut_off = f"this is not JSON ({error}): was the run cut off before its end?"
        raise file.wrong(cut_off) from None
    results = data.get("results") if isinstance(data, dict) else None
    if not isinstance(results, list) or not isinstance(data.get("config"), dict):
        wanted = f"wanted what `{file.operation}_perf -J FILE` writes"
        raise file.wrong(f"holds no results and config; {wanted}")
    command = data.get("args")
    program = command[0] if isinstance(command, list) and command else ""
    _check_program(file, 0, program)
    rows = [_json_row(file, i, row) for i, row in enumerate(results, 1)]
    measured = [row for row in rows if row.size_bytes]
    if not measured:
        raise file.wrong("its results are empty: nothing was measured")
    devices = _json_devices(file, data["config"])
    nodes, processes = _listed_layout(file, devices)
    threads, gpus = (
        file.whole(0, data["config"].get(key, 1), key) for key in ("nthreads", "ngpus")
    )
    layout = nodes, processes * threads * gpus
    return _log(file, "nccl-tests JSON", layout, measured, devices)


def _log(
    file: Benchmark,
    kind: str,
    layout: Layout,
    rows: Sequence[_Row],
    devices: Sequence[Device],
) -> AllReduceLog:
    groups = {device.group for device in devices if device.group}
    if len(groups) > 1:
        raise file.wrong(
            f"lists devices of {len(groups)} groups, which reduced side by side "
            "(NCCL_TESTS_SPLIT): how many ranks a time is of is not known; wanted a run of one"
        )
    kinds = list(dict.fromkeys(row.kind for row in rows))
    if len(kinds) > 1:  # each has a speed of its own, and their mean is nobody's
        raise file.wrong(
            f"holds {file.operation} of several kinds ({', '.join(kinds)}); keep the rows of one, "
            f"as {file.operation}_perf -d float -o sum writes them"
        )
    called = "that are listed" if devices else f"of layout {named_layout(layout)}"
    for row in rows:
        file.check_bus_factor(row.bandwidths, layout[0] * layout[1], called)
    return AllReduceLog(
        *(file.name, kind, *layout),
        tuple((row.size_bytes, row.time_s) for row in rows),
        tuple(sorted({device.gpu for device in devices if device.gpu})),
        out_of_place=tuple((row.size_bytes, t) for row in rows if (t := row.out_of_place_s)),
        ranks_listed=bool(devices),
    )


def _processors_time(file: Benchmark, line: int, what: str) -> ImportFailedError:
    return file.wrong(f"{what}: -C measures the processor's; wanted a run without it", line)


def _check_right(file: Benchmark, line: int, wrong: object, what: str) -> None:
    """Raise ImportFailedError where elements of a sum were wrong; N/A, null, -1: nobody looked."""
    if wrong not in ("N/A", None, -1) and file.number(line, wrong, what):
        raise file.wrong(
            f"{what} is {wrong}: so many elements of the sum came out wrong, and the time of a "
            "broken all-reduce tells nothing; find what is broken and measure again",
            line,
        )


# --- text ----------------------------------------------------------------------------------------
def _check_comments(file: Benchmark, lines: Iterable[Line]) -> None:
    """What lines other than rows say of a test must be the collective, timed by GPUs, and right."""
    for line in lines:
        if program := _program_of(line):
            _check_program(file, line.number, program)
        if line.text.startswith("#") and "redop" in line.text and "cputime" in line.text:
            raise _processors_time(file, line.number, "its times are cputime")
        if match := _FAILED.match(line.text):  # older versions count wrong sums at the end alone
            _check_right(file, line.number, match[1], "the number of out of bounds values")


def _left_out(file: Benchmark, rows: Sequence[TextRow]) -> list[int]:
    """The lines of rows that NCCL's text broke, and of the last one if it was cut off."""
    for row in rows:
        if _is_figure("".join(row.cells[3:4])):
            other = "this row is of another collective (it has no redop)"
            raise _is_another(file, row.line, other)
        if not row.is_whole and not row.interrupted and row is not rows[-1]:
            has = f"has {len(row.cells)} of {row.wanted} columns"
            if len(row.cells) >= row.wanted:
                has = f"has {shown(row.root)} as its root, which is no number"
            raise file.wrong(f"this row {has}: it is damaged; remove the row", row.line)
    return [row.line for row in rows if not row.is_whole]


def _warnings(file: Benchmark, left_out: Sequence[int]) -> tuple[str, ...]:
    if not left_out:
        return ()
    rows, lines = ("row is", "line") if len(left_out) == 1 else ("rows are", "lines")
    text = f"{len(left_out)} {rows} left out, broken or cut off: {lines} {listed(left_out)}"
    return (f"{file.name}: {text}",)


def _text_row(file: Benchmark, row: TextRow) -> _Row | None:
    """Reads a row; None for 0 bytes: fewer than one element a rank, as nccl-tests rounds them."""
    line, cells, in_place = row.line, row.cells, row.in_place
    size = int(file.number(line, cells[0], "size"))
    if size == 0:
        return None
    _check_operation(file, line, "this row", cells[3], row.root or "")
    time_us = file.number(line, in_place[0], "in-place time", above_zero=True)
    file.number(line, in_place[1], "in-place algbw")
    file.number(line, in_place[2], "in-place busbw")
    if row.counted:
        _check_right(file, line, in_place[3], "in-place #wrong")
    bandwidths = Bandwidths(in_place[1], in_place[2], line)
    out_of_place_s = _seconds(row.out_of_place[0])
    return _Row(size, time_us * 1e-6, bandwidths, " ".join(cells[2:4]), out_of_place_s)


def _in_seconds(file: Benchmark, rows: list[_Row]) -> tuple[list[_Row], tuple[str, ...]]:
    """Rows with their times in seconds: until 2019 nccl-tests printed milliseconds.

    The bandwidths tell. Raises ImportFailedError where they do not, and no link is so fast.
    """
    ratios = [
        row.size_bytes / (row.time_s * algbw * 1e9)
        for row in rows
        if (algbw := float(row.bandwidths.algbw)) >= _PRECISE_GB_S
    ]
    if not ratios and max(row.time_s for row in rows) < _FASTEST_S:
        raise file.wrong(
            "its times are below 1 us, perhaps of milliseconds; needs rows from 1 MiB up"
        )
    if not ratios or not 1 / _NEAR < median(ratios) / 1000 < _NEAR:
        return rows, ()
    scaled = [
        row._replace(
            time_s=row.time_s * 1000,
            out_of_place_s=row.out_of_place_s and row.out_of_place_s * 1000,
        )
        for row in rows
    ]
    return scaled, (f"{file.name}: its times are milliseconds, as its bandwidths say",)


def _seconds(time_us: Any) -> float | None:
    """A time that nothing is priced by: None where it is not told."""
    try:
        seconds = float(time_us) * 1e-6
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if 0 < seconds < math.inf else None


# --- JSON ----------------------------------------------------------------------------------------
def _json_row(file: Benchmark, index: int, row: Any) -> _Row:
    """A row of results; one of 0 bytes stands for what nccl-tests rounded to nothing."""
    here = f"result {index}"
    in_place = row.get("in_place") if isinstance(row, dict) else None
    if not isinstance(in_place, dict):
        raise file.wrong(f"{here} has no in_place times, and DDP reduces in place")
    if "time" not in in_place:
        raise _processors_time(file, 0, f"{here} has no time")
    called = "".join(filter(str.isalnum, str(row.get("experiment_name", "")))).lower()
    other = _CALLED.get(called.removesuffix("perf"))  # None: it is none of nccl-tests'
    if other and other != file.operation:
        raise _is_another(file, 0, f"{here} is of {other}")
    _check_operation(file, 0, here, row.get("redop"), row.get("root", ""))
    size = int(file.number(0, row.get("size"), f"size of {here}"))
    if size == 0:
        return _Row(0, 0.0, Bandwidths("0", "0"))
    time_us = file.number(0, in_place["time"], f"in_place time of {here}", above_zero=True)
    algbw, busbw = (
        str(file.number(0, in_place.get(key), f"{key} of {here}")) for key in ("alg_bw", "bus_bw")
    )
    _check_right(file, 0, in_place.get("nwrong", 0), f"nwrong of {here}")
    kind = " ".join(str(row[key]) for key in ("type", "redop") if key in row)
    other_half = row.get("out_of_place")
    out_of_place_s = _seconds(other_half.get("time")) if isinstance(other_half, dict) else None
    bandwidths = Bandwidths(algbw, busbw, where=f"{here}: ")
    return _Row(size, time_us * 1e-6, bandwidths, kind, out_of_place_s)


def _json_devices(file: Benchmark, config: dict[str, Any]) -> list[Device]:
    """One a process, whatever the GPUs of a process."""
    devices = config.get("devices")
    is_list = isinstance(devices, list) and all(isinstance(each, dict) for each in devices)
    if not is_list or not devices:
        raise file.wrong("its config lists no devices, so its ranks are not known")
    keys = ("hostname", "device", "device_hex", "group", "device_info")
    rows = [[each.get(key) for key in keys] for each in devices]
    return [
        Device(rank, *("" if value is None else str(value).strip() for value in each))
        for rank, each in enumerate(rows)
    ]
