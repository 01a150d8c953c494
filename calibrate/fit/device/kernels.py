"""What kernels alone tell of a device: its best rates, and usual fractions of them."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import cast

from calibrate.records.device_record import DeviceMeasurement, DeviceRecord
from ddpsim.errors import ImportFailedError
from ddpsim.scenario.device import Rate

# bytes an element of gradients that a step moves, by class and implementation (what the estimate
# counts: ddpsim/workload/optimizer.py)
_OPTIMIZER_BYTES = {"sgd foreach": 12, "sgd fused": 12, "sgd momentum foreach": 32}
_BACKWARD_OVER_FORWARD = 2.0  # of a convolution's FLOPs
_OPERATORS_OF_STEP = 20  # additions in the variant "step", forward and backward


def peaks(record: DeviceRecord) -> dict[Rate, float]:
    """FLOP/s of the fastest product or convolution, by type; raises ImportFailedError of none."""
    found: dict[Rate, float] = {}
    for rate, flops_per_s in _rates(record.of("product", "convolution")):
        found[rate] = max(found.get(rate, 0.0), flops_per_s)
    if not found:
        raise ImportFailedError("the record", "holds no matrix product: go on with --resume")
    return found


def reached(record: DeviceRecord, peak: dict[Rate, float], kind: str) -> dict[Rate, float]:
    """Usual fractions of the peak rates of products, or of convolutions: medians over shapes."""
    fractions: dict[Rate, list[float]] = {}
    for rate, flops_per_s in _rates(m for m in record.measurements if m.case.kind == kind):
        fractions.setdefault(rate, []).append(flops_per_s / peak[rate])
    return {rate: median(each) for rate, each in fractions.items()}


def _rates(measurements: Iterable[DeviceMeasurement]) -> Iterable[tuple[Rate, float]]:
    for m in measurements:
        passes = 1.0 + _BACKWARD_OVER_FORWARD * ("backward" in m.samples_s)
        yield cast("Rate", m.case.precision), passes * m.flops / m.best_s()


def bandwidth_bytes_per_s(record: DeviceRecord) -> float:
    """Of the fastest kernel that bandwidth bounds, over more than any cache holds."""
    found = record.of("memory")
    if not found:
        raise ImportFailedError("the record", "holds no memory-bound kernel: go on with --resume")
    largest = max(m.case.shape for m in found)
    return max(m.moved_bytes / m.best_s() for m in found if m.case.shape == largest)


def reached_bandwidth(record: DeviceRecord, peak: float) -> tuple[float, float | None]:
    """Usual fractions of the bandwidth: of kernels of a model, and of SGD; None: not measured."""
    found = record.of("memory")
    usual = median(min(1.0, m.moved_bytes / m.best_s() / peak) for m in found)
    optimizers = [
        _OPTIMIZER_BYTES[m.case.variant] / 4 * m.moved_bytes / m.best_s("step") / peak
        for m in record.of("optimizer")
        if m.case.variant in _OPTIMIZER_BYTES
    ]
    return usual, min(1.0, median(optimizers)) if optimizers else None


def launch_figures(record: DeviceRecord) -> tuple[float, float]:
    """Seconds of the smallest kernel on the device, and of the host to launch one; raises as above.

    A CPU's operators run where they are launched: of forward and backward, and no launches.
    """
    found = {m.case.variant: m for m in record.of("launch")}
    if "operator" not in found:
        raise ImportFailedError("the record", "holds no launch: go on with --resume")
    if record.is_gpu:
        launched = found.get("kernel", found["operator"])
        return found["operator"].best_s("kernel"), launched.best_s("host")
    step = found.get("step")
    floor_s = step.best_s("kernel") / _OPERATORS_OF_STEP if step else 0.0
    return max(floor_s, found["operator"].best_s("kernel")), 0.0
