"""Work to time, and compute beside a collective: each alone and both at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.measure.clock import Clock, Lap, Mark
from calibrate.measure.cluster.plan import Task
from calibrate.measure.model.training import Training
from calibrate.measure.ranks.job import Job
from calibrate.records.record import HALF, LAYER
from calibrate.records.rounds import Beside

Round = Callable[[], Sequence[Lap]]
Work = Callable[[], object]
Unit = Callable[[int], object]  # the i-th piece of compute
LAUNCH_S = 60e-6
# a piece of compute takes some 0.3 ms on one CPU core of 100 GFLOP/s and 20 GB/s (of layers: 2 ms),
# 0.3 to 2 ms on an H100, 2 to 13 on a T4
_GEMM = {"cpu": 256, "cuda": 2048}  # rows and columns
_MEMORY = {"cpu": (2**18, 32), "cuda": (2**26, 1)}  # floats, and how many arrays of them
# layers, their width, and rows that go through them
_LAYERS = {"cpu": (16, 512, 128), "cuda": (4, 4096, 1024)}
_WAIT_BYTES = 2**24  # 30 ms at 5 Gbit/s: after 15 the effect of a wait is nearly whole
UNITS = {"gemm": 100, "memory": 100, LAYER: 32}  # of compute alone: some 50 ms on that core
# all-reduces in a queue, and bytes at least, as in the backward of some 10 M parameters: gloo takes
# more of the processor in the first 50 ms than later
_QUEUED, _QUEUED_BYTES = 4, 48 * 2**20
# on a GPU as many as take so long, and as so many pieces of compute
_QUEUED_S, _QUEUED_PIECES, _MOST_QUEUED = 0.05, 15, 1024
_AHEAD = {"cpu": 0, "cuda": 1}  # pieces that wait behind the one under way: a GPU is never idle
_TICK_S = 1e-6
# as in a record's queues; on a GPU larger, so that a queue can last as long as a long backward
_MESSAGE_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
_MESSAGES = {"cpu": 4, "cuda": 1}  # gloo has two in flight, which must differ
_FEWEST, _MOST = 2, 256  # all-reduces of a queue


def compute_unit(work: str, device: torch.device) -> Unit:
    """One short piece of compute, the i-th: "gemm" is bound by arithmetic, "memory" by bandwidth.

    A "layer" is the forward and the backward of one: of the three it is what a step is made of, and
    lives in caches that threads of a backend clear. Pieces of memory traffic go round arrays that
    no cache holds, those of layers round as many layers.
    """
    if work == LAYER:
        return _layer_unit(device)
    if work == "gemm":
        n = _GEMM[device.type]
        a, b, out = (torch.rand(n, n, device=device) for _ in range(3))
        return lambda _: torch.mm(a, b, out=out)
    count, parts = _MEMORY[device.type]
    x, y, total = (torch.rand(parts, count, device=device) for _ in range(3))
    return lambda i: torch.add(x[i % parts], y[i % parts], out=total[i % parts])


def _layer_unit(device: torch.device) -> Unit:
    count, width, rows = _LAYERS[device.type]
    x = torch.rand(rows, width, device=device, requires_grad=True)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()).to(device) for _ in range(count)]

    def unit(i: int) -> None:
        layer = layers[i % count]
        layer.zero_grad()
        x.grad = None
        layer(x).sum().backward()

    return unit


def floats_of(size_bytes: int, job: Job) -> Tensor:
    """A float32 tensor of a size, on the job's device."""
    return zeros_of(size_bytes, job, torch.float32)


