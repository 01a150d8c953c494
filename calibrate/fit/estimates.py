"""Estimates from samples: times with their standard errors, ratios, lines.

Times are compared by their medians or by their trimmed means. The standard error of a median is
1.2533 sigma / sqrt(n), as for a normal distribution, with sigma from the median absolute deviation:
samples that follow each other closely are not independent, so it is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from calibrate.fit.solve import Floats, nonnegative
from calibrate.records.record import Measurement
from calibrate.records.rounds import Beside, Samples
from ddpsim.importers.profiles.cluster import Fitted

ZERO = Fitted(value=0.0)
_SIGMA_PER_MAD = 1.4826  # of a normal distribution
MEDIAN_ERROR = 1.2533  # its median's standard error over that of its mean
SIGNIFICANT = 2.0  # standard errors
_FAR_OFF = 2.0  # standard errors
_REWEIGHTED = 30  # times, by when the weights have settled
_LEAST_ERROR = 1e-6  # relative; samples that are all alike are not free of error


def median_time(samples_s: Sequence[float]) -> Fitted:
    """The median and its standard error, in seconds; no error of a single sample."""
    times = np.array(samples_s)
    middle = float(np.median(times))
    if len(times) == 1:
        return Fitted(value=middle)
    return Fitted(value=middle, stderr=MEDIAN_ERROR * mad_sigma(times) / math.sqrt(len(times)))


def usual_time(samples_s: Sequence[float]) -> Fitted:
    """The mean of the middle four fifths, with the median's standard error, in seconds."""
    return Fitted(value=trimmed_mean(samples_s), stderr=median_time(samples_s).stderr)


def trimmed_mean(samples_s: Sequence[float]) -> float:
    """Without the lowest and the highest tenth, and the lowest and the highest at least."""
    times, cut = np.sort(samples_s), _at_an_end(len(samples_s), 10)
    return float(times[cut : len(times) - cut].mean())


def mean_time(samples_s: Sequence[float]) -> float:
    """The mean, in seconds, where the lowest and the highest twentieth count as their neighbours.

    What comes many times in a step adds up to its mean, which a part that is rare and slow sets;
    one sample that an interruption made does not.
    """
    times, cut = np.sort(samples_s), _at_an_end(len(samples_s), 20)
    return float(np.clip(times, times[cut], times[len(times) - 1 - cut]).mean())


