"""DDP's overheads and jitter, from the measurements of records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from calibrate.fit.estimates import (
    at_least,
    difference,
    line,
    mad_sigma,
    median_time,
    pooled,
    repeated_sigma,
    shifted,
    usual_time,
)
from calibrate.fit.samples import find
from calibrate.fit.solve import Floats
from calibrate.records.record import (
    COPIES_BACK,
    COPIES_IN,
    NARROW_RANKS,
    TOGETHER,
    Kind,
    Measurement,
    Record,
)
from ddpsim.importers.profiles.cluster import CopyIn, Fitted, Jitter, NarrowProducts, Overheads
from ddpsim.units import format_bytes

_LEAST_ITERATIONS = 30  # of jitter, a rank
_COPIES: tuple[tuple[Kind, str], ...] = (
    ("device_copy", "alone"),
    ("device_cast", "compress"),
    ("device_cast", "decompress"),
)


def fit_overheads(records: Sequence[Record]) -> Overheads:
    """What DDP adds a parameter, and how fast gradients are copied; None where not measured.

    Rates are those of the largest size measured, and of all ranks at once where that was. A copy
    reads and writes its bytes: both count. Copies to buckets are as measured in a backward, or, in
    records without that, what large gradients add to it under DDP, less hooks and copies back.
    """
    hook = _hook_s(_added_by_ddp(records))
    copy = _times(records, "device_copy", "alone", passes=2)
    compress, decompress = (
        _times(records, "device_cast", how) for how in ("compress", "decompress")
    )
    copies_in = _copies_in(records)
    if not copies_in and hook and copy:
        copies_in = _inferred_copies_in(records, hook, pooled(copy))
    return Overheads(
        hook_s=hook,
        copy_back_s=_copy_back_s(records),
        copy_bytes_per_s=_rate(copy),
        copy_in=tuple(
            CopyIn(gradient_bytes=size, bytes_per_s=_a_second(pooled(times)))
            for size, times in sorted(copies_in.items())
        ),
        compress_bytes_per_s=_rate(compress),
        decompress_bytes_per_s=_rate(decompress),
        narrow_products=tuple(
            NarrowProducts(rank=rank, bytes_per_s=rate)
            for rank in NARROW_RANKS
            if (rate := _rate(_times(records, "narrow_products", f"rank {rank}", passes=3)))
        ),
        sigma=repeated_sigma(
            [time.value for time in same]
            for same in (copy, compress, decompress, *copies_in.values())
        ),
    )


def overhead_warnings(records: Sequence[Record]) -> Iterator[str]:
    """Copies and casts that a short time budget left to messages that caches hold."""
    for kind, variant in _COPIES:
        alone, together = (_largest(_find_all(records, kind, name)) for name in _names(variant))
        if 0 < together < alone:
            what = f"{kind} {variant}" if variant != "alone" else kind
            yield (
                f"{what} of all ranks at once was measured up to {format_bytes(together)} alone, "
                f"and not up to {format_bytes(alone)}: large buckets may take another time a byte; "
                "measure with a longer --time-budget-s"
            )


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
    sigma = mad_sigma(np.concatenate(spread))
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


def _hook_s(added: Sequence[tuple[Measurement, Fitted]]) -> Fitted | None:
    """The host's time of a hook, of backwards with tiny gradients alone."""
    small = [(m, time) for m, time in added if not m.size_bytes]
    if not small:
        return None
    counts, times = [float(m.parameters) for m, _ in small], [time for _, time in small]
    if len(set(counts)) > 1:
        return line(counts, times)[1]  # the rest is once a backward
    each = [time.times(1 / count) for time, count in zip(times, counts, strict=True)]
    return at_least(pooled(each), 0.0)


def _copy_back_s(records: Sequence[Record]) -> Fitted | None:
    """The time to copy back, of the most parameters: few tiny ones stay in a core's cache."""
    copies = _find_all(records, "ddp_hook", COPIES_BACK)
    most = max((m.parameters for m in copies), default=0)
    each = [usual_time(m.samples_s).times(1 / most) for m in copies if m.parameters == most > 0]
    return pooled(each) if each else None