def zeros_of(size_bytes: int, job: Job, dtype: torch.dtype) -> Tensor:
    """In memory that really exists: an untouched page of calloc is none."""
    count = max(1, size_bytes // dtype.itemsize)
    return torch.empty(count, device=job.device, dtype=dtype).fill_(0.0)


def dtype_of(task: Task) -> torch.dtype:
    """Of what a task reduces: float32, unless its variant says half."""
    return torch.float16 if task.first.variant.endswith(HALF) else torch.float32


def all_at_once(job: Job) -> Work:
    """Has all ranks wait for an all-reduce, as they do in a step of DDP.

    A core's memory is slower to it after that: on an Intel core SGD over 17 M parameters took 16 %
    longer after a sleep of 5 ms, 25 % after one of 50.
    """
    reduced = floats_of(_WAIT_BYTES, job)
    return lambda: dist.all_reduce(reduced)


def pieces_alone(unit: Unit, count: int, clock: Clock) -> Lap:
    """So many pieces of compute with nothing beside them."""
    start = clock.mark()
    for i in range(count):
        unit(i)
    return Lap(start, clock.mark(), count)


def pieces_beside(
    unit: Unit, works: Sequence[dist.Work], clock: Clock, device: torch.device
) -> Lap:
    """Pieces of compute for as long as works are in flight."""
    in_flight, launched = deque(works), deque[Mark]()
    computing, done = clock.mark(), 0
    computed = computing
    while in_flight:
        unit(done + len(launched))
        launched.append(clock.mark())
        if len(launched) <= _AHEAD[device.type]:
            continue
        end = launched.popleft()
        clock.reach(end)
        while in_flight and in_flight[0].is_completed():
            in_flight.popleft()
        if in_flight or not done:  # the last piece was done alone in part
            computed, done = end, done + 1
    return Lap(computing, computed, done)


class InterferenceRound:
    """Compute, all-reduces one by one, a queue of them, then queue and compute, as in a backward.

    All-reduces are launched together and wait for each other in the backend's own queue, so that
    no thread of Python's stands between them. With gloo, which has two in flight, compute beside
    one of as many bytes comes last.
    """

    def __init__(self, task: Task, job: Job) -> None:
        self._job, self._clock = job, job.clock
        self._on_gpu = job.device.type == "cuda"
        name = task.first.variant.partition(" ")[0]
        self._unit, self._units = compute_unit(name, job.device), UNITS[name]
        self._whole, self._queue = _queue(task, job)
        self._group = job.group(task.team.ranks)

    def run(self) -> list[Lap]:
        """A lap for each, all ranks beginning each together."""
        if self._on_gpu and len(self._queue) == 1:
            self._queue *= self._filling(self._queue[0])
        laps = []
        for measure in (self._compute, self._one_by_one, self._queued, self._both):
            self._job.barrier()
            laps += measure()
        if not self._on_gpu:
            self._job.barrier()
            laps.append(self._beside([self._reduce(self._whole)]))
        return laps

    def _compute(self) -> list[Lap]:
        return [pieces_alone(self._unit, self._units, self._clock)]

    def _one_by_one(self) -> list[Lap]:
        start = self._start()
        for data in self._queue:
            dist.all_reduce(data, group=self._group)
        return [Lap(start, self._clock.mark(), len(self._queue))]

    def _queued(self) -> list[Lap]:
        start = self._start()
        return [Lap(start, self._end_of(self._launch()), len(self._queue))]

    def _both(self) -> list[Lap]:
        start = self._start()
        works = self._launch()
        # on a GPU a mark costs no wait, and set later it would tell when the host looked
        end = self._end_of(works) if self._on_gpu else None
        computed = self._beside(works)
        end = self._end_of(works) if end is None else end
        return [computed, Lap(start, end, len(self._queue))]

    def _beside(self, works: Sequence[dist.Work]) -> Lap:
        return pieces_beside(self._unit, works, self._clock, self._job.device)

    def _start(self) -> Mark:
        """A mark at which all ranks begin together: on GPUs behind an all-reduce.

        By then a GPU's host has launched the queue, and the first piece of compute behind it.
        """
        if self._on_gpu:
            self._clock.run_ahead(len(self._queue) * LAUNCH_S)
            dist.all_reduce(self._queue[0], group=self._group)
        return self._clock.mark()

    def _launch(self) -> list[dist.Work]:
        return [self._reduce(data) for data in self._queue]

    def _reduce(self, data: Tensor) -> dist.Work:
        work: dist.Work = dist.all_reduce(data, group=self._group, async_op=True)
        return work

    def _end_of(self, works: Sequence[dist.Work]) -> Mark:
        """The mark at which all of them have ended; the current stream does not wait for them."""
        side = torch.cuda.Stream(self._job.device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):  # of None it changes nothing
            for work in works:
                work.wait()
            return self._clock.mark()

    def _filling(self, data: Tensor) -> int:
        """How many all-reduces of this last long enough on a GPU; all ranks say the same."""
        all_reduce_s = self._second_s(lambda: dist.all_reduce(data, group=self._group))
        piece_s = self._second_s(lambda: self._unit(0))
        wanted = max(_QUEUED_S, _QUEUED_PIECES * piece_s) / max(all_reduce_s, _TICK_S)
        return min(_MOST_QUEUED, max(_QUEUED, math.ceil(wanted)))

    def _second_s(self, work: Work) -> float:
        """Seconds of the second time that it is done, on the slowest rank: the first sets up."""
        for _ in range(2):
            self._job.barrier()
            start = self._clock.mark()
            work()
            took_s = self._clock.seconds(start, self._clock.mark())
        return max(row[0] for row in self._job.numbers([took_s]))


def _queue(task: Task, job: Job) -> tuple[Tensor, list[Tensor]]:
    """One message, and its parts: gloo reduces two at a time, which must differ, NCCL one by one.

    Of a GPU the one that is reduced again and again, as often as it takes.
    """
    size, dtype = task.first.size_bytes, dtype_of(task)
    on_gpu = job.device.type == "cuda"
    count = 1 if on_gpu else max(_QUEUED, _QUEUED_BYTES // size)
    whole = zeros_of(count * size, job, dtype)
    return whole, list(whole.chunk(count))


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
        return pieces_alone(self._unit, self._units, self._clock)

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
