"""How much compute and all-reduces slow each other down, from records."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from measured.made_measurements import NODES, RATES, gloo_record, gloo_ring, samples_around

from calibrate.fit.profile import fit_profile
from calibrate.fit.samples import FitError
from calibrate.fit.show import show
from calibrate.records.record import HALF, Layout, Measurement, Record
from ddpsim.cluster.fitted.laws import FittedCost


def test_ranks_of_one_node_tell_nothing_of_interference_over_links() -> None:
    measured = tuple(
        m.model_copy(update={"nodes": 1, "gpus_per_node": 2}) for m in gloo_record().measurements
    )
    layout = Layout(nodes=1, gpus_per_node=2)
    inside = gloo_record().model_copy(update={"layout": layout, "measurements": measured})
    records = [gloo_record(), inside]
    assert fit_profile(records, "x").interference == fit_profile(records[:1], "x").interference


def _with_half(record: Record) -> Record:
    """All-reduces of float16, and compute beside them, take as long as of float32."""
    half = [
        m.model_copy(update={"variant": f"{m.variant}{HALF}"})
        for m in record.measurements
        if m.kind in ("compute", "all_reduce")
    ]
    return record.model_copy(update={"measurements": (*record.measurements, *half)})


def test_where_float16_was_not_measured_at_every_rate_that_is_said() -> None:
    one, other = _with_half(gloo_record(RATES[0])), gloo_record(RATES[1])
    said = "interference of float16 was not measured at every line rate"
    assert any(said in warning for warning in fit_profile([one, other], "x").warnings)
    assert not any(said in warning for warning in fit_profile([one], "x").warnings)


def _with_layers(record: Record, times: float) -> Record:
    """Layers' compute beside all-reduces takes so many times as long, as nothing else in it."""
    like = next(m for m in record.measurements if m.variant == "with gemm")
    more = [
        like.model_copy(
            update={"kind": "compute", "variant": variant, "samples_s": samples_around(time_s)}
        )
        for variant, time_s in (("layer alone", 2e-3), ("layer with all_reduce", 2e-3 * times))
    ]
    sent = like.model_copy(update={"variant": "with layer"})
    return record.model_copy(update={"measurements": (*record.measurements, sent, *more)})


def _beside_one(record: Record, times: float) -> Record:
    """Compute of each work takes so many times as long beside one all-reduce in flight."""
    more = [
        m.model_copy(
            update={
                "variant": m.variant.replace("alone", "with one all_reduce"),
                "samples_s": [times * sample_s for sample_s in m.samples_s],
            }
        )
        for m in record.measurements
        if m.kind == "compute" and m.variant.endswith((" alone", f" alone{HALF}"))
    ]
    return record.model_copy(update={"measurements": (*record.measurements, *more)})


def test_what_compute_keeps_beside_one_all_reduce_is_told_where_it_was_measured() -> None:
    slow, fast = (_with_half(gloo_record(rate)) for rate in RATES[:2])
    said = "what compute keeps beside one all-reduce was not measured at every line rate"
    profile = fit_profile([_beside_one(slow, 1.02), fast], "x")
    assert any(said in warning for warning in profile.warnings)
    assert profile.interference
    for points in (profile.interference.compute_kept, profile.interference.half_compute_kept):
        first, second = points
        assert first.beside_one
        assert first.beside_one.value == pytest.approx(1 / 1.02, rel=1e-3)
        assert first.beside_one.value > first.share.value
        assert second.beside_one is None
    assert re.search(r"beside one all-reduce +0\.98", show(profile))
    both = fit_profile([_beside_one(slow, 9), _beside_one(fast, 9)], "x")
    assert not any(said in warning for warning in both.warnings)
    assert both.interference
    for point in both.interference.compute_kept:  # no less than beside two
        assert point.beside_one
        assert point.beside_one.value == point.share.value


def test_what_layers_suffer_stands_for_steps_where_it_was_measured() -> None:
    slow, fast = gloo_record(RATES[0]), gloo_record(RATES[1])
    said = "what layers suffer beside all-reduces was not measured at every line rate"
    profile = fit_profile([_with_layers(slow, 2.5), fast], "x")
    assert any(said in warning for warning in profile.warnings)
    kept = profile.interference and profile.interference.compute_kept
    plain = fit_profile([slow, fast], "x").interference
    assert kept
    assert plain
    assert kept[0].share.value == pytest.approx(0.4, rel=0.01)
    assert kept[1] == plain.compute_kept[1]
    both = fit_profile([_with_layers(slow, 2.5), _with_layers(fast, 2.5)], "x")
    assert not any(said in warning for warning in both.warnings)
    halves = [_with_half(_with_layers(slow, 2.5)), _with_layers(_with_half(fast), 2.5)]
    (warning,) = [w for w in fit_profile(halves, "x").warnings if "what layers suffer" in w]
    assert "beside all-reduces of float16 was not measured at every line rate" in warning


