"""One rank of a DDP job, as a process that reads like a training loop.

The process is the host: it launches work on the compute stream and collectives on the
communication lane, and runs ahead of both. On a CPU the host computes itself and blocks.
Source of the order of things: torch's distributed.py (forward, _sync_buffers) and reducer.cpp
(autograd_hook, mark_bucket_ready, finalize_backward).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

from simpy import Environment, Event, Store

from ddpsim.cluster.collectives import Operation
from ddpsim.engine.comm_lane import Collective, CommLane
from ddpsim.engine.network import Network
from ddpsim.engine.program import Bucket, Launch, Program
from ddpsim.engine.stream import Stream
from ddpsim.result.timeline import Kind, RankTimeline, Span

__all__ = ["Rank"]

Doing = Generator[Event, Any, None]


class Rank:
    """The host of one rank with its compute stream and communication lane.

    `slowdown[i]` multiplies the device work of iteration i, before which the rank stands still for
    `stalls_ns[i]`.
    """

    def __init__(
        self,
        env: Environment,
        rank: int,
        program: Program,
        network: Network,
        slowdown: Sequence[float] | None,
        timeline: RankTimeline,
        stalls_ns: Sequence[int] | None = None,
    ) -> None:
        self.env = env
        self.rank = rank
        self.program = program
        self.timeline = timeline
        self.waiting_for = "its start"
        self.compute = Stream(
            env,
            timeline.compute.append,
            paced=network.slows_compute,
            tell_busy=lambda busy: network.computes(rank, busy=busy),
        )
        self.comm = CommLane(
            env,
            rank,
            network,
            self.compute,
            timeline.comm.append,
            workers=program.comm_workers,
            spins=program.comm_spins,
        )
        self._network = network
        self._slowdown = slowdown
        self._stalls_ns = stalls_ns
        self._factor = 1.0
        self._iteration = 0
        self._sequence = 0
        self._steps: list[Event] = []  # when the device has done each
        self._batches = self._start_loader()

    def train(self) -> Doing:
        """Warm-up and measured iterations, one optimizer step each."""
        program = self.program
        for iteration in range(program.warmup + program.iterations):
            self._begin(iteration)
            for micro_batch in range(program.micro_batches):
                yield from self._load_batch()
                if program.ddp and micro_batch == 0:
                    yield from self._broadcast_buffers()
                yield from self._forward()
                is_last = micro_batch == program.micro_batches - 1
                if is_last:
                    self._note(self.timeline.backward_starts_ns)
                yield from self._backward(synchronise=program.ddp and is_last)
            yield from self.launch("optimizer", program.optimizer)
            self._steps.append(self.compute.record())
            self._note(self.timeline.step_ends_ns)
        if self._network.loads_batches:
            yield from self._load_batch()  # the last step too shares the network with a batch
        self.waiting_for = "its compute stream"
        yield self.compute.record()
        self.waiting_for = "nothing"

    def _begin(self, iteration: int) -> None:
        self._iteration = iteration
        self._factor = self._slowdown[iteration] if self._slowdown else 1.0
        if self._stalls_ns and self._stalls_ns[iteration]:
            self.compute.launch("stall", self._stalls_ns[iteration])

    def _note(self, times_ns: list[int]) -> None:
        """Append the moment at which the compute stream has done all that was launched."""
        self.compute.record().callbacks.append(lambda _: times_ns.append(int(self.env.now)))

    def launch(self, kind: Kind, work: Launch) -> Doing:
        """Spend the host's time, then append the work to the compute stream."""
        if work.host_ns:
            yield self.env.timeout(work.host_ns)
        if work.device_ns:
            self.compute.launch(kind, round(work.device_ns * self._factor))
        if self.program.blocking:
            yield self.compute.record()

    def _launch_all(self, kind: Kind, works: Iterable[Launch]) -> Doing:
        for work in works:
            yield from self.launch(kind, work)

    def _start_loader(self) -> Store | None:
        loader = self.program.loader
        if loader is None:
            return None
        batches = Store(self.env, capacity=loader.capacity)

        def deliver() -> Doing:
            while True:
                yield self._network.load(loader.batch_ns)
                yield batches.put("batch")

        self.env.process(deliver())
        return batches

    def _load_batch(self) -> Doing:
        if self._batches is None:
            return
        if self._network.loads_batches and len(self._steps) > 1:
            yield self._steps[-2]  # the host runs no more than a step ahead, nor do its batches
        start_ns = int(self.env.now)
        self.waiting_for = "a batch of data"
        yield self._batches.get()
        self.timeline.host.append(Span("data_wait", start_ns, int(self.env.now)))

    def _broadcast_buffers(self) -> Doing:
        """Rank 0's buffers to all: flatten, broadcast, copy back, all before the forward."""
        for buffers in self.program.buffers:
            yield from self.launch("buffers", buffers.flatten)
            sent = yield from self.communicate("broadcast", buffers.size_bytes)
            yield from self.wait_for(sent)
            yield from self.launch("buffers", buffers.unflatten)

    def _forward(self) -> Doing:
        if self.program.ddp:
            yield self.env.timeout(self.program.forward_hook_ns)
        yield from self._launch_all("forward", self.program.forward)

    def _backward(self, *, synchronise: bool) -> Doing:
        *works, tail = self.program.backward
        if not synchronise:
            yield from self._launch_all("backward", works)
            yield from self.launch("backward", tail)
            return
        reducer = _Reducer(self, self.program.buckets(self._iteration))
        yield from reducer.mark_unused()
        for parameter, work in zip(self.program.ready_order, works, strict=True):
            yield from self.launch("backward", work)
            yield from reducer.mark_ready(parameter)
        yield from self.launch("backward", tail)
        yield from reducer.finalize()

    def communicate(self, operation: Operation, size_bytes: int, **bucket: Any) -> Any:
        """Launch a collective on what the compute stream holds so far; returns its end."""
        yield self.env.timeout(self.program.launch_collective_ns)
        self._sequence += 1
        done = self.env.event()
        self.comm.launch(
            Collective(self._sequence, operation, size_bytes, self.compute.record(), done, **bucket)
        )
        return done

    def wait_for(self, done: Event) -> Doing:
        """Let the compute stream (on a CPU: the host) wait for a collective."""
        self.waiting_for = f"a collective of iteration {self._iteration}"
        self.compute.wait(done, "comm_wait")
        if self.program.blocking:
            yield self.compute.record()


