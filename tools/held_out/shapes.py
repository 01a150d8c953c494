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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ddpsim.scenario.device import Device, Rate
from ddpsim.workload.operators import Operator
from ddpsim.workload.zoo.gpu_time import FITTED, GpuTime, Shapes
from held_out.efficiency import LINE, Place, chip_of, lines
from held_out.errors import device_bound_rows
from held_out.language_steps import language_rows
from held_out.records import RECORDED, record_of
from held_out.rows import OWN, Row, preset
from held_out.timm_steps import DEVICE, timm_steps

Array = NDArray[np.float64]
Found = tuple[Shapes, Array]  # costs, and logarithms of what places reach
_WEIGHTS = {"timm": 0.6, "products": 0.4, "steps": 1.5}
_NOISE, _SPREAD_OF_SHAPES, _SPREAD_OF_CHIPS = 0.1, 0.3, 0.2
_SGD_BYTES = 32  # of an element in a step with momentum
_FOLDS = 8
_TURNS = 12  # of the search
# where the search begins: passes over bytes as kernels are written, other costs by judgement
_START = Shapes(
    *(1.0, 1.1, 1.2, 1.4, 1.0, 1.1, 1.6, 1.3, 3.0, 1.1),
    *(64.0, 100.0, 64.0, 128.0, 1.3, 6.0, 0.6, 1.4, 2.6, 1.0, 0.6),
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
        return lines(self.places)

    @cached_property
    def numbers(self) -> Array:
        """The places of each row, as integers."""
        order = {place: number for number, place in enumerate(self.places)}
        return np.array([[order[place] for place in row.places] for row in self.rows])

    @cached_property
    def prior(self) -> tuple[Array, Array]:
        """Where the search begins, and how far each may go."""
        costs = np.log(_START)
        start = np.concatenate([costs, LINE, np.zeros(len(self.places))])
        spreads = [(_SPREAD_OF_SHAPES, len(costs)), (0.5, len(LINE))]
        spreads.append((_SPREAD_OF_CHIPS, len(self.places)))
        return start, np.concatenate([np.full(count, spread) for spread, count in spreads])

    def parted(self, x: Array) -> tuple[Array, Array]:
        """Costs of shapes, and what each place reaches; both logarithms."""
        costs, line, own = np.split(x, [len(FITTED), len(FITTED) + len(LINE)])
        return costs, self.line @ line + own

    def logs(self, costs: Array, reached: Array) -> Array:
        """Of each row's estimate over its time."""
        shapes, fractions = Shapes(*np.exp(costs).tolist()), np.exp(reached[self.numbers])
        pairs = zip(self.rows, fractions.tolist(), strict=True)
        ratios = [row.seconds(shapes, *reached) / row.step_s for row, reached in pairs]
        return np.asarray(np.log(ratios))

    @cached_property
    def slopes(self) -> Array:
        """How the logarithms grow with what is searched, at the costs that are in use.

        Nearly the same everywhere. Where the costs move far, put them in use and run it again.
        """
        costs, reached = self.parted(self.begun)
        logs, step = self.logs(costs, reached), 1e-3
        of_costs = [
            (self.logs(costs + step * one, reached) - logs) / step for one in np.eye(len(costs))
        ]
        of_places = np.zeros((len(self.rows), len(self.places)))
        for kind in (False, True):
            moved = reached + step * np.array([place.convolution == kind for place in self.places])
            each = np.arange(len(self.rows)), self.numbers[:, int(kind)]
            of_places[each] += (self.logs(costs, moved) - logs) / step
        return np.hstack([np.array(of_costs).T, of_places @ self.line, of_places])

    @cached_property
    def begun(self) -> Array:
        """Costs that are in use, and of places what is known beforehand."""
        return np.concatenate([np.log(FITTED), self.prior[0][len(FITTED) :]])

    def found(self, without: Collection[tuple[str, str]] = ()) -> Found:
        """What fits best all rows but some groups', named by source and group.

        Gauss-Newton, as residuals are nearly linear in logarithms.
        """
        start, spread = self.prior
        kept = np.array([(row.source, row.group) not in without for row in self.rows])
        weights = np.array([_WEIGHTS[row.source] for row in self.rows]) * kept / _NOISE
        x = self.begun
        for _ in range(_TURNS):
            logs = self.logs(*self.parted(x))
            far = weights / np.sqrt(1 + (logs / _NOISE) ** 2) ** 0.5  # outliers count little
            rows = np.vstack([far[:, None] * self.slopes, np.diag(1 / spread)])
            values = np.concatenate([-far * logs, (start - x) / spread])
            x = x + np.linalg.lstsq(rows, values, rcond=None)[0]
        costs, reached = self.parted(x)
        return Shapes(*map(float, np.exp(costs))), reached

    def errors(self, found: Found) -> Iterator[tuple[Sample, float]]:
        """Each row's estimate over its time, minus 1."""
        logs = self.logs(np.log(found[0]), found[1])
        yield from zip(self.rows, np.expm1(logs).tolist(), strict=True)


def left_out(search: _Search) -> Iterator[tuple[str, list[float]]]:
    """By source and layout: errors of families or publishers of whose rows nothing is known."""
    for source in ("timm", "steps"):
        groups = sorted({row.group for row in search.rows if row.source == source})
        errors: dict[str, list[float]] = {}
        for fold in range(_FOLDS):
            out = set(groups[fold::_FOLDS])
            found = search.found({(kind, group) for kind in (source, "products") for group in out})
            for row, error in search.errors(found):
                if row.source == source and row.group in out:
                    errors.setdefault(_told(row), []).append(error)
        yield from sorted(errors.items())


def _told(row: Sample) -> str:
    """What a line of the errors is of."""
    if row.source == "timm":
        return "timm, channels last" if row.channels_last else "timm, contiguous"
    return "language models" if row.group == "llm-foundry" else "steps"


def main() -> None:
    """Print the costs of shapes and errors by source, or the errors of what is left out."""
    search = _Search(samples())
    if "--left-out" in sys.argv[1:]:
        told = dict(left_out(search))
    else:
        found = search.found()
        for name, value in found[0]._asdict().items():
            print(f"    {name}={value:.3g},")
        told = {source: [] for source in _WEIGHTS}
        for row, error in search.errors(found):
            told[row.source].append(error)
    for source, errors in told.items():
        sizes = [abs(error) for error in errors]
        logs = [abs(math.log1p(error)) for error in errors]
        print(
            f"{source}: {len(errors)} rows, median error {median(sizes):.1%}, bias "
            f"{median(errors):+.1%}, four in five within {np.quantile(logs, 0.8):.3f}"
        )


if __name__ == "__main__":
    main()
