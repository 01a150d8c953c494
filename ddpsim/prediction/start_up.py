"""What a job does before its first step: NCCL's communicator, and DDP's first broadcast."""

from __future__ import annotations

from ddpsim.cluster.transfers import duration_ns
from ddpsim.errors import InputError
from ddpsim.prediction.job import Job
from ddpsim.result.model import StartUp
from ddpsim.strategies.ddp.costs import DdpCosts
from ddpsim.units import NS_PER_S

# seconds of ncclCommInitRank, from the issues of NVIDIA/nccl and nccl-tests: 0.66 (nccl-tests 273)
# and 2.0 (534) on 8 ranks, 1.08 on 16 (1412), 4.1 on 32 (534); 150 on thousands (1156). Left out:
# 55 on 8 (1646), of which 52 load kernels
_FEW_RANKS = 32
_FEW_S, _MANY_S = (0.66, 4.1), (0.66, 150.0)


def start_up_of(job: Job) -> StartUp | None:
    """Return a job's start-up; None of one rank, or of DataParallel, which has no process group."""
    cluster, ddp = job.scenario.cluster, job.scenario.ddp
    if cluster.world_size == 1 or cluster.algorithm == "data_parallel":
        return None
    communicator_s = None
    if ddp.backend == "nccl":
        communicator_s = _FEW_S if cluster.world_size <= _FEW_RANKS else _MANY_S
    sent_bytes, sent_s = (_broadcast(job) if ddp.is_ddp else None) or (None, None)
    return StartUp(sent_bytes, sent_s, communicator_s)


def _broadcast(job: Job) -> tuple[int, float] | None:
    """Bytes and seconds of what rank 0 sends: flattened, broadcast, and copied from there.

    None where it has no price: a table of measured times may end before its sizes.
    """
    cost = job.network.of("world").cost
    if "broadcast" not in cost.operations:
        return None
    costs = DdpCosts(job.scenario.cluster.device, job.scenario.ddp, job.overheads)
    sent = costs.first_broadcasts(job.model)
    try:
        sent_ns = sum(duration_ns(cost.transfer("broadcast", each.size_bytes)) for each in sent)
    except InputError:
        return None
    copied_s = sum(each.flatten.device_s + each.unflatten.device_s for each in sent)
    return sum(each.size_bytes for each in sent), sent_ns / NS_PER_S + copied_s
