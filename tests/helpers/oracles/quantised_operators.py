"""The operators that torch's quantising hooks dispatch, among ranks that are not there."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks
from torch.utils._python_dispatch import TorchDispatchMode

# views, and resizes of nothing, launch nothing
_NO_KERNEL = {"view", "select", "slice", "detach", "unbind", "permute", "resize_", "lift_fresh"}


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(  # type: ignore[no-untyped-def] # torch's own are untyped
        self, operator, types, args=(), kwargs=None
    ):
        self.names.append(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


class _Group:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.ranks


class _Gathered:
    """An all-gather that is done: its future has one tensor of all ranks, as NCCL's has."""

    def __init__(self, outputs: list[torch.Tensor], sent: torch.Tensor, **_: Any) -> None:
        self.shape = len(outputs), sent

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        ranks, sent = self.shape
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        with torch.utils._python_dispatch._disable_current_modes():
            future.set_result([torch.stack(ranks * [sent])])
        return future


class _Bucket:
    def __init__(self, elements: int) -> None:
        self.tensor = torch.randn(elements)

    def buffer(self) -> torch.Tensor:
        return self.tensor


def operators_of_hook(name: str, elements: int, ranks: int) -> int:
    """Those of one bucket of float32, apart from views."""
    hook = getattr(quantization_hooks, f"quantization_{name}_hook")
    bucket, counted = _Bucket(elements), _Counted()
    with patch.object(dist, "all_gather", _Gathered), counted:
        hook(_Group(ranks), bucket).wait()
    return sum(name not in _NO_KERNEL for name in counted.names)
