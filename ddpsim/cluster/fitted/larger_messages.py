"""How wrong gloo's law may be about messages larger than any that was measured."""

from __future__ import annotations

from math import hypot, log

from ddpsim.cluster.fitted.laws import FittedCost
from ddpsim.cluster.logs import EXTRAPOLATED_LOG
from ddpsim.cluster.transfers import duration_ns
from ddpsim.importers.profiles.cluster import GlooRing
from ddpsim.provenance import Z_80, Uncertainty

_BANDS = 10  # each up to twice the size of the one before


def of_larger(
    usual: Uncertainty, law: GlooRing, cost: FittedCost, largest: int
) -> tuple[tuple[int, Uncertainty], ...]:
    """Uncertainties by the size from which they hold, for messages beyond the `largest` measured.

    A fitted rate is as uncertain as a log beyond its sizes. Where none could be fitted, the law has
    one that no host exceeds: a larger message takes at least as long as the law says, and at most
    as long a byte as the largest measured.
    """
    if cost.line_rate or not law.takes_no_limit:
        sigma = hypot(usual.sigma, EXTRAPOLATED_LOG.sigma)
        return ((largest + 1, Uncertainty(sigma, "assumed: a profile of smaller messages")),)
    basis = "assumed: a rate between that of the largest message measured and no limit"
    sizes = [largest << doublings for doublings in range(_BANDS + 1)]
    ns_per_byte = [duration_ns(cost.transfer("all_reduce", size)) / size for size in sizes]
    bands = []
    for size, each_ns_per_byte in zip(sizes, ns_per_byte[1:], strict=False):
        sigma = max(0.0, log(ns_per_byte[0] / each_ns_per_byte)) / Z_80
        bands.append((size + 1, Uncertainty(hypot(usual.sigma, sigma), basis)))
    return tuple(bands)
