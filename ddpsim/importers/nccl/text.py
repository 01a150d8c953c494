"""The text of nccl-tests without what others write into it.

Launchers and terminals put something before each line: labels (`srun --label`, `mpirun
--tag-output`), times (`kubectl logs --timestamps`), marks of quoting, colours. nccl-tests writes a
row in parts, and some launchers label each of them. With NCCL_DEBUG=INFO NCCL writes lines of its
own, also into a row, whose rest then stands below. Who publishes a table may set it in Markdown,
without `#`. Source of what a line and a row look like: nccl-tests src/common.cu and src/util.cu.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from ddpsim.importers.text import uncoloured

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
            header = _header(line.text)
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
    bare = _unframed(before)
    start = _START.search(bare)
    told = _unlabelled(bare, start.start()) if start else bare
    return Line(number, told, before != text)


def _unframed(text: str) -> str:
    """A row of a Markdown table as nccl-tests prints it."""
    return text.replace("|", " ") if text.lstrip().startswith("|") else text


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


def _header(text: str) -> TextRow:
    """A row without cells; -I puts four columns of statistics behind each half."""
    half = 8 if " i_min " in text else 4
    return TextRow(0, (), " root " in text, half, "#wrong" in text)


def _continued(row: TextRow, line: Line) -> TextRow:
    """A row with the figures that end a line below it, if they are of the row."""
    from_the_end = tuple(takewhile(is_figure, reversed(line.text.split())))
    cells = row.cells + from_the_end[::-1]
    is_rest = len(cells) <= row.wanted  # too many where the break went through a number
    return row._replace(cells=cells) if is_rest else row
