"""How a config is read: every key has a rule in its program's table, or is named as not known.

A rule gives the scenario's settings that a value means, by dotted path. None: the value changes no
step. Raises NotModelledError: it changes one, but nothing here models it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]
Rule = Callable[[Any], Settings | None]
_MOST_KEYS = 5_000
_LEFT = ("auto", None)  # what leaves a key to the program


class NotModelledError(ValueError):
    """A value changes the step, in a way that is not modelled; `str()`: what to do instead."""


@dataclass(frozen=True)
class Program:
    """A program's config: keys by which it is known, its table, and what several keys say together.

    Keys of the table are dotted. One that ends in `*` holds for all that begin so; the longest
    counts. `marks`: a document with one of these keys is such a config.
    """

    name: str
    marks: tuple[str, ...]
    table: Mapping[str, Rule]
    together: Callable[[Mapping[str, Any]], Settings] = lambda _: {}


@dataclass(frozen=True)
class Config:
    """What a config says: `settings` of a scenario by dotted path, and what they leave out.

    `not_modelled`: keys with their values and what to do; `unknown`: keys of no rule.
    """

    program: str
    settings: Settings
    not_modelled: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def keys(self) -> dict[str, dict[str, Any]]:
        """The settings by section, as a scenario has them."""
        document: dict[str, dict[str, Any]] = {}
        for path, value in self.settings.items():
            *above, name = path.split(".")
            section: dict[str, Any] = document
            for each in above:
                section = section.setdefault(each, {})
            section[name] = value
        return document


def read_config(program: Program, document: Mapping[str, Any]) -> Config:
    """Read a document by a program's table; raises ValueError for one that is too large."""
    values = dict(flat(document))
    settings: Settings = {}
    left_out, unknown = [], []
    for key, value in values.items():
        rule = _rule(program, key)
        if rule is None:
            unknown.append(key)
            continue
        if value in _LEFT or value == []:
            continue
        try:
            settings |= rule(value) or {}
        except NotModelledError as error:
            left_out.append(f"{key}: {_written(value)}{error}")
    try:
        settings |= program.together(values)
    except NotModelledError as error:
        left_out.append(str(error))
    told = {path: value for path, value in settings.items() if value is not None}
    return Config(program.name, told, tuple(left_out), tuple(unknown))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A document's values by dotted key; lists are values. Raises ValueError for too many."""
    left, found = [(path, value)], 0
    while left:
        at, each = left.pop()
        found += 1
        if found > _MOST_KEYS:  # YAML's anchors may go round
            raise ValueError(f"has more than {_MOST_KEYS} keys")
        if not isinstance(each, Mapping):
            yield at, each
            continue
        left += reversed([(f"{at}.{key}".lstrip("."), own) for key, own in each.items()])


def _rule(program: Program, key: str) -> Rule | None:
    """The rule of a key: its own, or of the longest beginning."""
    if key in program.table:
        return program.table[key]
    begun = [each for each in program.table if each.endswith("*") and key.startswith(each[:-1])]
    return program.table[max(begun, key=len)] if begun else None


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def IDLE(value: Any) -> None:  # noqa: N802 -- a rule without a choice
    """Changes no step."""


def copied(path: str, kind: type = int) -> Rule:
    """A number as the scenario's key takes it."""

    def rule(value: Any) -> Settings:
        if isinstance(value, bool) is not (kind is bool):
            raise NotModelledError(", neither true nor false" if kind is bool else ", no number")
        try:
            number = kind(value)
        except (TypeError, ValueError, OverflowError):
            raise NotModelledError(", no number") from None
        if kind is not bool and number < 1:
            raise NotModelledError("")
        return {path: number}

    return rule


def chosen(choices: Mapping[str, Settings], instead: str = "") -> Rule:
    """The settings of each value as YAML writes it, small; any other is not modelled."""

    def rule(value: Any) -> Settings:
        found = choices.get(_written(value).lower())
        if found is None:
            raise NotModelledError(f" ({instead})" if instead else "")
        return dict(found)

    return rule


def only(*values: str, instead: str = "") -> Rule:
    """Values that change no step; any other is not modelled."""
    return chosen({value: {} for value in values}, instead)
