"""Interference, DDP's overheads and jitter, from the measurements of records.

Times are compared by their medians. The standard error of a median is 1.2533 sigma / sqrt(n), as
for a normal distribution, with sigma from the median absolute deviation: samples that follow each
other closely are not independent, so it is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from calibrate.fit.solve import nonnegative
from calibrate.record import Measurement, Record
from ddpsim.cluster.fitted import AllReduceModel, FittedCost
from ddpsim.importers.cluster_profile import Fitted, Interference, Jitter, Overheads
from ddpsim.units import NS_PER_S

__all__ = ["fit_interference", "fit_jitter", "fit_overheads", "median_time", "trimmed_mean"]

Floats = npt.NDArray[np.float64]
_SIGMA_PER_MAD = 1.4826  # of a normal distribution
_MEDIAN_ERROR = 1.2533  # its median's standard error over that of its mean
_LEAST_ERROR = 1e-6  # relative; samples that are all alike are not free of error
_LEAST_ITERATIONS = 30  # of jitter, a rank
_PIECES = ("gemm", "memory")
_LAW_ERROR = 0.02
_ALIKE = 1.5  # squares closer than this are of one message, measured beside several works
_HALF_MEASURED = (
    "not enough data for interference: measure compute and all_reduce, alone and together"
)


def median_time(samples_s: Sequence[float]) -> Fitted:
    """The median and its standard error, in seconds; no error of a single sample."""
    times = np.array(samples_s)
    middle = float(np.median(times))
    if len(times) == 1:
        return Fitted(value=middle)
    return Fitted(value=middle, stderr=_MEDIAN_ERROR * _mad_sigma(times) / math.sqrt(len(times)))


def usual_time(samples_s: Sequence[float]) -> Fitted:
    """The mean of the middle four fifths, with the median's standard error, in seconds."""
    return Fitted(value=trimmed_mean(samples_s), stderr=median_time(samples_s).stderr)


