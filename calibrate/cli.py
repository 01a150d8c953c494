"""`python -m calibrate`: measure a cluster, fit it, profile a model. Torch waits its turn."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from calibrate.cli_options import (
    LONGEST_S,
    Batch,
    Function,
    Fused,
    Layouts,
    LineRate,
    Local,
    Operations,
    Optimizer,
    Output,
    Variants,
    bucket_cap_mb,
    bytes_per_s,
    check_ranks_devices,
    is_first,
    layouts,
    memory_bytes,
    operations,
    reporting_once,
    variants_of,
)
from calibrate.files import HTML, check_outputs, name_as_text, save_json
from calibrate.records.rounds import RoundOptions
from calibrate.records.variant import Variant
from calibrate.testbed.cli import app as testbed
from ddpsim.cli import new_app, run_app
from ddpsim.files import write_atomically
from ddpsim.importers.profiles.cluster import SCHEMA as PROFILE_SCHEMA
from ddpsim.importers.profiles.cluster import ClusterProfile
from ddpsim.scenario.options.model_file import MODEL_SCHEMA, read_model_file

_HELP = """Measure a cluster and a model, and turn them into what `ddpsim run` takes.

\b
Examples
  torchrun --nproc-per-node 8 -m calibrate measure -o record.json   on every node of the cluster
  python -m calibrate measure --local 2 -o record.json              on this machine alone
  python -m calibrate fit record.json -o cluster.json               then: cluster.profile
  python -m calibrate import nccl-tests *.txt -o cluster.json       from logs alone
  python -m calibrate capture mymodel:make -o model.json            no GPU; then: workload.model
  python -m calibrate profile mymodel:make -o model.json            measured; then: workload.model
  python -m calibrate device -o record.json                         one GPU, eight minutes
  python -m calibrate fit-device record.json -o device.json         then: cluster.device
  torchrun --nproc-per-node 8 -m calibrate rounds mymodel:make -o rounds.json   real DDP, then:
  python -m calibrate validate rounds.json --profile cluster.json   hold the simulation against it
"""

app = new_app(_HELP)
imports = new_app("Make a cluster profile from others' measurements.")
app.add_typer(
    testbed, name="testbed", short_help="Build a real network of hosts on this machine (Linux)."
)
app.add_typer(imports, name="import")


@app.command(short_help="Record a model from its code, with no GPU.")
def capture(
    model: Function,
    output: Output,
    *,
    batch: Annotated[
        int | None, typer.Option(min=1, help="The batch, where the model allows one alone.")
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=1, help="The largest seq_len, or the usual image_size of the function."),
    ] = None,
) -> None:
    """Record a model's training step from its code, with no GPU and in little memory.

    Shapes flow through the real modules; batch and size stay free where the model allows it.
    """
    from calibrate.capture.capture import capture as captured
    from calibrate.capture.capture import render
    from calibrate.capture.sources import source_of
    from calibrate.measure.model.profile import with_other_part

    check_outputs([(output, MODEL_SCHEMA)])
    document = with_other_part(captured(source_of(model, batch, size)), output)
    write_atomically(output, render(document) + "\n")
    only, sizes = (document["captured"][key] for key in ("batch", "size"))
    free = "any batch" if only is None else f"a batch of {only['only']} ({only['because']})"
    print(f"{output}: use it as workload.model, with {free}")
    if sizes and sizes["min"] < sizes["max"]:
        print(f"{sizes['key']} from {sizes['min']} to {sizes['max']}")
    elif sizes:
        print(f"{sizes['key']} {sizes['default']} alone: {sizes['because']}")


@app.command(short_help="Measure one GPU or CPU core: kernels, host, zoo models.")
def device(
    output: Output,
    *,
    time_budget_s: Annotated[
        float, typer.Option(min=1, max=LONGEST_S, help="Seconds for all of it.")
    ] = 480,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    resume: Annotated[bool, typer.Option(help="Go on with a record; repeat nothing.")] = False,
) -> None:
    """Measure one GPU, or a CPU core: kernels, host time, optimizers, zoo models, DDP's own work.

    The most valuable first; the record is whole after every measurement.
    """
    from calibrate.measure.device.session import DeviceOptions, measure_device

    with reporting_once():
        measure_device(DeviceOptions(output, time_budget_s, device=device, resume=resume))
    print(f"{output}: make a device file of it with `fit-device`")


@app.command("fit-device", short_help="Fit such a record; write a device file.")
def fit_device(
    record: Annotated[Path, typer.Argument(help="A record that `device` wrote.")],
    output: Output,
    name: Annotated[
        str | None, typer.Option(help="What to call the device; default: as torch calls it.")
    ] = None,
) -> None:
    """Fit the efficiencies of a device from its record; write a file for cluster.device."""
    from calibrate.fit.device.fit import fit_device as fitted_device
    from calibrate.fit.device.fit import residual_lines
    from calibrate.records.device_record import load_device_record
    from ddpsim.scenario.device import DEVICE_SCHEMA

    check_outputs([(output, DEVICE_SCHEMA)], [record])
    loaded = load_device_record(record)
    fitted = fitted_device(loaded, name, name_as_text(record))
    save_json(fitted.file, output)
    print(f"{output}: use it as cluster.device")
    for line in residual_lines(loaded, fitted):
        print(line)


@app.command(short_help="Measure collectives, copies, interference and jitter.")
def measure(
    output: Output,
    *,
    local: Local = None,
    time_budget_s: Annotated[
        float, typer.Option(min=1, max=LONGEST_S, help="Seconds for all of it.")
    ] = 600,
    memory_budget: Annotated[
        str | None, typer.Option(help='Of one rank, "4 GiB"; default: its part of a quarter.')
    ] = None,
    line_rate: LineRate = None,
    data_loader: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Returns an iterable of batches.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with a record; repeat nothing.")] = False,
) -> None:
    """Measure collectives, copies, interference and jitter of this job's ranks into a record."""
    from calibrate.measure.cluster.plan import Options

    options = Options(
        output=output,
        time_budget_s=time_budget_s,
        memory_budget_bytes=memory_bytes(memory_budget),
        line_rate_bytes_per_s=bytes_per_s(line_rate),
        data_loader=data_loader,
        resume=resume,
    )
    from calibrate.measure.cluster.session import measure as measure_here
    from calibrate.measure.ranks.launch import run

    with reporting_once():
        run(measure_here, options, local)


