"""The origin of a record: machine, software, and whether all ranks run the same."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from calibrate.measure.errors import MeasureError, RefusedError
from calibrate.measure.host.machine import (
    congestion_control,
    keep_freed_memory,
    nvidia_smi,
    text_of,
)
from calibrate.measure.ranks.job import Job
from calibrate.records.record import PROCESSOR, Environment, Record

_VARIABLES = (
    *("NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "KMP_", "PYTORCH_"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"),
)
# of /proc/cpuinfo: what tells processors of one name apart, on x86 and on Arm
_NUMBERS = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class Facts:
    """What a rank runs; these must be the same on all ranks."""

    torch: str
    backend: str
    library: str
    device: str
    local_world_size: int
    host: str = ""
    gpu: str = ""  # its own number; empty on a CPU, and where torch does not tell it


def rank_facts(job: Job) -> Facts:
    """The facts of this rank."""
    return _facts(job.device, job.backend, job.place.local_world_size)


def _facts(where: torch.device, backend: str, ranks: int) -> Facts:
    version = library = str(torch.__version__)
    device, gpu = "cpu", ""
    if backend == "nccl":
        library = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        device = torch.cuda.get_device_name(where)
        gpu = str(getattr(torch.cuda.get_device_properties(where), "uuid", ""))
    return Facts(version, backend, library, device, ranks, socket.gethostname(), gpu)


def check_same(facts: Sequence[Facts]) -> None:
    """Raise RefusedError naming the first rank that differs from rank 0, and both values.

    Or the first two that share a GPU, which NCCL refuses.
    """
    names = {"library": "NCCL", "local_world_size": "ranks on its node"}
    for rank, theirs in enumerate(facts):
        for field in ("torch", "backend", "library", "device", "local_world_size"):
            name = names.get(field, field)
            here, there = getattr(facts[0], field), getattr(theirs, field)
            if here != there:
                raise RefusedError(
                    f"rank {rank} has {name} {there}, but rank 0 has {here}: "
                    "all ranks must be alike, or their times mean nothing together"
                )
    owners: dict[tuple[str, str], int] = {}
    for rank, theirs in enumerate(facts):
        first = owners.setdefault((theirs.host, theirs.gpu), rank) if theirs.gpu else rank
        if first != rank:
            raise RefusedError(
                f"ranks {first} and {rank} have the same GPU ({theirs.host} {theirs.gpu}): show "
                "each rank one of its own, or all of them to all (CUDA_VISIBLE_DEVICES)"
            )


def one_host_as_several(facts: Sequence[Facts]) -> str:
    """What to do where ranks with GPUs of one host count as several nodes; empty where none do."""
    nodes: dict[str, int] = {}
    for rank, theirs in enumerate(facts):
        host, node = theirs.host, rank // theirs.local_world_size
        if theirs.gpu and nodes.setdefault(host, node) != node:
            return (
                f"nodes {nodes[host]} and {node} are both on {host}: its own links will be taken "
                "for those between nodes; start its ranks by one torchrun (--nproc-per-node)"
            )
    return ""


def environment(job: Job, facts: Facts, root: Path = Path("/")) -> Environment:
    """The environment of this rank's machine; `root` is where /proc and /sys are looked for."""
    details = {"gloo_threads": job.gloo_threads, "allocator": job.allocator}
    return _environment(facts, details, root)


def device_environment(device: torch.device) -> Environment:
    """The environment of one device, which is in no job; on a CPU freed memory is kept from now."""
    is_gpu = device.type == "cuda"
    details: dict[str, str] = {"allocator": "" if is_gpu else keep_freed_memory()}
    return _environment(_facts(device, "nccl" if is_gpu else "gloo", 1), details, Path("/"))


def _environment(facts: Facts, details: dict[str, str], root: Path) -> Environment:
    cores = os.cpu_count() or 1
    cpu = _cpuinfo(root)
    machine = f"{cpu.get('model name', platform.machine())}, {cores} cores"
    return Environment(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=facts.device if facts.backend == "nccl" else machine,
        device=facts.device,
        torch=facts.torch,
        backend="nccl" if facts.backend == "nccl" else "gloo",
        library=facts.library,
        variables=_variables(os.environ),
        details={
            name: value for name, value in (_details(root, cpu, cores) | details).items() if value
        },
    )


def check_same_machine(record: Record, fresh: Record, path: Path) -> None:
    """Raise MeasureError where a record to resume is of another machine, software or setting."""
    pairs = [
        (name, getattr(record.layout, name), getattr(fresh.layout, name))
        for name in ("nodes", "gpus_per_node")
    ]
    rates = record.layout.line_rate_bytes_per_s, fresh.layout.line_rate_bytes_per_s
    if None not in rates:
        was_rate, now_rate = (f"{8e-9 * (rate or 0.0):g} Gbit/s" for rate in rates)
        pairs.append(("--line-rate", was_rate, now_rate))
    check_same_environment(record.environment, fresh.environment, path, pairs)


def check_same_environment(
    old: Environment,
    new: Environment,
    path: Path,
    others: Sequence[tuple[str, object, object]] = (),
    here: str = "this job",
) -> None:
    """Check that a record's environment is that of this job, and `others`: name, was, is."""
    pairs: list[tuple[str, object, object]] = [
        (name, getattr(old, name), getattr(new, name))
        for name in ("machine", "device", "torch", "backend", "library")
    ]
    if old.processor and new.processor:
        pairs.append((PROCESSOR, old.processor, new.processor))
    pairs += others
    unmeasured = ("GLOO_",) if new.backend == "nccl" else ()  # the ranks talk by it
    pairs += [
        (name, old.variables.get(name, "none"), new.variables.get(name, "none"))
        for name in sorted({*old.variables, *new.variables})
        if not name.startswith(unmeasured)
    ]
    for name, was, now in pairs:
        if was != now:
            raise MeasureError(
                f"{path} was measured with {name} {was}, but {here} has {now}: name another file"
            )


def _cpuinfo(root: Path) -> dict[str, str]:
    """The kernel's figures of the first processor."""
    first = text_of(root / "proc/cpuinfo").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _variables(given: Mapping[str, str]) -> dict[str, str]:
    """Variables that change what is measured; nothing that looks like a secret."""
    return {
        name: value
        for name, value in sorted(given.items())
        if name.startswith(_VARIABLES) and not any(word in name for word in _SECRETS)
    }


def _details(root: Path, cpu: Mapping[str, str], cores: int) -> dict[str, str]:
    """What is told of the machine, empty where it is not."""
    governor = text_of(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return {
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": str(cores),
        # its maker's numbers: "vendor_id AuthenticAMD, cpu family 26, model 2"
        PROCESSOR: ", ".join(f"{name} {cpu[name]}" for name in _NUMBERS if name in cpu),
        "threads_per_rank": str(torch.get_num_threads()),
        "load_average": text_of(root / "proc/loadavg").partition("\n")[0],
        "governor": governor.partition("\n")[0].strip() or "not known",
        "tcp_congestion_control": congestion_control(root),
        "cuda": str(torch.version.cuda or ""),
        "driver": nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader"),
        "topology": nvidia_smi("topo", "-m"),
    }
