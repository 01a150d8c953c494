"""A law beyond the ranks that it was measured on: what is assumed of its hops there."""

from __future__ import annotations

from collections.abc import Collection
from math import log2

from ddpsim.cluster.fitted import AllReduceModel
from ddpsim.cluster.links import Wires
from ddpsim.cluster.tuner import BASE_US
from ddpsim.importers.cluster_profile import Fitted, NcclRegime, NcclRegimes
from ddpsim.scenario.schema import Scenario

__all__ = ["reaching"]

Layout = tuple[int, int]  # nodes, GPUs a node


def reaching(
    law: AllReduceModel, measured: Collection[Layout], scenario: Scenario
) -> AllReduceModel:
    """The law as a scenario's ranks need it, of which `measured` are the layouts it rests on.

    Unchanged inside a node, where hops are so short that a latency says nothing of them.
    """
    cluster = scenario.cluster
    is_known = (cluster.nodes, cluster.gpus_per_node) in measured
    if not isinstance(law, NcclRegimes) or is_known or cluster.nodes == 1:
        return law
    over_nodes = [layout for layout in measured if layout[0] > 1]
    alike = over_nodes or list(measured)
    if len(alike) == 1:
        law = _in_steps(law, alike[0])
    if over_nodes or cluster.inter_node is None:
        return law
    return _over_nodes(law, Wires.of(cluster, scenario.run.seed))


def _in_steps(law: NcclRegimes, layout: Layout) -> NcclRegimes:
    """One layout tells a latency, but not how much of it comes again with every hop.

    Assumed: messages go by LL, LL128 and Simple as they grow, a collective starts as NCCL's own
    tables say of these (nccl src/graph/tuning.cc), and the rest are hops, each as long as another;
    over nodes the smallest messages take a tree. The layout's own times stay as they are.
    """
    here = [r for r in law.regimes if _is_for(r, over_nodes=layout[0] > 1)]
    if any(r.intra_hop_s.value or r.inter_hop_s.value for r in here):
        return law
    ordered = sorted(here, key=lambda regime: regime.base_s.value)
    split = {id(regime): _split(regime, i, len(here), layout) for i, regime in enumerate(ordered)}
    regimes = tuple(split.get(id(regime), regime) for regime in law.regimes)
    return law.model_copy(update={"regimes": regimes})


def _split(regime: NcclRegime, place: int, count: int, layout: Layout) -> NcclRegime:
    """The regime that is the `place`-th of so many, with its latency in hops of the layout."""
    nodes, gpus = layout
    is_tree = nodes > 1 and place == 0 and count > 1
    protocol = 2 if place == count - 1 else min(place, 1)
    start_s = BASE_US["tree" if is_tree else "ring"][protocol] * 1e-6
    hops = 2 * (gpus - 1) + 2 * log2(nodes) if is_tree else 2 * (nodes * gpus - 1)
    hop_s = max(0.0, regime.base_s.value - start_s) / hops
    return regime.model_copy(
        update={
            "shape": "tree" if is_tree else "ring",
            "base_s": Fitted(value=regime.base_s.value - hops * hop_s),
            "intra_hop_s": Fitted(value=hop_s),
            "inter_hop_s": Fitted(value=hop_s),
            "hop_bytes": regime.hop_bytes.times(nodes * gpus if is_tree else 1.0),
        }
    )


def _is_for(regime: NcclRegime, *, over_nodes: bool) -> bool:
    inter, intra = regime.inter_bandwidth_bytes_per_s, regime.intra_bandwidth_bytes_per_s
    return (inter if over_nodes else intra) is not None


def _over_nodes(law: NcclRegimes, wires: Wires) -> NcclRegimes:
    """A law measured on one node alone, with the network that the scenario states beyond it."""
    hop = Fitted(value=wires.ring[0].latency_s)

    def over(regime: NcclRegime) -> NcclRegime:
        inside = regime.intra_bandwidth_bytes_per_s
        slowest = min(wires.network_rate, inside.value) if inside else wires.network_rate
        # the time that so many bytes ride with is enough for fewer on a slower wire
        covered = regime.hop_bytes.value * (slowest / inside.value if inside else 1.0)
        figures = {
            "inter_hop_s": hop,
            "inter_bandwidth_bytes_per_s": Fitted(value=slowest),
            "hop_bytes": Fitted(value=covered),
        }
        return regime.model_copy(update=figures)

    return law.model_copy(update={"regimes": tuple(over(regime) for regime in law.regimes)})
