"""The commands around files, words and names. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddpsim.cli.typer_app import Settings, app, check_new, completion, input_errors, parsed

if TYPE_CHECKING:
    from ddpsim.result.requirements import Requirement


@app.command(rich_help_panel="Files")
def init(
    preset: Annotated[
        str | None,
        typer.Argument(
            help="Name of a scenario; none lists them.",
            autocompletion=completion("ddpsim.scenario.starters", "presets"),
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write it there, with the files that it names (marked +)."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--from", metavar="MODEL", help="A model that `calibrate capture` wrote."),
    ] = None,
) -> None:
    """Print a commented scenario to start from.

    \b
    ddpsim init                                     list them
    ddpsim init resnet50-2x8-25gbit > scenario.yaml
    ddpsim init gloo-cpu --into .                   one that needs more files
    ddpsim init --from model.json > scenario.yaml   of your own model
    """
    from ddpsim.scenario.starters import (
        captured_text,
        copy_preset,
        preset_files,
        preset_text,
        presets,
    )

    if model is not None:
        if preset is not None or into is not None:
            raise typer.BadParameter("is given alone", param_hint="--from")
        with input_errors("--from"):
            print(captured_text(model), end="")
        return
    if preset is None:
        for name, purpose in presets().items():
            print(f"{name + ' +' * bool(preset_files(name)):<28}{purpose}")
        return
    with input_errors("PRESET"):
        if into is not None:
            is_new = not into.exists()
            print(*copy_preset(preset, into), sep="\n")
            if is_new:
                print(f"made the folder {into}", file=sys.stderr)
            return
        print(preset_text(preset), end="")
        if files := preset_files(preset):
            needed = f"it needs {' and '.join(files)}: ddpsim init {preset} --into FOLDER"
            print(needed, file=sys.stderr)


@app.command(rich_help_panel="Files")
def check(
    files: Annotated[
        list[Path], typer.Argument(help="Scenarios, YAML (schema ddpsim/1).", show_default=False)
    ],
    settings: Settings = None,
    *,
    fits: Annotated[bool, typer.Option("--fits", help="Each must fit into memory.")] = False,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITIONS", help='Each is predicted and must hold: "step < 500 ms".'
        ),
    ] = None,
) -> None:
    """Check scenarios and the files that they name.

    \b
    ddpsim check scenario.yaml
    ddpsim check scenarios/*.yaml --require "fits, step < 500 ms, exposed < 10 %"
    """
    from ddpsim.errors import Problem, ScenarioError
    from ddpsim.result.requirements import parse_requirements

    conditions = [*(["fits"] if fits else []), *(require or ())]
    required = [
        each for text in conditions for each in parsed(parse_requirements, text, "--require")
    ]
    problems, unmet = list[Problem](), False
    for file in files:
        try:
            failures = _checked(file, settings or (), required)
        except ScenarioError as error:
            problems += error.problems
            continue
        for failure in failures:
            unmet = True
            print(f"{file}: {failure}", file=sys.stderr)
    if problems:
        raise ScenarioError(problems)
    if unmet:
        raise typer.Exit(1)


def _checked(file: Path, settings: Sequence[str], required: Sequence[Requirement]) -> list[str]:
    """Print that a scenario is right, and return the requirements that it fails."""
    from ddpsim.prediction.api import load_scenario, predict
    from ddpsim.prediction.resolve import resolve
    from ddpsim.result.requirements import memory_failure
    from ddpsim.wording import ranks

    scenario = load_scenario(file, settings)
    cluster = scenario.cluster
    print(f"{file}: ok, {ranks(cluster.nodes, cluster.gpus_per_node, cluster.gpus_by_node)}")
    if all(each.figure is None for each in required):
        failure = memory_failure(resolve(scenario).memory()) if required else None
        return [failure] if failure else []
    result = predict(scenario)
    return [failure for each in required if (failure := each.failure(result))]


@app.command(rich_help_panel="Files")
def schema() -> None:
    """Print the scenario format as JSON Schema.

    \b
    ddpsim schema > ddpsim.schema.json
    then, on a scenario's first line: # yaml-language-server: $schema=ddpsim.schema.json
    """
    from ddpsim.scenario.schema import json_schema

    print(json_schema())


@app.command(rich_help_panel="Files")
def explain(
    term: Annotated[
        list[str] | None,
        typer.Argument(help="A word or key (none lists words), or: cluster FILE-OR-MACHINE."),
    ] = None,
    settings: Settings = None,
) -> None:
    """Say what a word means here, or draw a cluster.

    \b
    ddpsim explain busbw
    ddpsim explain ddp.static_graph
    ddpsim explain cluster scenario.yaml
    ddpsim explain cluster dgx-h100 --set cluster.nodes=4
    """
    from textwrap import fill

    from ddpsim.glossary import TERMS, lookup
    from ddpsim.report.lines import screen_width

    if term == ["cluster"]:
        raise typer.BadParameter("name a scenario or a machine to draw", param_hint="cluster")
    if term and term[0] == "cluster" and len(term) == 2:
        _explain_cluster(term[1], settings or ())
        return
    if not term:
        print(fill(", ".join(sorted(TERMS)), screen_width(), break_on_hyphens=False))
        return
    words = " ".join(term)
    print(lookup(words) or _explain_name(words))


def _all_words() -> list[str]:
    """Terms, their other names, and keys without their sections."""
    from ddpsim.glossary import names
    from ddpsim.scenario.keys import all_keys

    return [*names(), *(key.rpartition(".")[2] for key in all_keys())]


def _explain_name(name: str) -> str:
    """A scenario's key, wherever it stands, or a cause of `diagnose`; raises BadParameter."""
    from inspect import getdoc
    from textwrap import fill

    from ddpsim.diagnosis.hypotheses import explained
    from ddpsim.report.lines import screen_width
    from ddpsim.scenario.keys import all_keys, keys_named
    from ddpsim.scenario.other_strategies import factory_of, other_strategies
    from ddpsim.scenario.suggest import did_you_mean

    entries = [f"{path}: {meaning or 'a section'}" for path, meaning in keys_named(name)]
    entries += explained(name)
    if name in other_strategies():
        with input_errors():
            entries.append(f"{name}: {getdoc(factory_of(name)) or 'a strategy of another package'}")
    if not entries:
        hint = did_you_mean(name, all_keys() if "." in name else _all_words())
        raise typer.BadParameter(f"no entry for {name!r}.{hint}", param_hint="TERM")
    width = screen_width()
    return "\n".join(
        fill(text, width, subsequent_indent="  ", break_on_hyphens=False) for text in entries
    )


def _explain_cluster(source: str, settings: Sequence[str]) -> None:
    from ddpsim.cluster.describe import describe_cluster
    from ddpsim.prediction.collective_times import load_cluster

    is_file = Path(source).exists() or source.endswith((".yaml", ".yml"))
    named = {"cluster": {"machine": source}}
    print(describe_cluster(load_cluster(source if is_file else named, settings)))


@app.command(
    rich_help_panel="Calibrate",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def calibrate(context: typer.Context) -> None:
    """Measure your own cluster and model, and fit them.

    \b
    ddpsim calibrate --help        the same as python -m calibrate
    """
    from importlib.metadata import entry_points

    (command,) = entry_points(group="ddpsim.commands", name="calibrate")
    command.load()(context.args, prog_name="ddpsim calibrate")


Table = Mapping[str, Any]
_KINDS = ("models", "devices", "machines", "failures", "prices")
_HEADS = {
    "models": ("model", "parameters", "family", "input"),
    "devices": ("device", "memory", "bandwidth", "fp32", "bf16", "is"),
    "machines": ("machine", "GPUs of a node", "NICs of a node", "is"),
    "failures": ("failures", "mean time between", "is"),
    "prices": ("machine", "of", "on-demand", "spot", "one-year", "read on", "in"),
}


def _complete(incomplete: str) -> list[str]:
    return [kind for kind in _KINDS if kind.startswith(incomplete)]


@app.command("list", rich_help_panel="Files")
def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=", ".join(_KINDS) + "; omitted: these words.",
            autocompletion=_complete,
            show_default=False,
        ),
    ] = None,
    words: Annotated[
        list[str] | None, typer.Argument(help="Rows that hold all of these words alone.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List models, devices, machines and others to name.

    \b
    ddpsim list models llama
    ddpsim list devices h100
    ddpsim list machines h100 efa
    ddpsim list prices a100
    """
    from ddpsim.glossary import lookup
    from ddpsim.scenario.keys import keys_named
    from ddpsim.scenario.suggest import did_you_mean

    if kind is None:
        print(*_KINDS, sep="\n")
        return
    if kind not in _KINDS:
        hint = did_you_mean(kind, _KINDS)
        if lookup(kind) or any(keys_named(kind)):
            hint = f" ddpsim explain {kind} tells of it"
        raise typer.BadParameter(
            f"{kind!r} is none of {', '.join(_KINDS)}.{hint}", param_hint="KIND"
        )
    wanted = [word.lower() for word in words or ()]
    rows = [
        row
        for names, row in _rows(kind)
        if all(word in " ".join((*names, *row)).lower() for word in wanted)
    ]
    if not rows:
        raise typer.BadParameter(
            f"none of the {kind} holds {' and '.join(map(repr, words or ()))}", param_hint="WORDS"
        )
    head = _HEADS[kind]
    if as_json:
        print(json.dumps([dict(zip(head, row, strict=True)) for row in rows], indent=2))
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _rows(kind: str) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """All other spellings of each name, and its row."""
    from ddpsim.scenario import catalog

    if kind == "prices":
        yield from _prices()
        return
    if kind == "failures":
        for name in catalog.failure_names():
            yield [], (name, *_failures(catalog.failures_of(name)))
        return
    columns: dict[str, tuple[Callable[[str], Table], Callable[[Table], tuple[str, ...]]]] = {
        "models": (catalog.model_table, _model),
        "devices": (catalog.device_table, _device),
        "machines": (catalog.machine_table, _machine),
    }
    table, row = columns[kind]
    for name, spellings in catalog.spellings(kind.removesuffix("s")).items():
        yield spellings, (name, *row(table(name)))


def _model(table: Table) -> tuple[str, ...]:
    from ddpsim.units import format_number

    size = table["size"]
    parameters = f"{format_number(table['parameter_count'] / 1e6)} M"
    taken = "one size"
    if size:
        limit = f", to {size['max']:,}" if size["max"] > size["min"] else ""
        taken = f"{size['key']} {size['default']}{limit}"
    return parameters, table["family"], taken


def _device(table: Table) -> tuple[str, ...]:
    from ddpsim.units import format_bytes, format_bytes_per_s

    peaks = table["peak_flops"]
    rates = (
        f"{peaks[rate] / 1e12:.4g} TFLOP/s" if rate in peaks else "-" for rate in ("fp32", "bf16")
    )
    memory = format_bytes(table["memory_bytes"])
    return (
        memory,
        format_bytes_per_s(table["memory_bandwidth_bytes_per_s"]),
        *rates,
        table["title"],
    )


def _machine(table: Table) -> tuple[str, ...]:
    link = table["inter_node"]
    rate = f"{8 * link['bandwidth_bytes_per_s'] / 1e9:.4g} Gbit/s"
    nics = f"{link.get('nics_per_node', 1)} x {rate} {link['transport']}"
    return f"{table['gpus_per_node']} x {table['device']}", nics, table["title"]


def _failures(table: Table) -> tuple[str, ...]:
    from ddpsim.units import format_number

    unit = "gpu" if "gpu_mtbf_s" in table else "node"
    hours = format_number(table[f"{unit}_mtbf_s"] / 3600)
    return f"{hours} h a {'GPU' if unit == 'gpu' else unit}", table["title"]


def _prices() -> Iterator[tuple[list[str], tuple[str, ...]]]:
    from ddpsim.importers.prices import TERMS, read_prices

    for row in read_prices():
        each = (row.gpu_hour(term) for term in TERMS)
        prices = ("-" if price is None else f"{price:.2f}" for price in each)
        unit = f"{row.currency} a GPU-hour, {row.region}"
        yield [row.source], (row.machine, row.provider, *prices, row.date, unit)


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
