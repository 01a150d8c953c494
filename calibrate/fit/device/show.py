"""What `fit-device` prints: each mechanism, and the steps beside their prediction."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from calibrate.fit.device.fit import FittedDevice
from calibrate.records.device_record import DeviceRecord
from ddpsim.units import format_duration

__all__ = ["residual_lines"]


def residual_lines(record: DeviceRecord, device: FittedDevice) -> Iterator[str]:
    """The figures, then errors of steps that the other half of the models predicts."""
    fitted, errors = device
    for rate, peak in fitted.peak_flops.items():
        products = fitted.matmul_efficiency.get(rate)
        convolutions = fitted.convolution_efficiency.get(rate)
        told = [f"products {products:.0%}"] if products else []
        told += [f"convolutions {convolutions:.0%}"] if convolutions else []
        yield f"{rate:12}{peak / 1e12:.3g} TFLOP/s at best; of it {', '.join(told)}"
    optimizers = fitted.optimizer_efficiency
    of_them = f", optimizers {optimizers:.0%}" if optimizers else ""
    yield (
        f"{'memory':12}{fitted.memory_bandwidth_bytes_per_s / 1e9:.3g} GB/s at best; of it layers "
        f"{fitted.memory_efficiency:.0%}{of_them}"
    )
    launch, operator = format_duration(fitted.launch_s), format_duration(fitted.operator_s)
    host = f", host {launch} a launch and {operator} an operator" if fitted.kind == "gpu" else ""
    yield f"{'kernel':12}{format_duration(fitted.kernel_floor_s)} at least{host}"
    yield f"{'noise':12}samples are {_noise(record):.1%} above the least, which count (median)"
    if not errors:
        yield "no step was predicted from others: too few models were measured"
        return
    sizes = [abs(error) for _, error in errors]
    yield (
        f"{'steps':12}{len(sizes)}, each predicted from the other half of the models: median error "
        f"{median(sizes):.0%}, worst {max(sizes):.0%}"
    )
    for step, error in errors:
        yield f"  {step.measurement.case!s:52}{format_duration(sum(step.parts_s)):>9}{error:+6.0%}"


def _noise(record: DeviceRecord) -> float:
    """By how much a usual sample is above the least of its part, over all cases."""
    samples = [each for m in record.measurements for each in m.samples_s.values()]
    return median(median(each) / max(min(each), 1e-12) - 1 for each in samples)
