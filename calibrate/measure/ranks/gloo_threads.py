"""gloo's threads, before compute: for hosts that have one core for both.

gloo's threads wait for each other by trying again: its loop polls on while another thread holds a
connection's lock, and a buffer that is done yields until the loop has let go of it. With a core to
spare that takes microseconds. Where all threads of a rank share one core, the one that tries keeps
the other from running until the scheduler's next tick: seen by tracing, 4 ms at HZ=250, in every
second all-reduce of 64 KiB. Threads of one real-time priority do not interrupt each other, and so
never wait for one that they have interrupted.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist

from calibrate.measure.host.machine import text_of

__all__ = ["gloo_first"]

_PRIORITY = 1  # the lowest of the real-time ones
_SETTLE_S = 0.1


def gloo_first() -> bool:
    """Give gloo's threads of this rank a real-time priority; every rank calls this together.

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
