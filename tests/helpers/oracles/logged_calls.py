"""The collectives that a loop calls in Python, as they are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

Calls = list[tuple[str, int]]


@contextmanager
def logged(calls: Calls) -> Iterator[None]:
    """Append what is called in Python, and DDP's broadcasts of buffers, by dtype."""
    all_reduce, coalesced = dist.all_reduce, dist._broadcast_coalesced
    all_gather = dist.all_gather

    def reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append(("all_reduce", tensor.nbytes))
        return all_reduce(tensor, *args, **options)

    def gather(
        gathered: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        calls.append(("all_gather", tensor.nbytes * len(gathered)))
        return all_gather(gathered, tensor, *args, **options)

    def broadcast(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            sent_bytes = sum(tensor.nbytes for tensor in tensors if tensor.dtype == dtype)
            calls.append(("broadcast", sent_bytes))
        return coalesced(group, tensors, *args)

    dist.all_reduce, dist._broadcast_coalesced = reduce, broadcast
    dist.all_gather = gather
    try:
        yield
    finally:
        dist.all_reduce, dist._broadcast_coalesced = all_reduce, coalesced
        dist.all_gather = all_gather
