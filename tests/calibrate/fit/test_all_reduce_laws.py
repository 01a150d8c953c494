"""Laws of NCCL's and gloo's all-reduces, by hand."""

from __future__ import annotations

import pytest
from measured.made_measurements import NODE, NODES, gloo_ring, nccl_regime

from calibrate.fit import Sample
from calibrate.fit.gloo import fit_half
from ddpsim.cluster.fitted.laws import AllReduceModel, FittedCost, all_reduce_s
from ddpsim.cluster.transfers import WholeTransfer, duration_ns
from ddpsim.errors import InputError
from ddpsim.importers.profiles.cluster import Fitted, NcclRegimes


def test_a_ring_over_nodes_by_hand() -> None:
    """2 x 4 ranks: 12 hops inside nodes, 2 between; 8 shares of 16 kB are free."""
    model = NcclRegimes(
        regimes=(nccl_regime("ring", 5e-6, 4e-6, inter=10e9, hop_bytes=16_000, intra_hop=1e-6),)
    )
    seconds = 5e-6 + 12 * 1e-6 + 2 * 4e-6 + 2 * 7 / 8 * (1_128_000 - 128_000) / 10e9
    assert seconds == pytest.approx(200e-6)
    assert all_reduce_s(model, 1_128_000, 2, 4) == pytest.approx(seconds)
    assert all_reduce_s(model, 128_000, 2, 4) == pytest.approx(25e-6)  # all within the hops


def test_a_tree_over_nodes_by_hand() -> None:
    """4 x 8 ranks: 14 hops inside a node, 2 log2(4) between; 1 kB is free, once."""
    model = NcclRegimes(
        regimes=(nccl_regime("tree", 5e-6, 4e-6, inter=10e9, hop_bytes=1000, intra_hop=1e-6),)
    )
    seconds = 5e-6 + 14e-6 + 16e-6 + 2 * 31 / 32 * 1_000_000 / 10e9
    assert all_reduce_s(model, 1_001_000, 4, 8) == pytest.approx(seconds)


def test_the_fastest_regime_of_the_layout_wins() -> None:
    assert all_reduce_s(NODE, 1024, 1, 2) == pytest.approx(10e-6 + 1024 / 2e9)
    assert all_reduce_s(NODE, 2**27, 1, 2) == pytest.approx(60e-6 + 2**27 / 100e9)
    with pytest.raises(InputError) as raised:
        all_reduce_s(NODE, 1024, 2, 2)
    assert str(raised.value) == (
        "cluster.profile: was fitted without a measurement on several nodes; "
        "measure there, and fit again, or state cluster.inter_node"
    )
    with pytest.raises(InputError, match="measurement on one node;"):
        all_reduce_s(NODES, 1024, 1, 4)


def broadcast_s(
    model: AllReduceModel, size_bytes: int, nodes: int, gpus: int, rate: float | None = None
) -> float:
    cost = FittedCost(model, nodes, gpus, rate)
    return duration_ns(cost.transfer("broadcast", size_bytes)) * 1e-9


def test_a_broadcast_round_the_ring_has_half_the_hops_and_the_message_once() -> None:
    assert broadcast_s(NODES, 2**24, 4, 1) == pytest.approx(
        30e-6 + 3 * 15e-6 + (2**24 - 4 * 16384) / 20e9, rel=1e-5
    )
    trees = NcclRegimes(regimes=NODES.regimes[:1])
    assert broadcast_s(trees, 2**24, 4, 1) == pytest.approx(8e-6 + 2 * 6e-6 + 2**24 / 1e9, rel=1e-5)


def test_gloo_on_the_wire_by_hand() -> None:
    """4 MiB on 2 ranks at 500 Mbit/s: 4 segments of 1 MiB, two a phase; the link decides."""
    model = gloo_ring(queue=1e-3, segment=1e-4, wire=1.05, reduce=1e9, burst=0)
    wire_s = 2**20 * 1.05 / 62.5e6
    seconds = 1e-3 + 4 * wire_s + 2 * 1e-4 + 2**20 / 1e9
    assert all_reduce_s(model, 2**22, 2, 1, 62.5e6) == pytest.approx(seconds)


def test_gloo_of_small_segments_waits_for_software() -> None:
    """1 kB on 2 ranks: 4 segments of 256 B, two a phase in flight together."""
    model = gloo_ring(queue=1e-3, segment=1e-4, wire=1.0, reduce=1e12, burst=0)
    wire_s = 256 / 1.25e9
    assert all_reduce_s(model, 1024, 2, 1) == pytest.approx(
        1e-3 + 4 * (1e-4 + wire_s) / 2 + 2 * 1e-4, rel=1e-5
    )


def test_what_a_shaper_lets_through_takes_no_time_on_the_wire() -> None:
    shaped, free = gloo_ring(burst=2e6, reduce=1e12), gloo_ring(burst=0, reduce=1e12)
    size = 2**24
    spared_s = all_reduce_s(free, size, 2, 1, 62.5e6) - all_reduce_s(shaped, size, 2, 1, 62.5e6)
    assert spared_s == pytest.approx(2e6 / 62.5e6, rel=0.02)
    within = all_reduce_s(shaped, 2**20, 2, 1, 62.5e6)
    assert within == pytest.approx(all_reduce_s(shaped, 2**20, 2, 1, 1e12), rel=1e-3)


def test_gloo_broadcasts_down_a_tree() -> None:
    model = gloo_ring(queue=1e-3, segment=1e-4, wire=1.1, burst=110)
    wire_s = (3 * 10_000 * 1.1 - 110) / 1e6
    assert broadcast_s(model, 10_000, 5, 1, 1e6) == pytest.approx(1e-3 + 3e-4 + wire_s, rel=1e-5)


def test_a_cost_for_the_engine() -> None:
    cost = FittedCost(NODE, 1, 2)
    assert cost.transfer("all_reduce", 2_000) == WholeTransfer(10_000, 1_000)
    assert cost.stretched(2.0).transfer("all_reduce", 2_000) == WholeTransfer(20_000, 2_000)
    assert cost.transfer("broadcast", 2_000) == WholeTransfer(10_000, 1_000)
    slow = FittedCost(gloo_ring(burst=0), 2, 1, 62.5e6).transfer("all_reduce", 2**24)
    assert slow.transfer_ns == round(2**24 * 1.045 / 62.5e6 * 1e9)  # what two in flight share
    total_s = all_reduce_s(gloo_ring(burst=0), 2**24, 2, 1, 62.5e6)
    assert slow.latency_ns + slow.transfer_ns == pytest.approx(total_s * 1e9, abs=2)


def test_slower_addition_of_float16_is_found_again() -> None:
    model = gloo_ring()
    slow = model.model_copy(update={"reduce_bytes_per_s": Fitted(value=2e8)})
    samples = [
        Sample(2, 1, 2**k, all_reduce_s(slow, 2**k, 2, 1, 1.25e9), 1.25e9) for k in (20, 22, 24, 26)
    ]
    found = fit_half(model, samples)
    assert found is not None
    assert found.value == pytest.approx(2e8, rel=1e-3)
    same = [
        Sample(2, 1, s.size_bytes, all_reduce_s(model, s.size_bytes, 2, 1, 1.25e9), 1.25e9)
        for s in samples
    ]
    assert fit_half(model, same) is None
    unseen = model.model_copy(update={"reduce_bytes_per_s": Fitted(value=1e18)})
    hidden = fit_half(unseen, samples)
    assert hidden is not None
    assert hidden.value == pytest.approx(2e8, rel=1e-2)
    assert fit_half(model, []) is None
