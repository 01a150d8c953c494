"""Two real ranks of a gloo job under PyTorch's profiler."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from two_ranks import run_as_rank

STEPS = 5


def trace(folder: str) -> dict[str, Any]:
    """Each rank writes its trace; rank 0 returns nothing of its own."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, schedule

    rank = int(sys.argv[1])
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, 512)
    planned = schedule(wait=1, warmup=1, active=STEPS - 2)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=planned, record_shapes=True
    ) as profiler:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(Path(folder) / f"rank{rank}.json"))
    return {}


if __name__ == "__main__":
    run_as_rank(trace, [(str(Path(sys.argv[3]).parent / "traces"),)])
