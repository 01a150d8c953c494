"""Reduce-scatters and all-gathers that nobody measured: how far from what all-reduces tell of them.

Sigmas are root mean squares over machines of each one's root mean square, of recorded and published
times of both (tests/validation/test_derived_collectives.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from ddpsim.cluster.network import Derived, Network
from ddpsim.cluster.transfers import SHARDED, Operation, duration_ns
from ddpsim.provenance import Provenance, Uncertainty

_GLOO = "derived from all-reduces: {} of 2 testbeds"
_NCCL = "derived from all-reduces: reduce-scatters and all-gathers of 4 published clusters"
_SMALL_BYTES = 2**18  # less is latency, of which all-reduces tell little
_WORDS: dict[Operation, str] = {"reduce_scatter": "reduce-scatters", "all_gather": "all-gathers"}


def _of_gloo(operation: Operation, small: float, large: float) -> Derived:
    said = _GLOO.format(_WORDS[operation])
    known = (0, Uncertainty(small, said)), (_SMALL_BYTES, Uncertainty(large, said))
    return ((operation, known),)


OF_GLOO = (*_of_gloo("reduce_scatter", 0.11, 0.04), *_of_gloo("all_gather", 0.27, 0.16))


def of_nccl(sigma: float) -> Derived:
    """One sigma for reduce-scatters and all-gathers of all sizes."""
    known = ((0, Uncertainty(sigma, _NCCL)),)
    return tuple((operation, known) for operation in sorted(SHARDED))


OF_NCCL_LOG, OF_NCCL_PROFILE = of_nccl(0.23), of_nccl(0.27)


def with_derived(network: Network, derived: Derived) -> Network:
    """A network that says how wrong collectives may be that its log or profile does not tell of."""
    found = tuple(each for each in derived if each[0] not in network.measured)
    return replace(network, derived=found)


def of_sent(network: Network, sent: Collection[tuple[Operation, int]], remedy: str) -> Network:
    """The network of a step, with a word of what is sent and was not measured.

    Uncertainties of collectives count by the time that they take, each size once.
    """
    missing = [each for each, _ in network.derived if any(each == of for of, _ in sent)]
    if not missing:
        return network
    spent_ns = 0
    widest: dict[Uncertainty, float] = defaultdict(float)
    for operation, size in sent:
        taken_ns = duration_ns(network.cost.transfer(operation, size))
        spent_ns += taken_ns
        if known := network.uncertainty_of(size, operation):
            widest[known] += known.sigma * taken_ns
    usual = network.uncertainty
    sigma = sum(widest.values()) / max(1, spent_ns)
    if usual is None or sigma > usual.sigma:
        basis = max(widest, key=lambda each: widest[each]).basis
        usual = Uncertainty(sigma, basis)
    what = " and ".join(_WORDS[operation] for operation in missing)
    said = f"times of {what} are derived from those of all-reduces"
    return replace(
        network,
        uncertainty=usual,
        provenance=(*network.provenance, Provenance("sharded collectives", said, "assumed")),
        warnings=(*network.warnings, f"{what} were not measured: {said}; {remedy}"),
    )
