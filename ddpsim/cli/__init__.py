"""The command line: `start` starts and ends it, `commands` holds all that it knows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddpsim.cli.start import main, run_app

if TYPE_CHECKING:
    from ddpsim.cli.commands import app
    from ddpsim.cli.typer_app import new_app, parsed

__all__ = ["app", "main", "new_app", "parsed", "run_app"]

# imported when first used: a plain `ddpsim run` does without typer
_HOMES = {
    "app": "ddpsim.cli.commands",
    "new_app": "ddpsim.cli.typer_app",
    "parsed": "ddpsim.cli.typer_app",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddpsim.cli' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
