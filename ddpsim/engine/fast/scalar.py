"""One rank whose collectives are known: its lanes, instruction by instruction, without events.

With NCCL one collective is in flight at a time, and all that a rank does before it joins the next
one follows from what is known then: the host's clock, the compute stream so far, the end of the
collective before. So the instructions can be carried out in the order of their launch. This gives
the ticks that SimPy's events give (`ddpsim.engine.reference.rank`, the plain model).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

from ddpsim.cluster.transfers import ProcessGroup, RingTransfer, Transfer, WholeTransfer
from ddpsim.engine.fast.batches import Batches
from ddpsim.engine.fast.host import Host
from ddpsim.result.timeline import Kind, RankTimeline, Span
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

__all__ = ["PER_MILLE", "Lane", "Met", "Slow", "closed_form", "work_end_ns"]

PER_MILLE = 1000


class Met(NamedTuple):
    """A collective that a rank has joined: the last rank's arrival, this rank's end.

    `slowdown`: how many times longer its compute takes from its joining to its end.
    """

    met_ns: int
    end_ns: int
    slowdown: Fraction


class Meet(Protocol):
    """Says what becomes of a collective that the rank joins."""

    def __call__(self, launched: Communicate, joined_ns: int) -> Met: ...


class Slow(NamedTuple):
    """While compute takes `longer` / `usual` times as long."""

    start_ns: int
    end_ns: int
    longer: int
    usual: int


def work_end_ns(start_ns: int, work_ns: int, slow: Iterable[Slow], parts: int = 1) -> int:
    """The first tick at which `work_ns` / `parts` at full rate are done, begun at `start_ns`.

    `slow` is in order and does not overlap. Exact: what is left is a fraction, and only the end is
    rounded to a tick, upwards.
    """
    now, left = start_ns, work_ns
    for period_start_ns, period_end_ns, longer, usual in slow:
        if period_end_ns <= now:
            continue
        if now < period_start_ns:
            free = (period_start_ns - now) * parts
            if left <= free:
                break
            now, left = period_start_ns, left - free
        need_ns = -(-left * longer // (parts * usual))
        if need_ns <= period_end_ns - now:
            return now + need_ns
        left = left * longer - (period_end_ns - now) * parts * usual
        now, parts = period_end_ns, parts * longer
    return now - (-left // parts)


class Lane:
    """A rank's compute stream and communication lane, driven by its host's script.

    `slowdown[i]` multiplies the device work of iteration i, before which the rank stands still for
    `stalls_ns[i]`. `tells`: its spans are asked for, and not only when steps begin and end.
    """

    def __init__(
        self,
        host: Host,
        meet: Meet,
        slowdown: Sequence[float] | None = None,
        stalls_ns: Sequence[int] | None = None,
        *,
        tells: bool = True,
    ) -> None:
        self._tells = tells
        self.timeline = RankTimeline()
        self._host = host
        self._meet = meet
        self._slowdown = slowdown
        self._stalls_ns = stalls_ns
        self._host_ns = 0  # when the host last went on after a wait
        self._batches = Batches(host.program.loader)
        self._state: tuple[int, ...] = ()  # of host and loader, since the last step's end
        self._compute_ns = 0  # when the stream has done all that was launched
        self._comm_ns: dict[ProcessGroup, int] = {}  # when a group's communication lane has
        self._slow: deque[Slow] = deque()
        self._done_ns: list[int] = []  # of each collective of the iteration
        self._recorded_ns: dict[int, int] = {}
        self._waited = False  # the device, or a collective, for a launch

    def train(self, steps: int | None = None) -> tuple[int, int]:
        """So many steps; None: until the first that all after it are like, or else all.

        Returns how many were of the warm-up, and how often the last one is repeated.
        """
        iterations, ended = self._host.program.iterations, dict[tuple[int, ...], int]()
        for number in range(steps or self._host.steps):
            start_ns = self._compute_ns
            self._iterate(number)
            if steps is not None:
                continue
            before, self._state = self._state, self._standing()
            if self._repeats_from(number, self._compute_ns - start_ns, before):
                return number, iterations - 1
            since = ended.setdefault(self._state, number)
            if self._tells or self._state == before:  # the next step may be like this one
                continue
            if since < number and self._come_again(number, number - since):
                break
        return self._host.steps - iterations, 0

    def _standing(self) -> tuple[int, ...]:
        """Of host and loader, since the device's last step, all that later launches depend on."""
        now_ns = self._compute_ns
        return self._host_ns - now_ns, *self._batches.since(now_ns)

    def _repeats_from(self, number: int, length_ns: int, before: tuple[int, ...]) -> bool:
        """Whether all iterations after this one are like it.

        Where the host waits for the device they are, once host and loader stand to it as they did
        one step `before`.
        """
        if not self._host.program.synchronizes:
            return self._host.repeats_from(number, length_ns, waited=self._waited)
        return self._state == before and self._host.goes_on_alike(number)

    def _come_again(self, number: int, count: int) -> bool:
        """Whether all later steps are as long as those so many before, and so are known."""
        host, ends_ns = self._host, self.timeline.step_ends_ns
        if not host.program.synchronizes:
            return False
        later = range(number + 1, host.steps)
        if any(host.step(each) is not host.step(each - count) for each in later):
            return False
        for each in later:
            length_ns = ends_ns[each - count] - ends_ns[each - count - 1]
            ends_ns.append(ends_ns[-1] + length_ns)
        return True

    def _iterate(self, number: int) -> None:
        factor = self._slowdown[min(number, len(self._slowdown) - 1)] if self._slowdown else None
        self._done_ns = []
        self._waited = False
        if self._stalls_ns and self._stalls_ns[number]:
            self._compute("stall", self._host_ns, self._stalls_ns[number])
        script = self._host.step(number)
        for offset_ns, instruction in script.timed:
            launched_ns = self._host_ns + offset_ns
            if isinstance(instruction, Compute):
                if work_ns := instruction.device_ns:
                    scaled_ns = work_ns if factor is None else round(work_ns * factor)
                    self._compute(instruction.kind, launched_ns, scaled_ns)
            else:
                self._carry_out(instruction, launched_ns)
        self._host_ns += script.last_ns

    def _carry_out(self, instruction: Instruction, launched_ns: int) -> None:
        match instruction:
            case Communicate():
                self._communicate(instruction, launched_ns)
            case Await():
                self._await(instruction, launched_ns)
            case LoadBatch():
                self._host_ns = self._batches.take(launched_ns)
                if self._host.program.loader and self._tells:
                    self.timeline.host.append(Span("data_wait", launched_ns, self._host_ns))
            case Synchronize():
                self._synchronize(launched_ns)
            case Record(number):
                self._recorded_ns[number] = self._compute_ns
            case Mark(place):
                self._launched(launched_ns)
                getattr(self.timeline, f"{place}_ns").append(self._compute_ns)

    def _synchronize(self, asked_ns: int) -> None:
        """The host goes on when the stream is done."""
        self._host_ns = max(asked_ns, self._compute_ns)
        if self._host_ns > asked_ns and self._tells:
            self.timeline.host.append(Span("device_wait", asked_ns, self._host_ns))

    def _launched(self, launched_ns: int) -> None:
        """The stream comes to a launch: it may have to wait for it."""
        if self._compute_ns < launched_ns:
            self._compute_ns = launched_ns
            self._waited = True

    def _compute(self, kind: Kind, launched_ns: int, work_ns: int) -> None:
        self._launched(launched_ns)
        start_ns = self._compute_ns
        if self._slow and self._slow[0].start_ns < start_ns + work_ns:
            self._compute_ns = work_end_ns(start_ns, work_ns, self._slow)
            while self._slow and self._slow[0].end_ns <= self._compute_ns:
                self._slow.popleft()
        else:
            self._compute_ns = start_ns + work_ns
        if work_ns and self._tells:
            self.timeline.compute.append(Span(kind, start_ns, self._compute_ns))

    def _communicate(self, launched: Communicate, launched_ns: int) -> None:
        ready_ns = self._ready_ns(launched, launched_ns)
        joined_ns = max(ready_ns, self._comm_ns.get(launched.group, 0))
        met_ns, end_ns, slowdown = self._meet(launched, joined_ns)
        if slowdown != 1 and end_ns > joined_ns:
            slow_while(self._slow, Slow(joined_ns, end_ns, *slowdown.as_integer_ratio()))
        self._comm_ns[launched.group] = end_ns
        self._done_ns.append(end_ns + launched.after_ns)
        if self._tells:
            self.timeline.comm.append(launched.span(ready_ns, joined_ns, met_ns, end_ns))

    def _ready_ns(self, launched: Communicate, launched_ns: int) -> int:
        if launched.follows is not None:
            followed_ns = self._done_ns[launched.follows]
            self._waited |= followed_ns < launched_ns
            return max(launched_ns, followed_ns) + launched.before_ns
        if launched.waits_for is not None:
            recorded_ns = self._recorded_ns[launched.waits_for]
            self._waited |= recorded_ns < launched_ns
            return max(launched_ns, recorded_ns) + launched.before_ns
        self._launched(launched_ns)
        return self._compute_ns + launched.before_ns

    def _await(self, awaited: Await, launched_ns: int) -> None:
        self._launched(launched_ns)
        start_ns, done_ns = self._compute_ns, self._done_ns[awaited.number]
        if done_ns > start_ns:
            if self._tells:
                self.timeline.compute.append(Span("comm_wait", start_ns, done_ns))
            self._compute_ns = done_ns
            while self._slow and self._slow[0].end_ns <= done_ns:
                self._slow.popleft()


def slow_while(known: deque[Slow], more: Slow) -> None:
    """One more slow period, in order and cut where it overlaps others, which are as slow."""
    later: list[Slow] = []
    while known and known[-1].start_ns > more.start_ns:
        later.append(known.pop())
    for slow in (more, *reversed(later)):
        start_ns = max(slow.start_ns, known[-1].end_ns) if known else slow.start_ns
        if start_ns < slow.end_ns:
            known.append(slow._replace(start_ns=start_ns))


def closed_form(transfer: Transfer) -> str:
    """The name of this way to run a collective."""
    if isinstance(transfer, WholeTransfer):
        return "whole"
    name = "ring" if isinstance(transfer, RingTransfer) else transfer.algorithm
    return f"{name}:closed-form"
