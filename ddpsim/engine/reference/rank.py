"""One rank of a DDP job, as a process that carries out the training loop's instructions.

The process is the host: it launches work on the compute stream and collectives on the
communication lane, and runs ahead of both. On a CPU the host computes itself and blocks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from simpy import Environment, Event, Store

from ddpsim.cluster.transfers import ProcessGroup
from ddpsim.engine.noise import BURST_BYTES
from ddpsim.engine.program import Program
from ddpsim.engine.reference.comm_lane import Collective, CommLane
from ddpsim.engine.reference.network import Network
from ddpsim.engine.reference.stream import Stream
from ddpsim.result.timeline import RankTimeline, Span
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Compute,
    Instruction,
    LoadBatch,
    Mark,
    Record,
    Synchronize,
)

Doing = Generator[Event, Any, None]


class Rank:
    """The host of one rank with its compute stream and communication lane.

    `slowdown[i]` multiplies the device work of iteration i, before which the rank stands still for
    `stalls_ns[i]`. Beside each `BURST_BYTES` of iteration i its compute keeps so many standard
    deviations more of its speed than ranks do on average: `kept_deviations[i]`, one of each.
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
        kept_deviations: Sequence[Sequence[float]] | None = None,
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
        self._comm: dict[ProcessGroup, CommLane] = {}  # a communicator of each group
        self._network = network
        self._slowdown = slowdown
        self._stalls_ns = stalls_ns
        self._kept_deviations = kept_deviations
        self._factor = 1.0
        self._iteration = 0
        self._sequence = 0
        self._sent_bytes = 0  # in this iteration
        self._collectives: list[Event] = []  # the end of each in this iteration
        self._recorded: dict[int, Event] = {}  # in this iteration
        self._steps: list[Event] = []  # when the device has done each
        self._batches = self._start_loader()

    def train(self) -> Doing:
        """Warm-up and measured iterations, one optimizer step each."""
        program = self.program
        for number in range(program.warmup + program.iterations):
            self._begin(number)
            for instruction in program.step(number):
                yield from self._carry_out(instruction)
        if self._network.loads_batches:
            yield from self._load_batch()  # the last step too shares the network with a batch
        self.waiting_for = "its compute stream"
        yield self.compute.record()
        self.waiting_for = "nothing"

    def _begin(self, number: int) -> None:
        self._iteration = number
        self._collectives = []
        self._recorded = {}
        self._factor = self._slowdown[number] if self._slowdown else 1.0
        self._sent_bytes = 0
        if self._stalls_ns and self._stalls_ns[number]:
            self.compute.launch("stall", self._stalls_ns[number])

    def _carry_out(self, instruction: Instruction) -> Doing:
        match instruction:
            case Compute():
                yield from self._launch(instruction)
            case Communicate():
                yield from self._communicate(instruction)
            case Await():
                yield from self._await(instruction)
            case LoadBatch():
                yield from self._load_batch()
            case Synchronize():
                yield from self._synchronize()
            case Mark():
                self._mark(instruction)
            case Record():
                self._recorded[instruction.number] = self.compute.record()

    def _launch(self, work: Compute) -> Doing:
        """Spend the host's time, then append the work to the compute stream."""
        if work.host_ns:
            yield self.env.timeout(work.host_ns)
        if work.device_ns:
            work_ns = round(work.device_ns * self._factor)
            self.compute.launch(work.kind, work_ns, work.names)
        if self.program.blocking:
            yield self.compute.record()

    def _communicate(self, launched: Communicate) -> Doing:
        yield self.env.timeout(launched.host_ns)
        self._sequence += 1
        done = self.env.event()
        self._collectives.append(done)
        ready, deviations = self._ready(launched), self._deviations()
        lane = self._lane(launched.group)
        lane.launch(Collective(self._sequence, launched, ready, done, deviations))
        self._sent_bytes += launched.size_bytes

    def _lane(self, group: ProcessGroup) -> CommLane:
        if group not in self._comm:
            self._comm[group] = CommLane(
                self.env,
                self.rank,
                self._network,
                self.compute,
                self.timeline.comm.append,
                workers=self.program.comm_workers,
                spins=self.program.comm_spins,
                blocking=self.program.blocking,
            )
        return self._comm[group]

    def _ready(self, launched: Communicate) -> Event:
        """Fires with the moment at which the data is there."""
        if launched.follows is not None:
            recorded = self._collectives[launched.follows]
        elif launched.waits_for is not None:
            recorded = self._recorded[launched.waits_for]
        else:
            recorded = self.compute.record()
            if not launched.before_ns:
                return recorded
        ready = self.env.event()

        def prepare() -> Doing:
            if not recorded.processed:
                yield recorded
            yield self.env.timeout(launched.before_ns)
            ready.succeed(self.env.now)

        self.env.process(prepare())
        return ready

    def _deviations(self) -> float:
        if self._kept_deviations is None:
            return 0.0
        bursts = self._kept_deviations[self._iteration]
        return bursts[min(self._sent_bytes // BURST_BYTES, len(bursts) - 1)]

    def _await(self, awaited: Await) -> Doing:
        self.waiting_for = f"a collective of iteration {self._iteration}"
        self.compute.wait(self._collectives[awaited.number], "comm_wait")
        if self.program.blocking:
            yield self.compute.record()

    def _synchronize(self) -> Doing:
        start_ns = int(self.env.now)
        self.waiting_for = "its compute stream"
        yield self.compute.record()
        if self.env.now > start_ns:
            self.timeline.host.append(Span("device_wait", start_ns, int(self.env.now)))

    def _mark(self, mark: Mark) -> None:
        """Append the moment at which the compute stream has done all that was launched."""
        come_so_far = self.compute.record()
        if mark.place == "step_ends":
            self._steps.append(come_so_far)
        times_ns = getattr(self.timeline, f"{mark.place}_ns")
        come_so_far.callbacks.append(lambda _: times_ns.append(int(self.env.now)))

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
