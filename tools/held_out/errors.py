"""Each measured step predicted by constants that other publishers' steps set.

python -m held_out.errors (in tools/): errors by regime, and the constants of all steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, geometric_mean, median
from typing import NamedTuple

import numpy as np
from published_hosts import PublishedHost, published_hosts
from published_steps import rms

from calibrate.fit.device.fit import device_of_kernels
from ddpsim.prediction.interval import ROOFLINE, prediction_interval, ranks_differ
from ddpsim.provenance import Z_80
from ddpsim.scenario.device import Device
from held_out.efficiency import Place, Reached, Times, fitted
from held_out.language_steps import language_rows
from held_out.predicted import Predicted
from held_out.products import product_times
from held_out.records import RECORDED, record_of
from held_out.rows import OWN, LoopRow, Row, all_rows, generation, publisher

__all__ = [
    "Constants",
    "Held",
    "constants",
    "device_bound_rows",
    "held_out",
    "steps_of_place",
]

_WAITS = 0.5  # a host that needs more of its device's time has a part in a step
DEVICE_BOUND, HOST_BOUND = "device-bound", "host-bound"


class Constants(NamedTuple):
    """What measured steps set: efficiencies, and seconds of an operator by generation."""

    reached: Reached
    operators_s: Mapping[str, float]  # launch and all
    places: frozenset[Place]  # of which there are steps

    def of(self, row: Row) -> Device:
        """The row's device with these constants."""
        device, (products, convolutions) = row.usual, row.places
        matmul = dict.fromkeys(device.peak_flops_per_s, self.reached.of(products))
        convolution = dict.fromkeys(device.peak_flops_per_s, self.reached.of(convolutions))
        is_known = int(row.mostly in self.places)
        update = {
            "matmul_efficiency": matmul,
            "convolution_efficiency": convolution,
            "operator_s": self.operators_s[generation(row.device)] - device.launch_s,
            "published_steps": dict.fromkeys(device.peak_flops_per_s, is_known),
        }
        return device.model_copy(update=update)


@dataclass(frozen=True)
class Held(Predicted):
    """A row, predicted by others."""

    row: Row
    regime: str
    is_known: bool


@cache
def _host_share(row: Row) -> float:
    """The host's time for a step, of its device's, on the usual device."""
    return row.on(row.usual).host_share


@cache
def _times(row: Row) -> Times:
    """Device seconds at the peak rate, parted by two efficiencies: linear between 0.4 and 0.8."""
    device = row.usual

    def at(products: float, convolutions: float) -> float:
        rates = device.peak_flops_per_s
        update = {
            "matmul_efficiency": dict.fromkeys(rates, products),
            "convolution_efficiency": dict.fromkeys(rates, convolutions),
        }
        return row.device_s(device.model_copy(update=update))

    both_s = at(0.8, 0.8)
    products_s, convolutions_s = (
        (s - both_s) / (1 / 0.4 - 1 / 0.8) for s in (at(0.4, 0.8), at(0.8, 0.4))
    )
    bytes_s = both_s - (products_s + convolutions_s) / 0.8
    step_s = row.step_s - row.other_s
    return Times(row.publisher, step_s, products_s, convolutions_s, bytes_s, *row.places)


@cache
def _operator_s(row: Row) -> float | None:
    """What an operator took the host of a host-bound loop, launch and all."""
    if not isinstance(row, LoopRow) or _host_share(row) <= 1:
        return None
    device, step_s = row.usual, row.on(row.usual).step_s
    low, high = 0.25, 4.0
    low_s, high_s = step_s(host=low), step_s(host=high)
    if not low_s < row.step_s < high_s:
        return None
    for _ in range(4):  # regula falsi: a host-bound step is nearly linear in its host's time
        factor = low + (row.step_s - low_s) / (high_s - low_s) * (high - low)
        factor_s = step_s(host=factor)
        if factor_s < row.step_s:
            low, low_s = factor, factor_s
        else:
            high, high_s = factor, factor_s
    return factor * (device.operator_s + device.launch_s)


class Operators(NamedTuple):
    """A host: its publisher, its GPU's generation, and seconds of an operator, launch and all."""

    publisher: str
    generation: str
    operator_s: float


@cache
def _of_loops() -> dict[str, Operators]:
    """Hosts as their loops say, by source and generation."""
    found: dict[str, tuple[str, list[float]]] = {}
    for row in all_rows():
        seconds = _operator_s(row)
        if seconds is not None:
            key = f"{row.source} {generation(row.device)}"
            found.setdefault(key, (row.publisher, []))[1].append(seconds)
    return {
        key: Operators(who, key.split()[1], geometric_mean(all_s))
        for key, (who, all_s) in found.items()
    }


def published_operators(without: str | None = None) -> list[Operators]:
    """All hosts but a publisher's: as their loops say, or as published counts of operators do.

    DenseNet-121 has many cheap ones: its hosts' figures are stretched as far as those of hosts that
    ran it and loops too.
    """
    loops = {key: host for key, host in _of_loops().items() if host.publisher != without}
    hosts = {f"{host.name} {generation(host.gpu)}": host for host in published_hosts()}
    both = [
        loops[key].operator_s / hosts[key].operator_s
        for key in sorted(loops.keys() & hosts.keys())
        if _is_densenet(hosts[key])
    ]
    stretch = geometric_mean(both)
    counted = [
        Operators(
            publisher(host.name),
            generation(host.gpu),
            host.operator_s * (stretch if _is_densenet(host) else 1),
        )
        for key, host in hosts.items()
        if key not in loops and publisher(host.name) != without
    ]
    own = [] if without == OWN else [_recorded_host(device) for device in RECORDED]
    return [*loops.values(), *counted, *own]


