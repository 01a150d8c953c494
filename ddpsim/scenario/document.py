"""A YAML file as plain data that remembers where each key and value stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from ddpsim.errors import Problem, ScenarioError

__all__ = ["Document", "KeyPath"]

KeyPath = tuple[str | int, ...]


@dataclass
class Document:
    """Plain data, its file's name, and for each key path the places of its key and its value."""

    name: str
    base: Path
    data: dict[str, Any]
    key_places: dict[KeyPath, str] = field(default_factory=dict)
    value_places: dict[KeyPath, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Document:
        """Parse a file; raises ScenarioError for anything that is not one YAML mapping."""
        text = _read_text(path)
        tree = _parse(str(path), text)
        if tree is None:
            _refuse(str(path), "the file is empty; `ddpsim init` writes one to start from")
        if not isinstance(tree, CommentedMap):
            _refuse(f"{path}:1:1", "this is not a scenario: wanted keys such as `schema: ddpsim/1`")
        document = cls(str(path), path.parent, {})
        document.data = document._plain(tree, ())
        return document

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], base: Path) -> Document:
        """A document that stands in no file; `base` is what relative paths are relative to."""
        return cls("scenario", base, dict(data))

    def override(self, setting: str) -> None:
        """Apply one `key.path=value`, the value read as YAML."""
        where = f"--set {setting}"
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            _refuse(where, "write --set key.path=value, for instance --set ddp.bucket_cap_mb=50")
        steps = key.strip().split(".")
        path: KeyPath = tuple(steps)
        value = _parse(where, text)
        if isinstance(value, str) and "," in value:
            _refuse(where, "a comma list is an axis of a sweep; a list value is written [1,25]")
        target = self.data
        for depth, step in enumerate(steps[:-1], 1):
            target = target.setdefault(step, {})
            if not isinstance(target, dict):
                _refuse(where, f"{'.'.join(steps[:depth])} is not a mapping; set it whole")
        target[steps[-1]] = self._plain(value, path, where)
        self.key_places[path] = self.value_places[path] = where

    def place(self, path: KeyPath, *, of_key: bool = False) -> str:
        """`file:line:col` of a value (or its key), or of the nearest enclosing one."""
        places = self.key_places if of_key else self.value_places
        for length in range(len(path), 0, -1):
            if path[:length] in places:
                return places[path[:length]]
            places = self.key_places
        return self.name

    def problem(self, path: KeyPath, message: str, *, of_key: bool = False) -> Problem:
        """What is wrong at a key path."""
        return Problem(self.place(path, of_key=of_key), ".".join(map(str, path)), message)

    def _plain(self, node: Any, path: KeyPath, where: str | None = None) -> Any:
        """Python's own types from ruamel's, remembering places on the way."""
        if isinstance(node, CommentedMap):
            for key in node:
                self._remember((*path, key), node.lc.data.get(key), where)
            return {key: self._plain(value, (*path, key), where) for key, value in node.items()}
        if isinstance(node, CommentedSeq):
            return [self._plain(item, (*path, i), where) for i, item in enumerate(node)]
        if isinstance(node, bool) or node is None:
            return node
        for plain in (int, float, str):
            if isinstance(node, plain):
                return plain(node)
        return str(node)  # dates, and whatever else YAML knows

    def _remember(self, path: KeyPath, places: list[int] | None, where: str | None) -> None:
        if where or not places:
            self.key_places[path] = self.value_places[path] = where or self.name
            return
        key_line, key_column, line, column = places[:4]
        self.key_places[path] = f"{self.name}:{key_line + 1}:{key_column + 1}"
        self.value_places[path] = f"{self.name}:{line + 1}:{column + 1}"


def load(path: Path, overrides: Iterable[str] = ()) -> Document:
    """Read a scenario file and apply `--set` overrides in order."""
    document = Document.read(path)
    for setting in overrides:
        document.override(setting)
    return document


def _read_text(path: Path) -> str:
    if path.is_dir():
        _refuse(str(path), "this is a directory; name a scenario file in it")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        _refuse(str(path), "no such file; `ddpsim init` writes one to start from")
    except UnicodeDecodeError as error:
        _refuse(
            str(path), f"this is not text: byte {error.start} is no UTF-8; wanted a YAML scenario"
        )
    except OSError as error:
        _refuse(str(path), f"cannot be read: {error.strerror}")


def _parse(name: str, text: str) -> Any:
    try:
        return YAML(typ="rt", pure=True).load(StringIO(text))
    except DuplicateKeyError as error:
        _refuse(_mark(name, error), _duplicate(error))
    except MarkedYAMLError as error:
        problem = " ".join(str(error.problem or error.context or "syntax error").split())
        _refuse(_mark(name, error), f"this is not YAML: {problem}")
    except (YAMLError, ValueError) as error:
        _refuse(name, f"this is not YAML: {' '.join(str(error).split())}")


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
