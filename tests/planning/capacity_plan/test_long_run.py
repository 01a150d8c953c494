"""Plans with failures: today's plan without them, and later, dearer or larger with them."""

from __future__ import annotations

from typing import Any

import pytest
from shipped_scenarios import load

import ddpsim
from ddpsim.errors import InputError
from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.result.capacity import CapacityPlan, LongRun

WORK = "20B samples"  # 23 days on 8 GPUs
AT_ONCE = {"detection": "0 s", "reschedule": "0 s", "init": "0 s", "init_per_rank": "0 s"}
OFTEN = {"mtbf": "400 h", "spares": 1}


def scenario_of(
    reliability: dict[str, Any] | None, write: dict[str, Any] | None = None, nodes: int = 2
) -> ddpsim.Scenario:
    workload = {"model": "resnet50", "batch_per_rank": 128, "step_time": "100 ms"}
    written = {"every": 500, "bandwidth": "1 GB/s"} | (write or {})
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": workload | {"checkpoint_write": written},
            "cluster": {"machine": "dgx-a100", "nodes": nodes},
            "reliability": reliability,
        }
    )


def planned(reliability: dict[str, Any] | None, target: str = WORK, **options: Any) -> CapacityPlan:
    usual = {"max_gpus": 16, "looks_further": False}
    return plan_capacity(scenario_of(reliability), target, **usual | options)


def run_of(plan: CapacityPlan) -> LongRun:
    assert plan.answer.long_run
    return plan.answer.long_run


def test_without_failures_it_is_todays_plan() -> None:
    usual, same = planned(None), planned(AT_ONCE)
    assert same.knee_gpus == usual.knee_gpus
    assert len(same.sizes) == len(usual.sizes) == 2
    for size, was in zip(same.sizes, usual.sizes, strict=True):
        run = size.long_run
        assert run
        assert run.time_s.p50 == run.certain_s == was.time_s == size.time_s
        assert (run.time_s.p10, run.time_s.p90) == pytest.approx(was.time_interval_s, rel=1e-12)
        assert run.gpu_hours.p50 == pytest.approx(was.gpu_hours, rel=1e-12)
        assert (run.mtbf_s, run.interruptions, run.spares) == (None, 0, 0)
        assert run.shares["steps"] + run.shares["checkpoints"] == pytest.approx(1)


def test_failures_take_time_and_what_helps_is_simulated() -> None:
    plan = planned(OFTEN, price="2 USD", looks_further=True)
    run, paid = run_of(plan), plan.answer.gpus + 8
    assert run.paid_gpus == paid
    assert run.mtbf_s == pytest.approx(400 * 3600 / plan.answer.gpus)
    assert run.time_s.p50 > 1.02 * plan.answer.time_s
    assert sum(run.shares.values()) == pytest.approx(1)
    assert run.cost
    assert run.cost.p90 == pytest.approx(2 * paid * run.time_s.p90 / 3600)
    assert plan.answer.cost_interval == (run.cost.p10, run.cost.p90)
    assert [other.saved_s for other in run.remedies] == sorted(
        (other.saved_s for other in run.remedies), reverse=True
    )
    best = run.remedies[0]
    again = plan_capacity(
        ddpsim.load_scenario(
            scenario_of(OFTEN).model_dump(mode="json", exclude_unset=True), best.settings
        ),
        WORK,
        max_gpus=16,
        looks_further=False,
    )
    assert run_of(again).time_s.p50 == pytest.approx(best.time_s, rel=1e-9)
    assumed = [source.input for source in run.sources if source.trust == "assumed"]
    assert "reliability.detection" in assumed
    assert not any(name.endswith("mtbf") for name in assumed)


def test_certainty_takes_more_gpus_and_the_knee_moves() -> None:
    often, target = OFTEN | {"spares": "auto"}, f"{WORK} in 16 days"
    half = planned(often, target)
    sure = planned(often, f"{target} with 95 % certainty", max_gpus=32)
    assert (half.met, sure.met) == (True, True)
    assert sure.answer.gpus > half.answer.gpus
    assert run_of(half).certain_s == run_of(half).time_s.p50 <= 16 * 86400
    assert run_of(sure).time_s.p90 < run_of(sure).certain_s <= 16 * 86400
    assert run_of(sure).spares > 0
    assert planned(None).knee_gpus is None
    assert planned({"mtbf": "4 h"}).knee_gpus == 8


def test_checkpoints_may_be_written_behind_the_steps() -> None:
    def pause(**write: Any) -> Any:
        (found,) = ddpsim.simulate(scenario_of({"mtbf": "5000 h"}, write)).training.pauses
        return found

    plain, behind = pause(), pause(mode="async")
    near = pause(mode="neighbour", bandwidth=None)
    assert plain.time_s == pytest.approx(plain.size_bytes / 1e9 + plain.size_bytes / 10e9)
    assert behind.write_s == pytest.approx(plain.size_bytes / 1e9)
    assert plain.size_bytes / 10e9 <= behind.time_s < plain.time_s / 5
    assert near.write_s == pytest.approx(plain.size_bytes / (0.5 * 8 * 25e9))
    all_read = pause(total_bandwidth="2 GB/s")
    assert all_read.time_s == plain.time_s
    assert all_read.read_s == pytest.approx(16 * plain.size_bytes / 2e9)
    assert pause(node_bandwidth="100 MB/s").time_s == pytest.approx(
        plain.size_bytes / 100e6 + plain.size_bytes / 10e9
    )
    best = pause(every="auto").every
    assert 4000 < best < 6000  # sqrt(2 x 0.11 s x 312 h) of 0.1 s


def test_what_makes_no_progress_is_left_out_with_its_number() -> None:
    with pytest.raises(InputError, match=r"it needs an MTBF \d.* times as long, or a restart of"):
        planned({"mtbf": "1 min"})
    (left_out,) = planned({"mtbf": "9 h", "init_per_rank": "150 s"}).left_out
    assert left_out.sizes == ("2 x 8",)


def test_energy_counts_boards_hosts_and_the_building() -> None:
    plan = planned(None, pue=1.5, co2_g_per_kwh=400)
    answer = plan.answer
    assert answer.energy
    assert 400 * 1.3 < answer.energy.watts_per_gpu <= 400 * 1.46
    hours = answer.gpu_hours * answer.energy.watts_per_gpu / 1000
    assert answer.energy.kwh == pytest.approx(1.5 * hours)
    assert answer.energy.co2_kg == pytest.approx(0.4 * answer.energy.kwh)
    assert planned(OFTEN, pue=1.0).answer.energy.co2_kg is None
    for pue, grams, key in ((0.9, None, "pue"), (1.2, 1e6, "carbon")):
        with pytest.raises(InputError) as told:
            planned(None, pue=pue, co2_g_per_kwh=grams)
        assert told.value.key == key
    with pytest.raises(InputError, match="board power of cpu-core is not known"):
        plan_capacity(load("gloo-cpu"), WORK, pue=1.1)
