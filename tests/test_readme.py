"""What the README says is what the program does."""

from __future__ import annotations

import re
from pathlib import Path

from ruamel.yaml import YAML

import ddpsim
from ddpsim.report.text import render

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
SAMPLE = ROOT / "scenarios" / "resnet50-2x8-25gbit.yaml"


def section(title: str) -> str:
    return README.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_block(text: str) -> str:
    """The first indented block of a section."""
    lines = text.strip("\n").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    "))
    rest = lines[start:]
    stop = next((i for i, line in enumerate(rest) if line and not line.startswith("    ")), None)
    return "\n".join(line[4:] for line in rest[:stop]).strip("\n")


def test_the_sample_scenario_is_the_one_that_is_run() -> None:
    read = YAML(typ="safe", pure=True).load
    assert read(first_block(section("A scenario"))) == read(SAMPLE.read_text("utf-8"))
    assert f"run scenarios/{SAMPLE.name}" in README


def test_the_sample_output_is_the_start_of_the_answer() -> None:
    shown = render(ddpsim.simulate(ddpsim.load_scenario(SAMPLE)), SAMPLE.name)
    assert shown.startswith(first_block(section("What it prints")) + "\n")


def test_the_figures_are_those_of_the_validation_page() -> None:
    page = (ROOT / "docs" / "validation.md").read_text("utf-8")
    levels = re.search(
        r"Bucket 25 MiB \(p50\): median (\S+)%, worst (\S+)%\. "
        r"With equal GPUs: median (\S+)%, worst (\S+)%",
        page,
    )
    assert levels
    median, worst, equal_median, equal_worst = levels.groups()
    text = " ".join(section("How good is it?").split())
    assert f"median error {median} %, worst {worst} %" in text
    assert f"{equal_median} % and {equal_worst} % without it" in text
    naive = re.findall(r"\*\* \| \S+% \| (\S+)% \|", page.split("**Bucket 1 MiB", 1)[0])
    assert f"off by up to {max(abs(float(error)) for error in naive)} %" in text
