"""One rank whose collectives are known, by integers: its spans, instruction by instruction."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

from ddpsim.cluster.transfers import ProcessGroup, RingTransfer, Transfer, WholeTransfer
from ddpsim.engine.compiled import Part
from ddpsim.engine.fast.evaluator import Evaluator
from ddpsim.engine.fast.host import Batches, Host
from ddpsim.result.timeline import RankTimeline, Span
from ddpsim.strategies.instructions import Communicate, Compute

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

    def __call__(self, launched: Communicate, joined_ns: int) -> Met:
        """Return when it starts and ends, for a rank that joins it then."""
        ...


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


class Lane(Evaluator):
    """A rank's compute stream and communication lanes, driven by its host's script.

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
        super().__init__(blocks=host.program.blocking)
        self._tells = tells
        self.timeline = RankTimeline()
        self._host = host
        self._meet = meet
        self._slowdown = slowdown
        self._stalls_ns = stalls_ns
        self._factor: float | None = None  # of this iteration
        self._batches = Batches(host.program.loader)
        self._state: tuple[int, ...] = ()  # of host and loader, since the last step's end
        self._busy_ns: dict[ProcessGroup, list[int]] = {}  # until when a group's threads are
        self._slow: deque[Slow] = deque()
        self._waited = False  # the device, or a collective, for a launch

    def begin_late(self, begin_ns: int) -> None:
        """The rank begins the first step then."""
        self._stream_ns = begin_ns

    def train(self, steps: int | None = None) -> tuple[int, int]:
        """So many steps; None: until the first that all after it are like, or else all.

        Returns how many were of the warm-up, and how often the last one is repeated.
        """
        iterations, ended = self._host.program.iterations, dict[tuple[int, ...], int]()
        for number in range(steps or self._host.steps):
            start_ns = self._stream_ns
            self._iterate(number)
            if steps is not None:
                continue
            before, self._state = self._state, self._standing()
            if self._repeats_from(number, self._stream_ns - start_ns, before):
                return number, iterations - 1
            since = ended.setdefault(self._state, number)
            if self._tells or self._state == before:  # the next step may be like this one
                continue
            if since < number and self._come_again(number, number - since):
                break
        return self._host.steps - iterations, 0

    def _standing(self) -> tuple[int, ...]:
        """Moments of host and loader that later launches depend on, since the last step."""
        now_ns = self._stream_ns
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
        slowdown, step = self._slowdown, self._host.step(number)
        self._factor = slowdown[min(number, len(slowdown) - 1)] if slowdown else None
        self._waited = False
        if self._stalls_ns and self._stalls_ns[number]:
            self._do([(0, Compute("stall", 0, self._stalls_ns[number]))], None, blocks=False)
        self._evaluate(step.parts, step.last_ns)

    def _work(self, part: Part) -> None:
        now_ns, slow = self._stream_ns, self._slow
        waits = now_ns < self._host_ns + part.works[-1][0]
        if waits or self._tells or self._blocks or self._factor is not None:
            self._do(part.works, self._factor, blocks=self._blocks)
        elif slow and slow[0].start_ns < now_ns + part.device_ns:
            self._do(part.works, None, blocks=False)
        else:
            self._stream_ns += part.device_ns

    def _do(
        self, works: Iterable[tuple[int, Compute]], factor: float | None, *, blocks: bool
    ) -> None:
        """Works one after the other; where it `blocks` the host launches each after the last."""
        now_ns, host_ns, spans = self._stream_ns, self._host_ns, self.timeline.compute
        for offset_ns, (kind, _, usual_ns, names) in works:
            if not (usual_ns or blocks):
                continue
            if now_ns < host_ns + offset_ns:
                now_ns, self._waited = host_ns + offset_ns, True
            work_ns = usual_ns if factor is None else round(usual_ns * factor)
            start_ns, now_ns = now_ns, now_ns + work_ns
            if self._slow and self._slow[0].start_ns < now_ns:
                self._come_to(work_end_ns(start_ns, work_ns, self._slow))
                now_ns = self._stream_ns
            if work_ns and self._tells:
                spans.append(Span(kind, start_ns, now_ns, names))
            if blocks:
                host_ns = now_ns
        self._stream_ns, self._host_ns = now_ns, host_ns

    def _join(self, part: Part, launched_ns: int) -> int:
        launched: Any = part.first
        ready_ns = self._ready_ns(launched, launched_ns)
        busy_ns = self._busy_ns.setdefault(launched.group, [])
        joined_ns = ready_ns
        if len(busy_ns) == self._host.program.comm_workers:
            joined_ns = max(ready_ns, min(busy_ns))
            busy_ns.remove(min(busy_ns))
        met_ns, end_ns, slowdown = self._meet(launched, joined_ns)
        if slowdown != 1 and end_ns > joined_ns:
            slow_while(self._slow, Slow(joined_ns, end_ns, *slowdown.as_integer_ratio()))
        done_ns: int = end_ns + launched.after_ns
        busy_ns.append(done_ns if self._blocks else end_ns)
        if self._tells:
            self.timeline.comm.append(launched.span(ready_ns, joined_ns, met_ns, end_ns))
        return done_ns

    def _done_ns(self, number: int) -> int:
        return int(self._sent[number])

    def _loaded_ns(self, asked_ns: int) -> int:
        come_ns = int(self._batches.take(asked_ns))
        if self._host.program.loader and self._tells:
            self.timeline.host.append(Span("data_wait", asked_ns, come_ns))
        return come_ns

    def _launch(self, launched_ns: int) -> None:
        if self._stream_ns < launched_ns:
            self._stream_ns = launched_ns
            self._waited = True

    def _come_to(self, now_ns: int) -> None:
        self._stream_ns = now_ns
        while self._slow and self._slow[0].end_ns <= now_ns:
            self._slow.popleft()

    def _note_wait(self, is_late: bool) -> None:  # noqa: FBT001 -- see Evaluator
        self._waited |= is_late

    def _saw_mark(self, place: str) -> None:
        getattr(self.timeline, f"{place}_ns").append(self._stream_ns)

    def _saw_comm_wait(self, done_ns: int) -> None:
        if self._tells and done_ns > self._stream_ns:
            self.timeline.compute.append(Span("comm_wait", self._stream_ns, done_ns))

    def _saw_device_wait(self, asked_ns: int) -> None:
        if self._tells and self._host_ns > asked_ns:
            self.timeline.host.append(Span("device_wait", asked_ns, self._host_ns))


def slow_while(periods: deque[Slow], more: Slow) -> None:
    """One more slow period, in order and cut where it overlaps others, which are as slow."""
    later: list[Slow] = []
    while periods and periods[-1].start_ns > more.start_ns:
        later.append(periods.pop())
    for slow in (more, *reversed(later)):
        start_ns = max(slow.start_ns, periods[-1].end_ns) if periods else slow.start_ns
        if start_ns < slow.end_ns:
            periods.append(slow._replace(start_ns=start_ns))


def closed_form(transfer: Transfer) -> str:
    """The name of this way to run a collective."""
    if isinstance(transfer, WholeTransfer):
        return "whole"
    name = "ring" if isinstance(transfer, RingTransfer) else transfer.algorithm
    return f"{name}:closed-form"
