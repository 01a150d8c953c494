"""Names of strategies that other packages bring, by entry point or by `register`.

A package names its strategies in its `pyproject.toml`:

    [project.entry-points."ddpsim.strategies"]
    largest_first = "my_package:LargestFirst"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ddpsim.errors import InputError

GROUP = "ddpsim.strategies"
_registered: dict[str, Callable[..., Any]] = {}


class _EntryPoint(NamedTuple):
    """An entry point that is loaded when a scenario asks for it."""

    package: str
    load: Callable[[], Callable[..., Any]]


def register(name: str, factory: Callable[..., Any]) -> None:
    """Let scenarios of this process name a strategy: `ddp.strategy: name`.

    `factory`: a subclass of `Strategy`, or what returns one, from a `StrategyContext` and the
    scenario's `ddp.options` as keyword arguments. An installed package names its strategies by
    entry point instead, which also other processes see.
    """
    _registered[name] = factory


def other_strategies() -> tuple[str, ...]:
    """Names that scenarios may use beside ddpsim's own, sorted."""
    return tuple(sorted({*_registered, *_entry_points()}))


def factory_of(name: str) -> Callable[..., Any]:
    """What builds a strategy of another package; raises InputError if it cannot be imported."""
    if name in _registered:
        return _registered[name]
    entry_point = _entry_points()[name]
    try:
        return entry_point.load()
    except (ImportError, AttributeError) as error:
        message = f"{name} of the package {entry_point.package} cannot be imported: {error}"
        raise InputError("ddp.strategy", message) from None


@cache
def _entry_points() -> dict[str, _EntryPoint]:
    from importlib.metadata import entry_points  # noqa: PLC0415  a plain run needs none

    return {
        point.name: _EntryPoint(point.dist.name if point.dist else "?", point.load)
        for point in entry_points(group=GROUP)
    }
