"""A measured step held against a prediction: is it normal, and which term could explain it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddpsim.result.model import Result
from ddpsim.units import format_duration

__all__ = ["Verdict", "judge"]


@dataclass(frozen=True)
class Verdict:
    """`difference` is (measured - predicted) / predicted; `normal`: inside the interval."""

    measured_s: float
    difference: float
    normal: bool | None
    text: str
    explanations: tuple[str, ...]


def judge(result: Result, measured_s: float) -> Verdict:
    """Compare a measured iteration time in seconds with a prediction."""
    predicted_s = result.iteration_time_s.mean
    difference = measured_s / predicted_s - 1
    interval = result.prediction_interval_s
    normal = None if interval is None else interval.low <= measured_s <= interval.high
    side = "above" if difference >= 0 else "below"
    text = f"{format_duration(measured_s)} is {abs(difference):.1%} {side} the prediction: "
    if normal is None:
        text += "without an interval nobody can say whether that is normal"
    elif normal:
        text += f"normal, inside the {interval.level:.0%} interval" if interval else ""
    else:
        text += "not normal, outside the interval; what could explain it:"
    explain = _slower if difference > 0 else _faster
    found = () if normal else tuple(explain(result, measured_s - predicted_s))
    return Verdict(measured_s, difference, normal, text, found)


def _slower(result: Result, missing_s: float) -> Iterator[str]:
    """Terms that could be longer, the ones that suffice first."""
    parts = result.breakdown_s
    compute_s = parts.forward + parts.backward_compute + parts.optimizer
    could_lose_s = result.baselines_s.no_overlap - result.iteration_time_s.mean
    if could_lose_s >= 0.5 * missing_s:
        yield (
            f"overlap: with none of its communication hidden the step would take "
            f"{format_duration(result.baselines_s.no_overlap)} (look for a host sync in the "
            "backward, or find_unused_parameters)"
        )
    if result.comm_time_s:
        factor = 1 + missing_s / result.comm_time_s
        yield (
            f"network: all-reduces {factor:.2f} x as long as predicted would do, at least "
            "(measure them with nccl-tests and set cluster.all_reduce)"
        )
    yield (
        f"compute: {missing_s / compute_s:.1%} slower than "
        f"{format_duration(compute_s)} (clocks, another batch or precision, interference; measure "
        "one device without DDP and set workload.step_time)"
    )
    yield f"data: a wait of {format_duration(missing_s)} a step for the loader (set workload.data)"
    if result.world_size > 1:
        yield f"a straggler: one rank {missing_s / compute_s:.1%} slower than the others"


def _faster(result: Result, surplus_s: float) -> Iterator[str]:
    """Terms that could be shorter."""
    parts, saved_s = result.breakdown_s, -surplus_s
    compute_s = parts.forward + parts.backward_compute + parts.optimizer
    if parts.exposed_comm:
        share = min(1.0, saved_s / parts.exposed_comm)
        enough = "" if saved_s <= parts.exposed_comm else ", which alone does not suffice"
        yield f"network: {share:.0%} less exposed communication than predicted{enough}"
    yield (
        f"compute: {saved_s / compute_s:.1%} faster than {format_duration(compute_s)} "
        "(measure one device without DDP and set workload.step_time)"
    )
