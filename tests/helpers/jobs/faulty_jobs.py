"""Jobs with a fault that is known: all causes, and healthy ones."""

from __future__ import annotations

from shipped_scenarios import ROOT

from jobs.faulty_job import Job
from jobs.old_versions import OLD_VERSIONS

RESNET = {"model": "resnet50", "batch_per_rank": 64, "step_time": "75 ms"}
BERT = {
    "model": "bert-base",
    "batch_per_rank": 16,
    "seq_len": 384,
    "precision": "amp-bf16",
    "step_time": "110 ms",
    "optimizer": {"name": "adamw"},
}
IB = {"bandwidth": "100 Gbit/s", "nics_per_node": 4, "transport": "rdma"}
ONE_NODE = {"device": "a100-sxm-80gb", "nodes": 1, "gpus_per_node": 8}
IB_NODES = {"device": "a100-sxm-80gb", "nodes": 2, "gpus_per_node": 4, "inter_node": IB}
TCP_NODES = {
    "device": "a100-sxm-80gb",
    "nodes": 4,
    "gpus_per_node": 1,
    "inter_node": {"bandwidth": "100 Gbit/s", "transport": "tcp", "flow_bandwidth": "10 Gbit/s"},
    "nccl_env": {"NCCL_SOCKET_NTHREADS": 1},
}
MEASURED_NODE = {**ONE_NODE, "all_reduce": str(ROOT / "scenarios" / "all-reduce-8xa100.csv")}
NVLINK_NODE = {**ONE_NODE, "intra_node": {"bandwidth": "230 GB/s"}}
PCIE_NODE = {"device": "rtx-4090", "nodes": 1, "gpus_per_node": 4}


A100, H100 = "a100-sxm-80gb", "h100-sxm-80gb"
ESTIMATED = {"model": "resnet50", "batch_per_rank": 64, "precision": "amp-bf16"}
FAST = {**BERT, "step_time": "35 ms"}
SMALL_BERT = {"model": "bert-base", "batch_per_rank": 8, "seq_len": 128, "precision": "amp-bf16"}
SMALL = {"model": "resnet50", "batch_per_rank": 8, "precision": "amp-bf16"}


def ring(inside: str, between: str = "", nics: int = 1) -> tuple[str, ...]:
    """NCCL's lines of a ring through 2 x 4 ranks, or of one node of 8; `#` is a NIC's number."""
    hops = [i for i in range(7) if not (between and i == 3)]
    within = [f"Channel 00/0 : {i}[{i}] -> {i + 1}[{i + 1}] via {inside}" for i in hops]
    across = [between.replace("#", str(nic)) for nic in range(nics)] if between else []
    sent = [f"Channel 0{n}/0 : 3[3] -> 4[0] [send] via {via}" for n, via in enumerate(across)]
    return (*within, *sent)


