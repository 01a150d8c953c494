"""What the README says is what the program does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from doc_pages import DOCS, README, ROOT, blocks
from ruamel.yaml import YAML
from test_pages import Reader

import ddpsim
from ddpsim.report.text import render

TEXT = README.read_text("utf-8")
BLOCKS = blocks(TEXT)
SAMPLE = ROOT / "scenarios" / "resnet50-2x8-25gbit.yaml"


def in_language(language: str) -> list[str]:
    return [block.body for block in BLOCKS if block.language == language]


def test_the_sample_scenario_is_the_one_that_is_run() -> None:
    read = YAML(typ="safe", pure=True).load
    assert read(in_language("yaml")[0]) == read(SAMPLE.read_text("utf-8"))
    assert f"run scenarios/{SAMPLE.name}" in in_language("sh")[0]


def test_the_sample_output_is_the_start_of_the_answer() -> None:
    shown = render(ddpsim.simulate(ddpsim.load_scenario(SAMPLE)), SAMPLE.name)
    assert shown.partition("\n\n")[2].startswith(in_language("text")[0])


def test_the_gates_commands_are_the_first_two() -> None:
    install, test = in_language("sh")[:2]
    assert re.fullmatch(r"python3 -m venv \.venv && \.venv/bin/pip install -q \. && .*\n", install)
    assert re.fullmatch(r"\.venv/bin/pip install .* && \.venv/bin/python -m pytest .*\n", test)


def test_the_other_blocks_run(cli: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    reader = Reader(cli)
    own = [b for b in BLOCKS if b.language != "text" and b.body not in in_language("sh")[:2]]
    for block in own:
        reader.read(block)
    assert [block.language for block in own] == ["sh", "yaml", "python"]
    assert (tmp_path / "step.html").stat().st_size > 1_000_000


def test_a_shell_runs_the_command_too(tmp_path: Path) -> None:
    """With the installed program, in a process of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["ddpsim", "run", str(SAMPLE)],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert in_language("text")[0] in done.stdout


def test_accuracy_is_told_as_on_its_page() -> None:
    """The same table, and the limits in the same figures; test_docs holds the page."""
    page = (DOCS / "explanation" / "accuracy.md").read_text("utf-8")
    table = page[page.index("| what was measured") :].partition("\n\n")[0]
    assert table in TEXT
    told = " ".join(TEXT.split("## What it does not do")[1].split("\n## ")[0].split())
    for words in (
        "BERT steps on g4dn nodes are predicted within 8 % (median).",
        "In another setup the network was four times as fast.",
        "The median error is 8 % where the device sets the step.",
        "The median error is 16 % where the host sets the step.",
    ):
        assert words in told
        assert words in " ".join(page.split())
    slower = re.search(r"take 1 to \d+ % longer than predicted", told)
    assert slower
    assert slower[0] in " ".join(page.split())


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target
