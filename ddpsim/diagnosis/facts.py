"""What NCCL's log and the traces of ranks show of a job, beside what they should show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import log
from statistics import median

from ddpsim.diagnosis.case import PEER_TRANSPORTS, Case
from ddpsim.diagnosis.hypothesis import FactName
from ddpsim.diagnosis.links import HOST_MEMORY, PEERS
from ddpsim.errors import ImportFailedError, InputError
from ddpsim.importers.kineto.ranks import RankTraces
from ddpsim.importers.nccl.debug_log import Connection, DebugLog
from ddpsim.result.diagnosis import Fact, Measurement
from ddpsim.scenario.schema import Scenario

# how surely a log or a trace shows what a cause makes the job do (assumed): what it names is wrong
# only if it is of another run; what is concluded from times may be chance
_NAMED, _FROM_TIMES = 0.99, 0.95


def facts_of(debug: DebugLog, case: Case) -> tuple[Fact, ...]:
    """Lists the facts of a log for which the scenario says what to expect."""
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
        reason = "is NCCL's, and ddp.backend is gloo; leave it out, or write ddp.backend: nccl"
        raise InputError("nccl_log", f"{debug.name} {reason}")
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
    """The path between GPUs of a node; without NVLink, peer-to-peer and host memory are usual."""
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


_MORE = 1.5  # times as many all-reduces as predicted
_MOST_SIZES = 3
_LEAST_SIZE = 0.1  # of the largest one: of smaller ones the host's delays are much
_LONGER = 1.3  # times the predicted work, which the profiler lengthens
_BESIDE_GLOO = 2.0  # the same on a CPU, which keeps half of its speed beside gloo's threads


def measured_in(traces: RankTraces, case: Case, *, with_step: bool) -> list[Measurement]:
    """Step, waits and the largest all-reduces; raises ImportFailedError for another job's.

    `with_step`: a step that nobody measured without the profiler, which lengthens it.
    """
    size, cluster = traces.world_size or 1, case.cluster
    if size != cluster.world_size:
        raise ImportFailedError(
            traces.source,
            f"is of {size} ranks, but the scenario has {cluster.world_size}; record this job",
        )
    return list(_measured(traces, case, with_step=with_step))


def _measured(traces: RankTraces, case: Case, *, with_step: bool) -> Iterator[Measurement]:
    cluster = case.cluster
    layout = (cluster.nodes, cluster.gpus_per_node)
    if with_step:
        yield Measurement("step", traces.step_s, *layout)
    yield Measurement("data_wait", traces.data_wait_s, *layout)
    is_usual = len(traces.traces) > 1 or not _takes_longer(traces, case)  # one that waits
    if cluster.world_size > 1 and is_usual:
        yield Measurement("exposed", traces.exposed_s, *layout)
    by_size: dict[int, list[float]] = {}
    for size, seconds in traces.all_reduces:
        by_size.setdefault(size, []).append(seconds)
    # gloo's threads share the cores of a slow rank, whose all-reduces are then slow as well
    tells_links = traces.on_gpu or traces.straggler is None
    sizes = [size for size in by_size if tells_links and size > _LEAST_SIZE * max(by_size)]
    for size in sorted(sizes)[-_MOST_SIZES:]:
        yield Measurement("all_reduce", median(by_size[size]), *layout, size_bytes=size)


def _reducing(traces: RankTraces, case: Case) -> Iterator[Fact]:
    """Which micro-batches of a step reduce."""
    step = traces.typical.typical
    if step.earlier and any(each.of_gradients for each in step.collectives):
        expected = "the last" if case.scenario.ddp.no_sync else "all"
        yield Fact(FactName.REDUCING, expected, "all" if step.reductions > 1 else "the last")


def rank_facts(traces: RankTraces, case: Case) -> Iterator[Fact]:
    """What the ranks that were recorded do otherwise than the scenario says, or each other."""
    yield from _reducing(traces, case)
    yield from _unused(traces, case)
    yield from _buckets(traces, case)
    yield from _reads(traces, case)
    yield from _work(traces, case)
    is_slower = traces.straggler is not None
    is_known = len(traces.compute_s) > 1 and (is_slower or traces.is_whole)
    if is_known:
        alike = not (case.cluster.stragglers or case.cluster.other_nodes)
        expected = "alike" if alike else "one slower"
        yield Fact(FactName.RANKS, expected, "one slower" if is_slower else "alike")


def _unused(traces: RankTraces, case: Case) -> Iterator[Fact]:
    """Whether DDP looks for unused parameters; of a GPU only if it does: sizes may be missing."""
    words = {True: "looked for", False: "not looked for"}
    is_stated, is_seen = case.scenario.ddp.finds_unused, traces.looks_for_unused
    if case.is_ddp and any(traces.transfers) and (is_seen or is_stated or not traces.on_gpu):
        yield Fact(FactName.UNUSED, words[is_stated], words[is_seen])


def _buckets(traces: RankTraces, case: Case) -> Iterator[Fact]:
    """How many a backward has: a single one overlaps nothing, and each one costs a latency."""
    reductions = traces.typical.typical.reductions
    sent = (sum(each.of_gradients for each in of_step) for of_step in traces.transfers)
    counts = [count // reductions for count in sent]
    if case.is_ddp and case.cluster.world_size > 1 and counts and min(counts):
        predicted = len(case.job.program.steady_buckets)
        expected, seen = ("one" if count == 1 else "several" for count in (predicted, max(counts)))
        yield Fact(FactName.BUCKETS, expected, "many" if min(counts) > _MORE * predicted else seen)
        if expected == "several" and case.scenario.ddp.bucket_order == "ready":
            early = any(step.sends_early for of_it in traces.steps.values() for step in of_it)
            words = {True: "before the last gradient", False: "after the last gradient"}
            yield Fact(FactName.FIRST, words[True], words[early])


def _reads(traces: RankTraces, case: Case) -> Iterator[Fact]:
    """Whether the host waits in every step for a value, as for a loss; a CPU has none to wait for.

    One that is read every 50 steps may be in a recording too.
    """
    workload = case.scenario.workload
    if traces.on_gpu:
        is_stated = workload.read_loss_every == 1 or bool(workload.grad_scaler)
        words = {True: "in every step", False: "none"}
        yield Fact(FactName.READS, words[is_stated], words[traces.reads_values])


def _takes_longer(traces: RankTraces, case: Case) -> bool:
    own_s = case.job.compute_only_s()
    times = _LONGER if traces.on_gpu else _BESIDE_GLOO
    return max(traces.compute_s.values()) > times * own_s


def _work(traces: RankTraces, case: Case) -> Iterator[Fact]:
    """Whether a rank takes longer for its own work; of one trace alone, only if it does."""
    if _takes_longer(traces, case):
        yield Fact(FactName.WORK, "as predicted", "longer")
    elif traces.is_whole:
        yield Fact(FactName.WORK, "as predicted", "as predicted")
