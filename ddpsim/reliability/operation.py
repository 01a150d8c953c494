"""What a long training meets, in numbers: its work, checkpoints, failures and restarts.

Daly 2006: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
Future Generation Computer Systems 22.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, inf, isinf, sqrt

from ddpsim.errors import InputError
from ddpsim.units import format_long_duration

# where the time of a run goes; together they are all of it
CAUSES = (
    "steps",
    "checkpoints",
    "lost_work",
    "slow_steps",
    "detection",
    "waiting_for_nodes",
    "restarts",
    "maintenance",
)
_MOST_MISSING = 64
_HOPELESS = 50.0  # times as long as without failures: nobody waits for that

_STEPS = 60  # of Newton, which needs about five


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One training of days, in seconds and in events per second of the whole job.

    `work_s`: all steps with their checkpoints, undisturbed. `segment_s`: the part of it from one
    checkpoint to the next, of which `checkpoint_s` is the checkpoint's; infinite without any.
    `write_s`: how long after its segment a checkpoint can be loaded. A crash is noticed after
    `detect_s`, a node replaced after `replace_s`, and the processes take `init_s` and `load_s`.
    Crashes hit a restart too. `spares`: nodes that stand by, each broken one back after `repair_s`;
    None: there is always one. `is_elastic`: fewer of the `nodes` go on where none is left.
    A notice (spot) leaves time to save if `saves_on_notice`. A straggler makes steps
    `straggler_slowdown` times as long until it is found and its node replaced.
    """

    work_s: float
    segment_s: float = inf
    checkpoint_s: float = 0.0
    write_s: float = 0.0
    crash_per_s: float = 0.0
    detect_s: float = 0.0
    replace_s: float = 0.0
    init_s: float = 0.0
    load_s: float = 0.0
    nodes: int = 1
    spares: int | None = None
    repair_s: float = 0.0
    is_elastic: bool = False
    notice_per_s: float = 0.0
    saves_on_notice: bool = False
    notice_replace_s: float = 0.0
    straggler_per_s: float = 0.0
    straggler_slowdown: float = 1.0
    straggler_found_s: float = 0.0
    maintenance_every_s: float = inf
    maintenance_s: float = 0.0

    @property
    def event_per_s(self) -> float:
        """Crashes, notices and stragglers."""
        return self.crash_per_s + self.notice_per_s + self.straggler_per_s

    @property
    def failure_per_s(self) -> float:
        """What costs work: crashes, and notices too short to save."""
        return self.crash_per_s + (0.0 if self.saves_on_notice else self.notice_per_s)

    @property
    def checkpointed_s(self) -> float:
        """The part of the work that is checkpoints."""
        return self.checkpoint_s * self.work_s / self.segment_s

    @property
    def most_missing(self) -> int:
        """Nodes that an elastic job goes on without: half of them, 64 at most."""
        return min(self.nodes // 2, _MOST_MISSING) if self.is_elastic else 0

    @property
    def save_s(self) -> float:
        """A checkpoint out of turn, until it can be loaded."""
        return 0.0 if isinf(self.segment_s) else self.checkpoint_s + self.write_s

    @property
    def restart_s(self) -> float:
        """From the nodes being there to the next step."""
        return self.init_s + self.load_s

    def stretched(self, factor: float) -> Operation:
        """Make steps `factor` times as long, with checkpoints after as many steps as before."""
        steps_s = self.work_s - self.checkpointed_s
        segment_s = self.segment_s
        if not isinf(segment_s):
            segment_s += (segment_s - self.checkpoint_s) * (factor - 1)
        return replace(self, work_s=self.work_s + steps_s * (factor - 1), segment_s=segment_s)

    def with_interval(self, steps_s: float) -> Operation:
        """The run with a checkpoint after so many seconds of steps."""
        segment_s = steps_s + self.checkpoint_s
        work_s = (self.work_s - self.checkpointed_s) * segment_s / steps_s
        return replace(self, work_s=work_s, segment_s=segment_s)

    def check(self) -> None:
        """Raise InputError where it makes no progress; says what would let it."""
        if self.checkpoint_s >= self.segment_s:
            raise InputError("checkpoint_write", "takes longer than the steps between two of them")
        if self.write_s > self.segment_s:
            took, each = map(format_long_duration, (self.write_s, self.segment_s))
            raise InputError(
                "checkpoint_write.every",
                f"a checkpoint takes {took} to write, and the next one comes after {each}; write "
                f"one after {took} or later, or over {self.write_s / self.segment_s:.3g} times the "
                "bandwidth",
            )
        stops_per_s = self.crash_per_s + self.notice_per_s
        if not stops_per_s:
            return
        mtbf_s, restart_s = 1 / stops_per_s, self.restart_s
        stops = f"the job is stopped every {format_long_duration(mtbf_s)}"
        if restart_s >= mtbf_s:
            raise InputError(
                "mtbf",
                f"{stops}, and a restart takes {format_long_duration(restart_s)} (processes and "
                f"checkpoint): it makes no progress; it needs an MTBF {2 * restart_s / mtbf_s:.3g} "
                f"times as long, or a restart of {format_long_duration(mtbf_s / 2)}",
            )
        if self.failure_per_s:
            self._check_interval(1 / self.failure_per_s)

    def _check_interval(self, mtbf_s: float) -> None:
        between_s = min(self.segment_s, self.work_s) + self.write_s
        if exp(min(between_s / mtbf_s, 700.0)) > _HOPELESS:
            often, between = map(format_long_duration, (mtbf_s, between_s))
            raise InputError(
                "checkpoint_write.every",
                f"the job fails every {often}, and {between} pass until a checkpoint can be "
                f"loaded: it makes no progress; write one after {often} or sooner",
            )


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """The first-order best interval (J. W. Young, Communications of the ACM 17 (9), 1974)."""
    return sqrt(2 * save_s * mtbf_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Daly 2006, equation 37: the best interval to a higher order."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young_interval_s(save_s, mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_s


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """The seconds of steps between checkpoints at which the mean is least, without a series.

    Where it is least, 1 - x = e^(-x - save/M) for x = interval/M. Newton's steps from above.
    """
    if not save_s:
        return 0.0
    ratio = save_s / mtbf_s
    x = min(1.0, sqrt(2 * ratio))
    for _ in range(_STEPS):
        shrunk = exp(-x - ratio)
        step = (1 - x - shrunk) / (1 - shrunk)
        x += step
        if abs(step) < 1e-14 * x:
            break
    return x * mtbf_s
