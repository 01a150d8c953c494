"""A cluster profile from records: collectives, jitter, and several records of one cluster."""

from __future__ import annotations

import math

import pytest
from measured.made_measurements import (
    RATES,
    all_reduce_s,
    gloo_record,
    gloo_ring,
    jitter,
    samples_around,
)

from calibrate.fit.gloo import stall_warnings
from calibrate.fit.profile import fit_profile, samples_of_records
from calibrate.fit.samples import FitError, Sample
from calibrate.fit.show import show
from calibrate.records.record import RESTED, Measurement, Record
from ddpsim.cluster.fitted.laws import FittedCost
from ddpsim.cluster.transfers import duration_ns
from ddpsim.importers.profiles.cluster import ClusterProfile, Fitted, GlooRing
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.ddp import Ddp
from ddpsim.strategies.ddp.costs import DdpCosts


def test_other_measured_collectives_are_in_the_profile() -> None:
    record = gloo_record()
    pair = {"group": "world", "nodes": 2, "gpus_per_node": 1}
    kinds = ("broadcast", "reduce_scatter", "all_gather")
    others = [
        Measurement(kind=kind, samples_s=(place * time_s,) * 9, size_bytes=size, **pair)
        for place, kind in enumerate(kinds, 1)
        for size, time_s in ((2**16, 0.002), (2**20, 0.03))
    ]
    whole = record.model_copy(update={"measurements": (*record.measurements, *others)})
    profile, bare = fit_profile([whole], "cluster"), fit_profile([record], "cluster")
    names = ("measured_broadcasts", "measured_reduce_scatters", "measured_all_gathers")
    for place, name in enumerate(names, 1):
        found = getattr(profile, name)
        told = [(each.size_bytes, each.time_s) for each in found]
        wanted = [(2**16, place * 0.002), (2**20, place * 0.03)]
        assert told == [(size, pytest.approx(time_s)) for size, time_s in wanted]
        assert {(each.nodes, each.line_rate_bytes_per_s) for each in found} == {(2, 62.5e6)}
        assert getattr(bare, name) == ()
    for what in ("broadcasts", "reduce-scatters", "all-gathers"):
        assert f"{what}: 64.0 KiB to 1.00 MiB" in show(profile)


def test_powersgd_multiplies_as_fast_as_measured() -> None:
    """Three passes over 16 MiB; a rank that was not measured is as the nearest."""
    products = [
        Measurement(
            kind="narrow_products",
            variant=f"rank {rank}",
            samples_s=(seconds,) * 9,
            size_bytes=size,
        )
        for rank, seconds in ((1, 3e-3), (2, 12e-3))
        for size in (2**20, 2**24)
    ]
    record = gloo_record()
    whole = record.model_copy(update={"measurements": (*record.measurements, *products)})
    overheads = fit_profile([whole], "cluster").overheads
    told = {each.rank: each.bytes_per_s.value for each in overheads.narrow_products}
    assert told == {1: pytest.approx(2**24 / 1e-3), 2: pytest.approx(2**24 / 4e-3)}
    cluster = Cluster.model_validate({"nodes": 1, "gpus_per_node": 2, "device": "cpu-core"})
    device = cluster.device
    costs, plain = DdpCosts(device, Ddp(), overheads), DdpCosts(device, Ddp())
    for rank, seconds in ((1, 1e-3), (2, 4e-3), (8, 4e-3)):
        assert costs.product(2**24, rank).device_s == pytest.approx(seconds)
    assert plain.product(2**24, 2) == plain.moved(2**24)