def test_what_compute_keeps_is_a_mean_of_speeds_over_the_ranks() -> None:
    """Half of the time at half speed, half at a quarter: 0.375 kept; the mean time says 0.333."""
    base = gloo_record()
    kept = [m for m in base.measurements if m.kind != "compute"]
    like = next(m for m in base.measurements if m.variant == "with gemm")
    for variant, ranks in (
        ("gemm alone", ((0.01,) * 8, (0.02,) * 8)),
        ("gemm with all_reduce", ((0.02, 0.04) * 4, (0.08, 0.04) * 4)),
    ):
        slowest = tuple(map(max, *ranks))
        changes = {"kind": "compute", "variant": variant, "samples_s": slowest}
        kept.append(like.model_copy(update=changes | {"samples_by_rank_s": ranks}))
    profile = fit_profile([base.model_copy(update={"measurements": tuple(kept)})], "x")
    found = profile.interference
    assert found is not None
    (point,) = found.compute_kept
    assert point.share.value == pytest.approx(0.375)
    assert ", 0.098 more or less by rank and burst" in show(profile)
    assert point.spread == pytest.approx(0.25 / 2.563)  # from tenth to ninetieth percentile


def test_where_ranks_were_not_measured_apart_the_slower_one_tells_of_no_spread() -> None:
    found = fit_profile([gloo_record()], "x").interference
    assert found is not None
    assert [point.spread for point in found.compute_kept] == [0.0]


def _with_queues(rate: float, use: float, crowded: float, delay: float, squared: float) -> Record:
    """A gloo record whose queues of 1 MiB and 16 MiB take known times."""
    base = gloo_record(rate)
    plain = [m for m in base.measurements if m.variant == "alone"]

    def measured(kind: Any, variant: str, time_s: float, size: int) -> Measurement:
        return Measurement(
            kind=kind,
            variant=variant,
            group="world",
            nodes=2,
            gpus_per_node=1,
            size_bytes=size,
            samples_s=samples_around(time_s, spread=1e-4),
        )

    for size in (2**20, 2**24):
        alone_s = float(np.median(next(m.samples_s for m in plain if m.size_bytes == size)))
        sent = size / alone_s
        on_link = (
            FittedCost(gloo_ring(), 2, 1, rate).transfer("all_reduce", size).transfer_ns * 1e-9
        )
        queued_s = alone_s * (1 + crowded * sent) - use * (alone_s - on_link)
        longer_s = delay + squared * sent**2 * queued_s
        plain += [
            measured("all_reduce", "beside gemm", queued_s, size),
            measured("all_reduce", "with gemm", queued_s + longer_s, size),
            measured("compute", "gemm alone", 1e-3, size),
            measured("compute", "gemm with all_reduce", 1.5e-3, size),
        ]
    return base.model_copy(update={"measurements": tuple(plain)})


def test_what_compute_and_crowding_add_to_transfers_is_found_again() -> None:
    records = [
        _with_queues(rate, use=0.5, crowded=1e-10, delay=2e-3, squared=1e-18) for rate in RATES
    ]
    found = fit_profile(records, "testbed").interference
    assert found is not None
    assert found.idle_link_use.value == pytest.approx(0.5, rel=0.1)
    assert found.comm_delay_s.value == pytest.approx(2e-3, rel=0.1)
    assert found.comm_slowdown_s2_per_byte2.value == pytest.approx(1e-18, rel=0.1)
    assert found.crowded_slowdown_s_per_byte.value == pytest.approx(1e-10, rel=0.1)


def test_with_nccl_the_slowdown_of_compute_is_a_constant() -> None:
    record = gloo_record(None, per_byte=0.0, constant=1.15, model=NODES, backend="nccl")
    found = fit_profile([record], "cluster").interference
    assert found is not None
    assert found.compute_slowdown.value == pytest.approx(1.15)
    assert found.compute_kept == ()


def test_what_runs_beside_other_work_is_never_faster_for_it() -> None:
    record = gloo_record(None, per_byte=0.0, constant=0.97, model=NODES, backend="nccl")
    found = fit_profile([record], "cluster").interference
    assert found is not None
    assert found.compute_slowdown.value == 1.0


def test_one_moment_of_compute_that_took_no_time_is_refused() -> None:
    """One all-reduce of many may be as wrong: a fit does not mind."""
    for kind, is_refused in (("compute", True), ("all_reduce", False)):
        record = gloo_record()
        first = next(m for m in record.measurements if m.kind == kind)
        damaged = first.model_copy(update={"samples_s": (*first.samples_s[1:], 0.0)})
        record = record.with_measurement(damaged)
        if is_refused:
            with pytest.raises(FitError, match=r"compute gemm alone of .* took 0 s"):
                fit_profile([record], "x")
        else:
            fit_profile([record], "x")
