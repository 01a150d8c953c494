"""How each kind is run: a round does once what its task measures, and returns a lap per slot.

Collectives follow one another without a barrier between: each starts when its forerunner has
ended on all ranks, as buckets do in a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.clock import Clock, Lap, Mark
from calibrate.measure.errors import MeasureError
from calibrate.measure.job import Job
from calibrate.measure.plan import Task

__all__ = ["Round", "build_round", "compute_piece"]

Round = Callable[[], Sequence[Lap]]
Work = Callable[[], object]
Loader = Callable[[], Iterable[object]]

_TENSORS_OF_OPTIMIZER = 16
_ELEMENTS_OF_TINY = 8
# a piece of compute takes some 20 ms on one CPU core of 75 GFLOP/s and 10 GB/s, or on an H100
_GEMM = {"cpu": (384, 12), "cuda": (4096, 8)}  # rows and columns, products
_MEMORY = {"cpu": (8 * 2**20, 2), "cuda": (64 * 2**20, 64)}  # floats in each of three, additions
# as many alone as together: the slowest rank's mean over fewer would be longer by chance alone
_PIECES, _ALL_REDUCES = 3, 4


def build_round(task: Task, job: Job, loader: Loader | None) -> Round:
    """Get ready to run a task on this rank; raises RuntimeError where torch cannot."""
    kind = task.first.kind
    if kind == "data_loader":
        return _data_loader(task, job, loader)
    if len(task.slots) == 4:
        return _interference(task, job)
    return _BUILDERS[kind](task, job)


def compute_piece(work: str, device: torch.device) -> Work:
    """One fixed piece of compute: "gemm" is bound by arithmetic, "memory" by bandwidth."""
    if work == "gemm":
        n, times = _GEMM[device.type]
        a, b, out = (torch.rand(n, n, device=device) for _ in range(3))
        return lambda: _repeat(times, lambda: torch.mm(a, b, out=out))
    n, times = _MEMORY[device.type]
    x, y, total = (torch.rand(n, device=device) for _ in range(3))
    return lambda: _repeat(times, lambda: torch.add(x, y, out=total))


def _repeat(times: int, work: Work) -> None:
    for _ in range(times):
        work()


def _timed(job: Job, work: Work, times: int = 1) -> Round:
    def run() -> list[Lap]:
        start = job.clock.mark()
        work()
        return [Lap(start, job.clock.mark(), times)]

    return run


def _floats(size_bytes: int, job: Job) -> Tensor:
    """Zeros in memory that really exists: an untouched page of calloc is none."""
    return torch.empty(max(1, size_bytes // 4), device=job.device).fill_(0.0)


# --- collectives -------------------------------------------------------------------------------


def _all_reduce(task: Task, job: Job) -> Round:
    group = job.group(task.team.ranks)
    if task.first.variant == "two in flight":
        pair = [_floats(task.first.size_bytes, job) for _ in range(2)]
        return _timed(job, lambda: _both(pair, group))
    data = _floats(task.first.size_bytes, job)
    return _timed(job, lambda: dist.all_reduce(data, group=group))


def _both(pair: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    for pending in [dist.all_reduce(data, group=group, async_op=True) for data in pair]:
        pending.wait()


def _broadcast(task: Task, job: Job) -> Round:
    group, root = job.group(task.team.ranks), task.team.ranks[0]
    data = _floats(task.first.size_bytes, job)
    return _timed(job, lambda: dist.broadcast(data, root, group=group))


def _reduce_scatter(task: Task, job: Job) -> Round:
    """`size_bytes` is what each rank puts in: the whole, as nccl-tests count it."""
    group, ranks = job.group(task.team.ranks), len(task.team.ranks)
    part = _floats(task.first.size_bytes // ranks, job)
    whole = _floats(4 * part.numel() * ranks, job)
    return _timed(job, lambda: dist.reduce_scatter_tensor(part, whole, group=group))


def _all_gather(task: Task, job: Job) -> Round:
    """`size_bytes` is what each rank gets out: the whole, as nccl-tests count it."""
    group, ranks = job.group(task.team.ranks), len(task.team.ranks)
    part = _floats(task.first.size_bytes // ranks, job)
    whole = _floats(4 * part.numel() * ranks, job)
    return _timed(job, lambda: dist.all_gather_into_tensor(whole, part, group=group))


def _point_to_point(task: Task, job: Job) -> Round:
    first, second = task.team.ranks
    data = _floats(task.first.size_bytes, job)

    def there_and_back() -> None:
        if job.rank == first:
            dist.send(data, second)
            dist.recv(data, second)
        else:
            dist.recv(data, first)
            dist.send(data, first)

    return _timed(job, there_and_back, times=2)


# --- work of one device ------------------------------------------------------------------------


def _device_copy(task: Task, job: Job) -> Round:
    source = _floats(task.first.size_bytes, job)
    target = torch.empty_like(source).fill_(0.0)
    return _timed(job, lambda: target.copy_(source))


def _device_cast(task: Task, job: Job) -> Round:
    source = _floats(task.first.size_bytes, job)
    target = torch.empty_like(source, dtype=torch.float16).fill_(0.0)
    return _timed(job, lambda: target.copy_(source))


def _optimizer(task: Task, job: Job) -> Round:
    """Plain SGD, or AdamW: one step over gradients of `size_bytes` in all, in 16 tensors."""
    name, _, how = task.first.variant.partition(" ")
    each = task.first.size_bytes // _TENSORS_OF_OPTIMIZER
    parameters = [nn.Parameter(_floats(each, job)) for _ in range(_TENSORS_OF_OPTIMIZER)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    fused = how == "fused"
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, 1e-6, foreach=not fused, fused=fused)
        if name == "sgd"
        else torch.optim.AdamW(parameters, 1e-6, foreach=not fused, fused=fused)
    )
    return _timed(job, optimizer.step)


class _Tiny(nn.Module):
    """Many tiny parameters, whose backward does little beside accumulating their gradients."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(_ELEMENTS_OF_TINY) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat(list(self.parts)) * x).sum()