@app.command(short_help="Look for what would spoil a measurement; say what to do.")
def doctor(
    backend: Annotated[
        Literal["auto", "gloo", "nccl"],
        typer.Option(help="What will measure; auto: NCCL where nvidia-smi shows a GPU."),
    ] = "auto",
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines in the job.")] = None,
) -> None:
    """Look for what would spoil a measurement on this machine, and say what to do."""
    from calibrate.measure.host.doctor import diagnose, inspect_host

    is_fit = True
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if alone or os.environ.get("LOCAL_RANK", "0") == "0":  # it speaks for its host
        host = inspect_host(backend, os.environ, nodes)
        findings = diagnose(host)
        nothing = f"nothing found that would spoil a measurement of {host.backend}"
        print("\n".join(map(str, findings)) or nothing, flush=True)
        is_fit = all(finding.severity != "error" for finding in findings)
    with reporting_once():
        _compare_clocks()
    if not is_fit:
        raise typer.Exit(1)


def _compare_clocks() -> None:
    """Print, on the first rank of several nodes, whose clock is off."""
    ranks, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks == here:
        return
    from calibrate.measure.host.clocks import clocks_of_nodes

    findings = clocks_of_nodes()
    if os.environ.get("RANK") == "0":
        clocks = "\n".join(map(str, findings)) or "all nodes were reached, and their clocks agree"
        print(clocks)


@app.command(short_help="Time your own model on one device, gradient by gradient.")
def profile(
    function: Function,
    output: Output,
    *,
    local: Local = None,
    batch: Batch = None,
    iterations: Annotated[int, typer.Option(min=3, help="Timed, after a warm-up.")] = 30,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    optimizer: Optimizer = "sgd",
    fused: Fused = False,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads on a CPU.")] = 1,
    scale: Annotated[
        str | None,
        typer.Option(metavar="FROM:TO", help="Estimate for another device, by their presets."),
    ] = None,
) -> None:
    """Time your own model on one device without DDP, gradient by gradient.

    A file of `capture` keeps what was captured, and gets the times besides.
    Under torchrun, or with --local, also how much the ranks' all-reduces slow it down.
    """
    from calibrate.measure.model import profile as profiling
    from calibrate.measure.model.profile import scale_ends
    from calibrate.measure.ranks.launch import run

    check_outputs([(output, MODEL_SCHEMA)])
    ends = scale_ends(scale) if scale else None
    options = profiling.ProfileOptions(
        output=output,
        model=function,
        batch=batch,
        iterations=iterations,
        device=device,
        optimizer=optimizer,
        fused=fused,
        threads=threads,
        scale=ends,
    )
    if local is None and os.environ.get("WORLD_SIZE", "1") == "1":
        work = profiling.profile_alone
    else:
        check_ranks_devices(device, threads)
        work = profiling.profile_in_job
    with reporting_once():
        document = run(work, options, local)
    if not is_first(local):
        return
    document = document or read_model_file(str(output), output).document
    for warning in document["measured"]["warnings"]:
        print(f"warning   {warning}", file=sys.stderr)
    print(f"{output}: use it as workload.model")


