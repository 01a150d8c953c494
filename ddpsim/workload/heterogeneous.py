"""Nodes with other devices than the usual one: how many times as long theirs compute."""

from __future__ import annotations

from collections.abc import Mapping

from ddpsim.errors import InputError
from ddpsim.provenance import Provenance
from ddpsim.scenario import catalog
from ddpsim.scenario.device import Device, Rate
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.workload import Workload
from ddpsim.workload.model import total_s
from ddpsim.workload.roofline import zoo_model


def compute_times(scenario: Scenario) -> dict[int, float]:
    """By node how many times as long as the usual device its own computes.

    Of a named model by its roofline on both; else by the best matmul rate that both have, which
    leaves out work that memory bounds. Raises InputError for a device without the precision.
    """
    usual = scenario.cluster.device
    times, kinds = dict[int, float](), list[tuple[Device, float]]()
    for node, other in (scenario.cluster.other_nodes or {}).items():
        if other.device is None:
            continue
        factor_of_kind = next((factor for device, factor in kinds if device == other.device), None)
        try:
            times[node] = factor_of_kind or _times(scenario.workload, usual, other.device)
        except InputError as error:
            raise InputError("cluster.other_nodes", f"node {node}: {error.message}") from None
        if factor_of_kind is None:
            kinds.append((other.device, times[node]))
    return times


def times_provenance(scenario: Scenario, times: Mapping[int, float]) -> list[Provenance]:
    """What the other nodes' compute was estimated by, a line for each kind of device."""
    others = scenario.cluster.other_nodes or {}
    usual, model = scenario.cluster.device.name, scenario.workload.model
    by = f"roofline of {model} on both" if model else "the best matmul rate that both have"
    kinds = {(device.name, times[node]): None for node in times if (device := others[node].device)}
    return [
        Provenance(f"compute on {name}", f"{factor:.2f} x {usual}'s, by {by}", "assumed")
        for name, factor in kinds
    ]


def _times(workload: Workload, usual: Device, other: Device) -> float:
    if workload.model is None:
        return _by_matmuls(usual, other)
    table = catalog.model_table(workload.model)

    def step_s(device: Device) -> float:
        model = zoo_model(table, workload, device)
        return total_s((*model.forward, *model.backward, model.optimizer))

    return step_s(other) / step_s(usual)


def _by_matmuls(usual: Device, other: Device) -> float:
    def reached(device: Device, rate: Rate) -> float:
        return device.peak_flops_per_s[rate] * device.efficiency(rate)

    common = [rate for rate in usual.peak_flops_per_s if rate in other.peak_flops_per_s]
    best = max(common, key=lambda rate: reached(usual, rate))
    return reached(usual, best) / reached(other, best)
