"""DDP with torch's ZeroRedundancyOptimizer (ZeRO-1): each rank optimizes some of the parameters.

Source: torch 2.13's torch/distributed/optim/zero_redundancy_optimizer.py (_partition_parameters,
_broadcast_params_from_rank, _build_param_buckets), without overlap_with_ddp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import ceil

from ddpsim.errors import InputError
from ddpsim.strategies.ddp.costs import PYTHON_COLLECTIVE_S, DdpCosts
from ddpsim.strategies.ddp.strategy import DistributedDataParallel
from ddpsim.strategies.instructions import Await, Communicate, Instruction, Mark
from ddpsim.strategies.strategy import Bucket, ResidentBytes, Strategy
from ddpsim.strategies.ticks import Ticks
from ddpsim.workload.model import Model, Parameter, Work

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
    kernels = ceil(whole.kernels * few)
    floor_s = min(kernels * costs.device.kernel_floor_s, whole.device_s)
    return Work(max(floor_s, share * whole.device_s), kernels, few * whole.host_s)


@dataclass(frozen=True)
class ZeroRedundancy(Strategy):
    """DDP's step, whose optimizer is that of a part; then each rank sends its parameters to all.

    `sent_bytes`: of each parameter, in the order of the broadcasts. All are launched, then awaited.
    `share`: what the rank with the most holds of the optimizer's state.
    """

    ddp: DistributedDataParallel
    sent_bytes: tuple[int, ...]
    launch_ns: int
    share: float
    broadcast: str = "the broadcasts of updated parameters"
    phases = _PHASES

    @classmethod
    def of(
        cls,
        ddp: DistributedDataParallel,
        model: Model,
        parts: _Partition,
        ticks: Ticks,
        *,
        in_one: bool = False,
    ) -> ZeroRedundancy:
        """`ddp`: with the optimizer of the largest part; `in_one`: broadcast of each part.

        A rank without parameters sends one value then.
        """
        sizes = [[model.parameters[i].size_bytes for i in part] for part in parts]
        whole = [sum(part) for part in sizes]
        share = max(whole) / max(1, sum(whole))
        sent = (
            [size or 4 for size in whole] if in_one else [size for part in sizes for size in part]
        )
        launch_ns = ticks.host_ns(PYTHON_COLLECTIVE_S)
        return cls(ddp, tuple(sent) if len(parts) > 1 else (), launch_ns, share)

    @property
    def kinds(self) -> int:
        """See Strategy."""
        return self.ddp.kinds

    @property
    def steady_from(self) -> int | None:
        """See Strategy."""
        return self.ddp.steady_from

    @property
    def rebuilt_from(self) -> int | None:
        """See Strategy."""
        return self.ddp.rebuilt_from

    def kind(self, number: int) -> int:
        """See Strategy."""
        return self.ddp.kind(number)

    def buckets(self, kind: int) -> tuple[Bucket, ...]:
        """See Strategy."""
        return self.ddp.buckets(kind)

    def step(self, kind: int) -> Iterator[Instruction]:
        """See Strategy."""
        launched = 0
        for instruction in self.ddp.step(kind):
            if isinstance(instruction, Communicate):
                launched += 1
            if isinstance(instruction, Mark) and instruction.place == "step_ends":
                yield from self._send_parameters(launched)
            yield instruction

    def _send_parameters(self, launched: int) -> Iterator[Instruction]:
        numbers = range(launched, launched + len(self.sent_bytes))
        for number, size_bytes in zip(numbers, self.sent_bytes, strict=True):
            yield Communicate(
                number, self.launch_ns, "broadcast", size_bytes, cause="updated parameter"
            )
        for number in numbers:
            yield Await(number)

    def resident_bytes(self, model: Model, optimizer_bytes: int) -> ResidentBytes:
        """See Strategy."""
        return self.ddp.resident_bytes(model, ceil(self.share * optimizer_bytes))
