"""The text of nccl-tests without what others write into it.

Launchers and terminals put something before each line: labels (`srun --label`, `mpirun
--tag-output`), times (`kubectl logs --timestamps`), marks of quoting, colours. nccl-tests writes a
row in parts, and some launchers label each of them. With NCCL_DEBUG=INFO NCCL writes lines of its
own, also into a row, whose rest then stands below. Who publishes a table may set it in Markdown,
without `#`. Newer versions name the collective in a banner; in older ones the rows tell it by their
operation, root and bandwidths. Source of what a line and a row look like: nccl-tests src/common.cu,
src/util.cu and doc/PERFORMANCE.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice, takewhile
from pathlib import PurePath
from typing import NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.measured import Bandwidths, Operation, OtherCollectiveError, reads_below
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
NO_DEVICES = "does not list its devices ('#  Rank  0 ... on HOST device 0')"
_AS_CSV = "write it as CSV: size_bytes,time_us,nodes,gpus_per_node"


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
        told = root is None or re.fullmatch(r"-?\d+", root) is not None
        return told and len(self.cells) >= self.wanted

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


def plain_lines(texts: Iterable[str]) -> list[Line]:
    """The lines of a log without prefixes, colours and NCCL's own text."""
    bare = [uncoloured(text) for text in texts]
    hosts = {found["host"] for text in bare if (found := _DEVICE.search(text))}
    return [_plain(number, text, hosts) for number, text in enumerate(bare, 1)]


def table_rows(lines: Sequence[Line]) -> list[TextRow]:
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
            rows[-1] = _continued(rows[-1], line)
    return rows


def device_of(text: str) -> Device | None:
    """The device that a line lists."""
    found = _DEVICE.match(text)
    if not found:
        return None
    told = found.group("host", "ordinal", "bus", "group", "gpu")
    return Device(int(found["rank"]), *((value or "").strip() for value in told))


def is_figure(cell: str) -> bool:
    """Whether a cell is a number, or N/A."""
    return _FIGURE.fullmatch(cell) is not None


def _plain(number: int, text: str, hosts: Collection[str]) -> Line:
    before = _before_nccl(text, hosts)
    is_framed = before.lstrip().startswith("|")  # a row of a Markdown table
    bare = before.replace("|", " ") if is_framed else before
    start = _START.search(bare)
    told = _unlabelled(bare, start.start()) if start else bare
    return Line(number, told, before != text)


def _unlabelled(text: str, start: int) -> str:
    """Text from `start` on, without what stands before it, which may come again within a row."""
    label = text[:start].strip()
    is_label = label and not all(is_figure(word) for word in label.split())
    return text[start:].replace(label, " ") if is_label else text[start:]


def _before_nccl(text: str, hosts: Collection[str]) -> str:
    """Text up to `HOST:PID:TID [GPU] NCCL `; the end of a row may stick to the host."""
    found = _OF_NCCL.search(text) if " NCCL " in text else None
    if not found:
        return text
    host = found[1]
    if host not in hosts:
        host = max((known for known in hosts if host.endswith(known)), key=len, default=host)
    return _LABELS_AT_THE_END.sub("", text[: found.end(1) - len(host)])


def _continued(row: TextRow, line: Line) -> TextRow:
    """A row with the figures that end a line below it, if they are of the row."""
    from_the_end = tuple(takewhile(is_figure, reversed(line.text.split())))
    cells = row.cells + from_the_end[::-1]
    is_rest = len(cells) <= row.wanted  # too many where the break went through a number
    return row._replace(cells=cells) if is_rest else row


class _Run(NamedTuple):
    """The lines of a run, and its collective; empty: the rows do not agree on one."""

    lines: list[Line]
    operation: str

    def may_be(self, operation: Operation) -> bool:
        """Whether it is of this collective, as far as its rows tell."""
        return operation in self.operation.split(" or ")


def only_runs_of(
    name: str, operation: Operation, lines: Sequence[Line]
) -> tuple[list[Line], tuple[str, ...]]:
    """The lines of the runs of a collective, and a note that names the others.

    All lines, where there is none: their checks say what they are of instead.
    """
    runs = _runs(lines)
    if not any(run.may_be(operation) for run in runs):
        return [*lines], ()
    wanted = [run for run in runs if run.may_be(operation) or not run.operation]
    others = [run for run in runs if run.operation and not run.may_be(operation)]
    said = [f"{run.operation} (from line {run.lines[0].number})" for run in others]
    note = f"{name}: {operation} is read; the file also holds {', '.join(said)}"
    return [line for run in wanted for line in run.lines], (note,) if said else ()


def program_of(line: Line) -> str | None:
    """The test that a banner names."""
    found = _STARTING.match(line.text)
    return found[1] if found else None


def operation_called(experiment: str) -> str | None:
    """The collective of an experiment's name in JSON; None: it is none of nccl-tests'."""
    called = "".join(filter(str.isalnum, experiment)).lower()
    return _CALLED.get(called.removesuffix("perf"))


def check_program(name: str, line: int, program: object, operation: Operation) -> None:
    """Raise ImportFailedError where the program that ran, or its path, is another test's."""
    match = _PROGRAM.match(PurePath(str(program)).name)
    if match and match[1] != operation:
        raise is_another(name, line, f"is of {match[0]}", operation)


