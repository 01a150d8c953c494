"""What shapes cost on all GPUs, fitted to measured steps: `FITTED` of ddpsim.workload.zoo.gpu_time.

python -m held_out.shapes (in tools/) prints it, and each source's error; with --left-out, errors of
timm's families and of publishers whose steps set nothing. It takes minutes.

Steps of timm's models on an RTX 3090 tell of many shapes, published steps and device records of
many GPUs, and the products of device records of products alone. What each GPU reaches is found
with them, as in `held_out.efficiency`. Least squares of logarithms, in which an outlier counts
little, leaning on where the search begins.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ddpsim.scenario.device import Device, Rate
from ddpsim.workload.operators import Operator
from ddpsim.workload.zoo.gpu_time import FITTED, GpuTime, Shapes
from held_out.efficiency import LINE, Place, chip_of, features
from held_out.errors import device_bound_rows
from held_out.language_steps import language_rows
from held_out.records import RECORDED, record_of
from held_out.rows import OWN, Row, preset
from held_out.timm_steps import DEVICE, timm_steps

Array = NDArray[np.float64]
Found = tuple[Shapes, dict[Place, float], Array]  # costs, what places reach and the line
_WEIGHTS = {"timm": 0.6, "products": 0.4, "steps": 1.5}
_NOISE, _SPREAD_OF_SHAPES, _SPREAD_OF_CHIPS = 0.1, 0.3, 0.2
_SGD_BYTES = 32  # of an element in a step with momentum
_FOLDS = 8
_EVERY = 3  # of the rows that set what left-out ones are judged by, to be quick
_TURNS = 6  # of the search
# where the search begins: passes over bytes as kernels are written, other costs by judgement
_START = Shapes(
    *(1.0, 1.1, 1.2, 1.4, 1.0, 1.1, 1.6, 1.3, 3.0, 1.1),
    *(64.0, 100.0, 64.0, 128.0, 1.3, 6.0, 0.6, 1.4, 1.0, 0.6),
    *(31.0, 95.0, 4.0, 2.0, 1.1, 20.0, 5.0),
    *(1.6, 2.2, 0.09, 0.045, 0.08, 1.1, 2.0, 1.2, 1.2, 0.4, 2.5, 0.6, 0.3, 1.8),
)


@dataclass(frozen=True)
class Sample:
    """A measured step, or a product: its operators with their numbers, and what else it took.

    `group`: its family or its publisher, which is left out as a whole.
    """

    source: str
    group: str
    name: str
    device: Device
    rates: tuple[Rate, Rate]
    channels_last: bool
    casts: bool
    step_s: float
    other_s: float
    operators: tuple[tuple[Operator, int], ...]

    @cached_property
    def places(self) -> tuple[Place, Place]:
        """What its products reach, and its convolutions."""
        chip = chip_of(self.device.name)
        products, convolutions = (rate if "32" in rate else "half" for rate in self.rates)
        return Place(chip, products), Place(chip, convolutions, convolution=True)

    def seconds(self, shapes: Shapes, products: float, convolutions: float) -> float:
        """As estimated, where the device reaches such fractions."""
        rate, of_convolutions = self.rates
        update = {
            "matmul_efficiency": {rate: products},
            "convolution_efficiency": {of_convolutions: convolutions},
        }
        device = self.device.model_copy(update=update)
        pricing = GpuTime(
            device, rate, of_convolutions, self.channels_last, self.casts, shapes=shapes
        )
        floor_s = device.kernel_floor_s
        return self.other_s + sum(
            number * max(floor_s, pricing.seconds(one)) for one, number in self.operators
        )


def samples() -> list[Sample]:
    """All that tell of shapes."""
    rows = map(_of_row, (*device_bound_rows(), *language_rows()))
    return [*_of_timm(), *rows, *_of_products()]


def _of_timm() -> Iterator[Sample]:
    device = preset(DEVICE)
    for step in timm_steps():
        layout = "channels_last" if step.channels_last else "contiguous"
        moved_s = _SGD_BYTES * step.parameters / device.optimizer_bytes_per_s
        yield Sample(
            source="timm",
            group=step.family,
            name=f"{step.model} {layout}",
            device=device,
            rates=("fp16", "fp16"),
            channels_last=step.channels_last,
            casts=True,
            step_s=step.step_s,
            other_s=moved_s,
            operators=step.operators,
        )


def _of_row(row: Row) -> Sample:
    """Its optimizer is what its estimate holds beside the operators."""
    device, arithmetic = row.usual, row.arithmetic
    sample = Sample(
        source="steps",
        group=row.publisher,
        name=f"{row.model} {row.device} {row.precision} {row.batch}",
        device=device,
        rates=(arithmetic.rate, arithmetic.convolution_rate(device)),
        channels_last=row.memory_format == "channels_last",
        casts=arithmetic.casts,
        step_s=row.step_s - row.other_s,
        other_s=0.0,
        operators=row.operators,
    )
    usual = device.efficiency(arithmetic.rate)
    return replace(sample, other_s=row.device_s(device) - sample.seconds(FITTED, usual, usual))


def _of_products() -> Iterator[Sample]:
    """Products that a device record has alone."""
    for name in RECORDED:
        for measured in record_of(name).of("product"):
            m, k, n = measured.case.shape
            rate = cast("Rate", measured.case.precision)
            width = 2 if rate in ("fp16", "bf16") else 4
            read = width * (m * k + k * n)
            one = Operator("product", 1, m, n, k, 1, 1, 2 * m * n * k, read, width * m * n, width)
            yield Sample(
                source="products",
                group=OWN,
                name=f"{name} {rate} {m} x {k} x {n}",
                device=preset(name),
                rates=(rate, rate),
                channels_last=False,
                casts=False,
                step_s=measured.best_s(),
                other_s=0.0,
                operators=((one, 1),),
            )


@dataclass(frozen=True)
class _Search:
    """Logarithms of shapes' costs, the line, and each place's deviation from it."""

    rows: Sequence[Sample]

    @cached_property
    def places(self) -> list[Place]:
        """All that the rows have."""
        return sorted({place for row in self.rows for place in row.places})

    @cached_property
    def line(self) -> Array:
        """Each place's features, in the columns of its kind."""
        of_kind = np.array([features(place) for place in self.places])
        kinds = np.array([[place.convolution] for place in self.places])
        return np.hstack([of_kind * ~kinds, of_kind * kinds])

    @cached_property
    def numbers(self) -> Array:
        """The places of each row, as integers."""
        order = {place: number for number, place in enumerate(self.places)}
        return np.array([[order[place] for place in row.places] for row in self.rows])

    @cached_property
    def prior(self) -> tuple[Array, Array]:
        """Where the search begins, and how far each may go."""
        costs = np.log(_START)
        start = np.concatenate([costs, np.ravel(LINE), np.zeros(len(self.places))])
        spreads = [(_SPREAD_OF_SHAPES, len(costs)), (0.5, np.size(LINE))]
        spreads.append((_SPREAD_OF_CHIPS, len(self.places)))
        return start, np.concatenate([np.full(count, spread) for spread, count in spreads])

    def parted(self, x: Array) -> tuple[Array, Array]:
        """Costs of shapes, and what each place reaches; both logarithms."""
        costs, line, own = np.split(x, [len(FITTED), len(FITTED) + np.size(LINE)])
        return costs, self.line @ line + own

    def logs(self, costs: Array, reached: Array) -> Array:
        """Of each row's estimate over its time."""
        shapes, fractions = Shapes(*np.exp(costs).tolist()), np.exp(reached[self.numbers])
        pairs = zip(self.rows, fractions.tolist(), strict=True)
        ratios = [row.seconds(shapes, *reached) / row.step_s for row, reached in pairs]
        return np.asarray(np.log(ratios))

    def slopes(self, x: Array) -> tuple[Array, Array]:
        """The logarithms, and how each grows with what is searched."""
        costs, reached = self.parted(x)
        logs, step = self.logs(costs, reached), 1e-3
        of_costs = [
            (self.logs(costs + step * one, reached) - logs) / step for one in np.eye(len(costs))
        ]
        of_places = np.zeros((len(self.rows), len(self.places)))
        for kind in (False, True):
            moved = reached + step * np.array([place.convolution == kind for place in self.places])
            each = np.arange(len(self.rows)), self.numbers[:, int(kind)]
            of_places[each] += (self.logs(costs, moved) - logs) / step
        return logs, np.hstack([np.array(of_costs).T, of_places @ self.line, of_places])

    def found(self) -> Found:
        """What fits best; Gauss-Newton, as residuals are nearly linear in logarithms."""
        start, spread = self.prior
        weights = np.array([_WEIGHTS[row.source] for row in self.rows]) / _NOISE
        x = start.copy()
        x[: len(FITTED)] = np.log(FITTED)
        for _ in range(_TURNS):
            logs, slopes = self.slopes(x)
            far = weights / np.sqrt(1 + (logs / _NOISE) ** 2) ** 0.5  # outliers count little
            rows = np.vstack([far[:, None] * slopes, np.diag(1 / spread)])
            values = np.concatenate([-far * logs, (start - x) / spread])
            x = x + np.linalg.lstsq(rows, values, rcond=None)[0]
        costs, reached = self.parted(x)
        line = np.split(x, [len(FITTED), len(FITTED) + np.size(LINE)])[1]
        known = dict(zip(self.places, map(float, reached), strict=True))
        return Shapes(*map(float, np.exp(costs))), known, line