@app.command(short_help="Run your model under real DDP in variants, for `validate`.")
def rounds(
    function: Function,
    output: Output,
    *,
    local: Local = None,
    batch: Batch = None,
    caps: Annotated[
        str, typer.Option(help="bucket_cap_mb of DDP, each a variant; torch's own is default.")
    ] = "default,1,5,10,25,50,100",
    accumulation_steps: Annotated[
        list[int] | None, typer.Option(min=2, help="Another variant: micro-batches a step.")
    ] = None,
    comm_hook: Annotated[
        Literal["fp16_compress", "bf16_compress"] | None,
        typer.Option(help="Another variant: a compressing hook."),
    ] = None,
    variant: Variants = None,
    optimizer: Optimizer = "sgd",
    fused: Fused = False,
    find_unused_parameters: Annotated[
        bool, typer.Option("--find-unused-parameters", help="DDP's option, in every variant.")
    ] = False,
    budget_s: Annotated[
        float, typer.Option(min=1, max=LONGEST_S, help="Seconds for the timed rounds.")
    ] = 100,
    line_rate: LineRate = None,
) -> None:
    """Run your model under real DDP in variants, round by round, for `validate`."""
    from calibrate.measure.ddp.rounds import measure_rounds
    from calibrate.measure.ranks.launch import run

    variants = (
        *(Variant(bucket_cap_mb=bucket_cap_mb(cap)) for cap in caps.split(",")),
        *(Variant(accumulation_steps=steps) for steps in accumulation_steps or ()),
        *([Variant(comm_hook=comm_hook)] if comm_hook else []),
        *variants_of(variant),
    )
    options = RoundOptions(
        output=output,
        model=function,
        batch=batch,
        variants=tuple(dict.fromkeys(variants)),
        optimizer=optimizer,
        fused=fused,
        find_unused_parameters=find_unused_parameters,
        budget_s=budget_s,
        line_rate_bytes_per_s=bytes_per_s(line_rate),
    )
    with reporting_once():
        run(measure_rounds, options, local)
    if is_first(local):
        print(f"{output}: hold it against a profile with `validate`")


@app.command(short_help="Measure a restart, and checkpoints of your model.")
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
    with reporting_once():
        run(measure_restart, options, local)


@app.command(short_help="Fit records of a cluster; write its profile.")
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

    check_outputs([(output, PROFILE_SCHEMA), *([(residuals, HTML)] if residuals else [])], records)
    loaded = [load_record(path) for path in records]
    fitted = fit_profile(loaded, name, [name_as_text(path) for path in records])
    _save_profile(fitted, output)
    samples = samples_of_records(loaded)
    table = residual_table(fitted.all_reduce, samples)
    for line in (*data_loaders(loaded), table, *correlated(fitted)):
        print(line)
    if residuals:
        write_residual_figure(fitted.all_reduce, samples, residuals)


@app.command(short_help="Print a cluster profile; say what to measure next.")
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


@imports.command("nccl-tests", short_help="Make one from nccl-tests logs of a cluster.")
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

    check_outputs([(output, PROFILE_SCHEMA)], logs)
    read = read_logs(logs, layouts(layout, len(logs)), operations(operation))
    fitted = fit_logs(read.all_reduces, name, others=read.others)
    _save_profile(fitted, output)
    samples = samples_of_logs(read.all_reduces)
    for line in (residual_table(fitted.all_reduce, samples), *correlated(fitted)):
        print(line)
    for warning in read.warnings:
        print(f"WARNING {warning}")


def _save_profile(profile: ClusterProfile, path: Path) -> None:
    from calibrate.fit.show import not_measured

    save_json(profile, path)
    print("\n".join((f"{path}: use it as cluster.profile", *not_measured(profile))))


@app.command(short_help="Hold the simulation against `rounds`; say what is off.")
def validate(
    rounds: Annotated[list[Path], typer.Argument(help="Rounds of real DDP iterations.")],
    *,
    profile: Annotated[
        Path | None,
        typer.Option(help="A cluster profile; default: the rounds' own all-reduces."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="A device preset, where none is known by the name that torch gives."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The JSON file to write.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="The HTML page to write.")] = None,
) -> None:
    """Simulate what `rounds` measured; print every case and the term that is off.

    Skill: the share of cases that are within a third of the best naive answer's error, or two
    standard errors. Regret: what the buckets chosen here cost more than the best measured.
    """
    from calibrate.validate.report import SCHEMA
    from calibrate.validate.summary import summary
    from calibrate.validate.validate import validate as held
    from ddpsim.cli.waiting import waiting

    outputs = [(path, kind) for path, kind in ((output, SCHEMA), (page, HTML)) if path]
    check_outputs(outputs, [*rounds, *([profile] if profile else [])])
    with waiting("nothing is written"):
        validation = held(rounds, profile, device=device)
    if output:
        save_json(validation, output)
    if page:
        from calibrate.validate.page import page as drawn

        write_atomically(page, drawn(validation))
    print(summary(validation))


def main() -> None:
    """Run the command line; what went wrong ends as one message on stderr."""
    run_app(app)


if __name__ == "__main__":
    main()
