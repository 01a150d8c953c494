"""A device record to a device file, and to lines: kernels first; steps of the zoo correct them.

Kernels alone tell each mechanism's rate over a few shapes; a model's layers have other shapes. So
the fractions that are reached are those which the steps' forward and backward want most, leaning on
what the kernels say: least squares of logarithms, in which an outlier counts little.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import log
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np

from calibrate.fit.device.steps import (
    FLOOR,
    MEMORY,
    Figures,
    Key,
    Linearised,
    MeasuredStep,
    figures_of,
    halves,
    measured_steps,
    reaching,
)
from calibrate.fit.solve import Floats
from calibrate.records.device_record import DeviceMeasurement, DeviceRecord
from ddpsim.errors import ImportFailedError
from ddpsim.provenance import Z_80
from ddpsim.scenario import catalog
from ddpsim.scenario.device import Architecture, Device, DeviceFile, MeasuredDevice, Rate
from ddpsim.units import format_duration

_LEAST, _MOST = 0.001, 1.0  # of a fraction
_UNSURE = 0.3  # of the logarithm: how far layers' rates are from those of kernels (assumed)
_UNSURE_FLOOR = 0.7  # of the shortest kernel's, likewise
_OUTLIER = 0.1  # relative errors beyond count little
_TURNS = 3  # of the search, each near what the one before has found
_FROM_BOUND = 0.1  # of a logarithm: a search that begins at its bound goes nowhere
_NOT_KNOWN = 0.30  # sigma where no half of the models can predict the other (as of other presets)
_HOST_BOUND = 0.5  # a step takes the host's pace if kernels alone would take less of it
_ROWS: dict[int, Architecture] = {7: "volta", 8: "ampere", 9: "hopper"}  # compute capability


_AS_FITTED = (  # figures of a device that its file repeats
    *("kind", "architecture", "matmul_efficiency", "convolution_efficiency"),
    *("memory_bandwidth_bytes_per_s", "memory_efficiency", "optimizer_efficiency"),
    *("kernel_floor_s", "launch_s", "operator_s"),
)

# bytes an element of gradients that a step moves, by class and implementation (what the estimate
# counts: ddpsim/workload/optimizer.py)
_OPTIMIZER_BYTES = {"sgd foreach": 12, "sgd fused": 12, "sgd momentum foreach": 32}
_BACKWARD_OVER_FORWARD = 2.0  # of a convolution's FLOPs
_OPERATORS_OF_STEP = 20  # additions in the variant "step", forward and backward


class FittedDevice(NamedTuple):
    """A device file, and by how much steps differ that half of the models predict."""

    file: DeviceFile
    errors: list[tuple[MeasuredStep, float]]


def fit_device(record: DeviceRecord, name: str | None, file: str) -> FittedDevice:
    """The device of a record; `file` is the record's name. Raises ImportFailedError."""
    steps = measured_steps(record)
    fitted = _fitted(device_of_kernels(record), steps)
    errors = errors_of_halves(record)
    counted: dict[Rate, int] = {}
    for step in steps:
        rate = step.rate(fitted)
        counted[rate] = counted.get(rate, 0) + 1
    here = record.environment
    origin = f"{file}: {here.machine}, torch {here.torch}, {here.created}"
    measured = MeasuredDevice(record=origin, steps=counted, sigma=_sigma(errors))
    return FittedDevice(_file(record, fitted, name, measured), errors)


def errors_of_halves(record: DeviceRecord) -> list[tuple[MeasuredStep, float]]:
    """Relative errors of steps that are predicted from the other half of the models."""
    steps, start = measured_steps(record), device_of_kernels(record)
    errors = list[tuple[MeasuredStep, float]]()
    for fit, predicted in halves(steps):
        device = _fitted(start, [step for step in steps if step.model in fit])
        for step in steps:
            if step.model in predicted:
                errors.append((step, sum(step.predicted_s(device)) / sum(step.parts_s) - 1))
    return errors


def _sigma(errors: Sequence[tuple[MeasuredStep, float]]) -> float:
    """Such that 80 % of the errors lie within the 80 % interval."""
    if not errors:
        return _NOT_KNOWN
    sizes = sorted(abs(log(1 + error)) for _, error in errors)
    return max(0.01, float(np.quantile(sizes, 0.8)) / Z_80)


