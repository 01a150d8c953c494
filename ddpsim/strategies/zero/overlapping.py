"""ZeroRedundancyOptimizer in DDP's hook: buckets are updated and broadcast within the backward.

Source: torch 2.13's torch/distributed/optim/zero_redundancy_optimizer.py
(_init_zero_for_overlap; which rank updates what: _get_assigned_rank,
_bucket_assignments_per_rank) and torch/distributed/algorithms/ddp_comm_hooks/ddp_zero_hook.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import ceil
from typing import NamedTuple, TypeGuard

from ddpsim.errors import InputError
from ddpsim.scenario.options.zero_redundancy import ZeroRedundancy as Options
from ddpsim.scenario.workload import Optimizer
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.ddp.strategy import DistributedDataParallel
from ddpsim.strategies.instructions import Await, Communicate, Compute, Instruction
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.strategies.ticks import Launch
from ddpsim.strategies.training_loop.around_steps import Around
from ddpsim.workload.model import Model, Work
from ddpsim.workload.optimizer import functional_work

_PHASES = {
    "buffers": "broadcasts of parameters and buffers",
    "comm_hook": "optimizers of buckets, in DDP's hook",
}


class Piece(NamedTuple):
    """What one rank updates of a bucket: parameters from `begin` to before `end`, in its order."""

    rank: int
    begin: int
    end: int


Assignment = tuple[tuple[Piece, ...], ...]


def assigned(
    buckets: Sequence[Sequence[int]], ranks: int, *, shard_buckets: bool = False
) -> Assignment:
    """The pieces of each bucket by rank; `buckets`: elements of each parameter, in their order.

    Raises InputError where torch stops: a bucket would have more pieces than there are ranks.
    """
    if not shard_buckets:
        return tuple((Piece(i % ranks, 0, len(bucket)),) for i, bucket in enumerate(buckets))
    most = sum(map(sum, buckets)) / ranks
    loads = [(0, rank) for rank in range(ranks)]  # a heap; of equal ranks the lowest comes first
    assignment: list[tuple[Piece, ...]] = [()] * len(buckets)
    for i in sorted(range(len(buckets)), key=lambda i: sum(buckets[i])):
        cuts = _cuts(buckets[i], most)
        if len(cuts) > ranks:
            raise InputError(
                "ddp.zero1.shard_buckets",
                f"parts a bucket in {len(cuts)} among {ranks} ranks, which take one each: torch "
                "stops in 'All indices are disallowed'; choose a smaller ddp.bucket_cap_mb",
            )
        taken = [heappop(loads) for _ in cuts]
        pieces = []
        for (begin, end), (load, rank) in zip(cuts, taken, strict=True):
            heappush(loads, (load + sum(buckets[i][begin:end]), rank))
            pieces.append(Piece(rank, begin, end))
        assignment[i] = tuple(sorted(pieces))
    return tuple(assignment)


def _cuts(bucket: Sequence[int], most: float) -> list[tuple[int, int]]:
    """Runs of a bucket's parameters with fewer elements than `most`, or of one parameter."""
    begins, size = [0], 0
    for i, numel in enumerate(bucket):
        if size + numel >= most and i > begins[-1]:
            begins.append(i)
            size = 0
        size += numel
    return list(zip(begins, [*begins[1:], len(bucket)], strict=True))


class _Update(NamedTuple):
    """A bucket's optimizer, and what is sent of it.

    `longest`: of the rank with most of the bucket. `more`: by how much the most that any rank has
    done in the step grows. `parameters`: of the longest.
    """

    longest: Launch
    more: Launch
    parameters: int
    sent_bytes: tuple[int, ...]

    def in_turn(self) -> Iterator[Compute]:
        """`more`, parameter by parameter."""
        for i in range(self.parameters):
            host_ns, device_ns = (_part(ns, i, self.parameters) for ns in self.more[:2])
            yield Compute("optimizer", host_ns, device_ns)


def _part(whole: int, i: int, parts: int) -> int:
    return whole * (i + 1) // parts - whole * i // parts


