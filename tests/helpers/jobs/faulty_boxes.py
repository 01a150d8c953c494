"""Jobs with a fault that is known, on the machines that people have: most have no NVLink."""

from __future__ import annotations

from jobs.faulty_job import Job
from jobs.faulty_jobs import BERT, ESTIMATED, EXPOSED, FAST, IB_NODES, NVLINK_NODE, ring

TWO_4090 = {"device": "rtx-4090", "nodes": 1, "gpus_per_node": 2}
PEERS = {"board": "workstation", "cpu": "amd"}  # with two GPUs NCCL goes peer to peer
TWO_A6000 = {"device": "rtx-a6000", "nodes": 1, "gpus_per_node": 2, "host": PEERS}
FOUR_3090 = {"device": "rtx-3090", "nodes": 1, "gpus_per_node": 4}
STATED = {"intra_node": {"bandwidth": "2 GB/s"}}
BY_FOUR = {"accumulation_steps": 4}
ONE, TWO = ("accumulation 1",), ("accumulation 1", "accumulation 2")
SHM = "SHM/direct/direct"


def exchanges(rate: str) -> tuple[str, ...]:
    return (f"cluster.intra_node.bandwidth={rate}",)


def ring_of(gpus: int, way: str) -> tuple[str, ...]:
    """NCCL's lines of a node."""
    hops = [(i, (i + 1) % gpus) for i in range(gpus)]
    return tuple(f"Channel 00/0 : {i}[{i}] -> {j}[{j}] via {way}" for i, j in hops)


BOXES = (
    Job(
        "two accumulations over a slow host",
        "slow_host_path",
        BERT,
        TWO_4090,
        exchanges("1 GB/s"),
        steps_at=ONE,
        ddp=BY_FOUR,
    ),
    Job(
        "a slow host, and NCCL says via SHM",
        "slow_host_path",
        BERT,
        TWO_4090,
        exchanges("0.6 GB/s"),
        measured=EXPOSED,
        log=ring_of(2, SHM),
    ),
    Job(
        "P2P is the slow path",
        "slow_peer_to_peer",
        BERT,
        TWO_A6000,
        exchanges("2.1 GB/s"),
        measured=("all_reduce",),
        log=ring_of(2, "P2P/CUMEM"),
    ),
    Job(
        "two batches over a slow host",
        "slow_host_path",
        ESTIMATED,
        FOUR_3090,
        exchanges("0.7 GB/s"),
        steps_at=("batch 16", "batch 32"),
        log=ring_of(4, SHM),
    ),
    Job(
        "synthetic data over a slow host",
        "slow_host_path",
        BERT,
        FOUR_3090,
        exchanges("0.6 GB/s"),
        measured=("data_wait",),
        log=ring_of(4, SHM),
    ),
    Job(
        "a slow loader in a box",
        "slow_loader",
        {**BERT, "step_time": "200 ms"},
        TWO_4090,
        ("workload.data={rate: 40 samples/s, workers: 4}",),
        measured=("data_wait",),
        log=ring_of(2, SHM),
    ),
    Job(
        "two accumulations without no_sync",
        "without_no_sync",
        BERT,
        {**TWO_4090, **STATED},
        ("ddp.no_sync=false",),
        steps_at=TWO,
        ddp=BY_FOUR,
    ),
    Job(
        "power caps, at two accumulations",
        "slow_gpus",
        BERT,
        {**TWO_4090, **STATED},
        steps_at=TWO,
        all_slow=1.5,
        ddp=BY_FOUR,
    ),
    Job(
        "a healthy box at two accumulations",
        "healthy",
        BERT,
        {**TWO_4090, **STATED},
        steps_at=TWO,
        ddp=BY_FOUR,
    ),
    Job(
        "sockets inside a node",
        "slow_host_path",
        BERT,
        TWO_4090,
        exchanges("0.8 GB/s"),
        log=ring_of(2, "NET/Socket/0"),
    ),
    Job(
        "NVLink not used by two GPUs",
        "no_peer_to_peer",
        BERT,
        {**NVLINK_NODE, "gpus_per_node": 2},
        ("cluster.nccl_env={NCCL_P2P_DISABLE: 1}", *exchanges("0.6 GB/s")),
        measured=EXPOSED,
    ),
    Job(
        "a plugin without GPUDirect",
        "no_gpudirect",
        FAST,
        IB_NODES,
        ("cluster.inter_node.bandwidth=40 Gbit/s",),
        measured=("all_reduce", "exposed"),
        log=ring("P2P/CUMEM", "NET/IBext_v8/#", 4),
    ),
)
