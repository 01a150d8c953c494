"""The command `run`. Heavy imports wait until it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from ddpsim.cli.typer_app import File, Settings, app, parsed


@app.command(rich_help_panel="Predict")
def run(
    file: File,
    settings: Settings = None,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print ddpsim.result/1: SI units, every figure.")
    ] = False,
    measured: Annotated[
        str | None,
        typer.Option(help='A measured step with its unit, such as "95 ms": is it normal?'),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="auto, or reference: every rank and ring step, no shortcut.")
    ] = "auto",
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITIONS",
            help='End with exit code 1 unless all hold: "fits, step < 500 ms, exposed < 10 %".',
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Add the first ten collectives, and sources in full.")
    ] = False,
) -> None:
    """Predict one DDP step, its bottleneck and its trust.

    \b
    ddpsim run scenario.yaml
    ddpsim run scenario.yaml --set cluster.nodes=4 --json
    ddpsim run scenario.yaml --require "step < 500 ms, exposed < 10 %"
    """
    from ddpsim.cli.predict import predict
    from ddpsim.result.requirements import parse_requirements
    from ddpsim.units import parse_duration

    required = [
        each for text in require or () for each in parsed(parse_requirements, text, "--require")
    ]
    if engine not in ("auto", "reference"):
        raise typer.BadParameter(f"{engine!r} is neither auto nor reference", param_hint="--engine")
    measured_s = parsed(parse_duration, measured, "--measured")
    if measured_s == 0:
        raise typer.BadParameter("a step takes longer than 0 s", param_hint="--measured")
    predict(
        file,
        settings or (),
        measured_s,
        engine,  # type: ignore[arg-type]
        as_json=as_json,
        verbose=verbose,
        required=required,
    )
