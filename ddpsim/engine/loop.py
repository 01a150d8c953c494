"""The training loop of a DDP job, as the instructions that its host gives, in torch's order.

Nothing in it depends on the rank or on time, so that whoever carries instructions out, SimPy's
rank by rank (`ddpsim.engine.rank`) or many at once (`ddpsim.engine.lanes`), runs the same loop.
Source of the order of things: torch's distributed.py (forward, _sync_buffers) and reducer.cpp
(autograd_hook, mark_bucket_ready, finalize_backward).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ddpsim.cluster.transfers import Operation
from ddpsim.engine.program import Bucket, Launch, Program
from ddpsim.result.timeline import CommSpan, Kind

__all__ = ["Await", "Communicate", "Compute", "Instruction", "LoadBatch", "Mark", "iteration"]

_BROADCASTS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class LoadBatch:
    """Wait for the data loader."""


class Compute(NamedTuple):
    """Spend the host's time, then append work to the compute stream."""

    kind: Kind
    host_ns: int
    device_ns: int


class Communicate(NamedTuple):
    """Launch a collective on what the compute stream holds so far.

    `number` is its place among the iteration's collectives; `bucket` is -1 for other ones.
    """

    number: int
    host_ns: int
    operation: Operation
    size_bytes: int
    bucket: int = -1
    bucket_bytes: int = 0
    num_params: int = 0
    after_ns: int = 0

    def span(self, ready_ns: int, joined_ns: int, met_ns: int, end_ns: int) -> CommSpan:
        """The collective as one rank saw it."""
        size_bytes = self.bucket_bytes or self.size_bytes
        seen = (ready_ns, joined_ns, met_ns, end_ns)
        return CommSpan(self.operation, self.bucket, size_bytes, self.num_params, *seen)


class Await(NamedTuple):
    """Let the compute stream (on a CPU: the host) wait for a collective."""

    number: int


class Mark(NamedTuple):
    """Note when the compute stream has come so far."""

    place: Literal["backward_starts", "step_ends"]


Instruction = LoadBatch | Compute | Communicate | Await | Mark


def iteration(program: Program, *, rebuilt: bool) -> Iterator[Instruction]:
    """One optimizer step; `rebuilt`: with the rebuilt buckets."""
    buckets = program.rebuilt_buckets if rebuilt else program.initial_buckets
    reducer = _Reducer(program, buckets)
    for micro_batch in range(program.micro_batches):
        is_first, is_last = micro_batch == 0, micro_batch == program.micro_batches - 1
        yield LoadBatch()
        if program.ddp:
            if is_first:
                yield from reducer.broadcast_buffers()
            if is_last:  # under no_sync DDP prepares for no backward (torch: distributed.py)
                yield Compute("forward", program.forward_hook_ns, 0)
        yield from _launches("forward", program.forward if is_first else program.later_forward)
        backward = program.backward if is_first else program.later_backward
        if is_last:
            yield Mark("backward_starts")
        if is_last and program.ddp:
            yield from reducer.backward(backward)
        else:
            yield from _launches("backward", backward)
    yield _launch("optimizer", program.optimizer)
    yield Mark("step_ends")


def _launches(kind: Kind, works: Iterable[Launch]) -> Iterator[Compute]:
    return (_launch(kind, work) for work in works)


def _launch(kind: Kind, work: Launch) -> Compute:
    return Compute(kind, work.host_ns, work.device_ns)


