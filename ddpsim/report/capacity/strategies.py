"""Strategies side by side, each with its number of GPUs, its time and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpsim.report.capacity.plan import limit_in_words, size_in_words, sized
from ddpsim.report.lines import (
    as_text,
    by_text,
    command,
    labelled,
    listed,
    named_rows,
    settings_of_names,
)
from ddpsim.result.capacity import KNEE_EFFICIENCY, CapacityPlan
from ddpsim.units import format_bytes, format_long_duration, format_number


@as_text
def best_strategy(name: str, plan: CapacityPlan) -> Iterator[str]:
    """The strategy whose plan follows, and what makes it the first."""
    if plan.target.within_s is not None:
        why = "the cheapest that is in time" if plan.met else "the fastest, as none is in time"
    else:
        why = "the fastest for the money" if plan.budget else "the fastest on its GPUs"
    if plan.answer.fits is False:
        why = "none fits into memory"
    return labelled("strategy", f"{name}: {why} of those below")


@as_text
def render_strategies(
    plans: Sequence[tuple[str, CapacityPlan | None, str, Sequence[str]]],
    file: str,
    settings: Sequence[str] = (),
) -> list[str]:
    """A row of each strategy with its answer, in the order given; then those without, and why.

    `plans`: its name, its plan or the problem, and its settings.
    `file` and `settings` as the user gave them.
    """
    possible = [(name, plan) for name, plan, *_ in plans if plan]
    first = possible[0][1]
    currency = f"{first.price.currency[:9]:>10}" if first.price else ""
    head = f"{'GPUs':>7}{'time':>11}{'GPU-hours':>11}{currency}{'memory':>14}"
    rows = [(name, _strategy_row(plan)) for name, plan in possible]
    lines = [*labelled("strategies", _on_which_gpus(first)), ""]
    lines += named_rows("strategy", rows, head, len(head))
    lines += settings_of_names((name, of) for name, plan, _, of in plans if plan)
    lines += listed("impossible", by_text({name: why for name, plan, why, _ in plans if not plan}))
    if first.asked_gpus is not None:
        lines += ["", *labelled("next", "how sure the differences are")]
        lines += command(file, settings, sized(first), name="compare", options=["--each-strategy"])
    return [*lines, "", ""]


def _on_which_gpus(plan: CapacityPlan) -> str:
    """How many GPUs each strategy has, and how they are ordered."""
    if plan.asked_gpus is not None:
        size, least = size_in_words(plan.answer), f"{KNEE_EFFICIENCY:.0%}"
        return (
            f"all on {size}, the fastest first; twice the GPUs would give the fastest strategy "
            f"less than {least} of twice the throughput, or were not tried"
        )
    if plan.target.within_s is not None:
        return "each on the fewest nodes that are in time, the fewest GPU-hours first"
    limit = limit_in_words(plan.budget) if plan.budget else ""
    return f"each as fast as {limit} allows, the fastest first"


def _strategy_row(plan: CapacityPlan) -> str:
    size = plan.answer
    hours, cost = size.billed
    money = "" if cost is None else f"{format_number(cost):>10}"
    memory = "does not fit" if size.fits is False else format_bytes(size.memory_bytes)
    late = "  not met" if plan.met is False and size.fits is not False else ""
    return (
        f"{size.gpus:>7,}{format_long_duration(size.calendar_s[0]):>11}"
        f"{format_number(hours):>11}{money}{memory:>14}{late}"
    )
