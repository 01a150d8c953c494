"""What a chip reaches of its peak, as published steps of others tell.

For matrix products and for convolutions: a line over the FLOPs that the device has for a byte of
its memory, a deviation of each chip from it in all that it does, and one of each type on that chip.
What a publisher's software and clocks make faster or slower is no chip's: it is found with them.
A step's device time is linear in the inverse of both, so few numbers of each row are enough.
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

__all__ = ["LINE", "Place", "Reached", "Times", "chip_of", "fitted", "lines"]

Array = NDArray[np.float64]


class Place(NamedTuple):
    """What one efficiency is of."""

    chip: str
    rate: str
    convolution: bool = False


@dataclass(frozen=True)
class Times:
    """A row's device seconds: what products, convolutions (at the peak rate) and bytes take.

    `spread`, `noise`: how far a publisher's rows may be from others', and one row from those;
    standard deviations of logarithms.
    """

    publisher: str
    step_s: float
    products_s: float
    convolutions_s: float
    bytes_s: float
    product: Place
    convolution: Place
    spread: float = 0.1
    noise: float = 0.1


@dataclass(frozen=True)
class Reached:
    """Logarithms of efficiencies: a line for each kind, deviations of chips, and known places."""

    line: (
        Array  # [constant, slope, fp32, limited, doubled] of products, and the same of convolutions
    )
    chips: dict[str, float]
    known: dict[Place, float]

    def of(self, place: Place) -> float:
        """The efficiency of a place, known or not."""
        log = self.known.get(place)
        if log is None:
            log = float(lines([place])[0] @ self.line) + self.chips.get(place.chip, 0.0)
        return min(1.0, math.exp(log))


# standard deviations of logarithms: of a chip from the line, of a place from its chip
_CHIPS, _PLACES = 0.15, 0.1
LINE = np.array([-0.8, -0.2, 0.0, 0.4, -0.3, -1.1, -0.3, 0.0, 0.4, -0.3])
_SAME_CHIP = {
    "l40s": "rtx-6000-ada",
    "a40": "rtx-a6000",
    "rtx-8000": "rtx-6000",
    "titan-rtx": "rtx-6000",
}
_SPREAD_OF_LINE = np.array([1.0, 0.5, 0.5, 0.5, 0.5] * 2)
# chips with one float32 lane a slot; later ones have two, which seldom both work
_SINGLE = ("v100", "a100", "p100", "t4", "rtx-2080ti", "gtx", "titan")


def chip_of(device: str) -> str:
    """The chip and its board, whatever its memory is."""
    device = _SAME_CHIP.get(device, device)
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


def _is_limited(chip: str, rate: str) -> bool:
    """Whether a card has a part of its chip's tensor rate, which it reaches, as GeForce and H20."""
    return chip.startswith(("rtx-30", "rtx-40", "rtx-50", "h20-")) and rate != "fp32"


def lines(places: Sequence[Place]) -> Array:
    """What the lines are over, a row for each place: zeros where the other kind's is.

    A constant, the ridge, whether it is float32, limited, and float32 of a chip with two lanes.
    """
    rows = []
    for chip, rate, convolution in places:
        is_fp32 = rate == "fp32"
        doubled = is_fp32 and not chip.startswith(_SINGLE) and chip != "rtx-6000"
        kinds = is_fp32, _is_limited(chip, rate), doubled
        own = [1.0, _ridge(chip, rate), *map(float, kinds)]
        none = [0.0] * len(own)
        rows.append(none + own if convolution else own + none)
    return np.array(rows)


def fitted(rows: Sequence[Times]) -> Reached:
    """The efficiencies that rows of device-bound steps set together."""
    from scipy.optimize import least_squares  # noqa: PLC0415 -- slow to import

    places = sorted(
        {row.product for row in rows if row.products_s}
        | {row.convolution for row in rows if row.convolutions_s}
    )
    number = {place: i for i, place in enumerate(places)}
    terms = np.array([(r.products_s, r.convolutions_s, r.bytes_s, r.step_s) for r in rows])
    of_product = np.array([number.get(row.product, 0) for row in rows])
    of_convolution = np.array([number.get(row.convolution, 0) for row in rows])
    chips, of_chips = _one_hot([place.chip for place in places])
    spread, noise = np.array([(row.spread, row.noise) for row in rows]).T
    publishers = _one_hot([row.publisher for row in rows])[1] * spread[:, None]
    of_lines, of_places = lines(places), np.eye(len(places)) * _PLACES
    deviations = np.hstack([of_lines * _SPREAD_OF_LINE, of_chips * _CHIPS, of_places])

    def logs(x: Array) -> Array:
        return np.asarray(of_lines @ LINE + deviations @ x[: deviations.shape[1]])

    def residuals(x: Array) -> Array:
        """Steps, in which an outlier counts little, and deviations; each over its spread."""
        reached = np.exp(logs(x))
        device_s = terms[:, 0] / reached[of_product] + terms[:, 1] / reached[of_convolution]
        off = np.log((device_s + terms[:, 2]) / terms[:, 3])
        off = (off + publishers @ x[deviations.shape[1] :]) / noise
        return np.concatenate([np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)), x])

    start = np.zeros(deviations.shape[1] + publishers.shape[1])
    found = least_squares(residuals, start, method="lm").x
    line, own = LINE + found[: len(LINE)] * _SPREAD_OF_LINE, found[len(LINE) :] * _CHIPS
    return Reached(
        line,
        dict(zip(chips, own.tolist(), strict=False)),
        dict(zip(places, logs(found).tolist(), strict=True)),
    )


def _one_hot(names: Sequence[str]) -> tuple[list[str], Array]:
    """All names, and a row for each given one that has 1 in the column of its name."""
    known = sorted(set(names))
    return known, np.array([[float(name == one) for one in known] for name in names])
