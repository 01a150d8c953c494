"""What an iteration takes, without what others on the machine did to it meanwhile.

A shared machine is slower for tenths of a second now and then. The forward is the same work in
every variant of DDP of as many micro-batches, and over before anything is sent: it tells how fast
the machine was in this very iteration. What goes with it is taken off, which halves the noise: a
control variate. (Of two micro-batches each forward took 0.6 and 5 % less than one alone, in the
median of the sweeps on two machines: the slower rank changes, and perhaps caches are warm.)
"""

from __future__ import annotations

import numpy as np

from calibrate.ddp_rounds import Rounds, Samples, VariantSamples, slowest
from calibrate.fit.estimates import Floats, median_time
from ddpsim.importers.cluster_profile import Fitted

__all__ = ["steady_time"]

_LEAST_ROUNDS = 10  # fewer tell no slope


def steady_time(rounds: Rounds, alike: tuple[VariantSamples, ...]) -> Fitted:
    """Seconds of an iteration, the slower rank's: the median over the rounds of these variants.

    Each as it would have been had its forward taken what those of all variants with as many
    micro-batches usually take: in logarithms the iteration is a line in its forward, by least
    squares over these rounds.
    """
    whole = np.log(_slower([variant.whole_s for variant in alike]))
    if len(whole) < _LEAST_ROUNDS:
        return median_time(np.exp(whole).tolist())
    forwards = np.concatenate([_forward(variant) for variant in alike])
    off = forwards - _usual_forward(rounds, alike[0].variant.accumulation_steps)
    spread = off - off.mean()
    power = float(spread @ spread)
    slope = float(spread @ whole) / power if power > 0 else 0.0
    return median_time(np.exp(whole - slope * off).tolist())


def _usual_forward(rounds: Rounds, micro_batches: int) -> float:
    like = [v for v in rounds.variants if v.variant.accumulation_steps == micro_batches]
    return float(np.median(np.concatenate([_forward(variant) for variant in like])))


def _forward(variant: VariantSamples) -> Floats:
    """Logarithms of the slower rank's forward, by round."""
    return np.asarray(np.log(_slower([variant.forward_s])))


def _slower(samples: list[Samples]) -> Floats:
    return np.array([seconds for one in samples for seconds in slowest(one)])
