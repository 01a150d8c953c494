"""The product in a few lines: scenario -> job -> engine -> timeline -> result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from ddpsim.cluster.mesh import mesh_of
from ddpsim.cluster.what_if_links import waits_for_latency
from ddpsim.engine.run import EngineMode, Simulated, run
from ddpsim.errors import shown
from ddpsim.prediction.effort import long_answer
from ddpsim.prediction.interval import if_measured, prediction_interval, variants
from ddpsim.prediction.job import Job
from ddpsim.prediction.measured_step import as_stated, check_measured
from ddpsim.prediction.next_steps import next_steps
from ddpsim.prediction.program import pauses_of, training_of
from ddpsim.prediction.resolve import resolve
from ddpsim.prediction.start_up import start_up_of
from ddpsim.prediction.stragglers import stragglers
from ddpsim.prediction.uncertainty import host_provenance, lengthenings, uncertainties
from ddpsim.progress import stage
from ddpsim.provenance import Uncertainty
from ddpsim.result.model import (
    Engine,
    Estimate,
    PredictionInterval,
    Result,
    Straggler,
    edges_in_words,
)
from ddpsim.result.summary import Context, mean_step_s, spread_of_means, summarise
from ddpsim.result.timeline import CommSpan, MessageSpan, Timeline
from ddpsim.scenario.document import Document, Source, load
from ddpsim.scenario.load import parse
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.select import strategy_name
from ddpsim.units import format_bytes_per_s, format_duration
from ddpsim.wording import counted

if TYPE_CHECKING:
    from ddpsim.cluster.process_groups import Mesh
    from ddpsim.cluster.transfers import Operation, ProcessGroup
    from ddpsim.prediction.parts import Parts

_NO_NETWORK = _NO_HOST = 1e-6  # times as long as it takes


def load_scenario(source: Source, overrides: Iterable[str] = ()) -> Scenario:
    """Read and check a scenario, with every file that it names.

    `source` is a YAML file, the same as a mapping (relative paths then start in the current
    folder), or a scenario; `overrides` are `key.path=value` settings. Raises ScenarioError with all
    problems.
    """
    return checked(load(source, overrides))


def scenario_of(source: Source) -> Scenario:
    """A scenario as it is, or what `load_scenario` reads of anything else."""
    is_read = isinstance(source, (str, Path, Mapping, Document))
    return load_scenario(source) if is_read else cast("Scenario", source)


def checked(document: Document) -> Scenario:
    """The scenario of a document, with every file that it names; raises ScenarioError."""
    return _checked(document)[0]


def checked_job(document: Document, parts: Parts | None = None) -> Job:
    """A document as a job that can be simulated; other jobs may share its `parts`.

    Raises ScenarioError.
    """
    return _checked(document, parts)[1]


def _checked(document: Document, parts: Parts | None = None) -> tuple[Scenario, Job]:
    scenario = parse(document)
    job = resolve(scenario, document, parts=parts)
    original = as_stated(document)
    if original is not None:
        check_measured(original, scenario, "set both")
    return scenario, job


def simulate(scenario: Source, engine: EngineMode = "auto") -> Result:
    """Predict one steady DDP step of a scenario, or of its file or mapping.

    `engine` "reference" simulates every rank and every ring step, "auto" takes exact shortcuts.
    Raises ScenarioError if a file that the scenario names does not fit it, and ValueError for an
    engine that does not exist.
    """
    if engine not in get_args(EngineMode):
        raise ValueError(f"engine is {engine!r}; wanted one of {', '.join(get_args(EngineMode))}")
    return simulate_and_observe(resolve(scenario_of(scenario)), engine=engine)[0]


def load_and_simulate(
    source: Source, overrides: Iterable[str], engine: EngineMode
) -> tuple[Scenario, Result]:
    """What `load_scenario` and `simulate` return, of one job: its model is built once."""
    scenario, job = _checked(load(source, overrides))
    return scenario, simulate_and_observe(job, engine=engine)[0]


def predict(scenario: Scenario) -> Result:
    """What `simulate` returns but for the next steps, which are most of its work."""
    return predicted(resolve(scenario))


def predicted(job: Job) -> Result:
    """Predict one steady step of a job, without the next steps."""
    return _predicted(job, run(job.request()), "auto")


def predict_and_observe(
    job: Job, ranks: Iterable[int], *, with_interval: bool = True
) -> tuple[Result, Timeline]:
    """What `predict` and `observe` return of a job, of one run; raises as they do.

    Without an interval the answer also lacks what rests on other runs: stragglers and epochs.
    """
    simulated, timeline = _observed(job, ranks)
    sum_up = _predicted if with_interval else summed_up
    return sum_up(job, simulated, "auto"), timeline


def simulate_and_observe(
    job: Job, ranks: Iterable[int] | None = None, engine: EngineMode = "auto"
) -> tuple[Result, Timeline]:
    """What `simulate` and `observe` return of a job, of one run; raises as they do.

    Without `ranks` the timeline is that of the ranks that were simulated.
    """
    with stage("parts of the answer", 3) as progress:  # the step, how sure it is, what to try
        if needs := long_answer(job):
            progress.say(needs)
        simulated, timeline = _observed(job, ranks, engine)
        mean_s = mean_step_s(simulated.timeline)
        progress.findings = [f"the step takes {format_duration(mean_s)}"]
        progress.advance()
        result = _predicted(job, simulated, engine)
        edges = edges_in_words(result.prediction_interval_s)
        progress.findings = [f"{progress.findings[0]}, {edges}"]
        progress.advance()
        result = replace(result, next_steps=next_steps(job, result))
        progress.advance()
    return result, timeline


def _predicted(job: Job, simulated: Simulated, engine: EngineMode) -> Result:
    result = summed_up(job, simulated, engine)
    spread_s = spread_of_means(simulated.timeline, job.program.strategy.period)
    terms = uncertainties(job)
    interval = _interval(job, result, terms, spread_s)
    result = replace(
        result,
        provenance=(*result.provenance, *host_provenance(job)),
        prediction_interval_s=interval,
        training=training_of(job.scenario, job.model, result.iteration_time_s.mean, pauses_of(job)),
        estimate=_estimate(job, result, interval, terms),
        start_up=start_up_of(job),
    )
    return replace(result, stragglers=_stragglers(job, result, engine))


def observe(
    scenario: Source,
    ranks: Iterable[int] = (0,),
    observe_message: Callable[[MessageSpan], None] | None = None,
) -> Timeline:
    """The lanes of some ranks, and of the slowest one, in the run that `simulate` sums up.

    Its first `warmup` steps are not steady; steps that repeat are there once. `observe_message` is
    called with every message of every collective, in the order of their ends. The plain model then
    simulates every rank, which takes long where there are many. Raises ScenarioError as `simulate`,
    and ValueError for a rank that does not exist.
    """
    scenario = scenario_of(scenario)
    job = resolve(scenario)
    if observe_message is None:
        return _observed(job, ranks)[1]
    wanted = _existing(scenario, ranks)
    timeline = run(job.request(), "reference", observe_message=observe_message).timeline
    return _of_ranks(timeline, wanted, scenario.cluster.world_size)


def _existing(scenario: Scenario, ranks: Iterable[int]) -> list[int]:
    wanted, size = sorted(set(ranks)), scenario.cluster.world_size
    if outside := [rank for rank in wanted if rank not in range(size)]:
        raise ValueError(f"there is no rank {shown(outside[0])}: choose 0 to {size - 1}")
    return wanted


def _observed(
    job: Job, ranks: Iterable[int] | None, engine: EngineMode = "auto"
) -> tuple[Simulated, Timeline]:
    """A run, and its lanes of some ranks and of the slowest one; None: of those it simulates."""
    request = job.request()
    if ranks is None:
        simulated = run(request, engine)
        return simulated, simulated.timeline
    wanted, period = _existing(job.scenario, ranks), request.plan.period  # others do the same
    simulated = run(request, engine, observed=sorted({rank % period for rank in wanted}))
    return simulated, _of_ranks(simulated.timeline, wanted, period)


def _of_ranks(timeline: Timeline, wanted: Iterable[int], period: int) -> Timeline:
    lanes = {rank: timeline.ranks[rank % period] for rank in (*wanted, timeline.slowest_rank)}
    return replace(timeline, ranks=dict(sorted(lanes.items())))


def _stragglers(job: Job, result: Result, engine: EngineMode) -> tuple[Straggler, ...]:
    """What holds the others up, the costliest first."""
    scenario, causes = job.scenario, list(stragglers(job))

    def cost_s(part: str, key: str) -> float:
        """Run the job again without one cause; what the step gains is its cost."""
        calm = resolve(scenario.having(part, **{key: None}), parts=job.parts_for_another)
        without = run(calm.request(), engine)
        return max(0.0, result.iteration_time_s.mean - mean_step_s(without.timeline))

    if scenario.run.stalls:
        causes.append(Straggler("stalls", "stalls of any rank", cost_s("run", "stalls")))
    if background := scenario.cluster.background:
        text = f"another job's {format_bytes_per_s(background.rate_bytes_per_s)} a node"
        causes.append(Straggler("traffic", text, cost_s("cluster", "background")))
    return tuple(sorted(causes, key=lambda straggler: -straggler.cost_s))


def summed_up(job: Job, simulated: Simulated, engine: EngineMode) -> Result:
    """Sum up one run: a result without what needs other runs, such as the interval."""
    scenario, strategy, naive = job.scenario, job.program.strategy, job.baselines()
    context = Context(
        samples_per_rank=scenario.samples_per_rank,
        world_size=scenario.cluster.world_size,
        compute_only_s=naive.compute_only,
        memory=job.memory(),
        network=partial(_limit_of, job),
        broadcast=strategy.broadcast,
        reduced=strategy.reduced,
        optimizes_on_host=scenario.ddp.host_copies is not None,
        ranks_of=partial(_ranks_of, mesh_of(scenario)),
        knows_warmup=job.knows_warmup,
        names=job.bucket_names,
        batches_s=job.batches_s,
        network_saves_s=lambda: job.step_s() - job.step_s(network=_NO_NETWORK),
        host_saves_s=lambda: job.step_s() - job.step_s(host=_NO_HOST),
    )
    return summarise(
        simulated.timeline,
        context,
        name=scenario.name,
        nodes=scenario.cluster.nodes,
        gpus_per_node=scenario.cluster.gpus_per_node,
        gpus_by_node=scenario.cluster.gpus_by_node,
        gpus_per_rank=job.gpus_per_rank,
        strategy=strategy_name(scenario),
        buckets_rebuilt_at=strategy.rebuilt_from,
        memory_peak=strategy.memory_peak(),
        baselines_s=naive,
        provenance=job.provenance(),
        warnings=job.warnings(mean_step_s(simulated.timeline)),
        seed=scenario.run.seed,
        engine=Engine(engine, simulated.ranks_simulated, simulated.paths),
    )


def _ranks_of(mesh: Mesh, group: str, rank: int) -> str:
    """Names the ranks of a rank's group: 0-7, or 0,8,16,24."""
    ranks = mesh.members(cast("ProcessGroup", group), rank)
    if len(ranks) > 1 and ranks.step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _limit_of(job: Job, collective: CommSpan) -> str:
    """What limits a collective, in words."""
    operation, network = cast("Operation", collective.operation), job.network.of(collective.group)
    if waits_for_latency(network, operation, collective.wire_bytes):
        members = mesh_of(job.scenario).size(cast("ProcessGroup", collective.group))
        return f"the latency of the hops among {counted(members, 'rank')}"
    return network.bottleneck


def _estimate(
    job: Job, result: Result, interval: PredictionInterval, terms: Mapping[str, Uncertainty]
) -> Estimate | None:
    """What an estimated step waits for, and its interval if a step were measured."""
    if job.model.basis != "roofline" or job.scenario.cluster.device.kind == "cpu":
        return None
    share, sigma = job.host_share, terms["compute"].sigma
    low_s, high_s = if_measured(result.iteration_time_s.mean, interval, sigma)
    return Estimate("host-bound" if share > 1 else "device-bound", share, low_s, high_s)


def _interval(
    job: Job, result: Result, terms: Mapping[str, Uncertainty], spread_s: tuple[float, float]
) -> PredictionInterval:
    job.steps_s(list(variants(terms)))  # side by side
    mean_s, hidden_s = result.iteration_time_s.mean, result.comm_time_s - result.exposed_comm_s
    longer = list(lengthenings(job, mean_s, hidden_s))
    return prediction_interval(mean_s, job.step_s, terms, longer, spread_s)
