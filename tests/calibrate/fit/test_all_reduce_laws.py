"""Laws of NCCL's and gloo's all-reduces, by hand."""

from __future__ import annotations

import pytest
from measured.made_measurements import NODE, TWO_HDR, all_reduce_s, gloo_ring, nccl_model

from calibrate.fit.gloo import fit_half
from calibrate.fit.samples import Sample
from ddpsim.cluster.fitted.ensemble import curve_of
from ddpsim.cluster.fitted.laws import AllReduceModel, FittedCost
from ddpsim.cluster.transfers import Operation, WholeTransfer, duration_ns
from ddpsim.importers.profiles.cluster import Fitted


def test_a_calibrated_ring_is_nccls_price_with_its_figures() -> None:
    """64 MiB on 4 x 4: NCCL takes a ring of Simple, whose pace is the network's."""
    usual, slower = nccl_model(TWO_HDR), nccl_model(TWO_HDR, net_rate=0.8)
    times_s = [all_reduce_s(model, 2**28, 4, 4) for model in (usual, slower)]
    wire_s = 2 * 15 / 16 * 2**28 / (2 * 25e9 * 0.92)
    assert times_s[0] == pytest.approx(wire_s, rel=0.05)
    assert times_s[1] - times_s[0] == pytest.approx(wire_s * (1 / 0.8 - 1), rel=0.02)


def test_a_figure_of_another_protocol_changes_nothing() -> None:
    usual, other = nccl_model(TWO_HDR), nccl_model(TWO_HDR, tree_hop_ll=3.0)
    assert all_reduce_s(usual, 2**28, 4, 4) == all_reduce_s(other, 2**28, 4, 4)
    assert all_reduce_s(other, 4096, 4, 4) > 1.5 * all_reduce_s(usual, 4096, 4, 4)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_twice_the_bytes_take_no_less_and_at_most_2_2_times_as_long(operation: Operation) -> None:
    """LL is so slow over these nodes that NCCL's own choice has a hump, which no curve keeps."""
    model = nccl_model(TWO_HDR, ll128=False, ll_rate=0.02, tree_hop_simple=4.0)
    for nodes in (2, 5, 64):
        curve = curve_of(model, operation, nodes, 4)
        sizes = [2 ** (k / 3) for k in range(24, 108)]
        for size in sizes:
            ratio = curve.seconds(2 * size) / curve.seconds(size)
            assert 1 - 1e-9 <= ratio <= 2.2 + 1e-9


def broadcast_s(
    model: AllReduceModel, size_bytes: int, nodes: int, gpus: int, rate: float | None = None
) -> float:
    cost = FittedCost(model, nodes, gpus, rate)
    return duration_ns(cost.transfer("broadcast", size_bytes)) * 1e-9


def test_a_broadcast_passes_the_message_once() -> None:
    wire_s = 2**28 / (2 * 25e9 * 0.92)
    assert broadcast_s(nccl_model(TWO_HDR), 2**28, 4, 1) == pytest.approx(wire_s, rel=0.05)


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
    once = cost.transfer("all_reduce", 2**20)
    assert once == WholeTransfer(0, round(1e9 * all_reduce_s(NODE, 2**20, 1, 2)))
    twice = cost.stretched(2.0).transfer("all_reduce", 2**20)
    assert twice.transfer_ns == pytest.approx(2 * once.transfer_ns, abs=1)
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
