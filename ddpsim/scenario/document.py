"""A YAML file as plain data that remembers where each key and value stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from ddpsim.errors import InputError, Problem, ScenarioError, shown
from ddpsim.files import read_given
from ddpsim.scenario.base import Spec, numbered
from ddpsim.scenario.suggest import why_no_yaml
from ddpsim.settings import Setting

KeyPath = tuple[str | int, ...]

# aliases let a page of YAML unfold to gigabytes
_MOST_VALUES = 100_000
_DEEPEST = 50
_LARGEST_BYTES = 2**21
_SHORT = 200  # letters; longer texts are whole scenarios, of which a page sends many

# what the parser's words mean most often


@dataclass
class Document:
    """Plain data, its file's name, and for each key path the places of its key and its value.

    `stated`: the same without `--set` overrides, where there are any. `files`: the only ones that
    it may name; None: any.
    """

    name: str
    base: Path
    data: dict[str, Any]
    stated: Document | None = None
    key_places: dict[KeyPath, str] = field(default_factory=dict)
    value_places: dict[KeyPath, str] = field(default_factory=dict)
    files: frozenset[str] | None = None

    @classmethod
    def read(cls, path: Path) -> Document:
        """Parse a file, or the standard input (`-`).

        Raises ScenarioError for anything that is not one YAML mapping.
        """
        return cls.of_text(read_text(path), str(path), path.parent)

    @classmethod
    def of_text(
        cls, text: str, name: str, base: Path, files: frozenset[str] | None = None
    ) -> Document:
        """A document of YAML text, whose places say `name`; relative paths start in `base`.

        Raises ScenarioError for anything that is not one YAML mapping.
        """
        tree = _parse(name, text)
        if tree is None:
            _refuse(name, "the file is empty; `ddpsim init` prints a scenario to start from")
        if not isinstance(tree, CommentedMap):
            _refuse(f"{name}:1:1", "this is not a scenario: wanted keys such as `schema: ddpsim/1`")
        start: dict[KeyPath, str] = {(): f"{name}:1:1"}
        document = cls(name, base, {}, None, dict(start), dict(start), files)
        document.data = document._plain(tree, ())
        return document

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], base: Path) -> Document:
        """A document that stands in no file; `base` is what relative paths are relative to."""
        return cls("scenario", base, deepcopy(dict(data)))

    def changed(self, settings: Iterable[str]) -> Document:
        """A copy with `--set` overrides applied in order."""
        copy = replace(
            self,
            data=deepcopy(self.data),
            key_places=dict(self.key_places),
            value_places=dict(self.value_places),
        )
        for setting in settings:
            copy.override(setting)
        return copy

    def override(self, setting: str) -> None:
        """Apply one `key.path=value`, the value read as YAML."""
        if not isinstance(setting, str):
            raise TypeError(f"{shown(setting)} is no setting; write text such as 'cluster.nodes=4'")
        where = f"--set {setting}"
        try:
            key, text = Setting.parse(setting)
        except ValueError:
            _refuse(where, "write --set key.path=value, for instance --set ddp.bucket_cap_mb=50")
        if not text.strip():
            _refuse(where, f"there is no value; for the default write {key}=null")
        steps = [numbered(step) for step in key.split(".")]
        try:
            value = _parse(where, text)
        except ScenarioError as error:  # without the line and column of a single word
            _refuse(where, error.problems[0].message)
        if isinstance(value, str) and "," in value and text.strip()[0] not in "\"'":
            _refuse(
                where,
                "a comma list is an axis of a sweep; a list value is written [1,25], "
                """and text in quotes of its own: --set 'name="A, B"'""",
            )
        target: Any = self.data
        path: KeyPath = ()
        for step in steps[:-1]:
            path = (*path, _as_written(target, step))
            if target.get(path[-1]) is None:
                target[path[-1]] = {}
                self.key_places[path] = where
            target = target[path[-1]]
            if not isinstance(target, dict):
                _refuse(where, f"{'.'.join(map(str, path))} is not a mapping; set it whole")
        path = (*path, _as_written(target, steps[-1]))
        self._forget(path)
        target[path[-1]] = self._plain(value, path, where)
        self.key_places[path] = self.value_places[path] = where

    def place(self, path: KeyPath, *, of_key: bool = False) -> str:
        """`file:line:col` of a value (or its key), or of the nearest enclosing one."""
        if not of_key and path in self.value_places:
            return self.value_places[path]
        enclosing = (path[:length] for length in range(len(path), -1, -1))
        return next((self.key_places[p] for p in enclosing if p in self.key_places), self.name)

    def problem(self, path: KeyPath, message: str, *, of_key: bool = False) -> Problem:
        """What is wrong at a key path."""
        key = ".".join(map(str, path))
        return Problem(
            self.place(path, of_key=of_key), key if len(key) < 100 else shown(key), message
        )

    def blame(self, error: InputError) -> Problem:
        """An error of a value, at its place."""
        return self.problem(tuple(error.key.split(".")), error.message)

    def _plain(self, node: Any, path: KeyPath, where: str | None = None) -> Any:
        """Python's own types from ruamel's, remembering places on the way."""
        if len(path) > _DEEPEST or len(self.value_places) > _MOST_VALUES:
            _refuse(self.place(path), "this is nested too deeply, or too long, for a scenario")
        if isinstance(node, (CommentedMap, CommentedSeq)):
            items = list(node.items() if isinstance(node, CommentedMap) else enumerate(node))
            for key, _ in items:
                self._remember((*path, key), (node.lc.data or {}).get(key), where)
            values = {key: self._plain(value, (*path, key), where) for key, value in items}
            return values if isinstance(node, CommentedMap) else list(values.values())
        if isinstance(node, bool) or node is None:
            return node
        for plain in (int, float, str):
            if isinstance(node, plain):
                return plain(node)
        return str(node)  # dates, and whatever else YAML knows

    def _forget(self, path: KeyPath) -> None:
        """The places of what stands at and below a path, as other values come there."""
        for places in (self.key_places, self.value_places):
            for gone in [each for each in places if each[: len(path)] == path]:
                del places[gone]

    def _remember(self, path: KeyPath, places: list[int] | None, where: str | None) -> None:
        """Places are the key's line and column, then the value's; a list's item has one pair.

        What came in by a merge key has none: then `place` names the mapping around it.
        """
        if where:
            self.key_places[path] = self.value_places[path] = where
        elif places:
            (key_line, key_column), (line, column) = places[:2], places[-2:]
            self.key_places[path] = f"{self.name}:{key_line + 1}:{key_column + 1}"
            self.value_places[path] = f"{self.name}:{line + 1}:{column + 1}"


# a YAML file, the same as a mapping, or a scenario that was read
Source = str | Path | Mapping[str, Any] | Spec | Document


def load(source: Source, overrides: Iterable[str] = ()) -> Document:
    """Read a scenario file, or take a mapping or a scenario, and apply `--set` overrides in order.

    Relative paths of a mapping start in the current folder.
    """
    if isinstance(source, Document):
        document = source
    elif isinstance(source, Spec):
        folder: dict[str, Path] = {}
        written = source.model_dump(mode="json", exclude_unset=True, context=folder)
        document = Document.from_mapping(written, folder.get("base", Path()))
    elif isinstance(source, Mapping):
        document = Document.from_mapping(source, Path())
    else:
        document = Document.read(Path(source))
    settings = tuple(overrides)
    return replace(document.changed(settings), stated=document) if settings else document


def _as_written(mapping: Mapping[Any, Any], step: str | int) -> str | int:
    """A key as it stands in a mapping: JSON has a rank's number as text."""
    return step if step in mapping or str(step) not in mapping else str(step)


