"""Measure steps of real training loops in rounds, as `calibrate.records.rounds` describes them.

Every variant has a model of its own, so that DDP's buckets of one do not disturb another's. On a
CPU a few copies of the bare model take turns: where in memory one lies makes it faster or slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from calibrate.files import check_writable, rescued
from calibrate.measure.cluster.rounds import LAUNCH_S, BesideAllReduces, all_at_once
from calibrate.measure.ddp.loops import PARTS, ReducedAsByDdp, Row, Stepper, step
from calibrate.measure.errors import MeasureError
from calibrate.measure.host.environment import check_same, environment, rank_facts
from calibrate.measure.host.machine import usable_cores
from calibrate.measure.model.profile import ready_times
from calibrate.measure.model.samples import (
    ONE_BUCKET_MIB,
    WARMUPS,
    HookTimes,
    Samples,
    alone,
    hook_cost_s,
    iterate,
)
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
    unused_in_words,
)
from calibrate.measure.ranks.job import Job, on_the_cpu, taking_part
from calibrate.measure.ranks.launch import run_rank
from calibrate.records.rounds import (
    ALONE_PER_ROUND,
    CORES_OF_RANKS,
    KEEP_S,
    AllReduceSamples,
    Alone,
    Logged,
    Parameter,
    RoundOptions,
    Rounds,
    Steps,
    VariantSamples,
    save_rounds,
)
from calibrate.records.variant import DDP, Variant
from ddpsim.files import no_collection

KIB, MIB = 2**10, 2**20
_SMALL_SIZES = (64 * KIB, MIB)
_BUCKET_SIZES = 6  # sizes of all-reduces taken from the buckets


class Interleaved:
    """Rounds over all variants, the bare model and all-reduces."""

    def __init__(
        self, job: Job, options: RoundOptions, bare: Training, steppers: Sequence[Stepper]
    ) -> None:
        self._job, self._options = job, options
        self._bare, self._steppers = bare, steppers
        self._hooked, self._rows, self._accumulating = Samples(), list[Row](), list[Row]()
        self._reduced: dict[int, list[float]] = {}
        on_cpu = job.device.type == "cpu"
        self._reduced_as_by_ddp = ReducedAsByDdp(bare, all_at_once(job)) if on_cpu else None
        self._together = None if on_cpu else torch.zeros(1, device=job.device)
        finds = options.find_unused_parameters
        self._ddp_hooks = HookTimes(bare, find_unused_parameters=finds) if on_cpu else None
        copies = ALONE_PER_ROUND if on_cpu else 1
        self._bares = (bare, *(bare.again() for _ in range(copies - 1)))
        one_bucket = Variant(bucket_cap_mb=ONE_BUCKET_MIB)
        self._by_themselves = [
            Stepper(each, one_bucket, job.place.layout, find_unused_parameters=finds, group=alone())
            for each in (self._bares if on_cpu else ())
        ]
        self._beside = BesideAllReduces(bare, job)
        self._hook_s = 0.0
        self.ready: dict[str, float] = {}

    def run(self, save: Callable[[], object], every_s: float) -> None:
        """Warm up, then measure as many rounds as the budget allows; `save` them on the way."""
        job, (least, most) = self._job, self._options.rounds
        for _ in range(WARMUPS):
            self._round(0, warm=True)
        self._reduced = {size: [] for size in self._sizes()}
        # reduced once: memory that was never written is none yet
        sizes = self._reduced
        buffers = {n: torch.empty(n // 4, device=job.device).fill_(0.0) for n in sizes}
        for data in buffers.values():
            dist.all_reduce(data)
        done, began, saved_s = 0, time.monotonic(), -math.inf  # the fewest are kept at once
        while done < most:
            self._round(done, warm=False)
            self._all_reduce(buffers)
            done += 1
            spent_s = job.from_first(time.monotonic() - began)
            if done >= least and spent_s * (done + 1) / done > self._options.budget_s:
                break
            if done >= least and spent_s - saved_s > every_s:
                saved_s = spent_s
                save()

    def sum_up(self) -> None:
        """What is told of the rounds until now."""
        self._hooked.backward_s = [row[2] for row in self._rows]
        self._hook_s = self._hook_s or hook_cost_s(self._job.device, self._hooked)
        self.ready = ready_times(self._hooked, self._hook_s, median(row[2] for row in self._rows))

    def _round(self, number: int, *, warm: bool) -> None:
        """One iteration of everything, a few of those alone; each round begins with another."""
        work: list[Callable[[], None]] = [
            lambda: self._with_hooks(warm=warm),
            *(self._later(stepper, warm=warm) for stepper in self._steppers),
        ]
        if hooks := self._ddp_hooks:
            work.append(lambda: self._with_ddp_hooks(hooks, warm=warm))
        for i in reversed(range(ALONE_PER_ROUND)):
            place = i * (len(work) + 1) // ALONE_PER_ROUND
            work[place:place] = self._all_alone(i, warm=warm)
        start = number % len(work)
        for one in (*work[start:], *work[:start]):
            with no_collection():
                one()

    def _all_alone(self, i: int, *, warm: bool) -> list[Callable[[], None]]:
        """An iteration of each kind that predictions rest on, of the `i`-th copy of the model."""
        bare = self._bares[i % len(self._bares)]
        turns: list[Callable[[], None]] = [lambda: self._alone(bare, self._rows, 1, warm=warm)]
        if self._by_themselves:
            turns.append(self._later(self._by_themselves[i], warm=warm))
        if any(stepper.variant.accumulation_steps > 1 for stepper in self._steppers):
            turns.append(lambda: self._alone(bare, self._accumulating, 2, warm=warm))
        turns.append(lambda: self._beside.step(warm=warm))
        return turns

    def _begin_together(self) -> None:
        """Hosts leave a barrier one by one; behind an all-reduce GPUs begin together."""
        self._job.barrier()
        self._job.clock.run_ahead(2 * LAUNCH_S)  # while that and what comes next are launched
        if self._together is not None:
            dist.all_reduce(self._together)

    def _later(self, stepper: Stepper, *, warm: bool) -> Callable[[], None]:
        return lambda: stepper.step(self._begin_together, warm=warm)

    def _alone(self, bare: Training, rows: list[Row], micro_batches: int, *, warm: bool) -> None:
        row = step(bare, micro_batches, nullcontext, self._begin_together, self._reduced_as_by_ddp)
        if not warm:
            rows.append(row)

    def _with_ddp_hooks(self, hooks: HookTimes, *, warm: bool) -> None:
        self._begin_together()
        hooks.step(warm=warm)

    def _with_hooks(self, *, warm: bool) -> None:
        self._begin_together()
        iterate(self._bare, Samples() if warm else self._hooked, hooked=True)

    def _all_reduce(self, buffers: Mapping[int, torch.Tensor]) -> None:
        clock = self._job.clock
        for size, data in buffers.items():
            self._begin_together()
            start = clock.mark()
            dist.all_reduce(data)
            self._reduced[size].append(clock.seconds(start, clock.mark()))

    def _sizes(self) -> list[int]:
        """A few sizes, spread evenly in the logarithm over those of the buckets; two small ones."""
        used = sorted({size for s in self._steppers for size in s.bucket_bytes()})
        if not used and any(s.variant.strategy in DDP for s in self._steppers):
            raise MeasureError("DDP logged no bucket sizes: is this torch older than 2.11?")
        used = used or [sum(p.nbytes for p in reduced_parameters(self._bare.model).values())]
        last = _BUCKET_SIZES - 1
        wanted = [used[0] * (used[-1] / used[0]) ** (i / last) for i in range(_BUCKET_SIZES)]
        near = [min(used, key=lambda size: abs(math.log(size / aim))) for aim in wanted]
        return sorted({max(4, size // 4 * 4) for size in (*near, *_SMALL_SIZES)})

    @property
    def sparse(self) -> set[str]:
        """Parameters whose gradient is sparse."""
        return self._hooked.sparse

    def ddp_hooks(self) -> Mapping[str, float] | None:
        """What DDP's hooks take on this rank; on a CPU."""
        return self._ddp_hooks.medians_s() if self._ddp_hooks else None

    # what was measured, of all ranks

    def alone(self) -> Alone:
        """The bare model's iterations."""
        hooked = self._job.by_round([(seconds,) for seconds in self._hooked.hooked_backward_s])
        by_round = zip(*(stepper.backwards_s() for stepper in self._by_themselves), strict=True)
        of_one_rank = [seconds for each in by_round for seconds in each]
        return Alone(
            **self._steps(self._rows).model_dump(),
            hooked_backward_s=hooked[0],
            hook_s=tuple(round(row[0], 9) for row in self._job.numbers([self._hook_s])),
            accumulating=self._steps(self._accumulating) if self._accumulating else None,
            ddp_backward_s=self._job.by_round([(s,) for s in of_one_rank])[0]
            if of_one_rank
            else (),
            beside=self._beside.measured(),
        )

    def variant(self, stepper: Stepper) -> VariantSamples:
        """A variant's iterations."""
        return VariantSamples(
            **self._steps(stepper.rows).model_dump(),
            variant=stepper.variant,
            bucket_bytes=stepper.bucket_bytes(),
            units=stepper.units,
            warmup_s=self._job.by_round([row[:1] for row in stepper.warmups])[0],
            logged=self._logged([row[len(PARTS) :] for row in stepper.rows]),
        )

    def _logged(self, rows: Sequence[Row]) -> Logged | None:
        """Times that DDP logged; None for other loops, which log nothing."""
        if not rows[0]:
            return None
        columns = self._job.by_round(rows)
        return Logged(**dict(zip(Logged.model_fields, columns, strict=True)))

    def all_reduces(self) -> tuple[AllReduceSamples, ...]:
        """The all-reduces between the rounds."""
        return tuple(
            AllReduceSamples(
                size_bytes=size, samples_s=self._job.by_round([(seconds,) for seconds in taken])[0]
            )
            for size, taken in self._reduced.items()
        )

    def _steps(self, rows: Sequence[Row]) -> Steps:
        columns = self._job.by_round([row[: len(PARTS)] for row in rows])
        return Steps(**dict(zip(PARTS, columns, strict=True)))


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
    here = environment(job, facts)
    cores = " | ".join(job.everyone(",".join(map(str, usable_cores()))))  # "0,1 | 2,3"
    here = here.model_copy(update={"details": here.details | {CORES_OF_RANKS: cores}})
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
        f"{unused_in_words(bare)} of {options.model} got no gradient, which DDP takes with "
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

    def seconds_or_none(seconds: float) -> float | None:
        # to the nanosecond: the order of gradients that are ready together must not be lost
        return None if math.isnan(seconds) else round(seconds, 9)

    ready, hooks_s = of_ranks(session.ready), session.ddp_hooks()
    hooks = of_ranks(hooks_s) if hooks_s else ()
    return tuple(
        Parameter(
            name=name,
            numel=parameter.numel(),
            dtype=dtype_name(name, parameter),
            ready_s=tuple(seconds_or_none(rank[i]) for rank in ready),
            ddp_hook_s=tuple(seconds_or_none(rank[i]) for rank in hooks),
            sparse=name in session.sparse,
            rows=parameter.shape[0] if parameter.dim() else None,
        )
        for i, (name, parameter) in enumerate(named)
    )


if __name__ == "__main__":
    run_rank(measure_rounds, RoundOptions)
