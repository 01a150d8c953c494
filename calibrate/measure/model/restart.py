"""What a restart and a checkpoint of a model take: process group, first step, writes, a load.

Checkpoints are those of torch.distributed.checkpoint, of the model under DDP with its optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.errors import MeasureError
from calibrate.measure.model.training import Training, batch_of, compute_threads, prepare
from calibrate.measure.ranks.job import Job, taking_part
from calibrate.measure.ranks.launch import run_rank
from calibrate.records.rounds import ModelOptions, OptimizerName
from ddpsim.units import format_bytes, format_bytes_per_s, format_duration

_LATER_STEPS = 3
_NAMES = ("sync", "async")  # of checkpoints


class RestartOptions(ModelOptions):
    """The model, as MODULE:FUNCTION, and the folder that checkpoints are written to."""

    path: Path
    optimizer: OptimizerName = "adamw"
    timeout_s: float = 300.0

    @property
    def kept(self) -> str:
        """Nothing: it prints at the end."""
        return "Nothing was kept."


def measure_restart(options: RestartOptions) -> None:
    """Measure in the job of torchrun's variables; every rank calls this, rank 0 prints.

    Raises MeasureError where the folder cannot be written to, the model cannot be used or a peer is
    lost.
    """
    began = time.perf_counter()
    with taking_part(options) as job, compute_threads(1):
        everyone = torch.ones(1, device=job.device)
        dist.all_reduce(everyone)  # NCCL connects its ranks with the first one
        group_s = time.perf_counter() - began
        batch = batch_of(options.model, options.batch)
        training = prepare(options.model, batch, job.device, options.optimizer, fused=options.fused)
        training = replace(training, model=DistributedDataParallel(training.model))
        first_s, *more_s = (
            _timed_s(job, lambda: (training.passes(), training.update()))
            for _ in range(1 + _LATER_STEPS)
        )
        later_s = min(more_s)
        ready_s = time.perf_counter() - began - _LATER_STEPS * later_s
        folder = options.path / "ddpsim-checkpoint"
        job.first_does(lambda: _make(folder))
        try:
            times = [group_s, ready_s, first_s, later_s, *_checkpoints(job, training, folder)]
            slowest = [max(each) for each in zip(*job.numbers(times), strict=True)]
            if job.rank == 0:
                size_bytes = sum(f.stat().st_size for f in (folder / "sync").rglob("*"))
                print("\n".join(_report_lines(job.world_size, size_bytes, slowest)), flush=True)
        finally:
            job.barrier()
            if job.rank == 0:
                rmtree(folder, ignore_errors=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        problem = f"{folder} cannot be made: {error.strerror}; name another folder"
        raise MeasureError(problem) from None


def _timed_s(job: Job, work: Callable[[], Any]) -> float:
    """Seconds of work that all ranks begin together, on host and device."""
    job.barrier()
    began = time.perf_counter()
    work()
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return time.perf_counter() - began


def _checkpoints(job: Job, training: Training, folder: Path) -> tuple[float, float, float, float]:
    """Seconds of a synchronous write, an asynchronous stall, until that is safe, and a load."""
    talk = dist.new_group(backend="gloo")
    weights, moments = get_state_dict(training.model, training.optimizer)
    state = {"model": weights, "optimizer": moments}

    written, begun = ({"checkpoint_id": folder / name, "process_group": talk} for name in _NAMES)
    sync_s, waiting = _timed_s(job, lambda: save(state, **written)), list[Any]()
    stall_s = _timed_s(job, lambda: waiting.append(async_save(state, **begun)))
    began = time.perf_counter()
    waiting[0].result()
    safe_s = time.perf_counter() - began
    return sync_s, stall_s, safe_s, _timed_s(job, lambda: load(state, **written))


def _report_lines(ranks: int, size_bytes: int, times_s: Sequence[float]) -> list[str]:
    """Times, as they were measured one after the other, and what to write into a scenario."""
    rate = format_bytes_per_s(size_bytes / times_s[4])
    group, ready, first, later, sync, stall, safe, loaded = map(format_duration, times_s)
    rows = {
        "process group": f"{group}, until {ranks} ranks have reduced once",
        "first step": f"{first}, later ones {later}",
        "ready": f"{ready}, with the model and its first step",
        "checkpoint": f"{format_bytes(size_bytes)} of all ranks",
        "synchronous": f"{sync}, {rate}",
        "asynchronous": f"{stall} of stall, and {safe} more until it is safe",
        "load": loaded,
    }
    reliability = f"{{init: {ready}, init_per_rank: 0 s, load: {loaded}}}"
    return [
        *(f"{name:<16}{text}" for name, text in rows.items()),
        "in a scenario, on as many ranks:",
        f"  reliability: {reliability}",
        f"  workload: {{checkpoint_write: {{every: auto, bandwidth: {rate}}}}}",
    ]


if __name__ == "__main__":
    run_rank(measure_restart, RestartOptions)