def device_of_kernels(record: DeviceRecord) -> Device:
    """What kernels alone tell, and of the host steps that wait for it."""
    peak, bandwidth = peaks(record), bandwidth_bytes_per_s(record)
    usual, optimizers = reached_bandwidth(record, bandwidth)
    floor_s, launch_s = launch_figures(record)
    major = record.capability[0] if record.capability else 0
    device = Device.model_validate(
        {
            "name": "measured",
            "kind": "gpu" if record.is_gpu else "cpu",
            "peak_flops": {rate: f"{flops!r} FLOP/s" for rate, flops in peak.items()},
            "matmul_efficiency": reached(record, peak, "product"),
            "convolution_efficiency": reached(record, peak, "convolution"),
            "memory": f"{record.memory_bytes} B",
            "memory_bandwidth": f"{bandwidth!r} B/s",
            "memory_efficiency": usual,
            "optimizer_efficiency": optimizers,
            "kernel_floor": f"{floor_s!r} s",
            "launch": f"{launch_s!r} s",
            "operator": "0 s",
            "architecture": _ROWS.get(major, "blackwell" if major >= 10 else "ampere"),
        }
    )
    device = device.model_copy(update=_of_chip(record))
    return device.model_copy(update={"operator_s": _operator_s(record, device)})


def _operator_s(record: DeviceRecord, device: Device) -> float:
    """The host's time an operator beside its launches, from steps that wait for it; median."""
    if not record.is_gpu:
        return 0.0
    times = []
    for step in measured_steps(record):
        forward_s, backward_s, _ = step.parts_s
        if sum(step.predicted_s(device)[:2]) > _HOST_BOUND * (forward_s + backward_s):
            continue
        operators, kernels = step.operators(device)
        times.append((forward_s + backward_s - kernels * device.launch_s) / operators)
    return max(0.0, median(times)) if times else 0.0


def _fitted(start: Device, steps: Sequence[MeasuredStep]) -> Device:
    """The device whose fractions steps correct; as it is without steps."""
    if not steps:
        return start
    from scipy.optimize import least_squares  # noqa: PLC0415 -- most of a second to import

    keys, usual = list(_fitted_keys(start, steps)), figures_of(start)
    is_floor = np.array([key == FLOOR for key in keys])
    unsure = np.where(is_floor, _UNSURE_FLOOR, _UNSURE)
    before = np.log(np.clip([usual[key] for key in keys], 1e-9, None))
    # fractions up to one; the shortest kernel within a factor of a thousand
    low = np.where(is_floor, before - log(1e3), log(_LEAST))
    high = np.where(is_floor, before + log(1e3), 0.0)

    def figures(values: Floats) -> Figures:
        fitted = np.minimum(np.exp(values), _MOST).tolist()
        return usual | dict(zip(keys, fitted, strict=True))

    measured = np.log([s for step in steps for s in step.parts_s[:2]])
    solution, device = np.minimum(before, high - _FROM_BOUND), start
    for _ in range(_TURNS):
        form = Linearised.of(device, steps)

        def residuals(values: Floats, form: Linearised = form) -> Floats:
            far = (np.log(form.seconds(figures(values))) - measured) / _OUTLIER
            robust = _OUTLIER * np.sign(far) * np.sqrt(2 * (np.sqrt(1 + far**2) - 1))
            return np.concatenate([robust, _OUTLIER * (values - before) / unsure])

        begin = np.clip(solution, low + _FROM_BOUND, high - _FROM_BOUND)
        solution = least_squares(
            residuals, begin, bounds=(low, high), diff_step=1e-3, xtol=1e-4, ftol=1e-4
        ).x
        device = reaching(start, figures(solution))
    return device


