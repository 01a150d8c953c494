"""How many GPUs under each strategy that leaves the training as it is, the cheapest first.

Like is compared with like: with a deadline or a budget each strategy answers the same question;
without them all stand on the same number of GPUs, at which fewer GPU-hours are less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ddpsim.errors import DdpsimError, InputError, ScenarioError
from ddpsim.planning.shardings import (
    fit_in_words,
    is_sharding,
    settings_to_fit,
    shardings,
    strategy_name,
)
from ddpsim.result.capacity import CapacityPlan, knee, usable
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.set_aside import as_ddp


@dataclass(frozen=True)
class StrategyPlan:
    """The plan with some settings, or its problem; `changes`: further ones that make it fit."""

    settings: tuple[str, ...]
    plan: CapacityPlan | None
    problem: str = ""
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The strategy with what sets it apart, and with what it fits."""
        words = fit_in_words(self.changes)
        return ", ".join((strategy_name(self.settings), *([words] if words else [])))

    @property
    def rank(self) -> tuple[bool, bool, bool, float]:
        """The plan's place: first those without a problem that fit and are in time, then by price.

        By time in place of price, where a budget is given without a deadline or the target missed.
        """
        if self.plan is None:
            return (True, True, True, 0.0)
        answer, met, target = self.plan.answer, self.plan.met, self.plan.target
        by_time = met is False or (self.plan.budget is not None and target.within_s is None)
        size = answer.expected_s if by_time else answer.billed[0]
        return (False, answer.fits is False, met is False, size)

    def on(self, gpus: int) -> StrategyPlan:
        """Gives this plan with so many GPUs as its answer; a problem where they cannot be had."""
        if self.plan is None:
            return self
        answer = next((size for size in self.plan.sizes if size.gpus == gpus), None)
        if answer is None:
            reasons = "; ".join(out.reason for out in self.plan.left_out)
            return replace(self, plan=None, problem=f"not on {gpus:,} GPUs: {reasons}")
        return replace(self, plan=replace(self.plan, answer=answer, asked_gpus=gpus))

    def to_dict(self) -> dict[str, Any]:
        """Gives the settings with their answer, or their problem, in JSON's types."""
        document: dict[str, Any] = {
            "strategy": self.name,
            "settings": list(self.settings),
            "problem": self.problem,
        }
        if self.plan is None:
            return document
        plan = self.plan.to_dict()
        return document | {"answer": plan["answer"], "met": plan["met"]}


class Planning(Protocol):
    """A function that plans a scenario, and looks at twice the GPUs where `looks_further`."""

    def __call__(
        self, scenario: Scenario, *, looks_further: bool, answer_gpus: int | None = None
    ) -> CapacityPlan:
        """Plans one scenario, like `plan_capacity`."""


def plan_each_strategy(document: Document, plan: Planning) -> list[StrategyPlan]:
    """Plan a job under each strategy, the best first; raises the first error where none has a plan.

    Raises InputError for a scenario of another strategy.
    """
    scenario = parse(document)
    if not is_sharding(scenario):
        raise InputError(
            "each_strategy",
            "compares ddp, zero1, deepspeed, fully_shard, hsdp and fsdp1; ddp.strategy is "
            f"{scenario.ddp.strategy}: set it to one of these, or plan without --each-strategy",
        )
    errors: list[DdpsimError] = []

    def planned(settings: Sequence[str]) -> StrategyPlan:
        try:
            capacity_plan = plan(parse(document.changed(settings)), looks_further=False)
        except (InputError, ScenarioError) as error:
            errors.append(error)
            return StrategyPlan(tuple(settings), None, str(error).splitlines()[0])
        return StrategyPlan(tuple(settings), capacity_plan)

    def fitting(settings: Sequence[str]) -> StrategyPlan:
        """Plan the job as it is, or with the fewest changes that make it fit."""
        strategy_plan = planned(settings)
        answer = strategy_plan.plan.answer if strategy_plan.plan else None
        if answer is None or answer.fits is not False:
            return strategy_plan
        changes = settings_to_fit(document, settings, (answer.nodes, answer.gpus_per_node))
        if not changes:
            return strategy_plan
        return replace(planned((*settings, *changes)), changes=changes)

    plans = [fitting(settings) for settings in (as_ddp(scenario.ddp), *shardings(scenario))]
    gpus = _knee_of_the_fastest([each.plan for each in plans if each.plan])
    if gpus is not None:
        plans = [each.on(gpus) for each in plans]
    best, *others = sorted(plans, key=lambda each: each.rank)
    if best.plan is None:
        raise errors[0]
    chosen = parse(document.changed(best.settings))
    return [replace(best, plan=plan(chosen, looks_further=True, answer_gpus=gpus)), *others]


def _knee_of_the_fastest(plans: Sequence[CapacityPlan]) -> int | None:
    """Gives the knee of the fastest strategy that fits at each size, or the largest such size.

    None where a deadline or a budget chooses the sizes.
    """
    if not plans or plans[0].met is not None:
        return None
    fastest: dict[int, float] = {}
    for size in usable(size for plan in plans for size in plan.sizes):
        fastest[size.gpus] = max(size.progress, fastest.get(size.gpus, 0.0))
    return knee(fastest) or max(fastest)
