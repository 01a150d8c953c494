"""What this machine's small files say, nothing where they cannot be read; and its allocator."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path
from typing import Literal

__all__ = [
    "congestion_control",
    "free_memory_bytes",
    "keep_freed_memory",
    "loopback",
    "stolen_s",
    "text_of",
    "usable_cores",
]

_STEAL = 8  # the place of "steal" in a line of /proc/stat, after the core's name

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's mallopt(3)
_NEVER, _NONE = -1, 0


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
    """Of a file of lines "name figure ..."."""
    for line in text_of(path).splitlines():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    return None


def usable_cores() -> list[int]:
    """Cores that this process may use; the machine's where that is not told (not Linux)."""
    told = getattr(os, "sched_getaffinity", None)
    return sorted(told(0)) if told else list(range(os.cpu_count() or 1))


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
