"""Time and memory of the optimizer step, from the bytes that its kernels move.

Bytes per fp32 element by operation: fused SGD 12 (momentum 20), fused Adam 28; foreach (torch's
default on a GPU) SGD add 12, weight decay 12, momentum 20; Adam 72, weight decay 12, AdamW's 8.
Source: torch 2.13 torch/optim/{sgd,adam}.py, counted operation by operation. Moments in one byte
are read and written with gradient and parameter by one kernel a parameter. Adafactor and Muon have
operators of their own for each parameter: `ddpsim.workload.optimizer_operators`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpsim.scenario.device import Device
from ddpsim.scenario.workload import Optimizer
from ddpsim.workload.arithmetic import half_arithmetic
from ddpsim.workload.model import ITEM_BYTES, Parameter, Work, joined
from ddpsim.workload.operators import Operator
from ddpsim.workload.optimizer_operators import (
    factored_numel,
    is_muons,
    iterations,
    optimizer_operators,
)
from ddpsim.workload.zoo.law import Law

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
# the same of Adafactor over matrices and vectors, and of Muon, once and for each iteration: 150
# tensors of four elements, as many times the first table's foreach Adam as measured beside it
_HOST_MATRIX_S, _HOST_VECTOR_S = 24e-6, 12e-6
_HOST_MUON_S, _HOST_ITERATION_S = 11e-6, 3.4e-6
# multi_tensor_apply takes 30 to 110 tensors a launch, by depth: assumed 64
TENSORS_PER_LAUNCH = 64
_SMALLEST, _SCALED = 4096, 256  # elements: of a parameter with moments in one byte, of a scale's


def optimizer_work(optimizer: Optimizer, parameters: Sequence[Parameter], device: Device) -> Work:
    """Device time of one step over all parameters, and its kernel launches.

    Raises InputError where it goes by shapes that are not known.
    """
    if not optimizer.by_parameter:
        return _together(optimizer, parameters, device)
    copies = _copies_of_masters(optimizer, parameters, device)
    updated = _updated(optimizer, parameters)
    if optimizer.name == "adafactor":
        return joined((copies, *(_adafactor(optimizer, each, device) for each in updated)))
    matrices, others = parted(optimizer, updated)
    each = (_muon(optimizer, parameter, device) for parameter in matrices)
    beside = _together(beside_muon(optimizer), others, device)
    return joined((copies, beside, *each))


def parted(
    optimizer: Optimizer, parameters: Sequence[Parameter]
) -> tuple[list[Parameter], list[Parameter]]:
    """Parameters that Muon takes, and those of the AdamW beside it."""
    matrices = [parameter for parameter in parameters if is_muons(optimizer, parameter)]
    taken = {parameter.name for parameter in matrices}
    return matrices, [parameter for parameter in parameters if parameter.name not in taken]


def beside_muon(optimizer: Optimizer) -> Optimizer:
    """The AdamW that updates what Muon does not take."""
    return Optimizer(name="adamw", fused=optimizer.fused, weight_decay=optimizer.weight_decay)


def operators_s(operators: Sequence[Operator], device: Device) -> float:
    """Device time of an optimizer's operators: products by the law, others by their bytes."""
    law = Law(device, half_arithmetic(device))
    return sum(
        law.work(one).device_s
        if one.kind == "product"
        else max(device.kernel_floor_s, _moved(one) / device.optimizer_bytes_per_s)
        for one in operators
    )


def _muon(optimizer: Optimizer, parameter: Parameter, device: Device) -> Work:
    operators = optimizer_operators(optimizer, parameter)
    host_s = _HOST_MUON_S + iterations(optimizer) * _HOST_ITERATION_S
    on_host_s = 0.0 if device.kind == "cpu" else host_s
    return Work(operators_s(operators, device), len(operators), on_host_s)


def _adafactor(optimizer: Optimizer, parameter: Parameter, device: Device) -> Work:
    """On a GPU what host and device take together: the host waits for two norms a parameter."""
    operators = optimizer_operators(optimizer, parameter)
    device_s = operators_s(operators, device)
    if device.kind == "cpu":
        return Work(device_s, len(operators))
    host_s = _HOST_VECTOR_S if len(parameter.shape or ()) < 2 else _HOST_MATRIX_S
    launched_s = host_s + len(operators) * device.launch_s
    return Work(max(device_s, launched_s))


