"""Float32 products alone, as others measured them on many GPUs: `published-products.csv`.

Few steps were published whose products run in float32, PyTorch's default. Alone they take as long
as in steps; those of tensor cores do not: they are faster in the seconds before a chip is warm.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

from ddpsim.workload.operators import Operator
from ddpsim.workload.zoo.gpu_time import GpuTime
from held_out.efficiency import Place, Times, chip_of
from held_out.rows import preset

__all__ = ["product_times"]

FILE = Path(__file__).resolve().parent.parent.parent / "tests" / "data" / "published-products.csv"
_SIDE = 8192  # of the matrices
_SPREAD, _NOISE = 0.5, 0.05  # how fast all are is found; seven GPUs agree with their steps so well


def product_times() -> list[Times]:
    """One row a GPU: the median of its contributors."""
    found: dict[str, list[float]] = {}
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        if row["precision"] == "fp32":
            found.setdefault(row["device"], []).append(float(row["tflops"]))
    return [_times(device, median(each)) for device, each in found.items()]


def _times(device: str, tflops: float) -> Times:
    place = Place(chip_of(device), "fp32")
    flops, moved = 2 * _SIDE**3, 4 * _SIDE**2
    one = Operator("product", 1, *[_SIDE] * 3, 1, 1, flops, 2 * moved, moved, 4)
    usual = preset(device)
    pricing = GpuTime(usual, "fp32", "fp32", channels_last=False, casts=False)
    return Times(
        publisher="products alone",
        step_s=flops / (1e12 * tflops),
        products_s=pricing.seconds(one) * usual.efficiency("fp32"),
        convolutions_s=0.0,
        bytes_s=0.0,
        product=place,
        convolution=place._replace(convolution=True),
        spread=_SPREAD,
        noise=_NOISE,
    )
