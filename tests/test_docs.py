"""Worked examples and commands of the pages are what the program does."""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
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


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 4
