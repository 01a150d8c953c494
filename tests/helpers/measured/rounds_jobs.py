"""Jobs of two ranks, as torchrun starts them, that measure rounds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from calibrate.records.rounds import RoundOptions
from calibrate.records.variant import Variant

VARIANTS = (Variant(), Variant(bucket_cap_mb=0.004), Variant(accumulation_steps=2))


def run_ranks(options: RoundOptions) -> list[subprocess.CompletedProcess[str]]:
    return run_job(["measured.quick_rounds", options.model_dump_json()])


def run_job(module: Sequence[str]) -> list[subprocess.CompletedProcess[str]]:
    """`python -m` with these, or -c, as two ranks, as torchrun starts them."""
    from calibrate.measure.ranks.launch import free_port

    tests = Path(__file__).parents[2]
    common = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests / "helpers")]),
    }
    command = [sys.executable, *([] if module[0] == "-c" else ["-m"]), *module]
    ranks = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = []
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        ended.append(subprocess.CompletedProcess(command, rank.returncode, out, err))
    return ended
