"""Mean time of a run with exponential failures and fixed costs, and the best interval.

Between two failures a renewal: with failures every M seconds, W seconds that must pass undisturbed
take (M + D) e^(R/M) (e^(W/M) - 1) on average, if each failure costs D undisturbed seconds and then
R in which it may fail again. D = 0 is Daly's equation (J. T. Daly, A higher order estimate of the
optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22, 2006).
"""

from __future__ import annotations

from math import exp, expm1, floor, inf, sqrt

from ddpsim.reliability.operation import Operation

__all__ = ["best_interval_s", "daly_interval_s", "mean_s", "young_interval_s"]

_STEPS = 60  # of Newton, which needs about five


def mean_s(run: Operation) -> float:
    """The exact mean of a run that crashes, and is replaced at once; raises ValueError for others.

    A crash while a checkpoint is still being written goes back to the one before.
    """
    others = run.notice_per_s + run.straggler_per_s
    if others or run.spares is not None or run.maintenance_every_s < inf:
        raise ValueError("only crashes with nodes that stand by have a closed form")
    work_s, segment_s, write_s = run.work_s, run.segment_s, run.write_s
    if not run.crash_per_s:
        return work_s + run.init_s
    mtbf_s = 1 / run.crash_per_s
    down_s = mtbf_s + run.detect_s + run.replace_s
    fresh_s = down_s * exp(run.init_s / mtbf_s)  # nothing to load yet
    first_s = min(segment_s + write_s, work_s)
    spent_s = down_s * expm1(run.init_s / mtbf_s) + fresh_s * expm1(first_s / mtbf_s)
    if first_s == work_s:
        return spent_s
    loaded_s = down_s * exp((run.restart_s + write_s) / mtbf_s)
    whole = floor((work_s - write_s) / segment_s)
    rest_s = work_s - write_s - whole * segment_s
    later = (whole - 1) * expm1(segment_s / mtbf_s) + expm1(rest_s / mtbf_s)
    return spent_s + loaded_s * later


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
