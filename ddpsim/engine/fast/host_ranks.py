"""Ranks under gloo: all at once, or one whose lanes are wanted.

A host that computes itself blocks in all that it does, so its clock is its stream's but for a
stall; a GPU's runs ahead. Collectives leave all ranks together, so a rank's arrivals follow from
its own work and the ends before. Two of them may be in flight: when one ends is asked for when a
later one needs its thread, or a stream waits for it. All that begins before that end was launched
before, by then (`Threads`): what is launched later waits for that stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.engine.fast.batches import Batches
from ddpsim.engine.fast.flows import Flow, Flows, whole
from ddpsim.engine.program import Program
from ddpsim.engine.request import Request
from ddpsim.result.timeline import RankTimeline, Span, Timeline
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

__all__ = ["train"]


_LATEST_NS = 2**51  # as in `vectorised`: beyond, a sum might not be exact in float64


def train(request: Request, observed: Sequence[int] | None) -> tuple[Timeline, set[str]] | None:
    """Every rank's steps, with the lanes of some (None: of the slowest), and how it was done.

    None where the clock would get too long to be exact so.
    """
    threads = Threads(request)
    ranks = _Many(request, threads)
    ranks.train()
    if ranks.last_ns > _LATEST_NS:
        return None
    slowest = ranks.slowest()
    wanted = {slowest, *([slowest] if observed is None else observed)}
    lanes = {rank: _lanes(request, threads.sent, rank) for rank in sorted(wanted)}
    timeline = Timeline(lanes, request.program.warmup, slowest, ranks.late_peers_ns())
    return timeline, {"hosts", *threads.paths}


@dataclass(eq=False)
class Sent:
    """A collective: a thread is free for it at `free_ns`, the last rank comes at `met_ns`."""

    launched: Communicate
    free_ns: int
    met_ns: int
    flow: Flow


class Network(Protocol):
    """Where ranks send: `free_ns` is when a thread takes the next collective."""

    def free_ns(self) -> int: ...

    def join(self, launched: Communicate, joined_ns: Any) -> Sent: ...

    def end_ns(self, sent: Sent) -> int: ...


class Threads:
    """The backend's threads, which send first in, first out, on every rank alike."""

    def __init__(self, request: Request) -> None:
        self._cost, self._traffic = request.cost, request.traffic
        self._flows = Flows(request.traffic)
        self._count, self._blocks = request.program.comm_workers, request.program.blocking
        self._busy: list[Sent] = []
        self._free_ns = 0
        self.sent: list[Sent] = []
        self.paths = {"whole:shared" if self._count > 1 else "whole"}

    def free_ns(self) -> int:
        """A thread is held by its collective, and on a CPU by a hook's work after it."""
        if len(self._busy) == self._count:
            first = self._first_free()
            self._busy.remove(first)
            self._free_ns = self._thread_free_ns(first)
        return self._free_ns

    def _first_free(self) -> Sent:
        """A hook's work may hold the thread of the first to end for longer than the other's."""
        self._flows.first_ended([sent.flow for sent in self._busy])
        ended = [sent for sent in self._busy if sent.flow.end_ns is not None]
        limit_ns = min(map(self._thread_free_ns, ended))
        ended += [
            sent
            for sent in self._busy
            if sent not in ended and self._flows.ends_by(sent.flow, limit_ns)
        ]
        return min(ended, key=self._thread_free_ns)

    def _thread_free_ns(self, sent: Sent) -> int:
        return self.end_ns(sent) + (sent.launched.after_ns if self._blocks else 0)

    def join(self, launched: Communicate, joined_ns: Any) -> Sent:
        """All ranks come to a collective, [ranks]."""
        met_ns = int(joined_ns.max())
        priced = self._cost.transfer(launched.operation, launched.size_bytes)
        transfer, path = whole(priced, self._traffic)
        self.paths |= {path} - {"whole"}
        sent = Sent(launched, self._free_ns, met_ns, self._flows.begin(met_ns, transfer))
        self.sent.append(sent)
        self._busy.append(sent)
        return sent

    def end_ns(self, sent: Sent) -> int:
        """When it ends."""
        return self._flows.end_ns(sent.flow)


class _Known:
    """Collectives that all ranks have ended, as one of them comes to them again."""

    def __init__(self, sent: Sequence[Sent]) -> None:
        self._free = iter(sent)
        self._sent = iter(sent)

    def free_ns(self) -> int:
        return next(self._free).free_ns

    def join(self, launched: Communicate, joined_ns: Any) -> Sent:  # noqa: ARG002 -- it is known
        return next(self._sent)

    def end_ns(self, sent: Sent) -> int:
        return sent.flow.end_ns or 0


