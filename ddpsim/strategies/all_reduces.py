"""All-reduces that a training loop calls itself, without DistributedDataParallel.

Sources: torch 2.13's torch/_utils.py (_flatten_dense_tensors) and
torch/distributed/algorithms/model_averaging/utils.py (average_parameters).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ddpsim.errors import InputError, shown
from ddpsim.scenario.suggest import did_you_mean
from ddpsim.strategies.ddp.buckets import assign_by_size
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.instructions import Await, Communicate, Instruction, compute
from ddpsim.strategies.strategy import Bucket
from ddpsim.workload.model import ITEM_BYTES, Model, Work

_GROUPS = "ddp.bucket_groups"
_AVERAGE, _AGAIN = -5, -6  # numbers beside those of a step's other collectives


class AllReduce(NamedTuple):
    """What is sent, why, and the host's time to launch it."""

    bucket: Bucket
    cause: str
    launch_ns: int

    def launched(self, number: int, index: int) -> Communicate:
        """Launch it as collective `number` of a step, for bucket `index`."""
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
        """Average the parameters after the optimizer; `index`: the place of its bucket."""
        yield compute("averaging", self.bucket.before)
        yield self.launched(_AVERAGE, index)
        yield Await(_AVERAGE)
        yield compute("averaging", self.bucket.copy_back)

    def again(self) -> tuple[Instruction, ...]:
        """Reduce a gradient beside DDP, which reduces it too: await it at once, and divide."""
        launched = self.launched(_AGAIN, -1)._replace(cause=f"{self.cause}, beside DDP's")
        return launched, Await(_AGAIN), compute("copy_back", self.bucket.copy_back)


@dataclass(frozen=True)
class AllReduces:
    """The all-reduces of a model's gradients or parameters, in ticks."""

    model: Model
    prices: Prices

    def each(self) -> tuple[AllReduce, ...]:
        """One per gradient, in the order of `model.parameters()`; divided afterwards."""
        return tuple(self._of_gradient(i) for i in self._used)

    def as_ready(self) -> tuple[AllReduce, ...]:
        """One per gradient, in the order in which the backward makes them."""
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

    def grouped(self, groups: Sequence[Sequence[str]]) -> tuple[AllReduce, ...]:
        """One of each group of gradients, named by parameters or their modules, as `flat` does.

        Raises InputError.
        """
        names = [parameter.name for parameter in self.model.parameters]
        members = [sorted({i for name in group for i in _held(name, names)}) for group in groups]
        counts = Counter(i for group in members for i in group)
        twice = [names[i] for i, count in counts.items() if count > 1]
        left_out = [names[i] for i in self._used if i not in counts]
        if twice:
            raise InputError(_GROUPS, f"{twice[0]} is in two groups; name it in one")
        if left_out:
            many = f"{len(left_out)} parameters are in no group (first: {left_out[0]})"
            raise InputError(_GROUPS, f"{many}; name them, or their modules, in one")
        return tuple(
            self._of_members(self._of_one_dtype(group), f"gradients of flat tensor {number}")
            for number, group in enumerate(members)
        )

    def _of_one_dtype(self, members: Sequence[int]) -> list[int]:
        """Leave out members without a gradient; raises InputError for several dtypes."""
        dtypes = sorted({self.model.parameters[i].dtype for i in members})
        if len(dtypes) > 1:
            first = self.model.parameters[members[0]].name
            held = f"holds {' and '.join(dtypes)}, which no one tensor holds"
            raise InputError(_GROUPS, f"the group of {first} {held}; make a group of each")
        return [i for i in members if i in self._used]

    def averaged(self) -> AllReduce:
        """The average of all parameters: copied into one tensor of the widest dtype, then reduced.

        Afterwards a parameter is a view of that tensor, or a copy where its dtype is another.
        """
        parameters = [self.model.parameters[i] for i in self._used]
        item_bytes = _promoted_bytes({parameter.dtype for parameter in parameters})
        size_bytes = sum(parameter.size_bytes for parameter in parameters)
        wire_bytes = item_bytes * sum(parameter.numel for parameter in parameters)
        before = [self.prices.passed(size_bytes + wire_bytes), self.prices.passed(2 * wire_bytes)]
        after = [
            self.prices.operator(Work(0.0))
            if ITEM_BYTES[parameter.dtype] == item_bytes
            else self.prices.passed(parameter.size_bytes + item_bytes * parameter.numel)
            for parameter in parameters
        ]
        bucket = Bucket(
            self._used,
            size_bytes,
            wire_bytes,
            self.prices.launch(before),
            copy_back=self.prices.launch(after),
        )
        return AllReduce(bucket, "average of the parameters", self.prices.call_ns)

    @cached_property
    def _used(self) -> tuple[int, ...]:
        """Parameters with a gradient, in registration order."""
        return tuple(sorted(self.model.ready_order))

    def _of_gradient(self, index: int) -> AllReduce:
        parameter = self.model.parameters[index]
        size_bytes = parameter.size_bytes
        divided = self.prices.launch([self.prices.passed(2 * size_bytes)])
        bucket = Bucket((index,), size_bytes, size_bytes, copy_back=divided)
        return AllReduce(bucket, f"parameter {parameter.name}", self.prices.call_ns)

    def _of_members(self, members: Sequence[int], cause: str) -> AllReduce:
        sizes_bytes = [self.model.parameters[i].size_bytes for i in members]
        size_bytes = sum(sizes_bytes)
        flattened = self.prices.passed(2 * size_bytes)
        after = [flattened, *(self.prices.passed(2 * own_bytes) for own_bytes in sizes_bytes)]
        before, back = self.prices.launch([flattened]), self.prices.launch(after)
        bucket = Bucket(tuple(members), size_bytes, size_bytes, before, copy_back=back)
        return AllReduce(bucket, cause, self.prices.call_ns)


def _held(name: str, names: Sequence[str]) -> list[int]:
    """The parameters of a name, or of a module of that name; raises InputError for none."""
    held = [i for i, each in enumerate(names) if each == name or each.startswith(f"{name}.")]
    if not held:
        parts = [each.split(".") for each in names]
        modules = (".".join(each[:count]) for each in parts for count in range(1, len(each) + 1))
        hint = did_you_mean(name, dict.fromkeys(modules))
        remedy = "Name a parameter of the model, or a module"
        raise InputError(_GROUPS, f"{shown(name)} holds no parameter.{hint} {remedy}")
    return held


def _promoted_bytes(dtypes: set[str]) -> int:
    """Bytes of an element of what torch.cat makes of several dtypes."""
    if dtypes == {"float16", "bfloat16"}:
        return ITEM_BYTES["float32"]
    return max(ITEM_BYTES[dtype] for dtype in dtypes)
