"""How the command line starts, and how it ends when something is wrong.

A plain `ddpsim run` goes its own way, without typer: importing it and reading the options of all
commands is a quarter of the start-up.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

# what pydantic imports and a run does not need: with email, zipfile, OpenSSL and sysconfig
_SELDOM_USED = {
    "importlib.metadata": ("entry_points", "version"),
    "secrets": (),
    "zoneinfo": ("ZoneInfo", "ZoneInfoNotFoundError"),
}


class PlainRun(NamedTuple):
    """`ddpsim run FILE [--set KEY=VALUE]... [--json] [--verbose]`."""

    file: str
    settings: tuple[str, ...]
    as_json: bool
    verbose: bool


def plain_run(arguments: Sequence[str]) -> PlainRun | None:
    """The options of a plain `ddpsim run`; None for any other command line, which typer reads.

    Typer also reads wrong options, --help, and all on Windows, where it expands file names.
    """
    if sys.platform == "win32" or "_DDPSIM_COMPLETE" in os.environ or arguments[:1] != ["run"]:
        return None
    files, settings, flags, rest = list[str](), list[str](), set[str](), iter(arguments[1:])
    for argument in rest:
        if argument == "--set":
            settings.append(next(rest, "-"))
        elif argument in ("--json", "--verbose"):
            flags.add(argument)
        else:
            files.append(argument)
    keys = [each.partition("=")[0].strip() for each in settings]
    if len(files) != 1 or any(not each or each.startswith("-") for each in (*files, *settings)):
        return None
    if len(set(keys)) < len(keys):  # one is set twice
        return None
    return PlainRun(files[0], tuple(settings), "--json" in flags, "--verbose" in flags)


def main() -> None:
    """Run the command line; wrong input ends with its errors on stderr and exit code 2."""
    gc.set_threshold(500_000)  # imports make much that stays: a tenth of the start-up
    atexit.register(gc.freeze)  # and that goes with the process: a tenth again to search it
    # we use no plugin of pydantic's, which would look for one in every package installed
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # numpy starts a thread for each core, for products of matrices: half of its import
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name, functions in _SELDOM_USED.items():
        import_when_used(name, functions)
    plain = plain_run(sys.argv[1:])
    if plain:
        run_app(partial(_predict, plain))
        sys.exit(0)  # as typer ends
    from ddpsim.cli.commands import app

    run_app(app)


def import_when_used(name: str, functions: Sequence[str]) -> None:
    """Put a stand-in in a module's place, which imports the module once an attribute is used.

    `functions` can be imported from the stand-in; they import the module once they are called.
    """
    if name in sys.modules:
        return
    package, _, attribute = name.rpartition(".")
    stand_in = sys.modules[name] = ModuleType(name)
    if package:
        setattr(sys.modules[package], attribute, stand_in)

    def real() -> ModuleType:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return import_module(name)

    def call(function: str, *args: Any, **named: Any) -> Any:
        return getattr(real(), function)(*args, **named)

    def look_up(attribute: str) -> Any:
        if attribute in functions:
            return partial(call, attribute)
        if attribute.startswith("__"):  # the import itself looks for a path
            raise AttributeError(attribute)
        vars(stand_in).update(vars(real()))
        return getattr(real(), attribute)

    vars(stand_in)["__getattr__"] = look_up


def _predict(plain: PlainRun) -> None:
    from ddpsim.cli.predict import predict

    file = Path(plain.file)
    predict(file, plain.settings, as_json=plain.as_json, verbose=plain.verbose)


def run_app(commands: Callable[[], object]) -> None:
    """Run a command line, and end with one message on stderr where it cannot do its work.

    Exit code 2 for a wrong scenario or option, 1 for what went wrong otherwise.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what its encoding lacks is escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            commands()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 -- sorted out below, the rest is raised again
        sys.exit(_report(error))


def _open_closed_streams() -> None:
    """What the shell has closed, as `>&-` does, becomes /dev/null: a file would get its number."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))


def _report(error: Exception) -> int:
    from ddpsim.errors import DdpsimError, ScenarioError, printable

    if isinstance(error, OSError) and error.filename is not None:
        named = f"ddpsim: {error.filename}: {error.strerror}"
        print(printable(named), file=sys.stderr)
        return 1
    if isinstance(error, OSError):  # of a stream, not of a file
        if not isinstance(error, BrokenPipeError):  # a reader that has seen enough
            print(f"ddpsim: the output cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        return 1
    if isinstance(error, ImportError) and (lacks := _of_an_extra(error)):
        print(f"ddpsim: {lacks}", file=sys.stderr)
        return 1
    if not isinstance(error, DdpsimError):
        raise error
    print(printable(str(error)), file=sys.stderr)
    if isinstance(error, ScenarioError):
        count = len(error.problems)
        print(f"{count} error{'s' * (count > 1)}, nothing was simulated.", file=sys.stderr)
        return 2
    return 1


def _of_an_extra(error: ImportError) -> str | None:
    """Which library of an extra is missing, and how to install it; None: another module."""
    library = (error.name or "").partition(".")[0]
    extra = {"torch": "calibrate", "scipy": "calibrate", "jinja2": "report", "plotly": "report"}
    if library not in extra:
        return None
    name = extra[library]
    return (
        f"{library} is not installed, and {name} needs it: pip install {library}, or "
        f"pip install 'ddpsim[{name}]' for all that it needs"
    )
