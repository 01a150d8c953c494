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
    """By size, from the first byte beyond the `largest` message that was measured.

    A rate that was fitted is as sure as a log beyond its sizes. Where no rate showed, the law takes
    one that no host exceeds. A larger message takes that long at least, and at most as long a byte
    as the largest that was measured.
    """
    if cost.line_rate or not law.takes_no_limit:
        sigma = hypot(usual.sigma, EXTRAPOLATED_LOG.sigma)
        return ((largest + 1, Uncertainty(sigma, "assumed: a profile of smaller messages")),)
    said = "assumed: a rate between that of the largest message measured and no limit"
    sizes = [largest << doublings for doublings in range(_BANDS + 1)]
    known_s = [duration_ns(cost.transfer("all_reduce", size)) / size for size in sizes]
    found = []
    for size, s_per_byte in zip(sizes, known_s[1:], strict=False):
        sigma = max(0.0, log(known_s[0] / s_per_byte)) / Z_80
        found.append((size + 1, Uncertainty(hypot(usual.sigma, sigma), said)))
    return tuple(found)
