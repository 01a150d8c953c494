"""A sweep that is killed or interrupted goes on to the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sweep_of_caps import BIG, expected_csv

ROOT = Path(__file__).resolve().parents[3]
SCENARIO = ROOT / "scenarios" / "resnet50-2x8-25gbit.yaml"
COMMAND = [sys.executable, "-m", "ddpsim", "sweep", str(SCENARIO)]


@pytest.mark.parametrize("seed", [1])
def test_a_killed_sweep_resumes_to_the_same_bytes(tmp_path: Path, seed: int) -> None:
    """At random moments, with the workers' processes, until it ends by itself."""
    chance = random.Random(seed)
    output, journal = tmp_path / "out.csv", tmp_path / "out.csv.journal"
    command = [*COMMAND, *BIG, "-o", str(output), "--resume", "--jobs", "2"]
    kills = 0
    while not output.exists():
        run = subprocess.Popen(
            command,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        before = journal.stat().st_size if journal.exists() else 0
        until = time.monotonic() + 60
        while run.poll() is None and time.monotonic() < until:
            grown = journal.stat().st_size - before if journal.exists() else 0
            if kills < 3 and grown > chance.randrange(10_000, 90_000):
                run.kill()
                kills += 1
            time.sleep(0.01)
        assert run.wait(timeout=60) in (0, -signal.SIGKILL)
    assert kills == 3
    lines = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert lines.pop() == {"finished": True}
    keys = [line["key"] for line in lines]
    assert len(keys) == len(set(keys)) == 25 * 20 + 1  # the scenario's own is another
    assert output.read_text() == expected_csv()


def interruptible(before: str, output: str) -> subprocess.Popen[str]:
    """A big sweep in a session of its own, after some code, with Ctrl-C as in a terminal."""
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"{before}\n"
        "from ddpsim.cli import main; main()"
    )
    command = [sys.executable, "-c", script, *COMMAND[3:], *BIG, "-o", output]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    journal = tmp_path / "out.csv.journal"
    run = interruptible("", str(journal)[:-8])
    while not journal.exists() or journal.stat().st_size < 50_000:
        assert run.poll() is None, run.communicate()
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    kept = len(journal.read_text().splitlines()) - 1
    assert run.returncode == 130
    assert said == f"\nstopped; go on with --resume: {journal} has {kept} points\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of processes are POSIX's")
def test_ctrl_c_while_workers_start_is_as_quiet(tmp_path: Path) -> None:
    journal = tmp_path / "out.csv.journal"
    # to the whole group, as a terminal sends it, between a worker's start and its first orders
    sends = (
        "import os\n"
        "from multiprocessing import util\n"
        "start = util.spawnv_passfds\n"
        "def interrupted(path, args, passfds):\n"
        "    pid = start(path, args, passfds)\n"
        "    if not any('resource_tracker' in str(arg) for arg in args):\n"
        "        os.killpg(0, signal.SIGINT)\n"
        "    return pid\n"
        "util.spawnv_passfds = interrupted"
    )
    run = interruptible(sends, str(journal)[:-8])
    _, said = run.communicate(timeout=60)
    kept = len(journal.read_text().splitlines()) - 1
    assert run.returncode == 130
    assert said == f"\nstopped; go on with --resume: {journal} has {kept} points\n"