def _copies_of_masters(
    optimizer: Optimizer, parameters: Sequence[Parameter], device: Device
) -> Work:
    """A gradient is copied to float32, and a master to its parameter."""
    if not optimizer.masters:
        return Work(0.0)
    moved_s = 12 * sum(each.numel for each in parameters) / device.optimizer_bytes_per_s
    launches = 2 * math.ceil(len(parameters) / TENSORS_PER_LAUNCH)
    return Work(max(moved_s, launches * device.kernel_floor_s), launches)


def _moved(one: Operator) -> float:
    return one.bytes_read + one.bytes_written


def _updated(optimizer: Optimizer, parameters: Sequence[Parameter]) -> Sequence[Parameter]:
    """What is updated: the parameters, or their masters."""
    if not optimizer.masters:
        return parameters
    return [parameter._replace(dtype="float32") for parameter in parameters]


def _together(optimizer: Optimizer, parameters: Sequence[Parameter], device: Device) -> Work:
    """Work of an optimizer whose kernels take many parameters at once."""
    _, operations = _bytes_and_operations(optimizer)
    launches = operations * math.ceil(len(parameters) / TENSORS_PER_LAUNCH)
    if optimizer.state_bits == 8:
        launches = len(parameters)  # a kernel each
    moved_s = moved_bytes(optimizer, parameters) / device.optimizer_bytes_per_s
    host_s = 0.0 if device.kind == "cpu" else _HOST_S[_kind(optimizer)] * len(parameters)
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
    if optimizer.by_parameter:
        return _moved_by_parameter(optimizer, parameters)
    if optimizer.state_bits == 8:  # gradient and parameter, and the state there and back
        read_and_written = 2 * optimizer_state_bytes(optimizer, parameters)
        return read_and_written + 3 * sum(parameter.size_bytes for parameter in parameters)
    per_element, _ = _bytes_and_operations(optimizer)
    return per_element * _float32_bytes(optimizer, parameters) / 4


def _moved_by_parameter(optimizer: Optimizer, parameters: Sequence[Parameter]) -> float:
    matrices, others = list(_updated(optimizer, parameters)), list[Parameter]()
    if optimizer.name == "muon":
        matrices, others = parted(optimizer, matrices)
    each = (optimizer_operators(optimizer, one) for one in matrices)
    copied = 12 * sum(one.numel for one in parameters) if optimizer.masters else 0
    moved = sum(_moved(one) for operators in each for one in operators)
    return moved + copied + (moved_bytes(beside_muon(optimizer), others) if others else 0)


def _kind(optimizer: Optimizer) -> tuple[str, bool]:
    return "sgd" if optimizer.name == "sgd" else "adam", optimizer.fused


def optimizer_state_bytes(optimizer: Optimizer, parameters: Sequence[Parameter]) -> int:
    """Bytes of the optimizer's own tensors: momentum, or Adam's two moments, and masters.

    Adafactor has a row and a column of each matrix, Muon the momentum of its own and AdamW's.
    """
    if optimizer.state_bits == 8:
        return 2 * sum(map(_small_moment_bytes, parameters))
    copied = [each for each in parameters if optimizer.masters and each.size_bytes < 4 * each.numel]
    masters_bytes = 4 * sum(parameter.numel for parameter in copied)
    if optimizer.name == "adafactor":
        updated = _updated(optimizer, parameters)
        factors = (factored_numel(each) * ITEM_BYTES[each.dtype] for each in updated)
        return sum(factors) + masters_bytes
    if optimizer.name == "muon":
        matrices, others = parted(optimizer, parameters)
        moments = _float32_bytes(optimizer, matrices) + 2 * _float32_bytes(optimizer, others)
        return moments + masters_bytes
    copies = 2 if optimizer.name != "sgd" else int(optimizer.momentum > 0)
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
