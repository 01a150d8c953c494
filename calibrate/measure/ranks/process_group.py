"""The beginning and the end of torch's process groups, and the priority of gloo's threads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from calibrate.measure.host.machine import text_of

_LET_GO_S = 0.2

_PRIORITY = 1  # the lowest of the real-time ones
_SETTLE_S = 0.1


@contextmanager
def process_group(backend: str) -> Iterator[None]:
    """A process group of this process, where it is in none yet."""
    if dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        end_process_groups()


def end_process_groups() -> None:
    """End all groups of this process, once gloo's threads have let go of what they sent.

    Seen with torch 2.13 on a busy machine: such a thread waits for Python's lock to drop its last
    tensor, and ~ProcessGroupGloo, which DDP's reducer may call later, for that thread, with the
    lock. Nothing tells when they are done; asleep, this one leaves them the lock.
    """
    time.sleep(_LET_GO_S)
    dist.destroy_process_group()


def gloo_first() -> bool:
    """Give gloo's threads of this rank a real-time priority; every rank calls this together.

    For hosts that have one core for compute and gloo. Its threads wait for each other by trying
    again: its loop polls on while another thread holds a connection's lock, and a buffer that is
    done yields until the loop has let go of it. With a core to spare that takes microseconds. Where
    all threads of a rank share one core, the one that tries keeps the other from running until the
    scheduler's next tick: seen by tracing, 4 ms at HZ=250, in every second all-reduce of 64 KiB.
    Threads of one real-time priority do not interrupt each other, and so never wait for one that
    they have interrupted.

    Returns whether that is permitted: it needs root, and a share of real time for its cgroup.
    """
    dist.barrier()
    time.sleep(_SETTLE_S)  # until the barrier's own threads have come to rest
    try:
        for thread in Path("/proc/self/task").iterdir():
            if "gloo" in text_of(thread / "comm"):
                # of equals by turns: should one wait for another, it is interrupted after 100 ms
                os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(_PRIORITY))
    except PermissionError:
        return False
    time.sleep(_SETTLE_S)  # until all ranks have done so
    return True
