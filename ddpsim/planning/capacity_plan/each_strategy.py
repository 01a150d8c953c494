"""How many GPUs under each strategy that leaves the training as it is, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddpsim.errors import DdpsimError, InputError, ScenarioError
from ddpsim.planning.shardings import AS_DDP, is_sharding, shardings
from ddpsim.result.capacity import CapacityPlan
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from ddpsim.scenario.schema import Scenario

__all__ = ["StrategyPlan", "plan_each_strategy"]


@dataclass(frozen=True)
class StrategyPlan:
    """The plan with some settings, or why there is none."""

    settings: tuple[str, ...]
    plan: CapacityPlan | None
    problem: str = ""

    @property
    def rank(self) -> tuple[bool, bool, bool, float]:
        """Smaller is better: it can be had, fits in memory, is met, and takes few GPU-hours."""
        if self.plan is None:
            return (True, True, True, 0.0)
        answer, met = self.plan.answer, self.plan.met
        return (False, answer.fits is False, met is False, answer.gpu_hours)

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types: the settings with their answer, or their problem."""
        found: dict[str, Any] = {"settings": list(self.settings), "problem": self.problem}
        if self.plan is None:
            return found
        plan = self.plan.to_dict()
        return found | {"answer": plan["answer"], "met": plan["met"]}


def plan_each_strategy(
    document: Document, plan: Callable[[Scenario, bool], CapacityPlan]
) -> list[StrategyPlan]:
    """The best first; raises the first error where no strategy has a plan.

    `plan` plans a scenario, and looks further than its answer if it is told to: at the best alone.
    Raises InputError for a scenario of another strategy.
    """
    scenario = parse(document)
    if not is_sharding(scenario):
        raise InputError(
            "each_strategy",
            f"ddp.strategy: {scenario.ddp.strategy} is another training; set ddp.strategy to ddp, "
            "zero1, fully_shard or hsdp",
        )
    as_ddp = () if scenario.ddp.strategy == "ddp" else AS_DDP
    errors: list[DdpsimError] = []

    def planned(settings: Sequence[str]) -> StrategyPlan:
        try:
            found = plan(parse(document.changed(settings)), False)  # noqa: FBT003
        except (InputError, ScenarioError) as error:
            errors.append(error)
            return StrategyPlan(tuple(settings), None, str(error).splitlines()[0])
        return StrategyPlan(tuple(settings), found)

    plans = sorted(
        (planned(settings) for settings in (as_ddp, *shardings(scenario))),
        key=lambda each: each.rank,
    )
    best, *others = plans
    if best.plan is None:
        raise errors[0]
    whole = plan(parse(document.changed(best.settings)), True)  # noqa: FBT003
    return [StrategyPlan(best.settings, whole), *others]
