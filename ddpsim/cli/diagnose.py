"""The commands about a job that ran. Heavy imports wait until one runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ddpsim.cli.typer_app import File, Settings, app, check_new, input_errors


@app.command(rich_help_panel="Predict")
def diagnose(
    file: File,
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS",
            help='The step: "916 ms", or several: "1 GPU: 192 ms, 2x4: 1.2 s", '
            '"accumulation 4: 2 s", "batch 16: 1 s".',
        ),
    ] = None,
    settings: Settings = None,
    *,
    without_sync: Annotated[
        str | None,
        typer.Option(
            "--measured-without-sync", metavar="TIME", help="A step under model.no_sync(), rank 0."
        ),
    ] = None,
    exposed: Annotated[
        str | None,
        typer.Option(
            "--measured-exposed",
            metavar="TIME",
            help="Of a step: the GPU waits for communication, as a profiler shows it.",
        ),
    ] = None,
    data_wait: Annotated[
        str | None,
        typer.Option(
            "--measured-data-wait",
            metavar="TIME",
            help="Of a step: it waits for the next batch; or: synthetic.",
        ),
    ] = None,
    all_reduce: Annotated[
        str | None,
        typer.Option(
            "--measured-all-reduce", metavar="ROWS", help='Of nccl-tests: "64 MiB: 12 ms, ...".'
        ),
    ] = None,
    nccl_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What the job printed under NCCL_DEBUG=INFO.", show_default=False
        ),
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Traces of PyTorch's profiler, one a rank: steps, waits, all-reduces.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.diagnosis/1.")] = False,
) -> None:
    """Say why a real job is slow, and what to look at.

    \b
    ddpsim diagnose scenario.yaml --measured "916 ms"
    ddpsim diagnose scenario.yaml --measured "1 GPU: 192 ms, 8: 916 ms"
    ddpsim diagnose scenario.yaml --measured "916 ms" --measured-without-sync "192 ms"
    """
    from ddpsim.cli.waiting import waiting
    from ddpsim.diagnosis.diagnose import diagnose
    from ddpsim.prediction.api import load_scenario
    from ddpsim.report.diagnosis import render_diagnosis

    scenario = load_scenario(file, settings or ())
    with input_errors(file=file, spelt=_option), waiting("no cause is ruled out"):
        diagnosis = diagnose(
            scenario,
            measured,
            without_sync=without_sync,
            exposed=exposed,
            data_wait=data_wait,
            all_reduce=all_reduce,
            nccl_log=nccl_log,
            traces=traces,
        )
    if as_json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        print(render_diagnosis(diagnosis, str(file), settings or ()))


def _option(name: str) -> str:
    return f"--{name}" if name in ("measured", "nccl-log", "traces") else f"--measured-{name}"


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

    comparison = replayed(traces, settings or ())
    if output is not None:
        text = scenario_text(comparison.document, comparison.assumed, output.parent)
        write_atomically(output, text)
    print(json.dumps(comparison.to_dict(), indent=2) if as_json else render_replay(comparison))
