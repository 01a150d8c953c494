"""Lists of names, and words that the first screen shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from outcome import Outcome

from ddpsim.glossary import lookup
from ddpsim.scenario import catalog

Cli = Callable[..., Outcome]
GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("kind", ["model", "device", "machine"])
def test_every_name_is_listed(cli: Cli, kind: str) -> None:
    rows = cli("list", f"{kind}s").out.splitlines()
    assert [row.split()[0] for row in rows] == [kind, *catalog.spellings(kind)]
    assert json.loads(cli("list", f"{kind}s", "--json").out)[0][kind] == rows[1].split()[0]


def test_without_a_word_the_kinds_are_listed(cli: Cli) -> None:
    assert cli("list").out.split() == ["models", "devices", "machines", "failures", "prices"]


def test_failures_and_prices_are_listed(cli: Cli) -> None:
    failures = cli("list", "failures").out.splitlines()
    assert [row.split()[0] for row in failures] == ["failures", *catalog.failure_names()]
    (p5,) = (row.split() for row in cli("list", "prices", "p5.48x").out.splitlines()[1:])
    assert p5[:6] == ["p5.48xlarge", "AWS", "6.88", "2.96", "-", "2026-09-05"]


def test_words_filter_a_list(cli: Cli) -> None:
    """By any cell, and by the other spellings of a name."""
    found = cli("list", "machines", "H100", "efa").out.splitlines()[1:]
    assert found
    assert all("h100" in row and "efa" in row for row in found)
    assert cli("list", "machines", "coreweave-b200").out.splitlines()[1].startswith("dgx-b200 ")
    nothing = cli("list", "models", "deepseek")
    assert (nothing.code, nothing.out) == (2, "")
    assert "none of the models holds 'deepseek'" in nothing.err
    assert "Did you mean 'models'?" in cli("list", "modles").err


@pytest.mark.parametrize("name", ["resnet50-2x8-25gbit", "straggler", "gloo-cpu"])
def test_words_of_the_first_screen_are_explained(name: str) -> None:
    lines = (GOLDEN / f"{name}.txt").read_text("utf-8").splitlines()
    labels = {line[:12].strip() for line in lines[1:] if line[:1].isalpha()}
    parts = {line[2:15].strip() for line in lines if line.startswith("  ") and "%  #" in line}
    trusted = lines[[line[:5] for line in lines].index("trust") :]
    trusted = [line for line in trusted if line[:12].strip() in ("trust", "")]
    trusted = [line for line in trusted if line[12] != " "][:2]  # not what goes on below
    labels |= parts | {line[12:].split("  ")[0] for line in trusted}
    assert {"bottleneck", "amount", "trust", "forward"} <= labels
    own = {"measured", "WARNING", "next", "more"}  # what they are stands behind them
    assert {word for word in labels - own if lookup(word) is None} == set()


@pytest.mark.parametrize(
    "term",
    ["ring Simple", "first iteration", "ring all-reduce", "strategies", "devices", "megatron"],
)
def test_words_of_the_details_are_explained(term: str) -> None:
    assert lookup(term)


def test_a_key_that_is_set_twice_is_refused(cli: Cli) -> None:
    twice = ("--set", "cluster.nodes=1", "--set", "cluster.nodes=2")
    for command in ("run", "check", "sweep"):
        done = cli(command, "scenarios/resnet50-8xa100.yaml", *twice)
        assert done.code == 2
        assert "'cluster.nodes' is set twice: cluster.nodes=1 and cluster.nodes=2" in done.err


def test_an_optimizer_may_be_its_name_alone(cli: Cli) -> None:
    done = cli("check", "scenarios/resnet50-8xa100.yaml", "--set", "workload.optimizer=adamw")
    assert done.code == 0
