"""Causes in a rank's own work: its compute, its host, its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from ddpsim.diagnosis.case import Case, Change
from ddpsim.diagnosis.hypothesis import FactName, Hypothesis, scaled, switch
from ddpsim.scenario.workload import Precision

SHARED_LOADER = "shared_loader"
LOADERS = ("slow_loader", SHARED_LOADER)
LONGER = {FactName.WORK: "longer"}  # what traces show where all ranks compute longer
_PRECISIONS: tuple[str, ...] = get_args(Precision)
_LATE = (1.05, 2.0, 5.0, 12.0)  # a batch's time, of the predicted step
_BATCHES = (0.25, 0.5, 2.0, 4.0)
_WORKERS = 4
_AS_STATED = "make the job what the scenario says, or make the scenario say what the job is"


def _is_gpu(case: Case) -> bool:
    return case.cluster.device.kind == "gpu"


def _slow_ranks(case: Case) -> Sequence[float]:
    """How many times as long one rank computes; none where each rank draws its own speed."""
    stragglers = case.cluster.stragglers
    drawn = stragglers is not None and stragglers.factors is None
    return (1.1, 1.5, 2.5, 8.0) if case.whole and case.cluster.world_size > 1 and not drawn else ()


def _slow_rank(case: Case, times: float) -> Change:
    """Slow the last rank, which jobs on fewer GPUs do not have."""
    last = case.cluster.world_size - 1
    factors = (case.cluster.stragglers and case.cluster.stragglers.factors) or {}
    factor = min(1000.0, times * factors.get(last, 1.0))
    return Change((f"cluster.stragglers.factors.{last}={factor:.4g}",))


def _precisions(case: Case) -> Sequence[float]:
    """The device's other precisions, by number from 1, where compute is estimated."""
    if not case.is_estimated:
        return ()
    stated, rates = case.scenario.workload.precision, case.cluster.device.peak_flops_per_s
    others = [name for name in _PRECISIONS if name != stated and name.split("-")[-1] in rates]
    return [1.0 + _PRECISIONS.index(name) for name in others]


def _precision_of(number: float) -> str:
    return _PRECISIONS[round(number) - 1]


def _batches(case: Case) -> Sequence[float]:
    """Parts and multiples of the stated batch; by the ranks too, a global batch taken for one."""
    ranks = case.cluster.world_size
    return sorted({*_BATCHES, 1.0 / ranks, float(ranks)} - {1.0})


def _other_batch(case: Case, times: float) -> Change:
    """A measured step grows with its samples (assumed)."""
    batch = max(1, round(case.scenario.workload.batch_per_rank * times))
    if case.is_estimated:
        return Change((f"workload.batch_per_rank={batch}",))
    return Change(factors={"compute": times})


def _late_batches(case: Case) -> Sequence[float]:
    """Samples per second of one rank's loader, too few for the predicted step."""
    samples = case.scenario.samples_per_rank
    return [samples / (late * case.step_s) for late in _LATE]


def _slow_loader(case: Case, rate: float) -> Change:
    """A loader of that rate on each rank."""
    rate_text = f"{rate:.6g} samples/s"
    if case.scenario.workload.data:
        return Change((f"workload.data.rate={rate_text}",))
    return Change((f"workload.data={{rate: {rate_text}, workers: {_WORKERS}}}",))


