"""`doctor`: what would spoil a measurement or stop a job, and what to do about it.

`inspect_host` looks, `diagnose` judges what was seen; neither needs torch. The clocks of several
nodes are compared inside a job (`calibrate.measure.host.clocks`): `clock_offset` from one rank's
exchanges, `check_clocks` over several ranks.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
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
_SKEW_S = 0.1

MasterState = Literal["unset", "free", "in use", "answers", "refused", "silent", "unknown host"]
_IFF_UP = 1


@dataclass(frozen=True)
class Finding:
    """Something seen: how bad it is, what it is, and what to do."""

    severity: Severity
    message: str
    advice: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}; {self.advice}"


def doctor(
    backend: Literal["gloo", "nccl", "auto"] = "auto",
    ranks_here: int | None = None,
    nodes: int | None = None,
) -> tuple[Host, list[Finding]]:
    """Look at this host as torchrun's variables (or the arguments) describe the job on it.

    `auto` is NCCL where nvidia-smi shows a GPU.
    """
    host = inspect_host(backend, os.environ, ranks_here, nodes)
    return host, diagnose(host)


def diagnose(host: Host) -> list[Finding]:
    """All findings, errors first; an empty list means that nothing was found."""
    checks = (
        _interfaces,
        _own_name,
        _master,
        _gpus,
        _transport,
        _congestion_control,
        _memory,
        _load,
        _threads,
        _governor,
    )
    found = [finding for check in checks for finding in check(host)]
    order: tuple[Severity, ...] = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _interfaces(host: Host) -> Iterator[Finding]:
    """NCCL's and gloo's: with NCCL too the ranks talk by gloo. None are known off Linux."""
    if not host.interfaces:
        return
    for backend in dict.fromkeys((host.backend, "gloo")):
        yield from _interface(host, backend)


def _interface(host: Host, backend: str) -> Iterator[Finding]:
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    given = host.variables.get(variable, "")
    there = ", ".join(name for name, is_up in host.interfaces.items() if is_up) or "none"
    if not given:
        if host.nodes > 1 and backend == host.backend:
            yield Finding(
                "note",
                f"{variable} is not set",
                f"set it to the interface that joins the nodes (up here: {there})",
            )
        return
    for name in _exact_names(given, backend):
        if name not in host.interfaces:
            message, advice = "which this host lacks", f"name one that is up: {there}"
        elif not host.interfaces[name]:
            message, advice = "which is down", f"bring it up, or name one that is up: {there}"
        elif name == "lo" and host.nodes > 1:
            message, advice = "which reaches no other node", "name the interface that joins them"
        else:
            continue
        yield Finding("error", f"{variable} names {name}, {message}", advice)


def _exact_names(given: str, backend: str) -> list[str]:
    """Interfaces that a variable names; NCCL's are prefixes (kept out) unless `=` stands first."""
    names = [name for name in given.lstrip("=").split(",") if name]
    if backend == "nccl" and not given.startswith("="):
        return []
    return names


def _own_name(host: Host) -> Iterator[Finding]:
    if host.nodes == 1 or host.variables.get("GLOO_SOCKET_IFNAME"):
        return
    if not host.host_address or host.host_address.startswith("127."):
        leads = host.host_address or "nothing"
        yield Finding(
            "error",
            f"this host's own name resolves to {leads}, which gloo would tell the other nodes",
            "set GLOO_SOCKET_IFNAME, or mend /etc/hosts",
        )


def _master(host: Host) -> Iterator[Finding]:
    name, port = host.variables.get("MASTER_ADDR", ""), host.variables.get("MASTER_PORT", "")
    if host.master == "in use":
        yield Finding("error", f"MASTER_PORT {port} is in use on this host", "choose another port")
    elif host.master == "silent":
        yield Finding(
            "error",
            f"{name}:{port} does not answer",
            "check the address, and that no firewall is between",
        )
    elif host.master == "unknown host":
        yield Finding(
            "error", f"MASTER_ADDR {name} is no known host", "give its IP address, or mend DNS"
        )
    elif host.master == "refused":
        yield Finding(
            "note", f"{name} is there, but nobody listens on {port} yet", "start rank 0 first"
        )


def _gpus(host: Host) -> Iterator[Finding]:
    if host.backend != "nccl":
        return
    if not host.gpus:
        yield Finding(
            "error",
            "nvidia-smi shows no GPU",
            "install or mend its driver, or measure gloo (--backend gloo)",
        )
        return
    if len(host.gpus) < host.ranks_here:
        yield Finding(
            "error",
            f"{counted(host.ranks_here, 'rank')} here, but {counted(len(host.gpus), 'GPU')}",
            "start a rank for each GPU (--nproc-per-node), or look at CUDA_VISIBLE_DEVICES",
        )
    names = dict.fromkeys(gpu.name for gpu in host.gpus)
    if len(names) > 1:
        yield Finding(
            "warning",
            f"the GPUs of this host differ: {', '.join(names)}",
            "measure alike ones (CUDA_VISIBLE_DEVICES): a profile is of one kind",
        )
    for gpu in host.gpus:
        yield from _gpu(gpu)