class _Reducer:
    """DDP's reducer for one backward: buckets fill, are launched in order, and are waited for."""

    def __init__(self, program: Program, buckets: tuple[Bucket, ...]) -> None:
        self._program = program
        self._buckets = buckets
        self._bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket.parameters}
        self._pending = [len(bucket.parameters) for bucket in buckets]
        self._launched: list[int] = []  # the collective of each bucket
        self._used_map: int | None = None
        self._collectives = 0

    def broadcast_buffers(self) -> Iterator[Instruction]:
        """Rank 0's buffers to all: flatten, broadcast, copy back, all before the forward.

        Two broadcasts may be in flight (torch: c10d/comm.cpp, broadcast_coalesced).
        """
        in_flight = deque[tuple[int, Launch]]()
        for buffers in self._program.buffers:
            if len(in_flight) == _BROADCASTS_IN_FLIGHT:
                yield from self._copy_back_buffers(*in_flight.popleft())
            yield _launch("buffers", buffers.flatten)
            sent = self._communicate("broadcast", buffers.size_bytes)
            yield sent
            in_flight.append((sent.number, buffers.unflatten))
        for number, unflatten in in_flight:
            yield from self._copy_back_buffers(number, unflatten)

    def _copy_back_buffers(self, number: int, unflatten: Launch) -> Iterator[Instruction]:
        yield Await(number)
        yield _launch("buffers", unflatten)

    def backward(self, backward: Sequence[Launch]) -> Iterator[Instruction]:
        """Gradients become ready one after the other; at the end all buckets are waited for."""
        *works, tail = backward
        unused = self._program.unused
        for parameter, work in zip(self._program.ready_order, works, strict=True):
            yield _launch("backward", work)
            for ready in (*unused, parameter):  # the unused on the first hook (torch: reducer.cpp)
                yield from self._mark_ready(ready)
            unused = ()
        yield _launch("backward", tail)
        yield from self._finalize()

    def _communicate(self, operation: Operation, size_bytes: int, **bucket: int) -> Communicate:
        number = self._collectives
        self._collectives += 1
        host_ns = self._program.launch_collective_ns
        return Communicate(number, host_ns, operation, size_bytes, **bucket)

    def _mark_ready(self, parameter: int) -> Iterator[Instruction]:
        """The hook of one gradient: copy it into its bucket, launch buckets that are due."""
        copy = self._program.copy_in[parameter]
        yield Compute("bucket_copy", self._program.hook_ns + copy.host_ns, copy.device_ns)
        self._pending[self._bucket_of[parameter]] -= 1
        while (due := len(self._launched)) < len(self._buckets) and not self._pending[due]:
            yield from self._launch_next()

    def _launch_next(self) -> Iterator[Instruction]:
        """All-reduce the next bucket in order, and after the last one the map of used ones."""
        index = len(self._launched)
        bucket = self._buckets[index]
        yield _launch("bucket_copy", bucket.before)
        sent = self._communicate(
            "all_reduce",
            bucket.wire_bytes,
            bucket=index,
            bucket_bytes=bucket.size_bytes,
            num_params=len(bucket.parameters),
            after_ns=bucket.after_ns,
        )
        yield sent
        self._launched.append(sent.number)
        if len(self._launched) == len(self._buckets) and self._program.used_map_bytes:
            used_map = self._communicate("all_reduce", self._program.used_map_bytes)
            yield used_map
            self._used_map = used_map.number

    def _finalize(self) -> Iterator[Instruction]:
        """Wait bucket by bucket and copy each back while the next is still under way.

        The first one with an unused parameter waits for the map too (torch: reducer.cpp,
        finalize_bucket_dense), which comes after all buckets.
        """
        unused = set(self._program.unused)
        for i, (bucket, number) in enumerate(zip(self._buckets, self._launched, strict=True)):
            yield Await(number)
            if not unused.isdisjoint(bucket.parameters):
                yield from self._await_used_map(i + 1)
            yield _launch("copy_back", bucket.copy_back)
        yield from self._await_used_map(len(self._buckets))

    def _await_used_map(self, bucket: int) -> Iterator[Instruction]:
        """Unless that was done; where collectives end in order, so do the waits."""
        if self._used_map is None:
            return
        if self._program.comm_workers == 1:
            yield from (Await(number) for number in self._launched[bucket:])
        yield Await(self._used_map)
        self._used_map = None
