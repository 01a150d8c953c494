"""DDP's gradient buckets, exactly as torch assigns, orders and rebuilds them.

Source: torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size,
rebuild_buckets) and torch/nn/parallel/distributed.py, 2.13; for torch 1.4 to 1.8 their
distributed.py, which lists a parameter once for each module that has it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import repeat

from ddpsim.scenario.ddp import Ddp
from ddpsim.units import MIB
from ddpsim.workload.model import Parameter

FIRST_BUCKET_BYTES = MIB
BUCKET_CAP_BYTES = 25 * MIB
_UNLIMITED = 2**63 - 1

Assignment = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Buckets of parameter indices in launch order, before and after the rebuild.

    `rebuilt_at` is the iteration (from 0) that first uses `rebuilt`; None: never rebuilt.
    """

    initial: Assignment
    rebuilt: Assignment
    rebuilt_at: int | None

    def at(self, iteration: int) -> Assignment:
        """The buckets in use in an iteration, counted from 0."""
        rebuilt = self.rebuilt_at is not None and iteration >= self.rebuilt_at
        return self.rebuilt if rebuilt else self.initial


def assign_by_size(
    sizes_bytes: Sequence[int],
    keys: Sequence[Hashable],
    limits_bytes: Sequence[int],
    *,
    sparse: Sequence[bool] | None = None,
    indices: Sequence[int] | None = None,
) -> list[list[int]]:
    """Group tensors into buckets, as torch's `_compute_bucket_assignment_by_size` does.

    `sizes_bytes` and `keys` (dtype and device) are per tensor, in the order walked; `indices`
    renames them and keeps the closing order, without it buckets are sorted by their first index.
    Each key walks `limits_bytes` on its own and stays at the last. A bucket closes when it has
    reached its limit, so it overshoots by up to one tensor. A sparse tensor stands alone.
    """
    names = list(indices) if indices else list(range(len(sizes_bytes)))
    is_sparse = sparse or list(repeat(False, len(sizes_bytes)))  # noqa: FBT003
    filling: dict[Hashable, _Filling] = {}
    closed: list[list[int]] = []
    for name, size, key in zip(names, sizes_bytes, keys, strict=True):
        if is_sparse[name]:
            closed.append([name])
            continue
        bucket = filling.setdefault(key, _Filling())
        if bucket.add(name, size, limits_bytes):
            closed.append(bucket.close())
    # torch leaves by hash-map order here; libstdc++ walks its keys newest first
    closed += [bucket.close() for bucket in reversed(filling.values()) if bucket.members]
    return closed if indices else sorted(closed, key=min)


class _Filling:
    """The bucket that one dtype is filling, and how far it has walked along the limits."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self._size_bytes = 0
        self._limit = 0

    def add(self, name: int, size_bytes: int, limits_bytes: Sequence[int]) -> bool:
        """Take one tensor in; True when the limit is reached, and the next one is due."""
        self.members.append(name)
        self._size_bytes += size_bytes
        if self._size_bytes < limits_bytes[self._limit]:
            return False
        self._limit = min(self._limit + 1, len(limits_bytes) - 1)
        return True

    def close(self) -> list[int]:
        """Hand the members over and start anew."""
        members, self.members, self._size_bytes = self.members, [], 0
        return members


def plan_buckets(
    parameters: Sequence[Parameter],
    ready_order: Sequence[int],
    ddp: Ddp,
    tied: Sequence[int] = (),
) -> BucketPlan:
    """The buckets of a model: initial ones by registration order, rebuilt ones by ready order.

    `ready_order` indexes `parameters`, which stand in registration order. Unused parameters
    join the rebuilt buckets last, as torch marks them ready at the end. `tied` are parameters of a
    later module too, which has a bucket for them again in torch 1.4 to 1.8.
    """
    again = tuple(tied) if ddp.is_torch_1 else ()
    limits = bucket_limits(ddp)
    never_rebuilt = ddp.torch == "1.4" or ddp.finds_unused
    limited_at_first = never_rebuilt or isinstance(ddp.bucket_cap_mb, tuple)
    listed = (*range(len(parameters)), *again)
    initial = _assign(parameters, limits if limited_at_first else [_UNLIMITED], listed)
    if never_rebuilt:
        return BucketPlan(initial, initial, None)
    unused = sorted(set(range(len(parameters))) - set(ready_order))
    order = ready_order if ddp.bucket_order == "ready" else ready_order[::-1]
    rebuilt = _assign(parameters, limits, [*order, *again, *unused], in_order=True)
    return BucketPlan(initial, rebuilt, 2 if ddp.static_graph else 1)


def bucket_limits(ddp: Ddp) -> list[int]:
    """Bucket caps in bytes; an explicit cap removes the small first bucket, but not in torch 1."""
    explicit = stated_caps(ddp)
    if not explicit:
        return [FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES]
    return [FIRST_BUCKET_BYTES, *explicit] if ddp.is_torch_1 else explicit


def stated_caps(ddp: Ddp) -> list[int]:
    """The bucket caps of a scenario in bytes; none where it leaves them to torch."""
    caps = ddp.bucket_cap_mb or ()
    return [int(cap * MIB) for cap in (caps if isinstance(caps, tuple) else (caps,))]


def _assign(
    parameters: Sequence[Parameter],
    limits: Sequence[int],
    order: Sequence[int],
    *,
    in_order: bool = False,
) -> Assignment:
    walked = [parameters[i] for i in order]
    buckets = assign_by_size(
        [parameter.size_bytes for parameter in walked],
        [parameter.dtype for parameter in walked],
        limits,
        sparse=[parameter.sparse for parameter in (parameters if in_order else walked)],
        indices=order if in_order else None,
    )
    if in_order:
        return tuple(map(tuple, buckets))
    # by registration order the last layers are ready first, so DDP reverses that list
    return tuple(tuple(order[at] for at in bucket) for bucket in reversed(buckets))
