"""Real ranks of gloo jobs under PyTorch's profiler: jobs of several sizes, one after another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STEPS = 6


def traces_of(folder: Path, *sizes: int) -> None:
    """Write `folder/SIZE/rankR.json` for jobs of so many ranks each."""
    program = [sys.executable, __file__, folder, *map(str, sizes)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def _trace(folder: Path, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, schedule

    torch.set_num_threads(1)
    store = f"file://{folder}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(768, 768), torch.nn.BatchNorm1d(768))]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(128, 768)
    planned = schedule(wait=1, warmup=1, active=STEPS - 2)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=planned, record_shapes=True
    ) as profiler:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json"))
    dist.barrier()


def _fork_ranks(folder: Path, size: int) -> None:
    """Torch is imported once, before them all."""
    folder.mkdir(parents=True)
    ranks = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _trace(folder, rank, size)
            os._exit(0)  # what gloo's threads do while the interpreter ends is not under test
        ranks.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in ranks)


if __name__ == "__main__":
    import torch  # noqa: F401 -- for the ranks

    for count in sys.argv[2:]:
        _fork_ranks(Path(sys.argv[1]) / count, int(count))