def _fitted_keys(device: Device, steps: Sequence[MeasuredStep]) -> Iterator[Key]:
    """The figures that steps tell of: fractions by type, and on a CPU the shortest kernel."""
    rates = tuple(device.peak_flops_per_s)
    used = {step.rate(device) for step in steps}
    convolved = {"tf32" if rate == "fp32" and "tf32" in rates else rate for rate in used}
    yield from (("product", rate) for rate in rates if rate in used)
    yield from (("convolution", rate) for rate in rates if rate in convolved)
    yield MEMORY
    if device.kind == "cpu":
        yield FLOOR


def _file(
    record: DeviceRecord, device: Device, name: str | None, measured: MeasuredDevice
) -> DeviceFile:
    preset = _preset(record.environment.device if record.is_gpu else "cpu-core")
    keys = ("peak_flops", "memory", "kernel_floor_s", "launch_s", "operator_s")
    of_preset = ("intra_node", "inter_node", "peer_to_peer", "bridge_bytes_per_s")
    links = {key: preset[key] for key in of_preset if key in preset}
    sources = dict.fromkeys(keys, "`calibrate device`, as `measured` says")
    sources |= {key: preset["sources"][key] for key in links if key in preset["sources"]}
    return DeviceFile(
        name=name or (record.environment.device if record.is_gpu else record.environment.machine),
        peak_flops=device.peak_flops_per_s,
        memory_bytes=record.memory_bytes,
        **{key: getattr(device, key) for key in _AS_FITTED},
        measured=measured,
        sources=sources,
        **_of_chip(record),
        **links,
    )


def _of_chip(record: DeviceRecord) -> dict[str, Any]:
    """What no kernel tells, by the preset of the device's name."""
    preset = _preset(record.environment.device) if record.is_gpu else {}
    return {key: preset[key] for key in ("multiprocessors", "cache_bytes") if key in preset}


def _preset(name: str) -> dict[str, Any]:
    """The preset of that name, whose links are taken; none where none is known."""
    try:
        return catalog.device_table(catalog.resolve("device", name))
    except ValueError:
        return {}


def residual_lines(record: DeviceRecord, device: FittedDevice) -> Iterator[str]:
    """The figures, then errors of steps that the other half of the models predicts."""
    fitted, errors = device
    for rate, peak in fitted.peak_flops.items():
        products = fitted.matmul_efficiency.get(rate)
        convolutions = fitted.convolution_efficiency.get(rate)
        rates = [f"products {products:.0%}"] if products else []
        rates += [f"convolutions {convolutions:.0%}"] if convolutions else []
        yield f"{rate:12}{peak / 1e12:.3g} TFLOP/s at best; of it {', '.join(rates)}"
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


def peaks(record: DeviceRecord) -> dict[Rate, float]:
    """FLOP/s of the fastest product or convolution, by type; raises ImportFailedError of none."""
    rates: dict[Rate, float] = {}
    for rate, flops_per_s in _rates(record.of("product", "convolution")):
        rates[rate] = max(rates.get(rate, 0.0), flops_per_s)
    if not rates:
        raise ImportFailedError("the record", "holds no matrix product: go on with --resume")
    return rates


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
    """Bandwidth of the fastest memory-bound kernel, over more than any cache holds."""
    measurements = record.of("memory")
    if not measurements:
        raise ImportFailedError("the record", "holds no memory-bound kernel: go on with --resume")
    largest = max(m.case.shape for m in measurements)
    return max(m.moved_bytes / m.best_s() for m in measurements if m.case.shape == largest)


def reached_bandwidth(record: DeviceRecord, peak: float) -> tuple[float, float | None]:
    """Usual fractions of the bandwidth: of kernels of a model, and of SGD; None: not measured."""
    measurements = record.of("memory")
    usual = median(min(1.0, m.moved_bytes / m.best_s() / peak) for m in measurements)
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
    by_variant = {m.case.variant: m for m in record.of("launch")}
    if "operator" not in by_variant:
        raise ImportFailedError("the record", "holds no launch: go on with --resume")
    if record.is_gpu:
        launched = by_variant.get("kernel", by_variant["operator"])
        return by_variant["operator"].best_s("kernel"), launched.best_s("host")
    step = by_variant.get("step")
    floor_s = step.best_s("kernel") / _OPERATORS_OF_STEP if step else 0.0
    return max(floor_s, by_variant["operator"].best_s("kernel")), 0.0
