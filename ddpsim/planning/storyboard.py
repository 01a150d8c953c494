"""What the page of `ddpsim report` shows, simulated: caps, nodes, and what matters most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from ddpsim.cluster.transfers import RingTransfer
from ddpsim.engine.noise import rank_factors
from ddpsim.errors import DdpsimError, not_here
from ddpsim.planning.dials import dialled, strategies
from ddpsim.planning.explain import sensitivities
from ddpsim.prediction.api import (
    checked,
    checked_job,
    predict_and_observe,
    predicted,
    simulate_and_observe,
)
from ddpsim.prediction.job import Job
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.resolve import resolve
from ddpsim.progress import stage
from ddpsim.result.metrics import Step
from ddpsim.result.model import Result
from ddpsim.result.storyboard import (
    CapChoice,
    Dial,
    LeftOut,
    Rival,
    Storyboard,
    drawn_step,
    held_over_step,
)
from ddpsim.result.summary import steady_steps, typical_step
from ddpsim.result.timeline import CommSpan, Timeline
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.document import Source, load
from ddpsim.scenario.schema import Scenario

_Shown = TypeVar("_Shown")

_MOST_DRAWN = 4  # ranks: more do not fit on a screen
_MOST_RANKS = 4096  # of a point on the scaling curve that the scenario does not ask for


def storyboard(
    source: Source,
    overrides: Iterable[str] = (),
    against: Sequence[str] = (),
) -> Storyboard:
    """Simulate a scenario with several bucket caps and on several numbers of nodes.

    `source` and `overrides` are those of `load_scenario`; `against`: other settings, each of which
    is drawn too. Raises ScenarioError if the scenario itself is wrong; another choice that cannot
    be simulated is left out, and named with its reason.
    """
    document, parts = load(source, overrides), Parts()
    scenario = checked(document)
    dial, current, values = dialled(scenario) or strategies(scenario)
    numbers = node_counts(scenario.cluster)
    with stage("parts of the page", len(values) + len(numbers) + len(against) + 1) as progress:
        own_job = resolve(scenario, parts=parts)
        ranks = _drawn_ranks(scenario, own_job.node_times)
        result, own_step = simulate_and_observe(own_job, ranks)
        choices, scaling, left_out = list[CapChoice](), list[Result](), list[LeftOut]()

        def attempt(
            setting: str, show: Callable[[Job], _Shown], option: str = "--set"
        ) -> Iterator[_Shown]:
            try:
                changed = document.changed([setting])
                yield show(checked_job(changed, parts.of_another_question()))
            except DdpsimError as error:
                left_out.append(LeftOut(f"{option} {setting}", error.reason))
            except ImportError as error:
                left_out.append(LeftOut(f"{option} {setting}", not_here(error)))

        for value in values:
            if value == current:
                choices.append(draw(own_job, value, dial, (result, own_step)).choice)
            else:
                choices += attempt(f"{dial.key}={value}", partial(_choice, value, dial))
            progress.advance()
        for nodes in numbers:
            if nodes == scenario.cluster.nodes:
                scaling.append(result)
            else:
                scaling += attempt(f"cluster.nodes={nodes}", predicted)
            progress.advance()
        rivals = list[Rival]()
        for setting in against:
            chosen = attempt(setting, partial(_choice, current, dial), "--against")
            rivals += (Rival(setting, each.result, each.step) for each in chosen)
            progress.advance()
        moved = sorted(
            sensitivities(resolve(scenario, parts=parts.of_another_question())),
            key=lambda entry: entry.change_s,
        )
        progress.advance()
    month = None
    if scenario.reliability:
        from ddpsim.planning.capacity_plan.long_run import month_of  # noqa: PLC0415 -- numpy

        month = month_of(document, own_job, result)
    return Storyboard(
        dial,
        result,
        tuple(choices),
        [choice.cap for choice in choices].index(current),
        tuple(scaling),
        tuple(moved),
        tuple(left_out),
        tuple(rivals),
        month,
    )


class Drawing(NamedTuple):
    """A drawn step, and the same on the slowest rank with nothing joined or left out."""

    choice: CapChoice
    step: Step


def draw(
    job: Job,
    value: str,
    dial: Dial,
    observed: tuple[Result, Timeline] | None = None,
    *,
    with_interval: bool = True,
) -> Drawing:
    """Draw the typical step of a job in which a dial has a value.

    `observed`: what `simulate_and_observe` returned for the drawn ranks, where it was called. A
    result without an interval, from `predict_and_observe`, takes a fraction of the time.
    """
    strategy = job.program.strategy
    buckets = (bucket for kind in range(strategy.kinds) for bucket in strategy.buckets(kind))
    wire_bytes = {bucket.size_bytes: bucket.wire_bytes for bucket in buckets}

    def ring_of(span: CommSpan) -> tuple[int, int] | None:
        if span.operation != "all_reduce":
            return None
        size_bytes = wire_bytes.get(span.size_bytes, span.size_bytes)
        transfer = job.network.cost.transfer("all_reduce", size_bytes)
        return (transfer.steps, transfer.start_ns) if isinstance(transfer, RingTransfer) else None

    ranks = _drawn_ranks(job.scenario, job.node_times)
    result, timeline = observed or predict_and_observe(job, ranks, with_interval=with_interval)
    others = [rank for rank in ranks if rank != timeline.slowest_rank]
    step = drawn_step(timeline, others[: _MOST_DRAWN - 1], ring_of)
    held = held_over_step(timeline, strategy.memory_walk())
    choice = CapChoice(value, dial.words_of(value), result, step, held)
    return Drawing(choice, typical_step(steady_steps(timeline)))


def _choice(value: str, dial: Dial, job: Job) -> CapChoice:
    return draw(job, value, dial).choice


def _drawn_ranks(scenario: Scenario, node_times: Mapping[int, float]) -> list[int]:
    """Rank 0, the one that computes most slowly, the second node's first, and the last."""
    cluster = scenario.cluster
    factors = rank_factors(cluster, scenario.run.seed, node_times)
    slow = [max(factors, key=lambda rank: (factors[rank], -rank))] if factors else []
    weak = sorted(cluster.weak_links or {})[:1]
    second = [cluster.gpus_per_node] if cluster.nodes > 1 else []
    return list(dict.fromkeys([0, *slow, *weak, *second, cluster.world_size - 1]))


def node_counts(cluster: Cluster) -> list[int]:
    """Powers of two up to four times the scenario's nodes, and its own number."""
    most = max(4 * cluster.nodes, 4)
    powers = [2**power for power in range(most.bit_length())]
    usual = {nodes for nodes in powers if nodes * cluster.gpus_per_node <= _MOST_RANKS}
    return sorted(usual | {cluster.nodes})
