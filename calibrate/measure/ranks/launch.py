"""`local`: start the ranks of a job on this machine, and say which one failed and why.

A rank gets its options from the start, and leaves its last words and an exit code.
Rank 0 shows progress. Knows nothing of what they do, nor of torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from calibrate.measure.errors import LostContactError, MeasureError, StoppedError
from calibrate.measure.host.machine import loopback
from calibrate.records.record import JobOptions
from calibrate.signals import Ended, as_exceptions, name_of
from ddpsim.errors import DdpsimError

_T = TypeVar("_T")
_Options = TypeVar("_Options", bound=JobOptions)
_GRACE_S = 10.0  # for the other ranks to notice, before they are ended

ENDS_WITH_STARTER = "ends-with-starter"  # argument of a rank whose standard input is held open
# exit codes of a rank whose error is the last line that it wrote; the second if others are to blame
FAILED, LOST = 3, 4


def run(work: Callable[[_Options], _T], options: _Options, ranks: int | None = None) -> _T | None:
    """What a job's work gives in the job of torchrun's variables; None of ranks started here.

    Raises MeasureError as the work does; see `local`.
    """
    if ranks is None:
        return work(options)
    local(ranks, work.__module__, options)
    return None


def local(ranks: int, module: str, options: JobOptions, *, nodes: int = 1) -> None:
    """Run `python -m module options` as `ranks` ranks here, one compute thread each, to their end.

    `nodes` above 1 only pretends: ranks are numbered as if they were on so many machines. Raises
    MeasureError with the reason of the rank that failed first, and what is kept of the work.
    Ctrl-C, SIGTERM and SIGHUP end all ranks: a StoppedError, or SystemExit after its words.
    """
    if ranks < 1 or ranks % nodes:
        raise MeasureError(f"{ranks} ranks cannot be spread over {nodes} nodes")
    kept = options.kept
    with tempfile.TemporaryDirectory(prefix="ddpsim-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with as_exceptions():
                # as they start, so that a signal between two of them finds the first
                processes.extend(_started([module, options.model_dump_json()], ranks, nodes, logs))
                _wait(processes)
        except KeyboardInterrupt:
            raise StoppedError(f"stopped. {kept}".rstrip()) from None
        except Ended:
            with suppress(OSError):  # a terminal that is gone
                print(f"stopped. {kept}".rstrip(), file=sys.stderr, flush=True)
            raise
        finally:
            _end(processes)
        problem, words = _problem([process.returncode for process in processes], logs)
    if problem:
        raise MeasureError(problem if words else f"{problem} {kept}".rstrip())


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _started(
    job: Sequence[str], ranks: int, nodes: int, logs: Sequence[Path]
) -> Iterator[subprocess.Popen[bytes]]:
    command, port = [sys.executable, "-m", *job, ENDS_WITH_STARTER], free_port()
    for rank, log in enumerate(logs):
        with log.open("wb") as written:
            yield subprocess.Popen(  # noqa: S603 -- our own modules
                command,
                env=_variables(os.environ, rank, ranks, nodes, port),
                stdin=subprocess.PIPE,  # its end tells a rank that we are gone, however that came
                stderr=written,
                start_new_session=True,  # Ctrl-C reaches us alone, and we end the ranks
            )


def _variables(
    given: Mapping[str, str], rank: int, ranks: int, nodes: int, port: int
) -> dict[str, str]:
    """torchrun's variables for a rank; talk stays on the loopback interface unless told."""
    per_node = ranks // nodes
    return {
        "GLOO_SOCKET_IFNAME": loopback(),
        **given,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all ranks have ended, or one failed and the others had time to notice."""
    deadline = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.returncode for process in processes):
            deadline = time.monotonic() + _GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 3
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait()
        if process.stdin:
            process.stdin.close()


def _problem(codes: Sequence[int], logs: Sequence[Path]) -> tuple[str, bool]:
    """Why a job failed, and whether a rank said it itself; empty if it did not."""
    if FAILED in codes:
        return _last_line(logs[codes.index(FAILED)]), True
    killed = [rank for rank, code in enumerate(codes) if code < 0 and code != -signal.SIGTERM]
    if killed:
        rank, by = killed[0], -codes[killed[0]]
        lines = logs[rank].read_text(encoding="utf-8", errors="replace").splitlines()
        words = [line for line in lines if "NCCL error" in line or "Watchdog caught" in line]
        if by == signal.SIGABRT and words:  # by NCCL's watchdog (ProcessGroupNCCL.cpp)
            return f"NCCL ended rank {rank}: {words[0].strip()}", False
        return f"rank {rank} was killed by {name_of(by)}: was memory short?", False
    for rank, code in enumerate(codes):
        if code not in (0, LOST, -signal.SIGTERM):
            return f"rank {rank} ended with exit code {code}: {_last_line(logs[rank])}.", False
    return (_last_line(logs[codes.index(LOST)]), True) if LOST in codes else ("", False)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def run_rank(work: Callable[[_Options], object], options: type[_Options]) -> NoReturn:
    """Do a job's work, with its options as JSON from the first argument, and end this process.

    ENDS_WITH_STARTER as the second argument ends it too, once its standard input is closed.
    """
    code = 0
    if sys.argv[2:] == [ENDS_WITH_STARTER]:
        threading.Thread(target=_end_with_starter, daemon=True).start()
    if isinstance(sys.stdout, TextIOWrapper):  # a file's name may be what its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        work(options.model_validate_json(sys.argv[1]))
    except DdpsimError as error:
        print(" ".join(str(error).split()), file=sys.stderr, flush=True)
        code = LOST if isinstance(error, LostContactError) else FAILED
    end_now(code)


def end_now(code: int) -> NoReturn:
    """End this process without a clean-up by torch's threads, which may wait for a dead peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_starter() -> None:
    """End this process when the one that started it has ended, which holds standard input open."""
    while os.read(0, 1):
        pass
    os._exit(LOST)


class Reporter(ExitStack):
    """Says what is done; `speaks` is False on every rank but the first."""

    def __init__(self, total: int, *, speaks: bool, console: Console | None = None) -> None:
        super().__init__()
        self._speaks = speaks
        self._console = console or Console(soft_wrap=True, highlight=False)
        progress, counted = TextColumn("{task.description}"), MofNCompleteColumn()
        columns = progress, BarColumn(), counted, TimeElapsedColumn()
        is_drawn = speaks and self._console.is_terminal
        bar = Progress(*columns, console=self._console, transient=True, disable=not is_drawn)
        self._bar = self.enter_context(bar)
        self._task = self._bar.add_task("measuring", total=total)

    def begin(self, title: str) -> None:
        """A task begins."""
        self._bar.update(self._task, description=escape(title))

    def done(self, line: str = "") -> None:
        """A task is over; `line` says how."""
        self._bar.advance(self._task)
        if line:
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line."""
        if self._speaks:
            self._console.print(escape(line))
