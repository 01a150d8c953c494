"""Limits that a prediction must keep to: in the shell, in a hook, in GitHub's action."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outcome import Outcome
from ruamel.yaml import YAML

import ddpsim
from ddpsim.units import format_bytes, format_duration, format_percent

ROOT = Path(__file__).parent.parent.parent
SCENARIO = str(ROOT / "scenarios" / "resnet50-2x8-25gbit.yaml")
STATED = ("--set", "workload.step_time=40 ms")
Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def result() -> ddpsim.Result:
    return ddpsim.run(SCENARIO, step_time="40 ms")


def test_conditions_that_hold(cli: Cli, result: ddpsim.Result) -> None:
    step_ms, exposed_ms = 1e3 * result.iteration_time_s.mean, 1e3 * result.exposed_comm_s
    for conditions in (
        f"fits, step < {step_ms + 1} ms, exposed < {100 * exposed_ms / step_ms + 1} %",
        f"exposed <= {exposed_ms + 1} ms,scaling>60 %, memory < 4 GiB",
        "throughput >= 1000 samples/s",
    ):
        done = cli("run", SCENARIO, *STATED, "--require", conditions)
        assert (done.code, done.err) == (0, "")
        assert done.out.splitlines()[2].startswith("step  ")


@pytest.mark.parametrize(
    ("condition", "figure"),
    [
        ("step < 10 ms", lambda r: format_duration(r.iteration_time_s.mean)),
        ("exposed < 1 ms", lambda r: format_duration(r.exposed_comm_s)),
        ("exposed < 1 %", lambda r: format_percent(r.exposed_comm_s / r.iteration_time_s.mean)),
        ("mfu > 99 %", lambda r: format_percent(r.training.mfu)),
        ("memory < 1 GiB", lambda r: format_bytes(r.memory_bytes_per_gpu.total)),
    ],
)
def test_a_condition_that_does_not_hold(
    cli: Cli, result: ddpsim.Result, condition: str, figure: Callable[[Any], str]
) -> None:
    done = cli("run", SCENARIO, *STATED, "--require", f"fits, {condition}, step < 1 h")
    says = f"ddpsim: {condition} is not met: it is {figure(result)}\n"
    assert (done.code, done.err) == (1, says)


@pytest.mark.parametrize(
    ("conditions", "why"),
    [
        ("stp < 1 ms", "'stp < 1 ms' is no condition; write conditions with commas between: fits"),
        ("step < 1 GB", "'step < 1 GB': '1 GB' is a size; write a time"),
        ("step = 1 ms", "'step = 1 ms' is no condition"),
        ("", "'' is no condition"),
        ("scaling > much", "'scaling > much': could not convert"),
    ],
)
def test_what_is_no_condition(cli: Cli, conditions: str, why: str) -> None:
    done = cli("run", SCENARIO, "--require", conditions)
    assert (done.code, done.out) == (2, "")
    assert why in done.err


def test_a_job_that_does_not_fit_is_no_success(cli: Cli) -> None:
    large = ("--set", "workload.batch_per_rank=4096")
    for command in (("run", SCENARIO, *large), ("check", SCENARIO, "--fits", *large)):
        done = cli(*command)
        assert done.code == 1
        assert re.search(r"does not fit: 1\d\d GiB of 80.0 GiB a GPU\n$", done.err)
    assert cli("check", SCENARIO, *large).code == 0


def test_several_files_are_checked(cli: Cli, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("schema: ddpsim/1\n", "utf-8")
    done = cli("check", SCENARIO, str(wrong), SCENARIO, *STATED, "--require", "step < 10 ms")
    assert done.code == 2
    assert done.out.count(": ok, 16 ranks (2 x 8)\n") == 2
    assert f"{wrong}:1:1  cluster: is missing" in done.err
    assert done.err.count("step < 10 ms is not met: it is ") == 2


def test_the_hook_checks_scenarios() -> None:
    read = YAML(typ="safe", pure=True).load
    (hook,) = read((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert hook["entry"] == "ddpsim check"
    for name in ("scenarios/a.yaml", "jobs/scenario.yaml", "scenario-large.yml"):
        assert re.search(hook["files"], name)
    assert not re.search(hook["files"], "docs/mkdocs.yml")


def test_the_action_checks_what_has_changed(tmp_path: Path) -> None:
    """Its script, with a ddpsim that says what it is asked."""
    action = YAML(typ="safe", pure=True).load((ROOT / "action.yml").read_text("utf-8"))
    step = action["runs"]["steps"][-1]
    assert set(re.findall(r"inputs\.([\w-]+)", str(action))) == set(action["inputs"])
    (tmp_path / "ddpsim").write_text('#!/bin/sh\necho "$@"\n', "utf-8")
    (tmp_path / "ddpsim").chmod(0o755)
    (tmp_path / "new.yaml").write_text("schema: ddpsim/1\n", "utf-8")
    (tmp_path / "other.yaml").write_text("name: other\n", "utf-8")
    identity = "-c user.name=a -c user.email=a@b"
    start = (
        f"git init -q . && git {identity} commit -q --allow-empty -m one && BASE=HEAD && git add ."
    )
    path = f"PATH={tmp_path}:$PATH REQUIRE='step < 1 s' FILES=''"

    def said_after(before: str) -> str:
        return subprocess.run(
            ["bash", "-ec", f"{before}; export {path} BASE; {step['run']}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert said_after(start) == "no scenario has changed\n"  # it is not committed
    committed = said_after(f"git {identity} commit -q -m two; BASE=HEAD^")
    assert committed == "check new.yaml --require step < 1 s\n"
