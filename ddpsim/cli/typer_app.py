"""What the commands share: the app that they join, their arguments, and errors of options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, overload

import typer
from typer.core import TyperGroup

from ddpsim.errors import shown

if TYPE_CHECKING:
    from ddpsim.report.page.charts import Chart

_SECTIONS = ("Predict", "Plan", "Calibrate", "Files")  # of --help, in this order
_Parsed = TypeVar("_Parsed")

_HELP = """\b
Predict PyTorch DDP step time before you book the GPUs.
  ddpsim init resnet50-2x8-25gbit > scenario.yaml      a scenario to start from
  ddpsim run scenario.yaml                             one prediction
  ddpsim diagnose scenario.yaml --measured "95 ms"     why is my real job slow?
"""


class _Group(TyperGroup):
    """Commands that refuse an option's value in our own words: typer's are pydantic's."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; tells a refused option in ddpsim's own words."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            from ddpsim.scenario.suggest import in_own_words

            if isinstance(error.__cause__, ValidationError):
                error.message = in_own_words(error.__cause__.errors(include_url=False)[0])
            raise


class _Sections(_Group):
    """Commands whose help lists them by section: their `rich_help_panel`, in plain text."""

    # typer's own types of the two are private
    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 -- typer's form
        """Write one list a section, with all descriptions in one column."""
        commands: dict[str, Any] = dict(self.commands)
        width = max(map(len, commands))
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in _SECTIONS}
        for name, command in commands.items():
            short = command.get_short_help_str(formatter.width - width - 6)
            sections[command.rich_help_panel].append((name.ljust(width), short))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def new_app(help_text: str, **options: Any) -> typer.Typer:
    """An empty command line in our style; `options` are more of typer's."""
    usual: dict[str, Any] = {"add_completion": False, "cls": _Group}
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich costs a third of the start-up, and pads the examples
        **(usual | options),
    )


app = new_app(_HELP, cls=_Sections, add_completion=True)

File = Annotated[
    Path,
    typer.Argument(
        help="Scenario, YAML (schema ddpsim/1); - reads standard input.", show_default=False
    ),
]


def completion(module: str, names: str) -> Callable[[str], list[str]]:
    """Complete a word to one of the names that a function of a module returns."""

    def complete(incomplete: str) -> list[str]:
        words = getattr(import_module(module), names)()
        return [name for name in words if name.startswith(incomplete)]

    return complete


def _complete_setting(incomplete: str) -> list[str]:
    """Keys of a scenario; of a key that takes a name, the names (where the shell keeps `=`)."""
    from ddpsim.scenario import catalog
    from ddpsim.scenario.keys import all_keys

    key, equals, _ = incomplete.partition("=")
    section, _, kind = key.partition(".")
    named = (section, kind) in (
        ("workload", "model"),
        ("cluster", "device"),
        ("cluster", "machine"),
    )
    words = [f"{key}={n}" for n in catalog.spellings(kind)] if equals and named else all_keys()
    return [each for each in words if each.startswith(incomplete)]


def once_each(settings: list[str] | None) -> list[str] | None:
    """Settings of different keys; one that is set twice ends with exit code 2."""
    seen: dict[str, str] = {}
    for text in settings or ():
        key = text.partition("=")[0].strip()
        if key in seen and "=" in text:
            raise typer.BadParameter(f"{shown(key)} is set twice: {seen[key]} and {text}")
        seen[key] = text
    return settings


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key by its dotted path; a list is written [1,25]. Repeatable.",
        show_default=False,
        callback=once_each,
        autocompletion=_complete_setting,
    ),
]


def _version(wanted: bool) -> None:  # noqa: FBT001 -- typer's callback form
    if wanted:
        from ddpsim.version import __version__

        print(f"ddpsim {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@overload
def parsed(parse: Callable[[str], _Parsed], text: str, option: str) -> _Parsed: ...


@overload
def parsed(parse: Callable[[str], _Parsed], text: None, option: str) -> None: ...


def parsed(parse: Callable[[str], _Parsed], text: str | None, option: str) -> _Parsed | None:
    """An option's text as `parse` reads it, None where it was not given.

    Ends with exit code 2 where `parse` raises ValueError.
    """
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def check_new(output: Path | None) -> None:
    """Raise BadParameter where a scenario stands at -o already, or none can be written there."""
    if output is not None:
        if output.is_file() and output.stat().st_size:  # /dev/stdout may be an empty file
            problem = f"{output} exists already; name another file, or remove it"
            raise typer.BadParameter(problem, param_hint="-o")
        _check_place(output)


def check_output(output: Path, file: Path) -> None:
    """Raise BadParameter where -o is the scenario `file`, a folder, or in none."""
    if output.resolve() == file.resolve():
        raise typer.BadParameter("is the scenario itself; name another file", param_hint="-o")
    _check_place(output)


def _check_place(output: Path) -> None:
    if output.is_dir():
        raise typer.BadParameter(f"{output} is a folder; name a file in it", param_hint="-o")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output.parent}", param_hint="-o")


PageOutput = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="PAGE", help="Also write a page with charts."),
]


def check_page(output: Path | None, file: Path) -> None:
    """Raise BadParameter as `check_output` does, and ImportError without what draws pages."""
    if output:
        import ddpsim.report.page.shell  # noqa: F401 -- it says what is missing

        check_output(output, file)


def write_page(output: Path, name: str, charts: Iterable[Chart], text: str) -> None:
    """Write an answer as a page, which is the answer's text under its charts."""
    from ddpsim.files import write_atomically
    from ddpsim.report.page.shell import answer_page

    write_atomically(output, answer_page(name, charts, text))
    print(f"wrote {output}", file=sys.stderr)


@contextmanager
def input_errors(
    option: str | None = None, file: Path | None = None, spelt: Callable[[str], str] = str
) -> Iterator[None]:
    """Inputs that do not fit end with exit code 2; `option` is named, or else the error's key.

    A key of the scenario `file` is told as an error in it, any other as `spelt` on a command line.
    """
    from ddpsim.errors import InputError, Problem, ScenarioError

    try:
        yield
    except InputError as error:
        from ddpsim.scenario.schema import Scenario

        if file and error.key.partition(".")[0] in Scenario.model_fields:
            raise ScenarioError([Problem(str(file), error.key, error.message)]) from None
        hint = option or spelt(error.key.replace("_", "-") if file else error.key)
        raise typer.BadParameter(error.message, param_hint=hint) from None
