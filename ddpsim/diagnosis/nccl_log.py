"""What NCCL's own log says of a job, held against what it should say, and what each cause would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import log

from ddpsim.diagnosis.case import PEER_TRANSPORTS, Case
from ddpsim.diagnosis.hypothesis import FactName
from ddpsim.diagnosis.links import HOST_MEMORY, PEERS
from ddpsim.errors import InputError
from ddpsim.importers.nccl.debug_log import Connection, DebugLog
from ddpsim.result.diagnosis import Fact
from ddpsim.scenario.schema import Scenario

# how surely a log or a trace shows what a cause makes the job do (assumed): what it names is wrong
# only if it is of another run; what is concluded from times may be chance
_NAMED, _FROM_TIMES = 0.99, 0.95


def facts_of(debug: DebugLog, case: Case) -> tuple[Fact, ...]:
    """Those that the scenario has an opinion of."""
    per_node = case.cluster.gpus_per_node

    def is_within(each: Connection) -> bool:
        return each.sender // per_node == each.receiver // per_node

    within = [each for each in debug.connections if is_within(each)]
    between = [each for each in debug.connections if not is_within(each)]
    logged = Fact(FactName.LOGGED, "none", "each" if debug.has_collectives else "none")
    return (*_inside(case, within), *_between(case, between), *_settings(case, debug), logged)


def check_is_of(debug: DebugLog, scenario: Scenario) -> None:
    """Raise InputError for the log of another job."""
    cluster = scenario.cluster
    if scenario.ddp.backend != "nccl":
        told = "is NCCL's, and ddp.backend is gloo; leave it out, or write ddp.backend: nccl"
        raise InputError("nccl_log", f"{debug.name} {told}")
    here = cluster.nodes, cluster.gpus_per_node
    if debug.layout is None and debug.ranks not in (None, cluster.world_size):
        raise InputError(
            "nccl_log",
            f"{debug.name} is of {debug.ranks} ranks, but the scenario has {cluster.world_size}; "
            "give the log of this job, or its nodes and GPUs in the scenario",
        )
    if debug.layout and debug.layout != here:
        nodes, gpus = debug.layout
        raise InputError(
            "nccl_log",
            f"{debug.name} is of {nodes} x {gpus} ranks, but the scenario has {here[0]} x "
            f"{here[1]}; give the log of this job, or its nodes and GPUs in the scenario",
        )


def log_probability(facts: Sequence[Fact], shows: Mapping[str, str] | None) -> float:
    """Logarithm of a log's probability: `shows` is what a cause has otherwise than expected.

    None: nothing is known of the cause.
    """
    if shows is None:
        return len(facts) * log(0.5)
    return sum(log(_probability(fact, shows)) for fact in facts)


def _probability(fact: Fact, shows: Mapping[str, str]) -> float:
    right = _FROM_TIMES if fact.name in (FactName.RANKS, FactName.WORK) else _NAMED
    return right if shows.get(fact.name, fact.expected) == fact.seen else 1 - right


def _inside(case: Case, connections: Sequence[Connection]) -> Iterator[Fact]:
    """Without NVLink both ways may be usual, and tell which is slow; the network is not."""
    if not connections or case.intra is None:
        return
    ways = Counter(each.way for each in connections)
    seen = PEERS if 2 * ways["P2P"] > len(connections) else HOST_MEMORY
    by_network = case.way != "NET" and 2 * ways["NET"] > len(connections)
    is_usual = not (case.has_nvlink or by_network or case.way in PEER_TRANSPORTS)
    yield Fact(FactName.INSIDE, seen if is_usual else PEERS, seen)


def _between(case: Case, connections: Sequence[Connection]) -> Iterator[Fact]:
    network = [each for each in connections if each.way == "NET"]
    if not network or case.inter is None:
        return
    expected = "TCP" if case.inter.transport == "tcp" else "RDMA"
    by_tcp = sum(each.kind == "Socket" for each in network)
    seen = "TCP" if 2 * by_tcp > len(network) else "RDMA"
    yield Fact(FactName.BETWEEN, expected, seen)
    by_rdma = [each for each in network if each.kind != "Socket"]
    if expected == seen == "RDMA":
        direct = sum(each.is_direct for each in by_rdma)
        yield Fact(FactName.DIRECT, "yes", "yes" if 2 * direct > len(by_rdma) else "no")
    nics = {each.nic for each in network if each.nic is not None}
    if expected == seen and nics and case.inter.nics_per_node > 1:
        fewer = len(nics) < case.inter.nics_per_node
        yield Fact(FactName.NICS, "all", "fewer" if fewer else "all")


def _settings(case: Case, debug: DebugLog) -> Iterator[Fact]:
    """What the environment keeps from NCCL's choice, where the scenario leaves it that choice."""
    stated = case.cluster.nccl_variables
    if case.has_links and case.cluster.protocol == "auto" and "NCCL_PROTO" not in stated:
        is_low = debug.variables.get("NCCL_PROTO", "").upper() == "LL"
        yield Fact(FactName.PROTOCOL, "NCCL's choice", "LL" if is_low else "NCCL's choice")
    if case.has_links and "NCCL_MAX_NCHANNELS" not in stated:
        is_limited = "NCCL_MAX_NCHANNELS" in debug.variables
        yield Fact(FactName.CHANNELS, "NCCL's choice", "limited" if is_limited else "NCCL's choice")
