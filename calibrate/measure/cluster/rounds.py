"""How each kind is run: a round does once what its task measures, and returns a lap per slot.

Collectives follow one another without a barrier between: each starts when its forerunner has
ended on all ranks, as buckets do in a step. Compute and a collective are timed each alone and both
at once.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.clock import Clock, Lap, Mark
from calibrate.measure.cluster.plan import MIB, Task
from calibrate.measure.ddp.loops import logged, start_log
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.samples import Looks, alone
from calibrate.measure.model.training import Training
from calibrate.measure.ranks.job import Job
from calibrate.records.record import COPIES_BACK, COPIES_IN, HALF, LAYER, RESTED, TOGETHER
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
Loader = Callable[[], Iterable[object]]
_TENSORS_OF_OPTIMIZER = 16
# on a GPU a collective up to so many bytes may be shorter than Python's launch of it, which takes
# so long: so many in a row are timed
_IN_A_ROW = ((2**20, 20), (2**24, 5))
# what shapers save up meanwhile: 128 KiB (ours) at 20 Mbit/s
_REST_S = 0.05
_JITTER_UNITS = 30
_SIDE = 512  # of a matrix of 1 MiB of float32
_SMALL = 16  # width of a layer whose bytes hardly count
_BATCH_OF_LAYERS = 256


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


def _floats_of(size_bytes: int, job: Job) -> Tensor:
    return _zeros_of(size_bytes, job, torch.float32)


def _zeros_of(size_bytes: int, job: Job, dtype: torch.dtype) -> Tensor:
    """In memory that really exists: an untouched page of calloc is none."""
    count = max(1, size_bytes // dtype.itemsize)
    return torch.empty(count, device=job.device, dtype=dtype).fill_(0.0)


def dtype_of(task: Task) -> torch.dtype:
    """Return the type of what a task reduces: float32, unless its variant says half."""
    return torch.float16 if task.first.variant.endswith(HALF) else torch.float32


def all_at_once(job: Job) -> Work:
    """Has all ranks wait for an all-reduce, as they do in a step of DDP.

    A core's memory is slower to it after that: on an Intel core SGD over 17 M parameters took 16 %
    longer after a sleep of 5 ms, 25 % after one of 50.
    """
    reduced = _floats_of(_WAIT_BYTES, job)
    return lambda: dist.all_reduce(reduced)


def _pieces_alone(unit: Unit, count: int, clock: Clock) -> Lap:
    start = clock.mark()
    for i in range(count):
        unit(i)
    return Lap(start, clock.mark(), count)


def _pieces_beside(
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
        return [_pieces_alone(self._unit, self._units, self._clock)]

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
        return _pieces_beside(self._unit, works, self._clock, self._job.device)

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
    whole = _zeros_of(count * size, job, dtype)
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
        return _pieces_alone(self._unit, self._units, self._clock)

    def _layers_beside(self) -> Lap:
        self._begin()
        works = self._queue()
        lap = _pieces_beside(self._unit, works, self._clock, self._job.device)
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


def build_round(task: Task, job: Job, loader: Loader | None) -> Round:
    """Get ready to run a task on this rank; raises RuntimeError where torch cannot."""
    kind = task.first.kind
    if kind == "data_loader":
        return _data_loader(task, job, loader)
    return _BUILDERS[kind](task, job)


def _timed(job: Job, work: Work, times: int = 1) -> Round:
    return lambda: [job.clock.lap(work, times)]


def _collective(task: Task, job: Job, work: Work, times: int = 1) -> Round:
    """Small ones of a GPU back to back, as nccl-tests times them: alone they are all launch.

    They are launched ahead of it, behind one that is not timed: with it all ranks begin together.
    """
    size = task.first.size_bytes
    again = next((count for below, count in _IN_A_ROW if size < below), 1)
    if job.device.type != "cuda" or again == 1:
        return _timed(job, work, times)

    def run() -> list[Lap]:
        job.clock.run_ahead((1 + again) * times * LAUNCH_S)
        work()
        start = job.clock.mark()
        for _ in range(again):
            work()
        return [Lap(start, job.clock.mark(), again * times)]

    return run


def _all_reduce(task: Task, job: Job) -> Round:
    group = job.group(task.team.ranks)
    data = _zeros_of(task.first.size_bytes, job, dtype_of(task))
    if task.first.variant == RESTED:
        return _rested(job, lambda: dist.all_reduce(data, group=group))
    return _collective(task, job, lambda: dist.all_reduce(data, group=group))


def _rested(job: Job, work: Work) -> Round:
    """After compute in which nothing is sent, as a step's first collective is."""
    unit = compute_unit("gemm", job.device)

    def run() -> list[Lap]:
        rests_until = time.monotonic() + _REST_S
        while time.monotonic() < rests_until:
            unit(0)
            job.clock.finish()
        job.barrier()
        return [job.clock.lap(work)]

    return run


