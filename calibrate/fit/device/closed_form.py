"""Forward and backward of many steps as a function of the fractions that a device reaches.

The estimate of each step is taken apart once. A row takes its FLOPs at the reached rate and its
bytes at the reached bandwidth, or its kernels' floor if that is longer; then its casts' bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from calibrate.fit.device.steps import MeasuredStep
from ddpsim.scenario.device import Device, Rate
from ddpsim.workload.arithmetic import arithmetic_of
from ddpsim.workload.model import Work

__all__ = ["ClosedForm", "Fractions"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
_LONG_FLOOR_S = 100.0  # no row takes so long by itself: a row's rest are its casts


class Fractions(NamedTuple):
    """What is reached of a device's peak rates and bandwidth, and its shortest kernel."""

    matmul: Mapping[Rate, float]
    convolution: Mapping[Rate, float]
    memory: float
    kernel_floor_s: float

    @classmethod
    def of(cls, device: Device) -> Fractions:
        """Those of a device."""
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


class ClosedForm(NamedTuple):
    """Rows of the forward and of the backward of all steps, one after another.

    `rows` has seconds at the peak rate and the peak bandwidth; `matmul` and `convolution` are each
    row's indices into `rates`. `begins` has the first row of each forward and backward, `host_s`
    what its host takes.
    """

    rates: tuple[Rate, ...]
    matmul: Indices
    convolution: Indices
    rows: Floats  # (product, convolution, bytes, casts, kernels; rows)
    begins: Indices
    host_s: Floats

    @classmethod
    def of(cls, device: Device, steps: Sequence[MeasuredStep]) -> ClosedForm:
        """Steps on such a device, whatever it reaches."""
        rates = tuple(device.peak_flops_per_s)
        phases = [
            _Phase.of(works, step, device) for step in steps for works in _works(step, device)
        ]
        lengths = [phase.rows.shape[1] for phase in phases]
        matmul, convolution = (
            np.repeat([rates.index(rate) for rate in named], lengths)
            for named in zip(*(phase.rates for phase in phases), strict=True)
        )
        rows = np.concatenate([phase.rows for phase in phases], axis=1)
        begins = np.cumsum([0, *lengths[:-1]])
        host_s = np.array([phase.host_s for phase in phases])
        return cls(rates, matmul, convolution, rows, begins, host_s)

    def seconds(self, fractions: Fractions) -> Floats:
        """Forward and backward of each step: its device's time or its host's, as is longer."""
        matmul = np.array([fractions.matmul[rate] for rate in self.rates])
        convolution = np.array([fractions.convolution[rate] for rate in self.rates])
        product_s, convolution_s, bytes_s, cast_s, kernels = self.rows
        row_s = product_s / matmul[self.matmul] + bytes_s / fractions.memory
        row_s += convolution_s / convolution[self.convolution]
        row_s = np.maximum(row_s, kernels * fractions.kernel_floor_s)
        row_s += cast_s / fractions.memory
        return np.maximum(np.add.reduceat(row_s, self.begins), self.host_s)


Settings = tuple[tuple[Work, ...], ...]  # the rows of a phase under each of _SETTINGS
# matmul, convolution, memory and the floor: a part is what halving its fraction adds
_SETTINGS = ((1.0, 1.0, 1.0, 0.0), (0.5, 1.0, 1.0, 0.0), (1.0, 0.5, 1.0, 0.0))
_FLOORED = (1.0, 1.0, 1.0, _LONG_FLOOR_S)


def _works(step: MeasuredStep, device: Device) -> Iterator[Settings]:
    """Forward, then backward, under each setting."""
    rates = device.peak_flops_per_s
    models = [
        step.estimated(
            Fractions(
                dict.fromkeys(rates, matmul), dict.fromkeys(rates, convolution), memory, floor_s
            ).on(device)
        )
        for matmul, convolution, memory, floor_s in (*_SETTINGS, _FLOORED)
    ]
    yield tuple(model.forward for model in models)
    yield tuple(model.backward for model in models)


class _Phase(NamedTuple):
    """A forward or a backward: the rates of its products and convolutions, and its rows."""

    rates: tuple[Rate, Rate]
    rows: Floats  # (product, convolution, bytes, casts, kernels; rows)
    host_s: float

    @classmethod
    def of(cls, settings: Settings, step: MeasuredStep, device: Device) -> _Phase:
        """As the works of the settings say."""
        arithmetic = arithmetic_of(step.workload.precision, device)
        full_s, products_s, convolutions_s, floored_s = (
            np.array([work.device_s for work in works]) for works in settings
        )
        kernels = np.floor(floored_s / _LONG_FLOOR_S)
        cast_s = floored_s - kernels * _LONG_FLOOR_S
        product_s, convolution_s = products_s - full_s, convolutions_s - full_s
        bytes_s = full_s - product_s - convolution_s - cast_s
        return cls(
            (arithmetic.rate, arithmetic.convolution_rate(device)),
            np.array([product_s, convolution_s, bytes_s, cast_s, kernels]),
            sum(work.kernels * device.launch_s + work.host_s for work in settings[0]),
        )
