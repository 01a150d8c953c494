"""What `doctor` looks at: variables, interfaces, the master's port, GPUs, memory, load."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from calibrate.measure.errors import MeasureError
from calibrate.measure.host.machine import (
    Gpu,
    congestion_control,
    free_memory_bytes,
    gpus,
    text_of,
    usable_cores,
)

MasterState = Literal["unset", "free", "in use", "answers", "refused", "silent", "unknown host"]
_IFF_UP = 1


@dataclass(frozen=True)
class Host:
    """A node as `inspect_host` saw it."""

    backend: Literal["gloo", "nccl"]
    ranks_here: int
    nodes: int
    cores: int
    variables: Mapping[str, str] = field(default_factory=dict)
    interfaces: Mapping[str, bool] = field(default_factory=dict)  # name: is it up
    infiniband: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()  # looked for with NCCL alone
    host_address: str = ""  # what this host's own name resolves to; empty: to nothing
    master: MasterState = "unset"
    free_memory_bytes: int | None = None
    load: float = 0.0
    governor: str = ""
    congestion_control: str = ""


def inspect_host(
    backend: Literal["gloo", "nccl", "auto"],
    variables: Mapping[str, str],
    ranks_here: int | None = None,
    nodes: int | None = None,
    root: Path = Path("/"),
) -> Host:
    """What can be seen of this node; `root` is where /proc and /sys are looked for."""
    seen = () if backend == "gloo" else gpus(variables.get("CUDA_VISIBLE_DEVICES"))
    local = ranks_here or _whole(variables, "LOCAL_WORLD_SIZE", 1)
    world = _whole(variables, "WORLD_SIZE", local)
    return Host(
        backend=("nccl" if seen else "gloo") if backend == "auto" else backend,
        ranks_here=local,
        nodes=nodes or max(1, world // local),
        cores=len(usable_cores()),
        variables=dict(variables),
        interfaces=_seen_interfaces(root),
        gpus=seen,
        infiniband=tuple(sorted(p.name for p in _entries(root / "sys/class/infiniband"))),
        host_address=_own_address(),
        master=_seen_master(variables),
        free_memory_bytes=free_memory_bytes(root),
        load=float(text_of(root / "proc/loadavg").partition(" ")[0] or 0),
        governor=text_of(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        congestion_control=congestion_control(root),
    )


def _whole(variables: Mapping[str, str], name: str, otherwise: int) -> int:
    text = variables.get(name, "")
    if not text:
        return otherwise
    if not text.isdecimal() or int(text) < 1:
        raise MeasureError(f"{name} is {text!r}: wanted a whole number from 1")
    return int(text)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _seen_interfaces(root: Path) -> dict[str, bool]:
    """Interfaces, up if the administrator and the link say so (loopback's link is unknown)."""
    seen = {}
    for entry in _entries(root / "sys/class/net"):
        flags = text_of(entry / "flags")
        if flags:
            is_up = bool(int(flags, 16) & _IFF_UP)
            seen[entry.name] = is_up and text_of(entry / "operstate") != "down"
    return seen


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _seen_master(variables: Mapping[str, str]) -> MasterState:
    address, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    if not (address and port):
        return "unset"
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise MeasureError(f"MASTER_PORT is {port!r}: wanted a number from 1 to 65535")
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "answers"  # torchrun itself listens, on behalf of rank 0
    if variables.get("RANK", "0") == "0":
        return _is_free(int(port))
    return _answer(address, int(port))


def _is_free(port: int) -> MasterState:
    """Rank 0 listens on the port: can it?"""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return "in use"
    return "free"


def _answer(address: str, port: int) -> MasterState:
    """The others connect to it; "refused" means that its host is there and rank 0 is not yet."""
    try:
        socket.create_connection((address, port), timeout=3).close()
    except socket.gaierror:
        return "unknown host"
    except OSError as error:
        return "refused" if error.errno == errno.ECONNREFUSED else "silent"
    return "answers"