def _broadcast(task: Task, job: Job) -> Round:
    group, root = job.group(task.team.ranks), task.team.ranks[0]
    data = _floats_of(task.first.size_bytes, job)
    return _collective(task, job, lambda: dist.broadcast(data, root, group=group))


def _sharded(task: Task, job: Job) -> Round:
    """`size_bytes` is what each rank puts in or gets out: the whole, as nccl-tests count it."""
    group, ranks = job.group(task.team.ranks), len(task.team.ranks)
    part = _floats_of(task.first.size_bytes // ranks, job)
    whole = _floats_of(4 * part.numel() * ranks, job)
    if task.first.kind == "all_gather":
        return _collective(task, job, lambda: dist.all_gather_into_tensor(whole, part, group=group))
    return _collective(task, job, lambda: dist.reduce_scatter_tensor(part, whole, group=group))


def _point_to_point(task: Task, job: Job) -> Round:
    first, second = task.team.ranks
    data = _floats_of(task.first.size_bytes, job)

    def there_and_back() -> None:
        if job.rank == first:
            dist.send(data, second)
            dist.recv(data, second)
        else:
            dist.recv(data, first)
            dist.send(data, first)

    return _collective(task, job, there_and_back, times=2)


def _device_copy(task: Task, job: Job) -> Round:
    source = _floats_of(task.first.size_bytes, job)
    target = torch.empty_like(source).fill_(0.0)
    return _on_device(task, job, lambda: target.copy_(source))


def _on_device(task: Task, job: Job, work: Work) -> Round:
    """Time this rank's work when it likes, or, by its variant, right after an all-reduce.

    Ranks of one machine share its memory, and in DDP they copy at the same time.
    """
    run = _timed(job, work)
    if not task.first.variant.endswith(TOGETHER):
        return run
    wait = all_at_once(job)

    def together() -> Sequence[Lap]:
        wait()
        return run()

    return together


def _device_cast(task: Task, job: Job) -> Round:
    """What torch's fp16_compress_hook does to a bucket before its all-reduce, or after it."""
    bucket = _floats_of(task.first.size_bytes, job)
    if task.first.variant.startswith("compress"):
        return _on_device(task, job, lambda: bucket.to(torch.float16).div_(2))
    half = bucket.to(torch.float16)
    return _on_device(task, job, lambda: bucket.copy_(half))


def _optimizer(task: Task, job: Job) -> Round:
    """Plain SGD, or AdamW: one step over gradients of `size_bytes` in all, in 16 tensors."""
    name, _, how = task.first.variant.partition(" ")
    each = task.first.size_bytes // _TENSORS_OF_OPTIMIZER
    parameters = [nn.Parameter(_floats_of(each, job)) for _ in range(_TENSORS_OF_OPTIMIZER)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    fused = how == "fused"
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, 1e-6, foreach=not fused, fused=fused)
        if name == "sgd"
        else torch.optim.AdamW(parameters, 1e-6, foreach=not fused, fused=fused)
    )
    return _timed(job, optimizer.step)


def _narrow_products(task: Task, job: Job) -> Round:
    """M Q, the transpose of M times P, and P times that of Q, as torch's powerSGD_hook calls them.

    Of as many matrices of 1 MiB. The rate depends on the shape: on an EPYC's core those of models
    took up to a quarter more or less.
    """
    count, rank = task.first.size_bytes // MIB, int(task.first.variant.split()[1])
    matrices = [torch.rand(1, _SIDE, _SIDE, device=job.device) for _ in range(count)]
    p, q = (torch.rand(1, _SIDE, rank, device=job.device) for _ in range(2))

    def work() -> None:
        for matrix in matrices:
            torch.bmm(matrix, q, out=p)
        for matrix in matrices:
            torch.bmm(matrix.transpose(1, 2), p, out=q)
        p.div_(p.norm())
        q.div_(q.norm())  # or they would grow from round to round
        for matrix in matrices:
            torch.bmm(p, q.transpose(1, 2), out=matrix)

    return _timed(job, work)


