"""`doctor`: what would spoil a measurement or stop a job, and what to do about it.

`inspect_host` looks, `diagnose` judges what was seen; neither needs torch. The clocks of several
nodes are compared inside a job (`calibrate.measure.host.clocks`).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
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
from ddpsim.wording import counted

Severity = Literal["error", "warning", "note"]
_LITTLE_MEMORY = 2 * 2**30
_IDLE = 0.05  # a GPU that is used no more than this

MasterState = Literal["unset", "free", "in use", "answers", "refused", "silent", "unknown host"]
_IFF_UP = 1
_Remark = tuple[Severity, str]


@dataclass(frozen=True)
class Finding:
    """Something seen: how bad it is, what it is, and what to do."""

    severity: Severity
    text: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}"


def diagnose(host: Host) -> list[Finding]:
    """All findings, errors first; an empty list means that nothing was found."""
    checks = (_interfaces, _own_name, _master, _gpus, _transport, _memory_and_load, _threads)
    findings = [Finding(*remark) for check in checks for remark in check(host)]
    order: tuple[Severity, ...] = ("error", "warning", "note")
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _interfaces(host: Host) -> Iterator[_Remark]:
    """NCCL's and gloo's: with NCCL too the ranks talk by gloo. None are known off Linux."""
    for backend in dict.fromkeys((host.backend, "gloo")) if host.interfaces else ():
        yield from _interface(host, backend)


def _interface(host: Host, backend: str) -> Iterator[_Remark]:
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    given = host.variables.get(variable, "")
    there = ", ".join(name for name, is_up in host.interfaces.items() if is_up) or "none"
    if not given and host.nodes > 1 and backend == host.backend:
        join = f"set it to the interface that joins the nodes (up here: {there})"
        yield "note", f"{variable} is not set; {join}"
    if backend == "nccl" and not given.startswith("="):  # its names are prefixes
        return
    for name in filter(None, given.lstrip("=").split(",")):
        if name not in host.interfaces:
            wrong = f"which this host lacks; name one that is up: {there}"
        elif not host.interfaces[name]:
            wrong = f"which is down; bring it up, or name one that is up: {there}"
        elif name == "lo" and host.nodes > 1:
            wrong = "which reaches no other node; name the interface that joins them"
        else:
            continue
        yield "error", f"{variable} names {name}, {wrong}"


def _own_name(host: Host) -> Iterator[_Remark]:
    if host.nodes == 1 or host.variables.get("GLOO_SOCKET_IFNAME"):
        return
    if not host.host_address or host.host_address.startswith("127."):
        leads = f"this host's own name resolves to {host.host_address or 'nothing'}"
        mend = "set GLOO_SOCKET_IFNAME, or mend /etc/hosts"
        yield "error", f"{leads}, which gloo would tell the other nodes; {mend}"


def _master(host: Host) -> Iterator[_Remark]:
    name, port = host.variables.get("MASTER_ADDR", ""), host.variables.get("MASTER_PORT", "")
    remarks: dict[MasterState, _Remark] = {
        "in use": ("error", f"MASTER_PORT {port} is in use on this host; choose another port"),
        "silent": (
            "error",
            f"{name}:{port} does not answer; check the address, and that no firewall is between",
        ),
        "unknown host": (
            "error",
            f"MASTER_ADDR {name} is no known host; give its IP address, or mend DNS",
        ),
        "refused": (
            "note",
            f"{name} is there, but nobody listens on {port} yet; start rank 0 first",
        ),
    }
    if host.master in remarks:
        yield remarks[host.master]


def _gpus(host: Host) -> Iterator[_Remark]:
    if host.backend != "nccl":
        return
    if not host.gpus:
        mend = "install or mend its driver, or measure gloo (--backend gloo)"
        yield "error", f"nvidia-smi shows no GPU; {mend}"
    elif len(host.gpus) < host.ranks_here:
        few = f"{counted(host.ranks_here, 'rank')} here, but {counted(len(host.gpus), 'GPU')}"
        each = "start a rank for each GPU (--nproc-per-node), or look at CUDA_VISIBLE_DEVICES"
        yield "error", f"{few}; {each}"
    names = dict.fromkeys(gpu.name for gpu in host.gpus)
    if len(names) > 1:
        alike = "measure alike ones (CUDA_VISIBLE_DEVICES): a profile is of one kind"
        yield "warning", f"the GPUs of this host differ: {', '.join(names)}; {alike}"
    for gpu in host.gpus:
        if gpu.busy is not None and gpu.busy > _IDLE:
            busy = f"GPU {gpu.index} is busy {gpu.busy:.0%} of the time: others compute on it"
            yield "warning", f"{busy}; wait until it is idle (nvidia-smi names the processes)"
        yield from _memory(gpu.free_memory_bytes, f"on GPU {gpu.index}")


def _memory(free_bytes: float | None, where: str) -> Iterator[_Remark]:
    if free_bytes is not None and free_bytes < _LITTLE_MEMORY:
        free = "free some, or lower --memory-budget; large all-reduces are left out"
        yield "warning", f"{free_bytes / 2**30:.1f} GiB of memory is free {where}; {free}"


def _transport(host: Host) -> Iterator[_Remark]:
    """What joins the nodes. BBR's PROBE_RTT: draft-cardwell-iccrg-bbr-congestion-control."""
    if host.nodes == 1:
        return
    is_nccl, devices = host.backend == "nccl", ", ".join(host.infiniband)
    if is_nccl and devices and host.variables.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        unset = "unset it, unless TCP is what you mean to measure"
        yield "warning", f"NCCL_IB_DISABLE is set, but there is {devices}; {unset}"
    if is_nccl and not devices:
        look = "if there should be one, check its driver (ls /sys/class/infiniband)"
        yield "note", f"no InfiniBand or RoCE device: NCCL will use TCP sockets; {look}"
    if (not is_nccl or not devices) and host.congestion_control.startswith("bbr"):
        pauses = "which pauses for 200 ms every 10 s: some all-reduces will be that much longer"
        cubic = "cubic, Linux's default (sysctl net.ipv4.tcp_congestion_control=cubic)"
        usual = f"use {cubic}, unless you will train like this"
        yield "warning", f"TCP's congestion control is {host.congestion_control}, {pauses}; {usual}"


