"""Rounds of a real DDP job: each variant, the bare model and all-reduces take turns.

On a CPU a few copies of the bare model take turns: where in memory one lies makes it faster or
slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from statistics import median

import torch
import torch.distributed as dist

from calibrate.measure.cluster.interference import BesideAllReduces
from calibrate.measure.cluster.work import LAUNCH_S, all_at_once
from calibrate.measure.ddp.stepper import PARTS, ReducedAsByDdp, Row, Stepper, step
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.ddp_alone import ONE_BUCKET_MIB, HookTimes, alone
from calibrate.measure.model.document import ready_times
from calibrate.measure.model.samples import WARMUPS, Samples, hook_cost_s, iterate
from calibrate.measure.model.training import Training, reduced_parameters
from calibrate.measure.ranks.job import Job
from calibrate.records.rounds import (
    ALONE_PER_ROUND,
    AllReduceSamples,
    Alone,
    Logged,
    RoundOptions,
    Steps,
    VariantSamples,
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
        buffers = _touched(self._reduced, job.device)
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
        found: list[Callable[[], None]] = [lambda: self._alone(bare, self._rows, 1, warm=warm)]
        if self._by_themselves:
            found.append(self._later(self._by_themselves[i], warm=warm))
        if any(stepper.variant.accumulation_steps > 1 for stepper in self._steppers):
            found.append(lambda: self._alone(bare, self._accumulating, 2, warm=warm))
        found.append(lambda: self._beside.step(warm=warm))
        return found

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
        """Of DDP; no other loop tells."""
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


def _touched(sizes: Iterable[int], device: torch.device) -> dict[int, torch.Tensor]:
    """A buffer for each size in bytes, reduced once: memory that was never written is none yet."""
    buffers = {size: torch.empty(size // 4, device=device).fill_(0.0) for size in sizes}
    for data in buffers.values():
        dist.all_reduce(data)
    return buffers
