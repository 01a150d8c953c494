"""The beginning and the end of torch's process groups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["end_process_groups", "process_group"]

_LET_GO_S = 0.2


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
