"""`calibrate fit`, `show`, `import nccl-tests`: cluster profiles; `restart`: what a start takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli_options import (
    Batch,
    Function,
    Fused,
    Layouts,
    Local,
    Operations,
    Optimizer,
    Output,
    layouts,
    operations,
    said_once,
)
from calibrate.files import HTML, check_outputs, name_as_text, save_json
from ddpsim.importers.profiles.cluster import SCHEMA, ClusterProfile


def fit(
    records: Annotated[list[Path], typer.Argument(help="Records of one cluster.")],
    output: Output,
    name: Annotated[str, typer.Option(help="What to call the profile.")] = "cluster",
    residuals: Annotated[
        Path | None, typer.Option(help="Draw the residuals into this HTML file.")
    ] = None,
) -> None:
    """Fit links, interference, DDP's own cost and jitter; write a cluster profile."""
    from calibrate.fit.profile import fit_profile, samples_of_records
    from calibrate.fit.show import correlated, data_loaders, residual_table, write_residual_figure
    from calibrate.records.record import load_record

    check_outputs([(output, SCHEMA), *([(residuals, HTML)] if residuals else [])], records)
    loaded = [load_record(path) for path in records]
    fitted = fit_profile(loaded, name, [name_as_text(path) for path in records])
    _write(fitted, output)
    samples = samples_of_records(loaded)
    table = residual_table(fitted.all_reduce, samples)
    for line in (*data_loaders(loaded), table, *correlated(fitted)):
        print(line)
    if residuals:
        write_residual_figure(fitted.all_reduce, samples, residuals)


def restart(
    function: Function,
    path: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where checkpoints go.")],
    *,
    local: Local = None,
    batch: Batch = None,
    optimizer: Optimizer = "adamw",
    fused: Fused = False,
) -> None:
    """Measure process group, first step, and checkpoints of your model, for `reliability`."""
    from calibrate.measure.model.restart import RestartOptions, measure_restart
    from calibrate.measure.ranks.launch import run

    options = RestartOptions(
        model=function, path=path, batch=batch, optimizer=optimizer, fused=fused
    )
    with said_once():
        run(measure_restart, options, local)


def show(
    file: Annotated[Path, typer.Argument(help="A cluster profile.")],
    *,
    predicted: Annotated[
        int | None,
        typer.Option(
            "--for",
            min=1,
            metavar="NODES",
            help="Nodes to predict; default: 8 times the most that were measured.",
        ),
    ] = None,
    up_to: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="NODES", help="Nodes that you can measure; default: 4 times the most."
        ),
    ] = None,
) -> None:
    """Print a cluster profile as a person reads it, and with NCCL what to measure next."""
    from calibrate.fit.next_measurement import Target, show_next
    from calibrate.fit.show import show as shown
    from ddpsim.importers.profiles.cluster import read_cluster_profile
    from ddpsim.scenario.quantity import SourceFile

    profile = read_cluster_profile(SourceFile(str(file), file))
    for option, given in (("--for", predicted), ("--up-to", up_to)):
        if given and profile.backend != "nccl":
            problem = f"a profile of {profile.backend} does not say what to measure next; drop it"
            raise typer.BadParameter(problem, param_hint=option)
    print("\n".join((shown(profile), *show_next(profile, Target.of(profile, predicted, up_to)))))


def import_nccl_tests(
    logs: Annotated[
        list[Path],
        typer.Argument(
            help="nccl-tests' text or JSON (-J), our CSV, or another benchmark's table."
        ),
    ],
    output: Output,
    name: Annotated[str, typer.Option(help="What to call the profile.")] = "cluster",
    layout: Layouts = None,
    operation: Operations = None,
) -> None:
    """Make a cluster profile from nccl-tests logs of one cluster, of one or several layouts."""
    from calibrate.fit.profile import fit_logs, samples_of_logs
    from calibrate.fit.samples import read_logs
    from calibrate.fit.show import correlated, residual_table

    check_outputs([(output, SCHEMA)], logs)
    read = read_logs(logs, layouts(layout, len(logs)), operations(operation))
    fitted = fit_logs(read.all_reduces, name, others=read.others)
    _write(fitted, output)
    samples = samples_of_logs(read.all_reduces)
    for line in (residual_table(fitted.all_reduce, samples), *correlated(fitted)):
        print(line)
    for warning in read.warnings:
        print(f"WARNING {warning}")


def _write(profile: ClusterProfile, path: Path) -> None:
    from calibrate.fit.show import not_measured

    save_json(profile, path)
    print("\n".join((f"{path}: use it as cluster.profile", *not_measured(profile))))
