"""Worked examples and commands of the pages are what the program does."""

from __future__ import annotations

import doctest
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from campaigns import unpacked

import ddpsim
from ddpsim.cluster import build, from_links
from ddpsim.prediction.interval import (
    COMPILED,
    COMPUTE,
    DATA,
    GLOO_SLOWDOWN,
    ROOFLINE,
    UNEQUAL_RANKS,
    UNKNOWN_DEVICE,
)
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.strategies.ddp.costs import DdpCosts

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "collectives.md"
COMMANDS = re.findall(r"^    ddpsim (.*?)(?:  +.*)?$", PAGE.read_text("utf-8"), re.MULTILINE)


def test_worked_examples_are_right() -> None:
    outcome = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert outcome.attempted >= 15
    assert outcome.failed == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_run(
    command: str, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scenario.yaml").write_text("cluster: {machine: dgx-a100, nodes: 1}\n")
    Path("nccl.log").write_text("size_bytes,time_us,nodes,gpus_per_node\n1048576,80,1,8\n")
    outcome = cli(*shlex.split(command))
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out


def test_every_format_is_described() -> None:
    """But for what a sweep and a testbed keep for themselves."""
    own = {"sweep-journal", "testbed"}
    sources = [file for room in ("ddpsim", "calibrate") for file in (ROOT / room).rglob("*.py")]
    texts = [file.read_text("utf-8") for file in sources]
    named = {name for text in texts for name in re.findall(r"\bddpsim\.([a-z-]+)/\d", text)}
    page = (ROOT / "docs" / "formats.md").read_text("utf-8")
    assert "result" in named
    assert {name for name in named - own if f"`ddpsim.{name}/" not in page} == set()


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 4


def test_worked_figures_of_ddps_own_cost() -> None:
    """ResNet-50 on a V100, and what a stated step under DDP makes of its copies and hooks."""
    text = " ".join((ROOT / "docs" / "model.md").read_text("utf-8").split())

    def job(step_time: object) -> Job:
        workload = {"model": "resnet50", "batch_per_rank": 32, "step_time": step_time}
        cluster = {"device": "v100-sxm-32gb", "nodes": 1, "gpus_per_node": 8}
        scenario = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
        return resolve(ddpsim.load_scenario(scenario))

    bare = job("97 ms")
    costs = DdpCosts(bare.scenario.cluster.device, bare.scenario.ddp)
    parameters, buffers = bare.model.parameters, bare.model.buffers
    copies = [costs.copy_in(parameter).device_s for parameter in parameters]
    short = sum(copy_s == costs.device.kernel_floor_s for copy_s in copies)
    copies_s = sum(copies) + costs.copy_back(parameters).device_s
    sent = costs.broadcasts(buffers)
    buffers_s = sum(b.flatten.device_s + b.unflatten.device_s for b in sent)
    assert f"of {len(parameters)} gradients two copies each" in text
    assert f"{short} of them no longer than the floor: {1e3 * copies_s:.3f} ms of 97 ms" in text
    assert f"with its {len(buffers)} buffers {1e3 * (copies_s + buffers_s):.3f} ms" in text
    times = job({"total": "97 ms", "with_ddp": "100 ms"}).ddp_times
    assert f"3 ms of 97 make it {times:.2f}" in text
    own, hooked = (replace(costs, ddp=costs.ddp.model_copy(update=more)) for more in OPTIONS)
    assert f"{1e6 * costs.forward_hook_s:.2f} us a parameter in DDP's forward" in text
    assert f"({1e6 * own.forward_hook_s:.1f} with find_unused" in text
    launched = [round(1e6 * each.launch_collective_s) for each in (costs, hooked)]
    assert "{} us per collective, {} with any `comm_hook`".format(*launched) in text


def test_worked_figures_of_the_hosts_time() -> None:
    """ResNet-50 under autocast, alone and under DDP."""
    text = " ".join((ROOT / "docs" / "model.md").read_text("utf-8").split())
    workload = {"model": "resnet50", "batch_per_rank": 1, "precision": "amp-bf16"}
    cluster = {"device": "a100-sxm-80gb", "nodes": 1, "gpus_per_node": 8}
    scenario = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    job = resolve(ddpsim.load_scenario(scenario))
    works = (*job.model.forward, *job.model.backward)
    kernels, operator_s = (
        sum(work.kernels for work in works),
        job.scenario.cluster.device.operator_s,
    )
    operators_s = sum(work.host_s for work in works)
    assert f"has {operators_s / operator_s:.0f} in forward and backward" in text
    launched_s = operators_s + kernels * job.model.launch_s
    assert f"launch {kernels} kernels" in text
    assert f"{1e3 * launched_s:.1f} ms whatever the batch" in text
    assert f"and {1e3 * job.step_s():.1f} ms a step under DDP" in text


def test_what_compute_keeps_is_the_testbeds() -> None:
    text = " ".join((ROOT / "docs" / "model.md").read_text("utf-8").split())

    def interference(campaign: str) -> Any:
        profile = unpacked() / campaign / "cluster.json"
        return json.loads(profile.read_text("utf-8"))["interference"]

    def kept(points: Any, place: int, share: str = "share") -> str:
        return f"{points[place][share]['value']:.2f}"

    amd, calm = interference("testbed"), interference("testbed-calm-epyc")["compute_kept"]
    whole, half = amd["compute_kept"], amd["half_compute_kept"]
    used = f"{amd['idle_link_use']['value']:.2f}"
    assert (
        f"keeps {kept(whole, 1)} of its speed at 1 Gbit/s, {kept(whole, 2)} at 3 and "
        f"{kept(whole, 4)} at 6 (beside float16 {kept(half, 2)} at 3 and {kept(half, 4)} at 6), "
        f"and two in flight use {used} of each other's idle link"
    ) in text
    alone = [f"{kept(calm, i, 'beside_one')} and not {kept(calm, i)}" for i in (2, 3, 4)]
    assert "{} at 3 Gbit/s, {} at 4.5, {} at 5.5".format(*alone) in text


OPTIONS = ({"find_unused_parameters": True}, {"comm_hook": "allreduce"})


def test_doubts_are_those_that_the_page_states() -> None:
    text = " ".join((ROOT / "docs" / "model.md").read_text("utf-8").split())
    for words, doubt in (
        ("Standard deviations: roofline", ROOFLINE),
        ("tell what the device reaches,", UNKNOWN_DEVICE),
        ("where none do,", COMPILED),
        ("preset links between nodes", from_links.PRESET_NETWORK),
        ("sections 3 and 4;", from_links.CHOSEN_NETWORK),
        ("TCP above 10 Gbit/s", from_links.TCP_NETWORK),
        ("a stated, profiled or traced step", COMPUTE["measured"]),
        ("(a trace bound by its host", COMPUTE["slowed"]),
        ("a log", build.LOG),
        ("stated links", from_links.STATED_LINKS),
        ("preset links in a node", from_links.PRESET_LINKS),
        ("a log of other ranks or beyond its sizes", build.EXTRAPOLATED_LOG),
        ("a loader's rate", DATA),
        ("half or twice as large (standard deviation", build.PRIOR_INTERFERENCE),
    ):
        assert f"{words} {doubt.sigma:.0%}".replace("%", " %") in text, words
    for words, part in (
        ("the upper end grows by", f"{GLOO_SLOWDOWN:.0%} of the hidden communication"),
        ("the upper end grows by", f"{UNEQUAL_RANKS:.0%} of the step"),
    ):
        assert f"{words} {part}".replace("%", " %") in text
