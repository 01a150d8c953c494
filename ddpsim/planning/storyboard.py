"""What the page of `ddpsim report` shows, simulated: caps, nodes, and what matters most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ddpsim.api import load_scenario, observe, simulate
from ddpsim.cluster.collectives import RingTransfer
from ddpsim.engine.noise import rank_factors
from ddpsim.errors import DdpsimError, ScenarioError
from ddpsim.job import Job, resolve
from ddpsim.result.model import Result
from ddpsim.result.storyboard import CapChoice, LeftOut, Sensitivity, Storyboard, drawn_step
from ddpsim.result.timeline import CommSpan
from ddpsim.scenario.cluster import Cluster, LinkKind
from ddpsim.scenario.schema import BucketCaps, Scenario

__all__ = ["storyboard"]

_Shown = TypeVar("_Shown")

_CAPS: tuple[BucketCaps, ...] = (None, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0)
_MOST_DRAWN = 4  # ranks: more do not fit on a screen
_MOST_RANKS = 4096  # of a point on the scaling curve that the scenario does not ask for
_UNLIMITED = 1e-9  # of a transfer's time
_WHERE = {"intra_node": "inside a node", "inter_node": "between nodes"}


def storyboard(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Storyboard:
    """Simulate a scenario with several bucket caps and on several numbers of nodes.

    `source` and `overrides` are those of `load_scenario`. Raises ScenarioError if the scenario
    itself is wrong; another choice that cannot be simulated is left out, and named with its reason.
    """
    settings = list(overrides)
    scenario = load_scenario(source, settings)
    result = simulate(scenario)
    left_out: list[LeftOut] = []

    def attempt(setting: str, show: Callable[[Scenario], _Shown]) -> Iterator[_Shown]:
        try:
            yield show(load_scenario(source, [*settings, setting]))
        except DdpsimError as error:
            left_out.append(LeftOut(f"--set {setting}", _reason(error)))

    choices: list[CapChoice] = []
    scaling: list[Result] = []
    own = _written(scenario.ddp.bucket_cap_mb)
    for cap in map(_written, _caps(scenario.ddp.bucket_cap_mb)):
        if cap == own:
            choices.append(_choice(scenario, result))
        else:
            choices += attempt(f"ddp.bucket_cap_mb={cap}", _choice)
    for nodes in _nodes(scenario.cluster):
        if nodes == scenario.cluster.nodes:
            scaling.append(result)
        else:
            scaling += attempt(f"cluster.nodes={nodes}", simulate)
    sensitivity = _sensitivity(resolve(scenario), result, left_out)
    return Storyboard(
        result,
        tuple(choices),
        [choice.cap for choice in choices].index(own),
        tuple(scaling),
        tuple(sorted(sensitivity, key=lambda entry: entry.difference_s)),
        tuple(left_out),
    )


def _caps(own: BucketCaps) -> list[BucketCaps]:
    """The usual caps and the scenario's own: the default, lists, then by size."""
    caps = _CAPS if own in _CAPS else (*_CAPS, own)
    numbers = sorted(cap for cap in caps if isinstance(cap, float))
    return [None, *(cap for cap in caps if isinstance(cap, tuple)), *numbers]


def _written(cap: BucketCaps) -> str:
    """A cap as `--set` takes it."""
    if cap is None:
        return "default"
    if isinstance(cap, tuple):
        return f"[{','.join(f'{part:.15g}' for part in cap)}]"
    return f"{cap:.15g}"


def _reason(error: DdpsimError) -> str:
    if not isinstance(error, ScenarioError):
        return str(error)
    return "; ".join(f"{problem.key}: {problem.message}" for problem in error.problems)


