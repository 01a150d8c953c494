"""DDP's reducer: buckets fill with gradients, are sent in order, and are waited for.

Source of the order: torch's distributed.py (forward, _sync_buffers) and reducer.cpp
(autograd_hook, mark_bucket_ready, finalize_backward).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddpsim.cluster.transfers import Operation, ProcessGroup
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Compute,
    Instruction,
    Piece,
    Synchronize,
    compute,
    compute_all,
)
from ddpsim.strategies.strategy import Bucket, Stage
from ddpsim.strategies.ticks import Launch

_BROADCASTS_IN_FLIGHT = 2


class Buffers(NamedTuple):
    """One coalesced buffer broadcast."""

    size_bytes: int
    flatten: Launch
    unflatten: Launch


@dataclass(frozen=True)
class ReducerWork:
    """What DDP does in a backward beside its buckets.

    `copy_in[i]`: gradient i comes into its bucket, after `hook_ns` of the host's time.
    `unused`: parameters without a gradient. `used_map_bytes`: the map of those that have one, which
    is reduced too; 0 where DDP does not ask. `in_order`: collectives end in the order of launch.
    `in_first_hook`: what the first hook of a backward does before. `group`: the ranks among which
    buckets are reduced. `reduces`: or a hook leaves each bucket as it is.
    """

    buffers: tuple[Buffers, ...]
    ready_order: tuple[int, ...]
    unused: tuple[int, ...]
    hook_ns: int
    copy_in: tuple[Launch, ...]
    launch_collective_ns: int
    used_map_bytes: int
    in_order: bool
    in_first_hook: tuple[Instruction, ...] = ()
    group: ProcessGroup = "world"
    reduces: bool = True


class Reducer:
    """The reducer in one backward, and the buffers' broadcast before it.

    `launched`: so many collectives of the same step come before its own.
    """

    def __init__(self, work: ReducerWork, buckets: tuple[Bucket, ...], launched: int = 0) -> None:
        self._work = work
        self._buckets = buckets
        self._buckets_of: dict[int, list[int]] = {}
        for i, bucket in enumerate(buckets):
            for parameter in bucket.parameters:
                self._buckets_of.setdefault(parameter, []).append(i)
        self._pending = [len(bucket.parameters) for bucket in buckets]
        self._launched: list[int | None] = []  # the collective of each bucket, if it has one
        self._used_map: int | None = None
        self._collectives = launched

    def next(self, buckets: tuple[Bucket, ...]) -> Reducer:
        """The reducer in the next backward of the same step."""
        return Reducer(self._work, buckets, self._collectives)

    def broadcast_buffers(self) -> Iterator[Instruction]:
        """Rank 0's buffers to all: flatten, broadcast, copy back, all before the forward.

        Two broadcasts may be in flight (torch: c10d/comm.cpp, broadcast_coalesced).
        """
        in_flight = deque[tuple[int, Launch]]()
        for buffers in self._work.buffers:
            if len(in_flight) == _BROADCASTS_IN_FLIGHT:
                yield from self._copy_back_buffers(*in_flight.popleft())
            yield compute("buffers", buffers.flatten)
            sent = self._communicate("broadcast", buffers.size_bytes, "buffers")
            yield sent
            in_flight.append((sent.number, buffers.unflatten))
        for number, unflatten in in_flight:
            yield from self._copy_back_buffers(number, unflatten)

    def _copy_back_buffers(self, number: int, unflatten: Launch) -> Iterator[Instruction]:
        yield Await(number)
        yield compute("buffers", unflatten)

    def backward(self, backward: Sequence[Piece]) -> Iterator[Instruction]:
        """Gradients become ready one after the other; at the end all buckets are waited for."""
        *works, tail = backward
        unused, first = self._work.unused, self._work.in_first_hook
        for parameter, launch in zip(self._work.ready_order, works, strict=True):
            yield from compute_all("backward", [launch])
            yield from first
            for ready in (*unused, parameter):  # the unused on the first hook (torch: reducer.cpp)
                yield from self._mark_ready(ready)
            unused, first = (), ()
        yield from compute_all("backward", [tail])
        yield from self._finalize()

    def _communicate(
        self, operation: Operation, size_bytes: int, cause: str, **bucket: Any
    ) -> Communicate:
        number = self._collectives
        self._collectives += 1
        host_ns = self._work.launch_collective_ns
        return Communicate(number, host_ns, operation, size_bytes, cause=cause, **bucket)

    def _mark_ready(self, parameter: int) -> Iterator[Instruction]:
        """The hook of one gradient: copy it into its bucket, launch buckets that are due.

        Each module that has the parameter has a hook of its own, if it has a bucket (torch 1).
        """
        copy = self._work.copy_in[parameter]
        for bucket in self._buckets_of[parameter]:
            yield Compute("bucket_copy", self._work.hook_ns + copy.host_ns, copy.device_ns)
            self._pending[bucket] -= 1
        while (due := len(self._launched)) < len(self._buckets) and not self._pending[due]:
            yield from self._launch_next()

    def _launch_next(self) -> Iterator[Instruction]:
        """All-reduce the next bucket in order, and after the last one the map of used ones."""
        index = len(self._launched)
        bucket = self._buckets[index]
        if not self._work.reduces:
            yield Compute("bucket_copy", self._work.launch_collective_ns, 0)
            self._launched.append(None)
        elif bucket.stages:
            yield from self._launch_stages(bucket, index)
        else:
            yield compute("bucket_copy", bucket.before)
            sent = self._communicate(
                "all_reduce",
                bucket.wire_bytes,
                f"bucket {index}",
                bucket=index,
                bucket_bytes=bucket.size_bytes,
                num_params=len(bucket.parameters),
                after_ns=bucket.after_ns,
                group=self._work.group,
            )
            yield sent
            self._launched.append(sent.number)
        if len(self._launched) == len(self._buckets) and self._work.used_map_bytes:
            map_bytes = self._work.used_map_bytes
            used_map = self._communicate("all_reduce", map_bytes, "the map of used parameters")
            yield used_map
            self._used_map = used_map.number

    def _launch_stages(self, bucket: Bucket, index: int) -> Iterator[Instruction]:
        """Collectives one after another, before the backward goes on where they are awaited."""
        *_, last = bucket.stages
        for stage in bucket.stages:
            sent = self._communicate(
                stage.operation,
                stage.size_bytes,
                f"bucket {index}: {stage.what}",
                bucket=index,
                bucket_bytes=bucket.size_bytes,
                num_params=len(bucket.parameters) if stage is last else 0,
                after_ns=stage.after.device_ns,
            )
            yield from _launched(stage, sent)
        self._launched.append(sent.number)
        if last.is_awaited:
            yield compute("bucket_copy", bucket.before_wait)
            yield Synchronize()
            yield compute("bucket_copy", bucket.after_wait)

    def _finalize(self) -> Iterator[Instruction]:
        """Wait bucket by bucket and copy each back while the next is still under way.

        The first one with an unused parameter waits for the map too (torch: reducer.cpp,
        finalize_bucket_dense), which comes after all buckets.
        """
        unused = set(self._work.unused)
        for i, (bucket, number) in enumerate(zip(self._buckets, self._launched, strict=True)):
            yield from _awaited(number)
            if not unused.isdisjoint(bucket.parameters):
                yield from self._await_used_map(i + 1)
            yield compute("copy_back", bucket.copy_back)
        yield from self._await_used_map(len(self._buckets))

    def _await_used_map(self, bucket: int) -> Iterator[Instruction]:
        """Unless that was done; where collectives end in order, so do the waits."""
        if self._used_map is None:
            return
        if self._work.in_order:
            for number in self._launched[bucket:]:
                yield from _awaited(number)
        yield Await(self._used_map)
        self._used_map = None


def _awaited(number: int | None) -> Iterator[Instruction]:
    """A collective's end, if there is one."""
    if number is not None:
        yield Await(number)


def _launched(stage: Stage, sent: Communicate) -> Iterator[Instruction]:
    """A stage's work and its collective; what is chained is launched at once, and done later."""
    if stage.is_chained:
        host_ns, left_ns = sent.host_ns + stage.before.host_ns, _left_ns(stage.before)
        yield sent._replace(host_ns=host_ns, follows=sent.number - 1, before_ns=left_ns)
    elif stage.host_waits:
        yield Synchronize()
        yield compute("bucket_copy", stage.before)
        yield Synchronize()
        yield sent
    else:
        yield compute("bucket_copy", stage.before)
        yield sent
    if stage.is_awaited:
        yield Await(sent.number)
    elif stage.after.host_ns:
        yield Compute("bucket_copy", stage.after.host_ns, 0)


def _left_ns(work: Launch) -> int:
    """What is left after the last launch of kernels that run while the host launches others."""
    return max(0, work.device_ns - work.host_ns)
