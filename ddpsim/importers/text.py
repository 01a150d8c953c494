"""Reading what others wrote: text, tables with named columns, and numbers within reason."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from sys import getsizeof
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ValidationError

from ddpsim.errors import ImportFailedError, shown
from ddpsim.files import open_regular
from ddpsim.scenario.quantity import SourceFile
from ddpsim.scenario.suggest import in_own_words

_Model = TypeVar("_Model", bound=BaseModel)
_Item = TypeVar("_Item")
LARGEST_TEXT = 2**26  # characters of a document or a table
_BEGIN = 2**13  # bytes that tell the encoding
_LARGEST_LOG = 2**32  # characters
_PART, _OVERLAP, _LONGEST_LINE = 2**20, 1000, 2**16
_MOST_KEPT_BYTES, _MOST_ROWS = 10**9, 1_000_000
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CLOCK = re.compile(r"\d\d:\d\d:\d\d")
_TAG = re.compile(
    r"""\s*(?:
      \[[^][\n]{1,80}\](?:<std(?:out|err)>)?(?::|(?=[\s[]|$))  # torchrun, mpirun, kubectl, logging
    | \([^()\n]{0,40}\bpid=\d+[^()\n]{0,60}\)  # Ray, SkyPilot
    | (?!(?i:ep|it|st|tr|ev|va|te))[a-zA-Z][\w.-]*\d:(?=\s)  # pdsh: a host's name
    | \d{1,6}:(?=\s)  # srun --label
    | (?i:rank)[ _]?\d{1,6}\s*[:|](?=\s)
    | [a-zA-Z][\w./-]*\s+\|(?=\s)  # docker compose
    | (?=[a-z-]*\d)[a-z0-9]+(?:-[a-z0-9]+)+(?=\s)  # stern: a pod's name
    | \d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?=\s)
    )\s*""",
    re.VERBOSE,
)
_LARGEST = 1e13  # terabytes, or months in microseconds


@contextmanager
def foreign(source: SourceFile) -> Iterator[io.BufferedReader]:
    """Open a regular file to read bytes, unzipped where it is zipped.

    What goes wrong until the end of the block raises ImportFailedError.
    """
    try:
        with open_regular(source.path) as file:
            is_zipped = file.peek(2).startswith(b"\x1f\x8b")
            yield cast("io.BufferedReader", gzip.GzipFile(fileobj=file)) if is_zipped else file
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ImportFailedError(
            source.given, "the gzip file is cut off or broken; copy it anew"
        ) from None
    except OSError as error:
        raise ImportFailedError(source.given, f"cannot be read: {error.strerror}") from None


@contextmanager
def foreign_text(
    source: SourceFile, wanted: str, *, of_many_programs: bool = False
) -> Iterator[io.TextIOWrapper]:
    """Open a file as `foreign` does, to read text with the ends of its lines as they are.

    `of_many_programs`: some may have written in another encoding, which is no matter.
    """
    with foreign(source) as file:
        begin = file.peek(_BEGIN)[:_BEGIN]
        is_utf16 = begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # PowerShell's
        if begin.startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        errors = "replace" if of_many_programs and b"\0" not in begin else "strict"
        try:
            yield io.TextIOWrapper(file, "utf-16" if is_utf16 else "utf-8", errors, newline="")
        except UnicodeDecodeError:
            raise ImportFailedError(source.given, f"this is not text; wanted {wanted}") from None


def read_text(source: SourceFile, wanted: str) -> str:
    """The text of a document or a table, at most 64 MiB, which must hold some.

    Raises ImportFailedError.
    """
    with foreign_text(source, wanted) as file:
        text = file.read(LARGEST_TEXT + 1)
    if not text.strip():
        raise ImportFailedError(source.given, f"the file is empty; wanted {wanted}")
    if len(text) > LARGEST_TEXT:
        raise ImportFailedError(source.given, f"is larger than 64 MiB; wanted {wanted}")
    return text


def parts_of(source: SourceFile, wanted: str) -> Iterator[str]:
    """Long parts of a log without colours, each after the end of the one before it.

    What has less than 1,000 characters stands whole in one of them. Raises ImportFailedError.
    """
    end, left = "", _LARGEST_LOG
    with foreign_text(source, wanted, of_many_programs=True) as file:
        while part := file.read(_PART):
            yield uncoloured(end + part)
            end, left = part[-_OVERLAP:], left - len(part)
            if left < 0:
                raise ImportFailedError(
                    source.given, "holds more than 4 GiB of text; give the part of one rank"
                )


def lines_of(source: SourceFile, wanted: str) -> Iterator[str]:
    """Lines of a log one after the other, with their ends; a bar's carriage return is one.

    A line of more than 64 Ki characters comes in parts. Raises ImportFailedError.
    """
    with foreign_text(source, wanted, of_many_programs=True) as file:
        while line := file.readline(_LONGEST_LINE):
            yield line


def in_memory(name: str, items: Iterable[_Item], most_bytes: int = _MOST_KEPT_BYTES) -> list[_Item]:
    """A list of what is kept of a file; raises ImportFailedError where it takes more memory."""
    kept, left = [], most_bytes
    for item in items:
        kept.append(item)
        left -= held_bytes(item)
        if left < 0:
            raise ImportFailedError(
                name,
                f"tells more than {most_bytes / 1e9:.1g} GB of memory can hold; give fewer steps, "
                "or one rank's",
            )
    return kept


def held_bytes(value: Any) -> int:
    """How much memory a value takes with all that it holds."""
    inside = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        return getsizeof(value) + 16 + sum(map(held_bytes, inside))
    return getsizeof(value)


class Printed(NamedTuple):
    """What a program printed between two ends of a line, a bar's carriage return being one.

    `source`: labels of a rank, a host or a pod before it, without times; `start`: where they end.
    `is_whole`: its end was printed too.
    """

    source: str
    text: str
    start: int
    is_whole: bool


def uncoloured(text: str) -> str:
    """A text without a terminal's escapes for colours and the cursor."""
    return _COLOUR.sub("", text) if "\x1b" in text else text