def check_operation(
    name: str, line: int, row: str, redop: object, root: object, operation: Operation
) -> None:
    """What reduces has an operation; a broadcast alone a root, which is else -1 or not told.

    Raises ImportFailedError.
    """
    to = str(root).strip() or "-1"
    reduces, has_root = operation in ("all_reduce", "reduce_scatter"), operation == "broadcast"
    if (redop != "none", to != "-1") != (reduces, has_root):
        given = f"redop {redop}, root {to}"
        raise is_another(name, line, f"{row} is of another collective ({given})", operation)


def is_another(name: str, line: int, what: str, operation: Operation) -> OtherCollectiveError:
    """What is wrong with a log of another collective."""
    told = f"wanted the log of {operation}_perf; calibrate import takes others with --operation"
    return OtherCollectiveError(name, f"{what}; {told}", line)


def _runs(lines: Sequence[Line]) -> list[_Run]:
    """A run begins with a banner below the rows of another."""
    parts: list[list[Line]] = [[]]
    has_rows = False
    rows_at = {row.line for row in table_rows(lines)}
    for line in lines:
        if has_rows and _BEGINS.match(line.text):
            parts.append([])
            has_rows = False
        has_rows = has_rows or line.number in rows_at
        parts[-1].append(line)
    return [_Run(part, _operation(part)) for part in parts]


def _operation(lines: Sequence[Line]) -> str:
    for program in filter(None, map(program_of, reversed(lines))):
        if match := _PROGRAM.match(PurePath(program).name):
            return match[1]
    told = {_told_by(row) for row in table_rows(lines) if row.is_whole}
    return told.pop() if len(told) == 1 else ""


def _told_by(row: TextRow) -> str:
    """The collective of a whole row, as near as its cells tell it."""
    if is_figure(row.cells[3]):
        return "a collective without redop"
    root = row.root or "-1"
    if row.cells[3] == "none":
        return "all_gather or alltoall" if root == "-1" else "broadcast"
    if root != "-1":
        return "reduce"
    _, algbw, busbw, *_ = row.in_place
    return "reduce_scatter" if reads_below(Bandwidths(algbw, busbw)) else "all_reduce"


def device_lists(
    name: str, lines: Iterable[Line], rows: Iterable[TextRow]
) -> list[tuple[Device, ...]]:
    """The devices of every run that lists them: a rank that comes again begins the next run."""
    rows_at = {row.line for row in rows}
    runs: list[dict[int, Device]] = []
    has_rows = False
    for line in lines:
        has_rows = has_rows or line.number in rows_at
        if device := device_of(line.text):
            before = runs[-1].get(device.rank) if runs else None
            if before and not has_rows:
                raise ImportFailedError(
                    name,
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
        _check_all_listed(name, run.keys())
    return [tuple(run.values()) for run in runs]


def layout_of(name: str, devices: Sequence[Device]) -> tuple[int, int]:
    """Nodes and devices of each; raises ImportFailedError where they are not alike."""
    _check_each_its_own(name, devices)
    of_node = Counter(device.host for device in devices)
    if len(set(of_node.values())) > 1:
        raise ImportFailedError(
            name, f"lists {len(devices)} ranks on {len(of_node)} nodes, which are not alike"
        )
    return len(of_node), len(devices) // len(of_node)


def only_layout(name: str, layouts: set[tuple[int, int]]) -> tuple[int, int]:
    """The one layout of a file; raises ImportFailedError where there are several."""
    if len(layouts) > 1:
        raise ImportFailedError(
            name, "holds several layouts (nodes, gpus_per_node); keep one a file"
        )
    return layouts.pop()


def check_one_group(name: str, devices: Iterable[Device]) -> None:
    """Raise ImportFailedError where several groups reduced side by side."""
    groups = {device.group for device in devices if device.group}
    if len(groups) > 1:
        raise ImportFailedError(
            name,
            f"lists devices of {len(groups)} groups, which reduced side by side "
            "(NCCL_TESTS_SPLIT): how many ranks a time is of is not known; wanted a run of one",
        )


def _check_all_listed(name: str, ranks: Iterable[int]) -> None:
    there = set(ranks)
    missing = [*islice((rank for rank in range(max(there)) if rank not in there), 10)]
    if missing:
        raise ImportFailedError(
            name,
            f"lists ranks {listed(sorted(there))}, but others are missing ({listed(missing)}), "
            f"so how many there are is not known; list all of them, or {_AS_CSV}",
        )


def _check_each_its_own(name: str, devices: Iterable[Device]) -> None:
    """Two ranks on one GPU are two nodes of one name, or nothing that DDP does."""
    ranks: dict[tuple[str, str, str], int] = {}
    for device in devices:
        place = (device.host, device.ordinal, device.bus)
        if device.ordinal and ranks.setdefault(place, device.rank) != device.rank:
            raise ImportFailedError(
                name,
                f"lists device {device.ordinal} [{device.bus}] of {device.host} for ranks "
                f"{ranks[place]} and {device.rank}: if two nodes go by this name, as nccl-tests "
                f"cuts names at the first dot, name them apart in the list, or {_AS_CSV}",
            )
