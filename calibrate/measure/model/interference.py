"""A model's backward beside all-reduces, in turns with the layers that a record measures so."""

from __future__ import annotations

import torch
import torch.distributed as dist

from calibrate.measure.clock import Lap
from calibrate.measure.cluster.interference import UNITS, pieces_beside
from calibrate.measure.cluster.work import LAUNCH_S, compute_unit
from calibrate.measure.model.training import Training
from calibrate.measure.ranks.job import Job
from calibrate.records.record import LAYER
from calibrate.records.rounds import Beside

# as in a record's queues; on a GPU larger, so that a queue can last as long as a long backward
_MESSAGE_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
_MESSAGES = {"cpu": 4, "cuda": 1}  # gloo has two in flight, which must differ
_FEWEST, _MOST = 2, 256  # all-reduces of a queue


class BesideAllReduces:
    """Rounds of a bare model and of layers; every rank of the job steps at once."""

    def __init__(self, bare: Training, job: Job) -> None:
        self._bare, self._job, self._clock = bare, job, job.clock
        self._unit, self._units = compute_unit(LAYER, job.device), UNITS[LAYER]
        kind = job.device.type
        count = _MESSAGE_BYTES[kind] // 4
        self._messages = [
            torch.empty(count, device=job.device).fill_(0.0) for _ in range(_MESSAGES[kind])
        ]
        self._count, self._backward_s = _FEWEST, 0.0
        self._rows: list[tuple[float, ...]] = []

    def step(self, *, warm: bool) -> None:
        """Each once. Where all-reduces end before the backward the next queue is twice as long.

        One rank has nobody to reduce with, and measures nothing.
        """
        if self._job.world_size == 1:
            return
        # in the order of Beside's fields
        laps = [self._layers(), self._layers_beside(), self._backward(beside=False)[0]]
        beside, outlasted = self._backward(beside=True)
        if not all(row[0] for row in self._job.numbers([float(outlasted)])):
            self._count = min(_MOST, 2 * self._count)
        elif not warm:
            self._rows.append(tuple(map(self._clock.read, (*laps, beside))))

    def measured(self) -> Beside | None:
        """All rounds of all ranks; None where there was none whose all-reduces lasted."""
        if not self._rows:
            return None
        columns = self._job.by_round(self._rows)
        return Beside(**dict(zip(Beside.model_fields, columns, strict=True)))

    def _layers(self) -> Lap:
        self._begin()
        start = self._clock.mark()
        for i in range(self._units):
            self._unit(i)
        return Lap(start, self._clock.mark(), self._units)

    def _layers_beside(self) -> Lap:
        self._begin()
        works = self._queue()
        lap = pieces_beside(self._unit, works, self._clock, self._job.device)
        for work in works:
            work.wait()
        return lap

    def _backward(self, *, beside: bool) -> tuple[Lap, bool]:
        """And whether the all-reduces beside it lasted longer."""
        loss = self._bare.forward()
        self._begin()
        works = self._queue() if beside else []
        start = self._clock.mark()
        loss.backward()  # type: ignore[no-untyped-call]
        lap = Lap(start, self._clock.mark())
        self._backward_s = self._clock.read(lap)
        outlasted = not all(work.is_completed() for work in works)
        for work in works:
            work.wait()
        self._bare.optimizer.zero_grad()
        return lap, outlasted

    def _begin(self) -> None:
        """All ranks at once; a GPU is kept busy while its host launches what comes next.

        For as long beside all-reduces as alone, so that a host which sets the pace is as far ahead.
        """
        self._job.barrier()
        self._clock.run_ahead(self._count * LAUNCH_S + self._backward_s)

    def _queue(self) -> list[dist.Work]:
        return [
            dist.all_reduce(self._messages[i % len(self._messages)], async_op=True)
            for i in range(self._count)
        ]
