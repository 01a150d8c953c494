"""Compute a sweep's points on workers, in batches, and again where workers die.

Workers are this process, others of this machine, or those of a Dask cluster.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ddpsim.errors import DdpsimError
from ddpsim.planning.many import attempt_many
from ddpsim.planning.sweeps.journal import Outcome
from ddpsim.result.model import Brief
from ddpsim.scenario.schema import Scenario

_BATCH_S = 0.5  # what a batch should take: long beside its way to a worker, soon kept
_LARGEST_BATCH = 256
_RESTARTS = 3  # of broken workers, without a point between

_Batch = list[tuple[str, Scenario]]
_Future = Future[tuple[list[Outcome], float]]
_DYING = (
    "the sweep's worker processes keep dying; is memory short? Try --jobs 1. With -o all points "
    "that have ended are kept: go on with --resume"
)
_WORTH_S = 1.0  # work that is over sooner needs no other processes, which take half of it to start


def _simulated(scenarios: Sequence[Scenario]) -> tuple[list[Outcome], float]:
    """Outcomes, and the seconds they took."""
    begun = monotonic()
    outcomes = [o if isinstance(o, Brief) else str(o) for o in attempt_many(scenarios)]
    return outcomes, monotonic() - begun


class Computation:
    """Points computed by an executor, in batches sized to take half a second each.

    `lost`: why points have no outcome that is worth keeping, as their worker died with them.
    """

    def __init__(self, missing: Mapping[str, Scenario], workers: Workers) -> None:
        # what can be built once for several comes together
        self._waiting = deque(sorted(missing.items(), key=lambda each: _structure(each[1])))
        self._workers = workers
        self._size = 1
        self._broken = 0
        self.lost: dict[str, Outcome] = {}

    def outcomes(self) -> Iterator[dict[str, Outcome]]:
        """The outcomes of each batch as it ends."""
        begun = monotonic()
        while self._waiting and monotonic() - begun < self._workers.after_s:
            batch = self._next()
            yield self._ended(batch, *_simulated([scenario for _, scenario in batch]))
        while self._waiting:
            yield from self._through(self._workers.start())

    def _through(self, executor: Executor) -> Iterator[dict[str, Outcome]]:
        """Outcomes until all is done or the executor breaks; unfinished batches then wait again."""
        under_way: dict[_Future, _Batch] = {}
        try:
            while self._waiting or under_way:
                while self._waiting and len(under_way) < 2 * self._workers.count:
                    batch = self._next()
                    scenarios = [scenario for _, scenario in batch]
                    under_way[executor.submit(_simulated, scenarios)] = batch
                ended = wait(under_way, return_when=FIRST_COMPLETED).done
                for future in sorted(ended, key=_is_broken):
                    yield self._received(under_way, future)
        except (BrokenExecutor, CancelledError):
            self._broken += 1
            if self._broken > _RESTARTS:
                raise ExecutorError(_DYING) from None
        finally:
            for future, batch in under_way.items():
                future.cancel()
                self._waiting.extendleft(reversed(batch))
            executor.shutdown(wait=False)

    def _received(self, under_way: dict[_Future, _Batch], future: _Future) -> dict[str, Outcome]:
        """The outcomes of a batch that ended; raises where the executor is broken."""
        try:
            outcomes, took_s = future.result()
        except (BrokenExecutor, CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 -- whatever the worker died of
            self._failed(under_way.pop(future), error)
            return {}
        return self._ended(under_way.pop(future), outcomes, took_s)

    def _next(self) -> _Batch:
        share = -(-len(self._waiting) // (2 * self._workers.count))
        return [self._waiting.popleft() for _ in range(min(self._size, share))]

    def _ended(
        self, batch: _Batch, outcomes: Sequence[Outcome], took_s: float
    ) -> dict[str, Outcome]:
        self._broken = 0
        if took_s < _BATCH_S / 2:
            self._size = min(2 * self._size, _LARGEST_BATCH)
        elif took_s > 2 * _BATCH_S:
            self._size = max(1, self._size // 2)
        return {key: outcome for (key, _), outcome in zip(batch, outcomes, strict=True)}

    def _failed(self, batch: _Batch, error: BaseException) -> None:
        """Retry the points of a batch one by one after its worker died on it."""
        if len(batch) > 1:
            self._size = 1
            self._waiting.extendleft(reversed(batch))
        else:
            self.lost[batch[0][0]] = f"its worker failed: {type(error).__name__}: {error}"


def _is_broken(future: _Future) -> bool:
    """Whether the executor died, rather than the call."""
    return future.cancelled() or isinstance(future.exception(), BrokenExecutor)


def _structure(scenario: Scenario) -> tuple[object, ...]:
    cluster = scenario.cluster
    sections = (scenario.workload.model_dump_json(), scenario.ddp.model_dump_json())
    return *sections, cluster.nodes, cluster.gpus_per_node


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
