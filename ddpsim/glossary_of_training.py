"""Words of the glossary for how a model is trained: strategies, hooks, and what the loop does."""

from __future__ import annotations

TRAINING: dict[str, str] = {
    "accumulation": """\
Several micro-batches per optimizer step (ddp.accumulation_steps). DDP communicates in
the last one's backward only (no_sync in the others), so communication is paid once per
step and less of it is exposed.""",
    "batch": """\
Samples of one micro-batch on one rank (workload.batch_per_rank). The global batch is that times
ddp.accumulation_steps times the ranks: what one step trains on.""",
    "buffers": """\
What a model keeps besides parameters, such as batch norm's statistics. DDP broadcasts rank 0's
before a forward (ddp.broadcast_buffers). Without that each rank keeps its own.""",
    "checkpointing": """\
Activation checkpointing (workload.checkpointing): a block keeps its input alone, and its forward
runs again in the backward. Memory falls, the backward takes longer. A policy such as selective
keeps some outputs besides.
docs/explanation/memory.md.""",
    "comm hook": """\
What DDP does to a bucket in place of an all-reduce (ddp.comm_hook). fp16_compress and
bf16_compress send two bytes a gradient. powerSGD sends narrow matrices, top_k and quantization
gather fewer bytes, post_localSGD reduces inside a node. All but allreduce change the gradients.""",
    "compile": """\
torch.compile (workload.compile): fewer operators, so less host time. A compiled graph has its
gradients at its end; torch splits it at buckets so that DDP can overlap (ddp.optimize_ddp).
docs/explanation/compute.md.""",
    "data parallel": """\
torch.nn.DataParallel, one process for all GPUs of a machine (algorithm: data_parallel):
parameters leave GPU 0 before each forward and gradients come back after the backward.
Nothing overlaps; DistributedDataParallel is what to use.""",
    "ddp": """\
torch.nn.parallel.DistributedDataParallel: a model's copy on each rank, whose gradients are
averaged bucket by bucket during the backward. Its reducer copies gradients into buckets and
starts the all-reduces.""",
    "float8": """\
Linear layers whose products are of one byte an element (workload.float8), as torchao trains them:
operands are cast and scaled before each product. docs/explanation/compute.md.""",
    "host wait": """\
A call that holds the host until the GPU is done, such as loss.item() (workload.read_loss_every),
dist.barrier() (workload.barrier_every), where it waits for all ranks too, or a GradScaler's step.
The GPU then idles until new work is launched.
docs/explanation/training-loop.md.""",
    "flat parameter": """\
All parameters of a unit of fsdp1 as one tensor, padded to a multiple of the ranks. It is gathered,
and its gradient reduced, as one. Source: torch's FlatParameter. docs/explanation/sharding.md.""",
    "input copy": """\
Inputs copied from the host to the device in each micro-batch (workload.input_copy), over PCIe and
on the stream that computes. What is not pinned is staged by the host first; without non_blocking
the host waits. Source: CUDA's runtime API. docs/explanation/training-loop.md.""",
    "join": """\
DDP's join() (ddp.join), for ranks with unequal numbers of inputs: every forward counts the ranks
that have some with an all-reduce, and its host waits. Source: torch's distributed.py.
docs/explanation/training-loop.md.""",
    "local sgd": """\
Ranks train alone and average their parameters every few steps (ddp.strategy: local_sgd). It is
another training than DDP. docs/explanation/strategies.md.""",
    "offload": """\
Shards, gradients and the optimizer's state on the host (ddp.fully_shard.offload_policy,
ddp.fsdp1.cpu_offload). Each unit's shards are copied to the GPU before they are gathered.""",
    "optimizer in backward": """\
Each bucket's parameters are updated once it is reduced, and its gradients freed
(ddp.optimizer_in_backward), or updated by one rank and broadcast (ddp.zero1.overlap_with_ddp).
Source: torch's optimizer_overlap_hooks.py and ddp_zero_hook.py.
docs/explanation/hooks.md, docs/explanation/zero.md.""",
    "pause": """\
What the loop does between steps now and then: an evaluation (workload.evaluation) or a checkpoint
(workload.checkpoint_write) every so many steps. No step has it in its time; epochs and plans count
it. docs/explanation/training-loop.md.""",
    "power sgd": """\
A hook that sends two narrow matrices in place of each gradient (ddp.comm_hook: powerSGD). Few
bytes, but three all-reduces a bucket and a host that waits. docs/explanation/hooks.md.""",
    "precision": """\
torch's arithmetic (workload.precision). amp-bf16 and amp-fp16 are autocast: products in two
bytes, parameters and gradients in float32. bf16: parameters and gradients in two bytes, too.
Masters are float32 copies of such parameters, which the optimizer updates.""",
    "quantization": """\
Hooks of torch that send gradients in 8 bits (ddp.comm_hook: quantization_pertensor or
_perchannel). They gather, so that bytes grow with the ranks: more than an all-reduce from 8
ranks on. docs/explanation/hooks.md.""",
    "reliability": """\
What interrupts a training of days (reliability): failures by their mean time between (mtbf),
detection, spare nodes, restarts, maintenance, spot notices. `plan` then gives the calendar time
with p10 and p90, and the goodput: the share of the time that is steps of use.
docs/explanation/reliability.md.""",
    "reshard": """\
Freeing gathered parameters after the forward (ddp.fully_shard.reshard_after_forward). default:
the backward gathers them again (ZeRO-3), but for the root's, which stay. true: the root's too.
false: all stay (ZeRO-2). A number: so many ranks keep one copy.""",
    "sharding": """\
A part of 1/N of the optimizer's state (ZeRO-1: zero1, distributed_optimizer, deepspeed), of
gradients too (ZeRO-2) and of parameters too (ZeRO-3) on each rank. fully_shard is torch's
FSDP2, fsdp1 the older FullyShardedDataParallel; hsdp shards inside a node and replicates
between nodes. A unit is a module whose parameters are gathered, and whose gradients are
reduced, together.""",
    "sync batch norm": """\
torch.nn.SyncBatchNorm (workload.sync_batch_norm): batch norms with the statistics of all ranks.
Each layer waits for the network twice a step. docs/explanation/training-loop.md.""",
    "top-k": """\
A hook that sends the largest gradients alone, with their places (ddp.comm_hook: top_k). What
arrives grows with the ranks. docs/explanation/hooks.md.""",
    "unit prefetch": """\
An all-gather of the next unit's parameters, launched before this unit's work has ended
(ddp.fsdp1.backward_prefetch and forward_prefetch; fully_shard always does it in the backward).
docs/explanation/sharding.md.""",
    "unused parameters": """\
Parameters without a gradient in a step. Their bucket is never reduced, so DDP ends the next forward
with "Expected to have finished reduction in the prior iteration". ddp.find_unused_parameters looks
for them in each step, which costs host time and an all-reduce; or let the loss need them.""",
    "parameter server": """\
ddp.strategy: parameter_server. One rank or several hold the parameters: all others send gradients
to them and get parameters back. A server's link carries the bytes of all ranks, where a ring's
carry those of one. docs/explanation/strategies.md.""",
}
