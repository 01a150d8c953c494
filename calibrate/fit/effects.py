"""DDP's overheads and jitter, from the measurements of records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from calibrate.fit.estimates import (
    Floats,
    at_least,
    difference,
    line,
    mad_sigma,
    median_time,
    pooled,
    scaled,
    shifted,
)
from calibrate.fit.samples import find
from calibrate.record import Kind, Measurement, Record
from ddpsim.importers.cluster_profile import CopyIn, Fitted, Jitter, Overheads

__all__ = ["fit_jitter", "fit_overheads"]

_LEAST_ITERATIONS = 30  # of jitter, a rank


def fit_overheads(records: Sequence[Record]) -> Overheads:
    """What DDP adds a parameter, and how fast gradients are copied; None where not measured.

    Rates are those of the largest size measured. A copy reads and writes its bytes: both count. Of
    copies to buckets it is what large gradients add to a backward under DDP, less hooks and copies
    back.
    """
    hook = _hook_s(records)
    copy = _rate(records, "device_copy", "alone", passes=2)
    return Overheads(
        hook_s=hook,
        copy_bytes_per_s=copy,
        copy_in=tuple(_copies_in(records, hook, copy)) if hook and copy else (),
        compress_bytes_per_s=_rate(records, "device_cast", "compress"),
        decompress_bytes_per_s=_rate(records, "device_cast", "decompress"),
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


def _hook_s(records: Sequence[Record]) -> Fitted | None:
    small = [(m, time) for m, time in _added_by_ddp(records) if not m.size_bytes]
    if not small:
        return None
    counts, added = [float(m.parameters) for m, _ in small], [time for _, time in small]
    if len(set(counts)) > 1:
        return line(counts, added)[1]  # the rest is once a backward
    each = [scaled(time, 1 / count) for time, count in zip(added, counts, strict=True)]
    return at_least(pooled(each), 0.0)


def _copies_in(records: Sequence[Record], hook: Fitted, copy: Fitted) -> Iterator[CopyIn]:
    """Of the mean time of a byte, by the size of a gradient; where that is not told, none."""
    each: dict[int, list[Fitted]] = defaultdict(list)
    for m, added in _added_by_ddp(records):
        moved = 2 * m.size_bytes
        if moved:
            others_s = hook.value * m.parameters + moved / copy.value
            gradient_bytes = m.size_bytes // (m.parameters // 2)  # every other one is a bias
            each[gradient_bytes].append(scaled(shifted(added, -others_s), 1 / moved))
    for gradient_bytes, times in sorted(each.items()):
        byte = pooled(times)
        if byte.value > (byte.stderr or 0.0):
            yield CopyIn(gradient_bytes=gradient_bytes, bytes_per_s=_a_second(1, byte))


def _added_by_ddp(records: Sequence[Record]) -> list[tuple[Measurement, Fitted]]:
    """Each backward under DDP, and how much longer it took than without."""
    found = []
    for record in records:
        without = {(m.size_bytes, m.parameters): m for m in find(record, "ddp_hook", "without")}
        for m in find(record, "ddp_hook", "with ddp"):
            bare = without.get((m.size_bytes, m.parameters))
            if bare and m.parameters:
                found.append((m, difference(m, bare)))
    return found


def _rate(records: Sequence[Record], kind: Kind, variant: str, *, passes: int = 1) -> Fitted | None:
    """So many passes over the bytes of the largest size, a second: of the mean time of records."""
    found = [m for record in records for m in find(record, kind, variant) if m.size_bytes]
    if not found:
        return None
    largest = max(m.size_bytes for m in found)
    times = [median_time(m.samples_s) for m in found if m.size_bytes == largest]
    return _a_second(passes * largest, pooled(times))


def _a_second(count: int, time: Fitted) -> Fitted:
    rate = count / time.value
    return Fitted(value=rate, stderr=scaled(time, rate / time.value).stderr)


def _rank_sigma(medians: Floats) -> float:
    """Standard deviation; from the absolute deviations where there are enough ranks for it."""
    if len(medians) < 2:
        return 0.0
    return mad_sigma(medians) if len(medians) >= 5 else float(np.std(medians, ddof=1))


def _autocorrelation(spread: Floats, sigma: float) -> float:
    """Of consecutive iterations, with what lies beyond 3 sigma drawn in."""
    kept = np.clip(spread, -3 * sigma, 3 * sigma)
    kept = kept - kept.mean()
    power = float(np.sum(kept**2))
    return float(np.clip(np.sum(kept[1:] * kept[:-1]) / power, -1, 1)) if power > 0 else 0.0