EXPOSED, ALONE = ("exposed",), ("without_sync",)
HEALTHY = (
    Job("healthy on one node", "healthy", RESNET, ONE_NODE),
    Job("healthy over InfiniBand", "healthy", BERT, IB_NODES, measured=EXPOSED),
    Job("healthy over TCP", "healthy", BERT, TCP_NODES, measured=EXPOSED),
    Job("healthy, compute estimated", "healthy", ESTIMATED, ONE_NODE),
    Job("healthy on 1 to 8 GPUs", "healthy", RESNET, ONE_NODE, steps_on=(1, 2, 4)),
)
P2P = "cluster.nccl_env={NCCL_P2P_DISABLE: 1}"
IN_NODES = (
    Job(
        "NVLink not used",
        "no_peer_to_peer",
        BERT,
        NVLINK_NODE,
        (P2P, "cluster.intra_node.bandwidth=1.3 GB/s"),
        measured=EXPOSED,
    ),
    Job(
        "NCCL_PROTO=LL in nccl.conf",
        "low_latency_protocol",
        BERT,
        NVLINK_NODE,
        ("cluster.nccl_env={NCCL_PROTO: LL}",),
        measured=("all_reduce", "without_sync"),
    ),
    Job(
        "one channel",
        "few_channels",
        BERT,
        NVLINK_NODE,
        ("cluster.nccl_env={NCCL_MAX_NCHANNELS: 1}",),
        measured=("all_reduce", "without_sync"),
    ),
    Job(
        "a GPU with a narrow slot",
        "weak_link",
        BERT,
        NVLINK_NODE,
        ("cluster.weak_links={7: 0.03}",),
        measured=("all_reduce", "without_sync"),
        log=ring("P2P/CUMEM"),
    ),
)
MANAGEMENT = "{bandwidth: %s, transport: tcp, nics_per_node: 1}"
BETWEEN_NODES = (
    Job(
        "NCCL_IB_DISABLE=1",
        "sockets",
        BERT,
        IB_NODES,
        ("cluster.nccl_env={NCCL_IB_DISABLE: 1}",),
        measured=("exposed", "all_reduce"),
    ),
    Job(
        "over 10 Gbit/s Ethernet",
        "management_network",
        BERT,
        IB_NODES,
        (f"cluster.inter_node={MANAGEMENT % '10 Gbit/s'}",),
        measured=EXPOSED,
    ),
    Job(
        "over 1 Gbit/s Ethernet",
        "management_network",
        BERT,
        IB_NODES,
        (f"cluster.inter_node={MANAGEMENT % '1 Gbit/s'}",),
        measured=ALONE,
    ),
    Job(
        "a cloud's limit of a flow",
        "tcp_stream_limit",
        BERT,
        TCP_NODES,
        ("cluster.inter_node.flow_bandwidth=1.5 Gbit/s",),
        measured=EXPOSED,
    ),
    Job(
        "a limit of a flow, 1 to 4 nodes",
        "tcp_stream_limit",
        RESNET,
        TCP_NODES,
        ("cluster.inter_node.flow_bandwidth=0.7 Gbit/s",),
        steps_on=(1, 2),
    ),
    Job(
        "one NIC of four",
        "fewer_nics",
        FAST,
        IB_NODES,
        ("cluster.inter_node.nics_per_node=1",),
        measured=("all_reduce", "exposed"),
        log=ring("P2P/CUMEM", "NET/IB/#/GDRDMA"),
    ),
    Job(
        "no GPUDirect RDMA",
        "no_gpudirect",
        FAST,
        IB_NODES,
        ("cluster.inter_node.bandwidth=55 Gbit/s",),
        measured=("all_reduce", "exposed"),
        log=ring("P2P/CUMEM", "NET/IB/#", 4),
    ),
    Job(
        "an oversubscribed switch between nodes with RDMA",
        "congestion",
        BERT,
        IB_NODES,
        ("cluster.inter_node.oversubscription=8",),
        measured=("all_reduce", "exposed"),
        log=ring("P2P/CUMEM", "NET/IB/#/GDRDMA", 4),
    ),
    Job(
        "an oversubscribed switch",
        "congestion",
        RESNET,
        TCP_NODES,
        ("cluster.inter_node.oversubscription=12",),
        measured=("all_reduce", "exposed"),
    ),
)
MEASURED_LINKS = (
    Job(
        "all-reduces slower than nccl-tests measured",
        "slow_collectives",
        BERT,
        MEASURED_NODE,
        stretched={"network": 20.0},
        measured=("all_reduce", "without_sync"),
    ),
)
COMPUTE = (
    Job(
        "a loss that is read in every step",
        "loss_read",
        SMALL_BERT,
        {**ONE_NODE, "device": H100},
        ("workload.read_loss_every=1",),
        measured=("without_sync", "data_wait"),
    ),
    Job("a slow rank", "slow_rank", RESNET, ONE_NODE, slow={5: 1.6}, measured=ALONE),
    Job(
        "a rank that another process slows down",
        "slow_rank",
        BERT,
        IB_NODES,
        slow={2: 1.35},
        measured=("exposed", "all_reduce"),
    ),
    Job(
        "a hot rank over TCP",
        "slow_rank",
        RESNET,
        TCP_NODES,
        slow={3: 2.0},
        measured=("exposed", "all_reduce"),
    ),
    Job(
        "clocks capped",
        "slow_gpus",
        RESNET,
        ONE_NODE,
        all_slow=1.45,
        measured=("without_sync", "data_wait"),
    ),
    Job(
        "fp32 where amp is stated",
        "other_precision",
        ESTIMATED,
        ONE_NODE,
        ("workload.precision=fp32",),
        measured=("data_wait", "without_sync"),
    ),
    Job(
        "four times the batch",
        "other_batch",
        ESTIMATED,
        ONE_NODE,
        ("workload.batch_per_rank=256",),
        measured=("data_wait", "without_sync"),
    ),
    Job(
        "the global batch on each of 8 ranks",
        "other_batch",
        RESNET,
        ONE_NODE,
        all_slow=8.0,
        measured=("without_sync", "data_wait"),
    ),
    Job(
        "no fused attention",
        "eager_attention",
        {"model": "bert-base", "batch_per_rank": 32, "seq_len": 512, "precision": "amp-bf16"},
        ONE_NODE,
        ("workload.attention=eager",),
        measured=("data_wait", "without_sync"),
    ),
    Job(
        "a host of too few cores",
        "busy_host",
        SMALL,
        {**ONE_NODE, "device": H100},
        ("cluster.device={preset: h100-sxm-80gb, operator: 90 us, launch: 18 us}",),
        measured=("data_wait", "without_sync"),
    ),
    Job(
        "no compilation",
        "not_compiled",
        {**SMALL, "compile": True},
        {**ONE_NODE, "device": H100},
        ("workload.compile=false",),
        measured=("data_wait", "without_sync"),
    ),
)
DATA = (
    Job(
        "too few workers",
        "slow_loader",
        RESNET,
        ONE_NODE,
        ("workload.data={rate: 500 samples/s, workers: 2}",),
        measured=("data_wait",),
    ),
    Job(
        "one disk for the loaders of a node",
        "shared_loader",
        RESNET,
        ONE_NODE,
        disk=2000.0,
        measured=("data_wait",),
        steps_on=(1, 2),
    ),
    Job(
        "a loader slower than stated",
        "slow_loader",
        {**RESNET, "data": {"rate": "1500 samples/s", "workers": 4}},
        ONE_NODE,
        ("workload.data.rate=330 samples/s",),
        measured=("exposed",),
    ),
)
OPTIONS = (
    Job(
        "accumulation without no_sync over InfiniBand",
        "without_no_sync",
        FAST,
        {**IB_NODES, "inter_node": {**IB, "nics_per_node": 1}},
        ("ddp.no_sync=false",),
        measured=("exposed", "all_reduce"),
        ddp={"accumulation_steps": 3},
    ),
    Job(
        "nothing overlaps",
        "no_overlap",
        {**BERT, "step_time": "300 ms"},
        TCP_NODES,
        ("ddp.bucket_cap_mb=100000",),
        measured=("exposed", "all_reduce"),
    ),
    Job(
        "buckets of 1 MiB",
        "small_buckets",
        FAST,
        IB_NODES,
        ("ddp.bucket_cap_mb=1",),
        measured=("exposed", "all_reduce"),
    ),
    Job(
        "SyncBatchNorm over TCP",
        "sync_batch_norm",
        RESNET,
        TCP_NODES,
        ("workload.sync_batch_norm=true",),
        measured=("exposed", "all_reduce", "without_sync"),
    ),
    Job(
        "nn.DataParallel",
        "data_parallel",
        {**BERT, "batch_per_rank": 4, "step_time": "30 ms"},
        {**PCIE_NODE, "intra_node": {"bandwidth": "12 GB/s", "latency": "8 us"}},
        ("cluster.algorithm=data_parallel",),
        measured=("all_reduce", "without_sync"),
    ),
    Job(
        "the hook is not registered",
        "hook_missing",
        BERT,
        TCP_NODES,
        ("ddp.comm_hook=none",),
        measured=("all_reduce", "without_sync"),
        ddp={"comm_hook": "bf16_compress"},
    ),
    Job(
        "find_unused_parameters in a loop that waits for its host",
        "unused_parameters",
        SMALL,
        {**ONE_NODE, "device": H100},
        ("ddp.find_unused_parameters=true",),
        measured=("all_reduce", "without_sync"),
    ),
    *OLD_VERSIONS,
)
SMALL_ON_8 = (SMALL, {**ONE_NODE, "device": H100})
BERT_ON_8 = (SMALL_BERT, {**ONE_NODE, "device": H100})
DEBUGGING = (
    Job(
        "anomaly mode, left on",
        "anomaly_mode",
        *SMALL_ON_8,
        ("workload.debug.detect_anomaly=true",),
        measured=("data_wait", "without_sync"),
    ),
    Job(
        "anomaly mode of a larger model",
        "anomaly_mode",
        *BERT_ON_8,
        ("workload.debug.detect_anomaly=true",),
        measured=("data_wait", "without_sync"),
    ),
    Job(
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        "distributed_debug",
        *BERT_ON_8,
        ("workload.debug.distributed_detail=true",),
        measured=("all_reduce", "without_sync"),
    ),
    Job(
        "NCCL_DEBUG_SUBSYS=COLL on a slow file system",
        "nccl_debug",
        *SMALL_ON_8,
        ("workload.debug.nccl_line=3 ms",),
        measured=("all_reduce", "without_sync"),
        log=(*ring("P2P/CUMEM"), "AllReduce: opCount 3 sendbuff 0x7f recvbuff 0x7f count 6553600"),
    ),
    Job(
        "buckets in the order of another graph",
        "stale_buckets",
        {**BERT, "step_time": "300 ms"},
        TCP_NODES,
        ("ddp.bucket_order=reversed",),
        measured=("exposed", "all_reduce"),
    ),
)
FAULTY = (*DEBUGGING, *IN_NODES, *BETWEEN_NODES, *MEASURED_LINKS, *COMPUTE, *DATA, *OPTIONS)
