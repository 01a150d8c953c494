"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app", "main", "new_app", "run_app"]

_HELP = """Predict PyTorch DDP step time before you book the GPUs.

\b
Examples
  ddpsim init resnet50-2x8-25gbit > scenario.yaml      a scenario to start from
  ddpsim run scenario.yaml                             one prediction
  ddpsim run scenario.yaml --set ddp.bucket_cap_mb=50  the same with another option
  ddpsim run scenario.yaml --measured "520 ms"         is what I measured normal?
  ddpsim report scenario.yaml -o step.html             the step to look at, in a browser
  ddpsim explain exposed                               what a word means
"""


def new_app(help_text: str) -> typer.Typer:
    """An empty command line in our style."""
    return typer.Typer(
        help=help_text,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich costs a third of the start-up, and pads the examples
    )


app = new_app(_HELP)

File = Annotated[Path, typer.Argument(help="Scenario, YAML (schema ddpsim/1).", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key by its dotted path; a list is written [1,25]. Repeatable.",
        show_default=False,
    ),
]


@app.command(rich_help_panel="Plan")
def run(
    file: File,
    settings: Settings = None,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print ddpsim.result/1: SI units, every figure.")
    ] = False,
    measured: Annotated[
        str | None,
        typer.Option(help='A measured step with its unit, such as "520 ms": is it normal?'),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="auto, or reference: every rank and ring step, no shortcut.")
    ] = "auto",
) -> None:
    """Predict one DDP step: its time, what bounds it, and how far to trust it.

    \b
    ddpsim run scenario.yaml
    ddpsim run scenario.yaml --set cluster.nodes=4 --json
    """
    from ddpsim.api import judge, load_scenario, simulate
    from ddpsim.report.text import render
    from ddpsim.units import parse_duration

    if engine not in ("auto", "reference"):
        raise typer.BadParameter(f"{engine!r} is neither auto nor reference", param_hint="--engine")
    try:
        measured_s = None if measured is None else parse_duration(measured)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--measured") from None
    if measured_s == 0:
        raise typer.BadParameter("a step takes longer than 0 s", param_hint="--measured")
    scenario = load_scenario(file, settings or ())
    result = simulate(scenario, engine)  # type: ignore[arg-type]
    verdict = judge(scenario, result, measured_s) if measured_s else None
    if as_json:
        shown = result.to_dict() | ({"verdict": asdict(verdict)} if verdict else {})
        print(json.dumps(shown, indent=2))
    else:
        print(render(result, str(file), verdict, settings or ()))


@app.command(rich_help_panel="Plan")
def collective(
    *,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A scenario, or its cluster section alone."),
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="A machine preset instead, such as dgx-h100.")
    ] = None,
    op: Annotated[str, typer.Option(help="all_reduce or broadcast.")] = "all_reduce",
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
    """Print a collective's time by size, in nccl-tests' columns.

    \b
    ddpsim collective --machine dgx-a100 --set cluster.nodes=2 --sizes 1M..1G
    ddpsim collective --cluster scenario.yaml --against nccl-tests.log
    """
    from ddpsim.collective import collective_table, load_cluster, parse_sizes, tuner_of
    from ddpsim.errors import InputError
    from ddpsim.report.collective import render_table

    if op not in ("all_reduce", "broadcast"):
        raise typer.BadParameter(f"{op!r} is neither all_reduce nor broadcast", param_hint="--op")
    if (cluster is None) == (machine is None):
        raise typer.BadParameter("give one of --cluster FILE and --machine NAME")
    if tuning and (as_json or against or op != "all_reduce"):
        raise typer.BadParameter(
            "prints NCCL's table of all_reduce as text; drop --json, --against and --op",
            param_hint="--tuning",
        )
    if against and op != "all_reduce":
        raise typer.BadParameter("a log is one of all_reduce", param_hint="--against")
    try:
        wanted = "4K..1G" if sizes is None and not against else sizes
        asked = () if wanted is None else parse_sizes(wanted)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sizes") from None
    source = cluster or {"cluster": {"machine": machine}}
    scenario = load_cluster(source, settings or ())
    try:
        if tuning:
            from ddpsim.cluster.describe import describe_tuning

            print(describe_tuning(tuner_of(scenario), asked))
            return
        table = collective_table(scenario, op, asked, against)  # type: ignore[arg-type]
    except InputError as error:
        raise typer.BadParameter(error.message, param_hint=error.key) from None
    print(json.dumps(table.to_dict(), indent=2) if as_json else render_table(table))


@app.command(rich_help_panel="Plan")
def report(
    file: File,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PAGE", help="The file to write.")
    ] = Path("step.html"),
    settings: Settings = None,
) -> None:
    """Write one HTML page to look at: the step's timeline, and what moves it.

    \b
    ddpsim report scenario.yaml -o step.html
    Buckets on a slider, breakdown, scaling, sensitivity, sources; it needs no network to open.
    """
    if output.resolve() == file.resolve():
        raise typer.BadParameter("is the scenario itself; name another file", param_hint="-o")
    if output.is_dir():
        raise typer.BadParameter(f"{output} is a folder; name a file in it", param_hint="-o")
    from ddpsim.errors import printable
    from ddpsim.files import write_atomically
    from ddpsim.planning.storyboard import storyboard
    from ddpsim.report.page import page
    from ddpsim.units import format_bytes

    board = storyboard(file, settings or ())
    content = page(board).encode("utf-8", "backslashreplace")
    write_atomically(output, content)
    print(f"{output}: {format_bytes(len(content))}, opens in any browser, without a network")
    for entry in board.left_out:
        print(printable(f"not shown: {entry.what}: {entry.reason}"), file=sys.stderr)


