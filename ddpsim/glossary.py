"""The words of this field as ddpsim uses them: what `ddpsim explain TERM` prints."""

from __future__ import annotations

from ddpsim.glossary_of_training import TRAINING

TERMS: dict[str, str] = TRAINING | {
    "algorithm": """\
How an all-reduce goes (cluster.algorithm): ring, tree, nvls and others. Under auto NCCL's
tuner chooses for each size, as `ddpsim collective --tuning` shows.
docs/explanation/nccl.md.""",
    "amount": """\
What the step time means for a whole job: how long a billion tokens (a million samples of a model
without tokens) take on these GPUs, without pauses, and the GPU-hours: time x GPUs. Give
workload.dataset to see an epoch instead; `ddpsim plan` answers for a target.""",
    "algbw": """\
Algorithm bandwidth: message size over time, as nccl-tests prints it. It falls as ranks
are added even on the same links; compare links by busbw instead.""",
    "all-reduce": """\
The collective that sums a buffer over all ranks and leaves the sum on each. DDP
all-reduces one bucket of gradients at a time. A ring moves 2(N-1)/N of the bytes per
rank.""",
    "bottleneck": """\
What would shorten the step most: communication that is exposed, stragglers, data or the host.
It is compute where none of them costs as much as compute 10 % faster would save.""",
    "bucket": """\
Gradients that DDP reduces together in one all-reduce. A bucket closes once it has
at least its cap (ddp.bucket_cap_mb, in MiB), so it may exceed it by one tensor. Small
buckets overlap earlier but pay latency more often; large ones the reverse. By default
the first bucket has 1 MiB and the others 25 MiB; any explicit cap, even 25, holds for
the first one too.""",
    "busbw": """\
Bus bandwidth: algbw x 2(N-1)/N for an all-reduce. It is what each link really carries,
so it can be held against the hardware and does not depend on the number of ranks.""",
    "cause": """\
What may make a job slow, as `ddpsim diagnose` ranks them: each is a changed scenario that
is simulated. Its probability comes from assumed odds and from how well it predicts what was
measured. docs/explanation/diagnosis.md.""",
    "chakra": """\
A format for execution traces, a graph of one rank's work and collectives, which ASTRA-sim
and others replay. `ddpsim trace --format chakra` writes one step; `ddpsim import` reads
those of real jobs. docs/how-to/report.md.""",
    "compute time": """\
What the device's kernels take: measured (workload.step_time, a profile or a trace), or estimated
by the roofline. In the interval it is moved to both edges of its 80 % range.
docs/explanation/compute.md.""",
    "critical path": """\
The chain of work, transfers and waits that ends the step: shortening anything that is
not on it changes nothing.""",
    "data wait": """\
Time of a step in which the GPU waits for its next batch. Give `ddpsim diagnose` what a
profiler shows, or time next(loader).""",
    "devices": """\
GPUs and CPUs with their rates, memory and usual links (cluster.device). `ddpsim list devices`
prints the presets; `ddpsim calibrate device` measures one of your own.""",
    "ecmp": """\
Several equal paths out of a leaf switch (inter_node.uplinks), onto which flows are hashed.
Two on one path have half each, and the all-reduce waits for the slowest flow.""",
    "exposed": """\
Exposed communication: time in which the device has nothing to do but wait for
communication, anywhere in the step. The rest of the communication is hidden under
compute and costs nothing but interference.""",
    "extrapolation": """\
Using a measured log beyond its sizes, or for other ranks than it was measured on. An
error unless run.allow_extrapolation is true, and then a warning in every output.""",
    "gloo": """\
torch's CPU backend: two worker threads, so two buckets may be in flight and share the
link; waiting blocks the host.""",
    "gpu_direct": """\
GPUDirect RDMA: a NIC reads and writes GPU memory, past the host. Without it
(inter_node.gpu_direct: false) messages pass through host memory, and NCCL has no LL128
between nodes. NCCL_DEBUG=INFO shows GDRDMA where it is used. docs/explanation/nccl.md.""",
    "host": """\
The CPU that launches a GPU's work. It sets the step time where it takes longer to launch a
step's operators (30 to 65 us each, if not measured) than the device to compute them: with
small batches. A larger batch or torch.compile helps. docs/explanation/compute.md.""",
    "interference": """\
Compute slows while communication is in flight (it takes SMs and memory bandwidth), and
the reverse. As a calibration measured it (cluster.profile), else for NCCL by the published
average; for gloo without one it only widens the prediction interval upwards.""",
    "interval": """\
The 80 % prediction interval: where the mean step should lie, given how wrong each input
may be. Each input is moved to its edge alone and the effects add in quadrature. The
sources are listed under `prediction_interval_s` in --json.""",
    "iteration": """\
One optimizer step, from its start to the start of the next, in steady state (after DDP
has rebuilt its buckets), on the slowest rank.""",
    "jitter": """\
A random compute multiplier per rank and iteration: run.jitter, or else the spread of the
iterations that a model profile holds, or else the cluster profile's. All ranks wait for the
slowest in every all-reduce, so jitter lengthens the mean step. A cluster profile may also
say how much gloo's slowdown of compute varies from rank to rank.""",
    "flat": """\
Values of one setting that are as good as the best: all else equal, within 0.2 % of it by the goal
of the sweep. Where the scenario's own is among them, keep it: see `ddpsim sweep`.""",
    "front": """\
Of a sweep with two goals: the points that no other beats in one without losing in the other.""",
    "knee": """\
Where more GPUs begin to pay badly: the world size whose doubling is the first to give less
than 80 % of twice the throughput. The 80 % are our convention. Later doublings may do
better again, from a lower level: see `ddpsim plan`.""",
    "latency": """\
Time of one ring step that does not depend on its size, software included. An all-reduce
pays it 2(N-1) times.""",
    "machine": """\
A preset of something one can buy or rent (cluster.machine: dgx-h100): its device, how
many, links and NICs. `ddpsim explain cluster dgx-h100` draws it with its sources.""",
    "marginal efficiency": """\
What a doubling of the GPUs gives: throughput over twice that of half the GPUs (column x2 of
`ddpsim plan`). Scaling compares with one device, this with the size before.""",
    "mixed precision": """\
DDP's own (ddp.mixed_precision): forward and backward use copies of the parameters in half
precision, and gradients are sent in it. Autocast (workload.precision) is another way.
docs/explanation/hooks.md.""",
    "network model": """\
What collectives take: by links and NCCL's algorithm, by a cluster profile, or by a log of yours.
In the interval all of them together are moved to both edges of their 80 % range.""",
    "nvls": """\
NVLink SHARP: the NVSwitch sums what the GPUs send it, so that each sends a message once
instead of almost twice. NCCL takes it for large messages on Hopper and newer.""",
    "overlap": """\
overlap_fraction = 1 - exposed / communication time. Not what DDP logs under that name
(from the first bucket's start to the end of backward).""",
    "other": """\
The rest of a step: copies out of buckets, the buffers' broadcast, and gaps in which the device
waits for the host to launch.""",
    "parameter server": """\
Ranks send gradients to servers, which update the parameters and send them back
(ddp.strategy: parameter_server). The servers' links carry the traffic of all ranks.
docs/explanation/strategies.md.""",
    "peer-to-peer": """\
GPUs of a node that write into each other's memory, over NVLink or PCIe. Without it (in some
containers and virtual machines, or under NCCL_P2P_DISABLE=1) they share host memory's
bandwidth. NCCL's log then says `via SHM`.""",
    "prefetch": """\
Batches that a data loader keeps ready: workers x prefetch. It evens out short stalls; a
loader that is slower than the step is slower whatever the prefetch.""",
    "protocol": """\
How NCCL knows that data has come (cluster.protocol): LL flags every 4 bytes, LL128 every
120, Simple whole chunks. LL is quick and wastes half of the bandwidth, LL128 a sixteenth; Simple
wastes none and starts slowly.""",
    "rank": """\
One process of the job, and its GPU: 2 nodes of 8 GPUs have ranks 0 to 15.""",
    "rank variation": """\
GPUs, hosts and data loaders of one cluster differ, and DDP waits for the slowest. Where a
scenario does not say how, the interval's upper edge is raised. docs/explanation/diagnosis.md.""",
    "rdma": """\
NICs that move data without the CPU (InfiniBand, RoCE, EFA). With GPUDirect they read GPU
memory directly; without it data passes through host memory. NCCL's log says `NET/IB`, with
`GDRDMA` for GPUDirect, and `NET/Socket` where TCP is used instead.""",
    "rebuild": """\
After its first iteration DDP regroups its buckets by the order in which gradients
really became ready. Until then all gradients of a dtype are one bucket, and nothing
overlaps. With find_unused_parameters it never happens.""",
    "ring": """\
A ring all-reduce: each rank sends to its right neighbour and receives from its left, chunk by
chunk, in 2(N-1) steps of M/N bytes: N-1 to sum (a reduce-scatter), N-1 to spread the sum (an
all-gather). Whatever N, a rank sends less than 2M bytes. docs/explanation/nccl.md.""",
    "regret": """\
By how much a choice takes longer than the best one, per sample: see `ddpsim tune`.""",
    "roofline": """\
Compute time from a device's peak rates: FLOPs over the achieved rate, or bytes over the
achieved bandwidth, whichever takes longer. The achieved fractions are published or assumed: give
workload.step_time, measured on one device, to replace the estimate.""",
    "scaling": """\
scaling_efficiency: throughput per GPU over the throughput of one such device without
DDP. 100 % means that communication and DDP cost nothing. Where the optimizer is sharded, the device
updates as many parameters as a rank does.""",
    "skew": """\
Time spent inside collectives waiting for late peers. Every rank shows it but the late
one, so per-rank timers cannot find a straggler.""",
    "strategies": """\
How ranks train one model together (ddp.strategy): ddp; zero1, fully_shard, hsdp, fsdp1, deepspeed
and distributed_optimizer share parts of it out; naive, naive_flat, per_parameter and
parameter_server show what DDP improves; local_sgd averages parameters.
docs/explanation/strategies.md.""",
    "straggler": """\
A rank that computes more slowly than the others (cluster.stragglers). In DDP all ranks
run at the speed of the slowest.""",
    "step_time": """\
workload.step_time: forward + backward + optimizer of one micro-batch on ONE device,
without DDP and without waiting for data. Measure it after warm-up, with
torch.cuda.synchronize() around. It anchors the compute side of a prediction.
step_time.with_ddp: the same step under DDP on that one device alone (torchrun
--nproc-per-node 1). What it takes longer is DDP's own work, which is estimated
otherwise, and was up to three times as much on V100.""",
    "tree": """\
Sums flow up a tree of nodes and the result down, half of the bytes in each of two trees.
Latency grows as log N, a ring's as N; over two nodes it sends half of what a ring does.""",
    "trust": """\
Where an input came from, best first: measured (on these devices, by us or by ddpsim),
imported (your log), published (others' figures), datasheet, stated (written in the
scenario), assumed. An answer is no better than its worst important input.""",
    "throughput": """\
Samples that all ranks train on in a second, and each GPU. A language model's sample is one
sequence.""",
    "units": """\
Every quantity carries its unit: 5 us, 391.2 ms; 40 GiB; 100 Gbit/s (a link's bits), 20
GB/s (bytes; a bus bandwidth). k, M, G are decimal, Ki, Mi, Gi binary. Only
bucket_cap_mb is a bare number, as in torch: MiB (25 = 26 214 400 B). ddpsim prints sizes in
MiB and GiB, as torch counts buckets and memory, and rates in decimal bytes, as links are sold.""",
    "utilization": """\
GPU utilization as nvidia-smi shows it counts a GPU as busy while any kernel runs, an
NCCL kernel that waits for a peer included: 100 % does not mean that it computes.""",
    "weak scaling": """\
More GPUs with the same batch each, so that the global batch grows; what that does to
convergence is not modelled. Strong scaling keeps the global batch (`ddpsim plan
--global-batch`), so that each GPU has less to do.""",
    "calibration": """\
Measuring your own cluster, device or model (`ddpsim calibrate`) in place of estimates. The fit is
a profile, a JSON file that a scenario names. docs/how-to/calibrate.md.""",
    "channels": """\
Copies of a ring or tree that NCCL runs at once, each with thread blocks of its own on the
GPU. More of them carry more bytes, up to the links' rate. docs/explanation/nccl.md.""",
    "collective": """\
A transfer in which all ranks take part: all-reduce (sums, for all), reduce-scatter (sums, each
rank has a part), all-gather (parts, for all), broadcast (one rank's data, for all).""",
    "critical batch": """\
The global batch N from which larger batches pay less: B samples a step need 1 + B/N times the
samples of a small batch (McCandlish et al. 2018). `ddpsim plan --critical-batch N` counts that;
ddpsim does not know N. docs/explanation/training-loop.md.""",
    "estimate": """\
A step time without a measurement. Device-bound: the GPU's arithmetic sets it. Host-bound: the CPU
that launches kernels does. `ddpsim run` says which, and what a measured step_time would leave of
the interval. docs/explanation/compute.md.""",
    "leaf": """\
The switch that a node's NICs are plugged into. Oversubscribed (inter_node.oversubscription): its
links to other switches carry less than its nodes can send.""",
    "gil": """\
Python's global interpreter lock: one thread of a process runs Python at a time. DataParallel drives
all GPUs from threads of one process, which wait for each other; DDP has a process for each GPU.""",
    "memory": """\
Known bytes on one GPU: parameters, gradients, buckets, optimizer, buffers, activations. CUDA's
context, NCCL's buffers and what the allocator cannot use are not counted: often 1 to 3 GB.
docs/explanation/memory.md.""",
    "mfu": """\
Model FLOPs utilization: the FLOPs of the model over the step times the peak of all devices.
Recomputed forwards do not count. docs/explanation/training-loop.md.""",
    "nccl": """\
NVIDIA's library of collectives between GPUs, which torch calls for CUDA tensors. Its tuner chooses
algorithm and protocol by size. nccl-tests measures it: cluster.all_reduce takes such a log.""",
    "nvlink": """\
The links between GPUs of a node, several times faster than PCIe. NVSwitch connects all GPUs of
a node with them. cluster.intra_node has their bandwidth.""",
    "pat": """\
NCCL's algorithm for small reduce-scatters and all-gathers between nodes of one GPU: log2 N steps
in place of a ring's N-1, from NCCL 2.23 on. docs/explanation/nccl.md.""",
    "perfect overlap": """\
The step if all communication were hidden as far as it can be: the longer of compute and
communication. No overlap: their sum. Compute only: without communication, with a rank's own part of
a sharded optimizer. All leave out the strategy's copies and hooks (most of `other`).
`ddpsim run --verbose` shows the three for comparison.""",
    "warm-up": """\
The first iterations, which differ from the others: before DDP has rebuilt its buckets nothing
overlaps. The step time leaves them out.""",
    "start-up": """\
What a job does once: the launcher's rendezvous, NCCL's communicator, and the broadcast of
parameters and buffers in DDP's constructor. `ddpsim run --verbose` has a line on it; it is no part
of the step. Published: a communicator takes 0.66 to 4.1 s on 8 to 32 ranks, 150 s on thousands.""",
}

