"""What a user sees who waits: a bar on a terminal, and what is known when Ctrl-C ends it."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpsim.cli import waiting as module
from ddpsim.cli.waiting import waiting
from ddpsim.diagnosis.diagnose import diagnose
from ddpsim.planning.capacity_plan.plan import plan_capacity
from ddpsim.planning.compare import compare, option
from ddpsim.planning.explain import explain_step
from ddpsim.planning.many import attempt_many
from ddpsim.planning.tune import tune
from ddpsim.prediction.api import load_scenario, simulate
from ddpsim.progress import heard, stage
from ddpsim.result.model import Brief
from ddpsim.scenario.document import load

SCENARIO = Path(__file__).parents[2] / "benchmarks" / "resnet50-ring.yaml"
GLOO = SCENARIO.with_name("resnet50-gloo.yaml")
FEW = ("cluster.nodes=2", "run.iterations=1")
NO_SWITCH = {"algorithm": "nvls"}
SMALL = ("cluster.nodes=2", "run.jitter={sigma: 0.01}", "run.iterations=2")

needs_terminal = pytest.mark.skipif(
    sys.platform == "win32", reason="pseudo-terminals and their signals are POSIX's"
)


def _read_until(terminal: int, wanted: str) -> str:
    """What a terminal shows until some text has come."""
    shown = ""
    while wanted not in shown:
        shown += os.read(terminal, 1024).decode()
    return shown


@needs_terminal
def test_a_terminal_shows_how_far_a_long_question_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AFTER_S", 0.01)
    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    terminal, end = os.openpty()
    with os.fdopen(end, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with waiting(), stage("world sizes", 4) as told:
            _read_until(terminal, "0/4")
            told.advance()
            shown = _read_until(terminal, "1/4")
            shown += _read_until(terminal, "world sizes")
            shown += _read_until(terminal, ":")  # the time left
        _read_until(terminal, "\x1b[2K")  # the bar is gone
    os.close(terminal)


def test_what_is_no_terminal_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AFTER_S", 0.0)
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    with waiting(), stage("world sizes", 4) as told:
        told.advance()
    assert said.getvalue() == ""


def test_ctrl_c_tells_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        with waiting("no plan is chosen"), stage("world sizes", 4) as told:
            told.findings += ["8 GPUs: 40 ms a step"]
            told.advance()
            raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        interrupted()
    assert ended.value.code == 130
    said = "\nstopped after 1 of 4 world sizes; no plan is chosen\n8 GPUs: 40 ms a step\n"
    assert capsys.readouterr() == ("", said)


@needs_terminal
def test_ctrl_c_in_a_terminal_ends_a_plan_at_once() -> None:
    terminal, end = os.openpty()
    command = [sys.executable, "-m", "ddpsim", "plan", str(SCENARIO), "--max-gpus", "65536"]
    command += ["--target", "300M samples in 1 h", "--set", "run.jitter={sigma: 0.02}"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end)
    os.close(end)
    shown = _read_until(terminal, "world sizes")
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=20)
    shown += _read_until(terminal, "GPU: ")
    os.close(terminal)
    assert (run.returncode, out) == (130, b"")
    stopped = r"stopped after \d+ of \d+ world sizes; no plan is chosen\s+1 GPU: "
    assert re.search(stopped, shown)


def test_each_of_many_scenarios_is_counted_once() -> None:
    """Also those that are simulated alone, and those that are none."""
    good, alone = load_scenario(SCENARIO, SMALL), load_scenario(GLOO, FEW)
    wrong = good.model_copy(update={"cluster": good.cluster.model_copy(update=NO_SWITCH)})
    heard_of: list[float] = []
    found = attempt_many([good, alone, wrong], heard_of.append)
    assert [isinstance(each, Brief) for each in found] == [True, True, False]
    assert sum(heard_of) == pytest.approx(3)


@pytest.mark.parametrize(
    ("ask", "what", "says"),
    [
        (lambda: simulate(load_scenario(SCENARIO, SMALL)), "parts of the answer", "the step takes"),
        (lambda: tune(load(SCENARIO, SMALL[:1])), "choices compared", "best so far"),
        (
            lambda: plan_capacity(load_scenario(SCENARIO, SMALL), "9M samples", max_gpus=32),
            "world sizes",
            "8 GPUs: ",
        ),
        (
            lambda: compare(load_scenario(SCENARIO, FEW), [option(load(SCENARIO, SMALL))]),
            "scenarios",
            "ResNet-50, ring: ",
        ),
        (
            lambda: diagnose(load_scenario(SCENARIO, FEW), "50 ms"),
            "parts of the diagnosis",
            "fits best so far: ",
        ),
        (lambda: explain_step(load(SCENARIO, FEW)), "parts of the explanation", "compute 10 %"),
    ],
    ids=["run", "tune", "plan", "compare", "diagnose", "explain-step"],
)
def test_questions_tell_how_far_they_have_come(
    ask: Callable[[], object], what: str, says: str
) -> None:
    with heard() as told:
        ask()
    assert told.what == what
    assert told.ended == pytest.approx(told.total)
    assert any(says in line for line in told.findings)
