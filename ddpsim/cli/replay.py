"""The command `replay`. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ddpsim.cli.typer_app import Settings, app, check_new


@app.command(rich_help_panel="Predict")
def replay(
    traces: Annotated[
        Path,
        typer.Argument(
            help="A trace of PyTorch's profiler, or a folder with one a rank.", show_default=False
        ),
    ],
    settings: Settings = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the job's scenario there."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.replay/1.")] = False,
) -> None:
    """Simulate traced steps, and compare the two.

    \b
    ddpsim replay traces
    ddpsim replay traces --set workload.model=resnet50 -o scenario.yaml
    ddpsim run scenario.yaml --set ddp.bucket_cap_mb=100      what would change?
    """
    check_new(output)
    from ddpsim.files import write_atomically
    from ddpsim.recorded.learned import scenario_text
    from ddpsim.recorded.replay import replay as replayed
    from ddpsim.report.replay import render_replay

    found = replayed(traces, settings or ())
    if output is not None:
        text = scenario_text(found.document, found.assumed, output.parent)
        write_atomically(output, text)
    print(json.dumps(found.to_dict(), indent=2) if as_json else render_replay(found))
