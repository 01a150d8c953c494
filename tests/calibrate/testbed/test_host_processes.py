"""Commands of all hosts at once: their outputs, and how they end."""

from __future__ import annotations

import os
import queue
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("a testbed needs Linux", allow_module_level=True)

from measured.testbeds import ends

from calibrate.testbed import processes
from calibrate.testbed.errors import HostFailedError, TestbedError


def together(*scripts: str, timeout_s: float | None = 30) -> tuple[processes.HostOutput, ...]:
    """Shell scripts as the commands of hosts, on this machine's own network."""
    commands = [["sh", "-c", script] for script in scripts]
    return processes.run_together(commands, [os.environ] * len(scripts), timeout_s, None)


def test_outputs_by_host() -> None:
    assert together("echo a; echo b >&2", r"printf 'c\377'") == (
        processes.HostOutput(0, "a\n", "b\n"),
        processes.HostOutput(1, "c\ufffd", ""),
    )


def test_no_wait_is_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C in the instant before a wait was seen only when the wait ended (4 of 1,500)."""

    class Watched:
        def __init__(self) -> None:
            self._queue: queue.SimpleQueue[int | Exception] = real()
            self.put = self._queue.put

        def get(self, timeout: float) -> int | Exception:
            waits_s.append(timeout)
            return self._queue.get(timeout=timeout)

    real = queue.SimpleQueue
    waits_s: list[float] = []
    monkeypatch.setattr(queue, "SimpleQueue", Watched)
    together("sleep 0.5", "true", timeout_s=None)
    assert len(waits_s) > 2
    assert max(waits_s) == processes.LOOK_S


def test_a_failing_host_stops_the_others(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.touch()
    with pytest.raises(HostFailedError) as raised:
        together(
            f"sleep 60 & echo $! >> {pids}; trap '' TERM; echo $$ >> {pids}; wait; sleep 60",
            f"until [ $(wc -l < {pids}) -ge 2 ]; do sleep 0.05; done; echo no >&2; exit 3",
        )
    assert str(raised.value) == (
        "host 1 ended with exit code 3, the other hosts were stopped; its stderr:\nno"
    )
    assert (raised.value.host, raised.value.code, raised.value.stderr) == (1, 3, "no\n")
    gone = [int(pid) for pid in pids.read_text().split()]
    assert len(gone) == 2
    assert all(ends(pid) for pid in gone)


def test_what_a_command_leaves_running_is_ended(tmp_path: Path) -> None:
    together(f"sleep 60 >/dev/null 2>&1 & echo $! > {tmp_path}/pid")
    assert ends(int((tmp_path / "pid").read_text()))


def test_an_error_in_on_line_ends_the_run() -> None:
    def broken(host: int, stream: str, line: str) -> None:
        raise BrokenPipeError(line)

    with pytest.raises(BrokenPipeError, match="out"):
        processes.run_together([["sh", "-c", "echo out; sleep 60"]], [os.environ], 30, broken)


def test_error_of_a_killed_host() -> None:
    with pytest.raises(HostFailedError) as raised:
        together("kill -9 $$")
    assert str(raised.value) == (
        "host 0 was killed by SIGKILL, the other hosts were stopped; it wrote nothing to stderr"
    )
    assert str(HostFailedError(0, -40, "")).startswith("host 0 was killed by signal 40,")


def test_error_shows_the_end_of_a_long_stderr() -> None:
    text = "".join(f"line {i}\n" for i in range(30))
    shown = str(HostFailedError(2, 1, text))
    assert shown.splitlines()[0] == (
        "host 2 ended with exit code 1, the other hosts were stopped; "
        "its stderr, last 20 of 30 lines:"
    )
    assert shown.splitlines()[1:] == [f"line {i}" for i in range(10, 30)]


def test_error_of_a_timeout() -> None:
    with pytest.raises(TestbedError) as raised:
        together("sleep 60", "true", "sleep 60", timeout_s=0.5)
    assert str(raised.value) == (
        "after 0.5 s hosts 0, 2 still ran, and all were stopped: allow more time, or less work"
    )
