"""ZeRO-1 as reduce-scatters and all-gathers: Megatron's DDP with its distributed optimizer.

Source: NVIDIA/Megatron-LM megatron/core/distributed, at 001199898c4b (distributed_data_parallel.py:
buckets' least size, hooks; param_and_grad_buffer.py: buckets, padding, order, waits) and
core/optimizer/distrib_optimizer.py (masters and states of 1/N, a copy to the parameters, and of
gradients that are not in float32 a copy of 1/N that is).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm

from ddpsim.errors import InputError
from ddpsim.result.model import HeldBytes, MemoryWalk
from ddpsim.scenario.options.loops import DistributedOptimizer as Options
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.ddp.costs import DdpCosts
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Instruction,
    LoadBatch,
    Mark,
    Piece,
    compute,
    compute_all,
)
from ddpsim.strategies.model_work import ModelWork
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.strategies.ticks import Launch
from ddpsim.strategies.training_loop.around_optimizer import NormSum
from ddpsim.workload.model import ITEM_BYTES, Model, Work, joined

_PHASES = {
    "backward": "backward, with the gradients' additions to buffers",
    "reduce_scatter": "reduce-scatters of gradients",
    "all_gather": "all-gathers of updated parameters",
}

_LEAST_ELEMENTS, _LEAST_A_RANK = 40_000_000, 1_000_000  # of a bucket
_ALIGNED_PARAMETER, _ALIGNED_BUCKET = 64, 128  # elements
_Buckets = list[tuple[tuple[int, ...], int]]
_FLOAT32, _BFLOAT16 = ITEM_BYTES["float32"], ITEM_BYTES["bfloat16"]


def bucketed(model: Model, options: Options, ranks: int) -> _Buckets:
    """Parameters of each bucket, in reverse registration order, and its padded elements.

    One bucket holds all where nothing is hidden under the backward. Raises InputError.
    """
    same_dtype(model, "distributed_optimizer")
    if model.unused and options.overlap_grad_reduce:
        problem = f"{len(model.unused)} parameters get no gradient, for which Megatron would wait"
        raise InputError("ddp.distributed_optimizer.overlap_grad_reduce", f"{problem}; write false")
    least: float = options.bucket_size or max(_LEAST_ELEMENTS, _LEAST_A_RANK * ranks)
    if not options.overlap_grad_reduce:
        least = float("inf")
    buckets: _Buckets = []
    members: list[int] = []
    end = 0
    for i in reversed(range(len(model.parameters))):
        members.append(i)
        end = _padded(end, _ALIGNED_PARAMETER) + model.parameters[i].numel
        if end >= least or i == 0:
            buckets.append((tuple(members), _padded(end, lcm(ranks, _ALIGNED_BUCKET))))
            members, end = [], 0
    return buckets


def same_dtype(model: Model, strategy: str) -> None:
    """Raise InputError for parameters of several dtypes."""
    if len({parameter.dtype for parameter in model.parameters}) > 1:
        problem = "is modelled for parameters of one dtype; choose fully_shard"
        raise InputError("ddp.strategy", f"{strategy} {problem}")


def _padded(elements: int, divisor: int) -> int:
    return ceil(elements / divisor) * divisor


def optimizer_of_shards(whole: Work, ranks: int, costs: DdpCosts, count: int) -> Work:
    """A rank's 1/N of the elements, which are of 1/N of `count` parameters and some cut ones."""
    few = min(1.0, (ceil(count / ranks) + 1) / max(1, count))
    return costs.optimizer_part(whole, whole.device_s / ranks, few)