def _jitter(_task: Task, job: Job) -> Round:
    """Matrix products of some 10 ms in all."""
    unit = compute_unit("gemm", job.device)

    def work() -> None:
        for i in range(_JITTER_UNITS):
            unit(i)

    return _timed(job, work)


def _data_loader(task: Task, job: Job, loader: Loader | None) -> Round:
    """One batch of the user's iterable, which begins again where it ends."""
    if loader is None:
        raise MeasureError(f"no data loader was given for {task}")
    batches = _endless(loader, task.first.variant)
    clock = Clock(torch.device("cpu"))

    def run() -> list[Lap]:
        job.clock.finish()
        return [clock.lap(lambda: next(batches))]

    return run


def _endless(loader: Loader, name: str) -> Iterator[object]:
    while True:
        empty = True
        try:
            for batch in loader():
                empty = False
                yield batch
        except Exception as error:
            raise MeasureError(f"the data loader {name} failed: {error!r}") from error
        if empty:
            raise MeasureError(f"the data loader {name} returned an iterable without a batch")


class _Layers(nn.Module):
    """Many equal layers, so that hooks and copies come between other work, as in a real backward.

    All of them pass on what they get: gradients that vanish would cost time of their own.
    """

    def __init__(self, parameters: int, width: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width) for _ in range(parameters // 2)]
        for layer in layers:
            nn.init.eye_(layer.weight)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()  # type: ignore[no-any-return]


def _ddp_hook_round(task: Task, job: Job) -> Round:
    """A backward with DDP, what of it DDP logs as copies back, and a backward without it."""
    if task.first.variant == COPIES_IN:
        return _copies_in_round(task, job)
    wrapped, x = _layers_in_ddp(task, job)
    plain = deepcopy(wrapped.module)
    back = any(slot.variant == COPIES_BACK for slot in task.slots)
    if back:
        start_log(wrapped)

    def backward(model: nn.Module) -> Lap:
        model.zero_grad()
        loss = model(x)
        job.clock.finish()
        return job.clock.lap(loss.backward)

    def run() -> list[Lap]:
        laps = [backward(wrapped), backward(plain)]
        if back:
            log = logged(wrapped)
            laps.append(difference(log.overlap_s, log.comm_s))
        return laps

    return run


def difference(less_s: float, more_s: float) -> Lap:
    """What one took more than the other; not less than nothing, where one was disturbed."""
    return Lap(less_s, max(less_s, more_s))


def _layers_in_ddp(task: Task, job: Job) -> tuple[DistributedDataParallel, Tensor]:
    """A task's layers under DDP over this rank alone, so that nothing is sent; and their input."""
    size_bytes, parameters = task.first.size_bytes, task.first.parameters
    width = math.isqrt(size_bytes // (4 * (parameters // 2))) if size_bytes else _SMALL
    layers = _Layers(parameters, width).to(job.device)
    x = torch.ones(_BATCH_OF_LAYERS, width, device=job.device)
    return DistributedDataParallel(layers, process_group=alone()), x


def _copies_in_round(task: Task, job: Job) -> Round:
    """DDP's hooks on weights in a backward, less those on the biases: copies of large gradients.

    Python's hooks before and after DDP's tell what that takes; they cost a weight and a bias the
    same.
    """
    model, x = _layers_in_ddp(task, job)
    looks = Looks(model.module)
    wait = all_at_once(job)

    def run() -> list[Lap]:
        model.zero_grad()
        wait()
        model(x).backward()
        taken_s = looks.taken_s().items()
        biases_s, weights_s = (
            sum(seconds for name, seconds in taken_s if name.endswith(kind))
            for kind in ("bias", "weight")
        )
        return [difference(biases_s, weights_s)]

    return run


_BUILDERS: dict[str, Callable[[Task, Job], Round]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _sharded,
    "all_gather": _sharded,
    "point_to_point": _point_to_point,
    "device_copy": _device_copy,
    "device_cast": _device_cast,
    "narrow_products": _narrow_products,
    "optimizer": _optimizer,
    "ddp_hook": _ddp_hook_round,
    "jitter": _jitter,
    "compute": lambda task, job: InterferenceRound(task, job).run,
}