_ALIASES = {
    **dict.fromkeys(("batch_per_rank", "micro-batch", "micro-batches", "global batch"), "batch"),
    "broadcast_buffers": "buffers",
    **dict.fromkeys(("zero2", "zero3", "zero-1", "zero-2", "zero-3"), "sharding"),
    "float32 master weights": "precision",
    "bus bandwidth": "busbw",
    "profile": "calibration",
    "channel": "channels",
    "activation checkpointing": "checkpointing",
    **dict.fromkeys(("all-gather", "broadcast", "collectives", "reduce-scatter"), "collective"),
    **dict.fromkeys(("bf16_compress", "fp16_compress", "hook", "post_localsgd"), "comm hook"),
    **dict.fromkeys(("graph break", "optimize_ddp", "torch.compile"), "compile"),
    **dict.fromkeys(("distributeddataparallel", "reducer"), "ddp"),
    **dict.fromkeys(("device-bound", "host-bound"), "estimate"),
    **dict.fromkeys(("host time", "kernel", "launch overhead"), "host"),
    **dict.fromkeys(("barrier", "grad_scaler", "gradscaler", "read_loss_every"), "host wait"),
    **dict.fromkeys(("forward", "backward", "optimizer", "compute"), "compute time"),
    **dict.fromkeys(("gpu-hours", "epoch"), "amount"),
    **dict.fromkeys(("in flight", "hidden", "exposed comm", "communication"), "exposed"),
    "first iteration": "warm-up",
    **dict.fromkeys(("startup", "process group", "communicator", "rendezvous"), "start-up"),
    **dict.fromkeys(("ring all-reduce", "ring allreduce"), "ring"),
    **dict.fromkeys(
        ("ring simple", "ring ll", "ring ll128", "tree simple", "tree ll", "tree ll128"),
        "protocol",
    ),
    "strategy": "strategies",
    "device": "devices",
    "held up by": "straggler",
    "uncalibrated interference": "interference",
    "mib": "units",
    "oversubscription": "leaf",
    "post-local sgd": "local sgd",
    "fits": "memory",
    **dict.fromkeys(("nccl-tests", "tuner"), "nccl"),
    "nvswitch": "nvlink",
    **dict.fromkeys(("no overlap", "compute only"), "perfect overlap"),
    "powersgd": "power sgd",
    **dict.fromkeys(("amp", "autocast", "masters", "tf32"), "precision"),
    **dict.fromkeys(("ll", "ll128", "simple"), "protocol"),
    **dict.fromkeys(("quantization_perchannel", "quantization_pertensor"), "quantization"),
    "world size": "rank",
    "syncbatchnorm": "sync batch norm",
    **dict.fromkeys(
        ("assumed", "datasheet", "imported", "inputs", "measured", "published", "stated"), "trust"
    ),
    "find_unused_parameters": "unused parameters",
    "steady state": "iteration",
    "nic": "rdma",
    "uplinks": "ecmp",
    "bucket rebuild": "rebuild",
    "offload_policy": "offload",
    "cpu_offload": "offload",
    **dict.fromkeys(("backward_prefetch", "forward_prefetch"), "unit prefetch"),
    **dict.fromkeys(("flatparameter", "use_orig_params"), "flat parameter"),
    "reshard_after_forward": "reshard",
    **dict.fromkeys(
        (
            "deepspeed",
            "fsdp",
            "fsdp1",
            "fsdp2",
            "sharding_strategy",
            "fully_shard",
            "hsdp",
            "zero",
            "zero1",
            "megatron",
            "distributed_optimizer",
        ),
        "sharding",
    ),
    "gdr": "gpu_direct",
    "gpudirect": "gpu_direct",
    "hop": "latency",
    "dataparallel": "data parallel",
    "data_parallel": "data parallel",
    "machines": "machine",
    "pauses": "pause",
    "evaluation": "pause",
    "checkpoint_write": "pause",
    **dict.fromkeys(("failures", "goodput", "mtbf", "spares", "spot", "restart"), "reliability"),
    "input_copy": "input copy",
    "mixed_precision": "mixed precision",
    **dict.fromkeys(
        ("optimizer_in_backward", "overlap_with_ddp", "hook_with_zero_step", "shard_buckets"),
        "optimizer in backward",
    ),
    "allreduce": "all-reduce",
    **dict.fromkeys(("ring all-reduce", "ring allreduce", "ring-allreduce"), "ring"),
    "global interpreter lock": "gil",
    "all_reduce": "all-reduce",
    "bandwidth": "busbw",
    "buckets": "bucket",
    "bucket_cap_mb": "bucket",
    "confidence": "interval",
    "efficiency": "scaling",
    "exposed_comm": "exposed",
    "launch": "host",
    "no_sync": "accumulation",
    "operator": "host",
    "exposed communication": "exposed",
    "infiniband": "rdma",
    "odds": "cause",
    "p2p": "peer-to-peer",
    "prediction_interval": "interval",
    "sockets": "rdma",
    "stragglers": "straggler",
    "step": "iteration",
    "strong scaling": "weak scaling",
    "unit": "units",
    "x2": "marginal efficiency",
}


# how messages of torch begin, which people look up
_MESSAGES = {
    "expected to have finished reduction": "unused parameters",
}


def names() -> list[str]:
    """Every term, and what else it is called."""
    return [*TERMS, *_ALIASES]


def lookup(term: str) -> str | None:
    """The entry of a term, one of its other names or a message of torch; None if there is none."""
    folded = term.strip().lower()
    for message, name in _MESSAGES.items():
        if message in folded:
            return TERMS[name]
    for name in (
        folded,
        folded.replace("_", " "),
        folded.replace("_", "-"),
        folded.replace(" ", "_"),
    ):
        if entry := TERMS.get(_ALIASES.get(name, name)):
            return entry
    return None