class _Reducer:
    """DDP's reducer for one backward: buckets fill, are launched in order, and are waited for."""

    def __init__(self, rank: Rank, buckets: tuple[Bucket, ...]) -> None:
        self._rank = rank
        self._buckets = buckets
        self._bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket.parameters}
        self._pending = [len(bucket.parameters) for bucket in buckets]
        self._done: list[Event] = []
        self._used_map: Event | None = None

    def mark_unused(self) -> Doing:
        """Parameters outside the graph are ready at once (torch: on the first hook)."""
        for parameter in self._rank.program.unused:
            yield from self.mark_ready(parameter)

    def mark_ready(self, parameter: int) -> Doing:
        """The hook of one gradient: copy it into its bucket, launch buckets that are due."""
        program, rank = self._rank.program, self._rank
        yield rank.env.timeout(program.hook_ns)
        yield from rank.launch("bucket_copy", program.copy_in[parameter])
        self._pending[self._bucket_of[parameter]] -= 1
        while len(self._done) < len(self._buckets) and self._pending[len(self._done)] == 0:
            yield from self._launch_next()

    def _launch_next(self) -> Doing:
        """All-reduce the next bucket in order, and after the last one the map of used ones."""
        rank, index = self._rank, len(self._done)
        bucket = self._buckets[index]
        yield from rank.launch("bucket_copy", bucket.before)
        done = yield from rank.communicate(
            "all_reduce",
            bucket.wire_bytes,
            bucket=index,
            bucket_bytes=bucket.size_bytes,
            num_params=len(bucket.parameters),
            after_ns=bucket.after_ns,
        )
        self._done.append(done)
        if len(self._done) == len(self._buckets) and rank.program.used_map_bytes:
            size_bytes = rank.program.used_map_bytes
            self._used_map = yield from rank.communicate("all_reduce", size_bytes)

    def finalize(self) -> Doing:
        """Wait bucket by bucket and copy each back while the next is still under way."""
        rank = self._rank
        for bucket, done in zip(self._buckets, self._done, strict=True):
            yield from rank.wait_for(done)
            yield from rank.launch("copy_back", bucket.copy_back)
        if self._used_map is not None:
            yield from rank.wait_for(self._used_map)