def _choice(scenario: Scenario, result: Result | None = None) -> CapChoice:
    job = resolve(scenario)
    buckets = (*job.program.initial_buckets, *job.program.rebuilt_buckets)
    wire_bytes = {bucket.size_bytes: bucket.wire_bytes for bucket in buckets}

    def ring_of(span: CommSpan) -> tuple[int, int] | None:
        if span.operation != "all_reduce":
            return None
        size_bytes = wire_bytes.get(span.size_bytes, span.size_bytes)
        transfer = job.network.cost.transfer("all_reduce", size_bytes)
        return (transfer.steps, transfer.start_ns) if isinstance(transfer, RingTransfer) else None

    ranks = _drawn_ranks(scenario)
    timeline = observe(scenario, ranks)
    others = [rank for rank in ranks if rank != timeline.slowest_rank]
    step = drawn_step(timeline, others[: _MOST_DRAWN - 1], ring_of)
    cap = _written(scenario.ddp.bucket_cap_mb)
    return CapChoice(cap, result or simulate(scenario), step)


def _drawn_ranks(scenario: Scenario) -> list[int]:
    """Rank 0, the one that computes most slowly, the second node's first, and the last."""
    cluster = scenario.cluster
    factors = rank_factors(cluster, scenario.run.seed)
    slow = [max(factors, key=lambda rank: (factors[rank], -rank))] if factors else []
    weak = sorted(cluster.weak_links or {})[:1]
    second = [cluster.gpus_per_node] if cluster.nodes > 1 else []
    return list(dict.fromkeys([0, *slow, *weak, *second, cluster.world_size - 1]))


def _nodes(cluster: Cluster) -> list[int]:
    """Powers of two up to four times the scenario's nodes, and its own number."""
    most = max(4 * cluster.nodes, 4)
    powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    usual = {nodes for nodes in powers if nodes * cluster.gpus_per_node <= _MOST_RANKS}
    return sorted(usual | {cluster.nodes})


def _sensitivity(job: Job, result: Result, left_out: list[LeftOut]) -> Iterator[Sensitivity]:
    """One change at a time, without jitter: how much longer (below 0: shorter) the step gets."""
    base_s = job.step_s()
    yield Sensitivity("compute 10 % faster", job.step_s(compute=1 / 1.1) - base_s)
    if job.program.loader:
        yield Sensitivity("data loader 10 % faster", job.step_s(data=1 / 1.1) - base_s)
    if job.scenario.run.jitter or job.observed_s:
        yield Sensitivity("no jitter", base_s - result.iteration_time_s.mean)
    for straggler in result.stragglers:
        yield Sensitivity(f"without {straggler.text}", -straggler.cost_s)
    if not result.comm_time_s:
        return
    yield Sensitivity("every collective 10 % faster", job.step_s(network=1 / 1.1) - base_s)
    yield Sensitivity("a network without limits", job.step_s(network=_UNLIMITED) - base_s)
    for change, cluster in _better_links(job.scenario.cluster, left_out):
        better = job.scenario.model_copy(update={"cluster": cluster})
        yield Sensitivity(change, resolve(better).step_s() - base_s)


def _better_links(cluster: Cluster, left_out: list[LeftOut]) -> Iterator[tuple[str, Cluster]]:
    """Clusters with more bandwidth, and with half the latency, of each kind of link."""
    if cluster.all_reduce or cluster.profile:
        reason = "the all-reduce is measured: no link figure is used"
        left_out.append(LeftOut("more bandwidth, less latency", reason))
        return
    for key in cluster.links_used:
        link = cluster.link(key)
        if link and link.bandwidth_bytes_per_s:
            more = {"bandwidth_bytes_per_s": 1.1 * link.bandwidth_bytes_per_s}
            yield f"10 % more bandwidth {_WHERE[key]}", _with_link(cluster, key, more)
        half = f"half the latency {_WHERE[key]}"
        if link and link.latency_s and cluster.states_latency(key):
            yield half, _with_link(cluster, key, {"latency_s": link.latency_s / 2})
        else:
            left_out.append(LeftOut(half, "no latency is stated: the library's own is used"))


def _with_link(cluster: Cluster, key: LinkKind, update: Mapping[str, float]) -> Cluster:
    """What the scenario does not state of a link comes from its preset as before."""
    stated = getattr(cluster, key)
    if stated is None:
        known = cluster.link(key)
        if cluster.machine or known is None:
            stated = type(known)() if known else None
        else:
            stated = known.model_copy(update={"latency_s": None})
    return cluster.model_copy(update={key: stated.model_copy(update=dict(update))})
