"""gloo's collectives by the fitted figures of its segmented ring, many at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddpsim.cluster.fitted.laws import Point
from ddpsim.cluster.transfers import Operation
from ddpsim.importers.profiles.cluster import GlooRing

Floats = npt.NDArray[np.float64]

_SEGMENT_BYTES = 1_048_576  # gloo/allreduce.h: the longest segment
_ELEMENT_BYTES = 4  # DDP reduces float32; gloo cuts segments at whole elements


class Parts(NamedTuple):
    """Seconds that no other transfer shares, and seconds on the wire; one of each a point."""

    latency_s: Floats
    transfer_s: Floats

    @property
    def whole_s(self) -> Floats:
        """Seconds in all."""
        return np.asarray(self.latency_s + self.transfer_s)


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


def gloo_parts(operation: Operation, model: GlooRing, columns: Columns) -> Parts:
    """What each of these collectives takes."""
    return _OF_GLOO[operation](model, columns)


def _gloo_ring(model: GlooRing, columns: Columns) -> Parts:
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


def _gloo_all_gather(model: GlooRing, columns: Columns) -> Parts:
    """The all-gather's phase alone, of which a segment is half a shard. Source: allgather.cc."""
    return _gloo_shaped(model, columns, 1, _halves_s)


def _gloo_shaped(
    model: GlooRing,
    columns: Columns,
    turns: int,
    alone_s: Callable[[GlooRing, Columns, Floats], Floats],
) -> Parts:
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
    return Parts(total_s - transfer_s, transfer_s)


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


def _gloo_tree(model: GlooRing, columns: Columns) -> Parts:
    rounds = np.array([math.ceil(math.log2(n)) for n in columns.ranks], dtype=np.float64)
    wire_bytes = rounds * columns.size_bytes * model.wire_bytes_per_byte.value
    shaped = np.maximum(0.0, wire_bytes - model.burst_bytes.value) / np.maximum(wire_bytes, 1.0)
    transfer_s = rounds * columns.size_bytes * _wire_s_per_byte(model, columns) * shaped
    return Parts(model.queue_s.value + rounds * model.segment_s.value, transfer_s)


def _wire_s_per_byte(model: GlooRing, columns: Columns) -> Floats:
    """Seconds that a byte of payload takes on the link of a node."""
    stated = columns.line_rate
    line_rate = np.where(np.isnan(stated), model.line_rate_bytes_per_s, stated)
    return np.asarray(model.wire_bytes_per_byte.value / line_rate)


_OF_GLOO: dict[Operation, Callable[[GlooRing, Columns], Parts]] = {
    "all_reduce": _gloo_ring,
    "broadcast": _gloo_tree,
    "reduce": _gloo_ring,  # scattered around the ring, and gathered (gloo/reduce.cc)
    "reduce_scatter": _gloo_ring,
    "all_gather": _gloo_all_gather,
}