def _at_an_end(count: int, part: int) -> int:
    """How many of so many sorted samples are a `part`-th at one end: one of three at least."""
    return max(count // part, 1 if count > 2 else 0)


def shares_kept(alone_s: Sequence[float], beside_s: Iterable[float]) -> list[float]:
    """The shares of its usual speed alone that work has beside other work, one a sample."""
    usual_s = trimmed_mean(alone_s)
    return [usual_s / time_s for time_s in beside_s]


def averaged(figures: Sequence[Fitted]) -> Fitted:
    """Their mean, with their own errors; no error where one of them has none."""
    mean = float(np.mean([figure.value for figure in figures]))
    errors = [figure.stderr for figure in figures if figure.stderr is not None]
    if len(errors) < len(figures):
        return Fitted(value=mean)
    return Fitted(value=mean, stderr=math.hypot(*errors) / len(figures))


def pooled(figures: Iterable[Fitted]) -> Fitted:
    """Their mean; its error is their own and what their spread adds."""
    figures = list(figures)
    mean, count = averaged(figures), len(figures)
    if mean.stderr is None:
        return mean
    values = [figure.value for figure in figures]
    between = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    return Fitted(value=mean.value, stderr=math.hypot(mean.stderr, between))


def ratio(together: Measurement, alone: Measurement) -> Fitted:
    """How many times as long one usually takes as the other."""
    above, below = usual_time(together.samples_s), usual_time(alone.samples_s)
    times = above.value / below.value
    relative = _relative(above.stderr, above.value), _relative(below.stderr, below.value)
    if None in relative:
        return Fitted(value=times)
    return Fitted(value=times, stderr=times * math.hypot(*(r or 0.0 for r in relative)))


def _relative(stderr: float | None, value: float) -> float | None:
    return None if stderr is None else stderr / value


def difference(more: Measurement, less: Measurement) -> Fitted:
    """Seconds from the usual time of one to that of the other."""
    above, below = usual_time(more.samples_s), usual_time(less.samples_s)
    longer_s = above.value - below.value
    if above.stderr is None or below.stderr is None:
        return Fitted(value=longer_s)
    return Fitted(value=longer_s, stderr=math.hypot(above.stderr, below.stderr))


def shifted(figure: Fitted, by: float) -> Fitted:
    """The figure and so much more."""
    return Fitted(value=figure.value + by, stderr=figure.stderr)


def at_least(figure: Fitted, least: float) -> Fitted:
    """What runs beside other work is not faster for it: a ratio below 1 is noise."""
    return Fitted(value=max(least, figure.value), stderr=figure.stderr)


def at_most(figure: Fitted, most: float) -> Fitted:
    """Nor is a share of something above 1 but by noise."""
    return Fitted(value=min(most, figure.value), stderr=figure.stderr)


def line(x: Sequence[float], y: Sequence[Fitted]) -> tuple[Fitted, Fitted]:
    """Intercept and slope of a weighted line, both at least zero."""
    errors = np.array([error(each) for each in y])
    design = np.column_stack([np.ones(len(x)), x])
    return least_squares(design, np.array([each.value for each in y]), errors)


def least_squares(design: Floats, target: Floats, errors: Floats) -> tuple[Fitted, Fitted]:
    """Two coefficients of at least zero; points far off count less (soft_l1, in their own errors).

    Their errors are those of the points, or larger where the points lie further off.
    """
    weights = np.ones(len(target))
    for _ in range(_REWEIGHTED):
        weighted = design * (np.sqrt(weights) / errors)[:, None]
        values, off = nonnegative(weighted, target * np.sqrt(weights) / errors)
        weights = 1 / np.hypot(1, (design @ values - target) / errors / _FAR_OFF)
    free = values > 0
    scale = np.abs(weighted).max(axis=0)
    scaled = (weighted / scale)[:, free]
    spread = np.full(2, np.nan)
    if np.linalg.matrix_rank(scaled) == free.sum():
        spread[free] = np.sqrt(np.diag(np.linalg.inv(scaled.T @ scaled))) / scale[free]
    spread *= max(1.0, off / math.sqrt(max(1, len(target) - free.sum())))
    first, second = (
        Fitted(value=float(value), stderr=None if math.isnan(error) else float(error))
        for value, error in zip(values, spread, strict=True)
    )
    return first, second


def error(figure: Fitted) -> float:
    """Its standard error, above 0: what it weighs in a fit is one over this."""
    return max(figure.stderr or 0.0, _LEAST_ERROR * abs(figure.value), 1e-15)


def mad_sigma(values: Floats) -> float:
    """The standard deviation, from the median absolute deviation."""
    return float(_SIGMA_PER_MAD * np.median(np.abs(values - np.median(values))))


def repeated_sigma(groups: Iterable[Sequence[float]]) -> float | None:
    """The standard deviation of the logarithm of what was measured more than once, pooled."""
    logs = [np.log(group) for group in groups if len(group) > 1]
    if not logs:
        return None
    squares = sum(float(((log - log.mean()) ** 2).sum()) for log in logs)
    return math.sqrt(squares / sum(len(log) - 1 for log in logs))


def adding_up(medians_s: Iterable[float], whole_s: float) -> list[float]:
    """Seconds of the parts that `whole_s`, the median iteration, has: in the ratio of their own.

    Medians of parts do not add up to that of the whole: an iteration is slow now in this part, now
    in that, and they leave it out (0.4 % of an iteration on two testbeds, 2.4 at most).
    """
    medians = list(medians_s)
    times = whole_s / sum(medians)
    return [times * median_s for median_s in medians]


# --- how much more than usual layers a model suffers beside all-reduces --------------------------

_LARGEST_STDERR = 0.1  # a larger one tells nothing: a slow network hardly slows down any compute
_LEAST_LOST = 1e-3


def interference_exponent(runs: Sequence[Beside]) -> Fitted | None:
    """The power of what layers keep of their speed that a model keeps; 1: it fares as they do.

    A power, so that both keep all beside no bytes and neither less than nothing. Of several runs
    from the means of what is kept. None where it is not known to a tenth.
    """
    if not runs:
        return None
    layers = _kept([(run.layers_s, run.layers_beside_s) for run in runs])
    model = _kept([(run.backward_s, run.backward_beside_s) for run in runs])
    if layers.value > 1 - _LEAST_LOST or layers.stderr is None or model.stderr is None:
        return None
    lost = -math.log(layers.value)
    power = -math.log(model.value) / lost
    relative = model.stderr / model.value, power * layers.stderr / layers.value
    stderr = math.hypot(*relative) / lost
    return Fitted(value=power, stderr=stderr) if stderr <= _LARGEST_STDERR else None


def profile_keys(runs: Sequence[Beside]) -> dict[str, float | None]:
    """The exponent as a model profile has it; nothing where it is not known."""
    exponent = interference_exponent(runs)
    keys = ("interference_exponent", "interference_exponent_stderr")
    return dict(zip(keys, (exponent.value, exponent.stderr), strict=True)) if exponent else {}


def _kept(runs: Sequence[tuple[Samples, Samples]]) -> Fitted:
    """The mean over runs and ranks of the usual share, as a record's fit takes it."""
    shares = [
        usual_time(shares_kept(alone, beside))
        for run in runs
        for alone, beside in zip(*(zip(*samples, strict=True) for samples in run), strict=True)
    ]
    return at_most(averaged(shares), 1.0)