def test_a_profile_from_a_record() -> None:
    record = gloo_record().with_measurement(jitter(500, 0.02, memory=0.5))
    profile = fit_profile([record], "testbed", ["a.json"])
    assert profile.backend == "gloo"
    assert profile.valid.line_rates_bytes_per_s == (62.5e6,)
    assert profile.provenance.sources == ("a.json",)
    found = profile.interference
    assert found is not None
    assert found.comm_slowdown == found.compute_slowdown == Fitted(value=1.0)
    alone_bytes_per_s = 2**22 / all_reduce_s(gloo_ring(), 2**22, 2, 1, 62.5e6)
    more = found.comm_slowdown_s2_per_byte2.value * alone_bytes_per_s**2
    law = FittedCost(gloo_ring(), 2, 1, 62.5e6).transfer("all_reduce", 2**22)
    # no queue was measured alone: it is taken to leave the link idle at no time
    assert 1 + more == pytest.approx(1.2 * duration_ns(law) / law.transfer_ns, rel=0.01)
    (point,) = found.compute_kept
    assert 1 - point.share.value == pytest.approx(1e-9 * point.sent_bytes_per_s, rel=5e-3)
    assert found.half_compute_kept == ()
    assert profile.overheads.hook_s is not None
    assert profile.overheads.hook_s.value == pytest.approx(5e-6, rel=5e-3)
    assert profile.overheads.copy_bytes_per_s is not None
    assert profile.overheads.copy_bytes_per_s.value == pytest.approx(8e9, rel=0.01)
    # 128 hooks of 5 us and 16 ms of copies back leave 32 ms for copies of 64 MB into buckets
    (copies,) = profile.overheads.copy_in
    assert copies.gradient_bytes == 1_000_000
    assert copies.bytes_per_s.value == pytest.approx(4e9, rel=0.01)
    assert profile.overheads.compress_bytes_per_s is not None
    assert profile.overheads.compress_bytes_per_s.value == pytest.approx(2e9, rel=0.01)
    assert profile.overheads.decompress_bytes_per_s is not None
    assert profile.overheads.decompress_bytes_per_s.value == pytest.approx(4e9, rel=0.01)
    assert profile.jitter is not None
    assert profile.jitter.iteration_sigma == pytest.approx(0.02, rel=0.1)
    assert profile.jitter.autocorrelation == pytest.approx(0.5, abs=0.1)
    assert profile.jitter.rank_sigma == pytest.approx(math.log(1.1) / math.sqrt(2), rel=0.05)
    assert "one line rate: all of gloo's interference" in profile.warnings[-1]
    assert ClusterProfile.model_validate_json(profile.model_dump_json(by_alias=True)) == profile


def test_records_of_several_line_rates_tell_what_compute_keeps_at_each() -> None:
    records = [gloo_record(rate, per_byte=4e-10, constant=1.05) for rate in reversed(RATES)]
    profile = fit_profile(records, "testbed")
    found = profile.interference
    assert found is not None
    assert found.compute_slowdown == Fitted(value=1.0)
    sent = [point.sent_bytes_per_s for point in found.compute_kept]
    assert sent == sorted(sent)
    assert len(sent) == len(RATES)
    for point in found.compute_kept:
        expected = (1 - 4e-10 * point.sent_bytes_per_s) / 1.05
        assert point.share.value == pytest.approx(expected, rel=1e-2)
        assert point.share.stderr is not None
    assert profile.provenance.sources == ("record 1", "record 2", "record 3")
    assert profile.warnings == ()


def test_every_record_of_a_line_rate_counts() -> None:
    """Compute keeps the mean of what two hours say, and how far they are apart counts as error."""
    records = [gloo_record(per_byte=per_byte) for per_byte in (4e-9, 8e-9)]
    first, second, both = (
        fit_profile(given, "x").interference for given in ([records[0]], [records[1]], records)
    )
    assert first
    assert second
    assert both
    (low,), (high,), (mean,) = (found.compute_kept for found in (first, second, both))
    assert mean.share.value == pytest.approx((low.share.value + high.share.value) / 2, rel=1e-3)
    assert mean.share.stderr is not None
    apart = abs(high.share.value - low.share.value)
    assert mean.share.stderr >= apart / 4 * (4 / 3) ** 0.5  # two pieces of compute in each


def test_what_was_measured_in_two_records_is_compared() -> None:
    whole = gloo_record()
    compute, rest = (
        whole.model_copy(
            update={
                "measurements": tuple(
                    m for m in whole.measurements if (m.kind == "compute") == is_compute
                )
            }
        )
        for is_compute in (True, False)
    )
    for records in ([compute, rest], [rest, compute]):
        assert fit_profile(records, "x").interference == fit_profile([whole], "x").interference


