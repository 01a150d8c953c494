"""All-reduce algorithms: message by message, as a recurrence, as a closed form, and in theory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor, inf, log2

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simpy import Environment

from ddpsim.cluster.algorithms.dispatch import ALGORITHMS, duration_ns, schedule
from ddpsim.cluster.algorithms.max_plus import ring_ends_ns
from ddpsim.cluster.algorithms.rings import ring_hops_ns
from ddpsim.cluster.cost import CollectiveCost, LinkCost, ScheduledCost
from ddpsim.cluster.network import Traffic
from ddpsim.cluster.topology.paths import Link, Paths
from ddpsim.cluster.transfers import RingTransfer, ScheduledTransfer, Transfer
from ddpsim.cluster.transfers import duration_ns as transfer_ns
from ddpsim.engine.fast.collectives import collective_ends_ns
from ddpsim.engine.reference.network import Network
from ddpsim.engine.sharing import fair_share

MICROSECONDS = st.integers(0, 50).map(lambda us: us * 1e-6)
LINKS = st.builds(
    Link,
    MICROSECONDS,
    st.integers(1, 4000).map(lambda r: r * 1e8),
    st.just(0.0) | MICROSECONDS,
    st.just(1.0),
)
SIZES = st.integers(1, 2**28)
NAMES = sorted(ALGORITHMS)
OF_UNEQUAL_NODES = ("ring", "tree", "gloo_ring", "gloo_all_gather")


def layout_of(name: str, layout: Paths) -> Paths:
    """A layout that the algorithm is for: gather knows one node, with all its GPUs."""
    if name not in OF_UNEQUAL_NODES:
        layout = replace(layout, smaller=())
    if name != "gather":
        return replace(layout, switch=layout.switch if name == "nvls" else None)
    gpus, unlike = max(2, layout.ranks), tuple(node for node in layout.unlike if node[0] == 0)
    return replace(layout, nodes=1, gpus_per_node=gpus, servers=1, switch=None, unlike=unlike)


@st.composite
def paths(draw: st.DrawFn, *, most_ranks: int = 24, weak: bool = False) -> Paths:
    """Up to `most_ranks` ranks, with links of any kind; the same inside and between, or not."""
    gpus = draw(st.integers(1, 8))
    nodes = draw(st.integers(1 if gpus > 1 else 2, max(2, most_ranks // gpus)))
    last = draw(st.integers(1, gpus)) if weak and nodes > 1 else gpus
    ranks = nodes * gpus - (gpus - last)
    parts = st.integers(1, 150).map(lambda percent: percent / 100)

    def left(count: int) -> st.SearchStrategy[list[tuple[int, float, float]]]:
        each = st.tuples(st.integers(0, count - 1), parts, parts)
        return st.lists(each, max_size=2, unique_by=lambda w: w[0])

    return Paths(
        nodes,
        gpus,
        draw(LINKS),
        draw(LINKS),
        draw(LINKS),
        servers=draw(st.integers(1, nodes if nodes > 1 else gpus)),
        chunk_bytes=draw(st.sampled_from([None, 2**23, 30_000_001])),
        weak=tuple(sorted(draw(left(ranks)))) if weak else (),
        unlike=tuple(sorted(draw(left(nodes)))) if weak else (),
        smaller=((nodes - 1, last),) if last < gpus else (),
        most=draw(st.sampled_from([inf, 1e9, 2e10])),
    )


def ends_ns(cost: CollectiveCost, size: int, arrivals: Sequence[int]) -> set[int]:
    """When ranks leave an all-reduce that they join at these times, message by message."""
    env = Environment()
    network = Network(env, cost, len(arrivals))
    ended: list[int] = []

    def rank(i: int, arrival: int):  # type: ignore[no-untyped-def]
        yield env.timeout(arrival)
        yield network.join("one", "all_reduce", size, i).ends[i]
        ended.append(int(env.now))

    for i, arrival in enumerate(arrivals):
        env.process(rank(i, arrival))
    env.run()
    assert len(ended) == len(arrivals)
    return set(ended)


@pytest.mark.parametrize("name", NAMES)
@given(layout=paths(), size=SIZES)
@settings(max_examples=25)
def test_the_messages_take_what_the_closed_form_says(name: str, layout: Paths, size: int) -> None:
    """To the nanosecond; links inside nodes and between them may differ."""
    layout = layout_of(name, layout)
    messages = schedule(name, layout, size)
    assert messages.end_ns([0] * layout.ranks) == duration_ns(name, layout, size)


@pytest.mark.parametrize("name", NAMES)
@given(layout=paths(), size=SIZES)
@settings(max_examples=15)
def test_ranks_send_what_theory_says(name: str, layout: Paths, size: int) -> None:
    """The mean over ranks; chunks of whole bytes may make each message a byte longer."""
    layout = layout_of(name, layout)
    messages = schedule(name, layout, size)
    sent = sum(bytes_ for rank, bytes_ in messages.sent_bytes().items() if rank < layout.ranks)
    wanted = ALGORITHMS[name].sent_bytes(layout, size) * layout.ranks
    assert 0 <= sent - wanted + 1e-6 <= len(messages.messages)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ring"])
@given(data=st.data(), layout=paths(most_ranks=12, weak=True), size=SIZES)
@settings(max_examples=20)
def test_the_shortcut_equals_the_plain_model(
    name: str, data: st.DataObject, layout: Paths, size: int
) -> None:
    """A process for each message against the recurrence, for any arrivals and weak links."""
    layout, times = layout_of(name, layout), st.integers(0, 3_000_000)
    arrivals = data.draw(st.lists(times, min_size=layout.ranks, max_size=layout.ranks))
    cost = ScheduledCost(name, layout)
    transfer = cost.transfer("all_reduce", size)
    found, _ = collective_ends_ns(transfer, np.array([arrivals, arrivals[::-1]], dtype=float))
    for ends, joined in zip(found.tolist(), (arrivals, arrivals[::-1]), strict=True):
        assert set(ends) == ends_ns(cost, size, joined)


@given(layout=paths(most_ranks=12, weak=True), size=SIZES)
@settings(max_examples=40)
def test_a_ring_of_messages_is_the_ring_of_steps(layout: Paths, size: int) -> None:
    ring = RingTransfer(2 * (layout.ranks - 1), *ring_hops_ns(layout, size))
    ends, _ = ring_ends_ns(ring.busy_ns, ring.latency_ns, ring.steps, np.zeros(layout.ranks))
    assert schedule("ring", layout, size).end_ns([0] * layout.ranks) == ends.max()


def test_a_later_start_moves_the_end_by_as_much() -> None:
    layout = Paths(4, 1, None, Link(1e-6, 1e9))
    early = ScheduledTransfer("tree", layout, 10**6)
    late = ScheduledTransfer("tree", layout, 10**6, start_ns=500)
    for arrivals in ([0, 0, 0, 0], [0, 7, 900, 3]):
        found = (transfer.ends_ns(np.array(arrivals, dtype=float)) for transfer in (late, early))
        assert next(found) == next(found) + 500


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8, 16])
def test_every_node_is_a_leaf_of_one_of_the_trees(nodes: int) -> None:
    """So that no link carries more than 2 M each way (Sanders, Speck, Traff 2009)."""
    layout = Paths(nodes, 1, None, Link(0.0, 1e9))
    sent = schedule("tree", layout, 2**20).sent_bytes()
    assert max(sent.values()) <= 2 * 2**20
    assert min(sent.values()) >= 2**19


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_latencies_grow_as_theory_says(ranks: int) -> None:
    """One byte over links of 1 us: rings by 2(n-1), trees and halving by the logarithm."""
    layout = Paths(ranks, 1, None, Link(1e-6, 1e15))
    others = [name for name in NAMES if name not in ("nvls", "gather")]
    hops = {name: round(duration_ns(name, layout, 1) / 1000) for name in others}
    assert hops["gloo_all_gather"] == ranks - 1
    assert hops["ring"] == hops["hierarchical"] == 2 * (ranks - 1)
    assert hops["halving_doubling"] == 2 * floor(log2(ranks))
    assert hops["direct"] == hops["parameter_server"] == 2
    assert 2 * floor(log2(ranks)) <= hops["tree"] <= 2 * ceil(log2(ranks)) + 2


def test_a_weak_link_holds_up_the_algorithms_that_use_it() -> None:
    layout = Paths(8, 1, None, Link(1e-6, 1e10), Link(1e-6, 1e10))
    weak = Paths(8, 1, None, Link(1e-6, 1e10), Link(1e-6, 1e10), weak=((3, 0.1, 0.1),))
    for name in (name for name in NAMES if name != "gather"):
        assert duration_ns(name, weak, 2**24) > 1.5 * duration_ns(name, layout, 2**24), name


# --- what no link exceeds ------------------------------------------------------------------------

OVER_NODES = [name for name in NAMES if name != "gather"]
# hops between nodes have the least bandwidth, those inside the longest latency
SHORT_AND_NARROW = Paths(
    4, 3, Link(30e-6, 3.7e9), Link(0.0, 1.4e9), Link(0.0, 1e8), unlike=((0, 0.04, 0.1),)
)


def least_bytes(name: str, layout: Paths, size: int) -> float:
    """What must enter every node at least: S, or as much as the algorithm sends it."""
    n, m, g = layout.ranks, layout.nodes, layout.gpus_per_node
    shares = {
        "ring": 2 * (n - 1) / n,
        "gloo_ring": 2 * (n - 1) / n,
        "gloo_all_gather": (n - 1) / n,
        "hierarchical": 2 * (m - 1) / m,
        "hierarchical_scatter": (m - 1) / m,
        "hierarchical_gather": (m - 1) / m,
        "direct": 2 * g * (n - g) / n,
        "parameter_server": g,
    }
    return shares.get(name, 1.0) * size


@st.composite
def with_one_node_unlike(draw: st.DrawFn) -> Paths:
    """Several nodes, of which one has less of the bandwidths."""
    layout = draw(paths(most_ranks=16).filter(lambda layout: layout.nodes > 1))
    parts = st.integers(1, 100).map(lambda percent: percent / 100)
    unlike = (draw(st.integers(0, layout.nodes - 1)), draw(parts), draw(parts))
    return replace(layout, unlike=(unlike,))


@pytest.mark.parametrize("name", OVER_NODES)
@given(layout=with_one_node_unlike(), size=SIZES)
@example(layout=SHORT_AND_NARROW, size=104_209)
@settings(max_examples=40)
def test_no_network_carries_more_than_its_rate(name: str, layout: Paths, size: int) -> None:
    """What messages bring into a node and out of it takes its network, and at least its share."""
    layout = layout_of(name, layout)
    messages = schedule(name, layout, size)
    ((unlike, _, part),) = layout.unlike
    assert layout.inter is not None
    for node in range(layout.nodes):
        rate = layout.inter.bandwidth_bytes_per_s * (part if node == unlike else 1.0)
        into, out = crossing(name, layout, node, size)
        assert min(into, out) >= least_bytes(name, layout, size) * (1 - 1e-9)
        rounding_ns = 1 + len(messages.messages)
        assert duration_ns(name, layout, size) + rounding_ns >= max(into, out) / rate * 1e9


def crossing(name: str, layout: Paths, node: int, size: int) -> tuple[int, int]:
    """Bytes that enter a node and leave it; a switch is in its node, a server in none."""

    def is_inside(end: int) -> bool:
        switch = name == "nvls" and end - layout.ranks == node
        return switch or (end < layout.ranks and end // layout.gpus_per_node == node)

    into = out = 0
    for message in schedule(name, layout, size).messages:
        ends = is_inside(message.source), is_inside(message.target)
        into += message.size_bytes * (ends == (False, True))
        out += message.size_bytes * (ends == (True, False))
    return into, out


@pytest.mark.parametrize("name", OVER_NODES)
@given(layout=with_one_node_unlike(), size=SIZES)
@settings(max_examples=40)
def test_one_slow_node_costs_no_more_than_all_slow(name: str, layout: Paths, size: int) -> None:
    """And no less than none; nor do faster links of all others lengthen anything."""
    layout = layout_of(name, layout)
    ((unlike, inside, outside),) = layout.unlike
    alike = replace(layout, unlike=())
    slow = with_links(alike, inside, outside)
    none, one, all_ = (duration_ns(name, each, size) for each in (alike, layout, slow))
    assert none <= one <= all_
    faster = replace(with_links(alike, 2, 2), unlike=((unlike, inside / 2, outside / 2),))
    assert duration_ns(name, faster, size) <= one


def with_links(layout: Paths, inside: float, outside: float) -> Paths:
    links = zip((layout.intra, layout.inter, layout.switch), (inside, outside, inside), strict=True)
    intra, inter, switch = (link and link.widened(part) for link, part in links)
    return replace(layout, intra=intra, inter=inter, switch=switch)


# --- a shared link ------------------------------------------------------------------------------

DEMANDS = st.lists(
    st.tuples(
        st.integers(0, 1000).map(lambda p: Fraction(p, 1000)), st.integers(1, 9).map(Fraction)
    ),
    min_size=1,
    max_size=6,
)


@given(demands=DEMANDS)
@example(demands=[(Fraction(1), Fraction(1)), (Fraction(1, 4), Fraction(1))])
def test_shares_are_max_min_fair(demands: list[tuple[Fraction, Fraction]]) -> None:
    """The link is full, or all have what they want; who wants more has no less than any other."""
    fair = fair_share(demands)
    got = [min(demand, fair) for demand, _ in demands]
    used = sum(part * count for part, (_, count) in zip(got, demands, strict=True))
    wanted = sum(demand * count for demand, count in demands)
    assert used == min(1, wanted)
    for part, (demand, _) in zip(got, demands, strict=True):
        assert part == demand or part == max(got)


def test_another_job_halves_a_link_that_both_want() -> None:
    cost = LinkCost((Link(0.0, 1e9),) * 2)
    alone = _with_traffic(cost, Traffic())
    assert _with_traffic(cost, Traffic(other_share=Fraction(1))) == 2 * alone
    assert _with_traffic(cost, Traffic(other_share=Fraction(1, 4))) == ceil(alone * 4 / 3)


def test_a_burst_lengthens_by_what_it_takes() -> None:
    """1 ms of transfer; another job wants all for 400 us of every 2 ms: half of 400 us is lost."""
    cost = LinkCost((Link(0.0, 1e9),) * 2)
    traffic = Traffic(other_share=Fraction(1), busy_ns=400_000, every_ns=2_000_000)
    assert _with_traffic(cost, traffic) == 1_000_000 + 200_000


def _with_traffic(cost: LinkCost, traffic: Traffic) -> int:
    env = Environment()
    network = Network(env, cost, 2, traffic=traffic)
    meetings = [network.join("one", "all_reduce", 1_000_000, rank) for rank in (0, 1)]
    env.run(until=meetings[0].ends[0])
    return int(env.now)


def test_transfers_know_their_length() -> None:
    transfer: Transfer = ScheduledTransfer("direct", Paths(4, 1, None, Link(1e-6, 1e9)), 4000)
    assert isinstance(transfer, ScheduledTransfer)
    assert (
        collective_ends_ns(transfer, np.full(4, 5.0))[0].tolist() == [5 + 2 * (2 * 1000 + 2000)] * 4
    )


# --- beside a peer ------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "ns"), [(8, 861_490), (1024, 1_998_942)])
def test_a_ring_of_the_fastest_peer(ranks: int, ns: int) -> None:
    """ASTRA-sim's ring: 25 MiB, 500 ns and 50 x 2^30 bytes/s a link, each step rounded once.

    Without rounding 861,492 and 1,998,609 ns; ASTRA-sim itself, whose endpoints add 10 ns a
    message: 861,640 and 2,017,366.
    """
    cost = LinkCost((Link(500e-9, 50 * 2**30),), ranks)
    transfer = cost.transfer("all_reduce", 25 * 2**20)
    assert transfer_ns(transfer) == ns
    ends, way = collective_ends_ns(transfer, np.zeros(ranks))
    assert (set(ends.tolist()), way) == ({float(ns)}, "ring:closed-form")
    if ranks == 8:
        assert ends_ns(cost, 25 * 2**20, [0] * ranks) == {ns}
