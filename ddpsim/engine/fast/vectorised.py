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
import numpy.typing as npt

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.cluster.network import NO_TRAFFIC
from ddpsim.cluster.transfers import Transfer
from ddpsim.engine.fast.clocks import Clocks
from ddpsim.engine.fast.collectives import Collective, InFlight, Remembered, Waits
from ddpsim.engine.fast.repeats import Repeats
from ddpsim.engine.fast.scalar import PER_MILLE, Lane
from ddpsim.engine.fast.slow_periods import SlowPeriods
from ddpsim.engine.fast.trials import (
    Trial,
    TrialStep,
    TrialWork,
    column,
    distinct,
    drawn,
    of_lanes,
    sent,
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
_KEPT = 2**19  # figures
_LATEST_NS = 2**51  # 26 days: beyond, a sum might not be exact in float64
_LARGEST = 2**53  # nor a product


class Lanes:
    """Trials whose hosts have the same instructions, on `ranks` ranks each, or on those that stand
    for all.

    `counts`: how long ranks wait is asked, and not only when they end. `remembers`: of which ranks
    `timeline` may be asked; None: of all. `train` raises OverflowError where the clock would no
    longer be exact.
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
        self._least = np.zeros((len(trials), 1))  # no stream is behind this
        self._slow = SlowPeriods(self._compute.size)
        self._waited = np.zeros(len(trials), dtype=bool)
        self._past = Repeats(trials, self._clocks)
        self._now, self._steady = Waits.none(self._shape), Waits.none(self._shape)
        self._all_comm_ns = np.zeros(self._shape)
        self._step_ends_ns: list[Ticks] = []
        self._collectives = Remembered(remembers)
        self._done_ns: list[Ticks] = []  # of the iteration's collectives
        self._recorded: dict[int, Ticks] = {}
        self._repeats = 0
        self._counts = counts
        self._known_transfers: dict[int, Sequence[Transfer]] = {}
        self.warmup = self._program.warmup
        self.settled: list[bool] = []  # by trial: all steady steps are alike

    def train(self) -> None:
        """Until the first step that all after it are exactly like, in all trials, or else all.

        Where only a few steps come again and again, until they do, and the steady ones.
        """
        for _ in self.trained():
            pass

    def trained(self) -> Iterator[Ticks]:
        """The same, step by step: after each one how long it has taken, [trials, ranks]."""
        iterations, steps = self._program.iterations, self._trials[0].host.steps
        self.warmup, past = steps - iterations, self._past
        # once freed, glibc keeps as much for later arrays, and fetches no new pages
        np.empty(_KEPT)
        number = -1
        while (number := number + 1) < steps:
            begun = self._compute.copy()
            self._iterate(number)
            lengths = self._compute - begun
            alike = [False] * len(self._trials)
            if not self.varies:
                alike = past.alike(number, lengths, self._compute, self._waited)
                if number + 1 < self.warmup and past.come_again(number):
                    self.warmup, steps = number + 1, number + 1 + iterations
            if all(alike):
                self.warmup, self._repeats = number, iterations - 1
                self._steady = Waits.none(self._shape)  # of steps that are warm-up now
            if number == self.warmup:
                self.settled = alike
            times = 1 + self._repeats
            self._all_comm_ns += times * self._now.comm_ns
            if number >= self.warmup:
                self._steady.add(self._now, times)
            yield lengths
            if all(alike):
                return

    def steps_from(self, number: int, start_ns: Ticks | float) -> Iterator[Ticks]:
        """How long steps like this one take, each [trials, ranks]; ranks begin the first then.

        No host waits for its device, or for batches.
        """
        self._clocks.begin(number)
        self._compute[:] = start_ns
        self._least[:] = self._compute.min(axis=1, keepdims=True)
        self._comm.begin(float(self._compute.min()))
        while True:
            begun = self._compute.copy()
            self._iterate(number)
            yield self._compute - begun

    @property
    def cycle_ns(self) -> float | None:
        """The mean of the steps that come again and again; None where none are known to."""
        return self._past.cycle_ns

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
        if (self._least >= launched_ns).all():
            return
        behind = self._compute < launched_ns
        self._waited |= behind.any(axis=1)
        self._come_to(np.maximum(self._compute, launched_ns))

    def _come_to(self, now_ns: Ticks) -> None:
        self._compute = now_ns
        self._least = now_ns.min(axis=1, keepdims=True)
        self._slow.pass_over(now_ns.reshape(-1))

    def _compute_works(self, work: TrialWork, factors: Ticks | None) -> None:
        """As many lanes at once as a cache holds with all of these works."""
        last_ns = self._clocks.at_ns + work.offset_ns[-1]
        waits = not (self._least >= last_ns).all()
        if waits:
            self._least = self._compute.min(axis=1, keepdims=True)
            waits = not (self._least >= last_ns).all()
        now_ns, ends_ns = self._compute.reshape(-1), np.empty(self._compute.size)
        if self._sums and not waits:
            self._compute = self._lasting_ends(self._sums, work.device_ns[:, 0, 0].copy())
            return
        waited = np.zeros(self._compute.size, dtype=bool)
        many = max(_FIT // work.device_ns.shape[0], self._compute.size // _PIECES, 1)
        for begin in range(0, len(now_ns), many):
            lanes = np.arange(begin, min(begin + many, len(now_ns)))
            trials = lanes // self._shape[1]
            works_ns = of_lanes(work.device_ns, trials)
            if factors is not None:
                works_ns = works_ns * factors.reshape(-1, 1)[lanes]
                np.rint(works_ns, out=works_ns)
            elif len(works_ns) < len(lanes):
                works_ns = np.broadcast_to(works_ns, (len(lanes), works_ns.shape[1]))
            ends_ns[lanes], waited[lanes] = self._slow.work_ends(
                lanes, now_ns[lanes], works_ns, self._launched_ns(work, lanes) if waits else None
            )
        self._compute = ends_ns.reshape(self._shape)
        if waits:
            self._waited |= waited.reshape(self._shape).any(axis=1)

    def _lasting_ends(self, sums: WorkSums, works_ns: Ticks) -> Ticks:
        """The same of ranks that differ for good, whose works were all launched before."""
        now_ns = self._compute.reshape(-1)
        ends_ns = self._slow.ends_by_sums(sums, works_ns, now_ns)
        left = np.flatnonzero(ends_ns < 0)
        for begin in range(0, len(left), _LASTING):
            lanes = left[begin : begin + _LASTING]
            ends_ns[lanes] = self._slow.lasting_ends(sums, lanes, now_ns[lanes], works_ns)
        return ends_ns.reshape(self._shape)

    def _launched_ns(self, work: TrialWork, lanes: npt.NDArray[np.int64]) -> Ticks:
        """When works were launched, [lanes, works], or [1, works] where all were together."""
        trials, at_ns = lanes // self._shape[1], self._clocks.at_ns
        offsets_ns = of_lanes(work.offset_ns, trials)
        if isinstance(at_ns, float):
            return at_ns + offsets_ns
        each_ns = at_ns[trials] if at_ns.shape[1] == 1 else at_ns.reshape(-1, 1)[lanes]
        return each_ns + offsets_ns

    def _communicate(self, step: TrialStep, launched_ns: Ticks | float) -> None:
        launches = [launch for launch in step.each if isinstance(launch, Communicate)]
        group = launches[0].group
        joined = self._comm.joined(group, self._ready(launches, launched_ns))
        transfers = self._transfers(step)
        ends = self._comm.ends_ns(group, transfers, joined)
        _check_exact(ends.max(), _LATEST_NS)
        self._slow_while(transfers, joined, ends)
        self._comm.ended(group, ends)
        after_ns = column([launch.after_ns for launch in launches])
        self._done_ns.append(ends + after_ns if np.any(after_ns) else ends)
        if self._counts or self._collectives.remembers:
            collective = Collective(transfers, self._comm.met(group, joined), ends)
            self._collectives.add(collective)
        if self._counts:
            self._comm.launched(group, collective, joined)
            self._now.comm_ns += ends - joined

    def _slow_while(self, transfers: Sequence[Transfer], joined: Ticks, ends: Ticks) -> None:
        """Compute is slowed down under a collective."""
        slowdowns = [transfer.interference.compute for transfer in transfers]
        if any(slowdown != 1 for slowdown in slowdowns) and (ends > joined).any():
            factors = np.array([float(PER_MILLE * s) for s in slowdowns])
            _check_exact(self._longest_ns * factors.max(), _LARGEST)
            each = np.repeat(factors, self._compute.size // len(factors))
            self._slow.append(joined.reshape(-1), ends.reshape(-1), each)

    def _ready(self, launches: Sequence[Communicate], launched_ns: Ticks | float) -> Ticks:
        """When the data of a collective is there."""
        before = column([launch.before_ns for launch in launches])
        follows, waits_for = launches[0].follows, launches[0].waits_for
        recorded = None if waits_for is None else self._recorded[waits_for]
        if follows is not None:
            recorded = self._done_ns[follows]
        if recorded is not None:
            self._waited |= (recorded < launched_ns).any(axis=1)
            return np.maximum(recorded, launched_ns) + before
        self._launch(launched_ns)
        return self._compute + before

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
        of_kinds = zip(*(host.scripts for host in hosts), strict=True)
        return tuple(side_by_side(scripts, most) for scripts in of_kinds)

    def _transfers(self, step: TrialStep) -> Sequence[Transfer]:
        """Of each trial, or the one that all have."""
        known = self._known_transfers.get(id(step))
        if known is None:
            transfers = sent(self._trials, step)
            known = transfers[:1] if all(t == transfers[0] for t in transfers) else transfers
            self._known_transfers[id(step)] = known
        return known

    def slowest_rank(self, trial: int) -> int:
        """The rank that ends the last iteration last; of equals the longest in collectives."""
        last = self._step_ends_ns[-1][trial]
        tied = np.flatnonzero(last == last.max())
        return int(tied[np.argmax(self._all_comm_ns[trial, tied])])

    def steady_step(self, trial: int) -> SteadyStep:
        """What becomes of the slowest rank in the steady steps."""
        rank, warmup = self.slowest_rank(trial), self.warmup
        ends = [float(ends_ns[trial, rank]) for ends_ns in self._step_ends_ns]
        lengths = [int(end - start) for start, end in pairwise(ends)][warmup - 1 :]
        lengths += lengths[-1:] * self._repeats
        waits = (self._steady.comm_ns, self._steady.exposed_ns)
        return SteadyStep(lengths, *(int(wait_ns[trial, rank]) for wait_ns in waits))

    def timeline(self, trial: int, observed: Sequence[int] | None = None) -> Timeline:
        """The lanes of some ranks (None: of the slowest), and what is known of all."""
        slowest = self.slowest_rank(trial)
        observed = [slowest] if observed is None else observed
        wanted = sorted({slowest, *observed})
        told = self if self._collectives.is_whole else self._again(wanted)
        ranks = {rank: told.lanes_of(trial, rank) for rank in wanted}
        late = [int(late_ns) for late_ns in self._steady.late_ns[trial]]
        return Timeline(ranks, self.warmup, slowest, late, self._repeats)

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
        lane.train(len(self._step_ends_ns))
        return lane.timeline


def _check_exact(largest: float, limit: float) -> None:
    """Whole numbers of float64 are exact so far; raises OverflowError beyond."""
    if largest > limit:
        raise OverflowError("the simulated clock is too long for arrays")
