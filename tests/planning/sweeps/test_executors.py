"""Processes and Dask workers lose no point, however they die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from sweep_of_caps import BIG, expected_csv, swept

from ddpsim.planning.sweeps.computation import ExecutorError, Workers, dask_workers, local_workers
from ddpsim.planning.sweeps.journal import Journal
from ddpsim.report.sweep import render_csv

ROOT = Path(__file__).resolve().parents[3]
CAPS = "ddp.bucket_cap_mb=default,1,5,25,50"
LINKS = "cluster.inter_node.bandwidth=10 Gbit/s,25 Gbit/s,100 Gbit/s"


class InProcess(Executor):
    """Computes at once; after so many calls its workers die."""

    def __init__(self, calls: int = 10**9, error: Exception | None = None) -> None:
        self.calls, self.error = calls, error or BrokenProcessPool()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls -= 1
        if self.calls < 0:
            future.set_exception(self.error)
        else:
            future.set_result(fn(*args, **kwargs))
        return future


def test_what_a_broken_pool_had_is_computed_by_the_next() -> None:
    pools = iter([InProcess(calls) for calls in (3, 0, 3, 0, 0)])
    workers = Workers(lambda: next(pools, InProcess()), 2)
    assert swept(CAPS, LINKS, workers=workers) == swept(CAPS, LINKS)


def test_a_pool_that_always_breaks_is_an_error() -> None:
    with pytest.raises(ExecutorError, match="keep dying; is memory short"):
        swept(CAPS, workers=Workers(lambda: InProcess(0), 2))


def test_a_point_that_kills_its_worker_is_reported(tmp_path: Path) -> None:
    class Deadly(InProcess):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            if any(scenario.workload.batch_per_rank == 48 for scenario in args[0]):
                return InProcess(0, MemoryError("not enough")).submit(fn, *args)
            return super().submit(fn, *args, **kwargs)

    axis = "workload.batch_per_rank=16,32,48,64"
    with Journal(tmp_path / "j", resume=False) as journal:
        found = swept(axis, workers=Workers(Deadly, 2), journal=journal)
        assert len(journal.outcomes) == 3
    assert [point.problem for point in found.points] == [
        None, None, "its worker failed: MemoryError: not enough", None
    ]  # fmt: skip


def test_processes_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpsim.planning.sweeps.computation._WORTH_S", 0.0)
    assert swept(CAPS, LINKS, workers=local_workers(2)) == swept(CAPS, LINKS)


@pytest.fixture
def dask(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two workers, as processes."""
    pytest.importorskip("distributed", reason="needs the extra dask")
    address = tmp_path / "scheduler.json"
    module = [sys.executable, "-W", "ignore", "-m", "distributed.cli"]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    port = ["--port", "0", "--host", "127.0.0.1", "--scheduler-file", str(address)]
    file = ["--scheduler-file", str(address)]
    limits = ["--nthreads", "1", "--no-nanny", "--no-dashboard"]
    started = [
        subprocess.Popen(
            [f"{module[0]}", "-m", "distributed.cli.dask_scheduler", *port, "--no-dashboard"],
            **quiet,
        )
    ]
    try:
        started += [
            subprocess.Popen(
                [f"{module[0]}", "-m", "distributed.cli.dask_worker", *file, *limits],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                **quiet,
            )
            for _ in range(2)
        ]
        while not address.exists() or not address.read_text().strip():
            time.sleep(0.05)
        where = json.loads(address.read_text())["address"]
        _wait_for_workers(where, 2)
        yield where, started
    finally:
        for process in started:
            process.kill()
            process.wait()


def _wait_for_workers(address: str, count: int) -> None:
    from distributed import Client

    with Client(address, set_as_default=False) as client:
        client.wait_for_workers(count, timeout=60)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.slow
def test_dask_loses_nothing_with_a_worker(
    dask: tuple[str, list[subprocess.Popen[bytes]]],
) -> None:
    address, started = dask
    killed: list[int] = []

    def kill_one(ended: int, total: int) -> None:
        if ended > 100 and not killed:
            started[1].kill()
            killed.append(ended)

    with dask_workers(address) as workers:
        assert workers.count == 2
        found = swept(*BIG[1::2], workers=workers, progress=kill_one)
    assert killed
    assert killed[0] < 500
    assert render_csv(found) == expected_csv()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_no_scheduler() -> None:
    pytest.importorskip("distributed", reason="needs the extra dask")
    with (
        pytest.raises(ExecutorError, match="no scheduler answers there"),
        dask_workers("tcp://127.0.0.1:9", timeout_s=1),
    ):
        pass
