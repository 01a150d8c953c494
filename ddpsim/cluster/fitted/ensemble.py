"""NCCL's collectives on any ranks, by the ensemble of a calibrated model.

Each draw of a hypothesis is NCCL's own choice and price (`ddpsim.cluster.nccl.cost`) with other
figures. The answer is the weighted median of the draws, and their spread says how sure it is. Both
are computed at powers of two, as they are asked for, and interpolated between.

A single cluster's times have humps where NCCL's tuner, which does not know the cluster, keeps to a
protocol for too long. Where exactly is not known of ranks that nobody measured. So there a message
takes no longer than a larger one, and one of twice the bytes at most 2.2 times as long (assumed).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate
from math import exp, log, log2, sqrt
from typing import NamedTuple

from ddpsim.cluster.from_links import nccl_cost
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.nccl.figures import PRIORS, USUAL, Figures
from ddpsim.cluster.nccl.tuner import Choice
from ddpsim.cluster.transfers import Operation, duration_ns
from ddpsim.cluster.wires import Wires
from ddpsim.importers.profiles.nccl import NcclHypothesis, NcclLinks, NcclModel, NcclSetting
from ddpsim.importers.profiles.part import interpolated
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.device import Architecture
from ddpsim.scenario.links import InterNode, IntraNode
from ddpsim.units import NS_PER_S

# devices whose tables and usual machine stand for an architecture
USUAL_DEVICES: dict[Architecture, str] = {
    "volta": "v100-sxm-32gb",
    "ampere": "a100-sxm-80gb",
    "hopper": "h100-sxm-80gb",
    "blackwell": "b200",
}
_LEAST_BYTES, _LAST = 1024, 20  # a curve's sizes: 1 KiB to 1 GiB
_COUNTED = 0.95  # of the weight: less likely hypotheses do not change the middle
_ROUNDING = 1e-9  # of sums of weights
_MOST_OF_TWICE = log(2.2)
_SAME_RATE = 0.15  # relative: a stated network is one of those that were fitted


@lru_cache(maxsize=1024)
def setting_cost(setting: NcclSetting, nodes: int, gpus_per_node: int) -> NcclCost:
    """NCCL's collectives on so many ranks, with all figures at 1."""
    links = setting.links
    device = USUAL_DEVICES[setting.architecture]
    keys = {"device": device, "nodes": nodes, "gpus_per_node": gpus_per_node}
    given: dict[str, object] = {"nccl": setting.version}
    if links.intra_bytes_per_s:
        given["intra_node"] = IntraNode.model_construct(
            bandwidth_bytes_per_s=links.intra_bytes_per_s,
            path=links.intra_path,
            switch_bandwidth_bytes_per_s=links.switch_bytes_per_s,
        )
    if links.nics_per_node:
        reaches_gpus = setting.ll128 or links.transport not in ("rdma", "efa")
        given["inter_node"] = InterNode.model_construct(
            bandwidth_bytes_per_s=links.nic_bytes_per_s,
            nics_per_node=links.nics_per_node,
            transport=links.transport,
            gpu_direct=None if reaches_gpus else False,  # which keeps NCCL from LL128
        )
    cluster = Cluster.model_validate(keys | given)
    cost = nccl_cost(cluster, Wires.of(cluster))
    keeps = cost.graph.ll128 and setting.ll128
    return replace(cost, figures=USUAL, graph=replace(cost.graph, ll128=keeps))


def log_s(cost: NcclCost, choice: Choice, operation: Operation, size_bytes: int) -> float:
    """Logarithm of the seconds of one collective, sent as a choice says."""
    return log(max(1, duration_ns(cost.sent(choice, size_bytes, operation))) / NS_PER_S)


class Member(NamedTuple):
    """A hypothesis on some ranks: NCCL with all figures at 1, and draws of these.

    `weight`: of each draw.
    """

    cost: NcclCost
    draws: tuple[Figures, ...]
    weight: float

    def log_times(self, operation: Operation, size_bytes: int) -> Iterator[float]:
        """Logarithm of the seconds of one collective, of each draw."""
        choice = self.cost.tuned(size_bytes, operation)
        for figures in self.draws:
            yield log_s(replace(self.cost, figures=figures), choice, operation, size_bytes)


def likely(model: NcclModel) -> list[NcclHypothesis]:
    """The likeliest hypotheses that together have nearly all of the weight."""
    ordered = sorted(model.hypotheses, key=lambda hypothesis: -hypothesis.weight)
    before = accumulate((hypothesis.weight for hypothesis in ordered), initial=0.0)
    return [h for h, weight in zip(ordered, before, strict=False) if weight < _COUNTED]


def members(model: NcclModel, nodes: int, gpus_per_node: int) -> list[Member]:
    """Likely hypotheses on so many ranks."""
    return [
        Member(
            setting_cost(hypothesis.setting, nodes, gpus_per_node),
            tuple(Figures(*map(exp, draw)) for draw in hypothesis.draws),
            hypothesis.weight / len(hypothesis.draws),
        )
        for hypothesis in likely(model)
    ]


