"""A process that answers the page's questions, and is replaced where one takes too long."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from threading import Lock
from typing import Any

from ddpsim.errors import Problem
from ddpsim.explore.answer import Given, answered, problem


class Worker:
    """Answers one question at a time, each within `limit_s` seconds.

    A step of any size is computed elsewhere: the server stays quick, and memory goes with it.
    """

    def __init__(self, given: Given, limit_s: float) -> None:
        self._given, self._limit_s, self._lock = given, limit_s, Lock()
        self._running: tuple[Connection, SpawnProcess] | None = None

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer; one that takes too long, or fails for a fault of ours, is a problem."""
        part = str(question.get("part"))
        with self._lock:
            connection = self.start()
            try:
                connection.send(question)
                if connection.poll(self._limit_s):
                    answered: dict[str, Any] = connection.recv()
                    return answered
                reason = f"takes longer than the {self._limit_s:g} s of this page; use ddpsim run"
            except (EOFError, OSError):
                reason = "ended the process that simulates; this is a fault of ddpsim"
            self.close()
            self.start()
        return problem(part, Problem(self._given.name, "", reason))

    def start(self) -> Connection:
        """Return the pipe to the process, which is started if there is none."""
        if self._running is None:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._given), daemon=True)
            process.start()
            theirs.close()
            self._running = ours, process
        return self._running[0]

    def close(self) -> None:
        """End the process, if there is one."""
        if self._running:
            connection, process = self._running
            self._running = None
            connection.close()
            process.kill()
            process.join()
            process.close()


def _serve(connection: Connection, given: Given) -> None:
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            connection.send(answered(connection.recv(), given))
