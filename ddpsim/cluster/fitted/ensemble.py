"""NCCL's collectives on any ranks, by the ensemble of a calibrated model.

Each draw of a hypothesis is NCCL's own choice and price (`ddpsim.cluster.nccl.cost`) with other
figures. The answer is the weighted median of the draws, and their spread says how sure it is. Both
are computed at powers of two and interpolated between.

A single cluster's times have humps where NCCL's tuner, which does not know the cluster, keeps to a
protocol for too long. Where exactly is not known of ranks that nobody measured. So there a message
takes no longer than a larger one, and one of twice the bytes at most 2.2 times as long (assumed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import log2
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddpsim.cluster.from_links import nccl_cost
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.nccl.figures import PRIORS, USUAL, Figures
from ddpsim.cluster.transfers import Operation, duration_ns
from ddpsim.cluster.wires import Wires
from ddpsim.importers.profiles.nccl import NcclHypothesis, NcclLinks, NcclModel
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.links import InterNode
from ddpsim.units import NS_PER_S

__all__ = ["USUAL_DEVICES", "Curve", "NcclSetting", "curve_of", "for_cluster", "setting_cost"]

Floats = npt.NDArray[np.float64]

# devices whose tables and usual machine stand for an architecture
USUAL_DEVICES = {
    "volta": "v100-sxm-32gb",
    "ampere": "a100-sxm-80gb",
    "hopper": "h100-sxm-80gb",
    "blackwell": "b200",
}
_SIZES = tuple(2**power for power in range(10, 31))
_COUNTED = 0.95  # of the weight: less likely hypotheses do not change the middle
_MOST_OF_TWICE = 2.2
_SAME_RATE = 0.15  # relative: a stated network is one of those that were fitted


class NcclSetting(NamedTuple):
    """What decides NCCL's choice, figures aside."""

    architecture: str
    version: str
    ll128: bool
    links: NcclLinks

    @classmethod
    def of(cls, hypothesis: NcclHypothesis) -> NcclSetting:
        """The setting of one hypothesis."""
        known = hypothesis
        return cls(known.architecture, known.version, known.ll128, known.links)


@lru_cache(maxsize=1024)
def setting_cost(setting: NcclSetting, nodes: int, gpus_per_node: int) -> NcclCost:
    """NCCL's collectives on so many ranks, with all figures at 1."""
    links = setting.links
    keys: dict[str, Any] = {
        "device": USUAL_DEVICES[setting.architecture],
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "nccl": setting.version,
    }
    if links.intra_bytes_per_s:
        inside = {"bandwidth": f"{links.intra_bytes_per_s!r} B/s", "path": links.intra_path}
        if links.switch_bytes_per_s:
            inside["switch_bandwidth"] = f"{links.switch_bytes_per_s!r} B/s"
        keys["intra_node"] = inside
    if links.nics_per_node:
        keys["inter_node"] = {
            "bandwidth": f"{links.nic_bytes_per_s!r} B/s",
            "nics_per_node": links.nics_per_node,
            "transport": links.transport,
        }
        if links.transport in ("rdma", "efa") and not setting.ll128:
            keys["inter_node"]["gpu_direct"] = False  # which keeps NCCL from LL128
    cluster = Cluster.model_validate(keys)
    cost = nccl_cost(cluster, Wires.of(cluster))
    keeps = cost.graph.ll128 and setting.ll128
    return replace(cost, figures=USUAL, graph=replace(cost.graph, ll128=keeps))


@dataclass(frozen=True)
class Curve:
    """Seconds of one collective by message size, and the standard deviation of their logarithm."""

    log_s: Floats
    sigmas: Floats

    def seconds(self, size_bytes: float) -> float:
        """The time of one message; beyond the largest size its bandwidth stays."""
        place = log2(max(1.0, size_bytes) / _SIZES[0])
        beyond = max(0.0, place - (len(_SIZES) - 1))
        return float(np.exp(np.interp(place, self._places, self.log_s)) * 2**beyond)

    def sigma(self, size_bytes: float) -> float:
        """How far the draws differ."""
        place = log2(max(1.0, size_bytes) / _SIZES[0])
        return float(np.interp(place, self._places, self.sigmas))

    @cached_property
    def _places(self) -> Floats:
        return np.arange(len(_SIZES), dtype=np.float64)


