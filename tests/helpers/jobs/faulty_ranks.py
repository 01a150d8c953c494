"""One rank of real gloo DDP with a known fault; tools/record_faults.py starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

LAYERS, WIDTH, BATCH = 4, 1024, 256
STEPS, TRACED = 12, 5
_SLEEP_S = 0.35
_COMPETITORS = 3


def train(fault: str, folder: Path) -> None:
    """One rank: its median step, and a trace."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    dist.barrier()
    bare = _loop("bare")
    alone_s = median([_timed(bare) for _ in range(STEPS)][2:])
    competitors = _compete() if fault == "competing" and rank == 1 else []
    step = _loop(fault)
    times_s = [_timed(step) for _ in range(STEPS)]
    planned = schedule(wait=1, warmup=1, active=TRACED - 2)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=planned, record_shapes=True
    ) as profiler:
        for _ in range(TRACED):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"{fault}-rank{rank}.json"))
    dist.barrier()
    for competitor in competitors:
        competitor.kill()
    if rank == 0:
        found = {"alone_s": alone_s, "step_s": median(times_s[2:])}
        (folder / "steps.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # what gloo's threads do while the interpreter ends is of no interest


def _loop(fault: str) -> Callable[[], None]:
    """One optimizer step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    layers = [m for _ in range(LAYERS) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model: Any = torch.nn.Sequential(*layers)
    if fault == "stale_buckets":
        model = _changing(torch.nn.Sequential, layers)
    if fault != "bare":
        find = fault == "unused_parameters"
        model = DistributedDataParallel(model, find_unused_parameters=find, bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = _batches(fault)
    parts = 4 if fault in ("every_micro_batch", "accumulating") else 1

    def step() -> None:
        optimizer.zero_grad()
        for part in range(parts):
            batch = next(batches)
            if fault == "accumulating" and part < parts - 1:
                with model.no_sync():
                    model(batch).sum().backward()
            else:
                model(batch).sum().backward()
        optimizer.step()

    return step


def _changing(base: Any, layers: Sequence[Any]) -> Any:
    """Layers that run the other way round in the first step."""

    class Changing(base):  # type: ignore[misc]
        runs = 0

        def forward(self, batch: Any) -> Any:
            order = list(self) if self.runs else list(self)[::-1]
            self.runs += 1
            for layer in order:
                batch = layer(batch)
            return batch

    return Changing(*layers)


def _batches(fault: str) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, _: int) -> Any:
            if fault == "slow_loader":
                time.sleep(_SLEEP_S)
            return samples

    samples = torch.randn(BATCH, WIDTH)
    return iter(DataLoader(Samples(), batch_size=None))


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _compete() -> list[subprocess.Popen[bytes]]:
    """Other processes on this rank's core."""
    program = [sys.executable, "-c", "while True: pass"]
    return [subprocess.Popen(program) for _ in range(_COMPETITORS)]


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
