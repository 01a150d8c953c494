"""All ranks of one job, or of several that differ in numbers alone: moments are arrays.

Ranks may differ by their slowdown and by when they leave a collective; trials by their seed, by the
times of their work, and by their network. Nothing is recorded of a rank but when it ends its steps
and how long it waits: the lanes of one that someone wants to see are `Lane`'s, with the collectives
that were found here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.engine.compiled import CompiledStep
from ddpsim.engine.fast.collectives import Collective, InFlight, Remembered
from ddpsim.engine.fast.host import Trial
from ddpsim.engine.fast.lane import Lane
from ddpsim.engine.fast.layers import Layered, Layers, layers_of
from ddpsim.engine.fast.repeats import Repeats
from ddpsim.engine.fast.slow_periods import SlowPeriods
from ddpsim.engine.fast.threads import Threads
from ddpsim.engine.fast.trials import (
    TrialSent,
    TrialStep,
    TrialWork,
    column,
    distinct,
    drawn,
    loader_of,
    of_lanes,
    side_by_side,
)
from ddpsim.engine.fast.work_sums import WorkSums
from ddpsim.result.summary import SteadyStep
from ddpsim.result.timeline import RankTimeline, Timeline

_FIT, _PIECES = 2**15, 16  # figures that fit a cache; in no more pieces than these
_LASTING = 2**13  # lanes at once, of which an eighth of the works fit
_FEW_WORKS = 32  # with fewer at a time of all lanes, some lanes at a time are quicker
_FEW_LANES = 2**10  # of which the times of all works are kept
_KEPT = 2**19  # figures
_KEPT_STEPS = 8
_LATEST_NS = 2**51  # 26 days: beyond, a sum might not be exact in float64
_LARGEST = 2**53  # nor a product
_Parts = tuple[Sequence[TrialStep | TrialWork], tuple[Layers, ...]]


class Lanes(Layered):
    """Trials whose hosts have the same instructions, on `ranks` ranks each, or on those that stand
    for all: moments are [trials, ranks].

    A host's clock is a number where all keep the same time, [trials, 1] where only trials differ,
    and [trials, ranks] where hosts wait for their devices. `counts`: how long ranks wait is asked,
    and not only when they end. `remembers`: of which ranks `timeline` may be asked; None: of all.
    `on_threads`: gloo's threads send, in one trial, whose steps are all simulated. `past`: how far
    each trial has come. `train` raises OverflowError where the clock would no longer be exact.
    """

    latest = staticmethod(np.maximum)

    def __init__(
        self,
        trials: Sequence[Trial],
        ranks: int,
        *,
        counts: bool = True,
        remembers: Sequence[int] | None = None,
        on_threads: bool = False,
    ) -> None:
        self._program = trials[0].host.program
        super().__init__(blocks=self._program.blocking)
        self._trials, self._on_threads = trials, on_threads
        self._shape = (len(trials), ranks)
        self._hosts = distinct([trial.host for trial in trials])
        self._loader = loader_of(self._hosts)
        self._sums = None if self._blocks or len(trials) > 1 else trials[0].request.sums
        self._host_ns, self._stream_ns = 0.0, np.zeros(self._shape)
        self._least_ns = 0.0  # no stream is behind this
        self._slow = SlowPeriods()
        self._waited = np.zeros(len(trials), dtype=bool)
        # ticks in collectives, in which compute waits for them, and for late peers
        self._now, self._steady = np.zeros((3, *self._shape)), np.zeros((3, *self._shape))
        self._all_comm_ns = np.zeros(self._shape)
        self._step_ends_ns: list[Ticks] = []
        self._collectives = Remembered(remembers)
        is_brief = not (counts or self._collectives.remembers)
        self.past = [Repeats(trial, is_brief=is_brief) for trial in trials]
        self._counts = counts
        self._comm = self._comm_lanes()
        self._parts: dict[int, _Parts] = {}  # of each kind of step
        self._known_launches: dict[int, TrialSent] = {}
        self._known_works: dict[int, Ticks] = {}
        self._none_ns = np.zeros(self._shape)

    def _comm_lanes(self) -> InFlight | Threads:
        requests = [trial.request for trial in self._trials]
        traffics = [each.traffic for each in requests]
        if self._on_threads:
            return Threads(self._program, traffics[0])
        tells = self._counts or self._collectives.remembers
        return InFlight(self._shape, requests[0].cost, traffics, counts=self._counts, tells=tells)

    def train(self) -> None:
        """Until the first step that all after it are exactly like, or else all of them.

        Where only a few steps come again and again, until they do, and the steady ones.
        """
        for _ in self.trained():
            pass

    def trained(self) -> Iterator[Ticks]:
        """Train step by step: after each one how long it has taken, [trials, ranks].

        A trial that has come to its end goes on beside the others, and is not heard of again.
        """
        # once freed, glibc keeps as much for later arrays, and fetches no new pages
        np.empty(_KEPT)
        if self.varies:
            for past in self.past:
                past.go_to_the_end()
        number, going_on = 0, list(range(len(self._trials)))
        while going_on:
            begun = self._stream_ns.copy()
            self._iterate(number)
            lengths = self._stream_ns - begun
            if not self.varies:
                self._hear(number, going_on, lengths)
            self._sum_up(number, going_on)
            going_on = [i for i in going_on if self.past[i].last != number]
            number += 1
            yield lengths

    def _hear(self, number: int, trials: Sequence[int], lengths: Ticks) -> None:
        """Note whether a step is like others in these trials, and how ranks stand to each other."""
        waits = self._program.synchronizes
        states = self._standing() if waits else [None] * len(self._trials)
        for i in trials:
            waited = bool(self._waited[i])
            past, now_ns, sums = self.past[i], self._stream_ns[i], self._trials[i].request.sums
            past.hear(number, lengths[i], now_ns, states[i], waited=waited)
            if sums and past.cycle_ns and sums.stood_ns is None:
                sums.stood_ns = now_ns - now_ns.min()

    def _standing(self) -> list[Ticks]:
        """Moments that later launches depend on, since the step: a trial each, [figures, ranks]."""
        now_ns = self._stream_ns
        return list(np.stack([self._host_ns - now_ns, *self._loader.since(now_ns)], axis=1))

    def _sum_up(self, number: int, trials: Sequence[int]) -> None:
        """How long ranks have waited in a step of these trials."""
        if not self._counts:
            return
        for i in trials:
            past = self.past[i]
            if past.repeats:  # earlier steps are warm-up now
                self._steady[:, i] = 0
            self._all_comm_ns[i] += (1 + past.repeats) * self._now[0, i]
            if number >= past.warmup:
                self._steady[:, i] += (1 + past.repeats) * self._now[:, i]

    def begin_late(self, begin_ns: Ticks) -> None:
        """Ranks begin the first step then, [trials, ranks]."""
        self._stream_ns = begin_ns.copy()

    def _iterate(self, number: int) -> None:
        self._factors, stalls_ns = drawn(self._trials, self._shape[1], number)
        self._waited[:] = False
        self._now[:] = 0
        self._comm.begin()
        if stalls_ns is not None:
            self._launch(self._host_ns)
            self._come_to(self._stream_ns + stalls_ns)
        last_ns = column([host.step(number).last_ns for host in self._hosts])
        kind = self._program.kind(number)
        if kind not in self._parts:  # which are held here, as others are known by their identity
            self._parts[kind] = self._parts_of(number)
        self._evaluate(self._but_for_equal(*self._parts[kind]), last_ns)
        if self._counts:
            self._now[0] = self._comm.comm_ns
        _check_exact(self._stream_ns.max(), _LATEST_NS)

    def _loaded_ns(self, asked_ns: Ticks | float) -> Ticks | float:
        come_ns: Ticks | float = self._loader.take(asked_ns)
        return come_ns

    def _saw_mark(self, place: str) -> None:
        if place == "step_ends":
            self._step_ends_ns.append(self._stream_ns.copy())

    def _launch(self, launched_ns: Ticks | float) -> None:
        if self._may_wait(launched_ns):
            self._note_wait(self._stream_ns < launched_ns)
            self._come_to(np.maximum(self._stream_ns, launched_ns))

    def _note_wait(self, is_late: npt.NDArray[np.bool_]) -> None:
        if is_late.any():
            self._was_late = True
            self._waited |= is_late.any(axis=1)

    def _may_wait(self, launched_ns: Ticks | float) -> bool:
        """Whether some stream may be there before a launch."""
        last_ns = launched_ns if isinstance(launched_ns, float) else float(launched_ns.max())
        if self._least_ns >= last_ns:
            return False
        self._least_ns = float(self._stream_ns.min())
        self._was_late |= self._least_ns < last_ns
        return self._least_ns < last_ns

    def _come_to(self, now_ns: Ticks) -> None:
        self._stream_ns = now_ns
        self._slow.pass_over(now_ns.reshape(-1))

    def _work(self, work: TrialWork) -> None:
        """Work on all lanes: as many at once as a cache holds with all of these works."""
        if self._blocks:
            self._launch(self._host_ns + work.offset_ns)
        waits = not self._blocks and self._may_wait(self._host_ns + work.offset_ns)
        if self._sums and not waits:
            self._stream_ns = self._lasting_ends(self._sums, work.device_ns[:, 0, 0].copy())
            return
        now_ns, size = self._stream_ns.reshape(-1), self._stream_ns.size
        many = max(_FIT // work.device_ns.shape[0], size // _PIECES, 1)
        ends_ns = np.empty(size)
        for begin in range(0, size, many):
            lanes = slice(begin, min(begin + many, size))
            launched_ns = self._launched_ns(work, lanes) if waits else None
            works_ns = self._works_ns(work, lanes)
            ends_ns[lanes], waited = self._slow.work_ends(
                lanes, now_ns[lanes], works_ns, launched_ns
            )
            if waited is not None and waited.any():
                self._waited[np.arange(lanes.start, lanes.stop)[waited] // self._shape[1]] = True
        self._stream_ns = ends_ns.reshape(self._shape)
        if self._blocks:
            self._host_ns = self._stream_ns

    def _works_ns(self, work: TrialWork, lanes: slice) -> Ticks:
        """How long works take, [lanes, works]; known where all lanes fit and no step varies."""
        is_whole = lanes.stop - lanes.start == self._stream_ns.size
        if is_whole and id(work) in self._known_works:
            return self._known_works[id(work)]
        works_ns = of_lanes(work.device_ns, lanes, self._shape[1])
        if self._factors is not None:
            works_ns = works_ns * self._factors.reshape(-1, 1)[lanes]
            np.rint(works_ns, out=works_ns)
        elif len(works_ns) == 1:
            works_ns = np.broadcast_to(works_ns, (lanes.stop - lanes.start, works_ns.shape[1]))
        if self._blocks:  # between two works comes the host's own time for the later one
            hosts_ns = of_lanes(work.offsets_ns, lanes, self._shape[1])
            works_ns = np.hstack([works_ns[:, :1], works_ns[:, 1:] + hosts_ns[:, 1:]])
        if is_whole and not self.varies and self._stream_ns.size <= _FEW_LANES:
            self._known_works[id(work)] = works_ns
        return works_ns

    def _lasting_ends(self, sums: WorkSums, works_ns: Ticks) -> Ticks:
        """The ends of works that were all launched before, on ranks that differ for good."""
        now_ns = self._stream_ns.reshape(-1)
        self._slow.pass_over(now_ns)
        ends_ns: Ticks = np.empty_like(now_ns)
        for begin in range(0, len(now_ns), _LASTING):
            lanes = slice(begin, min(begin + _LASTING, len(now_ns)))
            ends_ns[lanes] = self._slow.lasting_ends(sums, lanes, now_ns[lanes], works_ns)
        return ends_ns.reshape(self._shape)

    def _launched_ns(self, work: TrialWork, lanes: slice) -> Ticks:
        """When works were launched, [lanes, works], or [1, works] where all were together."""
        at_ns, offsets_ns = self._host_ns, of_lanes(work.offsets_ns, lanes, self._shape[1])
        if isinstance(at_ns, float):
            return at_ns + offsets_ns
        each_ns: Ticks = (at_ns + self._none_ns).reshape(-1, 1)[lanes]
        return each_ns + offsets_ns

    def _join(self, step: TrialStep, launched_ns: Ticks | float) -> Any:
        launched = self._launches_of(step)
        joined_ns, collective = self._comm.join(launched, self._ready_ns(launched, launched_ns))
        if launched.slowing is not None and isinstance(collective, Collective):
            self._slow.pass_over(self._stream_ns.reshape(-1))
            ends_ns = collective.ends_ns.reshape(-1)
            self._slow.append(joined_ns.reshape(-1), ends_ns, launched.slowing)
        self._collectives.add(collective)
        return launched, collective

    def _done_ns(self, number: int) -> Ticks:
        launched, collective = self._sent[number]
        ends_ns: Ticks = collective.ends_ns
        return ends_ns + launched.after_ns if np.any(launched.after_ns) else ends_ns

    def _launches_of(self, step: TrialStep) -> TrialSent:
        if id(step) not in self._known_launches:
            sent = TrialSent.of(step, self._trials, self._shape[1])
            if sent.slowing is not None:
                _check_exact(self._longest_ns * float(np.max(sent.slowing)), _LARGEST)
            self._known_launches[id(step)] = sent
        return self._known_launches[id(step)]

    def _saw_comm_wait(self, done_ns: Ticks) -> None:
        if self._counts:
            exposed_ns, late_ns = self._comm.within(self._stream_ns, done_ns)
            self._now[1] += exposed_ns
            self._now[2] += late_ns

    @cached_property
    def _longest_ns(self) -> float:
        """No work of the device takes longer at full rate."""
        slowdowns = (trial.request.slowdowns for trial in self._trials)
        drawn = [each.max() for each in slowdowns if each is not None]
        steps = (step for host in self._hosts for step in host.program.kinds)
        longest_ns = max(step.longest_work_ns for step in steps)
        return float(max([1.0, *drawn]) * longest_ns)

    @cached_property
    def varies(self) -> bool:
        """Whether any trial's steps differ."""
        return any(not trial.host.more for trial in self._trials)

    @property
    def paths(self) -> set[str]:
        """How collectives were found."""
        return self._comm.paths

    def _parts_of(self, number: int) -> _Parts:
        """An iteration's, and its equal layers, where all that happens in one comes again."""
        fit = _FIT // self._stream_ns.size
        most = fit if fit >= _FEW_WORKS and not self._sums else None
        scripts = tuple([host.step(number) for host in self._hosts])
        tells = isinstance(self._comm, InFlight) and self._comm.tells_by_layers
        return _parts_of(scripts, most, self._blocks, tells)

    def slowest_rank(self, trial: int) -> int:
        """The rank that ends the last iteration last; of equals the longest in collectives."""
        last = self._ends_ns(trial)[-1][trial]
        tied = np.flatnonzero(last == last.max())
        return int(tied[np.argmax(self._all_comm_ns[trial, tied])])

    def _ends_ns(self, trial: int) -> Sequence[Ticks]:
        """When its steps end."""
        last = self.past[trial].last
        return self._step_ends_ns[: None if last is None else last + 1]

    def steady_step(self, trial: int) -> SteadyStep:
        """What becomes of the slowest rank in the steady steps."""
        rank, past = self.slowest_rank(trial), self.past[trial]
        ends = [float(ends_ns[trial, rank]) for ends_ns in self._ends_ns(trial)]
        lengths = [int(end - start) for start, end in pairwise(ends)][past.warmup - 1 :]
        lengths += lengths[-1:] * past.repeats
        if not self._counts:  # nor is their number
            lengths = past.cycle_ns or lengths
        comm_ns, exposed_ns, _ = self._steady[:, trial, rank].tolist()
        return SteadyStep(lengths, int(comm_ns), int(exposed_ns))

    def timeline(self, trial: int, observed: Sequence[int] | None = None) -> Timeline:
        """The lanes of some ranks (None: of the slowest), and what is known of all."""
        slowest, past = self.slowest_rank(trial), self.past[trial]
        observed = [slowest] if observed is None else observed
        wanted = sorted({slowest, *observed})
        lanes = self if self._collectives.is_whole else self._again(wanted)
        ranks = {rank: lanes.lanes_of(trial, rank) for rank in wanted}
        late = [int(late_ns) for late_ns in self._steady[2, trial]]
        return Timeline(ranks, past.warmup, slowest, late, past.repeats)

    def _again(self, ranks: Sequence[int]) -> Lanes:
        """Train the same trials again, and remember what these ranks saw."""
        again = Lanes(self._trials, self._shape[1], counts=False, remembers=ranks)
        again.train()
        return again

    def lanes_of(self, trial: int, rank: int) -> RankTimeline:
        """The timeline of a rank that is remembered."""
        host, request = self._trials[trial]
        met = self._collectives.of(trial, rank)
        slowdown = None if request.slowdowns is None else request.slowdowns[rank].tolist()
        stalls_ns = None if request.stalls is None else request.stalls[rank].tolist()
        lane = Lane(host, lambda *_: next(met), slowdown, stalls_ns)
        lane.train(len(self._ends_ns(trial)))
        if self._on_threads:  # the next one may end before
            lane.timeline.comm.sort(key=lambda span: span.end_ns)
        return lane.timeline


@lru_cache(maxsize=_KEPT_STEPS)  # variants of a job's network have the same steps
def _parts_of(
    scripts: tuple[CompiledStep, ...],
    most: int | None,
    blocks: bool,  # noqa: FBT001 -- for the cache
    tells: bool,  # noqa: FBT001 -- likewise
) -> _Parts:
    parts = side_by_side(scripts, most, blocks=blocks)
    return parts, layers_of(parts) if tells else ()


def _check_exact(largest: float, limit: float) -> None:
    """Whole numbers of float64 are exact so far; raises OverflowError beyond."""
    if largest > limit:
        raise OverflowError("the simulated clock is too long for arrays")
