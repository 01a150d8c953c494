"""`doctor`: what it finds on a host, and what it says to do."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

from calibrate.measure.host.doctor import Host, diagnose, inspect_host
from calibrate.measure.host.machine import Gpu, free_memory_bytes
from calibrate.measure.ranks.launch import free_port

GLOO = Host(
    "gloo",
    ranks_here=2,
    nodes=2,
    cores=8,
    variables={"OMP_NUM_THREADS": "3"},
    interfaces={"lo": True, "eth0": True, "eth1": False},
    host_address="10.0.0.1",
)


IDLE_GPU = Gpu(index=0, name="Tesla T4", free_memory_bytes=15 * 2**30, busy=0.0)


def found(host: Host = GLOO, **changes: Any) -> list[str]:
    variables = dict(host.variables) | changes.pop("variables", {})
    return [str(f) for f in diagnose(Host(**(vars(host) | {"variables": variables} | changes)))]


def test_doctor_finds_nothing_where_nothing_is() -> None:
    assert found(variables={"GLOO_SOCKET_IFNAME": "eth0"}) == []


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        (
            {"variables": {"GLOO_SOCKET_IFNAME": "eth7"}},
            ("error: GLOO_SOCKET_IFNAME names eth7, which this host lacks; "
            "name one that is up: lo, eth0"),
        ),
        (
            {"variables": {"GLOO_SOCKET_IFNAME": "eth1"}},
            ("error: GLOO_SOCKET_IFNAME names eth1, which is down; "
            "bring it up, or name one that is up: lo, eth0"),
        ),
        (
            {"variables": {"GLOO_SOCKET_IFNAME": "lo"}},
            ("error: GLOO_SOCKET_IFNAME names lo, which reaches no other node; "
            "name the interface that joins them"),
        ),
        (
            {},
            ("note: GLOO_SOCKET_IFNAME is not set; "
            "set it to the interface that joins the nodes (up here: lo, eth0)"),
        ),
        (
            {"host_address": "127.0.1.1"},
            ("error: this host's own name resolves to 127.0.1.1, which gloo would tell the other "
            "nodes; set GLOO_SOCKET_IFNAME, or mend /etc/hosts"),
        ),
        (
            {"backend": "nccl", "host_address": "127.0.1.1"},
            ("error: this host's own name resolves to 127.0.1.1, which gloo would tell the other "
            "nodes; set GLOO_SOCKET_IFNAME, or mend /etc/hosts"),
        ),
        (
            {"backend": "nccl", "variables": {"GLOO_SOCKET_IFNAME": "eth7"}},
            ("error: GLOO_SOCKET_IFNAME names eth7, which this host lacks; "
            "name one that is up: lo, eth0"),
        ),
        (
            {"master": "in use", "variables": {"MASTER_PORT": "29500"}},
            "error: MASTER_PORT 29500 is in use on this host; choose another port",
        ),
        (
            {"master": "silent", "variables": {"MASTER_ADDR": "n0", "MASTER_PORT": "29500"}},
            ("error: n0:29500 does not answer; "
            "check the address, and that no firewall is between"),
        ),
        (
            {"master": "unknown host", "variables": {"MASTER_ADDR": "n0"}},
            "error: MASTER_ADDR n0 is no known host; give its IP address, or mend DNS",
        ),
        (
            {"master": "refused", "variables": {"MASTER_ADDR": "n0", "MASTER_PORT": "29500"}},
            "note: n0 is there, but nobody listens on 29500 yet; start rank 0 first",
        ),
        (
            {"backend": "nccl", "infiniband": ("mlx5_0",), "variables": {"NCCL_IB_DISABLE": "1"}},
            ("warning: NCCL_IB_DISABLE is set, but there is mlx5_0; "
            "unset it, unless TCP is what you mean to measure"),
        ),
        (
            {"backend": "nccl"},
            ("note: no InfiniBand or RoCE device: NCCL will use TCP sockets; "
            "if there should be one, check its driver (ls /sys/class/infiniband)"),
        ),
        (
            {"backend": "nccl"},
            ("error: nvidia-smi shows no GPU; "
            "install or mend its driver, or measure gloo (--backend gloo)"),
        ),
        (
            {"backend": "nccl", "gpus": (IDLE_GPU,)},
            ("error: 2 ranks here, but 1 GPU; "
            "start a rank for each GPU (--nproc-per-node), or look at CUDA_VISIBLE_DEVICES"),
        ),
        (
            {"backend": "nccl", "gpus": (IDLE_GPU, replace(IDLE_GPU, name="NVIDIA L4"))},
            ("warning: the GPUs of this host differ: Tesla T4, NVIDIA L4; "
            "measure alike ones (CUDA_VISIBLE_DEVICES): a profile is of one kind"),
        ),
        (
            {"backend": "nccl", "gpus": (replace(IDLE_GPU, index=1, busy=0.98),)},
            ("warning: GPU 1 is busy 98% of the time: others compute on it; "
            "wait until it is idle (nvidia-smi names the processes)"),
        ),
        (
            {"backend": "nccl", "gpus": (replace(IDLE_GPU, free_memory_bytes=2**30),)},
            ("warning: 1.0 GiB of memory is free on GPU 0; "
            "free some, or lower --memory-budget; large all-reduces are left out"),
        ),
        (
            {"free_memory_bytes": 2**30},
            ("warning: 0.5 GiB of memory is free for each of 2 ranks; "
            "free some, or lower --memory-budget; large all-reduces are left out"),
        ),
        (
            {"load": 3.5},
            ("warning: the load average is 3.50 on 8 cores: others compute here; "
            "wait until the machine is idle"),
        ),
        (
            {"variables": {"OMP_NUM_THREADS": ""}},
            ("warning: 2 ranks x 8 threads on 8 cores (OMP_NUM_THREADS is not set); "
            "set OMP_NUM_THREADS=4, or start fewer ranks"),
        ),
        (
            {"variables": {"OMP_NUM_THREADS": "4"}},
            ("note: 2 ranks x 4 threads leave no core a rank to gloo's threads: they wait for the "
            "processor, and compute for them; "
            "set a lower OMP_NUM_THREADS, unless you will train like this"),
        ),
        (
            {"governor": "powersave"},
            ("warning: the CPU governor is powersave: clock rates change while one measures; "
            "set it to performance (cpupower frequency-set -g performance)"),
        ),
        (
            {"congestion_control": "bbr"},
            ("warning: TCP's congestion control is bbr, which pauses for 200 ms every 10 s: some "
            "all-reduces will be that much longer; use cubic, Linux's default (sysctl "
            "net.ipv4.tcp_congestion_control=cubic), unless you will train like this"),
        ),
    ],
)  # fmt: skip
def test_doctor_says_what_to_do(changes: dict[str, Any], finding: str) -> None:
    assert finding in found(**changes)


def test_doctor_finds_nothing_wrong_with_idle_gpus() -> None:
    gpus = (IDLE_GPU, replace(IDLE_GPU, index=1, free_memory_bytes=None, busy=None))
    host = replace(GLOO, backend="nccl", nodes=1, gpus=gpus)
    assert found(host) == []


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [(None, [0, 1]), ("1", [1]), ("GPU-8e1f", [0, 1]), ("", []), ("-1", []), ("0,1", [0, 1])],
)
def test_gpus_are_those_that_nvidia_smi_shows(
    visible: str | None, indexes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, Tesla T4, 15102, 3'\necho '1, Tesla T4, 9, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    host = inspect_host("nccl", {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.index for gpu in host.gpus] == indexes
    last = Gpu(index=1, name="Tesla T4", free_memory_bytes=9 * 2**20, busy=None)
    assert host.gpus[-1:] == ((last,) if indexes else ())
    assert inspect_host("gloo", {}).gpus == ()


def test_doctor_reads_a_host(tmp_path: Path) -> None:
    files = {
        "sys/class/net/eth0/flags": "0x1003\n", "sys/class/net/eth0/operstate": "up\n",
        "sys/class/net/eth1/flags": "0x1003\n", "sys/class/net/eth1/operstate": "down\n",
        "sys/class/net/lo/flags": "0x9\n", "sys/class/net/lo/operstate": "unknown\n",
        "sys/class/net/tun0/flags": "0x1002\n", "sys/class/infiniband/mlx5_0/x": "",
        "proc/loadavg": "0.50 0.1 0.1 1/2 3\n",
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4096 kB\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "proc/sys/net/ipv4/tcp_congestion_control": "cubic\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    port = free_port()
    variables = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    host = inspect_host("gloo", variables, root=tmp_path)
    assert host.interfaces == {"eth0": True, "eth1": False, "lo": True, "tun0": False}
    assert (host.infiniband, host.load, host.governor) == (("mlx5_0",), 0.5, "powersave")
    assert (host.ranks_here, host.nodes, host.free_memory_bytes) == (4, 2, 4096 * 1024)
    assert (host.master, host.congestion_control) == ("refused", "cubic")
    assert inspect_host("gloo", variables | {"RANK": "0"}, root=tmp_path).master == "free"


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 4096 * 1024), ("3000000", 1_500_000), ("9999999999", 4096 * 1024)]
)
def test_a_container_may_have_less_memory_than_its_machine(
    limit: str, free: int, tmp_path: Path
) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 4096 kB\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.current": "2000000\n",
        "sys/fs/cgroup/memory.stat": "anon 1500000\ninactive_file 500000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory_bytes(tmp_path) == free
