"""The command `import`. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpsim.cli.typer_app import app, check_new


@app.command("import", rich_help_panel="Files")
def import_files(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Logs, traces, dumps and configs of one job, in any order.", show_default=False
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write a scenario to start from."),
    ] = None,
) -> None:
    """Recognise logs, traces, dumps and configs; start a scenario.

    \b
    ddpsim import train.log nccl.log -o scenario.yaml
    ddpsim import traces -o scenario.yaml      a folder of PyTorch profiler's traces
    ddpsim import fsdp.yaml -o scenario.yaml   a config of accelerate, torchtitan and others
    """
    check_new(output)
    from ddpsim.files import write_atomically
    from ddpsim.recorded.learned import scenario_text, starting_point
    from ddpsim.recorded.recognise import recognise
    from ddpsim.report.learned import render_learned

    learned = [each for file in files for each in recognise(file)]
    start = starting_point(learned)
    if output is not None:
        notes = [f"assumed: {each}" for each in start.assumed]
        write_atomically(output, scenario_text(start.document, notes, output.parent))
    print(render_learned(learned, start.assumed, str(output) if output else None))