class HostRank:
    """Carries out the instructions; moments are integers, or arrays of them with numpy's `latest`.

    What is seen of it is told to methods that begin with `saw`.
    """

    latest: Callable[[Any, Any], Any] = staticmethod(max)
    rounded: Callable[[Any], Any] = staticmethod(round)

    def __init__(self, program: Program, network: Network, slowdowns: Any, stalls: Any) -> None:
        self._program, self._network = program, network
        self._slowdowns, self._stalls = slowdowns, stalls  # by iteration, or None
        self._batches = Batches(program.loader, self.latest)
        self._host_ns: Any = 0
        self._stream_ns: Any = 0
        self._factor: Any = None
        self._sent: list[Sent] = []  # in this iteration
        self._recorded_ns: dict[int, Any] = {}

    def train(self) -> None:
        """All iterations."""
        for number in range(self._program.warmup + self._program.iterations):
            self._begin(number)
            for instruction in self._program.step(number):
                self._carry_out(instruction)

    def _begin(self, number: int) -> None:
        self._sent, self._recorded_ns = [], {}
        self._factor = None if self._slowdowns is None else self._slowdowns[number]
        if self._stalls is not None:
            begin_ns = self.latest(self._stream_ns, self._host_ns)
            self._stream_ns = begin_ns + self._stalls[number]
            self.saw_work("stall", begin_ns, self._stream_ns)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Compute():
                self._compute(instruction)
            case Communicate():
                self._communicate(instruction)
            case Await(number):
                self._await(self._sent[number])
            case LoadBatch():
                asked_ns, self._host_ns = self._host_ns, self._batches.take(self._host_ns)
                self.saw_batch(asked_ns, self._host_ns)
            case Synchronize():
                asked_ns, self._host_ns = self._host_ns, self._come_so_far()
                self.saw_device_wait(asked_ns, self._host_ns)
            case Record(number):
                self._recorded_ns[number] = self._come_so_far()
            case Mark(place):
                self.saw_mark(place, self._come_so_far())

    def _come_so_far(self) -> Any:
        return self.latest(self._host_ns, self._stream_ns)

    def _compute(self, work: Compute) -> None:
        self._host_ns = self._host_ns + work.host_ns
        begin_ns = self._come_so_far()
        taken_ns: Any = work.device_ns
        if taken_ns and self._factor is not None:
            taken_ns = self.rounded(taken_ns * self._factor)
        self._go_on(begin_ns + taken_ns)
        self.saw_work(work.kind, begin_ns, self._stream_ns)

    def _communicate(self, launched: Communicate) -> None:
        self._host_ns = self._host_ns + launched.host_ns
        if launched.follows is not None:
            there_ns = self._done_ns(self._sent[launched.follows])
        elif launched.waits_for is not None:
            there_ns = self._recorded_ns[launched.waits_for]
        else:
            there_ns = self._stream_ns
        ready_ns = self.latest(self._host_ns, there_ns) + launched.before_ns
        joined_ns = self.latest(ready_ns, self._network.free_ns())
        self._sent.append(self._network.join(launched, joined_ns))
        self.saw_collective(self._sent[-1], ready_ns, joined_ns)

    def _await(self, sent: Sent) -> None:
        begin_ns = self._come_so_far()
        self._go_on(self.latest(begin_ns, self._done_ns(sent)))
        self.saw_work("comm_wait", begin_ns, self._stream_ns)

    def _go_on(self, end_ns: Any) -> None:
        """What the stream does ends, and a host that does it itself goes on."""
        self._stream_ns = end_ns
        if self._program.blocking:
            self._host_ns = end_ns

    def _done_ns(self, sent: Sent) -> int:
        return self._network.end_ns(sent) + sent.launched.after_ns

    def saw_work(self, kind: Any, begin_ns: Any, end_ns: Any) -> None:
        """On the compute lane."""

    def saw_collective(self, sent: Sent, ready_ns: Any, joined_ns: Any) -> None:
        """On the communication lane."""

    def saw_batch(self, asked_ns: Any, come_ns: Any) -> None:
        """On the host's lane."""

    def saw_device_wait(self, asked_ns: Any, done_ns: Any) -> None:
        """On the host's lane."""

    def saw_mark(self, place: str, now_ns: Any) -> None:
        """The stream has come so far."""


