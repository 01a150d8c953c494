"""A latency moves a time by what it physically can, and sizes are continuous."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpsim.cluster.from_links import network_from_links
from ddpsim.cluster.nccl.chunks import cut
from ddpsim.cluster.nccl.cost import _BANDS_BYTES, _OCTAVE, NcclCost
from ddpsim.cluster.transfers import Operation, duration_ns
from ddpsim.prediction.collective_times import collective_table, load_cluster

KIB, MIB = 2**10, 2**20
A100 = {"device": "a100-sxm-80gb", "gpus_per_node": 8}
V100 = {"device": "v100-sxm-16gb", "gpus_per_node": 8}
MACHINES = [A100, V100, {"device": "h100-sxm-80gb", "gpus_per_node": 8}]
MACHINES += [{"machine": name} for name in ("dgx-1-v100", "p4d.24xlarge", "dgx-h100", "dgx-b200")]


def times_us(sizes: list[int], **cluster: Any) -> list[float]:
    table = collective_table(load_cluster({"cluster": cluster}), "all_reduce", sizes)
    return [row.time_s * 1e6 for row in table.rows]


@pytest.mark.parametrize("latency", ["5 us", "20 us", "75 us"])
@pytest.mark.parametrize(("device", "nodes"), [(A100, 8), (V100, 2), (A100, 2), (V100, 16)])
def test_twice_the_bytes_take_no_less_and_not_much_more(
    device: dict[str, Any], nodes: int, latency: str
) -> None:
    """Where NCCL's choice changes it may err; no neighbour is three times the other."""
    network = {"bandwidth": "100 Gbit/s", "latency": latency}
    times = times_us([KIB << i for i in range(19)], **device, nodes=nodes, inter_node=network)
    for small, large in itertools.pairwise(times):
        assert small <= large <= 3 * small


@given(
    st.sampled_from(MACHINES),
    st.integers(2, 16),
    st.integers(20, 200),
    st.lists(st.integers(KIB, 64 * MIB), min_size=2, max_size=12),
)
@settings(max_examples=60)
@example(V100, 2, 75, [64 * KIB, 128 * KIB])
@example({"machine": "p4d.24xlarge"}, 4, 20, [1_482_910, 2_097_152])  # LL128's chunk grows
@example(A100, 8, 56, [KIB, 1_482_911])  # and that of a way which is not the tuner's
def test_a_larger_message_takes_no_less(
    machine: dict[str, Any], nodes: int, latency_us: int, sizes: list[int]
) -> None:
    """NCCL's tuner does not know the latency, and may keep too long to a ring."""
    sizes = sorted({*sizes, *(size + 1 for size in sizes)})
    network = {"bandwidth": "100 Gbit/s", "latency": f"{latency_us} us"}
    times = times_us(sizes, **machine, nodes=nodes, inter_node=network)
    assert times == sorted(times)


def test_a_stated_latency_counts_where_messages_wait_for_it() -> None:
    """8 x 8 A100 at 100 Gbit/s: a tree has six network hops, of 1.85 ring steps each."""
    network = {"bandwidth": "100 Gbit/s"}
    sizes = [64 * KIB, MIB, 2 * MIB, 25 * MIB]
    usual = times_us(sizes, **A100, nodes=8, inter_node=network)
    stated = times_us(sizes, **A100, nodes=8, inter_node=network | {"latency": "20 us"})
    for before, after in zip(usual, stated, strict=True):
        assert 0 <= after - before <= 6 * 20 * 1.86


@given(
    st.sampled_from(["ring", "tree"]),
    st.sampled_from(["LL", "LL128", "Simple"]),
    st.integers(2, 32),
    st.integers(1, 8),
    st.integers(1, 2**26),
    st.integers(0, 100),
)
@settings(max_examples=100)
def test_more_latency_takes_no_less(
    algorithm: str, protocol: str, nodes: int, gpus: int, size: int, latency_us: int
) -> None:
    """And no more than that on every step of a ring; 1.85 times that on each hop of a tree."""
    chosen = {"algorithm": algorithm, "protocol": protocol}
    asked = {**A100, "gpus_per_node": gpus, "nodes": nodes, **chosen}

    def with_latency(us: int) -> float:
        network = {"bandwidth": "200 Gbit/s", "latency": f"{us} us"}
        return times_us([size], **asked, inter_node=network)[0]

    steps = 2 * (nodes * gpus - 1) if algorithm == "ring" else 1.86 * 2 * nodes.bit_length()
    assert -0.01 <= with_latency(latency_us + 10) - with_latency(latency_us) <= 10 * steps + 0.01


@given(
    st.sampled_from(MACHINES),
    st.sampled_from([{}, {}, {"algorithm": "ring"}, {"algorithm": "tree"}]),
    st.sampled_from([{}, {"weak_links": {3: 0.5}}]),
    st.sampled_from(["all_reduce", "all_gather"]),
    st.integers(2, 12),
    st.integers(1, 200),
    st.sampled_from(["1 Gbit/s", "100 Gbit/s", "3200 Gbit/s"]),
    st.integers(1, 2**28),
)
@settings(max_examples=12)
@example(A100, {}, {}, "all_reduce", 2, 1, "1 Gbit/s", 120_195)
def test_messages_that_cannot_be_faster_are_not_priced(
    machine: dict[str, Any],
    chosen: dict[str, Any],
    weak: dict[str, Any],
    operation: Operation,
    nodes: int,
    latency_us: int,
    bandwidth: str,
    size: int,
) -> None:
    """The fastest of a message's own band and of all larger ones, each priced in all its ways."""
    inter = {"bandwidth": bandwidth, "latency": f"{latency_us} us"}
    asked = {**machine, **chosen, **weak, "nodes": nodes, "inter_node": inter}
    cost = network_from_links(load_cluster({"cluster": asked})).cost
    assert isinstance(cost, NcclCost)
    band = bisect_left(_BANDS_BYTES, size)
    sizes = [size, *(one + 1 for one in _BANDS_BYTES[band:-1])]
    all_ns = []
    for i, size_bytes in enumerate(sizes, band):
        smaller = _BANDS_BYTES[max(0, i - _OCTAVE) : i] if operation == "all_reduce" else []
        for like_bytes in (*smaller, _BANDS_BYTES[i]):
            choice = cost.tuned(like_bytes, operation)
            cuts = cut(cost.graph, *choice[:2], _BANDS_BYTES[i])
            all_ns.append(duration_ns(cost.sent(choice, size_bytes, operation, cuts)))
    assert duration_ns(cost.transfer(operation, size)) == min(all_ns)
