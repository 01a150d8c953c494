"""Disturb measuring jobs at random moments: python tools/fuzzing/faults.py TIMES [SEED].

Each of `calibrate measure`, `rounds` and `profile` runs with two ranks on this machine. A rank is
killed, or stopped and continued, or the command itself is killed. What was measured must be
readable, no process may be left, and `measure --resume` must keep every measurement. As root on
Linux, `measure` and `rounds` also write to a disk that fills up. Prints a table of what came of it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from calibrate.records.record import load_record
from calibrate.records.rounds import load_rounds
from ddpsim.errors import DdpsimError
from ddpsim.importers.profiles.model import profile_of

HELPERS = Path(__file__).resolve().parents[2] / "tests/helpers"
MODEL = "measure_helpers:two_layers"
COMMANDS = {
    "measure": ["measure", "--time-budget-s", "12"],
    "rounds": ["rounds", MODEL, "--budget-s", "60", "--caps", "default,1"],
    "profile": ["profile", MODEL, "--iterations", "200"],
}
READERS: dict[str, Callable[[Path], object]] = {
    "measure": load_record,
    "rounds": load_rounds,
    "profile": lambda path: profile_of(path.name, path.read_text(encoding="utf-8")),
}
FAULTS = ("kill rank 0", "kill rank 1", "stop and continue", "kill the command")
LATEST_S = 30.0  # of a fault, after the start
LONGEST_S = 200.0
STOPPED_S = 3.0
GONE_S = 15.0


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(child) for child in text.split()]


def disturb(fault: str, parent: int, ranks: list[int]) -> None:
    """Do it."""
    with suppress(ProcessLookupError):
        if fault == "kill the command":
            os.kill(parent, signal.SIGKILL)
        elif fault == "stop and continue":
            os.kill(ranks[1], signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(ranks[1], signal.SIGCONT)
        else:
            os.kill(ranks[int(fault[-1])], signal.SIGKILL)


def started(command: str, path: Path, *more: str) -> subprocess.Popen[str]:
    """A command that writes to `path`."""
    words = [sys.executable, "-m", "calibrate", *COMMANDS[command]]
    paths = os.pathsep.join([str(HELPERS), *filter(None, sys.path)])
    return subprocess.Popen(  # noqa: S603 -- our own command
        [*words, "--local", "2", *more, "-o", str(path)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def read(command: str, path: Path) -> str:
    """Whether there is a whole record."""
    if not path.exists():
        return "nothing was measured yet"
    try:
        READERS[command](path)
    except DdpsimError as error:
        return f"FAULT: {error}"
    return "a whole record"


def tried(command: str, fault: str, folder: Path, chance: random.Random) -> str:
    """What came of a fault at a random moment, for `rounds` every other time after a record."""
    path = folder / "out.json"
    with started(command, path) as job:
        due, ranks = time.monotonic() + chance.uniform(0, LATEST_S), list[int]()
        keeps = command == "rounds" and chance.random() < 0.5
        while job.poll() is None and (
            time.monotonic() < due or len(ranks) < 2 or (keeps and not path.exists())
        ):
            time.sleep(0.05)
            ranks = children(job.pid)
        if job.returncode is not None:
            return "had ended before"
        disturb(fault, job.pid, ranks)
        try:
            _, said = job.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            job.kill()
            return "FAULT: hangs"
    return judged(command, fault, path, job.returncode, said, ranks)


def judged(command: str, fault: str, path: Path, code: int, said: str, ranks: list[int]) -> str:
    """What a command left behind."""
    until = time.monotonic() + GONE_S
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        if time.monotonic() > until:
            return "FAULT: a rank lives on"
        time.sleep(0.1)
    lines = [line for line in said.splitlines() if not line.startswith("warning")]
    wanted = int(fault.startswith("kill"))
    if "Traceback" in said or len(lines) > wanted or (code != 0) != bool(wanted):
        return f"FAULT: ended with {code}: {said}"
    if (found := read(command, path)) != "a whole record" or command != "measure" or not wanted:
        return found
    return resumed(path)


def resumed(path: Path) -> str:
    """Whether `--resume` keeps what was measured."""
    before = load_record(path).measurements
    with started("measure", path, "--resume") as job:
        _, said = job.communicate(timeout=LONGEST_S)
    after = {each.key: each for each in load_record(path).measurements}
    if job.returncode or any(after.get(each.key) != each for each in before):
        return f"FAULT: resumed with {job.returncode}: {said}"
    return "a whole record, and --resume kept it"


def on_a_full_disk(command: str, folder: Path, kib: int) -> str:
    """What comes of a disk of so many KiB."""
    size = f"size={kib}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", folder], check=True)  # noqa: S603, S607
    try:
        with started(command, folder / "out.json") as job:
            _, said = job.communicate(timeout=LONGEST_S)
        told = "disk is full" in said or "No space left" in said
        if "Traceback" in said or (job.returncode and not told):
            return f"FAULT: ended with {job.returncode}: {said}"
        found = read(command, folder / "out.json")
        return f"one error; {found}" if job.returncode else f"it had room; {found}"
    finally:
        subprocess.run(["umount", folder], check=True)  # noqa: S603, S607


def main(times: int, seed: int) -> None:
    """Print the table."""
    chance, found = random.Random(seed), Counter[str]()  # noqa: S311 -- no secret
    for command in COMMANDS:
        for fault in FAULTS * times:
            with TemporaryDirectory() as folder:
                said = f"{command}, {fault}: {tried(command, fault, Path(folder), chance)}"
            found[said] += 1
            print(said, flush=True)
        if command != "profile" and os.geteuid() == 0:
            with TemporaryDirectory() as folder:
                said = f"{command}, full disk: {on_a_full_disk(command, Path(folder), 8)}"
            found[said] += 1
            print(said, flush=True)
    for said, count in sorted(found.items()):
        print(f"{count:6}  {said}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
