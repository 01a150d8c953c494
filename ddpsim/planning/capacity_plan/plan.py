"""How many GPUs: time to train, cost and efficiency over world sizes, and the size that answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from ddpsim.errors import InputError, ScenarioError, shown
from ddpsim.planning.capacity_plan.next_doubling import next_doubling
from ddpsim.planning.capacity_plan.question import Question, Site, StepsByBatch, read_steps_by_batch
from ddpsim.planning.capacity_plan.world_sizes import WorldSizes
from ddpsim.planning.options import parse_budget, parse_price, parse_target
from ddpsim.prediction.api import scenario_of
from ddpsim.prediction.fitting import ways_to_fit
from ddpsim.prediction.resolve import resolve
from ddpsim.result.capacity import (
    Capacity,
    CapacityPlan,
    Money,
    NextDoubling,
    Target,
    knee,
    marginal_efficiencies,
)
from ddpsim.result.model import NextStep
from ddpsim.result.training import LearningRate, learning_rate_of
from ddpsim.scenario.document import Source

_MOST_GPUS = 1024


def plan_capacity(
    scenario: Source,
    target: Target | str,
    *,
    price: Money | str | None = None,
    budget: Money | str | None = None,
    global_batch: int | None = None,
    max_gpus: int = _MOST_GPUS,
    critical_batch: int | None = None,
    steps_by_batch: StepsByBatch | str | Path | None = None,
    pue: float | None = None,
    co2_g_per_kwh: float | None = None,
    looks_further: bool = True,
    answer_gpus: int | None = None,
) -> CapacityPlan:
    """World sizes for a piece of work: the fewest nodes in time, or the fastest in a budget.

    Nodes of the scenario's kind are added, or of one node GPUs; batch_per_rank stays (weak
    scaling), or with `global_batch` that does (strong). With `critical_batch` N a global batch of B
    needs 1 + B/N times the target's samples (McCandlish et al. 2018); `steps_by_batch` is a table
    of measured ones, or its CSV, and the target's samples are its smallest batch's. `price` is of a
    GPU-hour. `pue` counts energy, `co2_g_per_kwh` its carbon. A scenario's `reliability` adds what
    failures cost in time.
    `looks_further`: at what limits twice the GPUs, which takes most of the time. `answer_gpus`: the
    answer is this one of the world sizes, and neither target nor budget chooses.
    Raises ValueError for text that cannot be read, TypeError for money that is neither text nor
    Money, InputError for what does not fit the scenario (`key` is the argument).
    """
    question = Question(
        scenario_of(scenario),
        parse_target(target) if isinstance(target, str) else target,
        _money("price", price, parse_price),
        _money("budget", budget, parse_budget),
        global_batch,
        max_gpus,
        critical_batch,
        read_steps_by_batch(steps_by_batch)
        if isinstance(steps_by_batch, (str, Path))
        else steps_by_batch,
        answer_gpus,
        None if pue is None else Site(pue, co2_g_per_kwh),
    )
    question.check()
    tried = WorldSizes(question)
    tried.try_ladder()
    return _Planner(question, tried, looks_further).plan()


def _money(name: str, given: Money | str | None, parse: Callable[[str], Money]) -> Money | None:
    if isinstance(given, str):
        return parse(given)
    if given is not None and not isinstance(given, Money):
        raise TypeError(
            f"{name} is {shown(given)}; wanted text with a currency, such as '2.50 USD'"
        )
    return given


@dataclass(frozen=True)
class _Planner:
    """Chooses among the world sizes that were tried, and tries more where that is finer."""

    question: Question
    tried: WorldSizes
    looks_further: bool

    def plan(self) -> CapacityPlan:
        """Choose a size, and look at the next doubling; the ladder has been tried."""
        question, tried = self.question, self.tried
        answer, met, within_budget = self._chosen()
        if answer.fits is False and met is not None:
            met, within_budget = False, None
        if self.looks_further:
            self._find_the_first_sure(answer)
        rates = {gpus: size.progress for gpus, size in tried.sizes.items()}
        usable = [size.gpus for size in tried.usable()]
        marginal = marginal_efficiencies(rates)
        shown = {
            gpus: replace(tried.sizes[gpus], marginal_efficiency=marginal.get(gpus))
            for gpus in sorted(tried.sizes)
        }
        result = tried.results[answer.gpus]
        interval = result.prediction_interval_s
        if answer.long_run:
            at = question.at(answer.nodes, answer.gpus_per_node)
            campaign = question.campaign(at, answer.step_s, result.edges_s)
            long_run = campaign.long_run(helps=self.looks_further)
            shown[answer.gpus] = replace(shown[answer.gpus], long_run=long_run)
        workload = question.scenario.workload
        return CapacityPlan(
            name=question.scenario.name,
            target=question.target,
            samples_per_epoch=question.samples,
            seq_len=question.seq_len if question.target.unit == "tokens" else None,
            price=question.price,
            budget=question.budget,
            scaling="weak" if question.global_batch is None else "strong",
            sizes=tuple(shown.values()),
            answer=shown[answer.gpus],
            met=met,
            within_budget=shown[within_budget.gpus] if within_budget else None,
            sure=self._sure(shown[gpus] for gpus in usable),
            knee_gpus=knee({gpus: rates[gpus] for gpus in usable}),
            next_doubling=self._next_doubling(answer) if self.looks_further else None,
            make_it_fit=_make_it_fit(question, answer),
            searched=tried.how_searched(),
            left_out=tuple(tried.left_out.values()),
            most_gpus=question.max_gpus,
            interval_level=interval.level if interval else None,
            widest=max(
                interval.sources if interval else (),
                key=lambda source: source.width_s,
                default=None,
            ),
            critical_batch=question.critical_batch,
            steps_by_batch=question.steps_by_batch.points if question.steps_by_batch else None,
            counts_pauses=bool(workload.evaluation or workload.checkpoint_write),
            learning_rate=self._learning_rate(answer),
            asked_gpus=question.answer_gpus,
        )

    def _chosen(self) -> tuple[Capacity, bool | None, Capacity | None]:
        """The answer, whether it keeps to all limits, and the fastest in the budget if another."""
        question, usable = self.question, self.tried.usable()
        if question.answer_gpus is not None:
            sizes, gpus = self.tried.sizes, question.answer_gpus
            if gpus not in sizes:
                choices = ", ".join(f"{size:,}" for size in sorted(sizes))
                reason = f"{gpus} GPUs were not tried; choose one of {choices}"
                raise InputError("answer_gpus", reason)
            return sizes[gpus], None, None
        affordable = self._fastest_affordable(usable) if question.budget else None
        if question.target.within_s is not None:
            fewest = self._fewest_in_time(usable)
            if fewest:
                kept = question.affordable(fewest.paid_gpus, fewest.expected_s)
                return fewest, kept, None if kept else affordable
            return affordable or min(usable, key=lambda size: size.expected_s), False, None
        if question.budget:
            if affordable:
                return affordable, True, None
            return min(usable, key=lambda size: size.paid_gpus * size.expected_s), False, None
        bend = knee({size.gpus: size.progress for size in usable})
        return self.tried.sizes[bend or usable[-1].gpus], None, None

    def _fewest_in_time(self, usable: Sequence[Capacity]) -> Capacity | None:
        """The first size that is in time, or the fewest nodes between the last late size and it."""
        question = self.question
        first = next((size for size in usable if question.in_time(size.expected_s)), None)
        if first is None or question.global_batch is not None:
            return first
        late = max((size.nodes for size in usable if size.gpus < first.gpus), default=first.nodes)

        def is_late(_nodes: int, time_s: float) -> bool:
            return not question.in_time(time_s)

        for nodes, time_s in self.tried.between(late, first.nodes, is_late):
            if question.in_time(time_s):
                return self.tried.simulated(nodes, first.gpus_per_node)
        return first

    def _fastest_affordable(self, usable: Sequence[Capacity]) -> Capacity | None:
        """The fastest size in the budget: one that was tried, or one up to the next larger."""
        question, whole = self.question, self.question.scenario.cluster.gpus_per_node
        kept = [size for size in usable if question.affordable(size.paid_gpus, size.expected_s)]
        if not kept:
            return None
        best = min(kept, key=lambda size: size.expected_s)
        above = [size.nodes for size in usable if size.gpus > best.gpus]
        if question.global_batch is not None or not above:
            return best

        def is_better(nodes: int, time_s: float) -> bool:
            return time_s < best.expected_s and question.affordable(nodes * whole, time_s)

        between = self.tried.between(best.nodes, above[0], is_better)
        better = [(time_s, nodes) for nodes, time_s in between if is_better(nodes, time_s)]
        return self.tried.simulated(min(better)[1], whole) if better else best

    def _sure(self, sizes: Iterable[Capacity]) -> Capacity | None:
        """The smallest size that is in time even at the slow edge of its interval."""
        return next(filter(self._is_sure, sizes), None)

    def _is_sure(self, size: Capacity) -> bool:
        within_s, edges = self.question.target.within_s, size.calendar_s[1]
        return within_s is not None and edges is not None and edges[1] <= within_s

    def _find_the_first_sure(self, answer: Capacity) -> None:
        """Try numbers of nodes below the first of the ladder that is in time at its slow edge."""
        usable = self.tried.usable()
        sure = self._sure(usable)
        if sure is None or sure.gpus <= answer.gpus or self.question.global_batch is not None:
            return
        late = max(size.nodes for size in usable if size.gpus < sure.gpus)
        self.tried.halve(late, sure.nodes, self._is_sure)

    def _next_doubling(self, answer: Capacity) -> NextDoubling | None:
        """Looks at twice the GPUs; None where they cannot be had, or a log says nothing of them."""
        if self.question.of_a_log:
            return None
        nodes, gpus_per_node = answer.nodes, 2 * answer.gpus_per_node
        if gpus_per_node > self.question.scenario.cluster.gpus_per_node:
            nodes, gpus_per_node = 2 * answer.nodes, answer.gpus_per_node
        try:
            doubled = self.question.at(nodes, gpus_per_node)
            today = self.question.at(answer.nodes, answer.gpus_per_node)
            growth = self.question.growth(doubled) / self.question.growth(today)
            return next_doubling(today, doubled, growth)
        except (InputError, ScenarioError) as error:
            self.tried.leave_out(nodes, gpus_per_node, error)
        return None

    def _learning_rate(self, answer: Capacity) -> LearningRate | None:
        """Advice for the answer's global batch; warm-up counts steps where samples are one epoch's.

        None where the scenario says nothing of a learning rate.
        """
        stated = self.question.scenario.workload.learning_rate
        if stated is None:
            return None
        warmup = None
        if self.question.target.epochs > 1:
            steps = ceil(self.question.samples / answer.global_batch)
            warmup = ceil(stated.warmup_epochs * steps)
        return learning_rate_of(stated.base_batch, answer.global_batch, stated.value, warmup)


def _make_it_fit(question: Question, answer: Capacity) -> NextStep | None:
    """The least that has to change for the answer's size to fit; None where it does."""
    if answer.fits is not False:
        return None
    ways = ways_to_fit(resolve(question.at(answer.nodes, answer.gpus_per_node)))
    return next(iter(ways), None)
