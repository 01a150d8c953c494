"""DDP of this process alone, of which nothing is sent: what its own work takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.model.training import TinyParameters, Training, reduced_parameters

ONE_BUCKET_MIB = 1e6
_BACKWARDS = 10  # that tell what it costs to look


def alone() -> dist.ProcessGroup:
    """A group of this process and no other."""
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


def under_ddp(
    bare: Training, bucket_cap_mb: float | None = None, *, find_unused_parameters: bool = False
) -> Training:
    """The same under DDP of this process alone, with a model of its own."""
    own = bare.again()
    wrapped = DistributedDataParallel(
        own.model,
        process_group=alone(),
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
    )
    return replace(own, model=wrapped)


def around_hook(
    parameter: Tensor, before: Callable[[Tensor], None], after: Callable[[Tensor], None]
) -> object:
    """Call these right before and after what DDP does with a gradient, once it is wrapped in DDP.

    A gradient's own hook comes as soon as it is added up, then those behind that node, in turn
    (torch's accumulate_grad.cpp, engine.cpp); DDP's is there already. They last as long as the node
    does, which is returned: DDP keeps it.
    """
    parameter.register_post_accumulate_grad_hook(before)  # type: ignore[no-untyped-call]
    node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: after(parameter))
    return node


class HookTimes:
    """Seconds of DDP's hooks, gradient by gradient, copies into buckets included; on a CPU.

    Of a model of its own, with one bucket, so that only the last hook launches an all-reduce; what
    it costs to look at a hook is taken off.
    """

    def __init__(self, bare: Training, *, find_unused_parameters: bool = False) -> None:
        self._training = under_ddp(
            bare, ONE_BUCKET_MIB, find_unused_parameters=find_unused_parameters
        )
        self._looks = Looks(self._training.model.module)  # type: ignore[arg-type]
        self._kept: dict[str, list[float]] = {}

    def step(self, *, warm: bool) -> None:
        """One iteration; a warm-up tells nothing."""
        self._training.passes()
        self._training.update()
        taken_s = self._looks.taken_s()
        if not warm:
            for name, seconds in taken_s.items():
                self._kept.setdefault(name, []).append(seconds)

    def medians_s(self) -> Mapping[str, float]:
        """By parameter, of those that had a gradient."""
        cost_s = _look_s()
        return {name: max(0.0, median(taken) - cost_s) for name, taken in self._kept.items()}


class Looks:
    """Seconds from before to after the hooks on each of a model's gradients, by parameter."""

    def __init__(self, model: nn.Module) -> None:
        self._began_s = 0.0
        self._taken_s: dict[str, float] = {}
        self._nodes = [
            around_hook(parameter, self._begin, self._ender(name))
            for name, parameter in reduced_parameters(model).items()
        ]

    def _begin(self, _: Tensor) -> None:
        self._began_s = time.perf_counter()

    def _ender(self, name: str) -> Callable[[Tensor], None]:
        def end(_: Tensor) -> None:
            self._taken_s[name] = time.perf_counter() - self._began_s

        return end

    def taken_s(self) -> dict[str, float]:
        """Of the backwards since the last call; of several the last."""
        taken_s, self._taken_s = self._taken_s, {}
        return taken_s


def _look_s() -> float:
    """Seconds between two looks with no hook of DDP's between them."""
    model = TinyParameters()
    looks = Looks(model)
    backwards = []
    for _ in range(1 + _BACKWARDS):
        model(torch.ones(1)).sum().backward()
        backwards.append(median(looks.taken_s().values()))
    return median(backwards[1:])  # the first warms up