@dataclass(frozen=True)
class Updates:
    """The functional optimizers of a model's buckets, in ticks."""

    model: Model
    optimizer: Optimizer
    prices: Prices

    def of(self, buckets: Sequence[Bucket], assignment: Assignment) -> tuple[_Update, ...]:
        """The update of each bucket, in order."""
        done: dict[int, Launch] = {}
        most, updates = Launch(0, 0), []
        for bucket, pieces in zip(buckets, assignment, strict=True):
            launches = {piece.rank: self._launch(bucket, piece) for piece in pieces}
            for rank, launch in launches.items():
                done[rank] = _added(done.get(rank, Launch(0, 0)), launch)
            now = _largest([most, *(done[rank] for rank in launches)])
            more = Launch(now.host_ns - most.host_ns, now.device_ns - most.device_ns)
            most = now
            parameters = max(piece.end - piece.begin for piece in pieces)
            sent = tuple(self._bytes(bucket, piece) for piece in pieces)
            updates.append(_Update(_largest(list(launches.values())), more, parameters, sent))
        return tuple(updates)

    def share(self, buckets: Sequence[Bucket], assignment: Assignment) -> float:
        """What the rank with the most holds of the optimizer's state."""
        held: dict[int, int] = {}
        for bucket, pieces in zip(buckets, assignment, strict=True):
            for piece in pieces:
                held[piece.rank] = held.get(piece.rank, 0) + self._bytes(bucket, piece)
        return max(held.values()) / max(1, sum(held.values()))

    def _launch(self, bucket: Bucket, piece: Piece) -> Launch:
        """The hook's Python once, and a step of each parameter."""
        hook = self.prices.operator(Work(0.0))
        steps = [self._step(i) for i in bucket.parameters[piece.begin : piece.end]]
        return self.prices.launch([hook, *steps])

    def _step(self, parameter: int) -> Work:
        """One parameter's step: the whole optimizer's time by its bytes."""
        size_bytes = self.model.parameters[parameter].size_bytes
        device_s = size_bytes / self._optimized_bytes * self.model.optimizer.device_s
        return functional_work(self.optimizer, device_s, self.prices.device)

    @cached_property
    def _optimized_bytes(self) -> int:
        return sum(each.size_bytes for each in self.model.used)

    def _bytes(self, bucket: Bucket, piece: Piece) -> int:
        parameters = bucket.parameters[piece.begin : piece.end]
        return sum(self.model.parameters[i].size_bytes for i in parameters)


def _added(first: Launch, second: Launch) -> Launch:
    return Launch(first.host_ns + second.host_ns, first.device_ns + second.device_ns)


def _largest(launches: Sequence[Launch]) -> Launch:
    host_ns, device_ns = (max(ns) for ns in zip(*(each[:2] for each in launches), strict=True))
    return Launch(host_ns, device_ns)


