"""A record's steps as the estimate has them, and as a function of what a device reaches.

Each part of an estimate is inverse to a fraction, or grows with the shortest kernel. What each part
is follows from slopes at a device; near it, the sum is the estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from calibrate.fit.solve import Floats
from calibrate.records.device_record import DeviceMeasurement, DeviceRecord
from ddpsim.scenario.catalog import model_table
from ddpsim.scenario.device import Device, Rate
from ddpsim.scenario.workload import Workload
from ddpsim.workload.arithmetic import arithmetic_of
from ddpsim.workload.model import Model, Work, total_s
from ddpsim.workload.roofline import zoo_model

_STEP = 0.02  # of a figure, for a slope


@dataclass(frozen=True)
class MeasuredStep:
    """A zoo model's step as it was measured, and how the estimate is asked for it."""

    measurement: DeviceMeasurement
    on_gpu: bool

    @property
    def model(self) -> str:
        """Its name in the zoo."""
        return self.measurement.case.model

    @cached_property
    def workload(self) -> Workload:
        """The step as a scenario would say it.

        On a CPU torch fuses no attention that drops out (sdp_utils_cpp.cpp), which is BERT's and
        GPT-2's: it is written out.
        """
        case, table = self.measurement.case, model_table(self.measurement.case.model)
        drops = case.model.startswith(("bert", "gpt2"))
        options = {
            "memory_format": "channels_last" if case.channels_last else None,
            "attention": "eager" if drops and not self.on_gpu else None,
            **({table["size"]["key"]: case.size} if table["size"] else {}),
        }
        return Workload.model_validate(
            {"model": case.model, "batch_per_rank": case.batch, "precision": case.precision}
            | {key: value for key, value in options.items() if value is not None}
        )

    def estimated(self, device: Device) -> Model:
        """The estimate on such a device."""
        return zoo_model(model_table(self.model), self.workload, device)

    def rate(self, device: Device) -> Rate:
        """The type of its matrix products."""
        return arithmetic_of(self.workload.precision, device).rate

    @property
    def parts_s(self) -> tuple[float, float, float]:
        """Seconds of forward, backward and optimizer as measured."""
        forward, backward, optimizer = (
            self.measurement.best_s(part) for part in ("forward", "backward", "optimizer")
        )
        return forward, backward, optimizer

    def predicted_s(self, device: Device) -> tuple[float, float, float]:
        """The step as estimated: each part takes its device or its host, whichever is longer."""
        forward, backward, optimizer = map(max, self.device_and_host_s(device))
        return forward, backward, optimizer

    def device_and_host_s(self, device: Device) -> tuple[tuple[float, float], ...]:
        """What forward, backward and optimizer need of each, as estimated."""
        model = self.estimated(device)
        parts = (model.forward, model.backward, (model.optimizer,))
        return tuple((total_s(works), host_s(works, model.launch_s)) for works in parts)

    def operators(self, device: Device) -> tuple[int, int]:
        """Operators and kernels of forward and backward."""
        free = device.model_copy(update={"operator_s": 1.0, "kind": "gpu"})
        model = self.estimated(free)
        works = (*model.forward, *model.backward)
        return round(sum(work.host_s for work in works)), sum(work.kernels for work in works)


def host_s(works: Sequence[Work], launch_s: float) -> float:
    """What the host takes for work, its launches included."""
    return sum(work.kernels * launch_s + work.host_s for work in works)


def measured_steps(record: DeviceRecord) -> tuple[MeasuredStep, ...]:
    """The steps of a record."""
    return tuple(MeasuredStep(m, record.is_gpu) for m in record.of("step"))


def halves(steps: Sequence[MeasuredStep]) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    """Both ways to fit on one half of the models and to predict the other.

    Every second one of each family, in the order of their worth.
    """
    names = sorted({step.model for step in steps}, key=_family_order(steps))
    even, odd = frozenset(names[::2]), frozenset(names[1::2])
    if odd:
        yield even, odd
        yield odd, even


def _family_order(steps: Sequence[MeasuredStep]) -> Any:
    first = {step.model: i for i, step in reversed([*enumerate(steps)])}
    return lambda name: (model_table(name)["family"], first[name])


