"""Collectives priced by a cluster profile: what calibration fitted, evaluated.

gloo's formulas are in `ddpsim.cluster.fitted.gloo`; NCCL's model is an ensemble
(`ddpsim.cluster.fitted.ensemble`). The fit (`calibrate.fit`) and the simulation call both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpsim.cluster.cost import StretchedCost
from ddpsim.cluster.fitted.ensemble import curve_of
from ddpsim.cluster.transfers import REPLICATED, SHARDED, Operation, WholeTransfer
from ddpsim.importers.profiles.cluster import GlooRing
from ddpsim.importers.profiles.nccl import NcclModel

AllReduceModel = NcclModel | GlooRing


class Point(NamedTuple):
    """One collective: a message of `size_bytes` on `nodes` x `gpus_per_node` ranks.

    `line_rate` is the rate of a node's network link in bytes per second; None: the one that the
    profile was measured on. Only gloo's model asks for it.
    """

    size_bytes: float
    nodes: int
    gpus_per_node: int
    line_rate: float | None = None


@dataclass(frozen=True)
class FittedCost(StretchedCost):
    """A profile's times for one layout; a CollectiveCost.

    NCCL's collectives are those of the model's ensemble. gloo's others follow from its all-reduce:
    it sends a broadcast whole down a binomial tree (gloo/broadcast.cc), ceil(log2 n) times,
    all-reduces the whole input of a reduce-scatter (torch 2.13), and gathers shards in halves
    (gloo/allgather.cc). What was measured of a collective, `ddpsim.cluster.fitted.residuals` brings
    in. With gloo the time of the bytes on the wire is what two collectives in flight share; with
    NCCL, one at a time, the split does not matter.
    """

    operations = REPLICATED | SHARDED
    model: AllReduceModel
    nodes: int
    gpus_per_node: int
    line_rate: float | None = None

    def transfer(self, operation: Operation, size_bytes: int) -> WholeTransfer:
        """See CollectiveCost."""
        point = Point(size_bytes, self.nodes, self.gpus_per_node, self.line_rate)
        if isinstance(self.model, NcclModel):
            return WholeTransfer(0, self._ns(_by_ensemble_s(operation, self.model, point)))
        from ddpsim.cluster.fitted.gloo import Columns, gloo_parts  # noqa: PLC0415 -- it needs numpy

        latency_s, transfer_s = gloo_parts(operation, self.model, Columns.of([point]))
        burst_ns = self._ns(_burst_s(self.model, self.line_rate))
        return WholeTransfer(self._ns(latency_s[0]), self._ns(transfer_s[0]), burst_ns=burst_ns)


def collective_times_s(
    operation: Operation, model: AllReduceModel, points: Sequence[Point]
) -> list[float]:
    """Seconds of each of these collectives, alone."""
    if isinstance(model, NcclModel):
        return [_by_ensemble_s(operation, model, point) for point in points]
    from ddpsim.cluster.fitted.gloo import Columns, gloo_parts  # noqa: PLC0415 -- it needs numpy

    times_s: list[float] = gloo_parts(operation, model, Columns.of(points)).whole_s.tolist()
    return times_s


def _by_ensemble_s(operation: Operation, model: NcclModel, point: Point) -> float:
    return curve_of(model, operation, point.nodes, point.gpus_per_node).seconds(point.size_bytes)


def _burst_s(model: GlooRing, line_rate: float | None) -> float:
    """What a rested link saves, in seconds: nothing where getting going takes longer."""
    at_once_s = model.rested_burst_bytes.value / (line_rate or model.line_rate_bytes_per_s)
    return max(0.0, at_once_s - model.rested_delay_s.value)
