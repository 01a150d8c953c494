"""NCCL's choices in a traced job beside those of the model of its tuner."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.cluster.build import build_network
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.errors import InputError
from ddpsim.importers.kineto.ranks import RankTraces
from ddpsim.importers.nccl.kernels import KernelChoice, kernel_choice
from ddpsim.result.replay import ReplayedKernel
from ddpsim.scenario.schema import Scenario

__all__ = ["kernels_beside"]


def kernels_beside(traces: RankTraces, scenario: Scenario) -> Iterator[ReplayedKernel]:
    """By size; none where the kernels or the tuner tell nothing."""
    seen = _seen(traces)
    tuner = _tuner(scenario) if seen else None
    if tuner is None:
        return
    for size, ran in sorted(seen.items()):
        chosen = tuner.choice(size)
        channels, _ = tuner.graph.channels
        yield ReplayedKernel(size, *ran, chosen.algorithm, chosen.protocol, channels)


def _seen(traces: RankTraces) -> dict[int, KernelChoice]:
    """Of all-reduces whose sizes and kernels are told, the last one of each size."""
    found = {}
    for step in (step for of_rank in traces.steps.values() for step in of_rank):
        for each in step.collectives:
            choice = kernel_choice(each.kernel, each.blocks, each.threads)
            if choice and each.size_bytes:
                found[each.size_bytes] = choice
    return found


def _tuner(scenario: Scenario) -> NcclCost | None:
    """NCCL's tuner on the links of the scenario, whatever was measured."""
    links = scenario.cluster.model_copy(update={"all_reduce": None, "profile": None})
    try:
        cost = build_network(scenario.model_copy(update={"cluster": links})).plain_cost
    except InputError:
        return None
    return cost if isinstance(cost, NcclCost) else None