def _errors(rows: Sequence[Sample], found: Found) -> list[float]:
    """Estimated over measured, minus 1; of places that no row told of by the line."""
    shapes, known, line = found

    def reached(place: Place) -> float:
        of_kind = np.split(line, 2)[int(place.convolution)]
        return math.exp(known.get(place, float(features(place) @ of_kind)))

    return [row.seconds(shapes, *map(reached, row.places)) / row.step_s - 1 for row in rows]


def left_out(rows: Sequence[Sample]) -> Iterator[tuple[str, list[float]]]:
    """By source: errors of families or publishers of whose rows nothing is known."""
    for source in ("timm", "steps"):
        groups = sorted({row.group for row in rows if row.source == source})
        errors = []
        for fold in range(_FOLDS):
            out = {(source, group) for group in groups[fold::_FOLDS]}
            others = [row for row in rows if (row.source, row.group) not in out]
            if OWN in {group for _, group in out}:
                others = [row for row in others if row.group != OWN]
            judged = [row for row in rows if (row.source, row.group) in out]
            errors += _errors(judged, _Search(others[::_EVERY]).found())
        yield source, errors


def main() -> None:
    """Print the costs of shapes and errors by source, or the errors of what is left out."""
    rows = samples()
    if "--left-out" in sys.argv[1:]:
        told = left_out(rows)
    else:
        found = _Search(rows).found()
        for name, value in found[0]._asdict().items():
            print(f"    {name}={value:.3g},")
        told = (
            (source, _errors([r for r in rows if r.source == source], found)) for source in _WEIGHTS
        )
    for source, errors in told:
        sizes = [abs(error) for error in errors]
        logs = [abs(math.log1p(error)) for error in errors]
        print(
            f"{source}: {len(errors)} rows, median error {median(sizes):.1%}, bias "
            f"{median(errors):+.1%}, four in five within {np.quantile(logs, 0.8):.3f}"
        )


if __name__ == "__main__":
    main()
