"""Where an estimate's figures come from, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpsim.provenance import Provenance
from ddpsim.scenario.device import Device, Rate
from ddpsim.scenario.workload import Workload
from ddpsim.workload.arithmetic import Arithmetic, other_left
from ddpsim.workload.zoo.table import is_convolutional, is_recurrent


def _layers_provenance(
    table: dict[str, Any], workload: Workload, arithmetic: Arithmetic
) -> Iterator[Provenance]:
    """What is taken of the layers where the scenario does not say it."""
    if workload.compile:
        left = other_left(table, workload)
        what = f"{left:.0%} of the bytes beside matrix products left by torch.compile"
        yield Provenance("compute layers", what, "assumed")
    elif is_recurrent(table):
        yield Provenance(
            "compute layers", "recurrent ones as products; none was measured", "assumed"
        )
    elif is_convolutional(table) and arithmetic.is_half and workload.memory_format is None:
        what = "contiguous tensors, torch's default, which convolutions transpose both ways"
        yield Provenance("compute layers", what, "assumed")


def roofline_provenance(
    table: dict[str, Any],
    workload: Workload,
    device: Device,
    arithmetic: Arithmetic,
    *,
    convolutions: bool,
) -> tuple[Provenance, ...]:
    """Where an estimate's rates come from; `convolutions`: the model has some."""
    rates, reached = [arithmetic.rate], f"{device.efficiency(arithmetic.rate):.0%}"
    of_convolutions = arithmetic.convolution_rate(device)
    if convolutions and of_convolutions not in rates:
        rates.append(of_convolutions)
    peaks = [f"{device.peak_flops_per_s[rate] / 1e12:g} TFLOP/s {rate}" for rate in rates]
    others = " for convolutions, torch's default" if len(rates) > 1 else ""
    mostly = of_convolutions if is_convolutional(table) else arithmetic.rate
    recurs = is_recurrent(table)
    by_them = f"{device.efficiency(of_convolutions, convolution=True):.0%}"
    if convolutions and by_them != reached:
        reached = f"{reached} (convolutions {by_them})"
    return (
        Provenance("workload.model", table["source"], "measured"),
        Provenance(
            "compute time",
            f"roofline of {device.name}: {', '.join(peaks)}{others}, "
            f"{device.memory_bandwidth_bytes_per_s / 1e9:g} GB/s",
            device.rates_trust(),
        ),
        Provenance(
            "compute efficiency",
            f"{reached} of the FLOP rate, {device.memory_efficiency:.0%} of the bandwidth reached "
            f"by {table['name']}{'' if recurs else _told_by(device, mostly)}",
            "assumed" if recurs else device.efficiency_trust(mostly),
        ),
        *_layers_provenance(table, workload, arithmetic),
    )


def _told_by(device: Device, rate: Rate) -> str:
    if device.measured and (steps := device.measured.steps.get(rate)):
        return f"; set by {steps} steps in {device.measured.record}"
    steps = device.published_steps.get(rate)
    return f"; set by {steps} measured steps" if steps else ""