@app.command(rich_help_panel="Files")
def init(
    preset: Annotated[
        str | None, typer.Argument(help="Name of a scenario; none lists them.")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write it there, with the files that it names (marked +)."
        ),
    ] = None,
) -> None:
    """Print a commented scenario to start from.

    \b
    ddpsim init                                     list them
    ddpsim init resnet50-2x8-25gbit > scenario.yaml
    ddpsim init gloo-cpu --into .                   one that needs files beside it
    """
    from ddpsim.errors import InputError
    from ddpsim.scenario.presets import copy_preset, preset_files, preset_text, presets

    if preset is None:
        for name, purpose in presets().items():
            print(f"{name + ' +' * bool(preset_files(name)):<28}{purpose}")
        return
    try:
        if into is not None:
            print(*copy_preset(preset, into), sep="\n")
            return
        print(preset_text(preset), end="")
        if files := preset_files(preset):
            needed = f"it needs {' and '.join(files)}: ddpsim init {preset} --into FOLDER"
            print(needed, file=sys.stderr)
    except InputError as error:
        raise typer.BadParameter(error.message, param_hint="PRESET") from None


@app.command(rich_help_panel="Files")
def check(file: File, settings: Settings = None) -> None:
    """Check a scenario and every file that it names, and simulate nothing.

    \b
    ddpsim check scenario.yaml
    """
    from ddpsim.api import load_scenario
    from ddpsim.report.text import ranks

    cluster = load_scenario(file, settings or ()).cluster
    print(f"{file}: ok, {ranks(cluster.nodes, cluster.gpus_per_node)}")


@app.command(rich_help_panel="Files")
def schema() -> None:
    """Print the scenario format as JSON Schema, for editors to complete and check.

    \b
    ddpsim schema > ddpsim.schema.json
    then, on a scenario's first line: # yaml-language-server: $schema=ddpsim.schema.json
    """
    from ddpsim.scenario.schema import Scenario

    document = Scenario.model_json_schema(by_alias=True)
    print(
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema"} | document, indent=2)
    )


@app.command(rich_help_panel="Files")
def explain(
    term: Annotated[
        list[str] | None,
        typer.Argument(help="A word (none lists them), or: cluster FILE-OR-MACHINE."),
    ] = None,
    settings: Settings = None,
) -> None:
    """Say what a word means here: busbw, bucket, exposed, trust ... or draw a cluster.

    \b
    ddpsim explain busbw
    ddpsim explain cluster scenario.yaml
    ddpsim explain cluster dgx-h100 --set cluster.nodes=4
    """
    from ddpsim.glossary import TERMS, lookup

    if term == ["cluster"]:
        raise typer.BadParameter("name a scenario or a machine to draw", param_hint="cluster")
    if term and term[0] == "cluster" and len(term) == 2:
        _explain_cluster(term[1], settings or ())
        return
    if not term:
        print(", ".join(sorted(TERMS)))
        return
    words = " ".join(term)
    entry = lookup(words)
    if entry is None:
        from ddpsim.scenario.suggest import did_you_mean

        hint = did_you_mean(words, TERMS)
        raise typer.BadParameter(f"no entry for {words!r}.{hint}", param_hint="TERM")
    print(entry)


def _explain_cluster(source: str, settings: Sequence[str]) -> None:
    from ddpsim.cluster.describe import describe_cluster
    from ddpsim.collective import load_cluster

    is_file = Path(source).exists() or source.endswith((".yaml", ".yml"))
    named = {"cluster": {"machine": source}}
    print(describe_cluster(load_cluster(source if is_file else named, settings)))


@app.command(
    rich_help_panel="Measure",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def calibrate(context: typer.Context) -> None:
    """Measure your own cluster and model, fit them, and prove it on real DDP runs.

    \b
    ddpsim calibrate --help        the same as python -m calibrate
    """
    from importlib.metadata import entry_points

    (command,) = entry_points(group="ddpsim.commands", name="calibrate")
    command.load()(context.args, prog_name="ddpsim calibrate")


def _version(wanted: bool) -> None:  # noqa: FBT001 -- typer's callback form
    if wanted:
        from importlib.metadata import version

        print(f"ddpsim {version('ddpsim')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; wrong input ends with its errors on stderr and exit code 2."""
    gc.set_threshold(50_000)  # imports make much that stays: a tenth of the start-up
    run_app(app)


def run_app(commands: typer.Typer) -> None:
    """Run a command line, and end with one message on stderr where it cannot do its work.

    Exit code 2 for a wrong scenario or option, 1 for what went wrong otherwise.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what its encoding lacks is escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            commands()
        finally:
            sys.stdout.flush()
    except Exception as error:  # noqa: BLE001 -- sorted out below, the rest is raised again
        sys.exit(_report(error))


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
    if not isinstance(error, DdpsimError):
        raise error
    print(printable(str(error)), file=sys.stderr)
    if isinstance(error, ScenarioError):
        count = len(error.problems)
        print(f"{count} error{'s' * (count > 1)}, nothing was simulated.", file=sys.stderr)
        return 2
    return 1
