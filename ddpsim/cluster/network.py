"""A cluster's network: its cost model, how wrong that may be, and what else uses it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from ddpsim.cluster.cost import CollectiveCost
from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.transfers import SHARDED, Operation, ProcessGroup, duration_ns
from ddpsim.provenance import Provenance, Uncertainty

# how wrong collectives may be that all-reduces tell of, by their size: from so many bytes on
Derived = tuple[tuple[Operation, tuple[tuple[int, Uncertainty], ...]], ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What else a node's network carries, as parts of its rate, where least of that is left.

    A collective that is alone takes `needed_share`: less than all where the links inside nodes are
    slower. Another job wants `other_share` for `busy_ns` of every `every_ns` (None: always); the
    loaders of a node's ranks, `loaders` in number, together `loader_share` while they read.
    """

    needed_share: Fraction = Fraction(1)
    other_share: Fraction = Fraction(0)
    busy_ns: int = 0
    every_ns: int | None = None
    loader_share: Fraction = Fraction(0)
    loaders: int = 1

    @property
    def changes(self) -> bool:
        """Whether it takes more of the network at some times than at others."""
        return self.every_ns is not None or self.loader_share > 0

    def with_batches_in(self, batch_ns: int, usual_ns: int) -> Traffic:
        """Read the same samples by loaders that make a batch in another time."""
        return replace(self, loader_share=self.loader_share * Fraction(usual_ns, batch_ns))

    def on_wider_links(self, factor: float) -> Traffic:
        """Carry the same bytes of others over links of `factor` times the bandwidth."""
        wider = Fraction(str(factor))
        return replace(
            self,
            other_share=self.other_share / wider,
            loader_share=self.loader_share / wider,
        )


NO_TRAFFIC = Traffic()


@dataclass(frozen=True)
class Network:
    """The cost model of a cluster, how wrong it may be, and its sources.

    `limit`: what limits large messages, in words, or a function that says it.
    `interference`: how wrong its effect may be; None: it is not modelled. `beyond`: the network for
    sizes outside a log. `traffic`: what else goes over the nodes' network. `measured_bytes`: the
    least and the largest all-reduce that a profile was fitted to. `by_size`: the uncertainty of
    messages from so many bytes on, where it depends on them. `of_shards`: that of reduce-scatters
    and all-gathers, where it differs. `groups`: the networks of groups of the ranks, whose costs
    `cost` has. `measured`: the collectives that were measured themselves. `shard_logs`: the
    uncertainty of logs of reduce-scatters and all-gathers. `derived`: the uncertainty of
    collectives derived from all-reduces.
    """

    cost: CollectiveCost
    uncertainty: Uncertainty | None
    limit: str | Callable[[], str] = field(compare=False)
    provenance: tuple[Provenance, ...]
    warnings: tuple[str, ...] = ()
    interference: Uncertainty | None = None
    beyond: Network | None = None
    traffic: Traffic = NO_TRAFFIC
    measured_bytes: tuple[int, int] | None = None
    by_size: tuple[tuple[int, Uncertainty], ...] = ()
    of_shards: tuple[tuple[int, Uncertainty], ...] = ()
    groups: tuple[tuple[ProcessGroup, Network], ...] = ()
    measured: frozenset[Operation] = frozenset({"all_reduce"})
    shard_logs: Uncertainty | None = None
    derived: Derived = ()

    @cached_property
    def bottleneck(self) -> str:
        """What limits large messages, in words."""
        return self.limit if isinstance(self.limit, str) else self.limit()

    def of(self, group: str) -> Network:
        """The network of a group of ranks, or of all."""
        return dict[str, Network](self.groups).get(group, self)

    def uncertainty_of(
        self, size_bytes: int, operation: Operation = "all_reduce"
    ) -> Uncertainty | None:
        """How wrong the time of one message may be."""
        by_size = (self.of_shards if operation in SHARDED else ()) or self.by_size
        usual = _at(by_size, size_bytes) or self.uncertainty
        derived = _at(dict(self.derived).get(operation, ()), size_bytes)
        if usual is None or derived is None:
            return usual
        return max(usual, derived, key=lambda each: each.sigma)

    @property
    def plain_cost(self) -> CollectiveCost:
        """The cost model without interference."""
        return self.cost.cost if isinstance(self.cost, InterferingCost) else self.cost


def _at(by_size: Sequence[tuple[int, Uncertainty]], size_bytes: int) -> Uncertainty | None:
    reached = [uncertainty for least, uncertainty in by_size if size_bytes >= least]
    return reached[-1] if reached else None


# --- reduce-scatters and all-gathers that nobody measured: how far from what all-reduces tell -----

# Sigmas are root mean squares over machines of each one's root mean square, of recorded and
# published times of both (tests/validation/test_derived_collectives.py)
_GLOO = "derived from all-reduces: {} of 2 testbeds"
_NCCL = "derived from all-reduces: reduce-scatters and all-gathers of 4 published clusters"
_SMALL_BYTES = 2**18  # less is latency, of which all-reduces tell little
_WORDS: dict[Operation, str] = {"reduce_scatter": "reduce-scatters", "all_gather": "all-gathers"}


def _of_gloo(operation: Operation, small: float, large: float) -> Derived:
    basis = _GLOO.format(_WORDS[operation])
    sigmas = (0, Uncertainty(small, basis)), (_SMALL_BYTES, Uncertainty(large, basis))
    return ((operation, sigmas),)


OF_GLOO = (*_of_gloo("reduce_scatter", 0.11, 0.04), *_of_gloo("all_gather", 0.27, 0.16))


def of_nccl(sigma: float) -> Derived:
    """One sigma for reduce-scatters and all-gathers of all sizes."""
    sigmas = ((0, Uncertainty(sigma, _NCCL)),)
    return tuple((operation, sigmas) for operation in sorted(SHARDED))


OF_NCCL_LOG, OF_NCCL_PROFILE = of_nccl(0.23), of_nccl(0.27)


def with_derived(network: Network, derived: Derived) -> Network:
    """Add the uncertainty of collectives that the network's log or profile does not hold."""
    unmeasured = tuple(each for each in derived if each[0] not in network.measured)
    return replace(network, derived=unmeasured)


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
        if uncertainty := network.uncertainty_of(size, operation):
            widest[uncertainty] += uncertainty.sigma * taken_ns
    usual = network.uncertainty
    sigma = sum(widest.values()) / max(1, spent_ns)
    if usual is None or sigma > usual.sigma:
        basis = max(widest, key=lambda each: widest[each]).basis
        usual = Uncertainty(sigma, basis)
    what = " and ".join(_WORDS[operation] for operation in missing)
    words = f"times of {what} are derived from those of all-reduces"
    return replace(
        network,
        uncertainty=usual,
        provenance=(*network.provenance, Provenance("sharded collectives", words, "assumed")),
        warnings=(*network.warnings, f"{what} were not measured: {words}; {remedy}"),
    )
