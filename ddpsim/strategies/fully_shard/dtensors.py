"""The host's time for an optimizer over DTensors, operator by operator.

Each operator over a DTensor finds the sharding of its result in Python or C++ before it runs.
Measured with torch 2.13, more than over tensors, on one core of an EPYC (thread's own time, 20 to
600 parameters): 4 to 6 us an operator whose arguments are tensors, 14 us one with a number among
them, 1.2 to 2.6 us a parameter of a foreach operator, 11 to 20 us of Adam's fused one.
"""

from __future__ import annotations

from typing import Literal

from ddpsim.scenario.workload import Optimizer
from ddpsim.strategies.ddp.costs import DdpCosts
from ddpsim.workload.model import Work

_Kind = Literal["cpu", "gpu"]

_FOREACH_S, _FUSED_S = 1.7e-6, 17e-6
# in steps of five models on a CPU, whose kernels take its caches: 1.5 times as long as in a loop
_ON_CPU = 1.5
_TENSORS_S, _NUMBER_S = _ON_CPU * 4.8e-6, _ON_CPU * 14e-6
# an operator over a tensor on a CPU, with its part of the loop in Python
_PLAIN_S = _ON_CPU * 2.1e-6


def dispatch_s(optimizer: Optimizer, kind: _Kind) -> float:
    """Seconds for one parameter, more than over a tensor.

    torch goes from parameter to parameter on a CPU, and takes all at once (foreach) on a GPU.
    """
    if optimizer.fused or optimizer.state_bits == 8:
        return _FUSED_S * (_ON_CPU if kind == "cpu" else 1)
    tensors, numbers = operators(optimizer)
    if kind == "cpu":
        return tensors * _TENSORS_S + numbers * _NUMBER_S
    return (tensors + numbers) * _FOREACH_S


def on_shards(
    whole: Work, optimizer: Optimizer, parameters: int, ranks: int, costs: DdpCosts
) -> Work:
    """The time of a rank's part, where a part of each parameter is its own; kernels are as many.

    On a CPU the time of `whole` holds that of its host, which does not shrink with the shards.
    """
    kind, times = costs.device.kind, costs.host_times
    host_s = times * parameters * dispatch_s(optimizer, kind)
    if kind != "cpu":
        part = costs.optimizer_part(whole, whole.device_s / ranks, 1)
        return part._replace(host_s=whole.host_s + host_s)
    each = 1 if optimizer.fused else sum(operators(optimizer))
    plain_s = min(whole.device_s, times * parameters * each * _PLAIN_S)
    moved_s = (whole.device_s - plain_s) / ranks
    return Work(plain_s + moved_s + host_s, whole.kernels, whole.host_s)


def operators(optimizer: Optimizer) -> tuple[int, int]:
    """Operators of one parameter with tensors alone, and with a number.

    Source: torch 2.13 torch/optim/{sgd,adam}.py, _single_tensor_sgd and _single_tensor_adam.
    """
    decays = optimizer.weight_decay > 0
    if optimizer.name == "sgd":
        with_momentum = optimizer.momentum > 0
        return 1 + decays + with_momentum, int(with_momentum)
    if optimizer.name == "adamw":  # scales the parameters; Adam adds them to the gradients
        return 4, 3 + decays
    return 4 + decays, 3
