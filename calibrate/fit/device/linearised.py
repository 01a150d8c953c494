"""Forward and backward of many steps as a function of the fractions that a device reaches.

Each part of an estimate is inverse to a fraction, or grows with the shortest kernel. What each part
is follows from slopes at a device; near it, the sum is the estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from calibrate.fit.device.steps import MeasuredStep, host_s
from calibrate.fit.solve import Floats
from ddpsim.scenario.device import Device, Rate
from ddpsim.workload.arithmetic import arithmetic_of
from ddpsim.workload.model import Model, Work, total_s

__all__ = ["Fractions", "Linearised"]

Indices = npt.NDArray[np.intp]
_STEP = 0.02  # of a figure, for a slope


class Fractions(NamedTuple):
    """What is reached of a device's peak rates and bandwidth, and its shortest kernel."""

    matmul: Mapping[Rate, float]
    convolution: Mapping[Rate, float]
    memory: float
    kernel_floor_s: float

    @classmethod
    def of(cls, device: Device) -> Fractions:
        """The fractions of its peak rates that a device reaches, and its shortest kernel."""
        rates = device.peak_flops_per_s
        return cls(
            {rate: device.efficiency(rate) for rate in rates},
            {rate: device.efficiency(rate, convolution=True) for rate in rates},
            device.memory_efficiency,
            device.kernel_floor_s,
        )

    def on(self, device: Device) -> Device:
        """The device, reaching them."""
        update = {
            "matmul_efficiency": {**device.matmul_efficiency, **self.matmul},
            "convolution_efficiency": {**device.convolution_efficiency, **self.convolution},
            "memory_efficiency": self.memory,
            "kernel_floor_s": self.kernel_floor_s,
        }
        return device.model_copy(update=update)

    def each_slower(self) -> Iterator[Fractions]:
        """A little slower products, convolutions, memory, and shortest kernels, one by one."""
        slower = 1 + _STEP
        matmul = {rate: fraction / slower for rate, fraction in self.matmul.items()}
        convolution = {rate: fraction / slower for rate, fraction in self.convolution.items()}
        yield self._replace(matmul=matmul)
        yield self._replace(convolution=convolution)
        yield self._replace(memory=self.memory / slower)
        yield self._replace(kernel_floor_s=self.kernel_floor_s * slower)


class Linearised(NamedTuple):
    """Forward and backward of all steps, one after another, near some fractions.

    `parts`: seconds there that are inverse to the fraction of products, of convolutions and of the
    bandwidth, that grow with the shortest kernel, and the rest. `matmul`, `convolution`: indices
    into `rates`. `host_s`: what the host takes.
    """

    near: Fractions
    rates: tuple[Rate, ...]
    matmul: Indices
    convolution: Indices
    parts: Floats  # (product, convolution, bytes, floor, rest; phases)
    host_s: Floats

    @classmethod
    def of(cls, device: Device, steps: Sequence[MeasuredStep]) -> Linearised:
        """Steps near what a device reaches."""
        near, rates = Fractions.of(device), tuple(device.peak_flops_per_s)
        models = [step.estimated(device) for step in steps]
        here = _seconds(models)
        moved = [
            (_seconds([step.estimated(other.on(device)) for step in steps]) - here) / _STEP
            for other in near.each_slower()
        ]
        arithmetic = [arithmetic_of(step.workload.precision, device) for step in steps]
        return cls(
            near,
            rates,
            np.repeat([rates.index(each.rate) for each in arithmetic], 2),
            np.repeat([rates.index(each.convolution_rate(device)) for each in arithmetic], 2),
            np.array([*moved, here - sum(moved)]),
            np.array([host_s(works, model.launch_s) for model, works in _phases(models)]),
        )

    def seconds(self, fractions: Fractions) -> Floats:
        """Forward and backward of each step: its device's time or its host's, as is longer."""
        product_s, convolution_s, bytes_s, floor_s, rest_s = self.parts
        near = self.near
        matmul = np.array([near.matmul[rate] / fractions.matmul[rate] for rate in self.rates])
        convolution = np.array(
            [near.convolution[rate] / fractions.convolution[rate] for rate in self.rates]
        )
        longer = fractions.kernel_floor_s / near.kernel_floor_s if near.kernel_floor_s else 1.0
        device_s = product_s * matmul[self.matmul] + convolution_s * convolution[self.convolution]
        device_s += bytes_s * near.memory / fractions.memory + floor_s * longer + rest_s
        return np.asarray(np.maximum(device_s, self.host_s))


def _phases(models: Sequence[Model]) -> Iterator[tuple[Model, Sequence[Work]]]:
    for model in models:
        yield model, model.forward
        yield model, model.backward


def _seconds(models: Sequence[Model]) -> Floats:
    return np.array([total_s(works) for _, works in _phases(models)])
