"""A unit's flat parameter: its length with padding, what is sent of it, and what that costs.

Sources: torch 2.13's torch/distributed/fsdp (_flat_param.py: padding, casts; _runtime_utils.py:
divisions). Host times: as those of fully_shard (fully_shard/groups.py), what forward and backward
of 20 units of 2, 8 and 32 tiny parameters take more than without, over a group that sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from ddpsim.scenario.options.fsdp1 import Fsdp1
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.fully_shard.groups import HostTime, divisors
from ddpsim.strategies.fully_shard.unit_step import DeviceMesh, Offload, ShardedUnit
from ddpsim.strategies.fully_shard.units import Unit, dtypes_of
from ddpsim.strategies.ticks import Launch
from ddpsim.strategies.training_loop.around_optimizer import NormSum
from ddpsim.strategies.zero.distributed_optimizer import optimizer_of_shards
from ddpsim.workload.model import ITEM_BYTES, Model, Parameter, Work

_ALIGNED_BYTES = 16  # _get_aligned_numel


class _HostTimes(NamedTuple):
    """Host times of a unit's hooks, which make and drop views of its parameters."""

    pre_forward: HostTime
    pre_backward: HostTime
    pre_backward_whole: HostTime  # where it was not freed
    post_forward: HostTime
    post_forward_whole: HostTime
    post_backward: HostTime
    views: HostTime  # in autograd's graph, the wrapper's call, the final callback


_FLAT = _HostTimes(
    HostTime(199e-6, 11.7e-6),
    HostTime(104e-6, 0.4e-6),
    HostTime(56e-6, 0.3e-6),
    HostTime(41e-6, 0.2e-6),
    HostTime(24e-6, 0.3e-6),
    HostTime(69e-6, 2.8e-6),
    HostTime(49e-6, 0.7e-6),
)
_ORIGINAL = _HostTimes(
    HostTime(202e-6, 19e-6),
    HostTime(151e-6, 17e-6),
    HostTime(66e-6, 1.8e-6),
    HostTime(75e-6, 3.9e-6),
    HostTime(24e-6, 0.2e-6),
    HostTime(100e-6, 0.0),
    HostTime(67e-6, 19.6e-6),
)


class _Lengths(NamedTuple):
    """Elements of a unit: of the flat parameter, and with what the ranks' shards are padded by."""

    flat: int
    padded: int


@dataclass(frozen=True, kw_only=True)
class Flat(ShardedUnit):
    """One unit's parameters, gathered as one tensor, whose gradient is reduced as one.

    `gathered_bytes`: also of a copy in another type; 0 where there is neither. `flat_bytes`: of the
    gradient as the backward makes it; `temporary_bytes`: of all that is made from it, and of it,
    until it is reduced.
    """

    flat_bytes: int
    temporary_bytes: int
    stays_ns: int  # before a backward for which it is whole
    post_forward_ns: int
    joined: Launch  # gradients of the parameters to one of the flat parameter
    added: Launch  # that to an earlier micro-batch's
    reduced: Launch  # a cast, padding and a division before the reduction