class _Many(HostRank):
    """All ranks of a job, [ranks]."""

    latest = staticmethod(np.maximum)
    rounded = staticmethod(np.rint)

    def __init__(self, request: Request, threads: Threads) -> None:
        slowdowns, stalls = request.slowdowns, request.stalls
        super().__init__(
            request.program,
            threads,
            None if slowdowns is None else np.ascontiguousarray(slowdowns.T),
            None if stalls is None else stalls.T,
        )
        self._host_ns = self._stream_ns = np.zeros(request.world_size)
        self._late_ns = np.zeros(request.world_size)  # waits for peers, in steady steps
        self._launched: deque[tuple[Ticks, int]] = deque()  # when ranks join, and the last does
        self._joined: list[tuple[Ticks, Sent]] = []
        self._step_ends_ns: list[Ticks] = []

    def _begin(self, number: int) -> None:
        super()._begin(number)
        self._launched.clear()

    def saw_work(self, kind: Any, begin_ns: Any, end_ns: Any) -> None:
        if kind != "comm_wait" or len(self._step_ends_ns) < self._program.warmup:
            return
        while self._launched and (self._launched[0][1] <= begin_ns).all():
            self._launched.popleft()
        if self._launched:
            joined_ns, met_ns = zip(*self._launched, strict=True)
            starts_ns = np.maximum(np.stack(joined_ns), begin_ns)
            ends_ns = np.minimum(np.array(met_ns)[:, np.newaxis], end_ns)
            self._late_ns += _united_ns(starts_ns, ends_ns)

    def saw_collective(self, sent: Sent, ready_ns: Any, joined_ns: Any) -> None:  # noqa: ARG002
        self._joined.append((joined_ns, sent))
        self._launched.append((joined_ns, sent.met_ns))

    def saw_mark(self, place: str, now_ns: Any) -> None:
        if place == "step_ends":
            self._step_ends_ns.append(now_ns)

    @property
    def last_ns(self) -> float:
        """When the last rank ends."""
        return float(self._step_ends_ns[-1].max())

    def slowest(self) -> int:
        """The rank that ends last; of equals the longest in collectives, then the lowest."""
        comm_ns = sum((sent.flow.end_ns or 0) - joined_ns for joined_ns, sent in self._joined)
        last_ns = self._step_ends_ns[-1]
        tied = np.flatnonzero(last_ns == last_ns.max())
        return int(tied[np.argmax(np.broadcast_to(comm_ns, last_ns.shape)[tied])])

    def late_peers_ns(self) -> list[int]:
        """Of each rank, ticks of its waits in which a peer has not come, over the steady steps."""
        return [int(late_ns) for late_ns in self._late_ns]


def _united_ns(starts_ns: Ticks, ends_ns: Ticks) -> Ticks:
    """Ticks in at least one of some periods, [periods, ranks]."""
    order = np.argsort(starts_ns, axis=0)
    starts_ns, ends_ns = (np.take_along_axis(ns, order, axis=0) for ns in (starts_ns, ends_ns))
    starts_ns[1:] = np.maximum(starts_ns[1:], np.maximum.accumulate(ends_ns, axis=0)[:-1])
    return np.asarray(np.maximum(0, ends_ns - starts_ns).sum(axis=0))


class _One(HostRank):
    """A rank whose lanes are wanted."""

    def __init__(self, *drawn: Any) -> None:
        super().__init__(*drawn)
        self.timeline = RankTimeline()

    def saw_work(self, kind: Any, begin_ns: Any, end_ns: Any) -> None:
        if end_ns > begin_ns:
            self.timeline.compute.append(Span(kind, begin_ns, end_ns))

    def saw_collective(self, sent: Sent, ready_ns: Any, joined_ns: Any) -> None:
        end_ns = sent.flow.end_ns or 0
        span = sent.launched.span(ready_ns, joined_ns, sent.met_ns, end_ns)
        self.timeline.comm.append(span)

    def saw_batch(self, asked_ns: Any, come_ns: Any) -> None:
        if self._program.loader:
            self.timeline.host.append(Span("data_wait", asked_ns, come_ns))

    def saw_device_wait(self, asked_ns: Any, done_ns: Any) -> None:
        if done_ns > asked_ns:
            self.timeline.host.append(Span("device_wait", asked_ns, done_ns))

    def saw_mark(self, place: str, now_ns: Any) -> None:
        getattr(self.timeline, f"{place}_ns").append(now_ns)


def _lanes(request: Request, sent: Sequence[Sent], rank: int) -> RankTimeline:
    slowdowns, stalls = (
        None if drawn is None else drawn[rank].tolist()
        for drawn in (request.slowdowns, request.stalls)
    )
    one = _One(request.program, _Known(sent), slowdowns, stalls)
    one.train()
    one.timeline.comm.sort(key=lambda span: span.end_ns)
    return one.timeline
