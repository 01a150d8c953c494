"""Iterations of a model, timed: its parts, when each gradient is ready, and DDP's own work.

That is of DDP of this process alone, of which nothing is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.clock import Clock, Mark
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.training import (
    Made,
    TinyParameters,
    Training,
    hook_gradients,
    is_compiled,
    reduced_parameters,
    uncompiled,
)

WARMUPS = 3
_TINY_ITERATIONS = 10
ONE_BUCKET_MIB = 1e6
_BACKWARDS = 10  # that tell what it costs to look


@dataclass
class Samples:
    """Seconds of each iteration; `ready_s` by parameter, from the start of backward, each beside
    the length of the backward that it is from.

    `later`: forward and backward of a second micro-batch over the first one's, a pair a step;
    `with_ddp`: whole steps under DDP of one rank over those without, taken in turns; `ddp_hook_s`
    its hooks by parameter.
    """

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    hooked_backward_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    ready_s: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    later: list[tuple[float, float]] = field(default_factory=list)
    with_ddp: list[float] = field(default_factory=list)
    ddp_hook_s: Mapping[str, float] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    sparse: set[str] = field(default_factory=set)


def measure_iterations(training: Training, iterations: int) -> Samples:
    """Warm-up, then iterations with and without hooks on the gradients."""
    samples = Samples()
    if is_compiled(training.model):  # which runs uncompiled below
        for _ in range(WARMUPS):
            iterate(training, Samples(), hooked=False)
    for _ in range(WARMUPS):
        iterate(training, Samples(), hooked=True)
    for _ in range(iterations):
        iterate(training, samples, hooked=False)
        iterate(training, samples, hooked=True)
    return samples


def check_the_same_take_part(training: Training, samples: Samples) -> None:
    """Raise MeasureError where a parameter got a gradient in some steps and in others none.

    The step that was tried before the timed ones counts too.
    """
    steps = 1 + len(samples.hooked_backward_s)
    for name in reduced_parameters(training.model):
        got = len(samples.ready_s.get(name, ())) + (name not in training.unused)
        if 0 < got < steps:
            raise MeasureError(
                f"{name} got a gradient in {got} of {steps} iterations, and a profile is of steps "
                "that are alike: let the same layers take part in each (none dropped at random or "
                "by turns), or profile each path of the model on its own"
            )


def iterate(training: Training, samples: Samples, *, hooked: bool) -> None:
    """One step; with hooks it adds ready times, without them the times of the parts.

    With hooks a compiled model runs as it would without: all of its gradients come at the end, and
    where in the backward they are made tells which of them DDP has earlier.
    """
    clock, marked = training.clock, dict[str, Mark]()
    with uncompiled(training.model) if hooked else nullcontext():
        handles = _hooks(training, marked, samples.sparse) if hooked else []
        marks = [*training.passes(), training.update()]
        for handle in handles:
            handle.remove()
    forward_s, backward_s, optimizer_s = (clock.seconds(a, b) for a, b in pairwise(marks))
    if not hooked:
        samples.forward_s.append(forward_s)
        samples.backward_s.append(backward_s)
        samples.optimizer_s.append(optimizer_s)
        return
    samples.hooked_backward_s.append(backward_s)
    samples.order = list(marked)
    for name, mark in marked.items():
        ready = clock.seconds(marks[1], mark), backward_s
        samples.ready_s.setdefault(name, []).append(ready)


def later_ratios(training: Training, steps: int) -> list[tuple[float, float]]:
    """A second micro-batch over the first; nothing where gradients and a forward do not fit."""
    clock, ratios = training.clock, []
    try:
        for _ in range(1 + steps):
            marks = [training.passes() for _ in range(2)]
            training.update()
            first, later = ([clock.seconds(a, b) for a, b in pairwise(each)] for each in marks)
            ratios.append((later[0] / first[0], later[1] / first[1]))
    except RuntimeError:  # a GPU's memory, or the CPU's, which torch tells no better
        training.optimizer.zero_grad()
        return []
    return ratios[1:]  # the first step warms up


def step_s(training: Training) -> float:
    """Seconds of one iteration."""
    samples = Samples()
    iterate(training, samples, hooked=False)
    return samples.forward_s[0] + samples.backward_s[0] + samples.optimizer_s[0]


def _hooks(training: Training, ready: dict[str, Mark], sparse: set[str]) -> list[Any]:
    """Hooks that mark when each gradient is there; the last time counts, as in DDP."""

    def hook(name: str) -> Callable[[Tensor], None]:
        def mark(parameter: Tensor) -> None:
            ready.pop(name, None)
            ready[name] = training.clock.mark()
            if parameter.grad is not None and parameter.grad.is_sparse:
                sparse.add(name)

        return mark

    return hook_gradients(training.model, hook)


def hook_cost_s(device: torch.device, measured: Samples) -> float:
    """Seconds that one gradient hook adds to backward: tiny parameters, with hooks and without.

    On a GPU no more than it added to the backward measured: one that is behind its host hides it.
    """

    def make() -> Made:
        return Made(TinyParameters().to(device), torch.ones(1, device=device), torch.sum)

    made = make()
    optimizer = torch.optim.SGD(made.model.parameters(), lr=1e-4)
    training = Training(*made, optimizer, Clock(device), make)
    tiny_s = _longer_s(measure_iterations(training, _TINY_ITERATIONS))
    return min(tiny_s, _longer_s(measured)) if device.type == "cuda" else tiny_s


def _longer_s(samples: Samples) -> float:
    """By how much a hook lengthens the backward, of which it is one of many."""
    more_s = median(samples.hooked_backward_s) - median(samples.backward_s)
    return max(0.0, more_s / max(1, len(samples.order)))


def alone() -> dist.ProcessGroup:
    """A group of this process and no other."""
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


def under_ddp(
    bare: Training, bucket_cap_mb: float | None = None, *, find_unused_parameters: bool = False
) -> Training:
    """Put the training, with a model of its own, under DDP of this process alone."""
    training = bare.again()
    wrapped = DistributedDataParallel(
        training.model,
        process_group=alone(),
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
    )
    return replace(training, model=wrapped)


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
            around_hook(parameter, self._begin, partial(self._end, name))
            for name, parameter in reduced_parameters(model).items()
        ]

    def _begin(self, _: Tensor) -> None:
        self._began_s = time.perf_counter()

    def _end(self, name: str, _: Tensor) -> None:
        self._taken_s[name] = time.perf_counter() - self._began_s

    def taken_s(self) -> dict[str, float]:
        """The seconds of the backwards since the last call; of several the last."""
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
