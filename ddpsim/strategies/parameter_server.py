"""A synchronous parameter server, of torch's collectives: gradients pushed, parameters pulled.

The loop: `dist.reduce(p.grad, dst=server)` of each gradient after the backward, the servers divide
and optimize what is theirs, then `dist.broadcast(p, src=server)` of each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from ddpsim.cluster.transfers import Operation
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.instructions import Await, Communicate, Instruction, compute
from ddpsim.strategies.model_work import ModelWork
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.strategies.ticks import Launch
from ddpsim.workload.model import Model

_PHASES = {
    "backward": "backward",
    "copy_back": "divisions on the servers",
    "reduce": "gradients reduced to their servers",
    "broadcast": "parameters sent from their servers",
}


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Reduce each gradient to its server, optimize there, broadcast each parameter from there.

    Each call is awaited before the next one, as is usual. `pushed`: a gradient each, in the order
    of `model.parameters()`. `divide`: the gradients of the server with the most. `share`: what that
    server holds of the optimizer's state. `work` has its optimizer.
    """

    work: ModelWork
    pushed: tuple[Bucket, ...]
    names: tuple[str, ...]
    divide: Launch
    launch_ns: int
    share: float
    broadcast: str = "the parameters that servers send"
    reduced: str = "gradient"
    phases = _PHASES

    @classmethod
    def of(
        cls,
        model: Model,
        work: ModelWork,
        parts: Sequence[Sequence[int]],
        prices: Prices,
    ) -> ParameterServer:
        """`parts`: the parameters of each server; `work`: with the optimizer of the largest."""
        used = sorted(model.ready_order)
        sizes = [parameter.size_bytes for parameter in model.parameters]
        largest = max(parts, key=lambda part: sum(sizes[i] for i in part))
        divisions = [prices.passed(2 * sizes[i]) for i in used if i in set(largest)]
        return cls(
            work,
            tuple(Bucket((i,), sizes[i], sizes[i]) for i in used),
            tuple(model.parameters[i].name for i in used),
            prices.launch(divisions),
            prices.call_ns,
            sum(sizes[i] for i in largest) / max(1, sum(sizes)),
        )

    def buckets(self, kind: int) -> tuple[Bucket, ...]:  # noqa: ARG002
        """See Strategy."""
        return self.pushed

    def step(self, kind: int) -> Iterator[Instruction]:  # noqa: ARG002
        """See Strategy."""
        yield from self.work.without_communication()
        yield from self._sent("reduce", 0)
        yield compute("copy_back", self.divide)
        yield from self.work.end_of_step(self._sent("broadcast", len(self.pushed)))

    def _sent(self, operation: Operation, first: int) -> Iterator[Instruction]:
        """All gradients to their servers, or all parameters from there."""
        for index, (bucket, name) in enumerate(zip(self.pushed, self.names, strict=True)):
            sent = Communicate(
                first + index,
                self.launch_ns,
                operation,
                bucket.wire_bytes,
                cause=f"parameter {name}",
            )
            if operation == "reduce":
                sent = sent._replace(bucket=index, bucket_bytes=bucket.size_bytes, num_params=1)
            yield sent
            yield Await(first + index)

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy; of the server with the most."""
        return super().resident_bytes(model, ceil(self.share * optimizer_bytes))
