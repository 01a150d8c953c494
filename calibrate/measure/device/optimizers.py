"""Optimizer steps over many tensors, by class and implementation."""

from __future__ import annotations

import torch
from torch import nn

from calibrate.measure.device.bench import Bench
from calibrate.records.device_record import Case, DeviceMeasurement

__all__ = ["VARIANTS", "optimizer"]

VARIANTS = (
    *("sgd foreach", "sgd fused", "sgd momentum foreach"),
    *("adamw foreach", "adamw fused", "adam foreach"),
)


def optimizer(case: Case, bench: Bench) -> DeviceMeasurement:
    """One step, with its launches; the first makes the optimizer's state."""
    tensors, elements = case.shape
    parameters = [nn.Parameter(torch.zeros(elements, device=bench.device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    made = _made(case.variant.split(), parameters)
    made.step()
    return DeviceMeasurement(
        case=case,
        samples_s={"step": bench.kernel_s(made.step), "host": bench.host_s(made.step, 3)},
        moved_bytes=float(4 * tensors * elements),
    )


def _made(words: list[str], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    fused = "fused" in words
    foreach = not fused
    if words[0] == "sgd":
        momentum = 0.9 if "momentum" in words else 0.0
        return torch.optim.SGD(parameters, 1e-9, momentum, foreach=foreach, fused=fused)
    kind = torch.optim.AdamW if words[0] == "adamw" else torch.optim.Adam
    return kind(parameters, 1e-9, weight_decay=0.0, foreach=foreach, fused=fused)
