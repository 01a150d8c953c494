"""One process a host: their output gathered, and all of them ended when one fails."""

from __future__ import annotations

import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Literal

from calibrate.testbed.errors import HostFailedError, TestbedError

GRACE_S = 3.0  # from SIGTERM to SIGKILL
# Python sees a signal that comes in the instant before a wait begins only when the wait returns
LOOK_S = 0.2

OnLine = Callable[[int, Literal["stdout", "stderr"], str], None]


@dataclass(frozen=True)
class HostOutput:
    """What a host's command wrote before it ended with exit code 0."""

    host: int
    stdout: str
    stderr: str


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    timeout_s: float | None,
    on_line: OnLine | None,
) -> tuple[HostOutput, ...]:
    """Run one command a host at once, and wait for all; whatever happens, none is left running.

    Raises HostFailedError for the first that fails, TestbedError when `timeout_s` is over.
    """
    ended: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
    processes: list[_Process] = []
    try:
        for host, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            processes.append(_Process(host, command, environment, ended, on_line))
        _wait(processes, ended, timeout_s)
    finally:
        _stop(processes)
    return tuple(HostOutput(p.host, p.text("stdout"), p.text("stderr")) for p in processes)


class _Process:
    """A process in a group of its own, with a thread for each pipe and one for its end."""

    def __init__(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        ended: queue.SimpleQueue[int | Exception],
        on_line: OnLine | None,
    ) -> None:
        self.host = host
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._on_line = on_line
        self._ended = ended
        self._popen = subprocess.Popen(  # noqa: S603 -- what the user asked to run
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=self._read, args=("stdout", self._popen.stdout), daemon=True),
            threading.Thread(target=self._read, args=("stderr", self._popen.stderr), daemon=True),
            threading.Thread(target=self._await, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return self._popen.returncode

    def text(self, stream: Literal["stdout", "stderr"]) -> str:
        """What it has written."""
        return "".join(self._lines[stream])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, number)

    def close(self) -> None:
        """Wait for its end and the last of its output."""
        for thread in self._threads:
            # a process that left the group may hold a pipe open; it dies with its namespace
            thread.join(timeout=1.0)

    def _await(self) -> None:
        self._popen.wait()
        self._ended.put(self.host)

    def _read(self, stream: Literal["stdout", "stderr"], pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._lines[stream].append(line)
                if self._on_line is None:
                    continue
                try:
                    self._on_line(self.host, stream, line)
                except Exception as error:  # noqa: BLE001 -- raised again by the thread that waits
                    self._ended.put(error)
                    return


def _wait(
    processes: Sequence[_Process],
    ended: queue.SimpleQueue[int | Exception],
    timeout_s: float | None,
) -> None:
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    for _ in processes:
        end = _next(ended, deadline)
        if end is None:
            running = [str(p.host) for p in processes if p.code is None]
            raise TestbedError(
                f"after {timeout_s:g} s host{'s' * (len(running) > 1)} {', '.join(running)} still "
                "ran, and all were stopped: allow more time, or less work"
            )
        if isinstance(end, Exception):
            raise end
        process = processes[end]
        if process.code:
            process.close()
            raise HostFailedError(process.host, process.code, process.text("stderr"))


def _next(ended: queue.SimpleQueue[int | Exception], deadline: float) -> int | Exception | None:
    """The next that ended, None when the time is over."""
    while True:
        left_s = deadline - time.monotonic()
        try:
            return ended.get(timeout=min(LOOK_S, max(0.0, left_s)))
        except queue.Empty:
            if left_s <= 0:
                return None


def _stop(processes: Sequence[_Process]) -> None:
    """End every group, also what a command that has ended left running in it."""
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while any(p.code is None for p in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes:
        process.signal(signal.SIGKILL)
        process.close()