def _with_rests(rate: float, burst: float, delay: float) -> Record:
    """1 and 4 MiB right after a pause too, which saves `burst` less `delay`."""
    record = gloo_record(rate)
    like = next(m for m in record.measurements if m.variant == "alone")
    sizes = (2**20, 2**22)
    found = [m for m in record.measurements if m.size_bytes not in sizes]
    for size in sizes:
        usual_s = all_reduce_s(gloo_ring(), size, 2, 1, rate)
        for variant, time_s in (("alone", usual_s), (RESTED, usual_s - burst / rate + delay)):
            changes = {"variant": variant, "size_bytes": size, "samples_s": samples_around(time_s)}
            found.append(like.model_copy(update=changes))
    return record.model_copy(update={"measurements": tuple(found)})


def test_what_passes_after_a_pause_is_found() -> None:
    records = [_with_rests(rate, 1.2e5, 2e-4) for rate in (12.5e6, 62.5e6, 625e6)]
    profile = fit_profile(records, "x")
    law = profile.all_reduce
    assert isinstance(law, GlooRing)
    assert law.rested_burst_bytes.value == pytest.approx(1.2e5, rel=5e-3)
    assert law.rested_delay_s.value == pytest.approx(2e-4, rel=0.05)
    assert "burst after a rest" in show(profile)
    slow = FittedCost(law, 2, 1, 12.5e6).transfer("all_reduce", 2**22)
    assert slow.burst_ns == pytest.approx(1.2e5 / 12.5e-3 - 2e5, rel=5e-3)
    # 0.12 ms less of the wire at 1 GB/s, which getting going takes and more
    assert FittedCost(law, 2, 1, 1e9).transfer("all_reduce", 2**22).burst_ns == 0
    alone = fit_profile(records[:1], "x").all_reduce  # one rate: all is bytes
    assert isinstance(alone, GlooRing)
    assert alone.rested_burst_bytes.value == pytest.approx(1.2e5 - 2e-4 * 12.5e6, rel=5e-3)
    assert alone.rested_delay_s.value == 0


def test_where_a_pause_saves_nothing_nothing_is_saved() -> None:
    law = fit_profile([_with_rests(rate, 0.0, 3e-4) for rate in RATES], "x").all_reduce
    assert isinstance(law, GlooRing)
    assert law.rested_burst_bytes.value == 0
    cost = FittedCost(law, 2, 1, RATES[0])
    assert cost.transfer("all_reduce", 2**20).burst_ns == 0
    found = fit_profile([gloo_record()], "x").all_reduce
    assert isinstance(found, GlooRing)
    assert found.rested_burst_bytes == found.rested_delay_s == Fitted(value=0.0)


def test_a_median_that_is_not_known_well_counts_less() -> None:
    measured = {"kind": "all_reduce", "nodes": 2, "size_bytes": 4096}
    steady = Measurement(**measured, samples_s=(1e-3,) * 9)
    torn = Measurement(**measured | {"size_bytes": 8192}, samples_s=(1e-3, 9e-3) * 5)
    record = gloo_record().model_copy(update={"measurements": (steady, torn)})
    known, unknown = samples_of_records([record])
    assert known.weight == 1.0
    assert unknown.weight < 0.05


def test_gloo_inside_a_node_passes_no_link() -> None:
    inside = Measurement(
        kind="all_reduce", group="intra_node", gpus_per_node=2, size_bytes=4096, samples_s=(1e-3,)
    )
    record = gloo_record().with_measurement(inside)
    assert {sample.nodes for sample in samples_of_records([record])} == {2}
    alone = record.model_copy(update={"measurements": (inside,)})
    assert samples_of_records([alone]) == [Sample(1, 2, 4096, 1e-3)]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no record was given: there is nothing to fit"),
        (
            [gloo_record(), gloo_record(machine="another")],
            (
                "a.json was measured on 'SYNTHETIC, 2 cores', but b.json on 'another': fit one "
                "profile for each machine"
            ),
        ),
        (
            [
                gloo_record(details={"processor": "model 2"}),
                gloo_record(details={"processor": "model 3"}),
            ],
            (
                "a.json and b.json were measured on machines that call themselves 'SYNTHETIC, 2 "
                "cores', but one is model 2 and the other model 3: fit one profile for each"
            ),
        ),
        (
            [gloo_record(), gloo_record(backend="nccl")],
            (
                "a.json was measured with gloo on 'SYNTHETIC, 2 cores', but b.json with nccl on "
                "'SYNTHETIC, 2 cores': fit one profile for each backend"
            ),
        ),
    ],
)
def test_records_that_do_not_fit_together(records: list[Record], message: str) -> None:
    with pytest.raises(FitError) as raised:
        fit_profile(records, "mixed", ["a.json", "b.json"][: len(records)])
    assert str(raised.value) == message


