"""A measured step held against a prediction: is it normal, and which term could explain it?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log

from ddpsim.result.model import Result, Stretch
from ddpsim.units import format_duration

__all__ = ["Verdict", "is_normal", "verdict"]


@dataclass(frozen=True)
class Verdict:
    """`difference` is (measured - predicted) / predicted; `normal`: inside the interval.

    `stretches` are the terms that were tried as explanations, `explanations` all in words.
    """

    measured_s: float
    difference: float
    normal: bool | None
    text: str
    stretches: tuple[Stretch, ...]
    explanations: tuple[str, ...]


def is_normal(result: Result, measured_s: float) -> bool | None:
    """Whether a measured iteration time lies in the interval; None without an interval."""
    interval = result.prediction_interval_s
    return None if interval is None else interval.low <= measured_s <= interval.high


def verdict(result: Result, measured_s: float, stretches: Sequence[Stretch] = ()) -> Verdict:
    """Compare a measured iteration time in seconds with a prediction."""
    predicted_s = result.iteration_time_s.mean
    difference = measured_s / predicted_s - 1
    interval, normal = result.prediction_interval_s, is_normal(result, measured_s)
    side = "above" if difference >= 0 else "below"
    text = f"{format_duration(measured_s)} is {abs(difference):.1%} {side} the prediction: "
    if interval is None:
        text += "without an interval nobody can say whether that is normal"
    elif normal:
        text += f"normal, inside the {interval.level:.0%} interval"
    else:
        text += "not normal, outside the interval; what could explain it:"
    found = () if normal else tuple(_explanations(result, measured_s - predicted_s, stretches))
    return Verdict(measured_s, difference, normal, text, tuple(stretches), found)


def _explanations(result: Result, missing_s: float, stretches: Sequence[Stretch]) -> Iterator[str]:
    """What suffices on its own first, then what does not; `missing_s` < 0: measured is faster."""
    if 0 < missing_s <= result.baselines_s.no_overlap - result.iteration_time_s.mean:
        yield (
            f"overlap: with none of its communication hidden the step would take "
            f"{format_duration(result.baselines_s.no_overlap)} (look for a host sync in the "
            "backward, or find_unused_parameters)"
        )
    for stretch in sorted(stretches, key=lambda stretch: abs(log(stretch.factor))):
        if stretch.suffices:
            yield _sufficient(result, stretch)
            if stretch.term == "compute" and missing_s > 0 and result.world_size > 1:
                yield _straggler(result, stretch.factor)
    if missing_s > 0:
        wait = format_duration(missing_s)
        yield f"data: a wait of {wait} more a step for the loader (set workload.data)"
    for stretch in stretches:
        if not stretch.suffices:
            yield (
                f"not {stretch.term} alone: {stretch.factor:g} x as long, it would make the step "
                f"{format_duration(stretch.step_s)}"
            )


def _straggler(result: Result, factor: float) -> str:
    """One is enough; where ranks differ already, it is the slowest that takes longer."""
    if any(straggler.kind == "rank" for straggler in result.stragglers):
        return f"a straggler: the slowest rank computing {factor:.2f} x as long as it does here"
    return f"a straggler: one rank that computes {factor:.2f} x as long as the others"


def _sufficient(result: Result, stretch: Stretch) -> str:
    known = {entry.input for entry in result.provenance if entry.trust != "assumed"}
    would = f"{stretch.factor:.2f} x as long as predicted would do"
    if stretch.term == "network":
        measure = "measure them with nccl-tests and set cluster.all_reduce"
        return f"network: all-reduces {would}" + (
            "" if "all-reduce time" in known else f" ({measure})"
        )
    if stretch.term == "host":
        return (
            f"host: launching operators taking {would} (another CPU, or one that does other work; "
            "measure one device without DDP and set workload.step_time)"
        )
    parts = result.breakdown_s
    compute = format_duration(parts.forward + parts.backward_compute + parts.optimizer)
    measure = "; measure one device without DDP and set workload.step_time"
    is_measured = known & {"workload.step_time", "workload.profile", "workload.trace"}
    return (
        f"compute: {compute} taking {would} (clocks, another batch or precision, interference"
        f"{'' if is_measured else measure})"
    )
