"""Where a sweep's points are computed: this process, others of this machine, a Dask cluster."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ddpsim.errors import DdpsimError

__all__ = ["THIS_PROCESS", "ExecutorError", "Workers", "dask_workers", "local_workers"]

_WORTH_S = 1.0  # work that is over sooner needs no other processes, which take half of it to start


class ExecutorError(DdpsimError):
    """An executor cannot be started, or its workers keep dying."""


@dataclass(frozen=True)
class Workers:
    """`start` makes an executor in which `count` calls run at once.

    That is after `after_s` seconds of work in this process, and again when the executor breaks.
    """

    start: Callable[[], Executor]
    count: int
    after_s: float = 0.0


def _no_executor() -> Executor:
    raise ExecutorError("this process computes all by itself")


THIS_PROCESS = Workers(_no_executor, 1, after_s=math.inf)


def local_workers(jobs: int) -> Workers:
    """`jobs` processes of this machine."""
    if jobs == 1:
        return THIS_PROCESS
    spawn = multiprocessing.get_context("spawn")  # a fork would copy locks that threads hold

    def start() -> Executor:
        executor = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_obey_parent)
        with _deferring_ctrl_c():
            executor.submit(int)  # the first call starts the processes
        return executor

    return Workers(start, jobs, _WORTH_S)


@contextmanager
def _deferring_ctrl_c() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, and hide it from processes started in it.

    A worker that is interrupted while it starts, or whose parent is, would print a traceback.
    """
    is_main = threading.current_thread() is threading.main_thread()  # no other is interrupted
    if not is_main or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    seen: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if seen:
            signal.raise_signal(signal.SIGINT)


def _obey_parent() -> None:
    """Ctrl-C is the parent's to handle, and a worker ends with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def dask_workers(address: str, timeout_s: float = 10.0) -> Iterator[Workers]:
    """The workers of a Dask scheduler, whose environments must have this ddpsim.

    Raises ExecutorError without Dask, a scheduler, or a worker.
    """
    try:
        from distributed import Client  # noqa: PLC0415 -- an extra
    except ImportError:
        raise ExecutorError("--dask needs Dask: pip install 'ddpsim[dask]'") from None
    try:
        client: Any = Client(address, timeout=timeout_s, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise ExecutorError(
            f"--dask {address}: no scheduler answers there ({error}); start one with "
            "`dask scheduler`, and give the address that it prints"
        ) from None
    with client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise ExecutorError(
                f"--dask {address}: the scheduler has no workers; start some with "
                f"`dask worker {address}`"
            )
        # points are pure, but two sweeps may ask for the same one: no key is shared
        yield Workers(lambda: client.get_executor(pure=False), threads)
