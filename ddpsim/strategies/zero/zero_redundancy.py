"""DDP with torch's ZeroRedundancyOptimizer (ZeRO-1): each rank optimizes some of the parameters.

Source: torch 2.13's torch/distributed/optim/zero_redundancy_optimizer.py (_partition_parameters,
_broadcast_params_from_rank, _build_param_buckets), without overlap_with_ddp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapreplace
from itertools import chain
from math import ceil

from ddpsim.errors import InputError
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.ddp.costs import DdpCosts
from ddpsim.strategies.ddp.strategy import DistributedDataParallel
from ddpsim.strategies.instructions import Await, Communicate, Instruction, Mark
from ddpsim.strategies.strategy import ResidentBytes
from ddpsim.strategies.training_loop.around_steps import Around
from ddpsim.workload.model import Model, Parameter, Work

UPDATED_PARAMETER = "updated parameter"  # the cause of a broadcast in a queue of them
_PHASES = {"buffers": "broadcasts of parameters and buffers"}

_Partition = tuple[tuple[int, ...], ...]


def partition(parameters: Sequence[Parameter], ranks: int) -> _Partition:
    """The parameters of each rank: the largest first, each to the rank with the fewest elements.

    Raises InputError where torch would refuse them.
    """
    dtypes = sorted({parameter.dtype for parameter in parameters})
    if len(dtypes) > 1:
        raise InputError(
            "ddp.strategy",
            f"ZeroRedundancyOptimizer wants parameters of one dtype, not {' and '.join(dtypes)}; "
            "choose fully_shard, with units of one dtype each",
        )
    return spread(parameters, ranks)


def spread(parameters: Sequence[Parameter], ranks: int) -> _Partition:
    """The largest first, each to the rank with the fewest elements."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    fewest = [(0, rank) for rank in range(ranks)]  # a heap; of equal ranks the lowest comes first
    for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel):
        elements, rank = fewest[0]
        parts[rank].append(i)
        heapreplace(fewest, (elements + parameters[i].numel, rank))
    return tuple(map(tuple, parts))


def largest_part(model: Model, parts: _Partition, costs: DdpCosts) -> Work:
    """The optimizer on the rank with the most elements, which all others wait for."""
    whole, parameters = model.optimizer, model.parameters
    elements = [sum(parameters[i].numel for i in part) for part in parts]
    share = max(elements) / max(1, sum(elements))
    few = max(len(part) for part in parts) / max(1, len(parameters))
    return costs.optimizer_part(whole, share * whole.device_s, few)


class ZeroRedundancy(Around):
    """DDP's step, whose optimizer is that of a part; then each rank sends its parameters to all.

    All broadcasts, of each parameter or of each part, are launched, then awaited.
    """

    def __init__(self, context: StrategyContext) -> None:
        model, options = context.model, context.scenario.ddp.zero1
        parts = partition(model.parameters, context.scenario.cluster.world_size)
        optimizer = largest_part(model, parts, context.prices)
        of_part = replace(context, model=replace(model, optimizer=optimizer))
        super().__init__(DistributedDataParallel.of(of_part))
        self.broadcast, self.phases = "the broadcasts of updated parameters", _PHASES
        sizes = [[model.parameters[i].size_bytes for i in part] for part in parts]
        whole = [sum(part) for part in sizes]
        self._share = max(whole) / max(1, sum(whole))  # of the optimizer's state, on one rank
        sent = list(chain.from_iterable(sizes))
        if options and options.parameters_as_bucket_view:  # a rank without any sends one value
            sent = [size or 4 for size in whole]
        self._sent_bytes = sent if len(parts) > 1 else []
        self._launch_ns = context.prices.call_ns

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        launched = 0
        for instruction in self._inner.step(kind):
            if isinstance(instruction, Communicate):
                launched += 1
            if isinstance(instruction, Mark) and instruction.place == "step_ends":
                yield from self._send_parameters(launched)
            yield instruction

    def _send_parameters(self, launched: int) -> Iterator[Instruction]:
        for number, size_bytes in enumerate(self._sent_bytes, launched):
            yield Communicate(
                number, self._launch_ns, "broadcast", size_bytes, cause=UPDATED_PARAMETER
            )
        for number, _ in enumerate(self._sent_bytes, launched):
            yield Await(number)

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy."""
        return self._inner.resident_bytes(model, ceil(self._share * optimizer_bytes))
