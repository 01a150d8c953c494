"""Each point of a sweep is what run says, and failing points leave the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweep_of_caps import swept

import ddpsim
from ddpsim.errors import ScenarioError
from ddpsim.planning.sweeps import computation
from ddpsim.planning.sweeps.grid import Grid
from ddpsim.planning.sweeps.journal import Journal
from ddpsim.planning.sweeps.sweep import sweep
from ddpsim.report.sweep import render_sweep

ROOT = Path(__file__).resolve().parents[3]
SCENARIO = ROOT / "scenarios" / "resnet50-2x8-25gbit.yaml"
CAPS = "ddp.bucket_cap_mb=default,1,5,25,50"
LINKS = "cluster.inter_node.bandwidth=10 Gbit/s,25 Gbit/s,100 Gbit/s"


def test_a_sweep_warns_as_run_does_at_its_best_point(tmp_path: Path) -> None:
    """Its buckets lie outside the log."""
    scenario, log = ROOT / "scenarios" / "resnet50-nccl-log.yaml", tmp_path / "short.csv"
    log.write_text("size_bytes,time_us,nodes,gpus_per_node\n100000,40,1,8\n1000000,60,1,8\n")
    beyond = [f"cluster.all_reduce={log}", "run.allow_extrapolation=true"]
    found = sweep(scenario, Grid.of([CAPS, *beyond]))
    assert found.best
    settings = [*found.fixed, *map(str, found.best.settings)]
    said = ddpsim.simulate(ddpsim.load_scenario(scenario, settings)).warnings
    assert said
    assert found.warnings == found.to_dict()["warnings"] == said
    text = " ".join(render_sweep(found).split())
    assert all(f"! * {warning}" in text for warning in said)
    assert sweep(scenario, Grid.of([CAPS])).warnings == ()


def test_each_point_is_what_run_says() -> None:
    found = swept(CAPS, LINKS, "workload.batch_per_rank=32")
    assert len(found.points) == 15
    for point in (found.points[0], found.points[7], found.points[14]):
        settings = ["workload.batch_per_rank=32", *map(str, point.settings)]
        result = ddpsim.simulate(ddpsim.load_scenario(SCENARIO, settings))
        assert point.brief
        assert point.brief.iteration_time_s == result.iteration_time_s
        assert point.brief.memory_bytes_per_gpu == result.memory_bytes_per_gpu


def test_options_of_other_strategies_are_set_aside_and_named() -> None:
    """Whether the scenario or another axis states them; each point is `run` with them."""
    own = {
        "schema": "ddpsim/1",
        "workload": {"model": "gpt2", "batch_per_rank": 4, "clip_grad_norm": True},
        "ddp": {"bucket_cap_mb": 50, "forward_sync_buffers": False, "no_sync": False},
        "cluster": {"machine": "dgx-a100", "nodes": 2},
    }
    grid = Grid.of(
        [
            "ddp.strategy=ddp,fully_shard,deepspeed,naive_flat",
            "ddp.fully_shard.reshard_after_forward=true,false",
        ]
    )
    found = sweep(own, grid)
    assert [point.problem for point in found.points] == [None] * 8
    for point in found.points:
        settings = [*map(str, point.settings), *point.set_aside]
        brief = ddpsim.simulate(ddpsim.load_scenario(own, settings))
        assert point.brief
        assert point.brief.iteration_time_s == brief.iteration_time_s
    assert found.set_aside["ddp"] == ("ddp.fully_shard=null",)
    usual = ("ddp.bucket_cap_mb=default", "ddp.forward_sync_buffers=true")
    assert found.set_aside["fully_shard"] == usual
    assert found.set_aside["naive_flat"] == (usual[1], "ddp.fully_shard=null", "ddp.no_sync=true")
    assert found.set_aside["deepspeed"][-1] == "workload.clip_grad_norm=null"
    assert found.to_dict()["set_aside"] == found.set_aside
    assert "set aside   ddp: ddp.fully_shard=null\n" in render_sweep(found)


def test_a_measured_step_says_nothing_of_another_batch_or_device() -> None:
    straggler = ROOT / "scenarios" / "straggler.yaml"
    for setting in ("workload.batch_per_rank=32,64", "cluster.device=v100-sxm-32gb,a100-sxm-40gb"):
        own, other = sweep(straggler, Grid.of([setting])).points
        assert own.brief
        said = (
            f"{setting.partition('=')[0]}: workload.step_time was measured with another, and says"
        )
        assert said in str(other.problem)
    both = Grid.of(["workload.batch_per_rank=64", "workload.step_time=300 ms"])
    assert sweep(straggler, both).points[0].brief


def test_nor_where_one_value_is_set_for_all_points() -> None:
    straggler = ROOT / "scenarios" / "straggler.yaml"
    for fixed in ("workload.batch_per_rank=64", "cluster.device=a100-sxm-40gb"):
        with pytest.raises(ScenarioError, match=r"workload\.step_time was measured with another"):
            sweep(straggler, Grid.of([fixed, "ddp.bucket_cap_mb=5,25"]))
    both = Grid.of(
        ["workload.batch_per_rank=64", "workload.step_time=300 ms", "ddp.bucket_cap_mb=5,25"]
    )
    assert all(point.brief for point in sweep(straggler, both).points)


def test_what_is_stated_of_a_link_tells_points_apart() -> None:
    """A machine has eight NICs, of which a scenario that states other figures says nothing."""
    found = sweep(
        ROOT / "scenarios" / "machines-64xh100.yaml",
        Grid.of(["cluster.inter_node.nics_per_node=1,8"]),
    )
    one, eight = (point.brief for point in found.points)
    assert one
    assert found.own.brief
    assert found.own.brief == eight
    assert one.iteration_time_s.mean > found.own.brief.iteration_time_s.mean


def test_the_scenario_itself_is_a_candidate() -> None:
    """Its own caps are better than those tried."""
    found = swept("ddp.bucket_cap_mb=1,25", "ddp.gradient_as_bucket_view=true")
    assert found.fixed == ("ddp.gradient_as_bucket_view=true",)
    assert found.keeps_own
    assert found.flat_regions()[0].keep == ("default",)
    with_fixed = "the scenario with --set ddp.gradient_as_bucket_view=true"
    shown = render_sweep(found)
    assert f"beside {with_fixed}" in shown.replace("\n            ", " ")
    assert f"keep        {with_fixed}: nothing here is 0.2% better" in shown
    assert not swept("ddp.comm_hook=fp16_compress,allreduce").keeps_own


def test_a_table_keeps_to_the_screen() -> None:
    found = swept(CAPS, "ddp.gradient_as_bucket_view=true,false", LINKS, "cluster.nodes=2,abc")
    assert max(map(len, render_sweep(found).splitlines())) <= 100


def test_a_failing_point_leaves_the_others() -> None:
    found = swept("cluster.nodes=2,zwei,4")
    assert [point.brief is None for point in found.points] == [False, True, False]
    assert found.points[1].problem == (
        "--set cluster.nodes=zwei  cluster.nodes: wanted a whole number, got 'zwei'"
    )
    assert "1 of 3 points cannot be simulated:\n  cluster.nodes=zwei:" in render_sweep(found)


def test_a_sweep_of_nothing_but_errors_is_one() -> None:
    with pytest.raises(ScenarioError) as raised:
        swept("ddp.bucket_cap_mb=0,-1")
    assert len(raised.value.problems) == 2
    with pytest.raises(ScenarioError) as raised:
        swept("ddp.bucket_cap=1,2")
    assert "unknown key. Did you mean 'bucket_cap_mb'?" in str(raised.value)


def test_equal_points_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def counted(scenarios: Any) -> Any:
        computed.extend(scenarios)
        return simulate(scenarios)

    simulate = computation.attempt_many
    monkeypatch.setattr(computation, "attempt_many", counted)
    found = swept("cluster.inter_node.bandwidth=25 Gbit/s,25000 Mbit/s,3.125 GB/s,10 Gbit/s")
    assert len(computed) == 2  # the scenario's own is one of them
    assert len({id(point.brief) for point in found.points}) == 2


def test_a_changed_file_is_another_point(tmp_path: Path) -> None:
    log = tmp_path / "all-reduce-8xa100.csv"
    log.write_bytes((ROOT / "scenarios" / log.name).read_bytes())
    scenario = tmp_path / "scenario.yaml"
    scenario.write_bytes((ROOT / "scenarios" / "resnet50-nccl-log.yaml").read_bytes())
    grid = Grid.of(["ddp.gradient_as_bucket_view=true,false"])
    with Journal(tmp_path / "journal", resume=False) as journal:
        sweep(scenario, grid, journal=journal)
        known = len(journal.outcomes)
        sweep(scenario, grid, journal=journal)
        assert len(journal.outcomes) == known == 2
        log.write_text(log.read_text() + "\n")
        sweep(scenario, grid, journal=journal)
        assert len(journal.outcomes) == 4


def test_what_is_wrong_with_every_point_is_said_by_its_place(tmp_path: Path) -> None:
    profile = Path(__file__).parents[3] / "scenarios" / "testbed" / "transformer-2gbit.json"
    path = tmp_path / "s.yaml"
    path.write_text(
        f"""schema: ddpsim/1
workload: {{profile: {profile}, batch_per_rank: 25}}
ddp: {{backend: gloo}}
cluster: {{nodes: 2, gpus_per_node: 1, device: cpu-core, inter_node: {{bandwidth: 1 Gbit/s}}}}
"""
    )
    with pytest.raises(ScenarioError) as raised:
        sweep(path, Grid.of([CAPS]))
    (problem,) = raised.value.problems
    assert (problem.where.rpartition("s.yaml")[2][:3], problem.key) == (
        ":2:",
        "workload.batch_per_rank",
    )
