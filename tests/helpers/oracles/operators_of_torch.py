"""The operators that torch dispatches in a step under DDP, of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def _logged(called: list[str]) -> Iterator[None]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(  # type: ignore[no-untyped-def] # torch's own are untyped
            self, operator, types, args=(), kwargs=None
        ):
            if not str(operator).startswith("profiler."):
                called.append(str(operator))
            return operator(*args, **(kwargs or {}))

    with Log():
        yield


@contextmanager
def _alone() -> Iterator[None]:
    """A gloo job of one process."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def operators(*, none: bool, fused: bool, view: bool) -> dict[str, list[str]]:
    """Those of zero_grad and of the backward, after the rebuild, of three layers of two each."""
    import torch

    with _alone():
        layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        module = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*layers), gradient_as_bucket_view=view
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=fused)
        for _ in range(3):
            zeroed: list[str] = []
            backward: list[str] = []
            with _logged(zeroed):
                optimizer.zero_grad(set_to_none=none)
            loss = module(torch.randn(2, 4)).sum()
            with _logged(backward):
                loss.backward()
            optimizer.step()
    return {"zero_grad": zeroed, "backward": backward}


def broadcasts_of_evaluation(layer: Any) -> list[int]:
    """Of a step of training, three forwards without gradients, and two steps: dtypes sent."""
    import torch
    import torch.distributed as dist

    sent: list[int] = []
    coalesced = dist._broadcast_coalesced

    def broadcast(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        sent[-1] += len({tensor.dtype for tensor in tensors})
        return coalesced(group, tensors, *args)

    with _alone():
        module = torch.nn.parallel.DistributedDataParallel(layer)
        module(torch.randn(2, 4)).sum().backward()
        dist._broadcast_coalesced = broadcast
        try:
            for trains in (False, False, False, True, True):
                sent.append(0)
                module.train(trains)
                with torch.set_grad_enabled(trains):
                    loss = module(torch.randn(2, 4)).sum()
                if trains:
                    loss.backward()
        finally:
            dist._broadcast_coalesced = coalesced
    return sent
