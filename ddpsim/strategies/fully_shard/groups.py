"""What the parameters of a unit send together, what that costs, and what they hold.

Sources: torch 2.13's torch/distributed/fsdp/_fully_shard (_fsdp_collectives.py: copies;
_fsdp_param.py: padding). Host times: what forward and backward of 20 units of 2, 8 and 32 tiny
parameters take more than without units, over a group that sends nothing; the thread's own time on
one core of an EPYC, torch 2.13. What is left out, one option after the other, tells hooks apart:
the gather before the backward, reductions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, NamedTuple

from ddpsim.scenario.options.fully_shard import FullyShard
from ddpsim.scenario.workload import Optimizer
from ddpsim.strategies.ddp.costs import DdpCosts, Prices
from ddpsim.strategies.fully_shard.unit_step import DeviceMesh, Offload, ShardedUnit
from ddpsim.strategies.fully_shard.units import ROOT, Unit, dtypes_of
from ddpsim.strategies.instructions import Await, Communicate, Instruction, compute
from ddpsim.strategies.ticks import Launch
from ddpsim.strategies.training_loop.around_optimizer import NormSum
from ddpsim.workload.model import ITEM_BYTES, Model, Parameter, Work


class HostTime(NamedTuple):
    """Seconds of a hook, and more for each parameter."""

    once_s: float
    each_s: float

    def of(self, parameters: int) -> float:
        """Return the seconds for so many parameters."""
        return self.once_s + parameters * self.each_s

    def ns(self, parameters: int, prices: Prices) -> int:
        """Return the host's time in ticks, launches included."""
        return prices.ticks.host_ns(self.of(parameters), prices.unit_hook_times)


# both together, divided as functions' own times are
_GATHER = HostTime(57e-6, 9.3e-6)
_COPY_OUT = HostTime(50e-6, 13e-6)
_FORWARD = HostTime(156e-6, 1.3e-6)  # else, before and after it
_BACKWARD = HostTime(85e-6, 4.8e-6)  # else, before and after it
_REDUCE = HostTime(95e-6, 17e-6)
# the norm of a float8 weight's largest value: foreach operators over DTensors
_SCALE_S = 13e-6
_SCALES = -1  # the number of their all-reduce, which is awaited before the next one
# clip_grad_norm_ over 20 to 400 DTensors took 7.0 us each and 220 us, over tensors 2.7 and 22
_CLIP = HostTime(200e-6, 4.3e-6)


def divisors(factor: float) -> tuple[float, float]:
    """By what float16 gradients are divided before and after their sum, about the root of each.

    Source: _fsdp_collectives.py, _get_gradient_divide_factors.
    """
    before = 1
    while factor % before == 0 and factor / before > before:
        before *= 2
    return before, factor / before


@dataclass(frozen=True, kw_only=True)
class Group(ShardedUnit):
    """One unit's parameters, each of which is padded, gathered and reduced on its own.

    `gradient_bytes`: of gradients as the backward makes them. `before_ns`: a division before the
    reduction, on its stream; `add_partial_ns`: there, where gradients are added to such as are not
    all-reduced yet. `regather`: among those that keep a copy.
    """

    begins_model: bool
    gradient_bytes: int
    copy_out: Launch
    forward_ns: int  # of the host, after it
    backward_ns: int  # of the host, after it
    copy_in: Launch  # of gradients, with the host's time for the reduce-scatter
    cast_in: Launch  # of gradients that are not reduced yet, to the type in which they will be
    add_in: Launch  # of a later micro-batch's gradients to those
    before_ns: int
    add_partial_ns: int
    kept_bytes: int  # of parameters that stay on a rank where a part of the ranks keeps a copy
    keep_ns: int  # to copy them
    offloads: bool
    scales: int  # float8 weights, whose largest values are reduced before each all-gather


