"""The operators that torch dispatches in a step under DDP, of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def operators(*, none: bool, fused: bool, view: bool) -> dict[str, list[str]]:
    """Those of zero_grad and of the backward, after the rebuild, of three layers of two each."""
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
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
        finally:
            dist.destroy_process_group()
    return {"zero_grad": zeroed, "backward": backward}
