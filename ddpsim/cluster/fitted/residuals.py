"""What a fitted law misses on ranks that were measured, and how that goes on between.

A law (`ddpsim.cluster.fitted.laws`) carries measurements to other layouts, sizes and rates. Where
its own layout was measured, the ratio of measured to fitted time is kept and interpolated: over
sizes and over line rates linearly in logarithms; beyond the first and last of each it stays.
What a ratio says of a message's bytes on the link, as two in flight share it, and what of its
latency, the larger messages tell: their bytes take the same link.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import median

from ddpsim.cluster.fitted.gloo_shards import UnmeasuredShards
from ddpsim.cluster.fitted.laws import AllReduceModel, FittedCost, Point, collective_times_s
from ddpsim.cluster.transfers import REPLICATED, SHARDED, Operation, WholeTransfer, duration_ns
from ddpsim.importers.profiles.cluster import GlooRing, MeasuredTime
from ddpsim.importers.profiles.part import interpolated
from ddpsim.units import to_ns

_Curve = tuple[tuple[float, ...], tuple[float, ...]]  # logarithms: sizes, ascending, and ratios


@dataclass(frozen=True)
class Correction:
    """Logarithms of measured over fitted time: for each line rate a curve over sizes."""

    rates: tuple[float, ...] = ()  # logarithms, ascending
    curves: tuple[_Curve, ...] = ()

    @classmethod
    def of(
        cls,
        model: AllReduceModel,
        measured: Sequence[MeasuredTime],
        nodes: int,
        gpus_per_node: int,
        operation: Operation = "all_reduce",
    ) -> Correction:
        """From what was measured on this layout; nothing measured corrects nothing."""
        here = [m for m in measured if (m.nodes, m.gpus_per_node) == (nodes, gpus_per_node)]
        points = [Point(m.size_bytes, nodes, gpus_per_node, m.line_rate_bytes_per_s) for m in here]
        curves: dict[float, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for m, law_s in zip(here, collective_times_s(operation, model, points), strict=True):
            curve = curves[_log_rate(model, m.line_rate_bytes_per_s)]
            curve[math.log(m.size_bytes)].append(math.log(m.time_s) - math.log(law_s))
        rates = sorted(curves)
        return cls(tuple(rates), tuple(_medians(curves[rate]) for rate in rates))

    def factor(self, model: AllReduceModel, size_bytes: float, line_rate: float | None) -> float:
        """How many times as long as fitted a collective takes."""
        return self._between(self.curves, model, size_bytes, line_rate)

    def link_factor(
        self, model: AllReduceModel, size_bytes: float, line_rate: float | None
    ) -> float:
        """How many times as long its bytes are on the link: the least `factor` from its size up.

        A larger message leaves the link idle no longer for each of its bytes, so its whole time
        bounds what they take there.
        """
        return self._between(self._least_beyond, model, size_bytes, line_rate)

    def _between(
        self,
        curves: Sequence[_Curve],
        model: AllReduceModel,
        size_bytes: float,
        line_rate: float | None,
    ) -> float:
        if not curves:
            return 1.0
        size = math.log(max(1.0, size_bytes))
        at_size = [interpolated(size, *curve) for curve in curves]
        return math.exp(interpolated(_log_rate(model, line_rate), self.rates, at_size))

    @cached_property
    def _least_beyond(self) -> tuple[_Curve, ...]:
        return tuple(_least_from_here_on(curve) for curve in self.curves)


@dataclass(frozen=True)
class CorrectedCost:
    """A law, with its times corrected, bytes on the link and latency; a CollectiveCost.

    `others`: of broadcasts, reduce-scatters and all-gathers that were measured. The latter two are
    corrected as all-reduces of their size where they were not (assumed). `unmeasured`: what gloo's
    take more then.
    """

    operations = REPLICATED | SHARDED
    law: FittedCost
    all_reduces: Correction
    others: tuple[tuple[Operation, Correction], ...] = ()
    unmeasured: UnmeasuredShards | None = None

    def transfer(self, operation: Operation, size_bytes: int) -> WholeTransfer:
        """See CollectiveCost; raises InputError where the law has no figures."""
        law = self.law.transfer(operation, size_bytes)
        is_gloo = isinstance(self.law.model, GlooRing)
        correction = self._correction(
            "broadcast" if operation == "reduce" and not is_gloo else operation
        )
        message = self.law.model, size_bytes, self.law.line_rate
        whole_ns = round(correction.factor(*message) * duration_ns(law))
        whole_ns += self._more_ns(operation, size_bytes)
        transfer_ns = min(whole_ns, round(correction.link_factor(*message) * law.transfer_ns))
        return replace(law, latency_ns=whole_ns - transfer_ns, transfer_ns=transfer_ns)

    def _more_ns(self, operation: Operation, size_bytes: int) -> int:
        """What gloo's copies add to a reduce-scatter or an all-gather that was not measured."""
        law, unmeasured = self.law, self.unmeasured
        if unmeasured is None or operation not in SHARDED or operation in dict(self.others):
            return 0
        if not isinstance(law.model, GlooRing):
            return 0
        more_s = unmeasured.more_s(operation, law.model, size_bytes, law.line_rate)
        return to_ns(law.time_factor * more_s)

    def _correction(self, operation: Operation) -> Correction:
        unmeasured = Correction() if operation == "broadcast" else self.all_reduces
        return dict(self.others).get(operation, unmeasured)

    def stretched(self, factor: float) -> CorrectedCost:
        """See CollectiveCost."""
        return replace(self, law=self.law.stretched(factor))


def _log_rate(model: AllReduceModel, line_rate: float | None) -> float:
    """The logarithm of the link's rate; a law that asks for no rate has one curve."""
    if not isinstance(model, GlooRing):
        return 0.0
    return math.log(line_rate or model.line_rate_bytes_per_s)


def _least_from_here_on(curve: _Curve) -> _Curve:
    sizes, ratios = curve
    return sizes, tuple(accumulate(reversed(ratios), min))[::-1]


def _medians(curve: dict[float, list[float]]) -> _Curve:
    """Its points by size; of what was measured again the median: one slow hour in three is none."""
    sizes = sorted(curve)
    return tuple(sizes), tuple(median(curve[size]) for size in sizes)
