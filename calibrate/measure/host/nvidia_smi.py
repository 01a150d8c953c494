"""What nvidia-smi says of this machine's GPUs; nothing where there is none. Needs no torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Gpu", "gpus", "nvidia_smi"]

_MIB = 2**20
_ASKED = "--query-gpu=index,name,memory.free,utilization.gpu"  # MiB, per cent of the last second


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver sees it; None: it does not tell."""

    index: int
    name: str
    free_memory_bytes: int | None
    busy: float | None  # share of the last second in which kernels ran


def nvidia_smi(*arguments: str) -> str:
    """What the program prints; empty where there is none, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603 -- a fixed program with fixed arguments
            [program, *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def gpus(visible: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves; all where it is not set or does not count them.

    None where it is set and empty, or begins with -1, as CUDA takes it.
    """
    shown = [name.strip() for name in (visible or "").split(",") if name.strip()]
    if visible is not None and shown[:1] in ([], ["-1"]):
        return ()
    counted = {int(name) for name in shown if name.isdecimal()}
    chosen = len(counted) == len(shown) > 0
    return tuple(gpu for gpu in _all_gpus() if not chosen or gpu.index in counted)


def _all_gpus() -> Iterator[Gpu]:
    for line in nvidia_smi(_ASKED, "--format=csv,noheader,nounits").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdecimal():
            index, name, free_mib, busy = fields
            yield Gpu(
                index=int(index),
                name=name,
                free_memory_bytes=int(free_mib) * _MIB if free_mib.isdecimal() else None,
                busy=int(busy) / 100 if busy.isdecimal() else None,
            )
