"""The page is one file of true figures, and what is in a scenario is only text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
import pytest
from outcome import Outcome
from page_reading import (
    EVIL,
    SLOW_NETWORK,
    Page,
)

from ddpsim.planning.storyboard import storyboard
from ddpsim.report.page.page import page
from ddpsim.result.storyboard import Storyboard
from ddpsim.units import format_duration

SCENARIOS = Path(__file__).parent.parent.parent / "scenarios"
FAST_HOST = "cluster.device={preset: a100-sxm-80gb, operator: 12 us}"
SECTIONS = ("timeline", "buckets", "breakdown", "sweep", "scaling", "sensitivity", "trust")
Cli = Callable[..., Outcome]


def test_the_page_is_whole_and_semantic(board: Storyboard) -> None:
    found = Page(page(board))
    assert found.of("html") == [{"lang": "en"}]
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {*SECTIONS, "left-out"} <= set(ids)
    assert len(found.of("h1")) == 1
    assert len(found.of("caption")) == len(found.of("table"))
    assert all(attributes.get("scope") in {"col", "row"} for attributes in found.of("th"))
    labelled = {attributes["for"] for attributes in found.of("label")}
    assert labelled == {"cap", "rank"}
    anchors = {(attributes["href"] or "")[1:] for attributes in found.of("a")}
    assert anchors <= set(ids)
    for name, part in found.tags:
        assert part.get("role") != "img" or part["aria-label"], name


@pytest.mark.parametrize("name", ["board", "noisy", "gloo", "measured"])
def test_figures_are_plotlys(name: str, request: pytest.FixtureRequest) -> None:
    figures = Page(page(request.getfixturevalue(name))).data["figures"]
    assert set(figures) == {"sweep", "scaling", "sensitivity"}
    colours = re.compile(r'"--[a-z-]+"')
    for figure in figures.values():
        go.Figure(json.loads(colours.sub('"#123456"', json.dumps(figure))))


def test_colours_are_the_style_sheets(board: Storyboard) -> None:
    text = page(board)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style
    light, _, dark = style[1].partition("prefers-color-scheme: dark")
    assert dark
    used = set(re.findall(r'"(--[a-z-]+)"', json.dumps(Page(text).data)))
    assert used <= set(re.findall(r"(--[a-z-]+):", light))


def test_the_same_input_gives_the_same_bytes(measured: Storyboard) -> None:
    again = storyboard(SCENARIOS / "resnet50-nccl-log.yaml")
    assert page(again) == page(measured)


def test_the_page_needs_no_network(board: Storyboard) -> None:
    text = page(board)
    found = Page(text)
    for tag, attributes in found.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith("#"), tag
        assert not any(key.startswith("on") for key in attributes), tag
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    (policy,) = [a["content"] for a in found.of("meta") if a.get("http-equiv")]
    assert policy
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in policy
    assert len(text) < 6_000_000


def test_names_are_only_text(board: Storyboard) -> None:
    found = Page(page(board))
    assert found.title == EVIL
    assert EVIL in found.words
    assert not found.of("img")
    assert len(found.scripts) == 4


def test_names_of_devices_are_only_text() -> None:
    device = {
        "name": EVIL,
        "peak_flops": {"fp32": "9 TFLOP/s", "bf16": "150 TFLOP/s"},
        "memory": "40 GB",
        "memory_bandwidth": "1 TB/s",
    }
    slower = json.dumps({1: {"device": device}}).replace('"1"', "1")
    found = Page(
        page(
            storyboard(
                SLOW_NETWORK, ["workload.precision=amp-bf16", f"cluster.other_nodes={slower}"]
            )
        )
    )
    assert f"Held up by node 1's {EVIL}" in found.words
    assert not found.of("img")
    assert len(found.scripts) == 4


def test_what_cannot_be_simulated_is_named(measured: Storyboard) -> None:
    (one,) = measured.scaling
    assert one == measured.result
    settings_left_out = [entry.what for entry in measured.left_out]
    assert settings_left_out == [
        "--set cluster.nodes=2",
        "--set cluster.nodes=4",
    ]
    words = Page(page(measured)).words
    for entry in measured.left_out:
        assert entry.reason in words
    assert "was measured on 8 ranks (1 node x 8), but the cluster has 16" in words


def test_warnings_of_other_choices_are_told(gloo: Storyboard) -> None:
    assert gloo.scaling[2].nodes == 4
    new = [w for w in gloo.scaling[2].warnings if w not in gloo.result.warnings]
    assert new
    words = Page(page(gloo)).words
    assert all(warning in words for warning in new)


def test_the_scenarios_own_cap_has_a_place(noisy: Storyboard) -> None:
    assert [choice.cap for choice in noisy.choices][:3] == ["default", "[2,7]", "1"]
    assert noisy.current == 1
    assert noisy.choices[1].result == noisy.result


def test_a_single_rank_has_a_page() -> None:
    alone = storyboard(SLOW_NETWORK, ["cluster.nodes=1", "cluster.gpus_per_node=1", FAST_HOST])
    assert alone.choices[0].step.ranks[0].exposed_ns == 0
    assert "makes no difference" in Page(page(alone)).words


def test_sensitivity_is_the_jobs_own(board: Storyboard) -> None:
    found = {entry.what: entry for entry in board.sensitivity}
    changes = [entry.change_s for entry in board.sensitivity]
    assert changes == sorted(changes)
    assert changes[0] == found["a network that takes no time, nor slows compute"].change_s
    words = Page(page(board)).words
    for entry in board.sensitivity:
        assert f"{entry.what}{format_duration(entry.change_s)}{entry.change:+.1%}" in words


def test_the_command_writes_a_page(cli: Cli, tmp_path: Path) -> None:
    scenario, output = SCENARIOS / "resnet50-nccl-log.yaml", tmp_path / "page.html"
    done = cli("report", str(scenario), "-o", str(output), "--set", "ddp.bucket_cap_mb=7.5")
    assert done.code == 0
    assert re.fullmatch(
        rf"{re.escape(str(output))}: 1\.\d+ MiB, opens in any browser, without a network\n",
        done.out,
    )
    assert done.err.startswith("not shown: --set cluster.nodes=2: cluster.all_reduce: all-reduce-")
    found = Page(output.read_text("utf-8"))
    assert "7.5" in [choice["cap"] for choice in found.data["timeline"]["choices"]]
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]


def test_wrong_input_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    done = cli("report", str(SLOW_NETWORK), "-o", str(output), "--set", "cluster.nodes=0")
    assert (done.code, done.out) == (2, "")
    assert "cluster.nodes: 0 is out of range: wanted at least 1" in done.err
    assert not output.exists()


def test_a_scenario_is_not_overwritten(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "scenario.yaml"
    own.write_text(SLOW_NETWORK.read_text("utf-8"), "utf-8")
    done = cli("report", str(own), "-o", str(own))
    assert (done.code, done.out) == (2, "")
    assert "is the scenario itself; name another file" in done.err
    assert own.read_text("utf-8") == SLOW_NETWORK.read_text("utf-8")
    done = cli("report", str(own), "-o", str(tmp_path))
    assert (done.code, done.out) == (2, "")
    assert "is a folder; name a file in it" in done.err
