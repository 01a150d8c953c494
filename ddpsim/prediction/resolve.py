"""A scenario with everything that its files and presets say, checked against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpsim.cluster.build import build_network, with_sent_sizes
from ddpsim.cluster.layouts import with_replicas
from ddpsim.cluster.mesh import with_sent_in_groups
from ddpsim.cluster.network import Network
from ddpsim.cluster.process_groups import interfering
from ddpsim.cluster.transfers import TURNS
from ddpsim.engine.program import Program
from ddpsim.errors import InputError, Problem, ScenarioError, shown
from ddpsim.prediction.job import Job
from ddpsim.prediction.parts import Built, Parts
from ddpsim.provenance import Provenance
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.document import Document
from ddpsim.scenario.run import Jitter
from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import Model

if TYPE_CHECKING:
    from ddpsim.importers.profiles.cluster import ClusterProfile


def resolve(
    scenario: Scenario, document: Document | None = None, parts: Parts | None = None
) -> Job:
    """Read a scenario's files and check that all fits; raises ScenarioError with every problem.

    `parts`: a cache that other jobs share. Raises TypeError for what is no Scenario.
    """
    if not isinstance(scenario, Scenario):
        raise TypeError(f"{shown(scenario)} is no Scenario: give what load_scenario returns for it")
    problems: list[Problem] = []
    parts = parts or Parts()
    stated, scenario = scenario.cluster, with_replicas(scenario)

    def attempt(build: Callable[[], Built]) -> Built | None:
        try:
            return build()
        except InputError as error:
            here = Problem("scenario", error.key, error.message)
            problems.append(document.blame(error) if document else here)
            return None

    model = attempt(lambda: parts.model(scenario))
    node_times = None if model is None else attempt(lambda: parts.node_times(scenario))
    profile = attempt(lambda: parts.profile(scenario))
    if model is None or not model.iterations_s:
        scenario = _with_jitter(scenario, profile)
    network = attempt(lambda: build_network(scenario, profile))
    if model is None or network is None or node_times is None or problems:
        raise ScenarioError(problems)
    overheads = profile.overheads if profile else None
    ddp_times = attempt(lambda: parts.ddp_times(scenario, model, overheads))
    if ddp_times is None:
        raise ScenarioError(problems)
    program = attempt(lambda: parts.program(scenario, model, overheads, ddp_times))
    if program is None:
        raise ScenarioError(problems)
    steady, knows_warmup = parts.get("steady", (id(program), program), program.steady), True
    try:  # everything that will be sent has a price, so that no error waits for the run
        program.transfers(network.cost)
    except InputError:
        cost = network.cost
        attempt(lambda: steady.transfers(cost))
        program, knows_warmup = steady, False  # the first iteration's one bucket is outside a log
    if problems:
        raise ScenarioError(problems)
    network = _with_sent(_with_model_interference(network, model), steady)
    network = _of_replicas(network, stated)
    ranks_measured = profile is not None and profile.jitter is not None
    return Job(
        *(scenario, model, network, program, overheads, knows_warmup, ddp_times, node_times),
        ranks_measured=ranks_measured,
        stretched_programs=parts.stretched_programs(program),
        parts=parts,
        gpus_per_rank=stated.gpus // stated.world_size,
    )


def _of_replicas(network: Network, cluster: Cluster) -> Network:
    """Say what is not simulated inside replicas of several GPUs, as provenance and warning."""
    each = cluster.gpus // cluster.world_size
    if each == 1:
        return network
    text = (
        f"{cluster.world_size} replicas of {each} GPUs: a rank is one GPU of each, and what its "
        "replica's GPUs send each other is not modelled: the step must hold it"
    )
    entry = Provenance("cluster.replica", text, "stated")
    return replace(
        network,
        provenance=(*network.provenance, entry),
        warnings=(*network.warnings, f"cluster.replica: {text}"),
    )


def _with_sent(network: Network, steady: Program) -> Network:
    """The network with what depends on the collectives that steady steps send."""
    if network.groups:
        return with_sent_in_groups(
            network, steady.sent, lambda part, sent: with_sent_sizes(part, sent, ())
        )
    sent = sorted({(op, size) for op in TURNS for size in steady.sent_bytes(op)})
    return with_sent_sizes(network, sent, steady.sent_bytes("broadcast"))


def _with_model_interference(network: Network, model: Model) -> Network:
    """The network with the exponent of interference that was measured with a model, if any."""
    if model.interference_exponent is None or network.interference is None:
        return network
    exponent = model.interference_exponent.value
    power = f"compute slows down by what usual layers do, to the power {exponent:.2f}"
    entry = Provenance("interference with this model", f"{power}; workload.profile", "measured")
    return replace(
        network,
        cost=interfering(network.cost, lambda each: replace(each, exponent=exponent)),
        provenance=(*network.provenance, entry),
    )


def _with_jitter(scenario: Scenario, profile: ClusterProfile | None) -> Scenario:
    """The profile's jitter where the scenario states none."""
    if profile is None or profile.jitter is None or scenario.run.jitter is not None:
        return scenario
    return scenario.having("run", jitter=Jitter(sigma=profile.jitter.iteration_sigma))
