"""Collectives priced by a cluster profile: what calibration fitted, evaluated.

`all_reduce_times_s` is the only place where the formulas of `ddpsim.importers.profiles.cluster`
stand; the fit (`calibrate.fit`) and the simulation both call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddpsim.cluster.transfers import REPLICATED, SHARDED, Operation, WholeTransfer
from ddpsim.errors import InputError
from ddpsim.importers.profiles.cluster import GlooRing, NcclRegime, NcclRegimes
from ddpsim.units import to_ns

__all__ = [
    "AllReduceModel",
    "Columns",
    "FittedCost",
    "Point",
    "all_reduce_s",
    "all_reduce_times_s",
]

AllReduceModel = NcclRegimes | GlooRing
Floats = npt.NDArray[np.float64]

_SEGMENT_BYTES = 1_048_576  # gloo/allreduce.h: the longest segment
_ELEMENT_BYTES = 4  # DDP reduces float32; gloo cuts segments at whole elements


class Point(NamedTuple):
    """One all-reduce: a message of `size_bytes` on `nodes` x `gpus_per_node` ranks.

    `line_rate` is the rate of a node's network link in bytes per second; None: the one that the
    profile was measured on. Only gloo's model asks for it.
    """

    size_bytes: float
    nodes: int
    gpus_per_node: int
    line_rate: float | None = None


class _Parts(NamedTuple):
    """Seconds that no other transfer shares, and seconds on the wire; one of each a point."""

    latency_s: Floats
    transfer_s: Floats


@dataclass(frozen=True)
class FittedCost:
    """A profile's times for one layout; a CollectiveCost.

    A broadcast is not fitted, but priced from the same figures by the library's own algorithm:
    NCCL's ring passes the message once, after half the hops of the ring that reduces (nccl
    src/graph/tuning.cc has no other way), on the fastest of the rings, or of all regimes if none is
    one; gloo sends it whole down a binomial tree (gloo/broadcast.cc), ceil(log2 n) times. What was
    measured of it, if it was, `ddpsim.cluster.fitted.residuals` brings in.
    So are reduce-scatters and all-gathers, of which a ring's all-reduce consists: NCCL's take half
    of its hops and bytes on the fastest of the rings; gloo all-reduces the whole input of a
    reduce-scatter (torch 2.13), and gathers shards in halves (gloo/allgather.cc).
    With gloo the time of the bytes on the wire is what two collectives in flight share; with
    NCCL, one at a time, the split does not matter.
    """

    operations = REPLICATED | SHARDED
    model: AllReduceModel
    nodes: int
    gpus_per_node: int
    line_rate: float | None = None
    time_factor: float = 1.0

    def transfer(self, operation: Operation, size_bytes: int) -> WholeTransfer:
        """See CollectiveCost; raises InputError where the profile has no figures."""
        point = Point(size_bytes, self.nodes, self.gpus_per_node, self.line_rate)
        latency_s, transfer_s = _PARTS[operation](self.model, Columns.of([point]))
        return WholeTransfer(
            self._ns(latency_s[0]), self._ns(transfer_s[0]), burst_ns=self._ns(self._burst_s)
        )

    def stretched(self, factor: float) -> FittedCost:
        """See CollectiveCost."""
        return replace(self, time_factor=self.time_factor * factor)

    @property
    def _burst_s(self) -> float:
        """What a rested link saves, in seconds: nothing where getting going takes longer."""
        if not isinstance(self.model, GlooRing):
            return 0.0
        line_rate = self.line_rate or self.model.line_rate_bytes_per_s
        at_once_s = self.model.rested_burst_bytes.value / line_rate
        return max(0.0, at_once_s - self.model.rested_delay_s.value)

    def _ns(self, seconds: float) -> int:
        return to_ns(float(seconds) * self.time_factor)


def all_reduce_s(
    model: AllReduceModel,
    size_bytes: float,
    nodes: int,
    gpus_per_node: int,
    line_rate: float | None = None,
) -> float:
    """Seconds of one all-reduce that is alone; raises InputError, see Point for the arguments."""
    point = Point(size_bytes, nodes, gpus_per_node, line_rate)
    return float(all_reduce_times_s(model, Columns.of([point]))[0])


def all_reduce_times_s(model: AllReduceModel, columns: Columns) -> Floats:
    """Seconds of each of these all-reduces; raises InputError where no regime is for a layout."""
    latency_s, transfer_s = _all_reduce(model, columns)
    return np.asarray(latency_s + transfer_s)


def law_times_s(operation: Operation) -> Callable[[AllReduceModel, Columns], Floats]:
    """The same of another operation, see FittedCost."""

    def times_s(model: AllReduceModel, columns: Columns) -> Floats:
        latency_s, transfer_s = _PARTS[operation](model, columns)
        return np.asarray(latency_s + transfer_s)

    return times_s


def _all_reduce(model: AllReduceModel, columns: Columns) -> _Parts:
    if isinstance(model, GlooRing):
        return _gloo_ring(model, columns)
    return _fastest([_nccl_all_reduce(regime, columns) for regime in model.regimes], columns)


def _broadcast(model: AllReduceModel, columns: Columns) -> _Parts:
    if isinstance(model, GlooRing):
        return _gloo_tree(model, columns)
    rings = [regime for regime in model.regimes if regime.shape == "ring"] or model.regimes
    return _fastest([_nccl_broadcast(regime, columns) for regime in rings], columns)


def _reduce(model: AllReduceModel, columns: Columns) -> _Parts:
    """NCCL's is a broadcast backwards; gloo's scatters around its ring and gathers (reduce.cc)."""
    if isinstance(model, GlooRing):
        return _gloo_ring(model, columns)
    return _broadcast(model, columns)


def _reduce_scatter(model: AllReduceModel, columns: Columns) -> _Parts:
    if isinstance(model, GlooRing):
        return _gloo_ring(model, columns)
    return _half_ring(model, columns)


def _all_gather(model: AllReduceModel, columns: Columns) -> _Parts:
    if isinstance(model, GlooRing):
        return _gloo_all_gather(model, columns)
    return _half_ring(model, columns)


def _half_ring(model: NcclRegimes, columns: Columns) -> _Parts:
    """NCCL has no tree for these; raises InputError where the profile tells of trees alone."""
    rings = [regime for regime in model.regimes if regime.shape == "ring"]
    if not rings:
        raise InputError(
            "cluster.profile",
            "was fitted to all-reduces that no ring explains: it does not tell what a "
            "reduce-scatter or an all-gather takes, which NCCL sends around rings; drop the "
            "profile, and state cluster.intra_node and cluster.inter_node",
        )
    return _fastest([_nccl_half(regime, columns) for regime in rings], columns)


class Columns(NamedTuple):
    """Points as columns, one entry a point: many are evaluated at once."""

    size_bytes: Floats
    nodes: Floats
    gpus_per_node: Floats
    line_rate: Floats  # nan where it is not stated

    @classmethod
    def of(cls, points: Sequence[Point]) -> Columns:
        """The columns of these points."""
        return cls(*np.array(points, dtype=np.float64).reshape(len(points), 4).T)

    @property
    def ranks(self) -> Floats:
        """Ranks of each point."""
        return self.nodes * self.gpus_per_node


def _nccl_all_reduce(regime: NcclRegime, columns: Columns) -> _Parts:
    ranks = columns.ranks
    return _Parts(
        regime.base_s.value + _hops_s(regime, columns),
        2 * (ranks - 1) / ranks * _bytes_beyond(regime, columns) / _bandwidth(regime, columns),
    )


def _nccl_broadcast(regime: NcclRegime, columns: Columns) -> _Parts:
    return _Parts(
        regime.base_s.value + _hops_s(regime, columns) / 2,
        _bytes_beyond(regime, columns) / _bandwidth(regime, columns),
    )


def _nccl_half(regime: NcclRegime, columns: Columns) -> _Parts:
    """The hops and bytes of one turn around a ring, after the base of the whole."""
    ranks = columns.ranks
    return _Parts(
        regime.base_s.value + _hops_s(regime, columns) / 2,
        (ranks - 1) / ranks * _bytes_beyond(regime, columns) / _bandwidth(regime, columns),
    )


def _hops_s(regime: NcclRegime, columns: Columns) -> Floats:
    """Source of the counts: nccl src/graph/tuning.cc."""
    if regime.shape == "ring":
        intra, inter = 2 * (columns.ranks - columns.nodes), 2 * (columns.nodes - 1)
    else:
        intra, inter = 2 * (columns.gpus_per_node - 1), 2 * np.log2(columns.nodes)
    return intra * regime.intra_hop_s.value + inter * regime.inter_hop_s.value


def _bytes_beyond(regime: NcclRegime, columns: Columns) -> Floats:
    """Bytes that the hops' latency does not cover."""
    shares = columns.ranks if regime.shape == "ring" else 1.0
    return np.maximum(0.0, columns.size_bytes - shares * regime.hop_bytes.value)