@dataclass(frozen=True)
class DistributedOptimizer(Strategy):
    """Add gradients to buffers, reduce-scatter them, optimize shards, all-gather parameters.

    `work`: the model's own, with the optimizer of a shard. `needed[i]`: the buckets whose
    parameters forward piece i uses. `zeroed`: the gradients' buffers, before a step; `added[i]`:
    gradient i to its buffer. `scaled`: each bucket before it is reduced; `copied`: updated masters
    to the parameters. `parameter_bytes`, `gradient_bytes`: of an element, the second one in the
    buffers, where gradients are added up and from which they are reduced. `cast`: the shard's
    gradients to float32.
    """

    work: ModelWork
    members: tuple[tuple[int, ...], ...]
    elements: tuple[int, ...]
    needed: tuple[tuple[int, ...], ...]
    zeroed: Launch
    added: tuple[Launch, ...]
    scaled: tuple[Launch, ...]
    copied: Launch
    cast: Launch
    launch_ns: int
    ranks: int
    parameter_bytes: int
    gradient_bytes: int
    keeps_masters: bool
    overlaps_reduce: bool
    overlaps_gather: bool
    reduced: str = "reduce-scatter"
    phases = _PHASES

    @classmethod
    def of(cls, context: StrategyContext) -> DistributedOptimizer:
        """A job's step; raises InputError for a model that is not modelled."""
        ranks, options = context.scenario.cluster.world_size, context.scenario.ddp.shards
        buckets, prices = bucketed(context.model, options, ranks), context.prices
        model = with_forward_parts(context.model, buckets)
        shards = tuple(p._replace(numel=ceil(p.numel / ranks)) for p in model.parameters)
        around = context.around_shards(replace(model, parameters=shards), NormSum(reads=True))
        part = optimizer_of_shards(model.optimizer, ranks, prices, len(model.parameters))
        work = replace(context, model=replace(model, optimizer=part)).work
        # gradients are added to buffers in every micro-batch, also in the first
        work = replace(work, around=around, later=work.first)
        item = ITEM_BYTES[options.params or model.parameters[0].dtype]
        added = _BFLOAT16 if options.grad_reduce_in_bf16 else _FLOAT32
        total = sum(elements for _, elements in buckets)

        def moved(size_bytes: float) -> Launch:
            return prices.ticks.launch(prices.moved(size_bytes))

        read_and_added = [p.numel * (item + 2 * added) for p in model.parameters]
        keeps_masters = item < 4
        return cls(
            work=work,
            members=tuple(members for members, _ in buckets),
            elements=tuple(elements for _, elements in buckets),
            needed=_needed(model, buckets),
            zeroed=moved(total * added),
            added=tuple(map(moved, read_and_added)),
            scaled=tuple(moved(2 * elements * added) for _, elements in buckets),
            copied=moved(total // ranks * (4 + item)) if keeps_masters else Launch(0, 0),
            cast=moved(total // ranks * (added + _FLOAT32)) if added < _FLOAT32 else Launch(0, 0),
            launch_ns=prices.call_ns,
            ranks=ranks,
            parameter_bytes=item,
            gradient_bytes=added,
            keeps_masters=keeps_masters,
            overlaps_reduce=options.overlap_grad_reduce,
            overlaps_gather=options.overlap_param_gather,
        )

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        yield compute("zero_grad", self.zeroed)
        for micro_batch in self.work.micro_batches:
            yield LoadBatch()
            if not micro_batch.number and self.overlaps_gather and self.ranks > 1:
                yield from self._gathering_forward(micro_batch.forward)
            else:
                yield from compute_all("forward", micro_batch.forward)
            if micro_batch.is_last:
                yield Mark("backward_starts")
            yield from self._backward(micro_batch.backward, is_last=micro_batch.is_last)
        after = () if self.overlaps_gather else self._gather_all()
        if self.gradient_bytes < _FLOAT32:
            yield compute("optimizer", self.cast)
        yield from self.work.end_of_step((*self._copy(), *after))

    def _backward(self, backward: Sequence[Piece], *, is_last: bool) -> Iterator[Instruction]:
        """Each gradient into its buffer; the last one of a bucket launches its reduce-scatter."""
        *works, tail = backward
        of = {p: i for i, members in enumerate(self.members) for p in members}
        pending = [len(members) for members in self.members]
        for parameter, piece in zip(self.work.ready_order, works, strict=True):
            yield from compute_all("backward", [piece])
            yield compute("bucket_copy", self.added[parameter])
            pending[of[parameter]] -= 1
            if is_last and self.overlaps_reduce and not pending[of[parameter]]:
                yield from self._reduce(of[parameter])
        yield from compute_all("backward", [tail])
        if not is_last:
            return
        for bucket in range(len(self.members)):
            if not self.overlaps_reduce:
                yield from self._reduce(bucket)
            if self.ranks > 1:
                yield Await(bucket)

    def _reduce(self, bucket: int) -> Iterator[Instruction]:
        """Divided first, then summed: Megatron does not average in the collective by default."""
        yield compute("bucket_copy", self.scaled[bucket])
        if self.ranks > 1:
            size_bytes = self.elements[bucket] * self.gradient_bytes
            yield Communicate(
                bucket,
                self.launch_ns,
                "reduce_scatter",
                size_bytes,
                bucket=bucket,
                bucket_bytes=size_bytes,
                num_params=len(self.members[bucket]),
                cause=f"gradients of bucket {bucket}",
            )

    def _gather(self, bucket: int) -> Communicate:
        return Communicate(
            len(self.members) + bucket,
            self.launch_ns,
            "all_gather",
            self.elements[bucket] * self.parameter_bytes,
            cause=f"parameters of bucket {bucket}",
        )

    def _copy(self) -> Iterator[Instruction]:
        if self.keeps_masters:
            yield compute("optimizer", self.copied)

    def _gather_all(self) -> Iterator[Instruction]:
        """One after the other, each waited for."""
        for bucket in range(len(self.members)) if self.ranks > 1 else ():
            gather = self._gather(bucket)
            yield gather
            yield Await(gather.number)

    def _gathering_forward(self, forward: Sequence[Piece]) -> Iterator[Instruction]:
        """A module waits for its parameters' all-gather, and launches the next one."""
        launched: set[int] = set()

        def gather(bucket: int) -> Iterator[Instruction]:
            if bucket >= 0 and bucket not in launched:
                launched.add(bucket)
                yield self._gather(bucket)

        waiting = set(range(len(self.members)))
        for needed, piece in zip(self.needed, forward, strict=True):
            for bucket in (bucket for bucket in needed if bucket in waiting):
                yield from gather(bucket)
                yield Await(len(self.members) + bucket)
                waiting.remove(bucket)
                yield from gather(bucket - 1)
            yield from compute_all("forward", [piece])
        for bucket in sorted(waiting, reverse=True):
            yield from gather(bucket)
            yield Await(len(self.members) + bucket)

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """See Strategy."""
        sizes = (elements * self.gradient_bytes for elements in self.elements)
        return tuple(Bucket(m, size, size) for m, size in zip(self.members, sizes, strict=True))

    def memory_walk(self) -> MemoryWalk:
        """See Strategy: the buffers of gradients stay."""
        return ((0, HeldBytes(gradients=sum(self.elements) * self.gradient_bytes)),)

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy: parameters and gradients whole; masters, if there are any, and states 1/N.

        Optimizers hold states of the parameters' type here, and of the masters' in Megatron. Of
        gradients in bfloat16 the shard has a copy in float32.
        """
        elements = sum(self.elements)
        masters = 4 * elements if self.keeps_masters else 0
        states = optimizer_bytes * 4 // ITEM_BYTES[model.parameters[0].dtype]
        cast = _FLOAT32 * elements if self.gradient_bytes < _FLOAT32 else 0
        shards = ceil((masters + states + cast) / self.ranks)
        gradients = elements * self.gradient_bytes
        return ResidentBytes(elements * self.parameter_bytes, gradients, 0, shards)


def with_forward_parts(model: Model, buckets: _Buckets) -> Model:
    """A forward whose works tell which buckets they use.

    Where modules have no names: a work for each bucket, the last bucket's first, with the share of
    the forward that it has of the backward (assumed).
    """
    if model.forward_modules or not model.forward:
        return model
    of = {i: bucket for bucket, (members, _) in enumerate(buckets) for i in members}
    times_s = [0.0] * len(buckets)
    for i, work in zip(model.ready_order, model.backward, strict=False):
        times_s[of[i]] += work.device_s
    whole, total_s = joined(model.forward), sum(times_s)
    host_s = whole.kernels * model.launch_s + whole.host_s
    shares = [time_s / total_s if total_s else 1 / len(buckets) for time_s in times_s]
    parts = (Work(share * whole.device_s, 0, share * host_s) for share in reversed(shares))
    return replace(model, forward=tuple(parts))


def _needed(model: Model, buckets: _Buckets) -> tuple[tuple[int, ...], ...]:
    """Buckets that each work of the forward uses: the parameters of its module are in them."""
    if not model.forward_modules:
        return tuple((bucket,) for bucket in reversed(range(len(buckets))))
    of = {i: bucket for bucket, (members, _) in enumerate(buckets) for i in members}
    buckets_of: dict[str, dict[int, None]] = {}
    for i, parameter in enumerate(model.parameters):
        buckets_of.setdefault(parameter.name.rpartition(".")[0], {})[of[i]] = None
    return tuple(tuple(buckets_of.get(name, ())) for name in model.forward_modules)
