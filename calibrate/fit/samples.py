"""What a fit is given: all-reduce times, each with its layout and its weight.

Logs of others' benchmarks say which collectives they are of, and on which ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.files import name_as_text
from calibrate.fit.estimates import repeated_sigma
from calibrate.fit.solve import Floats
from calibrate.records.record import Measurement, Record
from ddpsim.cluster.fitted.laws import AllReduceModel, Point, collective_times_s
from ddpsim.cluster.fitted.residuals import Correction
from ddpsim.errors import DdpsimError, ImportFailedError
from ddpsim.importers.all_reduce import AllReduceLog, read_all_reduce
from ddpsim.importers.measured import Layout, Operation, OtherCollectiveError, named_layout
from ddpsim.importers.profiles.cluster import (
    LEAST_BUCKET_BYTES,
    Correlated,
    MeasuredSigma,
    MeasuredTime,
    ValidRange,
)
from ddpsim.scenario.quantity import SourceFile

_CORRELATED = 0.9
_ENOUGH = 3


class FitError(DdpsimError):
    """Measurements that no profile can be fitted to: which, and what to measure instead."""


@dataclass(frozen=True, order=True)
class Sample:
    """One measured all-reduce: `time_s` for a message of `size_bytes` on these ranks.

    `line_rate` is that of a node's link in bytes per second, None if it is not known. A sample of
    weight w counts as w samples.
    """

    nodes: int
    gpus_per_node: int
    size_bytes: int
    time_s: float
    line_rate: float | None = None
    weight: float = 1.0

    @property
    def point(self) -> Point:
        """What was measured, without the time that it took."""
        return Point(self.size_bytes, self.nodes, self.gpus_per_node, self.line_rate)


@dataclass(frozen=True)
class Fit:
    """A model, how well it fits, and what it rests on.

    `sigma` is the weighted RMS of log(predicted / measured); `correlations` pairs figures, by name,
    with the correlation of their errors (pairs that could not be told are left out).
    """

    model: AllReduceModel
    sigma: float
    valid: ValidRange
    warnings: tuple[str, ...]
    correlations: dict[tuple[str, str], float]

    @property
    def correlated(self) -> tuple[Correlated, ...]:
        """The pairs whose errors go together, the closest first: only their sum is well known."""
        strong = [
            Correlated(figures=pair, correlation=round(value, 3))
            for pair, value in self.correlations.items()
            if abs(value) >= _CORRELATED
        ]
        return tuple(sorted(strong, key=lambda pair: -abs(pair.correlation)))


def relative_residuals(model: AllReduceModel, samples: Sequence[Sample]) -> Floats:
    """log(predicted / measured) of each sample."""
    measured = np.array([sample.time_s for sample in samples])
    points = [sample.point for sample in samples]
    predicted = np.array(collective_times_s("all_reduce", model, points))
    return np.asarray(np.log(predicted / measured))


def fitted_sigma(model: AllReduceModel, samples: Sequence[Sample]) -> float:
    """The root of the residuals' weighted mean square, at DDP's sizes if there are enough."""
    usual = [sample for sample in samples if sample.size_bytes >= LEAST_BUCKET_BYTES]
    samples = usual if has_bucket_sizes(usual) else samples
    return _rms(relative_residuals(model, samples).tolist(), samples)


def has_bucket_sizes(samples: Iterable[Sample | MeasuredTime]) -> bool:
    """Whether enough of them are as large as DDP's buckets to tell how well a model fits those."""
    return sum(sample.size_bytes >= LEAST_BUCKET_BYTES for sample in samples) >= _ENOUGH


def measured(samples: Iterable[Sample]) -> tuple[MeasuredTime, ...]:
    """The samples as a profile keeps them."""
    return tuple(
        MeasuredTime(
            nodes=sample.nodes,
            gpus_per_node=sample.gpus_per_node,
            size_bytes=sample.size_bytes,
            time_s=sample.time_s,
            line_rate_bytes_per_s=sample.line_rate,
        )
        for sample in sorted(samples, key=lambda s: (s.nodes, s.gpus_per_node, s.size_bytes))
    )


def measured_sigma(model: AllReduceModel, samples: Sequence[Sample]) -> tuple[MeasuredSigma, ...]:
    """RMS of log(predicted / measured) at DDP's sizes and below, each predicted from the others.

    From all other sizes, and where the line rate lies between others, without that rate. A line
    rate with too few of DDP's sizes to tell is left out.
    """
    usual: dict[float | None, list[Sample]] = defaultdict(list)
    small: dict[float | None, list[Sample]] = defaultdict(list)
    for sample in samples:
        is_usual = sample.size_bytes >= LEAST_BUCKET_BYTES
        (usual if is_usual else small)[sample.line_rate].append(sample)
    return tuple(
        MeasuredSigma(
            line_rate_bytes_per_s=rate,
            left_out=_left_out_rms(model, here, samples),
            repeated=_repeated(here),
            small=_left_out_rms(model, small[rate], samples) if _are_enough(small[rate]) else None,
        )
        for rate, here in sorted(usual.items(), key=lambda item: item[0] or 0.0)
        if _are_enough(here)
    )


