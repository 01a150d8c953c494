"""Functions that users name as MODULE:FUNCTION."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calibrate.measure.errors import MeasureError
from calibrate.signals import Ended

__all__ = ["find_function"]


def find_function(reference: str) -> Callable[..., Any]:
    """The function named "package.module:function"; raises MeasureError with what is missing.

    Modules of the current folder are found, as `python -m` finds them.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise MeasureError(f"{reference!r} names no function: write MODULE:FUNCTION")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Ended:
        raise
    except SystemExit as error:
        raise MeasureError(
            f"{module_name} ended the program while it was imported (exit code {error.code}): put "
            'what only a script does, such as parse_args, under if __name__ == "__main__"'
        ) from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise MeasureError(f"{module_name} cannot be imported: {said}") from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise MeasureError(f"{module_name} has no function {name!r}")
    found: Callable[..., Any] = function
    return found