def trimmed_mean(samples_s: Sequence[float]) -> float:
    """Without the lowest and the highest tenth, and the lowest and the highest at least."""
    times, cut = np.sort(samples_s), max(len(samples_s) // 10, 1 if len(samples_s) > 2 else 0)
    return float(times[cut : len(times) - cut].mean())


def fit_interference(
    records: Sequence[Record], model: AllReduceModel
) -> tuple[Interference | None, tuple[str, ...]]:
    """How much compute and communication lengthen each other, and warnings; None: not measured.

    `model` is the law of the records' all-reduces, which tells how long their bytes take the link.

    The figures are means over the pieces of compute (matrix products, and memory traffic), whose
    difference counts as error. With NCCL the slowdowns are constants. With gloo that of compute
    grows with the bytes that a rank sends a second, as the same processor moves them (a line over
    records of different line rates, or through 1 if there is one line rate only); a transfer is
    delayed once, as its threads wait for the processor, and slowed down with the square of those
    bytes; and two in flight crowd each other in proportion to them.
    """
    records = _merged(records)
    pieces = [piece for record in records for piece in _pieces(record)]
    comm = [piece for record in records for piece in _comm_pieces(record)]
    if not pieces and not comm:
        return None, ()
    if not pieces or not comm:
        return None, (_HALF_MEASURED,)
    warnings = []
    constant, per_byte = _at_least(_pooled([piece.ratio for piece in pieces]), 1.0), _ZERO
    half = [piece for record in records for piece in _pieces(record, " half")]
    comm_constant = _at_least(_pooled([piece.ratio for piece in comm]), 1.0)
    queue = _Queue(Fitted(value=1.0), _ZERO, _ZERO, _ZERO)
    is_gloo = records[0].environment.backend == "gloo"
    if is_gloo:
        constant, per_byte = _by_rate(pieces)
        comm_constant, queue = Fitted(value=1.0), _queue(records, comm, model)
        if len({piece.line_rate for piece in pieces}) == 1:
            warnings.append(
                "one line rate: all of gloo's interference is taken as proportional to the bytes "
                "sent a second"
            )
    interference = Interference(
        compute_slowdown=constant,
        compute_slowdown_s_per_byte=per_byte,
        half_compute_slowdown_s_per_byte=_by_rate(half)[1] if half and is_gloo else None,
        comm_slowdown=comm_constant,
        comm_slowdown_s2_per_byte2=queue.squared,
        comm_delay_s=queue.delay,
        idle_link_use=queue.idle_link_use,
        crowded_slowdown_s_per_byte=queue.crowded,
    )
    return interference, tuple(warnings)


def fit_overheads(records: Sequence[Record]) -> Overheads:
    """What DDP adds a parameter, and how fast gradients are copied; None where not measured.

    A copy reads and writes its bytes: the rate counts both, of the largest size measured.
    """
    return Overheads(hook_s=_hook_s(records), copy_bytes_per_s=_copy_rate(records))


def fit_jitter(records: Sequence[Record]) -> tuple[Jitter | None, tuple[str, ...]]:
    """Spread of a fixed piece of compute, and warnings; None: not measured.

    Of the longest series, in logarithms: about each rank's median, and between these medians.
    """
    series = [
        m.samples_by_rank_s
        for record in records
        for m in record.measurements
        if m.kind == "jitter" and m.samples_by_rank_s
    ]
    if not series:
        return None, ()
    ranks = [np.log(times) for times in max(series, key=lambda s: min(len(times) for times in s))]
    shortest = min(len(times) for times in ranks)
    if shortest < 2:
        return None, ("not enough data for jitter: 1 iteration",)
    spread = [times - np.median(times) for times in ranks]
    sigma = _mad_sigma(np.concatenate(spread))
    jitter = Jitter(
        iteration_sigma=sigma,
        rank_sigma=_rank_sigma(np.array([np.median(times) for times in ranks])),
        autocorrelation=float(np.mean([_autocorrelation(each, sigma) for each in spread])),
    )
    if shortest < _LEAST_ITERATIONS:
        return jitter, (
            f"not enough data for jitter: {shortest} iterations, wanted {_LEAST_ITERATIONS}",
        )
    return jitter, ()


def _merged(records: Sequence[Record]) -> list[Record]:
    """One record a layout and line rate: what is compared may have been measured in two."""
    merged: list[Record] = []
    for record in records:
        for i, other in enumerate(merged):
            if other.layout == record.layout:
                both = (*other.measurements, *record.measurements)
                merged[i] = other.model_copy(update={"measurements": both})
                break
        else:
            merged.append(record)
    return merged


@dataclass(frozen=True)
class _Piece:
    """How much longer compute or a transfer takes, at so many bytes sent a second."""

    alone_s: float
    ratio: Fitted
    longer: Fitted
    sent_bytes_per_s: float
    line_rate: float | None
    layout: tuple[int, int]
    size_bytes: int


def _pieces(record: Record, dtype: str = "") -> Iterator[_Piece]:
    """Compute under all-reduces of a dtype, as variants end, over compute alone."""
    for name in _PIECES:
        for together in _find(record, "compute", f"{name} with all_reduce{dtype}"):
            alone = _of_size(_find(record, "compute", f"{name} alone{dtype}"), together)
            sending = _of_size(_find(record, "all_reduce", f"with {name}{dtype}"), together)
            sending += _of_size(_find(record, "all_reduce", f"alone{dtype}"), together)
            if alone and sending:
                yield _piece(record, together, alone[0], sending[0])


def _comm_pieces(record: Record) -> Iterator[_Piece]:
    """All-reduces of a queue under compute over one that is alone, or else over the queue's."""
    for name in _PIECES:
        for together in _find(record, "all_reduce", f"with {name}"):
            alone = _one_by_one(record, name, together)
            alone += _of_size(_find(record, "all_reduce", f"beside {name}"), together)
            if alone:
                yield _piece(record, together, alone[0], alone[0])


def _one_by_one(record: Record, name: str, like: Measurement) -> list[Measurement]:
    """All-reduces of this size that were alone; those that took turns with the others first."""
    found = _find(record, "all_reduce", f"in turn with {name}")
    return _of_size([*found, *_find(record, "all_reduce", "alone")], like)


def _piece(record: Record, together: Measurement, alone: Measurement, sent: Measurement) -> _Piece:
    ranks = sent.nodes * sent.gpus_per_node
    sent_bytes = 2 * (ranks - 1) / ranks * sent.size_bytes
    return _Piece(
        alone_s=trimmed_mean(alone.samples_s),
        ratio=_ratio(together, alone),
        longer=_difference(together, alone),
        sent_bytes_per_s=sent_bytes / trimmed_mean(sent.samples_s),
        line_rate=record.layout.line_rate_bytes_per_s,
        layout=(sent.nodes, sent.gpus_per_node),
        size_bytes=sent.size_bytes,
    )


def _of_size(found: Sequence[Measurement], like: Measurement) -> list[Measurement]:
    ranks = (like.nodes, like.gpus_per_node)
    return [
        m for m in found if m.size_bytes == like.size_bytes and (m.nodes, m.gpus_per_node) == ranks
    ]


def _find(record: Record, kind: str, variant: str) -> list[Measurement]:
    return [m for m in record.measurements if (m.kind, m.variant) == (kind, variant)]


def _by_rate(pieces: Sequence[_Piece]) -> tuple[Fitted, Fitted]:
    """Slowdown without any traffic, and more of it a byte sent a second."""
    rates = [piece.sent_bytes_per_s for piece in pieces]
    above = [_shifted(piece.ratio, -1.0) for piece in pieces]
    if len({piece.line_rate for piece in pieces}) > 1:
        constant, per_byte = _line(rates, above)
        return _shifted(constant, 1.0), per_byte
    slopes = [_scaled(ratio, 1 / rate) for ratio, rate in zip(above, rates, strict=True)]
    return Fitted(value=1.0), _at_least(_pooled(slopes), 0.0)


@dataclass(frozen=True)
class _Queue:
    """Transfers two at a time: what one uses of the other's idle link, and what lengthens both."""

    idle_link_use: Fitted
    crowded: Fitted
    delay: Fitted
    squared: Fitted


def _queue(
    records: Sequence[Record], under_compute: Sequence[_Piece], model: AllReduceModel
) -> _Queue:
    """A queue against one by one, then a queue under compute against the queue so modelled.

    A transfer of T seconds that leaves the link idle for I of them takes, in a queue,
    T - use I + crowded r T, for r bytes sent a second; under compute delay + squared r^2 of that
    longer. One message at one rate tells delay and squared not apart: all is then the latter.
    """
    alone = [
        _piece(record, queued, one[0], one[0])
        for record, name in product(records, _PIECES)
        for queued in _find(record, "all_reduce", f"beside {name}")
        if (one := _one_by_one(record, name, queued))
    ]
    use, crowded = _use_and_crowded(alone, model) if alone else (Fitted(value=1.0), _ZERO)

    def queued_s(piece: _Piece) -> float:
        crowd = 1 + crowded.value * piece.sent_bytes_per_s
        return piece.alone_s * crowd - use.value * _idle_s(piece, model)

    squares = [piece.sent_bytes_per_s**2 * queued_s(piece) for piece in under_compute]
    longer = [
        _of_a_law(_shifted(piece.longer, piece.alone_s - queued_s(piece)), piece)
        for piece in under_compute
    ]
    if max(squares) < _ALIKE * min(squares):
        each = [_scaled(time, 1 / square) for time, square in zip(longer, squares, strict=True)]
        return _Queue(use, crowded, _ZERO, _at_least(_pooled(each), 0.0))
    return _Queue(use, crowded, *_line(squares, longer))


def _use_and_crowded(pieces: Sequence[_Piece], model: AllReduceModel) -> tuple[Fitted, Fitted]:
    """From -longer = use x idle - crowded r T, by weighted least squares, both at least zero."""
    idle = np.array([_idle_s(piece, model) for piece in pieces])
    rates = np.array([piece.sent_bytes_per_s * piece.alone_s for piece in pieces])
    target = np.array([-piece.longer.value for piece in pieces])
    errors = np.array([_error(_of_a_law(piece.longer, piece)) for piece in pieces])
    use, crowded = _least_squares(np.column_stack([idle, -rates]), target, errors)
    return Fitted(value=min(1.0, use.value), stderr=use.stderr), crowded


def _of_a_law(time: Fitted, piece: _Piece) -> Fitted:
    """With the error that a simple law leaves of a transfer, else the longest decide all."""
    own_s = time.stderr or 0.0
    return Fitted(value=time.value, stderr=math.hypot(own_s, _LAW_ERROR * piece.alone_s))


def _idle_s(piece: _Piece, model: AllReduceModel) -> float:
    """Seconds of a transfer in which its bytes are not on the link."""
    law = FittedCost(model, *piece.layout, piece.line_rate)
    on_link_s = law.transfer("all_reduce", piece.size_bytes).transfer_ns / NS_PER_S
    return max(0.0, piece.alone_s - on_link_s)


def _hook_s(records: Sequence[Record]) -> Fitted | None:
    counts, added = [], []
    for record in records:
        without = {m.parameters: m for m in _find(record, "ddp_hook", "without")}
        for with_ddp in _find(record, "ddp_hook", "with ddp"):
            if with_ddp.parameters in without and with_ddp.parameters:
                counts.append(float(with_ddp.parameters))
                added.append(_difference(with_ddp, without[with_ddp.parameters]))
    if not counts:
        return None
    if len(set(counts)) > 1:
        return _line(counts, added)[1]  # the rest is once a backward
    each = [_scaled(time, 1 / count) for time, count in zip(added, counts, strict=True)]
    return _at_least(_pooled(each), 0.0)


def _copy_rate(records: Sequence[Record]) -> Fitted | None:
    copies = [
        m
        for record in records
        for m in record.measurements
        if m.kind == "device_copy" and m.size_bytes
    ]
    if not copies:
        return None
    largest = max(copy.size_bytes for copy in copies)
    rates = []
    for copy in copies:
        if copy.size_bytes == largest:
            time = median_time(copy.samples_s)
            rate = 2 * largest / time.value
            rates.append(Fitted(value=rate, stderr=_scaled(time, rate / time.value).stderr))
    return _pooled(rates)


def _line(x: Sequence[float], y: Sequence[Fitted]) -> tuple[Fitted, Fitted]:
    """Intercept and slope of a weighted line, both at least zero."""
    errors = np.array([_error(each) for each in y])
    design = np.column_stack([np.ones(len(x)), x])
    return _least_squares(design, np.array([each.value for each in y]), errors)


def _least_squares(design: Floats, target: Floats, errors: Floats) -> tuple[Fitted, Fitted]:
    """Two coefficients of at least zero.

    Their errors are those of the points, or larger where the points lie further off.
    """
    weighted = design / errors[:, None]
    values, off = nonnegative(weighted, target / errors)
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


def _error(figure: Fitted) -> float:
    return max(figure.stderr or 0.0, _LEAST_ERROR * abs(figure.value), 1e-15)


def _ratio(together: Measurement, alone: Measurement) -> Fitted:
    above, below = usual_time(together.samples_s), usual_time(alone.samples_s)
    ratio = above.value / below.value
    relative = _relative(above.stderr, above.value), _relative(below.stderr, below.value)
    if None in relative:
        return Fitted(value=ratio)
    return Fitted(value=ratio, stderr=ratio * math.hypot(*(r or 0.0 for r in relative)))


def _relative(stderr: float | None, value: float) -> float | None:
    return None if stderr is None else stderr / value


def _difference(more: Measurement, less: Measurement) -> Fitted:
    above, below = usual_time(more.samples_s), usual_time(less.samples_s)
    difference = above.value - below.value
    if above.stderr is None or below.stderr is None:
        return Fitted(value=difference)
    return Fitted(value=difference, stderr=math.hypot(above.stderr, below.stderr))


def _pooled(figures: Iterable[Fitted]) -> Fitted:
    """Their mean; its error is their own and what their spread adds."""
    figures = list(figures)
    count = len(figures)
    values = [figure.value for figure in figures]
    mean = float(np.mean(values))
    own = [figure.stderr for figure in figures if figure.stderr is not None]
    if len(own) < count:
        return Fitted(value=mean)
    between = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    return Fitted(value=mean, stderr=math.hypot(math.hypot(*own) / count, between))


def _scaled(figure: Fitted, factor: float) -> Fitted:
    stderr = None if figure.stderr is None else figure.stderr * factor
    return Fitted(value=figure.value * factor, stderr=stderr)


def _shifted(figure: Fitted, by: float) -> Fitted:
    return Fitted(value=figure.value + by, stderr=figure.stderr)


def _at_least(figure: Fitted, least: float) -> Fitted:
    """What runs beside other work is not faster for it: a ratio below 1 is noise."""
    return Fitted(value=max(least, figure.value), stderr=figure.stderr)


_ZERO = Fitted(value=0.0)


def _mad_sigma(values: Floats) -> float:
    return float(_SIGMA_PER_MAD * np.median(np.abs(values - np.median(values))))


def _rank_sigma(medians: Floats) -> float:
    """Standard deviation; from the absolute deviations where there are enough ranks for it."""
    if len(medians) < 2:
        return 0.0
    return _mad_sigma(medians) if len(medians) >= 5 else float(np.std(medians, ddof=1))


def _autocorrelation(spread: Floats, sigma: float) -> float:
    """Of consecutive iterations, with what lies beyond 3 sigma drawn in."""
    kept = np.clip(spread, -3 * sigma, 3 * sigma)
    kept = kept - kept.mean()
    power = float(np.sum(kept**2))
    return float(np.clip(np.sum(kept[1:] * kept[:-1]) / power, -1, 1)) if power > 0 else 0.0
