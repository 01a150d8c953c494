"""Measure steps of real training loops in rounds, as `calibrate.records.rounds` describes them.

Every variant has a model of its own, so that DDP's buckets of one do not disturb another's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from calibrate.files import check_writable, rescued
from calibrate.measure.ddp.interleaved import Interleaved
from calibrate.measure.ddp.stepper import Stepper
from calibrate.measure.errors import MeasureError
from calibrate.measure.host.environment import check_same, environment, rank_facts
from calibrate.measure.host.machine import usable_cores
from calibrate.measure.model.training import (
    Training,
    batch_of,
    broadcast_buffers,
    compute_threads,
    dtype_name,
    is_compiled,
    not_modelled,
    prepare,
    reduced_parameters,
    told_of_unused,
)
from calibrate.measure.ranks.job import Job, on_the_cpu, taking_part
from calibrate.measure.ranks.launch import run_rank
from calibrate.records.record import Environment
from calibrate.records.rounds import (
    CORES_OF_RANKS,
    KEEP_S,
    Parameter,
    RoundOptions,
    Rounds,
    save_rounds,
)
from calibrate.records.variant import DDP


def measure_rounds(options: RoundOptions) -> Rounds:
    """Measure in the job of torchrun's variables; every rank calls this, rank 0 writes the file.

    Whole, with the rounds until then, now and then and at the end. Raises MeasureError where the
    file is there already or cannot be written, the model cannot be used, ranks differ or a peer is
    lost.
    """
    with taking_part(options) as job, compute_threads(1):
        try:
            return _measure(job, options)
        except torch.cuda.OutOfMemoryError:
            raise MeasureError(
                f"rank {job.rank} is out of memory: each of {len(options.variants)} variants holds "
                "a copy of the model; name fewer --caps, or a smaller --batch"
            ) from None


def _measure(job: Job, options: RoundOptions) -> Rounds:
    began = time.monotonic()
    job.first_does(lambda: _check_output(options.output))
    facts = rank_facts(job)
    check_same(job.everyone(facts))
    here = _with_cores(environment(job, facts), job)
    batch = batch_of(options.model, options.batch)
    bare = prepare(options.model, batch, job.device, options.optimizer, fused=options.fused)
    if job.rank == 0:
        for warning in (*filter(None, [on_the_cpu(job)]), *not_modelled(bare.model)):
            print(f"warning   {warning}", flush=True)
    job.check(_unused(bare, options) or _compiled(bare, options))
    layout, finds = job.place.layout, options.find_unused_parameters
    steppers = [
        Stepper(bare, variant, layout, find_unused_parameters=finds) for variant in options.variants
    ]
    session = Interleaved(job, options, bare, steppers)

    def save() -> Rounds:
        """With the rounds until now, of all ranks."""
        session.sum_up()
        rounds = Rounds(
            environment=here,
            layout=layout.model_copy(
                update={"line_rate_bytes_per_s": options.line_rate_bytes_per_s}
            ),
            model=options.model,
            batch_per_rank=batch,
            optimizer=options.optimizer,
            fused=options.fused,
            find_unused_parameters=options.find_unused_parameters,
            parameters=_parameters(job, bare, session),
            buffers=tuple(
                (str(b.dtype).removeprefix("torch."), b.numel())
                for b in broadcast_buffers(bare.model)
                if b.numel()
            ),
            alone=session.alone(),
            variants=tuple(session.variant(stepper) for stepper in steppers),
            all_reduce=session.all_reduces(),
            elapsed_s=round(time.monotonic() - began, 1),
        )
        job.first_does(lambda: _save(rounds, options.output))
        return rounds

    session.run(save, KEEP_S)
    return save()


def _unused(bare: Training, options: RoundOptions) -> str:
    """What DDP would stop at in its second iteration; nothing where it would not."""
    needing = [v for v in options.variants if v.strategy in DDP and not v.find_unused_parameters]
    if not bare.unused or not needing or options.find_unused_parameters:
        return ""
    return (
        f"{told_of_unused(bare)} of {options.model} got no gradient, which DDP takes with "
        "find_unused_parameters=True alone: add --find-unused-parameters, or let the loss need it"
    )


def _compiled(bare: Training, options: RoundOptions) -> str:
    """Torch keeps what it compiled with the code, and the variants' models are of one code."""
    if not any(map(is_compiled, bare.model.modules())):
        return ""
    return (
        f"{options.model} is compiled, and torch would run the graph of one variant in all: each "
        "needs a process of its own, which rounds do not have; return the model uncompiled"
    )


def _with_cores(here: Environment, job: Job) -> Environment:
    """The environment, with the cores that each rank may use: "0,1 | 2,3"."""
    mine = ",".join(str(core) for core in usable_cores())
    return here.model_copy(
        update={"details": here.details | {CORES_OF_RANKS: " | ".join(job.everyone(mine))}}
    )


def _check_output(path: Path) -> None:
    if path.exists():
        raise MeasureError(f"{path} is there already: name another file")
    check_writable(path)


def _save(rounds: Rounds, path: Path) -> None:
    try:
        save_rounds(rounds, path)
    except OSError as error:
        kept = rescued("rounds.json", rounds.model_dump_json(by_alias=True) + "\n")
        raise MeasureError(f"{path} cannot be written: {error.strerror}. {kept}") from None


def _parameters(job: Job, training: Training, session: Interleaved) -> tuple[Parameter, ...]:
    """The parameters that DDP reduces, with what every rank says of their ready times and hooks."""
    named = [(n, p) for n, p in reduced_parameters(training.model).items() if p.numel()]

    def of_ranks(times: Mapping[str, float]) -> list[list[float]]:
        return job.numbers([times.get(name, math.nan) for name, _ in named])

    ready, hooks_s = of_ranks(session.ready), session.ddp_hooks()
    hooks = of_ranks(hooks_s) if hooks_s else ()
    return tuple(
        Parameter(
            name=name,
            numel=parameter.numel(),
            dtype=dtype_name(name, parameter),
            ready_s=tuple(_known(rank[i]) for rank in ready),
            ddp_hook_s=tuple(_known(rank[i]) for rank in hooks),
            sparse=name in session.sparse,
            rows=parameter.shape[0] if parameter.dim() else None,
        )
        for i, (name, parameter) in enumerate(named)
    )


def _known(seconds: float) -> float | None:
    """To the nanosecond: the order of gradients that are ready together must not be lost."""
    return None if math.isnan(seconds) else round(seconds, 9)


if __name__ == "__main__":
    run_rank(measure_rounds, RoundOptions)
