"""The commands around files and words. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpsim.cli.typer_app import Settings, app, input_errors, parsed

if TYPE_CHECKING:
    from ddpsim.result.requirements import Requirement


def _presets(incomplete: str) -> list[str]:
    from ddpsim.scenario.starters import presets

    return [name for name in presets() if name.startswith(incomplete)]


@app.command(rich_help_panel="Files")
def init(
    preset: Annotated[
        str | None,
        typer.Argument(help="Name of a scenario; none lists them.", autocompletion=_presets),
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
    """Say that a scenario is right, and return what it does not keep to."""
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

    found = [f"{path}: {meaning or 'a section'}" for path, meaning in keys_named(name)]
    found += explained(name)
    if name in other_strategies():
        with input_errors():
            found.append(f"{name}: {getdoc(factory_of(name)) or 'a strategy of another package'}")
    if not found:
        hint = did_you_mean(name, all_keys() if "." in name else _all_words())
        raise typer.BadParameter(f"no entry for {name!r}.{hint}", param_hint="TERM")
    width = screen_width()
    return "\n".join(
        fill(text, width, subsequent_indent="  ", break_on_hyphens=False) for text in found
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