def read_text(path: Path) -> str:
    """The text of a scenario's file, or of the standard input (`-`); raises ScenarioError."""
    try:
        return read_given(path, _LARGEST_BYTES).decode("utf-8-sig")
    except IsADirectoryError:
        _refuse(str(path), "this is a directory; name a scenario file in it")
    except FileNotFoundError:
        _refuse(str(path), "no such file; `ddpsim init` prints one to start from")
    except UnicodeDecodeError as error:
        wanted = "wanted a YAML scenario, saved as UTF-8"
        _refuse(str(path), f"this is not UTF-8 text (byte {error.start + 1}); {wanted}")
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        _refuse(shown(str(path)), f"cannot be read: {getattr(error, 'strerror', error)}")


@lru_cache(maxsize=1024)
def _value(text: str) -> Any:
    """What a setting's text holds; a sweep asks for the values of its axes again and again."""
    return _tree(text)


def _tree(text: str) -> Any:
    return YAML(typ="rt", pure=True).load(StringIO(text))


def _parse(name: str, text: str) -> Any:
    try:
        return _value(text) if len(text) <= _SHORT else _tree(text)
    except DuplicateKeyError as error:
        _refuse(_mark(name, error), _duplicate(error))
    except MarkedYAMLError as error:
        _refuse(_mark(name, error), f"this is not YAML: {why_no_yaml(error)}")
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        _refuse(f"{name}:{line}", "this is not YAML: a control character stands in this line")
    except RecursionError:
        _refuse(name, "this is nested too deeply for a scenario")
    except (YAMLError, ValueError):  # from int() and date()
        _refuse(name, "this is not YAML: one of its numbers or dates cannot be read")


def _mark(name: str, error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


def _duplicate(error: DuplicateKeyError) -> str:
    key = str(error.problem).split('"', 2)[1] if '"' in str(error.problem) else "a key"
    block = error.context_mark
    inside = f" in the mapping that starts at line {block.line + 1}" if block else ""
    return f"the key {key!r} stands twice{inside}; remove one of them"


def _refuse(where: str, message: str) -> NoReturn:
    raise ScenarioError([Problem(where, "", message)])