COMPUTE = (
    Hypothesis(
        "slow_rank",
        5.0,
        "one rank is slow: it computes {size} as long as the others",
        "look for another process on that GPU or its host, and for its clock; leave that node out",
        _slow_ranks,
        _slow_rank,
        "{:.3g} times".format,
        falls=1.5,
        signs={"gpu_state": "one GPU at a lower clock", "per_rank": "longer on one rank"},
        shows={FactName.RANKS: "one slower", **LONGER},
    ),
    Hypothesis(
        "slow_gpus",
        3.0,
        "all GPUs are slow: they compute {size} as long as they should",
        "look at power caps and temperature (nvidia-smi -q -d PERFORMANCE), and for other "
        "processes on the GPUs",
        lambda _case: (1.1, 1.4, 2.0, 3.0),
        scaled("compute"),
        "{:.3g} times".format,
        falls=2.0,
        signs={"gpu_state": "all clocks low", "per_rank": "longer on all ranks"},
        shows=LONGER,
    ),
    Hypothesis(
        "busy_host",
        4.0,
        "hosts launch slowly: {size} as long for each operator",
        "give each rank cores of its own (--cpus-per-task, OMP_NUM_THREADS); turn off "
        "CUDA_LAUNCH_BLOCKING and .item() in the loop; try torch.compile",
        lambda case: (1.5, 3.0, 6.0, 12.0) if _is_gpu(case) and case.is_estimated else (),
        scaled("host"),
        "{:.3g} times".format,
        falls=1.0,
        signs={"gpu_state": "utilization below 90 %", "per_rank": "longer on all ranks"},
        shows=LONGER,
    ),
    switch(
        "loss_read",
        4.0,
        "the loop reads the loss in every step: the host waits for the GPU",
        "call loss.item() every 50 steps; log, print and check for NaN as rarely",
        lambda case: _is_gpu(case) and case.scenario.workload.read_loss_every is None,
        "workload.read_loss_every=1",
        signs={"code": ".item(), or a print, in every step"},
        shows={FactName.READS: "in every step"},
    ),
    Hypothesis(
        "other_precision",
        4.0,
        "compute is done in {size}",
        _AS_STATED,
        _precisions,
        lambda _case, number: Change((f"workload.precision={_precision_of(number)}",)),
        _precision_of,
        graded=False,
        signs={"code": "another precision", "per_rank": "longer on all ranks"},
        shows=LONGER,
    ),
    Hypothesis(
        "other_batch",
        3.0,
        "a rank works on {size} as many samples a step as stated",
        _AS_STATED,
        _batches,
        _other_batch,
        "{:.3g} times".format,
        graded=False,
        signs={"code": "another batch", "per_rank": "longer on all ranks"},
        shows=LONGER,
    ),
    switch(
        "eager_attention",
        2.0,
        "attention is written out: the fused kernels are not used",
        "set attn_implementation='sdpa'; look at masks and dtypes that fused kernels do not take",
        lambda case: (
            case.is_estimated
            and case.scenario.workload.model
            and case.scenario.workload.attention != "eager"
        ),
        "workload.attention=eager",
        signs={"code": "eager attention", "per_rank": "longer on all ranks"},
        shows=LONGER,
    ),
    switch(
        "not_compiled",
        2.0,
        "torch.compile has no effect: the model runs as it is written",
        "run with TORCH_LOGS=graph_breaks,recompiles",
        lambda case: case.scenario.workload.compile and case.is_estimated,
        "workload.compile=false",
        signs={"code": "no torch.compile", "per_rank": "longer on all ranks"},
        shows=LONGER,
    ),
)
DATA = (
    Hypothesis(
        LOADERS[0],
        8.0,
        "the data loader of a rank delivers only {size}",
        "more workers (num_workers), persistent_workers=True, pin_memory=True, data that is "
        "decoded ahead; look at the disk and at the cores that a rank may use",
        _late_batches,
        _slow_loader,
        "{:.3g} samples/s".format,
        falls=0.5,
        signs={"gpu_state": "utilization below 90 %"},
    ),
    Hypothesis(
        SHARED_LOADER,
        5.0,
        "the loaders of a node share what limits them (cores, disk, network): {size} together",
        "fewer workers than cores on a node; a local or faster disk; data that is decoded ahead",
        lambda case: [rate * case.cluster.gpus_per_node for rate in _late_batches(case)],
        lambda case, rate: _slow_loader(case, rate / case.cluster.gpus_per_node),
        "{:.3g} samples/s".format,
        falls=0.5,
        signs={"gpu_state": "utilization below 90 %"},
    ),
)
