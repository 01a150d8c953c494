"""What ddpsim raises for a reason a user can mend.

DdpsimError
├── ScenarioError      a scenario, or a file that it names, is wrong: every problem at once
├── InputError         an input does not fit the rest of its scenario: which key, and why
├── ImportFailedError  a log, table or profile cannot be read as what it should be
└── SimulationError    the simulation could not finish: who waits for what
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from shlex import quote
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class DdpsimError(Exception):
    """Root of every error that ddpsim raises on purpose."""

    @property
    def reason(self) -> str:
        """What is wrong, without where it stands."""
        return str(self)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `where` (file:line:col), the dotted `key`, and what to do."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.where}  {self.key}" if self.key else self.where
        return f"{place}: {self.message}"


class ScenarioError(DdpsimError):
    """A scenario cannot be simulated; carries all its problems in file order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @property
    def reason(self) -> str:
        """Every problem by its key, on one line."""
        return "; ".join(f"{problem.key}: {problem.message}" for problem in self.problems)


class InputError(DdpsimError):
    """A value that is well formed but cannot be used; `key` is its dotted path."""

    def __init__(self, key: str, message: str) -> None:
        self.key, self.message = key, message
        super().__init__(f"{key}: {message}")


class ImportFailedError(DdpsimError):
    """A file named by a scenario is not what it should be; `line` counts from 1, 0 if unknown."""

    def __init__(self, path: str, message: str, line: int = 0) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}:{line}: {message}" if line else f"{path}: {message}")


def attempted(
    call: Callable[_Parameters, _Result], *args: _Parameters.args, **options: _Parameters.kwargs
) -> _Result | DdpsimError:
    """Return what a call returns, or the error of ddpsim that it raises."""
    try:
        return call(*args, **options)
    except DdpsimError as error:
        return error


@contextmanager
def blamed_on(key: str) -> Iterator[None]:
    """A file that cannot be imported is the fault of the scenario's key that names it."""
    try:
        yield
    except ImportFailedError as error:
        raise InputError(key, str(error)) from None


class SimulationError(DdpsimError):
    """A simulation that could not finish."""


class _Short(reprlib.Repr):
    """Python's repr, cut in the middle where it is long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002 -- reprlib's signature
        # beyond 4300 digits Python itself refuses to write an int
        return repr(x) if abs(x) < 10**20 else "a number of more than 20 digits"


def printable(text: str) -> str:
    """Text whose control characters are escaped, line ends apart: it cannot move a cursor."""
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def not_here(error: ImportError) -> str:
    """Why something cannot be told without a library: in a browser some are not to be had."""
    return f"needs {error.name}, which is not here"


def missing(library: str, package: str) -> ImportError:
    """What to install where a library of an extra is missing."""
    return ImportError(f"{library} is not installed: pip install {quote(package)}", name=library)


def shown(value: object) -> str:
    """A value as a message quotes it: short, on one line, in the words of YAML."""
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else _Short().repr(value)
