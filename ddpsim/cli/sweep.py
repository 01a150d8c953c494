"""The command `sweep`. Heavy imports wait until it runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ddpsim.planning.sweeps.grid import Grid
    from ddpsim.result.sweep import Sweep
    from ddpsim.scenario.document import Document

from ddpsim.cli.typer_app import File, app, check_output, once_each


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
            callback=once_each,
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
            help="Write all points to .json, .csv or .parquet, or a chart to .html; each is stored "
            "in FILE.journal as it ends.",
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
    """Predict all combinations of settings; name the best.

    \b
    ddpsim sweep scenario.yaml --set ddp.bucket_cap_mb=1,5,25,50,100 -o caps.html
    ddpsim sweep scenario.yaml --set cluster.nodes=1,2,4,8 --goal throughput --goal gpus -o out.csv
    """
    from ddpsim.planning.sweeps.grid import Grid
    from ddpsim.report.sweep import render_sweep
    from ddpsim.result.sweep import GOALS
    from ddpsim.scenario.document import load

    goals = goal or ["throughput"]
    if unknown := [name for name in goals if name not in GOALS]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is none of {', '.join(GOALS)}", param_hint="--goal"
        )
    if len(goals) > 2 or len(set(goals)) < len(goals):
        raise typer.BadParameter("give one goal, or two different ones", param_hint="--goal")
    if resume and output is None:
        raise typer.BadParameter("resume what? Name the same -o FILE again", param_hint="--resume")
    document = load(file)
    write = None if output is None else _sweep_writer(output, file, document)
    grid = Grid.of(settings or (), axis or ())
    if not grid.axes:
        raise typer.BadParameter(
            "give an axis of two values or more, such as --set ddp.bucket_cap_mb=1,25,100",
            param_hint="--set",
        )
    result = _swept(document, grid, goals, output, resume=resume, jobs=jobs, dask=dask)
    if write:
        _written(write, result)
        print(f"wrote {output}", file=sys.stderr)
    print(json.dumps(result.to_dict(), indent=2) if as_json else render_sweep(result))
    if any(point.brief is None for point in result.points):
        raise typer.Exit(1)


def _written(write: Callable[[Sweep], None], result: Sweep) -> None:
    from ddpsim.errors import DdpsimError

    try:
        write(result)
    except OSError as error:
        raise DdpsimError(
            f"{error.filename}: {error.strerror}; its journal holds every point: mend this, and "
            "write it with --resume"
        ) from None


def _sweep_writer(output: Path, file: Path, document: Document) -> Callable[[Sweep], None]:
    """How to write a sweep to a file, by its suffix, known to work before the sweep begins."""
    from importlib.util import find_spec

    from ddpsim.files import write_atomically
    from ddpsim.report.sweep import render_csv, render_parquet

    if output.suffix == ".parquet" and find_spec("polars") is None:
        raise typer.BadParameter(
            "Parquet needs polars: pip install 'ddpsim[parquet]'", param_hint="-o"
        )
    formats: dict[str, Callable[[Sweep], str | bytes]] = {
        ".json": lambda result: json.dumps(result.to_dict(), indent=2) + "\n",
        ".csv": render_csv,
        ".parquet": render_parquet,
    }
    if output.suffix == ".html":
        formats[".html"] = _drawer(document)
    if output.suffix not in formats:
        raise typer.BadParameter(
            f"{output.name!r} ends in none of {', '.join(formats)}, .html", param_hint="-o"
        )
    check_output(output, file)
    return lambda result: write_atomically(output, formats[output.suffix](result))


def _drawer(document: Document) -> Callable[[Sweep], str]:
    from ddpsim.planning.sweeps.sweep import with_intervals
    from ddpsim.report.page.charts import sweep_charts
    from ddpsim.report.page.shell import answer_page
    from ddpsim.report.sweep import render_sweep

    def page(result: Sweep) -> str:
        surer = with_intervals(document, result)
        return answer_page(surer.name, sweep_charts(surer), render_sweep(surer))

    return page


def _swept(
    document: Document,
    grid: Grid,
    goals: Sequence[str],
    output: Path | None,
    *,
    resume: bool,
    jobs: int | None,
    dask: str | None,
) -> Sweep:
    from contextlib import ExitStack

    from ddpsim.cli.waiting import bar
    from ddpsim.planning.sweeps.computation import dask_workers, local_workers
    from ddpsim.planning.sweeps.journal import Journal
    from ddpsim.planning.sweeps.sweep import sweep
    from ddpsim.progress import Stage

    with ExitStack() as stack:
        journal = None
        if output is not None:
            path = output.with_name(f"{output.name}.journal")
            journal = stack.enter_context(Journal(path, resume=resume))
        workers = (
            stack.enter_context(dask_workers(dask)) if dask else local_workers(jobs or _cores())
        )
        progress = Stage("points")
        stack.enter_context(bar(progress))
        if journal and resume:
            points = f"{len(journal.outcomes):,} points are in {journal.path}"
            print(f"{points}: those of this sweep are not computed again", file=sys.stderr)
        try:
            result = sweep(
                document, grid, goals, workers=workers, journal=journal, progress=progress.at
            )
        except KeyboardInterrupt:
            kept = f"; go on with --resume: {journal.path} has" if journal else "; without -o"
            count = f" {len(journal.outcomes):,} points" if journal else " nothing is kept"
            print(f"\nstopped{kept}{count}", file=sys.stderr)
            raise typer.Exit(130) from None
        if journal:
            journal.finish()
        return result


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