def _gpu(gpu: Gpu) -> Iterator[Finding]:
    if gpu.busy is not None and gpu.busy > _IDLE:
        yield Finding(
            "warning",
            f"GPU {gpu.index} is busy {gpu.busy:.0%} of the time: others compute on it",
            "wait until it is idle (nvidia-smi names the processes)",
        )
    if gpu.free_memory_bytes is not None and gpu.free_memory_bytes < _LITTLE_MEMORY:
        yield Finding(
            "warning",
            f"{gpu.free_memory_bytes / 2**30:.1f} GiB of memory is free on GPU {gpu.index}",
            "free some, or lower --memory-budget; large all-reduces are left out",
        )


def _transport(host: Host) -> Iterator[Finding]:
    if host.backend != "nccl" or host.nodes == 1:
        return
    disabled = host.variables.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    if host.infiniband and disabled:
        yield Finding(
            "warning",
            f"NCCL_IB_DISABLE is set, but there is {', '.join(host.infiniband)}",
            "unset it, unless TCP is what you mean to measure",
        )
    if not host.infiniband:
        yield Finding(
            "note",
            "no InfiniBand or RoCE device: NCCL will use TCP sockets",
            "if there should be one, check its driver (ls /sys/class/infiniband)",
        )


def _congestion_control(host: Host) -> Iterator[Finding]:
    """BBR's PROBE_RTT: draft-cardwell-iccrg-bbr-congestion-control."""
    is_tcp = host.backend == "gloo" or not host.infiniband
    if host.nodes > 1 and is_tcp and host.congestion_control.startswith("bbr"):
        yield Finding(
            "warning",
            f"TCP's congestion control is {host.congestion_control}, which pauses for 200 ms every "
            "10 s: some all-reduces will be that much longer",
            "use cubic, Linux's default (sysctl net.ipv4.tcp_congestion_control=cubic), unless you "
            "will train like this",
        )


def _memory(host: Host) -> Iterator[Finding]:
    if host.free_memory_bytes is None:
        return
    each = host.free_memory_bytes / host.ranks_here
    if each < _LITTLE_MEMORY:
        yield Finding(
            "warning",
            f"{each / 2**30:.1f} GiB of memory is free for each of {host.ranks_here} ranks",
            "free some, or lower --memory-budget; large all-reduces are left out",
        )


def _load(host: Host) -> Iterator[Finding]:
    if host.load > 0.1 * host.cores:
        yield Finding(
            "warning",
            f"the load average is {host.load:.2f} on {host.cores} cores: others compute here",
            "wait until the machine is idle",
        )


def _threads(host: Host) -> Iterator[Finding]:
    text = host.variables.get("OMP_NUM_THREADS", "")
    threads = int(text) if text.isdecimal() and int(text) else host.cores
    needed = threads * host.ranks_here
    each = f"{counted(host.ranks_here, 'rank')} x {counted(threads, 'thread')}"
    if host.backend == "gloo" and needed > host.cores:
        given = f"OMP_NUM_THREADS={text}" if text else "OMP_NUM_THREADS is not set"
        yield Finding(
            "warning",
            f"{each} on {host.cores} cores ({given})",
            f"set OMP_NUM_THREADS={max(1, host.cores // host.ranks_here)}, or start fewer ranks",
        )
    elif host.backend == "gloo" and needed > host.cores - host.ranks_here:
        yield Finding(
            "note",
            f"{each} leave no core a rank to gloo's threads: "
            "they wait for the processor, and compute for them",
            "set a lower OMP_NUM_THREADS, unless you will train like this",
        )


def _governor(host: Host) -> Iterator[Finding]:
    if host.governor and host.governor != "performance":
        yield Finding(
            "warning",
            f"the CPU governor is {host.governor}: clock rates change while one measures",
            "set it to performance (cpupower frequency-set -g performance)",
        )


def clock_offset(exchanges: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds that another clock is ahead, and the bound of the error.

    Each exchange is (sent, the other's clock, received back); the quickest one tells the most:
    half its round trip bounds the error (D. Mills, RFC 5905, section 8).
    """
    sent, theirs, back = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return theirs - (sent + back) / 2, (back - sent) / 2


def check_clocks(offsets: Mapping[int, tuple[float, float]]) -> list[Finding]:
    """Findings about ranks whose clock surely differs from rank 0's by more than 0.1 s."""
    return [
        Finding(
            "warning",
            f"the clock of rank {rank} is {abs(ahead):.3f} s "
            f"{'ahead of' if ahead > 0 else 'behind'} rank 0's",
            "run NTP or chrony: traces of several ranks will not line up",
        )
        for rank, (ahead, error) in sorted(offsets.items())
        if abs(ahead) - error > _SKEW_S
    ]


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
