"""A measured step held against a prediction: is it normal, and what could explain it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpsim.result.diagnosis import WORTH_SAYING, Cause
from ddpsim.result.model import Result, Stretch
from ddpsim.units import format_duration, format_number, format_percent

_MOST = 4  # causes in words
_MANY_TIMES = 20  # beyond which a percentage is hard to read


@dataclass(frozen=True)
class Verdict:
    """`difference` is (measured - predicted) / predicted; `normal`: inside the interval.

    `causes` are what could explain it, the likeliest first, `explanations` the likely ones in
    words. `stretches`: how many times as long one term alone would have to take.
    """

    measured_s: float
    difference: float
    normal: bool | None
    text: str
    stretches: tuple[Stretch, ...]
    explanations: tuple[str, ...]
    causes: tuple[Cause, ...] = ()


def is_normal(result: Result, measured_s: float) -> bool | None:
    """Whether a measured iteration time lies in the interval; None without an interval."""
    interval = result.prediction_interval_s
    return None if interval is None else interval.low <= measured_s <= interval.high


def verdict(
    result: Result,
    measured_s: float,
    stretches: Sequence[Stretch] = (),
    causes: Sequence[Cause] = (),
) -> Verdict:
    """Compare a measured iteration time in seconds with a prediction."""
    predicted_s = result.iteration_time_s.mean
    difference = measured_s / predicted_s - 1
    interval, normal = result.prediction_interval_s, is_normal(result, measured_s)
    text = f"{format_duration(measured_s)} is {_compared(measured_s, predicted_s)}: "
    if interval is None:
        text += "without an interval nobody can say whether that is normal"
    elif normal:
        text += f"normal, inside the {interval.level:.0%} interval"
    else:
        text += "not normal, outside the interval"
    likely = [each for each in causes if each.probability >= WORTH_SAYING][:_MOST]
    said = tuple(f"{each.probability:.0%} {each.text}" for each in likely)
    return Verdict(measured_s, difference, normal, text, tuple(stretches), said, tuple(causes))


def _compared(measured_s: float, predicted_s: float) -> str:
    """`12.3% above the prediction`; far from it, how many times the prediction."""
    times = measured_s / predicted_s
    if times < 1:
        return f"{format_percent(1 - times)} below the prediction"
    if times < _MANY_TIMES:
        return f"{format_percent(times - 1)} above the prediction"
    return f"{format_number(times)} times the prediction (look at its unit)"