def printed(lines: Iterable[str], wanted: re.Pattern[str]) -> Iterator[Printed]:
    """Each line, or state of a bar, that holds what is wanted, parted from what stands before it.

    Launchers and loggers print labels and times there. `lines` have their ends.
    """
    source, goes_on = "", False
    for line in map(uncoloured, lines):
        is_wanted = wanted.search(line) is not None
        if not goes_on:
            source = ""
        goes_on = not line.endswith("\n")
        if is_wanted or goes_on:
            text, start, tags = line.rstrip("\r\n"), 0, []
            while match := _TAG.match(text, start):
                tags.append(match[0].strip())
                start = match.end()
            source = " ".join(tag for tag in tags if not _CLOCK.search(tag)) or source
            if is_wanted:
                yield Printed(source, text, start, line.endswith(("\r", "\n")))


def clock_s(text: str) -> float:
    """Seconds in a number of them, in 04:00 or in 1 day, 0:10:00.25."""
    days, _, clock = text.rpartition(", ")
    total = 0.0
    for part in clock.split(":"):
        total = 60 * total + float(part)
    return total + 86400 * int(days.split()[0]) if days else total


def parsed(model: type[_Model], name: str, text: str | bytes, wanted: str) -> _Model:
    """JSON as one of our pydantic models, called `wanted`; raises ImportFailedError.

    A file must name its schema, which a model that is made here need not.
    """
    try:
        loaded = model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ImportFailedError(name, f"is no {wanted}: {where}: {in_own_words(first)}") from None
    if "schema_" in model.model_fields and "schema_" not in loaded.model_fields_set:
        raise ImportFailedError(name, f"is no {wanted}: schema: is missing")
    return loaded


def header_of(lines: Sequence[str], columns: tuple[str, ...]) -> int | None:
    """Index of the first line that names at least two of the columns; comments start with #."""
    for index, line in enumerate(lines):
        cells = {cell.strip(' "\t') for cell in line.split(",")}
        if len(cells.intersection(columns)) > 1 and not line.startswith("#"):
            return index
    return None


@dataclass(frozen=True)
class ForeignFile:
    """A file of others by its name: figures and tables within reason, and what is wrong there."""

    name: str

    def wrong(self, message: str, line: int = 0) -> ImportFailedError:
        """The error that says what is wrong, and in which line."""
        return ImportFailedError(self.name, message, line)

    def table(
        self, lines: Sequence[str], columns: tuple[str, ...], first: int = 1
    ) -> list[tuple[int, dict[str, str]]]:
        """Line number and cells of each row of a CSV whose header stands in line `first`."""
        reader = csv.DictReader(lines, skipinitialspace=True)
        try:
            named = reader.fieldnames or ()
            missing = [column for column in columns if column not in named]
            twice = [column for column in columns if list(named).count(column) > 1]
            rows = [(reader.line_num + first - 1, row) for row in islice(reader, _MOST_ROWS + 1)]
        except csv.Error as error:
            raise self.wrong(f"this is not CSV: {error}", reader.line_num) from None
        wanted = f"wanted {','.join(columns)}"
        if missing:
            raise self.wrong(f"lacks the column {missing[0]}; {wanted}", first)
        if twice:
            raise self.wrong(f"names the column {twice[0]} twice; keep one of them", first)
        if len(rows) > _MOST_ROWS:
            raise self.wrong(f"holds more than {_MOST_ROWS:,} rows")
        if not rows:
            raise self.wrong(f"holds no row below its header; {wanted}")
        for line, row in rows:
            if None in row or None in row.values():
                many = "many" if None in row else "few"
                raise self.wrong(f"this row has too {many} columns; {wanted}", line)
        return rows

    def number(self, line: int, value: Any, what: str, *, above_zero: bool = False) -> float:
        """A number that is not negative; raises an error that says `what` it should be."""
        try:
            parsed = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            parsed = math.nan
        if 0 < parsed <= _LARGEST or (parsed == 0 and not above_zero):
            return parsed
        wanted = "a number above zero" if above_zero else "a number of at least zero"
        if parsed > _LARGEST:
            wanted = f"at most {_LARGEST:g}"
        raise self.wrong(f"{what} is {shown(value)}; wanted {wanted}", line)

    def whole(self, line: int, value: Any, what: str) -> int:
        """A whole number above zero; raises an error that says `what` it should be."""
        parsed = self.number(line, value, what, above_zero=True)
        if parsed != int(parsed):
            raise self.wrong(f"{what} is {shown(value)}; wanted a whole number", line)
        return int(parsed)


def listed(numbers: Sequence[int]) -> str:
    """Numbers as a message lists them: the first of many."""
    first = ", ".join(map(str, numbers[:8]))
    return f"{first}, ..." if len(numbers) > 8 else first
