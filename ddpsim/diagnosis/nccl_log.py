"""What NCCL's own log says of a job, held against what it should say, and what each cause would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log

from ddpsim.diagnosis.case import Case
from ddpsim.diagnosis.traces import RANKS, WORK
from ddpsim.importers.nccl.debug_log import Connection, DebugLog
from ddpsim.result.diagnosis import Fact

__all__ = ["facts_of", "log_probability"]

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
    logged = Fact("collectives in the log", "none", "each" if debug.has_collectives else "none")
    return (*_inside(case, within), *_between(case, between), *_settings(case, debug), logged)


def log_probability(facts: Sequence[Fact], shows: Mapping[str, str] | None) -> float:
    """Logarithm of a log's probability: `shows` is what a cause has otherwise than expected.

    None: nothing is known of the cause.
    """
    if shows is None:
        return len(facts) * log(0.5)
    return sum(log(_probability(fact, shows)) for fact in facts)


def _probability(fact: Fact, shows: Mapping[str, str]) -> float:
    right = _FROM_TIMES if fact.name in (RANKS, WORK) else _NAMED
    return right if shows.get(fact.name, fact.expected) == fact.seen else 1 - right


def _inside(case: Case, connections: Sequence[Connection]) -> Iterator[Fact]:
    """Only where GPUs have NVLink: others may lack peer-to-peer by nature."""
    path = case.intra and (case.intra.path or "nvlink")
    if not connections or path != "nvlink":
        return
    direct = sum(each.way == "P2P" for each in connections)
    seen = "P2P" if 2 * direct > len(connections) else "host memory"
    yield Fact("inside a node", "P2P", seen)


def _between(case: Case, connections: Sequence[Connection]) -> Iterator[Fact]:
    network = [each for each in connections if each.way == "NET"]
    if not network or case.inter is None:
        return
    expected = "TCP" if case.inter.transport == "tcp" else "RDMA"
    by_tcp = sum(each.kind == "Socket" for each in network)
    seen = "TCP" if 2 * by_tcp > len(network) else "RDMA"
    yield Fact("between nodes", expected, seen)
    of_ib = [each for each in network if each.kind == "IB"]
    if expected == seen == "RDMA" and of_ib:
        direct = sum(each.is_direct for each in of_ib)
        yield Fact("GPUDirect RDMA", "yes", "yes" if 2 * direct > len(of_ib) else "no")
    nics = {each.nic for each in network if each.nic is not None}
    if expected == seen and nics and case.inter.nics_per_node > 1:
        fewer = len(nics) < case.inter.nics_per_node
        yield Fact("NICs of a node", "all", "fewer" if fewer else "all")


def _settings(case: Case, debug: DebugLog) -> Iterator[Fact]:
    """What the environment keeps from NCCL's choice, where the scenario leaves it that choice."""
    stated = case.cluster.nccl_variables
    if case.has_links and case.cluster.protocol == "auto" and "NCCL_PROTO" not in stated:
        is_low = debug.variables.get("NCCL_PROTO", "").upper() == "LL"
        yield Fact("protocol", "NCCL's choice", "LL" if is_low else "NCCL's choice")
    if case.has_links and "NCCL_MAX_NCHANNELS" not in stated:
        is_limited = "NCCL_MAX_NCHANNELS" in debug.variables
        yield Fact("channels", "NCCL's choice", "limited" if is_limited else "NCCL's choice")
