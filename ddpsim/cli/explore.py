"""The command `explore`: the live page. Heavy imports wait until it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpsim.cli.typer_app import Settings, app, completion, input_errors

if TYPE_CHECKING:
    from ddpsim.explore.answer import Given

_PORT = 8642  # a page that stays open finds the server again where this one is free


@app.command(rich_help_panel="Predict")
def explore(
    file: Annotated[
        Path | None,
        typer.Argument(help="Scenario, YAML; none: resnet50-2x8-25gbit.", show_default=False),
    ] = None,
    settings: Settings = None,
    *,
    lesson: Annotated[
        str | None,
        typer.Option(
            help="Begin with a lesson: overlap, buckets, no_sync, ring or straggler.",
            autocompletion=completion("ddpsim.explore.lessons", "lesson_names"),
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to serve on; any other lets the network in.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help=f"Port; unset: {_PORT}, or a free one.", min=0, max=65535)
    ] = None,
    max_ranks: Annotated[int, typer.Option(help="Most ranks of a step.", min=1)] = 16_384,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Most that a step may take.", min=1)
    ] = 10.0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Move a scenario and see its step change: a live page.

    \b
    ddpsim explore scenario.yaml
    ddpsim explore --lesson overlap
    It serves this machine alone, until Ctrl-C.
    """
    import webbrowser

    from ddpsim.explore.page import explore_page
    from ddpsim.explore.server import Server

    with input_errors("--lesson"):
        given = _given(file, settings or [], lesson, max_ranks)
    ports = (_PORT, 0) if port is None else (port,)
    for number in ports:
        try:
            server = Server(explore_page(), given, host, number, time_limit)
        except OSError as error:
            if number != ports[-1]:
                continue
            reason = f"{host}:{number} cannot be served: {error.strerror}"
            raise typer.BadParameter(reason, param_hint="--port") from None
        break
    print(f"{given.name}: open {server.address}", flush=True)
    print("Ctrl-C ends it", file=sys.stderr)
    if browser:
        webbrowser.open(server.address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("ended", file=sys.stderr)
    finally:
        server.server_close()


def _given(file: Path | None, settings: list[str], lesson: str | None, most_ranks: int) -> Given:
    """What the page begins with; raises ScenarioError, and InputError for an unknown lesson."""
    from ddpsim.errors import InputError
    from ddpsim.explore.answer import Given
    from ddpsim.explore.edit import edited
    from ddpsim.explore.lessons import SCENARIO, lesson_names
    from ddpsim.scenario.document import Document, read_text
    from ddpsim.scenario.starters import preset_text
    from ddpsim.scenario.suggest import did_you_mean

    if lesson is not None and lesson not in lesson_names():
        hint = did_you_mean(lesson, lesson_names())
        raise InputError("lesson", f"{lesson!r} is none of {', '.join(lesson_names())}.{hint}")
    text = preset_text(SCENARIO) if file is None else read_text(file)
    name, base = ("scenario.yaml", Path()) if file is None else (str(file), file.parent)
    if settings:
        Document.of_text(text, name, base).changed(settings)
        text = edited(text, settings)
    return Given(name, text, base, most_ranks, lesson or "").with_files()
