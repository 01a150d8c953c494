"""Collectives beside another job's traffic, and gloo's, without an event for every work."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from jobs.engine_runs import FACTORS, MODES, slowest_steps
from jobs.random_jobs import models, scenarios
from simpy import Environment
from test_equivalence import assert_alike, seen_from_its_start

from ddpsim.cluster.build import build_network
from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.network import NO_TRAFFIC, Traffic
from ddpsim.cluster.transfers import Interference, WholeTransfer
from ddpsim.engine.fast.flows import Flow, Flows
from ddpsim.engine.noise import draw_slowdowns, draw_stalls
from ddpsim.engine.reference.network import Network
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.prediction.program import compile_program
from ddpsim.scenario.run import Jitter, Stalls
from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import Model

SHARES = st.integers(1, 1000).map(lambda part: Fraction(part, 1000))


@st.composite
def traffics(draw: st.DrawFn, period_ns: int = 3_000_000) -> Traffic:
    """Another job's, always or in bursts, some of which last no time or all of it."""
    every_ns = draw(st.none() | st.integers(period_ns // 100, period_ns))
    busy_ns = draw(st.integers(0, every_ns)) if every_ns else 0
    return Traffic(draw(SHARES), draw(SHARES), busy_ns, every_ns)


@st.composite
def sent(draw: st.DrawFn) -> list[tuple[int, WholeTransfer]]:
    """Up to two transfers at a time, as gloo's threads send them: (pause before it, transfer)."""
    whole = st.builds(
        WholeTransfer,
        st.integers(0, 40),
        st.integers(0, 300),
        st.just(Fraction(0)) | SHARES,
        st.builds(Interference, crowded=st.sampled_from([Fraction(1), Fraction(3, 2)])),
    )
    return draw(st.lists(st.tuples(st.integers(0, 150), whole), min_size=1, max_size=8))


class Priced:
    """A cost model of transfers in the order of their keys."""

    def __init__(self, transfers: list[WholeTransfer]) -> None:
        self.transfer = lambda _, size: transfers[size]


@given(sent(), traffics(period_ns=500), st.integers(1, 2))
@example([(0, WholeTransfer(0, work_ns)) for work_ns in (100, 200, 100)], Traffic(), 2)
def test_flows_end_as_the_plain_network_s(
    sends: list[tuple[int, WholeTransfer]], traffic: Traffic, workers: int
) -> None:
    assert ends_of_flows(sends, traffic, workers) == plain_ends(sends, traffic, workers)


@given(st.integers(0, 90), st.none() | st.integers(0, 60), sent(), traffics(period_ns=500))
def test_bursts_pass_at_once_as_in_the_plain_network(
    most_ns: int, wire_ns: int | None, sends: list[tuple[int, WholeTransfer]], traffic: Traffic
) -> None:
    """One transfer at a time."""
    bursts = {"burst_ns": most_ns, "wire_ns": wire_ns}
    sends = [(pause, replace(transfer, **bursts)) for pause, transfer in sends]
    assert ends_of_flows(sends, traffic, 1) == plain_ends(sends, traffic, 1)


def ends_of_flows(
    sends: list[tuple[int, WholeTransfer]], traffic: Traffic, workers: int
) -> list[int]:
    flows, begun, at_work = Flows(traffic), list[Flow](), list[Flow]()
    for pause, transfer in sends:
        met_ns = pause
        if len(at_work) == workers:
            first = flows.first_ended(at_work)
            at_work.remove(first)
            met_ns += flows.end_ns(first)
        begun.append(flows.begin(met_ns, transfer))
        at_work.append(begun[-1])
    return [flows.end_ns(flow) for flow in begun]


def plain_ends(sends: list[tuple[int, WholeTransfer]], traffic: Traffic, workers: int) -> list[int]:
    env, ends, waiting = Environment(), [0] * len(sends), list(enumerate(sends))
    priced: Any = Priced([transfer for _, transfer in sends])
    network = Network(env, priced, 1, shared=workers > 1, traffic=traffic)

    def work() -> Any:
        while waiting:
            key, (pause, _) = waiting.pop(0)
            yield env.timeout(pause)
            yield network.join(key, "all_reduce", key, 0).ends[0]
            ends[key] = int(env.now)

    running = [env.process(work()) for _ in range(workers)]
    env.run(until=env.all_of(running))
    return ends


@settings(max_examples=15)
@given(st.data(), scenarios(noisy=True, gloo=False), models(), traffics())
def test_noisy_ranks_beside_traffic(
    data: st.DataObject, scenario: Scenario, model: Model, traffic: Traffic
) -> None:
    """NCCL: noise of every kind, compute slowed down under every collective."""
    run_options = {
        "jitter": data.draw(st.sampled_from([None, Jitter(sigma=0.2)])),
        "stalls": data.draw(st.sampled_from([None, Stalls(probability=0.3, duration="2 ms")])),
    }
    scenario = scenario.model_copy(update={"run": scenario.run.model_copy(update=run_options)})
    assert_alike_in_both(scenario, model, data.draw(FACTORS), traffic)


def without_gpus(scenario: Scenario) -> bool:
    """With gloo a GPU's ranks are simulated event by event."""
    return scenario.cluster.device.kind == "cpu"


@settings(max_examples=12)
@given(
    st.data(),
    scenarios(noisy=True, gloo=True).filter(without_gpus),
    models(),
    st.none() | traffics(),
)
def test_noisy_hosts_that_compute_themselves(
    data: st.DataObject, scenario: Scenario, model: Model, traffic: Traffic | None
) -> None:
    """gloo: two transfers at a time, hooks that hold a thread."""
    run_options = {
        "jitter": data.draw(st.sampled_from([None, Jitter(sigma=0.2)])),
        "stalls": data.draw(st.sampled_from([None, Stalls(probability=0.3, duration="2 ms")])),
    }
    scenario = scenario.model_copy(update={"run": scenario.run.model_copy(update=run_options)})
    assert_alike_in_both(scenario, model, 1.0, traffic or NO_TRAFFIC)


@settings(max_examples=10)
@given(scenarios(gloo=False), models(), FACTORS, traffics())
def test_equal_ranks_beside_traffic(
    scenario: Scenario, model: Model, slowdown: float, traffic: Traffic
) -> None:
    """One stands for all."""
    assert_alike_in_both(scenario, model, slowdown, traffic)


def assert_alike_in_both(
    scenario: Scenario, model: Model, slowdown: float, traffic: Traffic
) -> None:
    program, ranks = compile_program(scenario, model), scenario.cluster.world_size
    cost = InterferingCost(build_network(scenario).cost, slowdown)
    drawn = program.iterations, program.warmup
    slowdowns = draw_slowdowns(scenario.cluster, scenario.run, drawn[0], warmup=drawn[1])
    stalls = draw_stalls(scenario.run, ranks, *drawn)
    request = Request(program, cost, ranks, slowdowns, stalls, traffic=traffic)
    fast, plain = (run(request, mode, observed=range(request.plan.period)) for mode in MODES)
    assert {"lane", "lanes", "hosts"} & set(fast.paths)
    if fast.ranks_simulated == plain.ranks_simulated:
        assert_alike(fast, plain)
    else:
        pairs = zip(slowest_steps(fast), slowest_steps(plain), strict=True)
        assert all(seen_from_its_start(f) == seen_from_its_start(p) for f, p in pairs)
