"""What the README says is what the program does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from logs.nccl_log_writer import nccl_log
from ruamel.yaml import YAML

import ddpsim
from ddpsim.report.text import render

ROOT = Path(__file__).resolve().parent.parent.parent
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
    knowing = re.search(r"2 to 16 GPUs: median (\S+)%, worst (\S+)%\.\*\*", page)
    assert knowing
    assert f"within {knowing[1]} % (median), worst {knowing[2]} %" in text
    naive = re.findall(r"\*\* \|[^|]*\| \S+% \| (\S+)% \|", page.split("**Bucket 1 MiB", 1)[0])
    assert len(naive) == 20
    assert f"off by up to {max(abs(float(error)) for error in naive)} %" in text


def test_what_misses_is_told_too() -> None:
    page = (ROOT / "docs" / "validation.md").read_text("utf-8")
    text = " ".join(section("How good is it?").split())
    compute = page.split("## 3.", 1)[1].split("## 4.", 1)[0]
    known, others, _ = (100 * float(rms) for rms in re.findall(r"\*\*(0\.\d+)\*\*", compute))
    assert f"nobody measured is known to {known:.0f} % on GPUs of which published steps" in text
    assert f"to {others:.0f} % on others" in text
    jobs = page.split("### Published throughputs", 1)[1].split("\n## ", 1)[0]
    longer = [
        100 * (float(measured) / float(predicted) - 1)
        for measured, predicted in re.findall(r"\| (\S+) ms \| (\S+) ms \|", jobs)
    ]
    assert len(longer) == 22
    assert f"take {min(longer):.0f} to {max(longer):.0f} % longer than predicted" in text
    sweep = re.search(r"\*\*median (\S+)%, worst \S+%, all low\.\*\*", page)
    assert sweep
    assert f"comes out {sweep[1]} % low (median), and is not explained" in text


TIMES = {4**n * 1024: 20 + 4**n * 0.1 for n in range(10)}  # us: 20 us and 10 GB/s, nobody's


def test_the_first_five_minutes(tmp_path: Path) -> None:
    """As a shell runs them, one after another in an empty folder."""
    (tmp_path / "all_reduce.txt").write_text(nccl_log(root=True, times=TIMES))
    commands = first_block(section("The first five minutes")).splitlines()
    assert [command.split()[1] for command in commands] == [
        *("init", "run", "sweep", "compare", "report", "trace", "plan", "calibrate")
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    said = {}
    for command in commands:
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), (command, done.stderr)
        said[command.split()[1]] = done.stdout
    assert said["run"].startswith(first_block(section("What it prints")))
    assert "best *" in said["sweep"]
    assert "within 0.2%" in said["sweep"]
    assert "ddp.gradient_as_bucket_view=true" in said["compare"]
    assert "USD" in said["plan"]
    assert (tmp_path / "step.html").stat().st_size > 1_000_000
    assert (tmp_path / "trace" / "merged.json").exists()
    assert json.loads((tmp_path / "cluster.json").read_text())["schema"] == "ddpsim.profile/1"
