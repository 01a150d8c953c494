"""gloo's all-reduce: the figures of its segmented ring, from measured times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

import numpy as np

from calibrate.fit.estimates import (
    ZERO,
    at_least,
    difference,
    error,
    least_squares,
    mean_time,
    pooled,
)
from calibrate.fit.samples import (
    Fit,
    FitError,
    Sample,
    find,
    fitted_sigma,
    valid_range,
)
from calibrate.fit.solve import Floats, Solution, polish, robust_cost, solve
from calibrate.records.record import RESTED, Measurement, Record
from ddpsim.cluster.fitted.gloo import Columns, gloo_parts
from ddpsim.importers.profiles.cluster import LEAST_BUCKET_BYTES, NO_LIMIT, Fitted, GlooRing
from ddpsim.units import format_duration

_SLOWEST_HALF, _UNSEEN = 1e7, 1e12  # bytes a second: of additions, from and to where it is sought
_GRID = 50
_SMALL_BYTES = 32_768
_STALLED = 2.0  # mean over median; 1.1 where each rank has cores enough (our testbeds)
LEAST_SIZES = 5  # of messages: as many as there are figures

_NAMES = ("queue", "segment", "reduce rate", "burst", "wire bytes per byte")
_QUEUE, _SEGMENT, _REDUCE, _BURST, _WIRE = range(5)
_SCALE = (1e-4, 1e-4, 1e-9, 1e5)  # s, s, s per byte, bytes; that of the wire follows below
_STARTS = (
    (1e-4, 1e-4, 2e-10, 0.0),
    (1e-4, 5e-4, 1e-9, 1e5),
    (1e-3, 1e-4, 1e-9, 1e6),
    (5e-4, 5e-5, 2e-10, 3e4),
)


@dataclass(frozen=True)
class _Wire:
    """Bounds of the wire's figure: it is searched beyond 1, if the line rate is stated.

    Without one it is searched in the fastest rate that was seen, up to what no host carries.
    """

    line_rate: float
    is_stated: bool

    @property
    def least(self) -> float:
        return 1.0 if self.is_stated else self.line_rate / NO_LIMIT

    @property
    def scale(self) -> float:
        return 0.05 if self.is_stated else 1.0


def fit_gloo(samples: Sequence[Sample]) -> Fit:
    """gloo's figures; raises FitError where sizes are too few, or line rates known for some only.

    Without line rates (ranks of one host) the payload's rate is fitted in the line rate's place,
    and wire_bytes_per_byte is 1.
    """
    samples = sorted(samples, key=lambda s: (s.point[:3], s.line_rate or 0.0, s.time_s))
    _check(samples)
    stated = max((s.line_rate for s in samples if s.line_rate is not None), default=None)
    wire = _Wire(stated or _fastest_payload_rate(samples), is_stated=stated is not None)
    solution = _solved(samples, wire)
    model = GlooRing.model_validate(_described(solution, wire).model_dump())
    return Fit(
        model=model,
        sigma=fitted_sigma(model, samples),
        valid=valid_range(samples),
        warnings=tuple(_warnings(solution, samples, wire)),
        correlations=_correlations(solution),
    )


def fit_half(model: GlooRing, samples: Sequence[Sample]) -> Fitted | None:
    """The rate at which float16 is added, from its all-reduces and the other figures of the law.

    None where nothing was measured, or the additions never show.
    """
    from scipy.optimize import minimize_scalar  # noqa: PLC0415 -- most of a second to import

    if not samples:
        return None
    columns = Columns.of([sample.point for sample in samples])
    measured_s = np.array([sample.time_s for sample in samples])

    def cost(log_rate: float) -> float:
        rate = Fitted(value=math.exp(log_rate))
        slowed = model.model_copy(update={"reduce_bytes_per_s": rate})
        times_s = gloo_parts("all_reduce", slowed, columns).whole_s
        return robust_cost(np.log(times_s / measured_s))

    ceiling = math.log(model.reduce_bytes_per_s.value)
    # a rate of which nothing shows costs what any faster one costs: first the grid, then the figure
    grid = np.linspace(math.log(_SLOWEST_HALF), min(ceiling, math.log(_UNSEEN)), _GRID).tolist()
    best = min(grid, key=cost)
    step = grid[1] - grid[0]
    bounds = best - step, min(ceiling, best + step)
    log_rate = float(minimize_scalar(cost, bounds=bounds, method="bounded").x)
    return Fitted(value=math.exp(log_rate)) if cost(log_rate) < 0.99 * cost(ceiling) else None


def fit_rested(records: Sequence[Record]) -> tuple[Fitted, Fitted]:
    """Bytes that pass at once after a pause, and the seconds that getting going takes; at least 0.

    What an all-reduce after a pause takes less than others is a line in what a byte takes on the
    wire. At one line rate the two cannot be told apart: all is bytes. None without a line rate.
    """
    saved = [
        (rate, difference(usual, rested))
        for record in records
        for rested, usual in _rested(record)
        if (rate := record.layout.line_rate_bytes_per_s)
    ]
    if not saved:
        return ZERO, ZERO
    per_byte_s = np.array([1 / rate for rate, _ in saved])
    if len(set(per_byte_s)) == 1:
        return at_least(pooled([time.times(rate) for rate, time in saved]), 0.0), ZERO
    return least_squares(
        np.column_stack([per_byte_s, -np.ones(len(saved))]),
        np.array([time.value for _, time in saved]),
        np.array([error(time) for _, time in saved]),
    )


def _rested(record: Record) -> Iterator[tuple[Measurement, Measurement]]:
    """All-reduces over nodes after a pause, each with those that the law was fitted to."""
    usual = {m.size_bytes: m for m in find(record, "all_reduce", "alone") if m.nodes > 1}
    for rested in find(record, "all_reduce", RESTED):
        if rested.nodes > 1 and rested.size_bytes in usual:
            yield rested, usual[rested.size_bytes]


def stall_warnings(records: Sequence[Record], sources: Sequence[str]) -> Iterator[str]:
    """What is told of records in which gloo's small messages often take much longer than most do.

    gloo's loop thread tries a connection's lock and, where it fails, asks the kernel again at once
    (tcp/pair.cc, handleEvents). Where it took its core from the thread that holds the lock, it goes
    on until the scheduler's next tick.
    """
    for source, record in zip(sources, records, strict=True):
        small = [m for m in find(record, "all_reduce", "alone") if m.size_bytes <= _SMALL_BYTES]
        if record.environment.backend != "gloo" or not small:
            continue
        usual_s = fmean(median(m.samples_s) for m in small)
        mean_s = fmean(mean_time(m.samples_s) for m in small)
        if mean_s > _STALLED * usual_s:
            yield (
                f"{source}: small all-reduces usually take {format_duration(usual_s)}, and "
                f"{format_duration(mean_s)} on average, as gloo's threads wait for each other on "
                "one core: give each rank one core more, or expect many small messages at once to "
                "take longer than predicted"
            )


def _solved(samples: Sequence[Sample], wire: _Wire) -> Solution:
    columns = Columns.of([sample.point for sample in samples])
    measured_s = np.array([sample.time_s for sample in samples])
    # what is smaller than any of DDP's buckets scatters widely
    weights = np.sqrt([s.weight * min(1.0, s.size_bytes / LEAST_BUCKET_BYTES) for s in samples])

    def residuals(values: Floats) -> Floats:
        predicted_s = gloo_parts("all_reduce", _model(values, wire), columns).whole_s
        return np.asarray(weights * np.log(predicted_s / measured_s))

    scale = np.array([*_SCALE, wire.scale])
    starts = [np.array([*start, wire.scale]) for start in _STARTS]
    optional = [_BURST, _REDUCE]
    return polish(residuals, solve(residuals, starts, scale, optional), scale, optional)


def _check(samples: Sequence[Sample]) -> None:
    sizes = {sample.size_bytes for sample in samples}
    if len(sizes) < LEAST_SIZES:
        raise FitError(
            f"message sizes are too few ({len(sizes)}): measure {LEAST_SIZES} or more, from a few "
            "kB to the largest bucket"
        )
    if len({sample.line_rate is None for sample in samples}) > 1:
        raise FitError(
            "the links' line rate is known for some of the measurements only: state it for all "
            "records, or fit them one by one"
        )


def _fastest_payload_rate(samples: Sequence[Sample]) -> float:
    """Bytes that a rank sends a second, at the best: where the search for the rate starts."""
    return max(2 * (1 - 1 / (s.nodes * s.gpus_per_node)) * s.size_bytes / s.time_s for s in samples)


def _model(values: Floats, wire: _Wire, stderr: Floats | None = None) -> GlooRing:
    errors = np.full(len(values), np.nan) if stderr is None else stderr.copy()
    figures = values.copy()
    figures[_WIRE] += wire.least
    figures[_REDUCE] = 1 / values[_REDUCE]
    errors[_REDUCE] *= figures[_REDUCE] ** 2
    fitted = [
        Fitted.model_construct(value=float(figure), stderr=None if np.isnan(e) else float(e))
        for figure, e in zip(figures, errors, strict=True)
    ]
    return GlooRing.model_construct(
        queue_s=fitted[_QUEUE],
        segment_s=fitted[_SEGMENT],
        reduce_bytes_per_s=fitted[_REDUCE],
        burst_bytes=fitted[_BURST],
        wire_bytes_per_byte=fitted[_WIRE],
        line_rate_bytes_per_s=wire.line_rate,
    )


def _described(solution: Solution, wire: _Wire) -> GlooRing:
    """The figures, zero where they are at their bound; without a line rate in bytes of payload."""
    values = np.where(solution.at_bound, 0.0, solution.values)
    values[_REDUCE] = solution.values[_REDUCE]  # a rate divides by it
    if wire.is_stated:
        return _model(values, wire, solution.stderr)
    stretch = solution.values[_WIRE] + wire.least
    scale = np.array([1.0, 1.0, 1.0, 1 / stretch, 1 / stretch])
    stderr = solution.stderr * scale
    values *= scale
    values[_WIRE], stderr[_WIRE] = 0.0, np.nan
    return _model(values, _Wire(wire.line_rate / stretch, is_stated=True), stderr)


def _warnings(solution: Solution, samples: Sequence[Sample], wire: _Wire) -> Iterator[str]:
    if not wire.is_stated and solution.at_bound[_WIRE]:
        yield (
            "not enough data for the line rate: the messages are too short to tell of it; measure "
            "larger ones (--time-budget-s), or state --line-rate"
        )
    elif not wire.is_stated:
        yield (
            "the links' line rate is not known: the payload's rate was fitted in its place, and "
            "holds for this machine alone"
        )
    elif len({sample.line_rate for sample in samples}) == 1:
        yield (
            "one line rate: what the processor adds to a byte cannot be separated from what the "
            "wire does; measure at another rate before another rate is predicted"
        )
    for i, name in enumerate(_NAMES):
        if solution.at_bound[i] and i == _REDUCE:
            yield "not enough data for reduce rate: adding is always hidden behind the wire"
        elif (
            solution.at_bound[i] and i != _BURST and (i != _WIRE or wire.is_stated)
        ):  # without a shaper there is no burst
            yield f"{name} is at its bound"
        elif not solution.at_bound[i] and np.isnan(solution.stderr[i]):
            yield f"not enough data for {name}"


def _correlations(solution: Solution) -> dict[tuple[str, str], float]:
    return {
        (_NAMES[i], _NAMES[j]): float(solution.correlation[i, j])
        for i, j in combinations(range(len(_NAMES)), 2)
        if not np.isnan(solution.correlation[i, j])
    }
