"""The user's own code: functions named as MODULE:FUNCTION, what they raised, and where."""

from __future__ import annotations

import importlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch

import calibrate
from calibrate.measure.errors import MeasureError, first_line
from calibrate.records.rounds import OptimizerName
from calibrate.signals import Ended


@contextmanager
def optimizers_own_errors(
    reference: str, optimizer: OptimizerName, *, fused: bool
) -> Iterator[None]:
    """What an optimizer does not take, such as sparse gradients: told with the option."""
    try:
        yield
    except (torch.cuda.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        asked = f"--optimizer {optimizer}{' --fused' if fused else ''}"
        raise MeasureError(
            f"{asked} cannot step the parameters of {reference} ({said_of(error)}): give another"
        ) from error


@contextmanager
def users_own_errors(reference: str) -> Iterator[None]:
    """What goes wrong is the user's code, or what torch says to it: told with the place there."""
    try:
        yield
    except (MeasureError, torch.cuda.OutOfMemoryError, torch.AcceleratorError, Ended):
        raise
    except (Exception, SystemExit) as error:
        place = _place_of_users(error)
        where = f" ({place})" if place else ""
        raise MeasureError(f"{reference}{where}: {said_of(error)}") from error


def told_of_code(error: Exception) -> MeasureError | None:
    """The error of a user's own code, with its place; or of torch, in its own words; or None."""
    if place := _place_of_users(error):
        return MeasureError(f"{place}: {said_of(error)}")
    if isinstance(error, RuntimeError):
        return MeasureError(f"{type(error).__name__}: {first_line(error)}")
    return None


def _place_of_users(error: BaseException) -> str:
    """File and line of the last step that is neither torch's, Python's own nor ours; or nothing.

    Nothing where it came about in torch.distributed: then the user's code only waited for others.
    """
    framework = Path(torch.__file__).parent
    ours = (framework, Path(calibrate.__file__).parent)
    python = Path(sysconfig.get_paths()["stdlib"])
    frames = extract_tb(error.__traceback__)
    if frames and Path(frames[-1].filename).is_relative_to(framework / "distributed"):
        return ""
    for frame in reversed(frames):
        path = Path(frame.filename)
        is_python = path.is_relative_to(python) and "site-packages" not in path.parts
        is_python = is_python or path.name in ("sitecustomize.py", "typing_extensions.py")
        if path.is_file() and not is_python and not any(map(path.is_relative_to, ours)):
            return f"{path.name}, line {frame.lineno}"
    return ""


def said_of(error: BaseException) -> str:
    """An error's kind and message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


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