def _memory_and_load(host: Host) -> Iterator[_Remark]:
    if host.free_memory_bytes is not None:
        ranks = host.ranks_here
        yield from _memory(host.free_memory_bytes / ranks, f"for each of {ranks} ranks")
    if host.load > 0.1 * host.cores:
        load = f"the load average is {host.load:.2f} on {host.cores} cores"
        yield "warning", f"{load}: others compute here; wait until the machine is idle"
    if host.governor and host.governor != "performance":
        changes = f"the CPU governor is {host.governor}: clock rates change while one measures"
        fixed = "set it to performance (cpupower frequency-set -g performance)"
        yield "warning", f"{changes}; {fixed}"


def _threads(host: Host) -> Iterator[_Remark]:
    text = host.variables.get("OMP_NUM_THREADS", "")
    threads = int(text) if text.isdecimal() and int(text) else host.cores
    needed = threads * host.ranks_here
    each = f"{counted(host.ranks_here, 'rank')} x {counted(threads, 'thread')}"
    if host.backend == "gloo" and needed > host.cores:
        given = f"OMP_NUM_THREADS={text}" if text else "OMP_NUM_THREADS is not set"
        fewer = f"set OMP_NUM_THREADS={max(1, host.cores // host.ranks_here)}, or start fewer ranks"
        yield "warning", f"{each} on {host.cores} cores ({given}); {fewer}"
    elif host.backend == "gloo" and needed > host.cores - host.ranks_here:
        waits = "they wait for the processor, and compute for them"
        lower = "set a lower OMP_NUM_THREADS, unless you will train like this"
        yield "note", f"{each} leave no core a rank to gloo's threads: {waits}; {lower}"


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
    nodes: int | None = None,
    root: Path = Path("/"),
) -> Host:
    """What can be seen of this node, and torchrun's variables tell of the job on it.

    `auto` is NCCL where nvidia-smi shows a GPU; `root` is where /proc and /sys are looked for.
    """
    seen = () if backend == "gloo" else gpus(variables.get("CUDA_VISIBLE_DEVICES"))
    local = _whole(variables, "LOCAL_WORLD_SIZE", 1)
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
    return {
        entry.name: bool(int(flags, 16) & _IFF_UP) and text_of(entry / "operstate") != "down"
        for entry in _entries(root / "sys/class/net")
        if (flags := text_of(entry / "flags"))
    }


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
    is_first = variables.get("RANK", "0") == "0"
    try:
        if not is_first:
            socket.create_connection((address, int(port)), timeout=3).close()
            return "answers"
        with socket.socket() as probe:  # rank 0 will listen there
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(port)))
    except socket.gaierror:
        return "unknown host"
    except OSError as error:
        there: MasterState = "refused" if error.errno == errno.ECONNREFUSED else "silent"
        return "in use" if is_first else there  # refused: rank 0 is not there yet
    return "free"
