"""What may be wrong with a job: each cause with its odds, its change of the scenario, its signs.

Odds are assumptions: nobody publishes how often each cause occurs (docs/explanation/diagnosis.md).
"""

from __future__ import annotations

from ddpsim.diagnosis import links, own_work
from ddpsim.diagnosis.case import Case
from ddpsim.diagnosis.hypothesis import Hypothesis
from ddpsim.diagnosis.nccl_log import HOST_MEMORY, INSIDE, PEERS
from ddpsim.diagnosis.option_hypotheses import DEBUGGING, OPTIONS, set_to
from ddpsim.result.diagnosis import HEALTHY

__all__ = [
    "HYPOTHESES",
    "LOADERS",
    "NOTHING",
    "SHARED_LOADER",
    "UNKNOWN",
    "UNKNOWN_ODDS",
    "asked",
    "explained",
]

SHARED_LOADER = "shared_loader"
LOADERS = ("slow_loader", SHARED_LOADER)
UNKNOWN, UNKNOWN_ODDS = "unknown", 4.0


def asked(case: Case) -> list[Hypothesis]:
    """Those that can apply to a case."""
    return [each for each in HYPOTHESES if each.sizes(case)]


def explained(name: str) -> list[str]:
    """What a cause of this name is, and how to mend it; nothing where there is none."""
    key = name.strip().lower().replace(" ", "_").replace("-", "_")
    told = "{}: a cause that `diagnose` names. {}. Fix: {}"
    return [
        told.format(cause.key, cause.text.replace("{size}", "..."), cause.remedy)
        for cause in HYPOTHESES
        if cause.key == key
    ]


def _times(times: float) -> str:
    return f"{times:.3g} times"


def _percent(part: float) -> str:
    return f"{part:.0%}"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.2g} GB/s"


def _gbit(rate: float) -> str:
    return f"{rate * 8 / 1e9:.2g} Gbit/s"