def _bandwidth(regime: NcclRegime, columns: Columns) -> Floats:
    """The layout's bus bandwidth; nan where the regime is not for it."""
    inter, intra = regime.inter_bandwidth_bytes_per_s, regime.intra_bandwidth_bytes_per_s
    return np.where(
        columns.nodes > 1, inter.value if inter else np.nan, intra.value if intra else np.nan
    )


def _fastest(ways: Sequence[_Parts], columns: Columns) -> _Parts:
    latency_s = np.array([way.latency_s for way in ways])
    transfer_s = np.array([way.transfer_s for way in ways])
    total_s = np.where(np.isnan(transfer_s), np.inf, latency_s + transfer_s)
    first, point = np.argmin(total_s, axis=0), np.arange(len(columns.nodes))
    lost = columns.nodes[np.isinf(total_s[first, point])]
    if lost.size:
        where = "one node" if lost[0] == 1 else "several nodes"
        raise InputError(
            "cluster.profile",
            f"was fitted without a measurement on {where}; measure there, and fit again"
            + ("" if lost[0] == 1 else ", or state cluster.inter_node"),
        )
    return _Parts(latency_s[first, point], transfer_s[first, point])


def _gloo_ring(model: GlooRing, columns: Columns) -> _Parts:
    """gloo's segmented ring, two segments in flight. Source: gloo/allreduce.cc.

    numSeg segments of s bytes, 2n at least; each of the two phases sends K = numSeg (n-1)/n of
    them. A segment of the reduce-scatter takes max(s/B, (s/B + a)/2, s/R), one of the all-gather
    max(s/B, (s/B + a)/2), for a payload rate B, a software latency a and a reduce rate R. Each
    phase waits for its first segment to be agreed on, a, and the second for the last addition of
    the first, s/R. No segment's s/B is lost to filling the pipeline: on our testbed at 500 Mbit/s
    4 MiB (four segments) take 1.04 times their bytes at the line rate, not six fourths of it.
    The part of the bytes that a shaper lets through as its burst goes as if B were infinite.
    """
    return _gloo_shaped(model, columns, 2, _segments_s)


