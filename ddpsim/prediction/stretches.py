"""Which term, compute, host or network, could explain a measured step by itself."""

from __future__ import annotations

from collections.abc import Callable

from ddpsim.prediction.job import Job
from ddpsim.result.model import Result, Stretch

_LEAST, _MOST = 0.2, 1000.0  # factors on a term's times
_EXACT = 2e-4  # of a factor


def stretches(job: Job, result: Result, measured_s: float) -> tuple[Stretch, ...]:
    """Factors on compute, host and network, each of which alone makes the step `measured_s` long.

    Steps are simulated without noise, which multiplies the compute and adds to the other two. The
    host has a factor where it is a source of the interval.
    """
    mean_s, quiet_s = result.iteration_time_s.mean, job.step_s()
    interval = result.prediction_interval_s
    host_matters = any(s.input == "host time" for s in (interval.sources if interval else ()))

    terms = [_stretch("compute", lambda f: job.step_s(compute=f) * mean_s / quiet_s, measured_s)]
    if host_matters:
        terms.append(_stretch("host", lambda f: job.step_s(host=f) + mean_s - quiet_s, measured_s))
    if result.comm_time_s:
        terms.append(
            _stretch("network", lambda f: job.step_s(network=f) + mean_s - quiet_s, measured_s)
        )
    return tuple(terms)


def _stretch(term: str, step_s: Callable[[float], float], measured_s: float) -> Stretch:
    """The factor by false position, as a step never shortens when a term takes longer.

    Where terms wait for each other the step is piecewise linear in each: few steps are simulated.
    """
    limit = _MOST if measured_s > step_s(1) else _LEAST
    low, high = sorted((1.0, limit))
    below_s, above_s = step_s(low) - measured_s, step_s(high) - measured_s
    if not below_s <= 0 <= above_s:
        return Stretch(term, limit, step_s(limit), suffices=False)
    was_below = None
    while high > low * (1 + _EXACT) and above_s > 0:
        middle = _between(low, high, below_s, above_s)
        off_s = step_s(middle) - measured_s
        is_below = off_s < 0
        # an end that stays is counted half, lest it stays for long (the Illinois algorithm)
        half = 0.5 if is_below is was_below else 1.0
        if is_below:
            low, below_s, above_s = middle, off_s, half * above_s
        else:
            high, above_s, below_s = middle, off_s, half * below_s
        was_below = is_below
    return Stretch(term, high, step_s(high), suffices=True)


def _between(low: float, high: float, below_s: float, above_s: float) -> float:
    """The point at which a line through both ends meets the measured step, but not at an end."""
    least, most = low * (1 + _EXACT / 2), high / (1 + _EXACT / 2)
    met = low + (high - low) * below_s / (below_s - above_s)
    return min(max(met, least), most)
