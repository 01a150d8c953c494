"""The commands that compare and plan. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ddpsim.cli.typer_app import File, Settings, app, parsed

__all__: list[str] = []


@app.command(rich_help_panel="Plan")
def compare(
    files: Annotated[
        list[Path],
        typer.Argument(help="Scenarios; each is compared with the first.", show_default=False),
    ],
    settings: Settings = None,
    *,
    flags: Annotated[
        bool, typer.Option("--each-flag", help="Every option of DDP with another value.")
    ] = False,
    strategies: Annotated[
        bool,
        typer.Option(
            "--each-strategy",
            help="Every strategy against DDP; Megatron's where FILE has it.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.comparison/1.")] = False,
) -> None:
    """Say what other options would bring, and how surely.

    \b
    ddpsim compare scenario.yaml --each-flag
    ddpsim compare scenario.yaml --each-strategy
    ddpsim compare a.yaml b.yaml c.yaml
    """
    from ddpsim.cli.waiting import waiting
    from ddpsim.planning.compare import compare, ddp_settings, each_flag, each_strategy, option
    from ddpsim.planning.shardings import as_fully_shard
    from ddpsim.prediction.api import checked
    from ddpsim.report.changes import render_comparison
    from ddpsim.scenario.document import load
    from ddpsim.scenario.load import parse

    if len(files) == 1 and not (flags or strategies):
        more = "name a second scenario, or add --each-flag or --each-strategy"
        raise typer.BadParameter(more, param_hint="FILES")
    document = load(files[0], settings or ())
    own, asked = document, document.data.get("ddp")
    asked = asked if isinstance(asked, dict) else {}
    if strategies:
        document = load(files[0], [*(settings or ()), *ddp_settings(document)])
    first = checked(document)
    options = [option(load(file, settings or ()), title=str(file)) for file in files[1:]]
    if flags:
        options += each_flag(document)
    if strategies:
        sharding = asked.get("fully_shard") or as_fully_shard(parse(own).ddp)
        options += each_strategy(document, sharding)
        strategy = asked.get("strategy")
        if strategy in ("distributed_optimizer", "deepspeed", "fsdp1"):
            options.append(option(own, title=strategy))
    baseline = f"{files[0]} {'under ddp' if strategies else 'as it is'}"
    with waiting("no difference has its interval yet"):
        found = compare(first, options, baseline)
    print(json.dumps(found.to_dict(), indent=2) if as_json else render_comparison(found))
    if all(change.problem for change in found.changes):
        raise typer.Exit(2)


@app.command("explain-step", rich_help_panel="Predict")
def explain_step(
    file: File,
    settings: Settings = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.explanation/1.")] = False,
) -> None:
    """Say why a step is so long, and what would help.

    \b
    ddpsim explain-step scenario.yaml
    """
    from ddpsim.cli.waiting import waiting
    from ddpsim.planning.explain import explain_step
    from ddpsim.prediction.api import checked
    from ddpsim.report.changes import render_explanation
    from ddpsim.scenario.document import load

    document = load(file, settings or ())
    checked(document)
    with waiting("the step is not explained"):
        found = explain_step(document)
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
        int, typer.Option(min=0, help="Lists of any caps that Optuna tries after the grid.")
    ] = 0,
    strategies: Annotated[
        bool,
        typer.Option("--each-strategy", help="zero1, deepspeed, fully_shard and hsdp too."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.tuning/1.")] = False,
) -> None:
    """Find the best bucket caps and options.

    \b
    ddpsim tune scenario.yaml
    ddpsim tune scenario.yaml --global-batch 1024 --memory "70 GB" --rounding
    """
    from ddpsim.cli.waiting import waiting
    from ddpsim.planning.tune import Limits, tune
    from ddpsim.prediction.api import checked
    from ddpsim.report.tuning import render_tuning
    from ddpsim.scenario.document import load
    from ddpsim.units import parse_bytes

    room = parsed(parse_bytes, memory, "--memory")
    document = load(file, settings or ())
    checked(document)
    limits = Limits(room, global_batch, may_round=rounding, trials=trials, each_strategy=strategies)
    with waiting("the search is not over"):
        found = tune(document, limits)
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
    critical_batch: Annotated[
        int | None,
        typer.Option(help="N: a global batch of B needs 1 + B/N times the target's samples."),
    ] = None,
    steps_by_batch: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="CSV of batch,steps: measured steps to the target, in place of N."
        ),
    ] = None,
    max_gpus: Annotated[int, typer.Option(help="The most GPUs that are tried.")] = 1024,
    strategies: Annotated[
        bool,
        typer.Option("--each-strategy", help="Under DDP, zero1, deepspeed, fully_shard or hsdp."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.plan/1.")] = False,
) -> None:
    """Say how many GPUs are needed, and what they cost.

    \b
    ddpsim plan scenario.yaml --target "90 epochs of 1.28M samples in 24 h" --price "2.50 USD"
    ddpsim plan gpt2.yaml --target "300B tokens" --price "2 EUR" --budget "5000 EUR"
    """
    from ddpsim.cli.waiting import waiting
    from ddpsim.errors import InputError, Problem, ScenarioError
    from ddpsim.planning.capacity_plan.each_strategy import StrategyPlan, plan_each_strategy
    from ddpsim.planning.capacity_plan.plan import plan_capacity
    from ddpsim.planning.options import parse_budget, parse_price, parse_target
    from ddpsim.prediction.api import checked
    from ddpsim.report.capacity.plan import render_plan
    from ddpsim.report.capacity.strategies import render_strategies
    from ddpsim.scenario.document import load

    work = parsed(parse_target, target, "--target")
    of_an_hour = parsed(parse_price, price, "--price")
    limit = parsed(parse_budget, budget, "--budget")
    document = load(file, settings or ())
    scenario, each = checked(document), list[StrategyPlan]()
    question = partial(
        plan_capacity,
        target=work,
        price=of_an_hour,
        budget=limit,
        global_batch=global_batch,
        max_gpus=max_gpus,
        critical_batch=critical_batch,
        steps_by_batch=steps_by_batch,
    )
    try:
        with waiting("no plan is chosen"):
            if strategies:
                each = plan_each_strategy(document, question)
            found = next((best.plan for best in each if best.plan), None) or question(scenario)
    except InputError as error:
        if error.key not in (
            "target",
            "budget",
            "global_batch",
            "max_gpus",
            "critical_batch",
            "steps_by_batch",
            "each_strategy",
        ):
            raise ScenarioError([Problem(str(file), error.key, error.message)]) from None
        hint = f"--{error.key.replace('_', '-')}"
        raise typer.BadParameter(error.message, param_hint=hint) from None
    if as_json:
        others = {"strategies": [one.to_dict() for one in each]} if each else {}
        print(json.dumps(found.to_dict() | others, indent=2))
        return
    if each:
        rows = [(one.name, one.plan, one.problem) for one in each]
        print(render_strategies(rows, str(file), settings or ()))
    taken = each[0].settings if each else ()
    print(render_plan(found, str(file), (*(settings or ()), *taken)))
