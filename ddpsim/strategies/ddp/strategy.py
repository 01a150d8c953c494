"""One step under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from ddpsim.scenario.ddp import Ddp
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.ddp.buckets import Assignment, plan_buckets
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.ddp.gathering_hooks import GatheringHook
from ddpsim.strategies.ddp.join import NOT_JOINED, JoinedForward
from ddpsim.strategies.ddp.mixed_precision import (
    NO_COPIES,
    LowCopies,
    MixedPrecision,
    as_reduced,
    check_modules,
)
from ddpsim.strategies.ddp.optimizer_in_backward import OptimizerInHook
from ddpsim.strategies.ddp.power_sgd import check_one_bucket, in_stages
from ddpsim.strategies.ddp.reducer import Buffers, Reducer, ReducerWork
from ddpsim.strategies.instructions import (
    Communicate,
    Compute,
    Instruction,
    LoadBatch,
    Mark,
    compute_all,
)
from ddpsim.strategies.model_work import ModelWork
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.strategies.ticks import Launch
from ddpsim.workload.model import Model, Work

_INITIAL, _REBUILT, _COMPRESSED = 0, 1, 2
_FEW_MICRO_BATCHES = 3  # the first, the last, and one between them


@dataclass(frozen=True)
class DistributedDataParallel(Strategy):
    """Broadcast buffers, forward, reduce buckets under the backward, wait for them, optimize.

    Its first backwards that reduce have buckets by registration order, those from `rebuilt_at` on
    by ready order; None: never rebuilt. `bucket_view`: gradients live in the buckets. `no_sync`:
    only the last micro-batch reduces. `gradients_stay`: zero_grad drops none. Under PowerSGD
    backwards from `compressed_at` on have `compressed_buckets`. `drops_gradients`: each bucket's,
    which the optimizer has used up. `low`: copies of the parameters that forward and backward use.
    """

    model: ModelWork
    reducer: ReducerWork
    forward_hook_ns: int
    initial_buckets: tuple[Bucket, ...]
    rebuilt_buckets: tuple[Bucket, ...]
    rebuilt_at: int | None
    bucket_view: bool = False
    no_sync: bool = True
    compressed_buckets: tuple[Bucket, ...] = ()
    compressed_at: int | None = None
    gradients_stay: bool = False
    join: JoinedForward = NOT_JOINED
    drops_gradients: bool = False
    low: LowCopies = NO_COPIES

    @classmethod
    def of(cls, context: StrategyContext) -> DistributedDataParallel:
        """A job's step under the options of `ddp`; raises InputError.

        DDP's hooks and copies take `own_factor` times as long as priced, but no compression.
        """
        spec, model, prices = context.scenario.ddp, context.model, context.prices
        plan = plan_buckets(model.parameters, model.ready_order, spec, model.tied)
        pricing = _OwnWork(model, prices, context.own_factor, context.scenario.cluster.world_size)
        sent = replace(pricing, model=as_reduced(model, spec.mixed_precision))
        join = JoinedForward.of(spec.join, prices)
        work = context.work
        if spec.reduced_again:
            again = [each.again() for each in context.all_reduces.as_ready()]
            work = work.reduced_again(again, spec.reduced_again)
        ddp = cls(
            work,
            replace(sent.reducer(spec), in_first_hook=join.divisor),
            pricing.host_ns(prices.forward_hook_s * len(model.parameters)),
            pricing.buckets(plan.initial),
            pricing.buckets(plan.rebuilt),
            plan.rebuilt_at,
            spec.gradient_as_bucket_view,
            spec.no_sync,
            pricing.compressed(plan.initial if plan.rebuilt_at is None else plan.rebuilt, spec),
            spec.powers.start_powerSGD_iter if spec.powers else None,
            gradients_stay=not context.scenario.workload.set_to_none,
            join=join,
        )
        if types := spec.mixed_precision:
            check_modules(model, types, static_graph=spec.static_graph)
            mixed = MixedPrecision(model, types, prices)
            return replace(ddp._with_buckets(mixed.reduced), low=mixed.copies)
        if spec.optimizer_in_backward:
            hook = OptimizerInHook(model, context.scenario.workload.optimizer, prices)
            used_up = ddp._with_buckets(lambda buckets: map(hook.after, buckets))
            return replace(used_up.without_optimizer(), drops_gradients=True)
        return ddp

    def without_optimizer(self) -> DistributedDataParallel:
        """Leave out the optimizer, which a hook takes."""
        return replace(self, model=replace(self.model, optimizer=Launch(0, 0)))

    def _with_buckets(
        self, changed: Callable[[tuple[Bucket, ...]], Iterable[Bucket]]
    ) -> DistributedDataParallel:
        initial, rebuilt = changed(self.initial_buckets), changed(self.rebuilt_buckets)
        return replace(self, initial_buckets=tuple(initial), rebuilt_buckets=tuple(rebuilt))

    @cached_property
    def kinds(self) -> int:
        """See Strategy."""
        if self.compressed_buckets:
            return 3
        return 1 if self.initial_buckets == self.rebuilt_buckets else 2

    @property
    def steady_from(self) -> int | None:
        """See Strategy."""
        changes = [at for at in (self.rebuilt_at, self.compressed_at) if at is not None]
        return ceil(max(changes) / self._reductions) if changes else None

    @property
    def rebuilt_from(self) -> int | None:
        """See Strategy."""
        return None if self.rebuilt_at is None else ceil(self.rebuilt_at / self._reductions)

    @property
    def _reductions(self) -> int:
        """Backwards of a step that reduce."""
        return 1 if self.no_sync else self.model.accumulation_steps

    def kind(self, number: int) -> int:
        """See Strategy."""
        if self._is_after(number, self.compressed_at):
            return _COMPRESSED
        return _REBUILT if self._is_after(number, self.rebuilt_at) and self.kinds > 1 else _INITIAL

    def _is_after(self, number: int, backward: int | None) -> bool:
        """Whether a step begins with a backward that reduces no earlier than this one."""
        return backward is not None and number >= ceil(backward / self._reductions)

    def made(self, kind: int) -> tuple[Instruction, ...]:
        """See Strategy; under no_sync micro-batches between the first and the last are alike."""
        more = self.model.accumulation_steps - _FEW_MICRO_BATCHES
        if more <= 0 or not self.no_sync:
            return super().made(kind)
        few = replace(self.model, accumulation_steps=_FEW_MICRO_BATCHES)
        return _with_more(replace(self, model=few).made(kind), more) or super().made(kind)

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        reducer = Reducer(self.reducer, self.buckets(kind))
        for micro_batch in self.model.micro_batches:
            number = micro_batch.number
            if number and not self.no_sync:
                reducer = reducer.next(self._buckets_of(kind, number))
            reduces = micro_batch.is_last or not self.no_sync
            yield LoadBatch()
            syncs_buffers = not number or not self.no_sync
            yield from self._before_forward(reducer, syncs_buffers=syncs_buffers)
            yield from self.low.made(over_gradients=bool(number) or self.gradients_stay)
            if reduces:  # under no_sync DDP prepares for no backward (distributed.py)
                yield Compute("forward", self.forward_hook_ns, 0)
            yield from compute_all("forward", micro_batch.forward)
            if micro_batch.is_last:
                yield Mark("backward_starts")
            if reduces:
                yield from reducer.backward(micro_batch.backward)
            else:
                yield from compute_all("backward", micro_batch.backward)
        yield from self.join.ended
        yield from self.model.end_of_step()

    def _before_forward(self, reducer: Reducer, *, syncs_buffers: bool) -> Iterator[Instruction]:
        """What all ranks have to know, and rank 0's buffers."""
        yield from self.join.notified
        if syncs_buffers and self.reducer.buffers:
            yield from self.join.agreed
            yield from reducer.broadcast_buffers()
        yield from self.join.announced

    def _buckets_of(self, kind: int, backward: int) -> tuple[Bucket, ...]:
        """Buckets of one backward without no_sync: the rebuild may come within the first step."""
        is_rebuilt = self.rebuilt_at is not None and backward >= self.rebuilt_at
        if kind == _COMPRESSED:
            return self.compressed_buckets
        return self.rebuilt_buckets if is_rebuilt else self.buckets(kind)

    def buckets(self, kind: int) -> tuple[Bucket, ...]:
        """See Strategy."""
        of_kind = (self.initial_buckets, self.rebuilt_buckets, self.compressed_buckets)
        return of_kind[kind]

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy; under gradient_as_bucket_view gradients live in the buckets.

        Not those that micro-batches add up: they move there with the last one, beside whose
        activations there are both, unless they stay there from step to step. A parameter without
        a gradient has a place in a bucket alone.
        """
        held = super().resident_bytes(model, optimizer_bytes)
        steady = self.buckets(self.kind(self.steady_from or 0))
        in_buckets = sum(bucket.size_bytes for bucket in steady)
        kept = sum(bucket.kept_bytes for bucket in steady)
        flying = max((bucket.flying_bytes for bucket in steady), default=0)
        held = held._replace(
            parameters=held.parameters + self.low.size_bytes,
            buckets=(self.low.size_bytes or in_buckets) + kept + flying,
        )
        reduces_each = self._reductions == self.model.accumulation_steps
        is_view = self.bucket_view and (reduces_each or self.gradients_stay)
        if self.drops_gradients and self.model.accumulation_steps == 1 and not is_view:
            largest = max(bucket.size_bytes for bucket in self.rebuilt_buckets)
            return held._replace(gradients=largest)
        return held._replace(gradients=0) if is_view else held


def _with_more(step: tuple[Instruction, ...], more: int) -> tuple[Instruction, ...] | None:
    """A step of three micro-batches with the middle one so many times more.

    None where that sends something: collectives are numbered by their place in a step.
    """
    _, begins, ends = (i for i, each in enumerate(step) if isinstance(each, LoadBatch))
    middle = step[begins:ends]
    if any(isinstance(each, Communicate) for each in middle):
        return None
    return step[:ends] + more * middle + step[ends:]


@dataclass(frozen=True)
class _OwnWork:
    """DDP's own work on a model, in ticks; all but compression takes `factor` times as long."""

    model: Model
    prices: Prices
    factor: float
    ranks: int

    def host_ns(self, seconds: float) -> int:
        return self.prices.ticks.host_ns(seconds, self.factor)

    def _launch(self, work: Work) -> Launch:
        return self.prices.ticks.launch(work, self.factor)

    def reducer(self, spec: Ddp) -> ReducerWork:
        model, prices = self.model, self.prices
        unused = frozenset(model.unused)
        return ReducerWork(
            buffers=tuple(
                Buffers(b.size_bytes, self._launch(b.flatten), self._launch(b.unflatten))
                for b in prices.broadcasts(model.buffers)
            ),
            ready_order=model.ready_order,
            unused=tuple(sorted(unused)),
            hook_ns=self.host_ns(prices.parameter_hook_s),
            copy_in=tuple(
                self._launch(prices.zeroed(p) if i in unused else prices.copy_in(p))
                for i, p in enumerate(model.parameters)
            ),
            launch_collective_ns=self.prices.ticks.host_ns(prices.launch_collective_s),
            used_map_bytes=4 * len(model.parameters) if spec.finds_unused else 0,
            in_order=spec.backend != "gloo",
        )

    def buckets(self, assignment: Assignment) -> tuple[Bucket, ...]:
        unused = frozenset(self.model.unused)
        return tuple(self._bucket(members, unused) for members in assignment)

    def compressed(self, assignment: Assignment, spec: Ddp) -> tuple[Bucket, ...]:
        """Buckets under PowerSGD, if that is the hook; raises InputError."""
        powers = spec.powers
        if powers is None:
            return ()
        if spec.backend == "gloo":
            check_one_bucket(len(assignment), self.model.parameters)
        return tuple(
            in_stages(
                bucket,
                [self.model.parameters[i] for i in bucket.parameters],
                powers,
                self.prices,
            )
            for bucket in self.buckets(assignment)
        )

    def _bucket(self, members: tuple[int, ...], unused: frozenset[int]) -> Bucket:
        parameters = [self.model.parameters[i] for i in members]
        size_bytes = sum(parameter.size_bytes for parameter in parameters)
        hook = self.prices.hook(size_bytes, parameters[0].dtype)
        compresses = hook.size_bytes != size_bytes
        used = [self.model.parameters[i] for i in members if i not in unused]
        bucket = Bucket(
            members,
            size_bytes,
            hook.size_bytes,
            self.prices.ticks.launch(hook.before) if compresses else self._launch(hook.before),
            self.prices.ticks.launch(hook.after).device_ns,
            self._launch(self.prices.copy_back(used)),
        )
        return GatheringHook(self.prices, self.ranks).staged(bucket, parameters[0].dtype)
