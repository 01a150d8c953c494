"""The commands that compare and plan. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpsim.cli.typer_app import (
    File,
    PageOutput,
    Settings,
    app,
    check_page,
    input_errors,
    parsed,
    write_page,
)

if TYPE_CHECKING:
    from ddpsim.result.capacity import Money
    from ddpsim.scenario.schema import Scenario


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
    page: PageOutput = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.comparison/1.")] = False,
) -> None:
    """Say what other options would bring, and how surely.

    \b
    ddpsim compare scenario.yaml --each-flag
    ddpsim compare scenario.yaml --each-strategy -o strategies.html
    ddpsim compare a.yaml b.yaml c.yaml
    """
    from ddpsim.cli.waiting import waiting
    from ddpsim.questions import compare_documents
    from ddpsim.report.changes import render_comparison
    from ddpsim.scenario.document import load

    if len(files) == 1 and not (flags or strategies):
        more = "name a second scenario, or add --each-flag or --each-strategy"
        raise typer.BadParameter(more, param_hint="FILES")
    check_page(page, files[0])
    first, *others = (load(file, settings or ()) for file in files)
    with waiting("no difference has its interval yet"):
        comparison = compare_documents(
            first,
            [(str(file), other) for file, other in zip(files[1:], others, strict=True)],
            each_flag=flags,
            each_strategy=strategies,
            name=str(files[0]),
        )
    text = render_comparison(comparison)
    if page:
        from ddpsim.report.page.charts import comparison_charts

        write_page(page, comparison.name, comparison_charts(comparison), text)
    print(json.dumps(comparison.to_dict(), indent=2) if as_json else text)
    if all(change.problem for change in comparison.changes):
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
    from ddpsim.questions import explain_step
    from ddpsim.report.changes import render_explanation
    from ddpsim.scenario.document import load

    document = load(file, settings or ())
    with waiting("the step is not explained"):
        explanation = explain_step(document)
    text = render_explanation(explanation, str(file), settings or ())
    print(json.dumps(explanation.to_dict(), indent=2) if as_json else text)


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
    page: PageOutput = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.tuning/1.")] = False,
) -> None:
    """Find the best bucket caps and options.

    \b
    ddpsim tune scenario.yaml
    ddpsim tune scenario.yaml --global-batch 1024 --memory "70 GB" --rounding
    """
    from ddpsim.cli.waiting import waiting
    from ddpsim.planning.tune import Limits, compared_caps, tune
    from ddpsim.prediction.api import checked
    from ddpsim.report.changes import render_tuning
    from ddpsim.scenario.document import load
    from ddpsim.units import parse_bytes

    check_page(page, file)
    room = parsed(parse_bytes, memory, "--memory")
    document = load(file, settings or ())
    checked(document)
    limits = Limits(room, global_batch, may_round=rounding, trials=trials, each_strategy=strategies)
    with waiting("the search is not over"):
        tuning = tune(document, limits)
        caps = compared_caps(document, tuning) if page else None
    text = render_tuning(tuning, str(file), settings or ())
    if page:
        from ddpsim.report.page.charts import tuning_charts

        write_page(page, tuning.name, tuning_charts(tuning, caps), text)
    print(json.dumps(tuning.to_dict(), indent=2) if as_json else text)


@app.command(rich_help_panel="Plan")
def plan(
    file: File,
    target: Annotated[
        str,
        typer.Option(
            metavar="WORK",
            help='"[N epochs of] M samples [in DURATION [with P % certainty]]", or tokens.',
            show_default=False,
        ),
    ],
    settings: Settings = None,
    *,
    price: Annotated[
        str | None,
        typer.Option(
            help='Of a GPU-hour: "2.50 USD"; or the machine\'s own: on-demand, spot, one-year.'
        ),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="CSV of list prices, newer than the package's own.")
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
    mtbf: Annotated[
        str | None, typer.Option(help='Mean time between failures of a GPU: "50000 h".')
    ] = None,
    spares: Annotated[
        str | None, typer.Option(help="Nodes that stand by, or auto: as many as pay.")
    ] = None,
    pue: Annotated[
        float | None, typer.Option(help="Energy: the building's power over its machines'.")
    ] = None,
    carbon: Annotated[
        float | None, typer.Option(help="With --pue: grams of CO2 in a kWh of the grid.")
    ] = None,
    max_gpus: Annotated[int, typer.Option(help="The most GPUs that are tried.")] = 1024,
    strategies: Annotated[
        bool,
        typer.Option("--each-strategy", help="Under DDP, zero1, deepspeed, fully_shard or hsdp."),
    ] = False,
    page: PageOutput = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print ddpsim.plan/1.")] = False,
) -> None:
    """Say how many GPUs are needed, and what they cost.

    \b
    ddpsim plan scenario.yaml --target "90 epochs of 1.28M samples in 24 h" --price "2.50 USD"
    ddpsim plan gpt2.yaml --target "300B tokens" --price "2 EUR" --budget "5000 EUR"
    ddpsim plan gpt2.yaml --target "300B tokens in 30 days with 90 % certainty" --mtbf "50000 h"
    """
    from ddpsim.cli.waiting import waiting
    from ddpsim.planning.capacity_plan.each_strategy import StrategyPlan, plan_each_strategy
    from ddpsim.planning.capacity_plan.plan import plan_capacity
    from ddpsim.planning.options import parse_budget, parse_price, parse_target
    from ddpsim.prediction.api import checked
    from ddpsim.report.capacity.plan import render_plan
    from ddpsim.report.capacity.strategies import best_strategy, render_strategies
    from ddpsim.scenario.document import load

    work = parsed(parse_target, target, "--target")
    limit = parsed(parse_budget, budget, "--budget")
    check_page(page, file)
    if carbon is not None and pue is None:
        raise typer.BadParameter("needs --pue; 1 leaves the building out", param_hint="--carbon")
    settings = [*(settings or ()), *_failures(mtbf, spares)]
    document = load(file, settings)
    scenario, each = checked(document), list[StrategyPlan]()
    listed = _listed(price, prices, scenario)
    of_an_hour = listed or parsed(parse_price, price, "--price")
    question = partial(
        plan_capacity,
        target=work,
        price=of_an_hour,
        budget=limit,
        global_batch=global_batch,
        max_gpus=max_gpus,
        critical_batch=critical_batch,
        steps_by_batch=steps_by_batch,
        pue=pue,
        co2_g_per_kwh=carbon,
    )
    with input_errors(file=file, spelt="--{}".format), waiting("no plan is chosen"):
        if strategies:
            each = plan_each_strategy(document, question)
        answer = next((best.plan for best in each if best.plan), None) or question(scenario)
    taken = each[0].settings if each else ()
    text = render_plan(answer, str(file), (*settings, *taken))
    if page:
        from ddpsim.report.page.charts import plan_charts

        write_page(page, answer.name, plan_charts(answer), text)
    if as_json:
        others = {"strategies": [one.to_dict() for one in each]} if each else {}
        print(json.dumps(answer.to_dict() | others, indent=2))
        return
    if not each:
        print(text)
        return
    rows = [(one.name, one.plan, one.problem, one.settings) for one in each]
    print(best_strategy(each[0].name, answer), text, sep="\n", end="\n\n")
    print(render_strategies(rows, str(file), settings).rstrip())


def _failures(mtbf: str | None, spares: str | None) -> list[str]:
    """The options about failures, as settings of the scenario."""
    settings = [] if mtbf is None else ["reliability.failures=null", f"reliability.mtbf={mtbf}"]
    return settings if spares is None else [*settings, f"reliability.spares={spares}"]


def _listed(price: str | None, prices: Path | None, scenario: Scenario) -> Money | None:
    """The list price of the scenario's machine, where that is asked for; says its source."""
    from ddpsim.importers.prices import TERMS, listed_price, merged, read_prices
    from ddpsim.result.capacity import Money

    if price not in TERMS:
        if prices is not None:
            wanted = f"needs --price {', '.join(TERMS[:-1])} or {TERMS[-1]}"
            raise typer.BadParameter(wanted, param_hint="--prices")
        return None
    machine = scenario.cluster.machine.name if scenario.cluster.machine else None
    with input_errors("--price"):
        rows = merged(read_prices(), read_prices(prices) if prices else ())
        row = listed_price(rows, machine, price)
    label = f"{price} price of {row.machine} at {row.provider}, {row.region}, on {row.date}"
    print(f"{label}: {row.source}", file=sys.stderr)
    return Money(row.gpu_hour(price) or 0.0, row.currency)
