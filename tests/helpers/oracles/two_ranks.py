"""Real processes of a gloo job, whose first rank writes down what torch did in each case.

Ranks are forks of one process that has imported torch, which takes longer than most cases.
Where only launches matter, rank 0 runs alone, in a group whose collectives do nothing.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Observe = Callable[..., dict[str, Any]]


def run_as_rank(observe: Observe, cases: Sequence[tuple[Any, ...]], *, sends: bool = True) -> None:
    """The main function of a program that `observed_of` starts: every case, on all ranks.

    Without `sends` on rank 0 alone, in a group as large whose collectives do nothing.
    """
    import torch._dynamo  # before the fork: optimizers would import it in every rank
    import torch.distributed  # noqa: F401

    gc.freeze()
    running = set()
    for rank in range(int(sys.argv[1]) if sends else 1):
        pid = os.fork()
        if not pid:
            _run(rank, observe, cases, sends=sends)
        running.add(pid)
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:  # the others would wait for it
            for other in running:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def _run(rank: int, observe: Observe, cases: Sequence[tuple[Any, ...]], *, sends: bool) -> None:
    """One rank, which ends here; what gloo's threads do meanwhile is not under test."""
    import torch
    import torch.distributed as dist

    ranks, store, output = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    try:
        torch.set_num_threads(1)
        if sends:
            file = f"file://{store}"
            dist.init_process_group("gloo", init_method=file, rank=rank, world_size=ranks)
        else:
            join_silent(ranks)
        observed = [observe(*case) for case in cases]
        if rank == 0:
            output.write_text(json.dumps(observed))
        dist.barrier()
    except BaseException:  # noqa: BLE001 -- said, and then the rank ends
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def join_silent(ranks: int) -> None:
    """Be rank 0 of a group that sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def observed_of(program: str, folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """What rank 0 of a few wrote, of a program below this folder that calls `run_as_rank`."""
    output, here = folder / "observed.json", Path(__file__).parent
    script = here / program
    command = [sys.executable, script, str(ranks), folder / "store", output]
    done = subprocess.run(
        command,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": str(here)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())
