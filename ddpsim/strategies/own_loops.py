"""Training loops without a wrapper of the model: they send gradients or parameters themselves.

Sources: torch 2.13's torch/distributed/algorithms/model_averaging/averagers.py
(PeriodicModelAverager) for local SGD. The parameter server is one of torch's collectives:
`dist.reduce(p.grad, dst=server)` of each gradient after the backward, the servers divide and
optimize what is theirs, then `dist.broadcast(p, src=server)` of each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from ddpsim.cluster.transfers import Operation
from ddpsim.strategies.all_reduces import AllReduce
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.ddp.buckets import stated_caps
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Instruction,
    compute,
    compute_all,
)
from ddpsim.strategies.model_work import MicroBatch
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.strategies.zero.zero_redundancy import largest_part, spread
from ddpsim.workload.model import Model

_ONE_BY_ONE = {  # phases of a loop that reduces each gradient on its own
    "backward": "backward",
    "copy_back": "divisions after the all-reduces",
    "all_reduce": "all-reduces of gradients, one after another",
}
_FLAT = {
    "backward": "backward, with the gradients' copies into one tensor",
    "copy_back": "the division, and copies back to gradients",
    "all_reduce": "the all-reduce of all gradients",
}
_LOCAL = {
    "backward": "backward",
    "all_reduce": "the average of the parameters",
    "averaging": "copies of the parameters for their average",
}
_SERVED = {
    "backward": "backward",
    "copy_back": "divisions on the servers",
    "reduce": "gradients reduced to their servers",
    "broadcast": "parameters sent from their servers",
}
_AVERAGES, _ALONE = 0, 1


class SingleDevice(Strategy):
    """The bare module's step: load, forward, backward of each micro-batch, then the optimizer.

    `warm`: so many first steps do not count, as those of the strategy it is compared with.
    """

    def __init__(self, context: StrategyContext, warm: int) -> None:
        self._work = context.work_alone
        self._warm = warm

    @property
    def warmup(self) -> int:
        """See Strategy."""
        return self._warm

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        yield from self._work.without_communication()
        yield from self._work.end_of_step()


class AfterBackward(Strategy):
    """A loop over all gradients after the backward: `dist.all_reduce(p.grad)`, then a division.

    Each call is awaited before the next one: by the host with gloo, by its stream with NCCL.
    """

    reduced = "gradient"
    phases = _ONE_BY_ONE

    def __init__(self, context: StrategyContext) -> None:
        self._work = context.work
        self._all_reduces = self._made(context)

    def _made(self, context: StrategyContext) -> tuple[AllReduce, ...]:
        return context.all_reduces.each()

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        yield from self._work.without_communication()
        for number, each in enumerate(self._all_reduces):
            yield compute("bucket_copy", each.bucket.before)
            yield each.launched(number, number)
            yield Await(number)
            yield compute("copy_back", each.bucket.copy_back)
        yield from self._work.end_of_step()

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """See Strategy."""
        return tuple(each.bucket for each in self._all_reduces)


class FlatAfterBackward(AfterBackward):
    """All gradients of a dtype are copied into one tensor, which is reduced and copied back."""

    reduced = "flat tensor"
    phases = _FLAT

    def _made(self, context: StrategyContext) -> tuple[AllReduce, ...]:
        ddp, all_reduces = context.scenario.ddp, context.all_reduces
        groups = ddp.bucket_groups
        return all_reduces.grouped(groups) if groups else all_reduces.flat(stated_caps(ddp))

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy; the flat tensors are there beside the gradients."""
        held = super().resident_bytes(model, optimizer_bytes)
        return held._replace(buckets=held.gradients)