@cache
def _recorded_host(device: str) -> Operators:
    """The host of a device record, as its steps that waited for it say."""
    measured = device_of_kernels(record_of(device))
    return Operators(OWN, generation(device), measured.operator_s + measured.launch_s)


def _is_densenet(host: PublishedHost) -> bool:
    return all(ran.startswith("densenet") for ran in host.ran)


def _operators_s(without: str | None) -> dict[str, float]:
    """By generation: the median of its publishers, with the median of all as one more of them.

    A publisher counts once, whatever hosts it has: they have its software.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for host in published_operators(without):
        found.setdefault((host.publisher, host.generation), []).append(host.operator_s)
    means = {key: geometric_mean(each_s) for key, each_s in found.items()}
    usual_s = median(means.values())
    return {
        name: median([usual_s, *(mean_s for (_, of), mean_s in means.items() if of == name)])
        for name in ("early", "ampere", "later")
    }


@cache
def constants(without: str | None = None) -> Constants:
    """What all steps say, or those of all publishers but one."""
    rows = [row for row in (*device_bound_rows(), *language_rows()) if row.publisher != without]
    steps = [_times(row) for row in rows]
    places = {step.product for step in steps if step.products_s}
    places |= {step.convolution for step in steps if step.convolutions_s}
    reached = fitted([*steps, *product_times()])
    return Constants(reached, _operators_s(without), frozenset(places))


@cache
def device_bound_rows() -> tuple[Row, ...]:
    """Those in which the host has no part."""
    return tuple(row for row in all_rows() if _host_share(row) < _WAITS)


@cache
def _counts() -> Counter[Place]:
    return Counter(row.mostly for row in (*device_bound_rows(), *language_rows()))


def steps_of_place(place: Place) -> int:
    """How many steps, most of whose work is of it, set an efficiency."""
    return _counts()[place]


@cache
def held_out() -> tuple[Held, ...]:
    """All rows, each predicted without its publisher's."""
    return tuple(_predicted(row, constants(row.publisher)) for row in all_rows())


def _predicted(row: Row, told: Constants) -> Held:
    device, is_known = told.of(row), row.mostly in told.places
    on_device = row.on(device)
    usual_s = on_device.step_s()
    longer = [ranks_differ(row.variation, usual_s)] if row.variation else []
    interval = prediction_interval(
        usual_s, on_device.step_s, on_device.uncertainties, longer, (usual_s, usual_s)
    )
    regime = HOST_BOUND if on_device.host_share > 1 else DEVICE_BOUND
    return Held(row.step_s, usual_s, *interval.edges, row=row, regime=regime, is_known=is_known)


def device_sigma(kind: str) -> tuple[int, float]:
    """How many device-bound steps of a kind; the deviation whose 80 % range holds four in five."""
    errors = [
        abs(math.log1p(held.error))
        for held in held_out()
        if held.regime == DEVICE_BOUND and held.row.is_convolutional == (kind == "convolutional")
    ]
    return len(errors), float(np.quantile(errors, 0.8)) / Z_80


def host_sigma() -> float:
    """How far hosts are from what those of other publishers say, root mean square."""
    off = [
        math.log(seconds / _operators_s(who)[which])
        for who, which, seconds in published_operators()
    ]
    return math.sqrt(fmean(distance**2 for distance in off))


@cache
def usual_efficiency_errors(efficiency: float = 0.45) -> tuple[float, ...]:
    """Of device-bound steps on a device of which nothing is known but its peaks."""
    return tuple(
        ((t.products_s + t.convolutions_s) / efficiency + t.bytes_s) / t.step_s - 1
        for t in map(_times, device_bound_rows())
    )


def figures(held: Sequence[Held]) -> tuple[int, float, float, float]:
    """How many, the median and the worst error, and the share that intervals hold."""
    errors = [abs(one.error) for one in held]
    return len(held), median(errors), max(errors), fmean(one.is_covered for one in held)


def main() -> None:
    """Print what is told of each row, and the constants of all."""
    for held in held_out():
        row = held.row
        name = f"{row.publisher} {row.model} {row.device} {row.precision} {row.batch}"
        print(f"{held.error:+5.0%} {'in ' if held.is_covered else 'OUT'} {held.regime} {name}")
    for regime in (DEVICE_BOUND, HOST_BOUND):
        print(regime, *figures([held for held in held_out() if held.regime == regime]))
    for kind in ROOFLINE:
        print(kind, *device_sigma(kind))
    print(f"hosts {host_sigma():.2f}, any device {rms(usual_efficiency_errors()):.2f}")
    for place, log in sorted(constants().reached.known.items()):
        print(*place, f"{math.exp(log):.2f}")
    for who, which, seconds in published_operators():
        print(who, which, f"{1e6 * seconds:.0f} us")
    print(dict(constants().operators_s))


if __name__ == "__main__":
    main()