_AS_STATED = "make the job what the scenario says, or make the scenario say what the job is"
_IN_NODES = (
    Hypothesis(
        "no_peer_to_peer",
        5.0,
        "peer-to-peer is not used: the GPUs of a node share {size} through host memory",
        "unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL; look at nvidia-smi topo -m; in a container "
        "pass all GPUs, with --ipc=host; in a virtual machine turn ACS off",
        links.host_rates,
        links.through_host,
        _gigabytes,
        signs={"nccl_log": "SHM or NET/Socket between GPUs of one node"},
        shows={INSIDE: HOST_MEMORY},
    ),
    Hypothesis(
        "slow_host_path",
        15.0,
        "the path between the GPUs of a node is slow: each exchanges {size} through the host",
        "look at nvidia-smi topo -m and at PCIe's width (nvidia-smi -q -d PCIE); put both GPUs on "
        "one socket, in slots of full width; unset NCCL_P2P_DISABLE; else accumulate gradients",
        links.shared_rates,
        links.slower_within,
        _gigabytes,
        shows={INSIDE: HOST_MEMORY},
    ),
    Hypothesis(
        "slow_peer_to_peer",
        4.0,
        "P2P is the slow path here: each GPU exchanges {size} with its peers",
        "try NCCL_P2P_DISABLE=1 (two A6000: 2.1 GB/s with P2P, 17 without); turn ACS and the IOMMU "
        "off in the BIOS",
        links.peer_to_peer_rates,
        links.slower_within,
        _gigabytes,
        signs={"peer_to_peer_off": "shorter"},
        shows={INSIDE: PEERS},
    ),
    Hypothesis(
        "weak_link",
        2.0,
        "one link is weak: {size} of the bandwidth to the last node or GPU is left",
        "compare the nodes pair by pair with nccl-tests; look at ibstat, ethtool, and at PCIe's "
        "width with nvidia-smi --query-gpu=pcie.link.width.current --format=csv",
        links.lame_links,
        links.weak_link,
        _percent,
        signs={"connections": "one node is slower than the others"},
    ),
    Hypothesis(
        "low_latency_protocol",
        0.5,
        "NCCL_PROTO=LL is left over, which halves the bandwidth",
        "unset NCCL_PROTO and NCCL_ALGO, and look into /etc/nccl.conf",
        links.left_over_protocol,
        links.low_latency,
        graded=False,
        signs={"nccl_log": "NCCL_PROTO set by environment"},
        shows={"protocol": "LL"},
    ),
    Hypothesis(
        "few_channels",
        0.5,
        "NCCL_MAX_NCHANNELS={size} is left over: few thread blocks copy",
        "unset NCCL_MAX_NCHANNELS, and look into /etc/nccl.conf",
        links.few_channels,
        links.fewer_channels,
        lambda channels: f"{channels:.0f}",
        graded=False,
        signs={"nccl_log": "NCCL_MAX_NCHANNELS set by environment"},
        shows={"channels": "limited"},
    ),
)
_BETWEEN_NODES = (
    Hypothesis(
        "sockets",
        8.0,
        "RDMA is not used between nodes: TCP over the same NICs",
        "unset NCCL_IB_DISABLE; load the NIC's verbs library, or the cloud's plugin, in the "
        "container; pass /dev/infiniband",
        links.sockets,
        links.over_sockets,
        graded=False,
        signs={"nccl_log": "NET/Socket"},
        shows={"between nodes": "TCP"},
    ),
    Hypothesis(
        "management_network",
        5.0,
        "traffic between nodes goes over another network: TCP on one port of {size}",
        "set NCCL_SOCKET_IFNAME (NCCL_IB_HCA for RDMA) to the fast interface",
        links.management_networks,
        links.over_management,
        _gbit,
        graded=False,
        signs={
            "nccl_log": "NET/Socket on a slow interface",
            "connections": "8 carry far less than the NIC",
        },
        shows={"between nodes": "TCP"},
    ),
    Hypothesis(
        "tcp_stream_limit",
        8.0,
        "one TCP connection carries only {size}",
        "set NCCL_SOCKET_NTHREADS=4 and NCCL_NSOCKS_PERTHREAD=4; ask the cloud for its limit of a "
        "flow, or for RDMA",
        links.stream_limits,
        links.tcp_limited,
        _gbit,
        signs={"connections": "8 carry far more than 1"},
    ),
    Hypothesis(
        "fewer_nics",
        3.0,
        "only {size} of a node's NICs is used",
        "unset NCCL_IB_HCA, pass all NICs to the container, look at NCCL's line NET/IB : Using",
        links.few_nics,
        links.fewer_nics,
        lambda nics: f"{nics:.0f}",
        graded=False,
        signs={"nccl_log": "fewer NICs in the line NET/IB : Using"},
        shows={"NICs of a node": "fewer"},
    ),
    Hypothesis(
        "no_gpudirect",
        3.0,
        "NICs do not reach GPU memory (no GPUDirect RDMA): {size} of their rate is left",
        "load nvidia-peermem (or use dma-buf), turn ACS off, look at nvidia-smi topo -m",
        lambda case: (0.65, 0.4, 0.25) if links.sockets(case) else (),
        links.without_gpudirect,
        _percent,
        signs={"nccl_log": "no GDRDMA behind NET/IB"},
        shows={"GPUDirect RDMA": "no"},
    ),
    Hypothesis(
        "congestion",
        4.0,
        "the network between nodes is shared: its uplinks are asked for {size} what they carry",
        "repeat the run at another hour; ask for nodes of one switch (placement group, topology)",
        links.congestion,
        links.congested,
        _times,
        falls=0.5,
        signs={"connections": "8 carry far less than the NIC"},
    ),
)
_COLLECTIVES = (
    Hypothesis(
        "slow_collectives",
        1.0,
        "collectives take {size} as long as predicted, for a reason that is not in this list",
        "run nccl-tests on the same ranks and set cluster.all_reduce",
        links.slow_collectives,
        links.slower_collectives,
        _times,
    ),
)
_COMPUTE = (
    Hypothesis(
        "slow_rank",
        5.0,
        "one rank is slow: it computes {size} as long as the others",
        "look for another process on that GPU or its host, and for its clock; leave that node out",
        own_work.slow_ranks,
        own_work.slow_rank,
        _times,
        falls=1.5,
        signs={"gpu_state": "one GPU at a lower clock", "per_rank": "longer on one rank"},
        shows={"ranks": "one slower", **own_work.LONGER},
    ),
    Hypothesis(
        "slow_gpus",
        3.0,
        "all GPUs are slow: they compute {size} as long as they should",
        "look at power caps and temperature (nvidia-smi -q -d PERFORMANCE), and for other "
        "processes on the GPUs",
        own_work.throttled_ranks,
        own_work.throttled,
        _times,
        falls=2.0,
        signs={"gpu_state": "all clocks low", "per_rank": "longer on all ranks"},
        shows=own_work.LONGER,
    ),
    Hypothesis(
        "busy_host",
        4.0,
        "hosts launch slowly: {size} as long for each operator",
        "give each rank cores of its own (--cpus-per-task, OMP_NUM_THREADS); turn off "
        "CUDA_LAUNCH_BLOCKING and .item() in the loop; try torch.compile",
        own_work.slow_hosts,
        own_work.busy_hosts,
        _times,
        falls=1.0,
        signs={"gpu_state": "utilization below 90 %", "per_rank": "longer on all ranks"},
        shows=own_work.LONGER,
    ),
    Hypothesis(
        "loss_read",
        4.0,
        "the loop reads the loss in every step: the host waits for the GPU",
        "call loss.item() every 50 steps; log, print and check for NaN as rarely",
        own_work.unread_losses,
        set_to("workload.read_loss_every=1"),
        graded=False,
        signs={"code": ".item(), or a print, in every step"},
        shows={"values that the host waits for": "in every step"},
    ),
    Hypothesis(
        "other_precision",
        4.0,
        "compute is done in {size}",
        _AS_STATED,
        own_work.precisions,
        own_work.other_precision,
        own_work.precision_of,
        graded=False,
        signs={"code": "another precision", "per_rank": "longer on all ranks"},
        shows=own_work.LONGER,
    ),
    Hypothesis(
        "other_batch",
        3.0,
        "a rank works on {size} as many samples a step as stated",
        _AS_STATED,
        own_work.batches,
        own_work.other_batch,
        _times,
        graded=False,
        signs={"code": "another batch", "per_rank": "longer on all ranks"},
        shows=own_work.LONGER,
    ),
    Hypothesis(
        "eager_attention",
        2.0,
        "attention is written out: the fused kernels are not used",
        "set attn_implementation='sdpa'; look at masks and dtypes that fused kernels do not take",
        own_work.eager,
        set_to("workload.attention=eager"),
        graded=False,
        signs={"code": "eager attention", "per_rank": "longer on all ranks"},
        shows=own_work.LONGER,
    ),
    Hypothesis(
        "not_compiled",
        2.0,
        "torch.compile has no effect: the model runs as it is written",
        "run with TORCH_LOGS=graph_breaks,recompiles",
        lambda case: own_work.switch(case.scenario.workload.compile and case.is_estimated),
        set_to("workload.compile=false"),
        graded=False,
        signs={"code": "no torch.compile", "per_rank": "longer on all ranks"},
        shows=own_work.LONGER,
    ),
)
_DATA = (
    Hypothesis(
        LOADERS[0],
        8.0,
        "the data loader of a rank delivers only {size}",
        "more workers (num_workers), persistent_workers=True, pin_memory=True, data that is "
        "decoded ahead; look at the disk and at the cores that a rank may use",
        own_work.late_batches,
        own_work.slow_loader,
        lambda rate: f"{rate:.3g} samples/s",
        falls=0.5,
        signs={"gpu_state": "utilization below 90 %"},
    ),
    Hypothesis(
        SHARED_LOADER,
        5.0,
        "the loaders of a node share what limits them (cores, disk, network): {size} together",
        "fewer workers than cores on a node; a local or faster disk; data that is decoded ahead",
        lambda case: [rate * case.cluster.gpus_per_node for rate in own_work.late_batches(case)],
        own_work.shared_loader,
        lambda rate: f"{rate:.3g} samples/s",
        falls=0.5,
        signs={"gpu_state": "utilization below 90 %"},
    ),
)
NOTHING = Hypothesis(
    HEALTHY,
    30.0,
    "nothing is wrong: the step is as long as predicted, within its uncertainty",
    "see ddpsim explain-step for what the step is made of",
    lambda _case: (1.0,),
    set_to(),
    graded=False,
)
HYPOTHESES: tuple[Hypothesis, ...] = (
    *(NOTHING, *_IN_NODES, *_BETWEEN_NODES, *_COLLECTIVES),
    *(*_COMPUTE, *_DATA, *OPTIONS, *DEBUGGING),
)
