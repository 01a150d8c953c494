"""Settings written into a scenario's YAML, whose comments stay."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from ddpsim.scenario.base import numbered
from ddpsim.settings import Setting


def edited(text: str, settings: Iterable[str]) -> str:
    """YAML of a scenario with `key.path=value` settings in it; a key that is set to null goes.

    The text is one mapping, and the settings are right, as `Document.changed` has found.
    """
    tree = _yaml().load(StringIO(text))
    for setting in settings:
        key, value = Setting.parse(setting)
        _set(tree, key.split("."), _yaml().load(StringIO(value)))
    written = StringIO()
    _yaml().dump(tree, written)
    return written.getvalue()


def _yaml() -> YAML:
    yaml = YAML(typ="rt", pure=True)
    yaml.preserve_quotes = True
    yaml.width = 100
    return yaml


def _set(tree: CommentedMap, path: list[str], value: Any) -> None:
    *sections, last = map(numbered, path)
    for section in sections:
        if tree.get(section) is None:
            if value is None:
                return
            tree[section] = CommentedMap()
        tree = tree[section]
    if value is None:
        tree.pop(last, None)
    else:
        tree[last] = value
