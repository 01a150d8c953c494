"""A measured step is taken as it is, with DDP and without."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from shipped_scenarios import load, mean_ms, predict

import ddpsim
from ddpsim.prediction.resolve import resolve
from ddpsim.prediction.uncertainty import uncertainties

ROOT = Path(__file__).resolve().parent.parent.parent
TRANSFORMER = json.loads(
    (ROOT / "scenarios" / "testbed" / "transformer-500mbit.json").read_text("utf-8")
)


def on_one_core(
    tmp_path: Path, measured: dict[str, Any], workload: dict[str, Any]
) -> ddpsim.Scenario:
    """A model profile on one rank, with more of what was measured, and keys of its workload."""
    profile = TRANSFORMER | {"measured": TRANSFORMER["measured"] | measured}
    (tmp_path / "model.json").write_text(json.dumps(profile))
    known = {"profile": str(tmp_path / "model.json"), "batch_per_rank": 4}
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": known | workload,
            "ddp": {"backend": "gloo"},
            "cluster": {"nodes": 1, "gpus_per_node": 1, "device": "cpu-core"},
        }
    )


@pytest.mark.parametrize(
    ("stated", "workload", "sigma"),
    [
        ({}, {}, 0.02),  # assumed
        ({"sigma": 0.004}, {}, 0.004),
        ({"sigma": 0.004, "scaled_to": "a100-sxm-40gb"}, {}, 0.2),
        ({"sigma": 0.004}, {"step_time": "500 ms"}, 0.02),  # of another step
    ],
)
def test_a_profile_says_how_far_its_times_may_be_off(
    tmp_path: Path, stated: dict[str, Any], workload: dict[str, Any], sigma: float
) -> None:
    job = resolve(on_one_core(tmp_path, stated, workload))
    assert uncertainties(job)["compute"].sigma == sigma


CALM = ("cluster.gpus_per_node=1", "cluster.stragglers=null", "run.jitter=null")


def test_step_time_anchors_one_device() -> None:
    """One device without DDP takes the stated time; DDP on one rank adds its own cost."""
    alone = predict("straggler", *CALM)
    assert math.isclose(alone.baselines_s.compute_only, 0.162, rel_tol=1e-6)
    assert 1.005 < alone.iteration_time_s.mean / 0.162 < 1.05
    assert alone.overlap_fraction is None
    assert alone.comm_time_s == 0


@pytest.mark.parametrize("with_ddp_ms", [162.5, 200])
def test_ddp_on_one_device_takes_the_step_that_was_measured(with_ddp_ms: float) -> None:
    stated = f"workload.step_time={{total: 162 ms, with_ddp: {with_ddp_ms} ms}}"
    alone = predict("straggler", *CALM, stated)
    # every copy is rounded to a nanosecond
    assert math.isclose(alone.iteration_time_s.mean, with_ddp_ms / 1e3, abs_tol=1e-6)
    assert math.isclose(alone.baselines_s.compute_only, 0.162, rel_tol=1e-6)
    (known,) = (p for p in alone.provenance if p.input == "workload.step_time.with_ddp")
    assert known.trust == "stated"
    reference = ddpsim.simulate(load("straggler", *CALM, stated), "reference")
    assert reference.iteration_time_s == alone.iteration_time_s


def test_less_than_launching_the_collectives_takes_is_warned_of() -> None:
    cluster = ["cluster.nodes=1", "cluster.gpus_per_node=1", "workload.precision=amp-bf16"]
    steps = [f"workload.step_time={{total: 1 ms, with_ddp: {ms} ms}}" for ms in (1.05, 10)]
    less, more = (predict("resnet50-8xa100", *cluster, "cluster.all_reduce=null", s) for s in steps)
    (warning,) = (said for said in less.warnings if "with_ddp" in said)
    assert "launching DDP's collectives is priced longer" in warning
    assert less.iteration_time_s.mean > 1.05e-3
    assert not [said for said in more.warnings if "with_ddp" in said]


def test_a_profile_may_hold_the_step_with_ddp(tmp_path: Path) -> None:
    """It counts as measured, unless another step is stated, or the times are of another device."""
    parts = ("forward_s", "backward_s", "optimizer_s")
    bare_s = sum(TRANSFORMER["measured"][part] for part in parts)

    def predicted(workload: dict[str, Any], **more: Any) -> ddpsim.Result:
        return ddpsim.simulate(on_one_core(tmp_path, more, workload))

    with_ddp = predicted({}, with_ddp_s=1.1 * bare_s)
    assert math.isclose(with_ddp.iteration_time_s.mean, 1.1 * bare_s, rel_tol=1e-6)
    trust = {p.input: p.trust for p in with_ddp.provenance}
    assert trust["workload.profile.with_ddp_s"] == "measured"
    plain = predicted({})
    assert plain.iteration_time_s.mean < 1.07 * bare_s
    for other in (
        predicted({}, with_ddp_s=None),
        predicted({"step_time": f"{bare_s!r} s"}, with_ddp_s=1.1 * bare_s),
        predicted({}, with_ddp_s=1.1 * bare_s, scaled_to="cpu-core"),
    ):
        assert math.isclose(other.iteration_time_s.mean, plain.iteration_time_s.mean, rel_tol=1e-3)
    least = predicted({}, with_ddp_s=bare_s + 1e-6)  # less than launching collectives takes
    assert bare_s < least.iteration_time_s.mean < plain.iteration_time_s.mean


def test_ddp_on_a_core_takes_the_step_that_was_measured() -> None:
    stated = "workload.step_time={forward: 100 ms, backward: 200 ms, with_ddp: 330 ms}"
    one = ("cluster.nodes=1", "cluster.gpus_per_node=1", "run.jitter=null")
    assert math.isclose(
        mean_ms("gloo-cpu", *one, stated, "ddp.bucket_cap_mb=default"), 330, abs_tol=1e-4
    )


def test_a_step_with_ddp_is_one_of_torchs_default_options() -> None:
    """What other options save or cost comes on top of it, and is not taken for DDP's own work."""
    stated = "workload.step_time={total: 162 ms, with_ddp: 171 ms}"

    def step_ms(*options: str) -> float:
        return mean_ms("straggler", *CALM, stated, *options)

    assert step_ms("ddp.gradient_as_bucket_view=true") < 171 - 1
    assert step_ms("ddp.comm_hook=fp16_compress") > 171 + 0.1
    assert math.isclose(step_ms("ddp.bucket_cap_mb=1"), 171, abs_tol=0.1)
    assert math.isclose(step_ms("ddp.accumulation_steps=2"), 171 + 162, abs_tol=2)
    assert step_ms("cluster.gpus_per_node=4", "cluster.algorithm=data_parallel") != step_ms()


@pytest.mark.parametrize(
    ("step_time", "says"),
    [
        ("1 ms", "35.1 times as fast as the estimate, 35.1 ms: is it one micro-batch"),
        ("400 ms", "11.4 times the estimate, 35.1 ms: is it one micro-batch"),
        ("20 ms", ""),
        ("100 ms", ""),
    ],
)
def test_a_stated_step_of_another_order_is_warned_of(step_time: str, says: str) -> None:
    job = resolve(load("resnet50-2x8-25gbit", f"workload.step_time={step_time}"))
    warned = " ".join(job.model.warnings)
    assert says in warned
    assert bool(says) == ("workload.step_time is" in warned)