def _ddp_hook(task: Task, job: Job) -> Round:
    """A backward with DDP, then without; DDP over this rank alone, so nothing is sent."""
    plain = _Tiny(task.first.parameters).to(job.device)
    alone = dist.new_group([job.rank], use_local_synchronization=True)
    wrapped = DistributedDataParallel(
        _Tiny(task.first.parameters).to(job.device), process_group=alone
    )
    x = torch.ones(1, device=job.device)

    def backward(model: nn.Module) -> Lap:
        model.zero_grad()
        loss = model(x)
        job.clock.finish()
        start = job.clock.mark()
        loss.backward()
        return Lap(start, job.clock.mark())

    return lambda: [backward(wrapped), backward(plain)]


def _jitter(_task: Task, job: Job) -> Round:
    """Half the fixed GEMM piece: some 10 ms."""
    n, times = _GEMM[job.device.type]
    a, b, out = (torch.rand(n, n, device=job.device) for _ in range(3))
    return _timed(job, lambda: _repeat(times // 2, lambda: torch.mm(a, b, out=out)))


def _data_loader(task: Task, job: Job, loader: Loader | None) -> Round:
    """One batch of the user's iterable, which begins again where it ends."""
    if loader is None:
        raise MeasureError(f"no data loader was given for {task}")
    batches = _endless(loader, task.first.variant)
    clock = Clock(torch.device("cpu"))

    def run() -> list[Lap]:
        job.clock.finish()
        start = clock.mark()
        next(batches)
        return [Lap(start, clock.mark())]

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


# --- compute and communication at once ---------------------------------------------------------


def _side_stream(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class _Traffic(threading.Thread):
    """All-reduces back to back, until every rank has asked for the end.

    The first element carries the question: each rank adds 1 once it is done, so that the sum is
    the same on all ranks and all stop after the same all-reduce.
    """

    def __init__(self, job: Job, data: Tensor, group: dist.ProcessGroup, ranks: int) -> None:
        super().__init__(daemon=True)
        self.laps: list[Lap] = []
        self.failure: BaseException | None = None
        self._job, self._data, self._group, self._ranks = job, data, group, ranks
        self._enough, self._began = threading.Event(), threading.Event()

    def run(self) -> None:
        """The thread's work; what went wrong is raised by `finish`."""
        device = self._job.device
        on_gpu = device.type == "cuda"
        try:
            with _side_stream(device) if on_gpu else nullcontext():
                while self._once() < self._ranks:
                    self._began.set()
        except Exception as error:  # noqa: BLE001 -- handed to the thread that waits
            self.failure = error
        self._began.set()

    def _once(self) -> float:
        self._data[0] = float(self._enough.is_set())
        start = self._job.clock.mark()
        dist.all_reduce(self._data, group=self._group)
        self.laps.append(Lap(start, self._job.clock.mark()))
        return float(self._data[0].item())

    def begin(self) -> None:
        """Start, and wait until the first all-reduce is done."""
        self.start()
        self._began.wait()

    def finish(self) -> None:
        """End together with all ranks; raises what the thread met."""
        self._enough.set()
        self.join()
        if self.failure:
            raise self.failure


def _interference(task: Task, job: Job) -> Round:
    work = task.first.variant.partition(" ")[0]
    piece = compute_piece(work, job.device)
    group, ranks = job.group(task.team.ranks), len(task.team.ranks)
    data = _floats(task.first.size_bytes, job)
    compute_alone = _timed(job, lambda: _repeat(_PIECES, piece), _PIECES)
    comm_alone = _timed(
        job, lambda: _repeat(_ALL_REDUCES, lambda: dist.all_reduce(data, group=group)), _ALL_REDUCES
    )

    def run() -> list[Lap]:
        job.barrier()
        laps = list(compute_alone())
        job.barrier()
        laps += comm_alone()
        job.barrier()
        traffic = _Traffic(job, data, group, ranks)
        traffic.begin()
        computed = _compute_beside(traffic, piece, job)
        traffic.finish()
        return [*laps, computed, _inside(computed, traffic.laps, job.clock)]

    return run


def _compute_beside(traffic: _Traffic, piece: Work, job: Job) -> Lap:
    """Pieces of compute until enough whole all-reduces fit beside them."""
    before, pieces = len(traffic.laps), 0
    start = job.clock.mark()
    enough = before + 1 + _ALL_REDUCES  # the first one may have begun before
    while pieces < _PIECES or (len(traffic.laps) < enough and traffic.failure is None):
        piece()
        job.clock.finish()
        pieces += 1
    return Lap(start, job.clock.mark(), pieces)


def _inside(window: Lap, laps: Sequence[Lap], clock: Clock) -> Lap:
    """The all-reduces that began and ended in the window, as one lap."""
    inside = [
        lap
        for lap in laps
        if clock.seconds(window.start, lap.start) >= 0 and clock.seconds(lap.end, window.end) >= 0
    ]
    if not inside:
        raise MeasureError("no all-reduce fitted beside the compute")
    first: Mark = inside[0].start
    return Lap(first, inside[-1].end, len(inside))


_BUILDERS: dict[str, Callable[[Task, Job], Round]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "point_to_point": _point_to_point,
    "device_copy": _device_copy,
    "device_cast": _device_cast,
    "optimizer": _optimizer,
    "ddp_hook": _ddp_hook,
    "jitter": _jitter,
}
