"""The commands that show: traces, pages, collectives. Heavy imports wait."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpsim.cli.typer_app import (
    File,
    Settings,
    app,
    check_output,
    completion,
    input_errors,
    parsed,
)
from ddpsim.errors import shown
from ddpsim.wording import counted

if TYPE_CHECKING:
    from ddpsim.scenario.schema import Scenario


@app.command(rich_help_panel="Files")
def trace(
    file: File,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write into.")
    ],
    settings: Settings = None,
    *,
    ranks: Annotated[
        str | None,
        typer.Option(help='Which, as in "0,3,8-11"; unset: all, or 16 of more than 16.'),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(help="How many steady steps, or all; unset: 3, or a period of averages."),
    ] = None,
    warmup: Annotated[
        bool, typer.Option("--warmup", help="Begin with the warm-up's steps.")
    ] = False,
    compressed: Annotated[bool, typer.Option("--gzip", help="Write .json.gz files.")] = False,
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="chrome|chakra", help="chakra: one step's graph, for ASTRA-sim."
        ),
    ] = "chrome",
) -> None:
    """Write a step's traces, for Perfetto and HTA, or for ASTRA-sim.

    \b
    ddpsim trace scenario.yaml -o trace
    ddpsim trace scenario.yaml -o trace --format chakra
    ddpsim trace scenario.yaml -o trace --ranks 0,8 --steps all --gzip
    """
    from ddpsim.cli.waiting import waiting
    from ddpsim.planning.options import parse_ranks, parse_steps
    from ddpsim.planning.trace import trace as traced_part
    from ddpsim.planning.trace import write_traces
    from ddpsim.prediction.api import load_scenario
    from ddpsim.report.trace_text import notes, summary

    scenario = load_scenario(file, settings or ())
    size = scenario.cluster.world_size
    wanted = parsed(lambda text: parse_ranks(text, size), ranks, "--ranks")
    count = parsed(parse_steps, steps, "--steps")
    if output.suffix in (".html", ".json", ".gz", ".et"):
        problem = f"{output} is called as a file, and a trace is a folder of several; name a folder"
        raise typer.BadParameter(problem, param_hint="-o")
    if parsed(_form, form, "--format") == "chakra":
        _chakra(scenario, output, wanted, given=(steps is not None, warmup, compressed))
        return
    with input_errors(), waiting("each file that was written is whole"):
        traced = traced_part(scenario, wanted, count, warmup=warmup)
        written = write_traces(traced, output, compressed=compressed)
    for note in notes(traced, written):
        print(note, file=sys.stderr)
    print(summary(traced, written))


def _form(text: str) -> str:
    if text not in ("chrome", "chakra"):
        raise ValueError(f"{shown(text)} is not known; write chrome or chakra")
    return text


def _chakra(
    scenario: Scenario, folder: Path, ranks: list[int] | None, *, given: tuple[bool, ...]
) -> None:
    from ddpsim.planning.chakra import write_chakra

    if any(given):
        raise typer.BadParameter(
            "writes one steady step; leave out --steps, --warmup and --gzip",
            param_hint="--format chakra",
        )
    with input_errors():
        paths = write_chakra(scenario, folder, ranks)
    print(f"{folder / 'step'}.N.et   one steady step of {counted(len(paths), 'rank')}")
    size = scenario.cluster.world_size
    if len(paths) < size:
        print(f"ASTRA-sim needs all {counted(size, 'rank')}: leave out --ranks")
    else:
        print(f"ASTRA-sim takes it as --workload-configuration={folder / 'step'}")


@app.command(rich_help_panel="Files")
def report(
    file: File,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PAGE", help="The file to write.")
    ] = Path("step.html"),
    settings: Settings = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Draw the step with this setting below the scenario's own. Repeatable.",
        ),
    ] = None,
) -> None:
    """Write a page: the timeline, and what moves it.

    \b
    ddpsim report scenario.yaml -o step.html
    Buckets on a slider, breakdown, scaling, sensitivity, sources; it needs no network to open.
    """
    check_output(output, file)
    from ddpsim.cli.waiting import waiting
    from ddpsim.errors import printable
    from ddpsim.files import write_atomically
    from ddpsim.planning.storyboard import storyboard
    from ddpsim.report.page.page import page
    from ddpsim.units import format_bytes

    with waiting("no page is written"):
        board = storyboard(file, settings or (), against or ())
    if against and not board.rivals:
        reason = next(each.reason for each in board.left_out if each.what.startswith("--against"))
        raise typer.BadParameter(reason, param_hint="--against")
    content = page(board).encode("utf-8", "backslashreplace")
    write_atomically(output, content)
    print(f"{output}: {format_bytes(len(content))}, opens in any browser, without a network")
    for entry in board.left_out:
        print(printable(f"not shown: {entry.what}: {entry.reason}"), file=sys.stderr)


@app.command(rich_help_panel="Predict", context_settings={"allow_extra_args": True})
def collective(
    context: typer.Context,
    *,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A scenario, or its cluster section alone."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="A machine preset instead, such as dgx-h100.",
            autocompletion=completion("ddpsim.scenario.catalog", "machine_names"),
        ),
    ] = None,
    op: Annotated[
        str, typer.Option(help="all_reduce, all_gather, reduce_scatter or broadcast.")
    ] = "all_reduce",
    sizes: Annotated[
        str | None, typer.Option(help='"8..16G" doubles each time; or "1M,25 MiB".')
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="LOG", help="An nccl-tests log: the error of each row.")
    ] = None,
    tuning: Annotated[
        bool, typer.Option("--tuning", help="NCCL's own table and choices, and no times of ours.")
    ] = False,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.collective/1.")] = False,
) -> None:
    """Print a collective's times in nccl-tests' columns.

    \b
    ddpsim collective --machine dgx-a100 --set cluster.nodes=2 --sizes 1M..1G
    ddpsim collective --cluster scenario.yaml --against nccl-tests.log
    """
    from ddpsim.planning.options import parse_sizes
    from ddpsim.prediction.collective_times import collective_table, load_cluster, tuner_of
    from ddpsim.report.collective import render_table

    if op not in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        operations = "all_reduce, all_gather, reduce_scatter and broadcast"
        raise typer.BadParameter(f"{op!r} is none of {operations}", param_hint="--op")
    for bare in context.args:
        option = "--cluster" if Path(bare).suffix else "--machine"
        raise typer.BadParameter(f"write {option} {bare}", param_hint=bare)
    if (cluster is None) == (machine is None):
        raise typer.BadParameter("give one of --cluster FILE and --machine NAME")
    if tuning and (as_json or against or op != "all_reduce"):
        raise typer.BadParameter(
            "prints NCCL's table of all_reduce as text; drop --json, --against and --op",
            param_hint="--tuning",
        )
    if against and op != "all_reduce":
        raise typer.BadParameter("a log is one of all_reduce", param_hint="--against")
    wanted = "4K..1G" if sizes is None and not against else sizes
    sizes_bytes = parsed(parse_sizes, wanted, "--sizes") or ()
    source = cluster or {"cluster": {"machine": machine}}
    scenario = load_cluster(source, settings or ())
    with input_errors():
        if tuning:
            from ddpsim.cluster.describe import describe_tuning

            print(describe_tuning(tuner_of(scenario), sizes_bytes))
            return
        table = collective_table(scenario, op, sizes_bytes, against)  # type: ignore[arg-type]
    print(json.dumps(table.to_dict(), indent=2) if as_json else render_table(table))
