"""What this machine's small files and nvidia-smi say; its allocator. Needs no torch.

A file that cannot be read says nothing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_STEAL = 8  # the place of "steal" in a line of /proc/stat, after the core's name

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's mallopt(3)
_NEVER, _NONE = -1, 0

_MIB = 2**20
_QUERY = "--query-gpu=index,name,memory.free,utilization.gpu"  # MiB, per cent of the last second


def text_of(path: Path) -> str:
    """A small file's text without the space around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def congestion_control(root: Path = Path("/")) -> str:
    """How TCP decides what to send here: "cubic", "bbr", ...; empty where it is not told."""
    return text_of(root / "proc/sys/net/ipv4/tcp_congestion_control")


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that new processes can have, in bytes; None where it is not told.

    Of the machine, or of the container if its limit leaves less (cgroup v2, where it sees its own).
    """
    available_kib = _figure(root / "proc/meminfo", "MemAvailable:")
    left = [] if available_kib is None else [available_kib * 1024]
    group = root / "sys/fs/cgroup"
    limit, used = text_of(group / "memory.max"), text_of(group / "memory.current")
    if limit.isdecimal() and used.isdecimal():
        cache = _figure(group / "memory.stat", "inactive_file") or 0
        left.append(max(0, int(limit) - int(used) + cache))
    return min(left, default=None)


def _figure(path: Path, name: str) -> int | None:
    """The figure of a name in a file of lines "name figure ..."."""
    for line in text_of(path).splitlines():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    return None


def usable_cores() -> list[int]:
    """Cores that this process may use; the machine's where that is not told (not Linux)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def loopback() -> str:
    """The interface that reaches this host alone: lo, or lo0 as on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


def stolen_s(root: Path = Path("/")) -> float:
    """Seconds a core, since boot, in which a hypervisor ran others on the cores of this process.

    In ticks of some 10 ms; 0 where it is not told. Source: proc(5), /proc/stat.
    """
    lines = [line.split() for line in text_of(root / "proc/stat").splitlines()]
    if not lines:  # not Linux: it tells no cores of a process either
        return 0.0
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = [int(line[_STEAL]) for line in lines if len(line) > _STEAL and line[0] in mine]
    return sum(ticks) / len(mine) / os.sysconf("SC_CLK_TCK")


def keep_freed_memory() -> Literal["kept", "returned"]:
    """Have glibc keep freed memory, as CUDA's allocator does; "returned" where there is no glibc.

    Otherwise large tensors go back to the system, and the next step pays for their pages: half as
    long again as a backward of BERT, and more where models take turns. Setting
    MALLOC_TRIM_THRESHOLD_=-1 and MALLOC_MMAP_MAX_=0 does the same.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc
        return "returned"
    kept = tune(_M_MMAP_MAX, _NONE) and tune(_M_TRIM_THRESHOLD, _NEVER)
    return "kept" if kept else "returned"


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
    """GPUs that CUDA_VISIBLE_DEVICES leaves; all where it is not set or does not count them.

    None where it is set and empty, or begins with -1, as CUDA takes it.
    """
    shown = [name.strip() for name in (visible or "").split(",") if name.strip()]
    if visible is not None and shown[:1] in ([], ["-1"]):
        return ()
    counted = {int(name) for name in shown if name.isdecimal()}
    chosen = len(counted) == len(shown) > 0
    return tuple(gpu for gpu in _all_gpus() if not chosen or gpu.index in counted)


def _all_gpus() -> Iterator[Gpu]:
    for line in nvidia_smi(_QUERY, "--format=csv,noheader,nounits").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdecimal():
            index, name, free_mib, busy = fields
            yield Gpu(
                index=int(index),
                name=name,
                free_memory_bytes=int(free_mib) * _MIB if free_mib.isdecimal() else None,
                busy=int(busy) / 100 if busy.isdecimal() else None,
            )