Key = tuple[Literal["product", "convolution", "memory", "floor"], Rate | None]
Figures = dict[Key, float]
MEMORY: Key = ("memory", None)
FLOOR: Key = ("floor", None)


def figures_of(device: Device) -> Figures:
    """The fractions of its peak rates that a device reaches, and its shortest kernel."""
    rates = device.peak_flops_per_s
    products: Figures = {("product", rate): device.efficiency(rate) for rate in rates}
    convolutions: Figures = {
        ("convolution", rate): device.efficiency(rate, convolution=True) for rate in rates
    }
    others: Figures = {MEMORY: device.memory_efficiency, FLOOR: device.kernel_floor_s}
    return products | convolutions | others


def reaching(device: Device, figures: Figures) -> Device:
    """The device, reaching these figures."""

    def reached(mechanism: str) -> dict[Any, float]:
        return {rate: figure for (kind, rate), figure in figures.items() if kind == mechanism}

    update = {
        "matmul_efficiency": {**device.matmul_efficiency, **reached("product")},
        "convolution_efficiency": {**device.convolution_efficiency, **reached("convolution")},
        "memory_efficiency": figures[MEMORY],
        "kernel_floor_s": figures[FLOOR],
    }
    return device.model_copy(update=update)


def _each_slower(figures: Figures) -> Iterator[Figures]:
    """A little slower products, convolutions, memory, and shortest kernels, one by one."""
    slower = 1 + _STEP
    for mechanism in dict.fromkeys(kind for kind, _ in figures):
        yield figures | {
            key: figure * slower if key == FLOOR else figure / slower
            for key, figure in figures.items()
            if key[0] == mechanism
        }


class Linearised(NamedTuple):
    """Forward and backward of all steps, one after another, near some figures.

    `parts`: seconds there that are inverse to the fraction of products, of convolutions and of the
    bandwidth, that grow with the shortest kernel, and the rest. `products`, `convolutions`: the
    figure of each. `host_s`: what the host takes.
    """

    near: Figures
    products: list[Key]
    convolutions: list[Key]
    parts: Floats  # (product, convolution, bytes, floor, rest; phases)
    host_s: Floats

    @classmethod
    def of(cls, device: Device, steps: Sequence[MeasuredStep]) -> Linearised:
        """Steps near what a device reaches."""
        near, models = figures_of(device), [step.estimated(device) for step in steps]
        here = _seconds(models)
        moved = [
            (_seconds([step.estimated(reaching(device, other)) for step in steps]) - here) / _STEP
            for other in _each_slower(near)
        ]
        each_step = [arithmetic_of(step.workload.precision, device) for step in steps]
        arithmetic = [each for each in each_step for _ in ("forward", "backward")]
        return cls(
            near,
            [("product", each.rate) for each in arithmetic],
            [("convolution", each.convolution_rate(device)) for each in arithmetic],
            np.array([*moved, here - sum(moved)]),
            np.array([host_s(works, model.launch_s) for model, works in _phases(models)]),
        )

    def seconds(self, figures: Figures) -> Floats:
        """Forward and backward of each step: its device's time or its host's, as is longer."""
        product_s, convolution_s, bytes_s, floor_s, rest_s = self.parts
        near = self.near
        slower = {key: near[key] / figures[key] for key in {*self.products, *self.convolutions}}
        longer = figures[FLOOR] / near[FLOOR] if near[FLOOR] else 1.0
        device_s = product_s * np.array([slower[key] for key in self.products])
        device_s += convolution_s * np.array([slower[key] for key in self.convolutions])
        device_s += bytes_s * near[MEMORY] / figures[MEMORY] + floor_s * longer + rest_s
        return np.asarray(np.maximum(device_s, self.host_s))


def _phases(models: Sequence[Model]) -> Iterator[tuple[Model, Sequence[Work]]]:
    for model in models:
        yield model, model.forward
        yield model, model.backward


def _seconds(models: Sequence[Model]) -> Floats:
    return np.array([total_s(works) for _, works in _phases(models)])
