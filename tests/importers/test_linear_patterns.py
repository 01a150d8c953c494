"""Every pattern that reads a foreign file takes steps in proportion to the text."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from regex_steps import attacks, steps

import ddpsim.importers
from ddpsim.importers.training import step_lines

FEW, MORE = 24, 48
WORSE = 2.7  # times the steps for twice the text: 2 of a linear pattern, 4 of a quadratic one
ANCHORED, SEARCHING = {"match", "fullmatch"}, {"search", "finditer", "findall", "sub", "split"}


def modules() -> Iterator[ModuleType]:
    package = ddpsim.importers
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def methods_of(source: str) -> dict[str, set[str]]:
    """By the name of a pattern, what is called of it."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.setdefault(node.value.id, set()).add(node.attr)
    return found


def patterns() -> Iterator[tuple[str, re.Pattern[str], bool]]:
    """Name, pattern, and whether it is only tried where a text begins."""
    for module in modules():
        source = Path(module.__file__ or "").read_text("utf-8")
        used = methods_of(source)
        for name, value in vars(module).items():
            every = value if isinstance(value, tuple) else (value,)
            for number, each in enumerate(every):
                if isinstance(each, re.Pattern):
                    called = used.get(name, set()) & {*ANCHORED, *SEARCHING}
                    at_start = bool(called) and called <= ANCHORED
                    yield f"{module.__name__}.{name}.{number}", each, at_start
    for form in step_lines._FORMATS:
        for text in (form.line, form.before, *form.once, form.evaluation, form.lacking):
            if text:
                yield f"{form.program}: {text}", step_lines._pattern(text), False


PATTERNS = {name: (pattern, at_start) for name, pattern, at_start in patterns()}


def test_patterns_are_found() -> None:
    assert len(PATTERNS) > 60


@pytest.mark.parametrize("name", PATTERNS)
def test_twice_the_text_takes_twice_the_steps(name: str) -> None:
    pattern, at_start = PATTERNS[name]
    for few, more in zip(attacks(pattern, FEW), attacks(pattern, MORE), strict=True):
        took = steps(pattern, more, at_start=at_start)
        assert took <= WORSE * steps(pattern, few, at_start=at_start), more