def _gloo_all_gather(model: GlooRing, columns: Columns) -> _Parts:
    """The all-gather's phase alone, of which a segment is half a shard. Source: allgather.cc."""
    return _gloo_shaped(model, columns, 1, _halves_s)


def _gloo_shaped(
    model: GlooRing,
    columns: Columns,
    turns: int,
    alone_s: Callable[[GlooRing, Columns, Floats], Floats],
) -> _Parts:
    """So many turns around the ring, what a shaper lets through without its limit too."""
    n = columns.ranks
    s_per_byte = _wire_s_per_byte(model, columns)
    volume = turns * (n - 1) / n * columns.size_bytes * model.wire_bytes_per_byte.value
    shaped = np.maximum(0.0, volume - model.burst_bytes.value) / np.maximum(volume, 1.0)
    limited_s = alone_s(model, columns, s_per_byte)
    free_s = alone_s(model, columns, np.zeros_like(s_per_byte))
    total_s = model.queue_s.value + shaped * limited_s + (1 - shaped) * free_s
    wire_s = turns * (n - 1) / n * columns.size_bytes * s_per_byte * shaped
    transfer_s = np.minimum(wire_s, total_s)
    return _Parts(total_s - transfer_s, transfer_s)


def _halves_s(model: GlooRing, columns: Columns, s_per_byte: Floats) -> Floats:
    n, latency_s = columns.ranks, model.segment_s.value
    wire_s = columns.size_bytes / n / 2 * s_per_byte
    return np.asarray(2 * (n - 1) * np.maximum(wire_s, (wire_s + latency_s) / 2) + latency_s)


def _segments_s(model: GlooRing, columns: Columns, s_per_byte: Floats) -> Floats:
    n = columns.ranks
    wanted = np.maximum(np.ceil(columns.size_bytes / _SEGMENT_BYTES), 2 * n)
    segments = np.ceil(wanted / n) * n
    segment = np.ceil(columns.size_bytes / segments / _ELEMENT_BYTES) * _ELEMENT_BYTES
    sent = segments * (n - 1) / n
    wire_s, added_s = segment * s_per_byte, segment / model.reduce_bytes_per_s.value
    latency_s = model.segment_s.value
    gather_s = np.maximum(wire_s, (wire_s + latency_s) / 2)
    scatter_s = np.maximum(gather_s, added_s)
    return np.asarray(sent * (scatter_s + gather_s) + 2 * latency_s + added_s)


def _gloo_tree(model: GlooRing, columns: Columns) -> _Parts:
    rounds = np.array([math.ceil(math.log2(n)) for n in columns.ranks], dtype=np.float64)
    wire_bytes = rounds * columns.size_bytes * model.wire_bytes_per_byte.value
    shaped = np.maximum(0.0, wire_bytes - model.burst_bytes.value) / np.maximum(wire_bytes, 1.0)
    transfer_s = rounds * columns.size_bytes * _wire_s_per_byte(model, columns) * shaped
    return _Parts(model.queue_s.value + rounds * model.segment_s.value, transfer_s)


def _wire_s_per_byte(model: GlooRing, columns: Columns) -> Floats:
    """Seconds that a byte of payload takes on the link of a node."""
    stated = columns.line_rate
    line_rate = np.where(np.isnan(stated), model.line_rate_bytes_per_s, stated)
    return np.asarray(model.wire_bytes_per_byte.value / line_rate)


_PARTS: dict[Operation, Callable[[AllReduceModel, Columns], _Parts]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
}
