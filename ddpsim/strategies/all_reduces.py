"""All-reduces that a training loop calls itself, without DistributedDataParallel.

Sources: torch 2.13's torch/_utils.py (_flatten_dense_tensors) and
torch/distributed/algorithms/model_averaging/utils.py (average_parameters).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpsim.strategies.ddp.buckets import assign_by_size
from ddpsim.strategies.ddp.costs import PYTHON_COLLECTIVE_S, DdpCosts
from ddpsim.strategies.instructions import Await, Communicate, Instruction, compute
from ddpsim.strategies.strategy import Bucket
from ddpsim.strategies.ticks import Launch, Ticks
from ddpsim.workload.model import ITEM_BYTES, Model, Work, joined

__all__ = ["ONE_BY_ONE", "AllReduce", "AllReduces"]

ONE_BY_ONE = {  # phases of a loop that reduces each gradient on its own
    "backward": "backward",
    "copy_back": "divisions after the all-reduces",
    "all_reduce": "all-reduces of gradients, one after another",
}

_AVERAGE = -5  # a number beside those of a step's other collectives


class AllReduce(NamedTuple):
    """What is sent, why, and the host's time to launch it."""

    bucket: Bucket
    cause: str
    launch_ns: int

    def launched(self, number: int, index: int) -> Communicate:
        """As collective `number` of a step, the one of bucket `index`."""
        bucket = self.bucket
        return Communicate(
            number,
            self.launch_ns,
            "all_reduce",
            bucket.wire_bytes,
            bucket=index,
            bucket_bytes=bucket.size_bytes,
            num_params=len(bucket.parameters),
            cause=self.cause,
        )

    def averaged(self, index: int = 0) -> Iterator[Instruction]:
        """As an average of parameters, after the optimizer; `index`: of its bucket."""
        yield compute("averaging", self.bucket.before)
        yield self.launched(_AVERAGE, index)
        yield Await(_AVERAGE)
        yield compute("averaging", self.bucket.copy_back)


@dataclass(frozen=True)
class AllReduces:
    """The all-reduces of a model's gradients or parameters, in ticks."""

    model: Model
    costs: DdpCosts
    ticks: Ticks

    def each(self) -> tuple[AllReduce, ...]:
        """One per gradient, in the order of `model.parameters()`; divided afterwards."""
        return tuple(self._of_gradient(i) for i in self._used)

    def as_ready(self) -> tuple[AllReduce, ...]:
        """The same in the order in which the backward makes gradients."""
        return tuple(self._of_gradient(i) for i in self.model.ready_order)

    def flat(self, caps_bytes: Sequence[int] = ()) -> tuple[AllReduce, ...]:
        """One per dtype: gradients are copied into one tensor, reduced, divided, copied back.

        With caps, one of each bucket of neighbours in `model.parameters()`, as torch fills them.
        """
        used = [self.model.parameters[i] for i in self._used]
        sizes_bytes, dtypes = [p.size_bytes for p in used], [p.dtype for p in used]
        groups = assign_by_size(sizes_bytes, dtypes, caps_bytes or [sum(sizes_bytes) + 1])
        members = [[self._used[i] for i in group] for group in groups]
        if len(groups) == 1:
            return (self._of_members(members[0], "all gradients"),)
        causes = [f"all gradients of {dtypes[group[0]]}" for group in groups]
        if caps_bytes:
            causes = [f"gradients of flat tensor {number}" for number in range(len(groups))]
        return tuple(map(self._of_members, members, causes))

    def averaged(self) -> AllReduce:
        """Of all parameters: copied into one tensor of the widest dtype, divided, reduced.

        Afterwards a parameter is a view of that tensor, or a copy where its dtype is another.
        """
        parameters = [self.model.parameters[i] for i in self._used]
        item_bytes = _promoted_bytes({parameter.dtype for parameter in parameters})
        size_bytes = sum(parameter.size_bytes for parameter in parameters)
        wire_bytes = item_bytes * sum(parameter.numel for parameter in parameters)
        before = [self._moved(size_bytes + wire_bytes), self._moved(2 * wire_bytes)]
        after = [
            self.costs.operator(Work(0.0))
            if ITEM_BYTES[parameter.dtype] == item_bytes
            else self._moved(parameter.size_bytes + item_bytes * parameter.numel)
            for parameter in parameters
        ]
        bucket = Bucket(
            self._used,
            size_bytes,
            wire_bytes,
            self._launch(before),
            copy_back=self._launch(after),
        )
        return AllReduce(bucket, "average of the parameters", self._launch_ns)

    @property
    def _used(self) -> tuple[int, ...]:
        """Parameters with a gradient, in registration order."""
        return tuple(sorted(self.model.ready_order))

    @property
    def _launch_ns(self) -> int:
        return self.ticks.host_ns(PYTHON_COLLECTIVE_S)

    def _of_gradient(self, index: int) -> AllReduce:
        parameter = self.model.parameters[index]
        size_bytes = parameter.size_bytes
        divided = self._launch([self._moved(2 * size_bytes)])
        bucket = Bucket((index,), size_bytes, size_bytes, copy_back=divided)
        return AllReduce(bucket, f"parameter {parameter.name}", self._launch_ns)

    def _of_members(self, members: Sequence[int], cause: str) -> AllReduce:
        sizes_bytes = [self.model.parameters[i].size_bytes for i in members]
        size_bytes = sum(sizes_bytes)
        flattened = self._moved(2 * size_bytes)
        after = [flattened, *(self._moved(2 * own_bytes) for own_bytes in sizes_bytes)]
        before, back = self._launch([flattened]), self._launch(after)
        bucket = Bucket(tuple(members), size_bytes, size_bytes, before, copy_back=back)
        return AllReduce(bucket, cause, self._launch_ns)

    def _moved(self, size_bytes: int) -> Work:
        return self.costs.operator(self.costs.moved(size_bytes))

    def _launch(self, works: Sequence[Work]) -> Launch:
        return self.ticks.launch(joined(works))


def _promoted_bytes(dtypes: set[str]) -> int:
    """Bytes of an element of what torch.cat makes of several dtypes."""
    if dtypes == {"float16", "bfloat16"}:
        return ITEM_BYTES["float32"]
    return max(ITEM_BYTES[dtype] for dtype in dtypes)