class Curve:
    """Seconds of one collective by message size, and the standard deviation of their logarithm."""

    def __init__(self, members: Sequence[Member], operation: Operation) -> None:
        self._members, self._operation = members, operation
        whole = sum(member.weight * len(member.draws) for member in members)
        self._shares = [member.weight / whole for member in members for _ in member.draws]
        self._drawn, self._steady = cache(self._draw), cache(self._steady_at)

    def seconds(self, size_bytes: float) -> float:
        """The time of one message; beyond the largest size its bandwidth stays."""
        beyond = max(0.0, _place(size_bytes) - _LAST)
        return exp(_between(size_bytes, lambda place: self._steady(place)[1])) * 2**beyond

    def sigma(self, size_bytes: float) -> float:
        """How far the draws differ."""
        return _between(size_bytes, lambda place: self._drawn(place)[1])

    def _draw(self, place: int) -> tuple[float, float]:
        """Median of the logarithms of the draws' seconds, and their standard deviation from it."""
        message = self._operation, _LEAST_BYTES << place
        logs = [each for member in self._members for each in member.log_times(*message)]
        middle = _weighted_median(logs, self._shares)
        squares = ((each - middle) ** 2 for each in logs)
        return middle, sqrt(sum(s * w for s, w in zip(squares, self._shares, strict=True)))

    def _steady_at(self, place: int) -> tuple[float, float]:
        """The least median from this size up; and no less than 1 / 2.2 of twice the bytes'."""
        rising = self._drawn(place)[0]
        if place == _LAST:
            return rising, rising
        larger, of_twice = self._steady(place + 1)
        rising = min(rising, larger)
        return rising, max(rising, of_twice - _MOST_OF_TWICE)


@lru_cache(maxsize=256)
def curve_of(model: NcclModel, operation: Operation, nodes: int, gpus_per_node: int) -> Curve:
    """All message sizes of one collective on so many ranks."""
    return Curve(members(model, nodes, gpus_per_node), operation)


def _place(size_bytes: float) -> float:
    return max(0.0, log2(max(1.0, size_bytes) / _LEAST_BYTES))


def _between(size_bytes: float, value: Callable[[int], float]) -> float:
    place = min(_place(size_bytes), float(_LAST))
    around = sorted({int(place), -int(-place // 1)})
    return interpolated(place, around, [value(each) for each in around])


def _weighted_median(values: Sequence[float], shares: Sequence[float]) -> float:
    """The least value up to which there is half of the weight."""
    ordered = sorted(zip(values, shares, strict=True))
    up_to = list(accumulate(share for _, share in ordered))
    return ordered[bisect_left(up_to, 0.5 - _ROUNDING)][0]


def for_cluster(model: NcclModel, cluster: Cluster) -> NcclModel:
    """The hypotheses that agree with what a scenario states; all of them where none does.

    A model of one node alone takes the network that the scenario states, or its machine has.
    """
    kept: Sequence[NcclHypothesis] = model.hypotheses
    architecture = cluster.device.architecture
    kept = [h for h in kept if h.architecture == architecture] or kept
    network = cluster.link("inter_node")
    inter = network if isinstance(network, InterNode) else None
    if inter and inter.bandwidth_bytes_per_s and (cluster.inter_node or cluster.machine):
        kept = [h for h in kept if _is_of(h.links, inter)] or kept
    if inter and inter.gpu_direct is not None:
        kept = [h for h in kept if _is_direct(h) is inter.gpu_direct] or kept
    if cluster.nccl:
        apart = [abs(int(h.version.split(".")[1]) - cluster.nccl_minor) for h in kept]
        kept = [h for h, far in zip(kept, apart, strict=True) if far == min(apart)]
    if cluster.nodes > 1 and inter:
        kept = [_over_nodes(h, inter) for h in kept]
    whole = sum(h.weight for h in kept)
    kept = [h.model_copy(update={"weight": h.weight / whole}) for h in kept]
    return model.model_copy(update={"hypotheses": tuple(kept)})


def _is_of(links: NcclLinks, inter: InterNode) -> bool:
    if not (links.nics_per_node and links.nic_bytes_per_s and inter.bandwidth_bytes_per_s):
        return False
    ratio = links.nic_bytes_per_s / inter.bandwidth_bytes_per_s
    return links.nics_per_node == inter.nics_per_node and abs(ratio - 1) < _SAME_RATE


def _over_nodes(hypothesis: NcclHypothesis, inter: InterNode) -> NcclHypothesis:
    """What one node tells, with a network beyond it; a model of several nodes as it is."""
    if hypothesis.links.nics_per_node or inter.bandwidth_bytes_per_s is None:
        return hypothesis
    network = {
        "nics_per_node": inter.nics_per_node,
        "nic_bytes_per_s": inter.bandwidth_bytes_per_s,
        "transport": inter.transport,
    }
    usual, there = PRIORS["rdma"].medians, PRIORS[inter.transport].medians
    moved = [log(to / at) for at, to in zip(usual, there, strict=True)]
    draws = tuple(
        tuple(value + more for value, more in zip(draw, moved, strict=True))
        for draw in hypothesis.draws
    )
    links = hypothesis.links.model_copy(update=network)
    return hypothesis.model_copy(update={"links": links, "draws": draws})


def _is_direct(hypothesis: NcclHypothesis) -> bool:
    """Whether NICs read GPUs' memory, as LL128 needs; Slingshot has no LL128 either way."""
    return hypothesis.ll128 or hypothesis.links.transport == "slingshot"
