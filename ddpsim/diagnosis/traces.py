"""What the traces of a job's ranks measure, and which rank they show to be slow."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from ddpsim.diagnosis.case import Case
from ddpsim.errors import ImportFailedError
from ddpsim.importers.kineto.ranks import RankTraces
from ddpsim.result.diagnosis import Fact, Measurement
from ddpsim.scenario.cluster import Cluster

__all__ = ["RANKS", "measured_in", "rank_facts"]

RANKS = "ranks"  # the name of the fact
_MOST_SIZES = 3


def measured_in(traces: RankTraces, cluster: Cluster, *, with_step: bool) -> list[Measurement]:
    """Step, waits and the largest all-reduces; raises ImportFailedError for another job's.

    `with_step`: a step that nobody measured without the profiler, which lengthens it.
    """
    size = traces.world_size or 1
    if size != cluster.world_size:
        raise ImportFailedError(
            traces.source,
            f"is of {size} ranks, but the scenario has {cluster.world_size}; record this job",
        )
    return list(_measured(traces, cluster, with_step=with_step))


def _measured(traces: RankTraces, cluster: Cluster, *, with_step: bool) -> Iterator[Measurement]:
    own = (cluster.nodes, cluster.gpus_per_node)
    if with_step:
        yield Measurement("step", traces.step_s, *own)
    yield Measurement("data_wait", traces.data_wait_s, *own)
    if traces.exposed_s is not None and cluster.world_size > 1:
        yield Measurement("exposed", traces.exposed_s, *own)
    by_size: dict[int, list[float]] = {}
    for size, seconds in traces.all_reduces:
        by_size.setdefault(size, []).append(seconds)
    for size in sorted(by_size)[-_MOST_SIZES:]:
        yield Measurement("all_reduce", median(by_size[size]), *own, size_bytes=size)


def rank_facts(traces: RankTraces, case: Case) -> Iterator[Fact]:
    """Whether one rank computes longer than the others; of some ranks alone, only if it does."""
    if len(traces.compute_s) < 2:
        return
    is_slower = traces.straggler is not None
    if not is_slower and len(traces.compute_s) < case.cluster.world_size:
        return
    known = case.cluster.stragglers or case.cluster.other_nodes
    yield Fact(RANKS, "one slower" if known else "alike", "one slower" if is_slower else "alike")