@dataclass(frozen=True)
class Flats:
    """Makes the flat parameters of a model's units over the ranks of a mesh."""

    model: Model
    spec: Fsdp1
    prices: Prices
    mesh: DeviceMesh
    offload: Offload | None = None

    def of(self, unit: Unit) -> Flat:
        """One unit's; raises InputError where torch would refuse its dtypes."""
        parameters = [self.model.parameters[i] for i in unit.parameters]
        orig, sent, summed = self._dtypes(unit, parameters)
        lengths, times = self._lengths(parameters, sent), self._times
        reduces = bool(set(unit.parameters) & set(self.model.ready_order))
        reduced = lengths if reduces else _Lengths(0, 0)
        sent_bytes, summed_bytes, own_bytes = (ITEM_BYTES[each] for each in (sent, summed, orig))
        scattered_bytes = reduced.padded * summed_bytes
        shard, part = reduced.padded // self.mesh.ranks, lengths.padded // self.mesh.ranks
        host = [each.ns(len(parameters), self.prices) for each in times]
        copy_ns = self._copied_ns(part, orig, sent)
        gathers = self.mesh.ranks > 1 or sent != orig
        return Flat(
            name=unit.name,
            parameters=unit.parameters,
            gathered_bytes=lengths.padded * sent_bytes if gathers else 0,
            copied_bytes=part * sent_bytes if self.mesh.ranks > 1 and copy_ns else 0,
            flat_bytes=reduced.flat * sent_bytes,
            temporary_bytes=self._temporary_bytes(reduced, orig, sent, summed),
            scattered_bytes=scattered_bytes,
            sent_shard_bytes=shard * summed_bytes,
            shard_bytes=shard * own_bytes,
            gather=Launch(host[0], copy_ns),
            regather=Launch(host[1 if self.mesh.ranks > 1 else 2], copy_ns),
            stays_ns=host[2],
            post_forward_ns=host[3 if self.mesh.ranks > 1 and self.spec.frees_after_forward else 4],
            joined=Launch(
                times.views.ns(len(parameters), self.prices),
                self.prices.moved_ns(2 * reduced.flat * sent_bytes),
            ),
            added=Launch(0, self.prices.moved_ns(3 * reduced.flat * sent_bytes)),
            reduced=Launch(host[5], self._before_ns(reduced, sent_bytes, summed_bytes)),
            after_ns=self._after_ns(shard, summed_bytes, own_bytes),
            accumulate_ns=self.prices.moved_ns(3 * shard * own_bytes),
        )

    def _temporary_bytes(self, reduced: _Lengths, orig: str, sent: str, summed: str) -> int:
        """The gradient, copies of it in another type and with padding, a shard before its cast.

        Of a gradient that every rank has whole, all of these but the last.
        """
        made = [reduced.flat * ITEM_BYTES[sent]]
        made += [reduced.flat * ITEM_BYTES[summed]] if sent != summed else []
        if self.mesh.ranks == 1:
            made += [reduced.flat * ITEM_BYTES[orig]] if summed != orig else []
            return sum(made[:-1])
        padded_bytes = reduced.padded * ITEM_BYTES[summed]
        made += [padded_bytes] if reduced.flat < reduced.padded else []
        return sum(made) + (padded_bytes // self.mesh.ranks if summed != orig else 0)

    @property
    def _times(self) -> _HostTimes:
        return _ORIGINAL if self.spec.use_orig_params else _FLAT

    def _lengths(self, parameters: Sequence[Parameter], sent: str) -> _Lengths:
        """Each parameter begins at 16 bytes where it stays the module's own."""
        if not self.spec.use_orig_params:
            flat = sum(parameter.numel for parameter in parameters)
            return _Lengths(flat, _padded(flat, self.mesh.ranks))
        flat = 0
        for parameter in parameters:
            flat = _padded(flat, _ALIGNED_BYTES // ITEM_BYTES[sent]) + parameter.numel
        world = self.mesh.ranks * (1 if self.spec.is_hybrid else self.mesh.replicas)
        flat = _padded(flat, world)
        return _Lengths(flat, flat)

    def _copied_ns(self, elements: int, orig: str, sent: str) -> int:
        """A shard's copy to the device, and a cast of it."""
        copied_ns = 0
        if self.offload and elements:
            one = self.offload.copies([elements * ITEM_BYTES[orig]])
            copied_ns = self.prices.ticks.launch(one).device_ns
        if orig != sent:
            copied_ns += self.prices.moved_ns(elements * (ITEM_BYTES[orig] + ITEM_BYTES[sent]))
        return copied_ns

    def _before_ns(self, reduced: _Lengths, sent_bytes: int, summed_bytes: int) -> int:
        """A cast, a copy with padding, and a division."""
        casts_ns = self.prices.moved_ns(reduced.flat * (sent_bytes + summed_bytes))
        whole_ns = self.prices.moved_ns(2 * reduced.padded * summed_bytes)
        divides = divisors(self.mesh.ranks * self.mesh.replicas)[0] > 1
        times = (reduced.flat < reduced.padded) + divides
        return (casts_ns if sent_bytes != summed_bytes else 0) + times * whole_ns

    def _after_ns(self, shard: int, summed_bytes: int, own_bytes: int) -> int:
        """A division, a cast, and a copy to the host."""
        after_ns = 0
        if divisors(self.mesh.ranks * self.mesh.replicas)[1] > 1:
            after_ns = self.prices.moved_ns(2 * shard * summed_bytes)
        if summed_bytes != own_bytes:
            after_ns += self.prices.moved_ns(shard * (summed_bytes + own_bytes))
        if self.offload and shard:
            after_ns += self.prices.ticks.launch(self.offload.copies([shard * own_bytes])).device_ns
        return after_ns

    def gradient_bytes(self, index: int) -> int:
        """The bytes of a parameter's gradient, as the backward makes it."""
        parameter = self.model.parameters[index]
        return parameter.numel * ITEM_BYTES[self.spec.mixed_precision.param or parameter.dtype]

    def optimizer(self, moved_bytes: float, flats: Sequence[Flat]) -> Launch:
        """On shards: of flat parameters, or of the parts of parameters that a rank has.

        `moved_bytes`: by the optimizer of the whole model. Where it is offloaded the host does it
        all, while the device idles.
        """
        whole, count = self.model.optimizer, len(self.model.used)
        if self.spec.use_orig_params:
            part = optimizer_of_shards(whole, self.mesh.ranks, self.prices, count)
        else:
            few = min(1.0, sum(bool(flat.scattered_bytes) for flat in flats) / max(1, count))
            part = self.prices.optimizer_part(whole, whole.device_s / self.mesh.ranks, few)
        if self.offload:
            moved_s = moved_bytes / self.mesh.ranks / self.offload.optimizer_bytes_per_s
            part = Work(part.host_s + moved_s)
        return self.prices.ticks.launch(part)

    @property
    def norm_sum(self) -> NormSum | None:
        """The sum of shards' norms (clip_grad_norm_ of FSDP); None: ranks have all gradients."""
        return NormSum(group=self.mesh.group) if self.mesh.sends else None

    def sharded_model(self, flats: Sequence[Flat]) -> Model:
        """The model with one rank's part of each flat parameter as its parameters."""
        if self.mesh.ranks == 1:
            return self.model
        shards = [flat for flat in flats if flat.scattered_bytes]
        parts = tuple(Parameter(flat.name, flat.shard_bytes // 4, "float32") for flat in shards)
        return replace(self.model, parameters=parts, ready_order=tuple(range(len(parts))))

    def shard_bytes(self, units: Sequence[Unit]) -> int:
        """The bytes of one rank's parameters."""
        total = 0
        for unit in units:
            parameters = [self.model.parameters[i] for i in unit.parameters]
            orig, sent, _ = self._dtypes(unit, parameters)
            total += self._lengths(parameters, sent).padded // self.mesh.ranks * ITEM_BYTES[orig]
        return total

    def _dtypes(self, unit: Unit, parameters: Sequence[Parameter]) -> tuple[str, str, str]:
        """Source: _flat_param.py, _init_param_reduce_dtypes and _validate_tensors_to_flatten."""
        return dtypes_of(unit, parameters, self.spec.mixed_precision, "ddp.fsdp1")


def _padded(elements: int, divisor: int) -> int:
    return ceil(elements / divisor) * divisor
