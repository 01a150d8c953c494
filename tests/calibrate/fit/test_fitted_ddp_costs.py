"""Costs of DDP's copies, casts and hooks, from records."""

from __future__ import annotations

import math
from typing import Any

import pytest
from measured.made_measurements import gloo_record, jitter, samples_around

from calibrate.fit.profile import fit_profile
from calibrate.fit.samples import FitError
from calibrate.records.record import Measurement, Record


def _with_large_layers(with_ddp_s: float) -> Record:
    """DDP's backward over large layers takes so long."""
    record = gloo_record()
    known = [
        m.model_copy(update={"samples_s": samples_around(with_ddp_s)})
        if m.variant == "with ddp" and m.size_bytes
        else m
        for m in record.measurements
    ]
    return record.model_copy(update={"measurements": tuple(known)})


def test_what_copies_to_buckets_take_is_a_mean_of_times() -> None:
    """32 ms in one record and 0.3 in another are 16, and not the mean of 4 and 427 GB/s."""
    records = [_with_large_layers(seconds) for seconds in (0.14864, 0.11694)]
    (found,) = fit_profile(records, "x").overheads.copy_in
    assert found.bytes_per_s.value == pytest.approx(128e6 / 16.15e-3, rel=0.05)
    assert fit_profile([_with_large_layers(0.1)], "x").overheads.copy_in == ()


def test_copies_to_buckets_are_told_by_the_size_of_a_gradient() -> None:
    """64 layers of 1 MB leave 32 ms for copies into buckets, 4 of 16 MB with 8 hooks 48 ms."""
    record = gloo_record()
    larger = [
        m.model_copy(update={"parameters": 8, "samples_s": samples_around(time_s)})
        for m in record.measurements
        if m.kind == "ddp_hook" and m.size_bytes
        for time_s in [0.16404 if m.variant == "with ddp" else 0.1]
    ]
    both = record.model_copy(update={"measurements": (*record.measurements, *larger)})
    small, large = fit_profile([both], "x").overheads.copy_in
    assert (small.gradient_bytes, large.gradient_bytes) == (1_000_000, 16_000_000)
    assert small.bytes_per_s.value == pytest.approx(4e9, rel=0.01)
    assert large.bytes_per_s.value == pytest.approx(128e6 / 48e-3, rel=0.01)


def _with(record: Record, *more: tuple[Any, str, float, int, int]) -> Record:
    for kind, variant, time_s, size_bytes, parameters in more:
        record = record.with_measurement(
            Measurement(
                kind=kind,
                variant=variant,
                samples_s=samples_around(time_s),
                size_bytes=size_bytes,
                parameters=parameters,
            )
        )
    return record


def test_copies_in_a_backward_and_by_all_ranks_at_once_come_before_others() -> None:
    """64 MB at 8 GB/s and not the 4 that are inferred; 2 GB/s together and not the 8 alone."""
    record = _with(
        gloo_record(),
        ("ddp_hook", "copies in", 0.016, 64_000_000, 128),
        ("ddp_hook", "copies in", 0.032, 64_000_000, 8),
        ("device_copy", "together", 0.004, 4_000_000, 0),
        ("device_copy", "together", 0.1, 4_000, 0),
        ("device_cast", "compress together", 0.004, 4_000_000, 0),
    )
    found = fit_profile([record], "x").overheads
    assert [c.gradient_bytes for c in found.copy_in] == [1_000_000, 16_000_000]
    rates = [c.bytes_per_s.value for c in found.copy_in]
    assert rates == pytest.approx([8e9, 4e9], rel=0.01)
    known = found.copy_bytes_per_s, found.compress_bytes_per_s, found.decompress_bytes_per_s
    rates = [rate.value for rate in known if rate]
    assert rates == pytest.approx([2e9, 1e9, 4e9], rel=0.01)
    assert found.sigma is None  # nothing was measured twice


def test_copies_that_vary_from_record_to_record_say_by_how_much() -> None:
    """Half and twice the mean, in one of three things that were measured twice."""
    records = [
        _with(gloo_record(), ("device_copy", "together", time_s, 4_000_000, 0))
        for time_s in (0.001, 0.004)
    ]
    sigma = fit_profile(records, "x").overheads.sigma
    assert sigma == pytest.approx(math.log(2) * math.sqrt(2 / 3), rel=0.01)


def test_casts_that_a_short_budget_left_to_small_buckets_are_named() -> None:
    """Large ones by each rank itself only; with those of all at once there is nothing to say."""
    small = ("device_cast", "compress together", 0.0004, 1_000_000, 0)
    record = _with(gloo_record(), ("device_cast", "compress", 0.01, 64_000_000, 0), small)
    (warning,) = (w for w in fit_profile([record], "x").warnings if "at once" in w)
    said = "device_cast compress of all ranks at once was measured up to 977 KiB alone, and not "
    assert warning.startswith(said + "up to 61.0 MiB: ")
    whole = _with(record, ("device_cast", "compress together", 0.016, 64_000_000, 0))
    assert not any("at once" in warning for warning in fit_profile([whole], "x").warnings)


def test_what_a_hook_takes_after_the_all_reduces_is_told_of_most_parameters() -> None:
    record = _with(
        gloo_record(),
        ("ddp_hook", "copies back", 0.0001, 0, 250),
        ("ddp_hook", "copies back", 0.002, 0, 1000),
    )
    found = fit_profile([record], "x").overheads.copy_back_s
    assert found is not None
    assert found.value == pytest.approx(2e-6, rel=0.01)
    assert fit_profile([gloo_record()], "x").overheads.copy_back_s is None


def _took(kind: str, seconds: float) -> Record:
    """A record in which all of a kind took so long."""
    record = gloo_record().with_measurement(jitter(50, 0.02))
    record = _with(record, ("ddp_hook", "copies in", 0.016, 64_000_000, 128))
    changed = [
        m.model_copy(
            update={
                "samples_s": (seconds,) * len(m.samples_s),
                "samples_by_rank_s": tuple(
                    (seconds,) * len(times) for times in m.samples_by_rank_s
                ),
            }
        )
        if m.kind == kind
        else m
        for m in record.measurements
    ]
    return record.model_copy(update={"measurements": tuple(changed)})


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("all_reduce", "all_reduce alone of 1.00 KiB on 2 x 1 ranks"),
        ("compute", "compute gemm alone of 4.00 MiB on 2 x 1 ranks"),
        ("jitter", "jitter alone on 1 x 1 ranks"),
        ("ddp_hook", "ddp_hook without of 100 parameters on 1 x 1 ranks"),
        ("device_copy", "device_copy alone of 3.81 MiB on 1 x 1 ranks"),
        ("device_cast", "device_cast compress of 3.81 MiB on 1 x 1 ranks"),
    ],
)
def test_what_took_no_time_is_refused(kind: str, said: str) -> None:
    with pytest.raises(FitError) as raised:
        fit_profile([_took(kind, 0.0)], "x", ["a.json"])
    assert str(raised.value) == (
        f"a.json: {said} took 0 s, which nothing does: remove it from the record, and measure it "
        "again with --resume"
    )


def test_copies_back_may_take_no_time() -> None:
    record = _with(gloo_record(), ("ddp_hook", "copies back", 0.0, 0, 250))
    found = fit_profile([record], "x").overheads.copy_back_s
    assert found is not None
    assert found.value == 0