class PerParameter(AfterBackward):
    """`register_post_accumulate_grad_hook` launches an all-reduce of its gradient.

    After the backward each is awaited in the order of launch, and divided; without `async_op`: at
    once, before the backward goes on. Under `no_sync` hooks do so in the last micro-batch alone.
    """

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        ddp = context.scenario.ddp
        self._no_sync = ddp.no_sync
        self._async_op = ddp.per_parameter is None or ddp.per_parameter.async_op

    def _made(self, context: StrategyContext) -> tuple[AllReduce, ...]:
        return context.all_reduces.as_ready()

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        yield from self._work.micro_batched(self._backward)
        yield from self._work.end_of_step()

    def _backward(self, micro_batch: MicroBatch) -> Iterator[Instruction]:
        if self._no_sync and not micro_batch.is_last:
            yield from compute_all("backward", micro_batch.backward)
            return
        first = 0 if self._no_sync else micro_batch.number * len(self._all_reduces)
        *works, tail = micro_batch.backward
        for index, (work, each) in enumerate(zip(works, self._all_reduces, strict=True)):
            yield from compute_all("backward", [work])
            yield each.launched(first + index, index)
            if not self._async_op:
                yield from _ended(first + index, each)
        yield from compute_all("backward", [tail])
        if self._async_op:
            for index, each in enumerate(self._all_reduces):
                yield from _ended(first + index, each)


def _ended(number: int, reduced: AllReduce) -> Iterator[Instruction]:
    yield Await(number)
    yield compute("copy_back", reduced.bucket.copy_back)


class LocalSgd(Strategy):
    """No gradient is sent; after the optimizer of steps 0, `every`, 2 `every` ... parameters are.

    The averager flattens all of them into one tensor, which is one all-reduce.
    """

    reduced = "average of the parameters"
    phases = _LOCAL

    def __init__(self, context: StrategyContext) -> None:
        self._work = context.work
        self._average = context.all_reduces.averaged()
        options = context.scenario.ddp.local_sgd
        self._every = options.every if options else 1

    @property
    def kinds(self) -> int:
        """See Strategy."""
        return 1 if self._every == 1 else 2

    @property
    def period(self) -> int:
        """See Strategy."""
        return self._every

    def kind(self, number: int) -> int:
        """See Strategy."""
        return _ALONE if number % self._every else _AVERAGES

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        yield from self._work.without_communication()
        after = self._average.averaged() if kind == _AVERAGES else ()
        yield from self._work.end_of_step(after)

    def buckets(self, kind: int) -> tuple[Bucket, ...]:
        """See Strategy: all parameters at once, in a step that averages them."""
        return (self._average.bucket,) if kind == _AVERAGES else ()

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy; while parameters are averaged there are two of each."""
        held = super().resident_bytes(model, optimizer_bytes)
        return held._replace(buckets=self._average.bucket.wire_bytes)


class ParameterServer(Strategy):
    """Reduce each gradient to its server, optimize there, broadcast each parameter from there.

    Each call is awaited before the next one, as is usual. The step is that of the server with the
    most parameters.
    """

    broadcast = "the parameters that servers send"
    reduced = "gradient"
    phases = _SERVED

    def __init__(self, context: StrategyContext) -> None:
        model, prices, spec = context.model, context.prices, context.scenario.ddp.parameter_server
        parts = spread(model.parameters, spec.servers if spec else 1)
        optimizer = largest_part(model, parts, prices)
        self._work = replace(context, model=replace(model, optimizer=optimizer)).work
        sizes = [parameter.size_bytes for parameter in model.parameters]
        largest = set(max(parts, key=lambda part: sum(sizes[i] for i in part)))
        used = sorted(model.ready_order)
        self._pushed = tuple(Bucket((i,), sizes[i], sizes[i]) for i in used)
        self._names = [model.parameters[i].name for i in used]
        self._divided = prices.launch(prices.passed(2 * sizes[i]) for i in used if i in largest)
        self._share = sum(sizes[i] for i in largest) / max(1, sum(sizes))
        self._launch_ns = prices.call_ns

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """See Strategy."""
        return self._pushed

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        yield from self._work.without_communication()
        yield from self._sent("reduce", 0)
        yield compute("copy_back", self._divided)
        yield from self._work.end_of_step(self._sent("broadcast", len(self._pushed)))

    def _sent(self, operation: Operation, first: int) -> Iterator[Instruction]:
        """All gradients to their servers, or all parameters from there."""
        for index, (bucket, name) in enumerate(zip(self._pushed, self._names, strict=True)):
            number, size_bytes, cause = first + index, bucket.wire_bytes, f"parameter {name}"
            sent = Communicate(number, self._launch_ns, operation, size_bytes, cause=cause)
            if operation == "reduce":
                sent = sent._replace(bucket=index, bucket_bytes=size_bytes, num_params=1)
            yield sent
            yield Await(number)

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy; of the server with the most."""
        return super().resident_bytes(model, ceil(self._share * optimizer_bytes))