@lru_cache(maxsize=256)
def curve_of(model: NcclModel, operation: Operation, nodes: int, gpus_per_node: int) -> Curve:
    """All message sizes of one collective on so many ranks."""
    weights, logs = [], []
    for hypothesis in _likely(model):
        cost = setting_cost(NcclSetting.of(hypothesis), nodes, gpus_per_node)
        for draw in hypothesis.draws:
            weights.append(hypothesis.weight / len(hypothesis.draws))
            logs.append(_log_times(cost, np.exp(draw), operation))
    each, share = np.array(logs), np.array(weights) / sum(weights)
    middle = np.array([_weighted_median(column, share) for column in each.T])
    spread = np.sqrt(share @ (each - middle) ** 2)
    return Curve(_steady(middle), spread)


def _likely(model: NcclModel) -> list[NcclHypothesis]:
    """The likeliest hypotheses that together have nearly all of the weight."""
    ordered = sorted(model.hypotheses, key=lambda hypothesis: -hypothesis.weight)
    before = accumulate((hypothesis.weight for hypothesis in ordered), initial=0.0)
    return [h for h, weight in zip(ordered, before, strict=False) if weight < _COUNTED]


def _log_times(cost: NcclCost, figures: Floats, operation: Operation) -> list[float]:
    drawn = replace(cost, figures=Figures(*figures.tolist()))
    times_ns = (duration_ns(drawn.transfer(operation, size)) for size in _SIZES)
    return [float(np.log(max(1, ns) / NS_PER_S)) for ns in times_ns]


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    place = np.searchsorted(np.cumsum(weights[order]), 0.5 * weights.sum())
    return float(values[order][min(int(place), len(values) - 1)])


def _steady(log_s: Floats) -> Floats:
    """No time above that of a larger message, and none below 1 / 2.2 of that of twice the bytes."""
    rising = np.minimum.accumulate(log_s[::-1])[::-1]
    step = np.log(_MOST_OF_TWICE)
    places = np.arange(len(rising))
    return np.asarray(np.maximum.accumulate((rising - step * places)[::-1])[::-1] + step * places)


def for_cluster(model: NcclModel, cluster: Cluster) -> NcclModel:
    """The hypotheses that agree with what a scenario states; all of them where none does.

    A model of one node alone takes the network that the scenario states, or its machine has.
    """
    kept: Sequence[NcclHypothesis] = model.hypotheses
    architecture = cluster.device.architecture
    kept = [h for h in kept if h.architecture == architecture] or kept
    inter = cluster.link("inter_node") if cluster.inter_node or cluster.machine else None
    if isinstance(inter, InterNode) and inter.bandwidth_bytes_per_s:
        kept = [h for h in kept if _is_of(h.links, inter)] or kept
    if cluster.nccl:
        apart = [abs(_minor(h.version) - cluster.nccl_minor) for h in kept]
        kept = [h for h, far in zip(kept, apart, strict=True) if far == min(apart)]
    beyond = cluster.link("inter_node")
    if cluster.nodes > 1 and isinstance(beyond, InterNode):
        kept = [_over_nodes(h, beyond) for h in kept]
    whole = sum(h.weight for h in kept)
    kept = [h.model_copy(update={"weight": h.weight / whole}) for h in kept]
    return model.model_copy(update={"hypotheses": tuple(kept)})


def _minor(version: str) -> int:
    return int(version.split(".")[1])


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
    moved = np.log(PRIORS[inter.transport].medians) - np.log(PRIORS["rdma"].medians)
    draws = tuple(tuple((np.array(draw) + moved).tolist()) for draw in hypothesis.draws)
    return hypothesis.model_copy(
        update={"links": hypothesis.links.model_copy(update=network), "draws": draws}
    )