@dataclass(frozen=True)
class Groups:
    """Makes the groups of a model's units over so many ranks."""

    model: Model
    spec: FullyShard
    prices: Prices
    mesh: DeviceMesh
    offload: Offload | None = None
    precomputes_scales: bool = False
    optimized: int | None = None  # tensors that the optimizer of `model` takes; None: all

    def each(self, units: Iterable[Unit]) -> Iterator[Group]:
        """Each unit's; of blocks that are alike one is made. Raises InputError as `of`."""
        used, groups = set(self.model.ready_order), dict[object, Group]()
        for unit in units:
            float8 = self._cast_before(unit)
            like = tuple(
                (self.model.parameters[i][1:], i in used, i in float8) for i in unit.parameters
            )
            if like not in groups:
                groups[like] = self.of(unit)
            yield replace(
                groups[like],
                name=unit.name,
                parameters=unit.parameters,
                begins_model=unit.begins_model,
            )

    def of(self, unit: Unit) -> Group:
        """One unit's; raises InputError where torch would refuse its dtypes."""
        parameters = [self.model.parameters[i] for i in unit.parameters]
        used = set(self.model.ready_order)
        reduced = [self.model.parameters[i] for i in unit.parameters if i in used]
        orig, sent, summed = self._dtypes(unit, parameters)
        gathered, scattered = self._elements(parameters), self._elements(reduced)
        in_float8 = self._elements([self.model.parameters[i] for i in self._cast_before(unit)])
        gathered_bytes = (gathered - in_float8) * ITEM_BYTES[sent] + in_float8
        gradient_bytes = scattered * ITEM_BYTES[sent]
        scattered_bytes = scattered * ITEM_BYTES[summed]
        sent_shard_bytes = scattered_bytes // self.mesh.ranks
        shard_bytes = scattered * ITEM_BYTES[orig] // self.mesh.ranks
        cast_bytes = shard_bytes + sent_shard_bytes if orig != summed else 0
        before, after = self._divisors(summed)
        divided_ns = self._moved_ns(2 * sent_shard_bytes) if after != 1 else 0
        copied_bytes = gradient_bytes + scattered_bytes
        from_host, to_host = (self._offloaded(some) for some in (parameters, reduced))
        kept_bytes = gathered_bytes // (self.kept_by or self.mesh.ranks)
        gather_ns = self._host_ns(_GATHER, parameters)
        return Group(
            name=unit.name,
            parameters=unit.parameters,
            begins_model=unit.begins_model,
            gathered_bytes=gathered_bytes,
            gradient_bytes=gradient_bytes,
            scattered_bytes=scattered_bytes,
            sent_shard_bytes=sent_shard_bytes,
            shard_bytes=shard_bytes,
            gather=Launch(
                gather_ns + from_host.host_ns,
                from_host.device_ns + self._copies_ns(gathered - in_float8, orig, sent, in_float8),
            ),
            regather=Launch(gather_ns, self._moved_ns(2 * kept_bytes)),
            copy_out=Launch(
                self._host_ns(_COPY_OUT, parameters), self._moved_ns(2 * gathered_bytes)
            ),
            forward_ns=self._host_ns(_FORWARD, parameters),
            backward_ns=self._host_ns(_BACKWARD, reduced),
            copy_in=Launch(
                self._host_ns(_REDUCE, reduced) + to_host.host_ns,
                self._moved_ns(copied_bytes),
            ),
            cast_in=self._each(reduced, sent, summed, 1),
            add_in=self._each(reduced, sent, summed, 2),
            before_ns=self._moved_ns(2 * scattered_bytes) if before != 1 else 0,
            after_ns=divided_ns + self._moved_ns(cast_bytes) + to_host.device_ns,
            accumulate_ns=self._moved_ns(3 * shard_bytes),
            add_partial_ns=self._moved_ns(3 * sent_shard_bytes),
            kept_bytes=kept_bytes,
            keep_ns=self._moved_ns(2 * kept_bytes),
            copied_bytes=gathered * ITEM_BYTES[orig] // self.mesh.ranks if self.offload else 0,
            offloads=self.offload is not None,
            scales=0 if self.precomputes_scales else len(self._cast_before(unit)),
        )

    def _cast_before(self, unit: Unit) -> list[int]:
        """Parameters that are gathered in float8."""
        return [i for i in unit.parameters if i in self.model.float8_gathered]

    def cast_of_outputs(self, elements: float) -> Launch:
        """The cast of what a unit hands on, from the type of parameters to `output`, and back."""
        types = self.spec.mixed_precision
        sent, output = types.param or self.model.parameters[0].dtype, types.output
        if output in (None, sent) or not elements:
            return Launch(0, 0)
        size_bytes = elements * (ITEM_BYTES[sent] + ITEM_BYTES[output])
        return self.prices.launch([self.prices.passed(size_bytes)])

    def _divisors(self, summed: str) -> tuple[float, float]:
        if summed != "float16":  # NCCL divides in its reductions
            return 1, 1
        return divisors(self.spec.gradient_divide_factor or self.mesh.ranks * self.mesh.replicas)

    def _each(self, parameters: Sequence[Parameter], sent: str, summed: str, passes: int) -> Launch:
        """A kernel for each gradient, which reads it and passes over its sum; none of one type."""
        if sent == summed or not parameters:
            return Launch(0, 0)
        one, whole = ITEM_BYTES[sent], passes * ITEM_BYTES[summed]
        return self.prices.launch(self.prices.passed(p.numel * (one + whole)) for p in parameters)

    def accumulated(self, index: int) -> Work:
        """A gradient added to an earlier micro-batch's by autograd.

        torch adds those that it reduces in another type itself: `Group.add_in`.
        """
        parameter = self.model.parameters[index]
        sent = self.spec.mixed_precision.param or parameter.dtype
        if (self.spec.mixed_precision.reduce or sent) != sent:
            return Work(0.0)
        return self.prices.accumulated(parameter._replace(dtype=sent))

    def _offloaded(self, parameters: Sequence[Parameter]) -> Launch:
        """Copies of one rank's shards between host and device."""
        if self.offload is None:
            return Launch(0, 0)
        sizes = (self.padded(p) * ITEM_BYTES[p.dtype] // self.mesh.ranks for p in parameters)
        return self.prices.ticks.launch(self.offload.copies(sizes))

    @property
    def kept_by(self) -> int | None:
        """So many ranks part the parameters after the forward; None: all that share a copy, or all
        are whole.
        """
        ranks = self.spec.kept_by
        return None if ranks in (1, self.mesh.ranks) else ranks

    def staying(self, units: int) -> frozenset[int]:
        """Units, of so many, whose parameters stay after the forward; torch takes one rank for all.

        The root's do by default, as the backward would gather them at once.
        """
        if self.spec.reshard_after_forward is None:
            return frozenset({ROOT})
        keeps_all = self.spec.reshard_after_forward is False or self.spec.kept_by == 1
        return frozenset(range(units) if keeps_all else ())

    def gradient_bytes(self, index: int) -> int:
        """The bytes of a parameter's gradient, as the backward makes it."""
        parameter = self.model.parameters[index]
        sent = self.spec.mixed_precision.param or parameter.dtype
        return self.padded(parameter) * ITEM_BYTES[sent]

    def optimizer(self, optimizer: Optimizer, moved_bytes: float) -> Launch:
        """On shards: a part of its bytes, with the host's time for DTensors.

        `moved_bytes`: by the optimizer of the whole model. Where it is offloaded the host does it
        all, while the device idles.
        """
        whole = self.model.optimizer
        count = len(self.model.used) if self.optimized is None else self.optimized
        if not self.offload:
            return self.prices.ticks.launch(
                on_shards(whole, optimizer, count, self.mesh.ranks, self.prices)
            )
        host_s = self.prices.host_times * count * dispatch_s(optimizer, "cpu")
        moved_s = moved_bytes / self.mesh.ranks / self.offload.optimizer_bytes_per_s
        return self.prices.ticks.launch(Work(whole.host_s + host_s + moved_s))

    def scales(self) -> Iterator[Instruction]:
        """precompute_float8_dynamic_scale_for_fsdp: largest values of all shards, reduced at once.

        Source: torchao's float8/fsdp_utils.py: _foreach_norm, a stack, and one all-reduce.
        """
        weights = [self.model.parameters[i] for i in sorted(self.model.float8_gathered)]
        if not self.precomputes_scales:
            return
        sizes = (self.padded(p) * ITEM_BYTES[p.dtype] // self.mesh.ranks for p in weights)
        host_s = self.prices.host_times * _SCALE_S * len(weights)
        largest = Launch(self.prices.ticks.host_ns(host_s), self._moved_ns(sum(sizes)))
        yield compute("optimizer", largest)
        if self.mesh.ranks > 1:
            host_ns, size_bytes = self.prices.call_ns, 4 * len(weights)
            cause = "scales of float8 weights"
            yield Communicate(
                _SCALES, host_ns, "all_reduce", size_bytes, cause=cause, group=self.mesh.group
            )
            yield Await(_SCALES)

    @property
    def norm_sum(self) -> NormSum:
        """The sum of norms of DTensors, which are added once the norm itself is wanted."""
        return NormSum(_CLIP.of(len(self.model.used)), self.mesh.group)

    @property
    def sharded_model(self) -> Model:
        """The model with one rank's parameters."""
        parameters = self.model.parameters
        parts = (
            p._replace(numel=self.padded(p) // self.mesh.ranks, shape=None) for p in parameters
        )
        return replace(self.model, parameters=tuple(parts))

    @property
    def shard_bytes(self) -> int:
        """The bytes of one rank's parameters."""
        sizes = (self.padded(p) * ITEM_BYTES[p.dtype] for p in self.model.parameters)
        return sum(sizes) // self.mesh.ranks

    def padded(self, parameter: Parameter) -> int:
        """Elements with which all ranks' shards are alike: its rows, up to a multiple of ranks."""
        rows = parameter.rows or parameter.numel
        return ceil(rows / self.mesh.ranks) * self.mesh.ranks * (parameter.numel // rows)

    def _elements(self, parameters: Sequence[Parameter]) -> int:
        return sum(self.padded(parameter) for parameter in parameters)

    def _dtypes(self, unit: Unit, parameters: Sequence[Parameter]) -> tuple[str, str, str]:
        """Source: _fsdp_param_group.py, _init_mp_dtypes."""
        return dtypes_of(unit, parameters, self.spec.mixed_precision, "ddp.fully_shard")

    def _copies_ns(self, elements: int, orig: str, sent: str, in_float8: int) -> int:
        """A rank's shards into its part of the output, and a cast before it.

        `in_float8`: elements that are cast to that, once their largest value is found, unless it is
        known (torchao's float8/fsdp_utils.py).
        """
        own_bytes, sent_bytes = (elements * ITEM_BYTES[d] // self.mesh.ranks for d in (orig, sent))
        casts = self.spec.mixed_precision.param is not None
        cast_ns = self._moved_ns(own_bytes + sent_bytes) if casts else 0
        item_bytes, shard = ITEM_BYTES[orig], in_float8 // self.mesh.ranks
        passes = 1 if self.precomputes_scales else 2
        float8_ns = self._moved_ns((passes * item_bytes + 1) * shard)
        return cast_ns + float8_ns + self._moved_ns(2 * (sent_bytes + shard))

    def _moved_ns(self, size_bytes: int) -> int:
        return self.prices.moved_ns(size_bytes)

    def _host_ns(self, host: HostTime, parameters: Sequence[Parameter]) -> int:
        return host.ns(len(parameters), self.prices)


# --- the host's time for an optimizer over DTensors, operator by operator ------------------------

# Each operator over a DTensor finds the sharding of its result in Python or C++ before it runs.
# Measured with torch 2.13, more than over tensors, on one core of an EPYC (thread's own time, 20 to
# 600 parameters): 4 to 6 us an operator whose arguments are tensors, 14 us one with a number among
# them, 1.2 to 2.6 us a parameter of a foreach operator, 11 to 20 us of Adam's fused one.
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