class Overlapping(Around):
    """DDP's step, in whose hooks buckets are updated and broadcast.

    One step behind the rebuild of the buckets; before, nothing is updated. Ranks update different
    buckets: the step is that of one which always has done as much as the rank that has done most,
    and each broadcast waits for its bucket's `longest` optimizer.
    """

    warmup = Strategy.warmup

    def __init__(self, context: StrategyContext, options: Options) -> None:
        """Put the updates around torch's allreduce_hook, unless another hook is asked for."""
        scenario, ranks = context.scenario, context.scenario.cluster.world_size
        if scenario.ddp.comm_hook == "none":
            spec = scenario.ddp.model_copy(update={"comm_hook": "allreduce"})
            context = replace(context, scenario=scenario.model_copy(update={"ddp": spec}))
        ddp = DistributedDataParallel.of(context).without_optimizer()
        super().__init__(ddp)
        updates = Updates(context.model, scenario.workload.optimizer, context.prices)
        self.broadcast, self.phases = "the broadcasts of updated parameters", _PHASES
        buckets, parameters = ddp.rebuilt_buckets, updates.model.parameters
        elements = [[parameters[i].numel for i in bucket.parameters] for bucket in buckets]
        assignment = assigned(elements, ranks, shard_buckets=options.shard_buckets)
        self._updates = updates.of(buckets, assignment)
        if ranks == 1:
            self._updates = tuple(each._replace(sent_bytes=()) for each in self._updates)
        self._launch_ns = updates.prices.call_ns
        self._share = updates.share(buckets, assignment)
        self._interleaved = options.hook == "hook_with_zero_step_interleaved"

    @property
    def kinds(self) -> int:
        """See Strategy."""
        return self._inner.kinds + 1

    @cached_property
    def steady_from(self) -> int:
        """See Strategy."""
        return (self._inner.rebuilt_from or 0) + 1

    def kind(self, number: int) -> int:
        """See Strategy."""
        return self._inner.kinds if number >= self.steady_from else self._inner.kind(number)

    def buckets(self, kind: int) -> tuple[Bucket, ...]:
        """See Strategy."""
        return self._inner.buckets(self._of_ddp(kind))

    def _of_ddp(self, kind: int) -> int:
        return kind if kind < self._inner.kinds else self._inner.kind(self.steady_from)

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        instructions = tuple(self._inner.step(self._of_ddp(kind)))
        if kind < self._inner.kinds:
            yield from instructions
            return
        sends = _Sends(self._updates, self._launch_ns, instructions)
        for instruction in instructions:
            if not _is_of_bucket(instruction):
                yield instruction
                if self._interleaved and sends.is_last_wait(instruction):
                    yield from sends.awaited()
                continue
            update = self._updates[instruction.bucket]
            after_ns = instruction.after_ns + update.longest.device_ns
            yield instruction._replace(after_ns=after_ns)
            if self._interleaved:
                yield from sends.in_hook(instruction.bucket)
            elif instruction.bucket == len(self._updates) - 1:
                yield from sends.after_all()

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy."""
        return self._inner.resident_bytes(model, ceil(self._share * optimizer_bytes))


class _Sends:
    """The optimizers and broadcasts of one step; `step`: DDP's own, with numbers below theirs."""

    def __init__(
        self, updates: Sequence[_Update], launch_ns: int, step: Sequence[Instruction]
    ) -> None:
        self._updates = updates
        self._launch_ns = launch_ns
        self._reduced = {each.bucket: each.number for each in step if _is_of_bucket(each)}
        sent = (each.number for each in step if isinstance(each, Communicate))
        self._numbers = count(1 + max(sent))
        self._sent: list[int] = []

    def in_hook(self, bucket: int) -> Iterator[Instruction]:
        """On a stream of the hook's own, which waits for the bucket's all-reduce."""
        yield Compute("optimizer", self._updates[bucket].more.host_ns, 0)
        yield from self._broadcast(bucket, self._reduced[bucket])

    def after_all(self) -> Iterator[Instruction]:
        """Bucket by bucket, on the compute stream, which then waits for all."""
        for bucket, update in enumerate(self._updates):
            yield from update.in_turn()
            yield Await(self._reduced[bucket])
            yield from self._broadcast(bucket)
        yield from self.awaited()

    def awaited(self) -> Iterator[Instruction]:
        """All broadcasts."""
        yield from map(Await, self._sent)

    def is_last_wait(self, instruction: Instruction) -> bool:
        """Whether it is the wait for the last bucket."""
        last = self._reduced[len(self._updates) - 1]
        return isinstance(instruction, Await) and instruction.number == last

    def _broadcast(self, bucket: int, follows: int | None = None) -> Iterator[Instruction]:
        cause = f"updated parameters of bucket {bucket}"
        for size_bytes in self._updates[bucket].sent_bytes:
            number = next(self._numbers)
            self._sent.append(number)
            yield Communicate(
                number, self._launch_ns, "broadcast", size_bytes, cause=cause, follows=follows
            )


def _is_of_bucket(instruction: Instruction) -> TypeGuard[Communicate]:
    return isinstance(instruction, Communicate) and instruction.bucket >= 0