def _are_enough(samples: Sequence[Sample]) -> bool:
    return len({sample.size_bytes for sample in samples}) >= _ENOUGH


def _left_out_rms(
    model: AllReduceModel, some: Sequence[Sample], samples: Sequence[Sample]
) -> float:
    return _rms([_left_out(model, one, samples) for one in some], some)


def _rms(errors: Sequence[float], samples: Sequence[Sample]) -> float:
    weights = [sample.weight for sample in samples]
    return float(np.sqrt(np.average(np.square(errors), weights=weights)))


def _repeated(samples: Sequence[Sample]) -> float | None:
    times: dict[Point, list[float]] = defaultdict(list)
    for sample in samples:
        times[sample.point].append(sample.time_s)
    return repeated_sigma(times.values())


def _left_out(model: AllReduceModel, one: Sample, samples: Sequence[Sample]) -> float:
    layout = (one.nodes, one.gpus_per_node)
    here = [s for s in samples if (s.nodes, s.gpus_per_node) == layout]
    rates = sorted({s.line_rate for s in here if s.line_rate is not None})
    between = one.line_rate is not None and rates[0] < one.line_rate < rates[-1]
    others = [
        s
        for s in here
        if s.line_rate != one.line_rate or (not between and s.size_bytes != one.size_bytes)
    ]
    correction = Correction.of(model, measured(others), *layout)
    factor = correction.factor(model, one.size_bytes, one.line_rate)
    return float(relative_residuals(model, [one])[0]) + math.log(factor)


def valid_range(samples: Iterable[Sample]) -> ValidRange:
    """The sizes, layouts and line rates of these samples."""
    samples = list(samples)
    sizes = [sample.size_bytes for sample in samples]
    rates = {sample.line_rate for sample in samples if sample.line_rate is not None}
    return ValidRange(
        size_bytes=(min(sizes), max(sizes)),
        layouts=tuple(sorted({(sample.nodes, sample.gpus_per_node) for sample in samples})),
        line_rates_bytes_per_s=tuple(sorted(rates)),
    )


def find(record: Record, kind: str, variant: str) -> list[Measurement]:
    """A record's measurements of a kind and variant."""
    return [m for m in record.measurements if (m.kind, m.variant) == (kind, variant)]


class Logs(NamedTuple):
    """What was taken of some files; another collective's times stand where an all-reduce's do."""

    all_reduces: list[AllReduceLog]
    others: dict[Operation, list[AllReduceLog]]

    @property
    def warnings(self) -> list[str]:
        """List what the files warn of, each once."""
        logs = chain(self.all_reduces, *self.others.values())
        return [*dict.fromkeys(line for log in logs for line in log.warnings)]


def read_logs(
    paths: Sequence[Path], layouts: Sequence[Layout | None], operations: Sequence[Operation]
) -> Logs:
    """Every file must hold one of the operations; raises ImportFailedError.

    `layouts` has one for each file, None where the file is to list its ranks itself.
    """
    logs: dict[Operation, list[AllReduceLog]] = {operation: [] for operation in operations}
    for path, layout in zip(paths, layouts, strict=True):
        for operation, log in _read(path, layout, operations).items():
            logs[operation].append(log)
    all_reduces = logs.pop("all_reduce", [])
    for operation in (operation for operation, readings in logs.items() if not readings):
        names = ", ".join(map(name_as_text, paths))
        problem = f"holds no {operation}; drop --operation {operation}"
        raise ImportFailedError(names, problem)
    return Logs(all_reduces, logs)


def _read(
    path: Path, layout: Layout | None, operations: Sequence[Operation]
) -> dict[Operation, AllReduceLog]:
    """The operations that a file holds; raises ImportFailedError where there is none of them."""
    source, logs = SourceFile(name_as_text(path), path), dict[Operation, AllReduceLog]()
    refused = list[OtherCollectiveError]()
    for operation in operations:
        try:
            log = read_all_reduce(source, layout=layout, operation=operation)
        except OtherCollectiveError as error:
            refused.append(error)
            continue
        listed = log.nodes, log.gpus_per_node
        if layout and layout != listed:
            differ = f"lists {named_layout(listed)} ranks, but --layout says {named_layout(layout)}"
            mend = "drop --layout, or give it once for each log, in their order"
            raise ImportFailedError(log.source, f"{differ}; {mend}")
        logs[operation] = log
    if refused and not logs:
        raise refused[0]
    return logs
