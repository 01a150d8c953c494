"""Which term, compute, host or network, could explain a measured step by itself."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from ddpsim.prediction.job import Job
from ddpsim.result.model import Result, Stretch

__all__ = ["stretches"]

_LEAST, _MOST = 0.2, 1000.0  # factors on a term's times
_HALVINGS = 15


def stretches(job: Job, result: Result, measured_s: float) -> tuple[Stretch, ...]:
    """How many times as long compute, host or network, each alone, takes in a step of `measured_s`.

    The step is simulated without noise, which multiplies the compute and adds to the rest. The host
    is one of them where its doubt is in the interval.
    """
    mean_s, quiet_s = result.iteration_time_s.mean, job.step_s()
    interval = result.prediction_interval_s
    matters = any(source.input == "host time" for source in (interval.sources if interval else ()))

    found = [_stretch("compute", lambda f: job.step_s(compute=f) * mean_s / quiet_s, measured_s)]
    if matters:
        found.append(_stretch("host", lambda f: job.step_s(host=f) + mean_s - quiet_s, measured_s))
    if result.comm_time_s:
        found.append(
            _stretch("network", lambda f: job.step_s(network=f) + mean_s - quiet_s, measured_s)
        )
    return tuple(found)


def _stretch(term: str, step_s: Callable[[float], float], measured_s: float) -> Stretch:
    """The factor by bisection, as a step never shortens when a term takes longer."""
    limit = _MOST if measured_s > step_s(1) else _LEAST
    low, high = sorted((1.0, limit))
    if not step_s(low) <= measured_s <= step_s(high):
        return Stretch(term, limit, step_s(limit), suffices=False)
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        low, high = (middle, high) if step_s(middle) < measured_s else (low, middle)
    return Stretch(term, high, step_s(high), suffices=True)