def _copies_in(records: Sequence[Record]) -> dict[int, list[Fitted]]:
    """Each record's time of a byte, by the size of a gradient."""
    each: dict[int, list[Fitted]] = defaultdict(list)
    for m in _find_all(records, "ddp_hook", COPIES_IN):
        each[_gradient_bytes(m)].append(usual_time(m.samples_s).times(1 / (2 * m.size_bytes)))
    return each


def _inferred_copies_in(
    records: Sequence[Record], hook: Fitted, byte: Fitted
) -> dict[int, list[Fitted]]:
    """Copies in by what DDP adds to a backward; a size that tells nothing is left out."""
    each: dict[int, list[Fitted]] = defaultdict(list)
    for m, added in _added_by_ddp(records):
        moved = 2 * m.size_bytes
        if moved:
            others_s = hook.value * m.parameters + moved * byte.value
            each[_gradient_bytes(m)].append(shifted(added, -others_s).times(1 / moved))
    means = {size: pooled(times) for size, times in each.items()}
    return {size: [mean] for size, mean in means.items() if mean.value > (mean.stderr or 0.0)}


def _gradient_bytes(m: Measurement) -> int:
    """The bytes of each weight; every other parameter is a bias."""
    return m.size_bytes // (m.parameters // 2)


def _added_by_ddp(records: Sequence[Record]) -> list[tuple[Measurement, Fitted]]:
    """Each backward under DDP, and how much longer it took than without."""
    pairs = []
    for record in records:
        without = {(m.size_bytes, m.parameters): m for m in find(record, "ddp_hook", "without")}
        for m in find(record, "ddp_hook", "with ddp"):
            bare = without.get((m.size_bytes, m.parameters))
            if bare and m.parameters:
                pairs.append((m, difference(m, bare)))
    return pairs


def _find_all(records: Sequence[Record], kind: Kind, variant: str) -> list[Measurement]:
    return [m for record in records for m in find(record, kind, variant)]


def _names(variant: str) -> tuple[str, str]:
    """The names of a variant by each rank itself, and by all at once."""
    return variant, TOGETHER if variant == "alone" else f"{variant} {TOGETHER}"


def _largest(measurements: Sequence[Measurement]) -> int:
    return max((m.size_bytes for m in measurements), default=0)


def _times(records: Sequence[Record], kind: Kind, variant: str, *, passes: int = 1) -> list[Fitted]:
    """Each record's time of a byte, of the largest size; so many passes over its bytes."""
    by_itself, together = _names(variant)
    measurements = _find_all(records, kind, together) or _find_all(records, kind, by_itself)
    largest = _largest(measurements)
    return [
        median_time(m.samples_s).times(1 / (passes * largest))
        for m in measurements
        if m.size_bytes == largest > 0
    ]


def _rate(times: Sequence[Fitted]) -> Fitted | None:
    return _a_second(pooled(times)) if times else None


def _a_second(time: Fitted) -> Fitted:
    rate = 1 / time.value
    return Fitted(value=rate, stderr=time.times(rate**2).stderr)


def _rank_sigma(medians: Floats) -> float:
    """Standard deviation; from the absolute deviations where there are enough ranks for it."""
    if len(medians) < 2:
        return 0.0
    return mad_sigma(medians) if len(medians) >= 5 else float(np.std(medians, ddof=1))


def _autocorrelation(spread: Floats, sigma: float) -> float:
    """The correlation of consecutive iterations, with what lies beyond 3 sigma drawn in."""
    kept = np.clip(spread, -3 * sigma, 3 * sigma)
    kept = kept - kept.mean()
    power = float(np.sum(kept**2))
    return float(np.clip(np.sum(kept[1:] * kept[:-1]) / power, -1, 1)) if power > 0 else 0.0
