"""What a loop does to all gradients beside the optimizer: unscale them, clip them, zero them.

Source: torch 2.13 torch/amp/grad_scaler.py (unscale_, _maybe_opt_step, update) and
torch/nn/utils/clip_grad.py, operator by operator, in their foreach form; torch/optim/optimizer.py
(zero_grad).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpsim.scenario.device import Device
from ddpsim.workload.model import Parameter, Work, joined
from ddpsim.workload.optimizer import TENSORS_PER_LAUNCH

# the host's seconds a parameter in Python, operators and launches apart: torch 2.13's loops over 62
# to 1000 tensors of one element on a CPU (an EPYC), without the foreach operators themselves
_UNSCALE_HOST_S = 0.53e-6
_NORM_HOST_S = 0.68e-6
_CLIP_HOST_S = 0.25e-6
# zero_grad(set_to_none=False) likewise, one by one with each operator, or before a foreach one
_ZERO_EACH_HOST_S = 0.53e-6
_ZERO_FOREACH_HOST_S = 0.73e-6


def unscaling_work(parameters: Sequence[Parameter], device: Device) -> Work:
    """`GradScaler.unscale_`: gradients are read, checked for infinities, divided and written.

    Before it the scale becomes a double, its reciprocal and a float, there is a new flag, and both
    are copied for the device. (A fused optimizer's scaler has as many operators.)
    """
    passed = _passed(2, parameters, device)
    return joined([*_values(6, device), passed, _in_python(_UNSCALE_HOST_S, parameters, device)])


def norm_work(parameters: Sequence[Parameter], device: Device, *, checks: bool) -> Work:
    """The first half of `clip_grad_norm_`: all gradients are read for their norm.

    Then each norm's parts are added (a kernel of the same operator), the norms stacked, and theirs
    taken. `checks`: isnan, isinf and logical_or besides, for `error_if_nonfinite`.
    """
    parts = one_value_work(device)._replace(host_s=0.0)
    values = [parts, *_values(2 + 3 * checks, device)]
    passed = _passed(1, parameters, device)
    return joined([passed, *values, _in_python(_NORM_HOST_S, parameters, device)])


def clipping_work(parameters: Sequence[Parameter], device: Device) -> Work:
    """Its second half: add, reciprocal, product, clamp; gradients are read and written."""
    passed = _passed(2, parameters, device)
    return joined([*_values(4, device), passed, _in_python(_CLIP_HOST_S, parameters, device)])


def zeroing_work(parameters: Sequence[Parameter], device: Device, *, fused: bool) -> Work:
    """`zero_grad(set_to_none=False)`: gradients are written, each by an operator of its own.

    One foreach operator takes all where the optimizer was asked to be fused (or foreach).
    """
    if fused:
        launch = _in_python(_ZERO_FOREACH_HOST_S, parameters, device)
        return joined([_passed(1, parameters, device), launch])
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    written_s = [max(device.kernel_floor_s, each.size_bytes / rate) for each in parameters]
    work = Work(sum(written_s), len(written_s))
    return joined([work, _in_python(_ZERO_EACH_HOST_S, parameters, device)])


def one_value_work(device: Device) -> Work:
    """An operator on one value: the copy of `.item()`, or `GradScaler.update`."""
    return Work(device.kernel_floor_s, 1, _operator_s(device))


def _values(count: int, device: Device) -> list[Work]:
    return count * [one_value_work(device)]


def _passed(times: int, parameters: Sequence[Parameter], device: Device) -> Work:
    """One foreach operator that reads or writes all gradients so many times."""
    moved_bytes = times * sum(parameter.size_bytes for parameter in parameters)
    moved_s = moved_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    launches = math.ceil(len(parameters) / TENSORS_PER_LAUNCH)
    least_s = launches * device.kernel_floor_s
    return Work(max(moved_s, least_s), launches, _operator_s(device))


def _in_python(each_s: float, parameters: Sequence[Parameter], device: Device) -> Work:
    return Work(0.0, 0, 0.0 if device.kind == "cpu" else each_s * len(parameters))


def _operator_s(device: Device) -> float:
    return 0.0 if device.kind == "cpu" else device.operator_s
