"""What a chip reaches of its peak, as published steps of others tell.

For matrix products and for convolutions: a line over the FLOPs that the device has for a byte of
its memory, and a deviation of each chip from it. A step's device time is linear in the inverse of
both, so few numbers of each row are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddpsim.scenario.catalog import device_names, device_table

__all__ = ["LINE", "Place", "Reached", "Times", "chip_of", "features", "fitted"]

Array = NDArray[np.float64]


class Place(NamedTuple):
    """What one efficiency is of."""

    chip: str
    rate: str
    convolution: bool = False


@dataclass(frozen=True)
class Times:
    """A row's device seconds: what products, convolutions (at the peak rate) and bytes take."""

    publisher: str
    step_s: float
    products_s: float
    convolutions_s: float
    bytes_s: float
    product: Place
    convolution: Place


@dataclass(frozen=True)
class Reached:
    """Logarithms of efficiencies: a line for each kind, and the deviations of known places."""

    line: Array  # [kind][constant, slope, fp32, limited]
    known: dict[Place, float]

    def of(self, place: Place) -> float:
        """The efficiency of a place, known or not."""
        log = self.known.get(place, float(features(place) @ self.line[int(place.convolution)]))
        return min(1.0, math.exp(log))


_SPREAD_OF_CHIPS, _SPREAD_OF_ROWS = 0.2, 0.1  # of logarithms about the line, and about a chip's
LINE = np.array([[-0.8, -0.2, 0.0, 0.4], [-1.1, -0.3, 0.0, 0.4]])
_SPREAD_OF_LINE = np.array([1.0, 0.5, 0.5, 0.5])


def chip_of(device: str) -> str:
    """The chip and its board, whatever its memory is."""
    if device.startswith(("h100-sxm", "h200-sxm", "h800-sxm", "gh200")):
        return "h100-sxm"
    chip = device.removesuffix("-16gb").removesuffix("-32gb")
    return "a100-sxm" if chip.startswith("a100-sxm") else chip


@cache
def _ridge(chip: str, rate: str) -> float:
    """The logarithm of peak FLOPs over bytes of memory, of 150."""
    name = next(name for name in device_names() if chip_of(name) == chip)
    table = device_table(name)
    peak = table["peak_flops"]["fp16" if rate == "half" else rate]
    return math.log(peak / table["memory_bandwidth_bytes_per_s"] / 150)


def features(place: Place) -> Array:
    """What the line is over. GeForce cards have half of their chip's tensor rate, and reach it."""
    is_fp32 = place.rate == "fp32"
    limited = place.chip.startswith(("rtx-30", "rtx-40", "rtx-50")) and not is_fp32
    return np.array([1.0, _ridge(place.chip, place.rate), is_fp32, limited])


def fitted(rows: Sequence[Times]) -> Reached:
    """The efficiencies that rows of device-bound steps set together."""
    from scipy.optimize import least_squares  # noqa: PLC0415 -- slow to import

    places = sorted(
        {row.product for row in rows if row.products_s}
        | {row.convolution for row in rows if row.convolutions_s}
    )
    number = {place: i for i, place in enumerate(places)}
    of_places = np.array([features(place) for place in places])
    kinds = np.array([int(place.convolution) for place in places])
    terms = np.array([(r.products_s, r.convolutions_s, r.bytes_s, r.step_s) for r in rows])
    of_product = np.array([number.get(row.product, 0) for row in rows])
    of_convolution = np.array([number.get(row.convolution, 0) for row in rows])

    def logs(x: Array) -> Array:
        line = x[:8].reshape(2, 4)
        return np.asarray((of_places * line[kinds]).sum(axis=1) + x[8:])

    def residuals(x: Array) -> Array:
        reached = np.exp(logs(x))
        device_s = terms[:, 0] / reached[of_product] + terms[:, 1] / reached[of_convolution]
        off = np.log((device_s + terms[:, 2]) / terms[:, 3]) / _SPREAD_OF_ROWS
        soft = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        of_line = ((x[:8].reshape(2, 4) - LINE) / _SPREAD_OF_LINE).ravel()
        return np.concatenate([soft, x[8:] / _SPREAD_OF_CHIPS, of_line])

    start = np.concatenate([LINE.ravel(), np.zeros(len(places))])
    found = least_squares(residuals, start, method="lm").x
    return Reached(found[:8].reshape(2, 4), dict(zip(places, logs(found), strict=True)))
