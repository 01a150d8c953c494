"""The points of a sweep: every combination of its axes."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import chain, product
from pathlib import Path

from ddpsim.errors import Problem, ScenarioError
from ddpsim.files import read_regular
from ddpsim.settings import Setting, split_values

MOST_POINTS = 1_000_000
_LARGEST_BYTES = 2**26  # of the CSV of an axis


@dataclass(frozen=True)
class Axis:
    """Keys that change together, and the values they take together."""

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    @classmethod
    def of_setting(cls, setting: str) -> Axis:
        """`key=1,2,3`; raises ScenarioError for what is no list of values."""
        where = f"--set {setting}"
        try:
            key, text = Setting.parse(setting)
        except ValueError:
            raise _refused(where, "write --set key.path=1,2,3") from None
        values = split_values(text)
        if any(not value for value in values):
            raise _refused(where, "a value is missing between two commas, or at an end")
        return cls((key,), _distinct(where, [(value,) for value in values]))

    @classmethod
    def read(cls, path: Path) -> Axis:
        """A CSV file: dotted keys in its first row, then values that go together in each row.

        Raises ScenarioError.
        """
        try:
            text = read_regular(path, _LARGEST_BYTES).decode("utf-8-sig")
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise _refused(f"--axis {path}", f"cannot be read: {why}") from None
        if text.count("\n") > MOST_POINTS:
            raise _refused(str(path), f"holds more than {MOST_POINTS:,} rows")
        reader = csv.reader(StringIO(text), skipinitialspace=True)
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
        lines = [(line, row) for line, row in lines if any(row)]
        rows = [row for _, row in lines]
        if len(rows) < 2:
            raise _refused(
                f"{path}:1",
                "wanted a row of dotted keys, such as cluster.nodes,workload.batch_per_rank, and "
                "below it a row of values for each",
            )
        keys = tuple(rows[0])
        if any(";" in key for key in keys):
            raise _refused(f"{path}:1", "separate the cells by commas, not by semicolons")
        for line, row in lines:
            if len(row) != len(keys) or not all(row):
                raise _refused(
                    f"{path}:{line}",
                    f"wanted {len(keys)} cells, one for each key, got {sum(map(bool, row))}; a "
                    "value that holds a comma goes in quotes",
                )
        return cls(keys, _distinct(str(path), [tuple(row) for row in rows[1:]]))


@dataclass(frozen=True)
class Grid:
    """Settings that all points share, and axes; the last axis varies fastest."""

    fixed: tuple[str, ...]
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, settings: Sequence[str], files: Sequence[Path] = ()) -> Grid:
        """Settings with one value are shared. Raises ScenarioError."""
        axes = [Axis.of_setting(setting) for setting in settings]
        fixed = tuple(s for s, axis in zip(settings, axes, strict=True) if len(axis.values) == 1)
        moved = (*(axis for axis in axes if len(axis.values) > 1), *map(Axis.read, files))
        keys = list(chain.from_iterable(axis.keys for axis in moved))
        for key in keys:
            if keys.count(key) > 1:
                raise _refused(key, "two axes move this key; leave one of them out")
            if any(Setting.parse(setting).key == key for setting in fixed):
                raise _refused(key, "an axis moves this key, and --set fixes it; leave one out")
        grid = cls(fixed, moved)
        if len(grid) > MOST_POINTS:
            raise _refused("--set", f"{len(grid):,} points are more than {MOST_POINTS:,}")
        return grid

    def __len__(self) -> int:
        count = 1
        for axis in self.axes:
            count *= len(axis.values)
        return count

    def __iter__(self) -> Iterator[tuple[Setting, ...]]:
        for values in product(*(axis.values for axis in self.axes)):
            pairs = zip(self.axes, values, strict=True)
            yield tuple(
                Setting(key, value)
                for axis, together in pairs
                for key, value in zip(axis.keys, together, strict=True)
            )


def _distinct(where: str, values: list[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    for value, times in Counter(values).items():
        if times > 1:
            raise _refused(where, f"{', '.join(value)} stands there twice")
    return tuple(values)


def _refused(where: str, message: str) -> ScenarioError:
    return ScenarioError([Problem(where, "", message)])
