"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from ddpsim.planning.grid import Grid
    from ddpsim.result.sweep import Sweep

__all__ = ["app", "main", "new_app", "run_app"]

_HELP = """Predict PyTorch DDP step time before you book the GPUs.

\b
Examples
  ddpsim init resnet50-2x8-25gbit > scenario.yaml      a scenario to start from
  ddpsim run scenario.yaml                             one prediction
  ddpsim run scenario.yaml --set ddp.bucket_cap_mb=50  the same with another option
  ddpsim sweep scenario.yaml --set ddp.bucket_cap_mb=1,5,25,100
  ddpsim run scenario.yaml --measured "520 ms"         is what I measured normal?
  ddpsim plan scenario.yaml --target "300B tokens in 30 days"   how many GPUs, at what cost?
  ddpsim trace scenario.yaml -o trace                  look at its steps in Perfetto
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

_Parsed = TypeVar("_Parsed")

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
def sweep(
    file: File,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUES",
            help="An axis: its values with commas between; a list value is written [1,25]. "
            "Repeatable: all combinations.",
            show_default=False,
        ),
    ] = None,
    *,
    axis: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="CSV", help="Keys that move together: their names, then a row a point."
        ),
    ] = None,
    goal: Annotated[
        list[str] | None,
        typer.Option(
            help="throughput, per-gpu, efficiency, step, exposed, gpus or memory; given twice: "
            "the front of two. Default: throughput."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write all points to .json, .csv or .parquet; each is kept in FILE.journal as it "
            "ends.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what FILE.journal holds.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; as many as there are cores by default.")
    ] = None,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Dask scheduler, tcp://HOST:8786.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.sweep/1.")] = False,
) -> None:
    """Predict every combination of settings: the best, and what is as good as it.

    \b
    ddpsim sweep scenario.yaml --set ddp.bucket_cap_mb=1,5,25,50,100
    ddpsim sweep scenario.yaml --set cluster.nodes=1,2,4,8 --goal throughput --goal gpus -o out.csv
    """
    from ddpsim.planning.grid import Grid
    from ddpsim.report.sweep import render_sweep
    from ddpsim.result.sweep import GOALS

    goals = goal or ["throughput"]
    if unknown := [name for name in goals if name not in GOALS]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is none of {', '.join(GOALS)}", param_hint="--goal"
        )
    if len(goals) > 2 or len(set(goals)) < len(goals):
        raise typer.BadParameter("give one goal, or two different ones", param_hint="--goal")
    if resume and output is None:
        raise typer.BadParameter("resume what? Name the same -o FILE again", param_hint="--resume")
    write = None if output is None else _sweep_writer(output)
    grid = Grid.of(settings or (), axis or ())
    if not grid.axes:
        raise typer.BadParameter(
            "give an axis of two values or more, such as --set ddp.bucket_cap_mb=1,25,100",
            param_hint="--set",
        )
    found = _swept(file, grid, goals, output, resume=resume, jobs=jobs, dask=dask)
    if write:
        write(found)
        print(f"wrote {output}", file=sys.stderr)
    print(json.dumps(found.to_dict(), indent=2) if as_json else render_sweep(found))


def _sweep_writer(output: Path) -> Callable[[Sweep], None]:
    """How to write a sweep to a file, by its suffix, known to work before the sweep begins."""
    from ddpsim.files import write_atomically
    from ddpsim.report.sweep import render_csv, render_parquet

    if output.suffix == ".parquet" and not _importable("polars"):
        raise typer.BadParameter(
            "Parquet needs polars: pip install 'ddpsim[parquet]'", param_hint="-o"
        )
    formats: dict[str, Callable[[Sweep], str | bytes]] = {
        ".json": lambda found: json.dumps(found.to_dict(), indent=2) + "\n",
        ".csv": render_csv,
        ".parquet": render_parquet,
    }
    if output.suffix not in formats:
        raise typer.BadParameter(
            f"{output.name!r} ends in none of {', '.join(formats)}", param_hint="-o"
        )
    if output.is_dir():
        raise typer.BadParameter(f"{output} is a folder; name a file", param_hint="-o")
    return lambda found: write_atomically(output, formats[output.suffix](found))


def _importable(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _swept(
    file: Path,
    grid: Grid,
    goals: Sequence[str],
    output: Path | None,
    *,
    resume: bool,
    jobs: int | None,
    dask: str | None,
) -> Sweep:
    from contextlib import ExitStack

    from ddpsim.planning.executors import dask_workers, local_workers
    from ddpsim.planning.journal import Journal
    from ddpsim.planning.sweep import sweep

    with ExitStack() as stack:
        journal = None
        if output is not None:
            path = output.with_name(f"{output.name}.journal")
            journal = stack.enter_context(Journal(path, resume=resume))
        workers = (
            stack.enter_context(dask_workers(dask)) if dask else local_workers(jobs or _cores())
        )
        progress = stack.enter_context(_progress())
        try:
            return sweep(file, grid, goals, workers=workers, journal=journal, progress=progress)
        except KeyboardInterrupt:
            kept = f"; go on with --resume: {journal.path} has" if journal else "; without -o"
            count = f" {len(journal.known):,} points" if journal else " nothing is kept"
            print(f"\nstopped{kept}{count}", file=sys.stderr)
            raise typer.Exit(130) from None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr, once there is something to wait for; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), "points", TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda ended, total: bar.update(task, completed=ended, total=total)


@app.command(rich_help_panel="Plan")
def compare(
    files: Annotated[
        list[Path], typer.Argument(help="Scenarios; all beside the first.", show_default=False)
    ],
    settings: Settings = None,
    *,
    flags: Annotated[
        bool, typer.Option("--each-flag", help="Every option of DDP with another value.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.comparison/1.")] = False,
) -> None:
    """Say what another scenario, or each DDP option, would bring: time, memory, and how sure.

    \b
    ddpsim compare scenario.yaml --each-flag
    ddpsim compare a.yaml b.yaml c.yaml
    """
    from ddpsim.api import load_scenario
    from ddpsim.planning.compare import compare, each_flag, option
    from ddpsim.report.changes import render_comparison
    from ddpsim.scenario.document import load

    if len(files) == 1 and not flags:
        raise typer.BadParameter("name a second scenario, or add --each-flag", param_hint="FILES")
    first = load_scenario(files[0], settings or ())
    options = [option(load(file, settings or ()), title=str(file)) for file in files[1:]]
    if flags:
        options += each_flag(load(files[0], settings or ()))
    found = compare(first, options)
    print(json.dumps(found.to_dict(), indent=2) if as_json else render_comparison(found))


@app.command("explain-step", rich_help_panel="Plan")
def explain_step(
    file: File,
    settings: Settings = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.explanation/1.")] = False,
) -> None:
    """Say why the step is this long: its critical path, what it hangs on, what would help.

    \b
    ddpsim explain-step scenario.yaml
    """
    from ddpsim.api import load_scenario
    from ddpsim.planning.explain import explain_step
    from ddpsim.report.changes import render_explanation
    from ddpsim.scenario.document import load

    load_scenario(file, settings or ())
    found = explain_step(load(file, settings or ()))
    text = render_explanation(found, str(file), settings or ())
    print(json.dumps(found.to_dict(), indent=2) if as_json else text)


@app.command(rich_help_panel="Plan")
def tune(
    file: File,
    settings: Settings = None,
    *,
    memory: Annotated[
        str | None, typer.Option(help='At most this on a GPU, such as "70 GB"; default: all.')
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples a step: also choose micro-batches and accumulation."),
    ] = None,
    rounding: Annotated[
        bool, typer.Option("--rounding", help="Gradients may be rounded to 16 bits on the wire.")
    ] = False,
    trials: Annotated[
        int, typer.Option(min=0, help="Lists of any caps that Optuna tries beside the grid.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.tuning/1.")] = False,
) -> None:
    """Find the best bucket caps and options, and what the scenario's own cost beside them.

    \b
    ddpsim tune scenario.yaml
    ddpsim tune scenario.yaml --global-batch 1024 --memory "70 GB" --rounding
    """
    from ddpsim.api import load_scenario
    from ddpsim.planning.tune import Limits, tune
    from ddpsim.report.tuning import render_tuning
    from ddpsim.scenario.document import load
    from ddpsim.units import parse_bytes

    room = None if memory is None else _parsed(parse_bytes, memory, "--memory")
    load_scenario(file, settings or ())
    found = tune(
        load(file, settings or ()),
        Limits(room, global_batch, may_round=rounding, trials=trials),
    )
    text = render_tuning(found, str(file), settings or ())
    print(json.dumps(found.to_dict(), indent=2) if as_json else text)


@app.command(rich_help_panel="Plan")
def plan(
    file: File,
    target: Annotated[
        str,
        typer.Option(
            metavar="WORK",
            help='"[N epochs of] M samples [in DURATION]", or tokens; k, M, B as suffixes.',
            show_default=False,
        ),
    ],
    settings: Settings = None,
    *,
    price: Annotated[
        str | None, typer.Option(help='Of a GPU-hour: "2.50 USD"; any currency.')
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help='"5000 USD", or "800 GPU-hours": the fastest for that.')
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(help="Samples a step on any number of GPUs; omitted: batch_per_rank stays."),
    ] = None,
    max_gpus: Annotated[int, typer.Option(help="The most GPUs that are tried.")] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.plan/1.")] = False,
) -> None:
    """Say how many GPUs a piece of work needs, its time and cost, and which network pays.

    \b
    ddpsim plan scenario.yaml --target "90 epochs of 1.28M samples in 24 h" --price "2.50 USD"
    ddpsim plan scenario.yaml --target "300B tokens" --price "2 EUR" --budget "5000 EUR"
    """
    from ddpsim.api import load_scenario
    from ddpsim.errors import InputError
    from ddpsim.planning.capacity import plan_capacity
    from ddpsim.planning.target import parse_budget, parse_price, parse_target
    from ddpsim.report.capacity import render_plan

    work = _parsed(parse_target, target, "--target")
    of_an_hour = None if price is None else _parsed(parse_price, price, "--price")
    limit = None if budget is None else _parsed(parse_budget, budget, "--budget")
    scenario = load_scenario(file, settings or ())
    try:
        found = plan_capacity(
            scenario,
            work,
            price=of_an_hour,
            budget=limit,
            global_batch=global_batch,
            max_gpus=max_gpus,
        )
    except InputError as error:
        hint = f"--{error.key.replace('_', '-')}"
        raise typer.BadParameter(error.message, param_hint=hint) from None
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        print(render_plan(found, str(file), settings or ()))


def _parsed(parse: Callable[[str], _Parsed], text: str, option: str) -> _Parsed:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


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
        str | None, typer.Option(help="How many steady steps, or all; unset: 3.")
    ] = None,
    warmup: Annotated[
        bool, typer.Option("--warmup", help="Begin with the warm-up's steps.")
    ] = False,
    compressed: Annotated[bool, typer.Option("--gzip", help="Write .json.gz files.")] = False,
) -> None:
    """Write what happens in a step as traces, for Perfetto and HolisticTraceAnalysis.

    \b
    ddpsim trace scenario.yaml -o trace
    ddpsim trace scenario.yaml -o trace --ranks 0,8 --steps all --gzip
    """
    from ddpsim.api import load_scenario
    from ddpsim.errors import InputError
    from ddpsim.planning.trace import trace as traced_part
    from ddpsim.planning.trace import write_traces
    from ddpsim.report.trace_text import notes, summary

    scenario = load_scenario(file, settings or ())
    try:
        traced = traced_part(scenario, ranks, steps, warmup=warmup)
        written = write_traces(traced, output, compressed=compressed)
    except InputError as error:
        raise typer.BadParameter(error.message, param_hint=error.key) from None
    for note in notes(traced, written):
        print(note, file=sys.stderr)
    print(summary(traced, written))


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
    atexit.register(gc.freeze)  # and that goes with the process: a tenth again to search it
    # we use no plugin of pydantic's, which would look for one in every package installed
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
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
