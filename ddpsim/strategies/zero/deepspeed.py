"""ZeRO-1 and ZeRO-2 of DeepSpeed: reductions bucket by bucket, then one all-gather.

Source: deepspeedai/DeepSpeed at edaa7221267c (deepspeed/runtime/zero/stage_1_and_2.py: hooks,
buckets, reductions, waits, the step; deepspeed/runtime/utils.py: all_gather_dp_groups).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from ddpsim.cluster.transfers import Operation
from ddpsim.result.model import MemoryPeak, MemoryWalk
from ddpsim.scenario.options.deepspeed import DeepSpeed as Options
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.ddp.costs import COUNTED_S, Prices
from ddpsim.strategies.fully_shard.held import Held
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Instruction,
    Piece,
    Synchronize,
    compute,
    compute_all,
)
from ddpsim.strategies.model_work import MicroBatch, ModelWork
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.strategies.ticks import Launch
from ddpsim.strategies.zero.distributed_optimizer import optimizer_of_shards, same_dtype
from ddpsim.strategies.zero.partition import Partition, Sent, bucketed
from ddpsim.workload.model import ITEM_BYTES, Model

_PHASES = {
    "backward": "backward, with the gradients' copies into buckets",
    "all_reduce": "reductions of gradients",
    "reduce": "gradients reduced to the ranks that optimize them",
    "all_gather": "the all-gather of updated parameters",
}

_MASTER_BYTES = 4
_NORM = -1


class _Reduction(NamedTuple):
    """One collective of a bucket, with what its stream does before and after it."""

    operation: Operation
    size_bytes: int
    before: Launch
    after: Launch
    copy_bytes: int  # of slices that are sent together


@dataclass
class _Doing:
    """A step under way: collectives so far, the last of them, and what is held."""

    held: Held = field(default_factory=Held)
    launched: int = 0
    last: int | None = None
    has_part: bool = False

    def waited(self) -> Iterator[Instruction]:
        """For the last collective, unless that is done."""
        if self.last is not None:
            yield Await(self.last)
            self.last = None


@dataclass(frozen=True)
class DeepSpeed(Strategy):
    """Copy gradients into buckets, reduce them, optimize a part, all-gather parameters.

    `members` and `reductions`: of each bucket, in order. `copied[i]` and `gradient_bytes[i]`:
    parameter i's gradient into its bucket. `item`: bytes of a parameter's element, and of its
    gradient's; `buffers_bytes`: of the buckets' buffers; `part`: elements of a rank.
    """

    work: ModelWork
    members: tuple[tuple[int, ...], ...]
    reductions: tuple[tuple[_Reduction, ...], ...]
    copied: tuple[Launch, ...]
    gradient_bytes: tuple[int, ...]
    added: Launch
    prepared: tuple[Launch, Launch]
    masters: Launch
    launch_ns: int
    ranks: int
    part: int
    item: int
    buffers_bytes: int
    partitions: bool
    overlaps: bool
    reduced: str = "reduction"
    phases = _PHASES

    @classmethod
    def of(cls, context: StrategyContext) -> DeepSpeed:
        """A job's step, with the optimizer of a rank's part; raises InputError."""
        model, options, prices = context.model, context.scenario.ddp.zero, context.prices
        same_dtype(model, "deepspeed")
        ranks = context.scenario.cluster.world_size
        work = _work(context, options, ranks)
        item = ITEM_BYTES[options.params or model.parameters[0].dtype]
        numels = [parameter.numel for parameter in model.parameters]
        partition = Partition(numels, ranks)
        hooks = options.stage == 2 or options.overlap_comm
        order = model.ready_order if hooks else tuple(sorted(model.ready_order))
        members = bucketed(order, numels, options.reduce_bucket_size)
        part = partition.part

        def moved(elements: int, bytes_each: int) -> Launch:
            return prices.launch([prices.passed(elements * bytes_each)] if elements else [])

        def reduction(sent: Sent, *, is_first: bool, whole: int) -> _Reduction:
            divided = whole if is_first and options.reduce_scatter else 0
            copies = sent.elements if sent.is_copied else 0
            before = _after_another(moved(divided, 2 * item), moved(copies, 2 * item))
            after = moved(sent.elements // ranks, 2 * item * 2)  # its part, twice
            if not options.reduce_scatter:
                after = _after_another(moved(sent.elements, 2 * item), after)
            return _Reduction(sent.operation, sent.elements * item, before, after, copies * item)

        return cls(
            work=work,
            members=tuple(members),
            reductions=tuple(
                tuple(
                    reduction(sent, is_first=not i, whole=sum(numels[p] for p in bucket))
                    for i, sent in enumerate(partition.sent(bucket, options))
                )
                for bucket in members
            ),
            copied=tuple(
                moved(numel, 2 * item) if numel <= options.reduce_bucket_size else Launch(0, 0)
                for numel in numels
            ),
            gradient_bytes=tuple(numel * item for numel in numels),
            added=moved(part, 3 * item),
            prepared=_prepared(prices, part, item, ceil(len(model.used) / ranks)),
            masters=moved(part, _MASTER_BYTES + item),
            launch_ns=prices.call_ns,
            ranks=ranks,
            part=part,
            item=item,
            buffers_bytes=options.reduce_bucket_size * item * (1 + options.overlap_comm),
            partitions=options.stage == 2,
            overlaps=options.overlap_comm,
        )

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        yield from self._walked[1]

    def _instructions(self, doing: _Doing) -> Iterator[Instruction]:
        doing.held.add("gradients", 0)
        yield from self.work.micro_batched(lambda each: self._of_micro_batch(each, doing))
        yield from self._prepare(doing)
        yield from self.work.end_of_step((*self._gather(doing),))

    def _of_micro_batch(self, micro_batch: MicroBatch, doing: _Doing) -> Iterator[Instruction]:
        """The backward, in whose hooks gradients are reduced or after which they are, if at all."""
        doing.held.place = "the backward"
        adds = micro_batch.number > 0
        if self.partitions or (micro_batch.is_last and self.overlaps):
            yield from self._hooked(micro_batch.backward, doing)
        else:
            yield from self._backward(micro_batch.backward, doing, adds=adds)
            if micro_batch.is_last:
                yield from self._reduced_after(doing)
        if self.partitions or micro_batch.is_last:
            yield from self._epilogue(doing, adds=self.partitions and adds)

    def _hooked(self, backward: Sequence[Piece], doing: _Doing) -> Iterator[Instruction]:
        """A gradient that does not fit into its bucket sends that first."""
        *works, tail = backward
        begins = {members[0]: i for i, members in enumerate(self.members)}
        doing.held.add("reductions", self.buffers_bytes)
        for parameter, piece in zip(self.work.ready_order, works, strict=True):
            yield from compute_all("backward", [piece])
            doing.held.add("gradients", self.gradient_bytes[parameter])
            if before := begins.get(parameter):
                yield from self._reduce(before - 1, doing)
            yield from self._copy(parameter, doing)
        yield from compute_all("backward", [tail])
        yield from self._reduce(len(self.members) - 1, doing)

    def _backward(
        self, backward: Sequence[Piece], doing: _Doing, *, adds: bool
    ) -> Iterator[Instruction]:
        """Gradients stay whole to its end, or are added to those that are there."""
        *works, tail = backward
        for parameter, piece in zip(self.work.ready_order, works, strict=True):
            yield from compute_all("backward", [piece])
            doing.held.add("gradients", 0 if adds else self.gradient_bytes[parameter])
        yield from compute_all("backward", [tail])

    def _reduced_after(self, doing: _Doing) -> Iterator[Instruction]:
        """Bucket by bucket, in the order of registration."""
        doing.held.add("reductions", self.buffers_bytes)
        for bucket, members in enumerate(self.members):
            for parameter in members:
                yield from self._copy(parameter, doing)
            yield from self._reduce(bucket, doing)

    def _copy(self, parameter: int, doing: _Doing) -> Iterator[Instruction]:
        if self.copied[parameter].device_ns:
            yield compute("bucket_copy", self.copied[parameter])
            doing.held.add("gradients", -self.gradient_bytes[parameter])

    def _reduce(self, bucket: int, doing: _Doing) -> Iterator[Instruction]:
        """On a stream of its own once the bucket before it is reduced, or while all else waits."""
        if not doing.has_part:
            doing.held.add("gradients", self.part * self.item)
            doing.has_part = True
        yield from doing.waited()
        for reduction in self.reductions[bucket]:
            doing.held.add("reductions", reduction.copy_bytes)
            if self.ranks == 1 or not self.overlaps:
                yield compute("bucket_copy", reduction.before)
                if self.ranks > 1:
                    yield self._sent(bucket, reduction, doing, Launch(0, 0), 0)
                    yield from doing.waited()
                yield compute("bucket_copy", reduction.after)
            else:
                if reduction.operation == "reduce":  # allreduce_and_copy: synchronize()
                    yield from doing.waited()
                    yield Synchronize()
                yield self._sent(bucket, reduction, doing, reduction.before, reduction.after[1])
            doing.held.add("reductions", -reduction.copy_bytes)
        for parameter in self.members[bucket]:
            if not self.copied[parameter].device_ns:
                doing.held.add("gradients", -self.gradient_bytes[parameter])

    def _sent(
        self, bucket: int, reduction: _Reduction, doing: _Doing, before: Launch, after_ns: int
    ) -> Communicate:
        doing.last = doing.launched
        doing.launched += 1
        return Communicate(
            doing.last,
            self.launch_ns + before.host_ns,
            reduction.operation,
            reduction.size_bytes,
            bucket=bucket,
            bucket_bytes=reduction.size_bytes,
            num_params=len(self.members[bucket]),
            before_ns=before.device_ns,
            after_ns=after_ns,
            cause=f"gradients of bucket {bucket}",
        )

    def _epilogue(self, doing: _Doing, *, adds: bool) -> Iterator[Instruction]:
        """The host waits for all reductions; a part's gradients are added to earlier ones."""
        if self.overlaps:
            yield from doing.waited()
            yield Synchronize()
        if adds:
            yield compute("bucket_copy", self.added)
        doing.held.add("reductions", -self.buffers_bytes)

    def _prepare(self, doing: _Doing) -> Iterator[Instruction]:
        """The norm of all gradients, and those of a part in float32."""
        doing.held.place = "the optimizer"
        norm, scaled = self.prepared
        yield compute("clip", norm)
        if self.ranks > 1:
            yield Communicate(_NORM, self.launch_ns, "all_reduce", 4, cause="the norm of gradients")
            yield Await(_NORM)
        doing.held.add("gradients", self.part * _MASTER_BYTES)
        yield compute("clip", scaled)
        doing.held.add("gradients", self.part * _MASTER_BYTES - doing.held.gradients)

    def _gather(self, doing: _Doing) -> Iterator[Instruction]:
        doing.held.add("gradients", -doing.held.gradients)
        yield compute("optimizer", self.masters)
        if self.ranks > 1:
            size_bytes, number = self.part * self.ranks * self.item, doing.launched
            yield Communicate(
                number, self.launch_ns, "all_gather", size_bytes, cause="all parameters"
            )
            yield Await(number)

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """See Strategy."""
        sizes = [sum(self.gradient_bytes[i] for i in members) for members in self.members]
        return tuple(Bucket(m, size, size) for m, size in zip(self.members, sizes, strict=True))

    @cached_property
    def _walked(self) -> tuple[Held, tuple[Instruction, ...]]:
        """A step, and what it held."""
        doing = _Doing()
        return doing.held, tuple(doing.held.walk(self._instructions(doing)))

    def memory_peak(self) -> MemoryPeak:
        """See Strategy."""
        return self._walked[0].peak()

    def memory_walk(self) -> MemoryWalk:
        """See Strategy."""
        return self._walked[0].walked()

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy: parameters whole, float32 masters and states of a part.

        `buckets`: what else is held as the most is, found by walking the step.
        """
        whole, most = self.part * self.ranks, self.memory_peak().total
        states = optimizer_bytes * _MASTER_BYTES // ITEM_BYTES[model.parameters[0].dtype]
        shards = self.part * _MASTER_BYTES + ceil(states / self.ranks)
        gradients = min(
            most, sum(self.gradient_bytes) if not self.partitions else self.part * self.item
        )
        return ResidentBytes(whole * self.item, gradients, most - gradients, shards)


def _work(context: StrategyContext, options: Options, ranks: int) -> ModelWork:
    model, sent = context.model, options.params
    shards = optimizer_of_shards(model.optimizer, ranks, context.prices, 1)
    typed = tuple(p._replace(dtype=sent) if sent else p for p in model.parameters)
    model = replace(model, parameters=typed, optimizer=shards)
    work = replace(context, model=with_counting(model, options)).work
    # stage 2 takes gradients from each micro-batch
    return replace(work, later=work.first) if options.stage == 2 else work


def with_counting(model: Model, options: Options) -> Model:
    """The model with the host's time in each gradient's hook to count all parameters, if it does.

    Source: deepspeed/runtime/utils.py, count_used_parameters_in_backward, called by hooks of all
    stages from 0.18.5 to 0.18.6.
    """
    counted_s = COUNTED_S * len(model.parameters) * options.counts_in_hooks
    *works, tail = (work._replace(host_s=work.host_s + counted_s) for work in model.backward)
    return replace(model, backward=(*works, tail._replace(host_s=tail.host_s - counted_s)))


def _after_another(*launches: Launch) -> Launch:
    return Launch(sum(each.host_ns for each in launches), sum(each.device_ns for each in launches))


def _prepared(prices: Prices, part: int, item: int, parameters: int) -> tuple[Launch, Launch]:
    """The norm of a part, gradient by gradient in float64; then its cast and its scaling."""

    each = part / max(1, parameters)
    norm = (size for _ in range(parameters) for size in (each * (item + 8), each * 8))
    flat = 2 * item if parameters > 1 else 0
    scaled = (part * size for size in (flat, item + _MASTER_BYTES, 2 * _MASTER_BYTES))
    return prices.launch(map(prices.passed, norm)), prices.launch(map(prices.passed, scaled))
