"""Real processes of a gloo job, whose first rank writes down what torch did in each case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def run_as_rank(observe: Callable[..., dict[str, Any]], cases: Sequence[tuple[Any, ...]]) -> None:
    """The main function of a program that `observed_of` starts: every case, on all ranks."""
    import torch
    import torch.distributed as dist

    rank, ranks, store, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    observed = [observe(*case) for case in cases]
    if rank == 0:
        output.write_text(json.dumps(observed))
    dist.barrier()
    os._exit(0)  # what gloo's threads do while the interpreter ends is not under test


def observed_of(program: str, folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """What rank 0 of a few wrote, of a program of this folder that calls `run_as_rank`."""
    output = folder / "observed.json"
    script = Path(__file__).with_name(program)
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(ranks), folder / "store", output],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    return json.loads(output.read_text())
