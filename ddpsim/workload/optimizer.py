"""Time and memory of the optimizer step, from the bytes that its kernels move.

Bytes per fp32 element by operation: fused SGD 12 (momentum 20), fused Adam 28; foreach (torch's
default on a GPU) SGD add 12, weight decay 12, momentum 20; Adam 72, weight decay 12, AdamW's 8.
Source: torch 2.13 torch/optim/{sgd,adam}.py, counted operation by operation. Moments in one byte
are read and written with gradient and parameter by one kernel a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpsim.scenario.device import Device
from ddpsim.scenario.workload import Optimizer
from ddpsim.workload.model import Parameter, Work

__all__ = [
    "TENSORS_PER_LAUNCH",
    "functional_work",
    "moved_bytes",
    "one_parameters_work",
    "optimizer_state_bytes",
    "optimizer_work",
]

# the host's seconds a parameter, launches apart: torch 2.13's steps over 62 to 364 tensors of one
# element on a CPU (a Xeon of 2.6 GHz), in the same Python as on a GPU
_HOST_S = {
    ("sgd", False): 3.0e-6,
    ("sgd", True): 1.0e-6,
    ("adam", False): 9.0e-6,
    ("adam", True): 3.0e-6,
}
# the same of an optimizer of one parameter alone
_HOST_ALONE_S = {
    ("sgd", False): 17e-6,
    ("sgd", True): 13e-6,
    ("adam", False): 38e-6,
    ("adam", True): 21e-6,
}
# the same of torch.distributed's functional ones, which go from parameter to parameter, never fused
# or foreach: 161 tensors, as many times the first table's as measured beside its loops
_HOST_FUNCTIONAL_S = {"sgd": 3e-6, "adam": 15e-6}
# multi_tensor_apply takes 30 to 110 tensors a launch, by depth: assumed 64
TENSORS_PER_LAUNCH = 64
_SMALLEST, _SCALED = 4096, 256  # elements: of a parameter with moments in one byte, of a scale's


def optimizer_work(optimizer: Optimizer, parameters: Sequence[Parameter], device: Device) -> Work:
    """Device time of one step over all parameters, and its kernel launches."""
    _, operations = _bytes_and_operations(optimizer)
    launches = operations * math.ceil(len(parameters) / TENSORS_PER_LAUNCH)
    if optimizer.state_bits == 8:
        launches = len(parameters)  # a kernel each
    moved_s = moved_bytes(optimizer, parameters) / device.optimizer_bytes_per_s
    host_s = 0.0 if device.kind == "cpu" else _host_s(optimizer) * len(parameters)
    return Work(max(moved_s, launches * device.kernel_floor_s), launches, host_s)


def one_parameters_work(optimizer: Optimizer, device_s: float, device: Device) -> Work:
    """A step of an optimizer of one parameter, whose part of the whole step takes `device_s`."""
    return _of_one(optimizer, device_s, device, _HOST_ALONE_S[_kind(optimizer)])


def functional_work(optimizer: Optimizer, device_s: float, device: Device) -> Work:
    """One parameter's part of a step of torch.distributed.optim's functional optimizer."""
    name, _ = _kind(optimizer)
    return _of_one(optimizer, device_s, device, _HOST_FUNCTIONAL_S[name])


def _of_one(optimizer: Optimizer, device_s: float, device: Device, host_s: float) -> Work:
    _, operations = _bytes_and_operations(optimizer)
    return Work(max(device_s, operations * device.kernel_floor_s), operations, host_s)


def moved_bytes(optimizer: Optimizer, parameters: Sequence[Parameter]) -> float:
    """Bytes that one step reads and writes."""
    if optimizer.state_bits == 8:  # gradient and parameter, and the state there and back
        read_and_written = 2 * optimizer_state_bytes(optimizer, parameters)
        return read_and_written + 3 * sum(parameter.size_bytes for parameter in parameters)
    per_element, _ = _bytes_and_operations(optimizer)
    return per_element * _float32_bytes(optimizer, parameters) / 4


def _host_s(optimizer: Optimizer) -> float:
    return _HOST_S[_kind(optimizer)]


def _kind(optimizer: Optimizer) -> tuple[str, bool]:
    return "sgd" if optimizer.name == "sgd" else "adam", optimizer.fused


def optimizer_state_bytes(optimizer: Optimizer, parameters: Sequence[Parameter]) -> int:
    """Bytes of the optimizer's own tensors: momentum, or Adam's two moments, and masters."""
    if optimizer.state_bits == 8:
        return 2 * sum(map(_small_moment_bytes, parameters))
    copies = 2 if optimizer.name != "sgd" else int(optimizer.momentum > 0)
    copied = [each for each in parameters if optimizer.masters and each.size_bytes < 4 * each.numel]
    masters_bytes = 4 * sum(parameter.numel for parameter in copied)
    return copies * _float32_bytes(optimizer, parameters) + masters_bytes


def _float32_bytes(optimizer: Optimizer, parameters: Sequence[Parameter]) -> int:
    """Bytes of what the optimizer updates: the parameters, or their copies in float32."""
    if optimizer.masters:
        return 4 * sum(parameter.numel for parameter in parameters)
    return sum(parameter.size_bytes for parameter in parameters)


def _small_moment_bytes(parameter: Parameter) -> int:
    """A moment in one byte, a float32 scale for each block, and the values of the 256 codes.

    Source: torchao 0.18 optim/adam.py and subclass_8bit.py.
    """
    if parameter.numel < _SMALLEST or parameter.numel % _SCALED:
        return parameter.size_bytes
    return parameter.numel + 4 * (parameter.numel // _SCALED) + 4 * 256


def _bytes_and_operations(optimizer: Optimizer) -> tuple[int, int]:
    per_element, operations = _of_step(optimizer)
    if optimizer.masters:  # a gradient is copied to float32, and a master to its parameter
        return per_element + 12, operations + 2
    return per_element, operations


def _of_step(optimizer: Optimizer) -> tuple[int, int]:
    momentum, decay = optimizer.momentum > 0, optimizer.weight_decay > 0
    if optimizer.fused:
        return (28 if optimizer.name != "sgd" else 12 + 8 * momentum), 1
    if optimizer.name == "sgd":
        return 12 + 12 * decay + 20 * momentum, 1 + decay + 2 * momentum
    # AdamW scales the parameters; Adam adds them to the gradients (adam.py, _multi_tensor_adam)
    decayed = 8 if optimizer.name == "adamw" else 12
    return 72 + decayed * decay, 7 + decay
