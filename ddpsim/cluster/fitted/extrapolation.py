"""A law beyond the ranks that it was measured on: what is assumed of its hops there."""

from __future__ import annotations

from collections.abc import Collection
from math import log2

from ddpsim.cluster.fitted.laws import AllReduceModel, all_reduce_s
from ddpsim.cluster.nccl.tables import NEWEST, tables
from ddpsim.cluster.wires import Wires
from ddpsim.importers.profiles.cluster import Fitted, NcclRegime, NcclRegimes
from ddpsim.scenario.schema import Scenario

__all__ = ["hops_are_assumed", "is_beyond_one_node", "reaching"]

Layout = tuple[int, int]  # nodes, GPUs a node
_BASE_US, _HOP_US = tables(NEWEST).base_us, tables(NEWEST).hop_us


def reaching(
    law: AllReduceModel, measured: Collection[Layout], scenario: Scenario
) -> AllReduceModel:
    """The law as a scenario's ranks need it, of which `measured` are the layouts it rests on.

    Inside a node hops are so short that a latency says nothing of them, and none is assumed.
    """
    cluster = scenario.cluster
    layout = cluster.nodes, cluster.gpus_per_node
    is_alone = cluster.world_size == 1
    if not isinstance(law, NcclRegimes) or layout in measured or is_alone:
        return law
    if hops_are_assumed(measured, layout):
        law = _in_steps(law, _like(measured, layout)[0])
    if cluster.inter_node and is_beyond_one_node(measured, layout):
        law = _over_nodes(law, Wires.of(cluster, scenario.run.seed))
    return _no_faster_than_links(law, layout)


def hops_are_assumed(measured: Collection[Layout], layout: Layout) -> bool:
    """Whether NCCL's latency on these ranks is carried there from a single layout, over nodes."""
    return layout not in measured and layout[0] > 1 and len(_like(measured, layout)) == 1


def is_beyond_one_node(measured: Collection[Layout], layout: Layout) -> bool:
    """Whether these ranks are on several nodes, and none that were measured."""
    return layout[0] > 1 and all(nodes == 1 for nodes, _ in measured)


def _like(measured: Collection[Layout], layout: Layout) -> list[Layout]:
    """The layouts that tell of this one: over nodes those over nodes, if there are any."""
    return [known for known in measured if (known[0] > 1) == (layout[0] > 1)] or list(measured)


def _in_steps(law: NcclRegimes, layout: Layout) -> NcclRegimes:
    """One layout tells a latency, but not how much of it comes again with every hop.

    Assumed: messages go by LL, LL128 and Simple as they grow, a collective starts as NCCL's own
    tables say of these (nccl src/graph/tuning.cc), and the rest are hops: a ring's all alike, as
    its slowest sets the pace; a tree's, which over nodes the smallest messages take, in the
    tables' proportions. The layout's own times stay as they are.
    """
    here = [r for r in law.regimes if _bus(r, over_nodes=layout[0] > 1)]
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
    start_s = _BASE_US["tree" if is_tree else "ring"][protocol] * 1e-6
    intra = _HOP_US["nvlink"]["tree"][0] / _HOP_US["net"]["tree"][0] if is_tree else 1.0
    hops = 2 * (gpus - 1) * intra + 2 * log2(nodes) if is_tree else 2 * (nodes * gpus - 1)
    hop_s = max(0.0, regime.base_s.value - start_s) / hops
    return regime.model_copy(
        update={
            "shape": "tree" if is_tree else "ring",
            "base_s": Fitted(value=regime.base_s.value - hops * hop_s),
            "intra_hop_s": Fitted(value=intra * hop_s),
            "inter_hop_s": Fitted(value=hop_s),
            "hop_bytes": regime.hop_bytes.times(nodes * gpus if is_tree else 1.0),
        }
    )


def _bus(regime: NcclRegime, *, over_nodes: bool) -> Fitted | None:
    """The bus bandwidth of such layouts; None: the regime is not for them."""
    inter, intra = regime.inter_bandwidth_bytes_per_s, regime.intra_bandwidth_bytes_per_s
    return inter if over_nodes else intra


def _no_faster_than_links(law: NcclRegimes, layout: Layout) -> NcclRegimes:
    """Of the bytes that ride with hops, no more than pass in the hops' time.

    As many a rank were found on few ranks; many would carry a whole message for nothing.
    """
    nodes, gpus = layout
    ranks = nodes * gpus

    def bounded(regime: NcclRegime) -> NcclRegime:
        bus = _bus(regime, over_nodes=nodes > 1)
        if bus is None:
            return regime
        own = NcclRegimes.model_construct(regimes=(regime,))
        passing = all_reduce_s(own, 0, nodes, gpus) * bus.value
        most = passing / (2 * (ranks - 1) / ranks) / (ranks if regime.shape == "ring" else 1)
        return regime.model_copy(
            update={"hop_bytes": Fitted(value=min(regime.hop_bytes.value, most))}
        )

    return law.model_copy(update={"regimes": tuple(bounded(regime) for regime in law.regimes)})


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