def test_a_profile_holds_the_processor_that_a_record_tells() -> None:
    told = gloo_record(125e6, details={"processor": "vendor_id AuthenticAMD, model 2"})
    made = fit_profile([gloo_record(), told], "testbed")
    assert made.provenance.processor == "vendor_id AuthenticAMD, model 2"
    assert "\n  vendor_id AuthenticAMD, model 2\n" in show(made)
    on_gpus = told.environment.model_copy(update={"device": "NVIDIA A100"})
    assert on_gpus.processor == ""


def test_warnings_of_records() -> None:
    newer = gloo_record(250e6, torch="2.14.0").with_measurement(jitter(10, 0.02))
    assert fit_profile([gloo_record(), newer], "testbed").warnings == (
        "record 1 was measured with torch 2.13.0, but record 2 with 2.14.0",
        "not enough data for jitter: 10 iterations, wanted 30",
    )
    half = [m for m in gloo_record().measurements if m.kind != "compute"]
    record = gloo_record().model_copy(update={"measurements": tuple(half)})
    profile = fit_profile([record], "testbed")
    assert profile.interference is None
    assert profile.warnings[-1] == (
        "not enough data for interference: measure compute and all_reduce, alone and together"
    )


@pytest.mark.parametrize("times", [1.2, 1.34])
def test_records_of_another_pace_are_told(times: float) -> None:
    """What is told of the machine is the same, as of clouds that call two processors one name."""

    def longer(m: Measurement) -> Measurement:
        slower = {"samples_s": tuple(times * s for s in m.samples_s)}
        return m.model_copy(update=slower) if m.kind == "compute" else m

    other = gloo_record(250e6)
    other = other.model_copy(update={"measurements": tuple(map(longer, other.measurements))})
    said = fit_profile([gloo_record(), other], "testbed", ["a.json", "b.json"]).warnings
    told = (
        "b.json: compute with nothing beside it took 1.34 times as long as in the fastest record, "
        "so others used the machine, or it is another of the same name: measure it again, or fit "
        "it apart"
    )
    assert said == ((told,) if times > 1.25 else ())


def test_small_messages_that_wait_for_a_core_are_told() -> None:
    """One in four takes 6 ms more: a step with many of them takes the mean."""

    def torn(m: Measurement) -> Measurement:
        if (m.kind, m.variant) != ("all_reduce", "alone") or m.size_bytes > 2**15:
            return m
        return m.model_copy(update={"samples_s": (1e-3,) * 15 + (7e-3,) * 5})

    record = gloo_record()
    torn_record = record.model_copy(update={"measurements": tuple(map(torn, record.measurements))})
    (told,) = stall_warnings([record, torn_record], ["a.json", "b.json"])
    assert told.startswith("b.json: small all-reduces usually take 1.00 ms, and 2.50 ms on average")


def test_a_record_that_is_given_twice_counts_once() -> None:
    record, more = gloo_record(), gloo_record().with_measurement(jitter(50, 0.02))
    for other in (record, more):  # a copy, and what --resume made of one
        with pytest.raises(FitError, match=r"a\.json and b\.json hold the same measurements"):
            fit_profile([record, other], "testbed", ["a.json", "b.json"])


def test_records_with_other_settings_are_told_apart() -> None:
    other = gloo_record(per_byte=1.1e-9, variables={"OMP_NUM_THREADS": "2"})
    shaken = tuple(
        m.model_copy(update={"samples_s": tuple(1.001 * s for s in m.samples_s)})
        for m in other.measurements
    )
    other = other.model_copy(update={"measurements": shaken})
    profile = fit_profile([gloo_record(), other], "testbed", ["a.json", "b.json"])
    said = "a.json was measured with OMP_NUM_THREADS none, but b.json with 2"
    assert said in profile.warnings
