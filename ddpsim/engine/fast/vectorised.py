"""Many ranks at once, of one job or of several that differ in numbers alone.

What `Lane` does for one rank, for [trials, ranks] of them: every moment is an array. Ranks may
differ by their slowdown and by when they leave a collective; trials by their seed, by the times of
their work, and by their network. Nothing is recorded of a rank but when it ends its steps and how
long it waits: the lanes of one that someone wants to see are `Lane`'s, with the collectives that
were found here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.cluster.network import NO_TRAFFIC
from ddpsim.engine.fast.clocks import Clocks
from ddpsim.engine.fast.collectives import Collective, InFlight, Remembered, Waits
from ddpsim.engine.fast.repeats import Repeats
from ddpsim.engine.fast.scalar import Lane
from ddpsim.engine.fast.slow_periods import SlowPeriods
from ddpsim.engine.fast.trials import (
    Trial,
    TrialSent,
    TrialStep,
    TrialWork,
    distinct,
    drawn,
    of_lanes,
    side_by_side,
)
from ddpsim.engine.fast.work_sums import WorkSums
from ddpsim.engine.noise import vary
from ddpsim.result.summary import SteadyStep
from ddpsim.result.timeline import RankTimeline, Timeline
from ddpsim.strategies.instructions import Await, Communicate, LoadBatch, Mark, Record, Synchronize

__all__ = ["Lanes"]

_FIT, _PIECES = 2**15, 16  # figures that fit a cache; in no more pieces than these
_LASTING = 2**13  # lanes at once, of which an eighth of the works fit
_FEW_WORKS = 32  # with fewer at a time of all lanes, some lanes at a time are quicker
_FEW_LANES = 2**10  # of which the times of all works are kept
_KEPT = 2**19  # figures
_LATEST_NS = 2**51  # 26 days: beyond, a sum might not be exact in float64
_LARGEST = 2**53  # nor a product


class Lanes:
    """Trials whose hosts have the same instructions, on `ranks` ranks each, or on those that stand
    for all.

    `counts`: how long ranks wait is asked, and not only when they end. `remembers`: of which ranks
    `timeline` may be asked; None: of all. `past`: how far each trial has come. `train` raises
    OverflowError where the clock would no longer be exact.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        ranks: int,
        *,
        counts: bool = True,
        remembers: Sequence[int] | None = None,
    ) -> None:
        self._trials = trials
        self._shape = (len(trials), ranks)
        self._program = trials[0].host.program
        self._clocks = Clocks([trial.host for trial in trials])
        self._sums = trials[0].sums if len(trials) == 1 else None
        self._compute = np.zeros(self._shape)  # when all that was launched is done
        self._comm = InFlight(self._shape, trials[0].cost, [trial.traffic for trial in trials])
        self._least_ns = 0.0  # no stream is behind this
        self._slow = SlowPeriods()
        self._waited = np.zeros(len(trials), dtype=bool)
        self.past = [Repeats(trial) for trial in trials]
        self._now, self._steady = Waits.none(self._shape), Waits.none(self._shape)
        self._all_comm_ns = np.zeros(self._shape)
        self._step_ends_ns: list[Ticks] = []
        self._collectives = Remembered(remembers)
        self._done_ns: list[Ticks] = []  # of the iteration's collectives
        self._recorded: dict[int, Ticks] = {}
        self._counts = counts
        self._known_launches: dict[int, TrialSent] = {}
        self._known_works: dict[int, Ticks] = {}

    def train(self) -> None:
        """Until the first step that all after it are exactly like, or else all of them.

        Where only a few steps come again and again, until they do, and the steady ones.
        """
        for _ in self.trained():
            pass

    def trained(self) -> Iterator[Ticks]:
        """The same, step by step: after each one how long it has taken, [trials, ranks].

        A trial that has come to its end goes on beside the others, and is not heard of again.
        """
        # once freed, glibc keeps as much for later arrays, and fetches no new pages
        np.empty(_KEPT)
        if self.varies:
            for past in self.past:
                past.go_to_the_end()
        number, going_on = 0, list(range(len(self._trials)))
        while going_on:
            begun = self._compute.copy()
            self._iterate(number)
            lengths = self._compute - begun
            if not self.varies:
                self._hear(number, going_on, lengths)
            self._sum_up(number, going_on)
            going_on = [i for i in going_on if self.past[i].last != number]
            number += 1
            yield lengths

    def _hear(self, number: int, trials: Sequence[int], lengths: Ticks) -> None:
        """Whether a step is like others, in each of these trials."""
        waits = self._program.synchronizes
        states = self._clocks.since(self._compute) if waits else [None] * len(self._trials)
        for i in trials:
            waited = bool(self._waited[i])
            self.past[i].hear(number, lengths[i], self._compute[i], states[i], waited=waited)

    def _sum_up(self, number: int, trials: Sequence[int]) -> None:
        """How long ranks have waited in a step of these trials."""
        if not self._counts:
            return
        for i in trials:
            past = self.past[i]
            if past.repeats:  # earlier steps are warm-up now
                self._steady.clear(i)
            self._all_comm_ns[i] += (1 + past.repeats) * self._now.comm_ns[i]
            if number >= past.warmup:
                self._steady.add(i, self._now, 1 + past.repeats)

    def steps_from(self, number: int, start_ns: Ticks | float) -> Iterator[Ticks]:
        """How long steps like this one take, each [trials, ranks]; ranks begin the first then.

        No host waits for its device, or for batches.
        """
        self._clocks.begin(number)
        self._compute[:] = start_ns
        self._least_ns = float(self._compute.min())
        self._comm.begin(self._least_ns)
        while True:
            begun = self._compute.copy()
            self._iterate(number)
            yield self._compute - begun

    @property
    def hosts_ns(self) -> Ticks:
        """The clock of each host, as many as keep a time of their own."""
        return np.asarray(self._clocks.at_ns)

    @property
    def waited(self) -> bool:
        """Whether a device, or a collective, has waited for a launch in the last step."""
        return bool(self._waited.any())

    def _iterate(self, number: int) -> None:
        factors, stalls_ns = drawn(self._trials, self._shape[1], number)
        self._waited[:] = False
        self._now = Waits.none(self._shape)
        self._done_ns = []
        self._comm.begin()
        if stalls_ns is not None:
            self._launch(self._clocks.at_ns)
            self._come_to(self._compute + stalls_ns)
        for step in self._steps[self._program.kind(number)]:
            if isinstance(step, TrialWork):
                self._compute_works(step, factors)
            else:
                self._carry_out(step, self._clocks.at_ns + step.offset_ns)
        self._clocks.end(number)
        _check_exact(self._compute.max(), _LATEST_NS)

    def _carry_out(self, step: TrialStep, launched_ns: Ticks | float) -> None:
        match step.each[0]:
            case Communicate():
                self._communicate(step, launched_ns)
            case Await(place):
                self._await(place, launched_ns)
            case LoadBatch():
                self._clocks.load(launched_ns)
            case Synchronize():
                self._clocks.synchronize(launched_ns, self._compute)
            case Record(number):
                self._recorded[number] = self._compute
            case Mark(place):
                self._launch(launched_ns)
                if place == "step_ends":
                    self._step_ends_ns.append(self._compute.copy())

    def _launch(self, launched_ns: Ticks | float) -> None:
        """Streams come to a launch: some may have to wait for it."""
        if not self._may_wait(launched_ns):
            return
        behind = self._compute < launched_ns
        self._waited |= behind.any(axis=1)
        self._come_to(np.maximum(self._compute, launched_ns))

    def _may_wait(self, launched_ns: Ticks | float) -> bool:
        """Whether some stream may be there before a launch."""
        last_ns = launched_ns if isinstance(launched_ns, float) else float(launched_ns.max())
        if self._least_ns >= last_ns:
            return False
        self._least_ns = float(self._compute.min())
        return self._least_ns < last_ns

    def _come_to(self, now_ns: Ticks) -> None:
        self._compute = now_ns
        self._slow.pass_over(now_ns.reshape(-1))

    def _compute_works(self, work: TrialWork, factors: Ticks | None) -> None:
        """As many lanes at once as a cache holds with all of these works."""
        waits = self._may_wait(self._clocks.at_ns + work.last_ns)
        if self._sums and not waits:
            self._compute = self._lasting_ends(self._sums, work.device_ns[:, 0, 0].copy())
            return
        now_ns, size = self._compute.reshape(-1), self._compute.size
        many = max(_FIT // work.device_ns.shape[0], size // _PIECES, 1)
        ends_ns = np.empty(size)
        for begin in range(0, size, many):
            lanes = slice(begin, min(begin + many, size))
            launched_ns = self._launched_ns(work, lanes) if waits else None
            works_ns = self._works_ns(work, lanes, factors)
            ends_ns[lanes], waited = self._slow.work_ends(
                lanes, now_ns[lanes], works_ns, launched_ns
            )
            if waited is not None:
                self._waited[np.arange(lanes.start, lanes.stop)[waited] // self._shape[1]] = True
        self._compute = ends_ns.reshape(self._shape)

    def _works_ns(self, work: TrialWork, lanes: slice, factors: Ticks | None) -> Ticks:
        """How long works take, [lanes, works]; known where all lanes fit and no step varies."""
        is_whole = lanes.stop - lanes.start == self._compute.size
        if is_whole and id(work) in self._known_works:
            return self._known_works[id(work)]
        works_ns = of_lanes(work.device_ns, lanes, self._shape[1])
        if factors is not None:
            works_ns = works_ns * factors.reshape(-1, 1)[lanes]
            np.rint(works_ns, out=works_ns)
        elif len(works_ns) == 1:
            works_ns = np.broadcast_to(works_ns, (lanes.stop - lanes.start, works_ns.shape[1]))
        if is_whole and not self.varies and self._compute.size <= _FEW_LANES:
            self._known_works[id(work)] = works_ns
        return works_ns

    def _lasting_ends(self, sums: WorkSums, works_ns: Ticks) -> Ticks:
        """The same of ranks that differ for good, whose works were all launched before."""
        now_ns = self._compute.reshape(-1)
        ends_ns = self._slow.ends_by_sums(sums, works_ns, now_ns)
        left = np.flatnonzero(ends_ns < 0)
        for begin in range(0, len(left), _LASTING):
            lanes = left[begin : begin + _LASTING]
            ends_ns[lanes] = self._slow.lasting_ends(sums, lanes, now_ns[lanes], works_ns)
        return ends_ns.reshape(self._shape)

    def _launched_ns(self, work: TrialWork, lanes: slice) -> Ticks:
        """When works were launched, [lanes, works], or [1, works] where all were together."""
        at_ns, ranks = self._clocks.at_ns, self._shape[1]
        offsets_ns = of_lanes(work.offset_ns, lanes, ranks)
        if isinstance(at_ns, float):
            return at_ns + offsets_ns
        each_ns = of_lanes(at_ns[np.newaxis], lanes, ranks)
        return each_ns + offsets_ns

    def _communicate(self, step: TrialStep, launched_ns: Ticks | float) -> None:
        launched = self._known(step)
        group = launched.group
        joined = self._comm.joined(group, self._ready(launched, launched_ns))
        ends = self._comm.ends_ns(group, launched.transfers, joined)
        if launched.slowing is not None:
            self._slow.pass_over(self._compute.reshape(-1))
            self._slow.append(joined.reshape(-1), ends.reshape(-1), launched.slowing)
        self._comm.ended(group, ends)
        self._done_ns.append(ends + launched.after_ns if np.any(launched.after_ns) else ends)
        if self._counts or self._collectives.remembers:
            collective = Collective(launched.transfers, self._comm.met(group, joined), ends)
            self._collectives.add(collective)
        if self._counts:
            self._comm.launched(group, collective, joined)
            self._now.comm_ns += ends - joined

    def _known(self, step: TrialStep) -> TrialSent:
        if id(step) not in self._known_launches:
            found = TrialSent.of(step, self._trials, self._shape[1])
            if found.slowing is not None:
                _check_exact(self._longest_ns * float(np.max(found.slowing)), _LARGEST)
            self._known_launches[id(step)] = found
        return self._known_launches[id(step)]

    def _ready(self, launched: TrialSent, launched_ns: Ticks | float) -> Ticks:
        """When the data of a collective is there."""
        recorded = self._compute
        if launched.follows is not None:
            recorded = self._done_ns[launched.follows]
        elif launched.waits_for is not None:
            recorded = self._recorded[launched.waits_for]
        else:
            self._launch(launched_ns)
            return self._compute + launched.before_ns
        self._waited |= (recorded < launched_ns).any(axis=1)
        return np.maximum(recorded, launched_ns) + launched.before_ns

    def _await(self, place: int, launched_ns: Ticks | float) -> None:
        self._launch(launched_ns)
        done = self._done_ns[place]
        if self._counts:
            exposed_ns, late_ns = self._comm.within(self._compute, done)
            self._now.exposed_ns += exposed_ns
            self._now.late_ns += late_ns
        self._come_to(np.maximum(self._compute, done))

    @cached_property
    def _longest_ns(self) -> float:
        """No work of the device takes longer at full rate."""
        drawn = [trial.slowdowns.max() for trial in self._trials if trial.slowdowns is not None]
        works = [w for steps in self._steps for w in steps if isinstance(w, TrialWork)]
        longest_ns = max((work.device_ns.max() for work in works), default=0.0)
        return float(max([1.0, *drawn]) * longest_ns)

    @cached_property
    def varies(self) -> bool:
        """Whether any trial's steps differ."""
        return any(
            vary(trial.slowdowns, trial.stalls_ns) or trial.traffic != NO_TRAFFIC
            for trial in self._trials
        )

    @property
    def paths(self) -> set[str]:
        """How collectives were found."""
        return self._comm.paths

    @cached_property
    def _steps(self) -> tuple[list[TrialStep | TrialWork], ...]:
        """Those of each kind of step."""
        hosts = distinct([trial.host for trial in self._trials])
        fit = _FIT // self._compute.size
        most = fit if fit >= _FEW_WORKS and not self._sums else None
        of_kinds = zip(*(host.program.kinds for host in hosts), strict=True)
        return tuple(side_by_side(scripts, most) for scripts in of_kinds)

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
        waits = (self._steady.comm_ns, self._steady.exposed_ns)
        return SteadyStep(lengths, *(int(wait_ns[trial, rank]) for wait_ns in waits))

    def timeline(self, trial: int, observed: Sequence[int] | None = None) -> Timeline:
        """The lanes of some ranks (None: of the slowest), and what is known of all."""
        slowest, past = self.slowest_rank(trial), self.past[trial]
        observed = [slowest] if observed is None else observed
        wanted = sorted({slowest, *observed})
        told = self if self._collectives.is_whole else self._again(wanted)
        ranks = {rank: told.lanes_of(trial, rank) for rank in wanted}
        late = [int(late_ns) for late_ns in self._steady.late_ns[trial]]
        return Timeline(ranks, past.warmup, slowest, late, past.repeats)

    def _again(self, ranks: Sequence[int]) -> Lanes:
        """The same, which remembers what these ranks saw."""
        again = Lanes(self._trials, self._shape[1], counts=False, remembers=ranks)
        again.train()
        return again

    def lanes_of(self, trial: int, rank: int) -> RankTimeline:
        """Those of a rank that is remembered."""
        told = self._trials[trial]
        met = self._collectives.of(trial, rank)
        slowdown = None if told.slowdowns is None else told.slowdowns[rank].tolist()
        stalls_ns = None if told.stalls_ns is None else told.stalls_ns[rank].tolist()
        lane = Lane(told.host, lambda *_: next(met), slowdown, stalls_ns)
        lane.train(len(self._ends_ns(trial)))
        return lane.timeline


def _check_exact(largest: float, limit: float) -> None:
    """Whole numbers of float64 are exact so far; raises OverflowError beyond."""
    if largest > limit:
        raise OverflowError("the simulated clock is too long for arrays")
