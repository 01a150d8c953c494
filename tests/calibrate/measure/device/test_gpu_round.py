"""tools/gpu_round.sh: each part runs under its limit whatever became of the others.

With a program in the place of Python that fails, or hangs, as the test says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUND = Path(__file__).parents[4] / "tools" / "gpu_round.sh"
PARTS = [
    *("install", "machine", "doctor", "device", "profile-resnet50", "profile-vit_b_16"),
    *("profile-gpt2", "measure", "tests", "fit"),
]
PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
*calibrate\\ doctor*) exit 3 ;;
*calibrate\\ device*) echo half > "$OUT/device-record.json"; exit 0 ;;
*calibrate\\ measure*) sleep 60 ;;
esac
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs bash and timeout(1)")


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    out = folder / "out"
    out.mkdir(exist_ok=True)
    environment = {"PYTHON": str(python), "OUT": str(out), "CALLS": str(folder / "calls")}
    return subprocess.run(
        ["bash", str(ROUND), *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )


def summary(folder: Path) -> dict[str, int]:
    rows = (folder / "out" / "summary.tsv").read_text().splitlines()
    return {name: int(code) for name, code, _ in (row.split("\t") for row in rows)}


def test_a_part_that_fails_or_hangs_does_not_stop_the_next(tmp_path: Path) -> None:
    done = run(tmp_path, "--seconds", "20")
    assert done.returncode == 0, done.stderr
    codes = summary(tmp_path)
    assert list(codes) == PARTS
    failed = {name for name, code in codes.items() if code}
    assert failed - {"machine"} == {"doctor", "measure"}  # a machine without nvidia-smi
    assert (codes["doctor"], codes["measure"]) == (3, 124)
    assert {path.stem for path in (tmp_path / "out").glob("*.log")} == set(PARTS)
    before = (tmp_path / "calls").read_text()
    assert "device --resume" not in before

    again = run(tmp_path, "--seconds", "20", "--failed", str(tmp_path / "out" / "summary.tsv"))
    assert again.returncode == 0, again.stderr
    assert set(summary(tmp_path)) - {"machine"} == {"install", "doctor", "measure"}


def test_a_named_part_goes_on_from_its_record(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "device-record.json").write_text("half")
    run(tmp_path, "--only", "device,models")
    assert list(summary(tmp_path)) == ["install", "device", "models"]
    calls = (tmp_path / "calls").read_text()
    assert "--time-budget-s 195 --resume" in calls
    assert "models.jsonl --seconds 440 --device cuda" in calls


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--quick",), "unknown option --quick"),
        (("--seconds", "soon"), "--seconds soon: wanted a whole number from 1"),
        (("--failed", "nowhere.tsv"), "no such file: nowhere.tsv"),
        (("--only",), "--only needs a value"),
    ],
)
def test_wrong_options_are_told(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run(tmp_path, *options)
    assert (done.returncode, done.stderr) == (2, f"gpu_round: {said}\n")
