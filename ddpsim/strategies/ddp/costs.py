"""What DDP itself costs a rank: hooks, copies between gradients and buckets, buffers.

Sources: kernels and bytes per mode from torch's reducer.cpp (mark_variable_ready_dense,
finalize_bucket_dense) and distributed.py (_sync_buffers); host microseconds per parameter
measured with torch 2.13 on CPU tensors, world size 1, 1000 tiny parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.device import Device
from ddpsim.strategies.ddp.buckets import assign_by_size
from ddpsim.strategies.ticks import Launch, Ticks
from ddpsim.units import MIB
from ddpsim.workload.model import ITEM_BYTES, Buffer, Model, Parameter, Work, joined

if TYPE_CHECKING:
    from ddpsim.importers.profiles.cluster import Overheads

# one collective from the C++ reducer, host side: 10-20 us, assumed 15; called in Python, as by a
# hook, 20-40 us, assumed 30
_LAUNCH_COLLECTIVE_S = 15e-6
PYTHON_COLLECTIVE_S = 30e-6
# what a hook of DeepSpeed 0.18.5 takes to count one parameter: 3.5 to 4.9 us by DeepSpeed#7886
# (147 parameters on H100s, 126.5 ms a step, of which 20 to 50.5 ms are other work); 2.2 us measured
# with CPU tensors
COUNTED_S = 4.2e-6
_HOOK_S = 5.0e-6  # of a parameter, with the default options
# hooks of units in steps of five models on a CPU; forward and backward of an operator on the host
# where they were measured (linear layers, norms and ReLUs of width 4)
_IN_A_STEP, _OPERATOR_S = 3.0, 21e-6
_DIVIDING = ("allreduce", "powerSGD", "post_localSGD")  # hooks that divide the bucket themselves
_BROADCAST_BYTES = 250 * MIB  # torch: distributed.py, broadcast_bucket_size


class BufferBroadcast(NamedTuple):
    """One coalesced broadcast: flatten, send `size_bytes`, copy back into each buffer."""

    size_bytes: int
    flatten: Work
    unflatten: Work


class HookWork(NamedTuple):
    """A communication hook on one bucket: work before, bytes on the wire, work after."""

    before: Work
    size_bytes: int
    after: Work


@dataclass(frozen=True)
class DdpCosts:
    """The costs of one device under one set of DDP options; measured `overheads` come first."""

    device: Device
    ddp: Ddp
    overheads: Overheads | None = None

    def moved(self, size_bytes: float, bytes_per_s: float | None = None) -> Work:
        """One kernel that reads and writes `size_bytes` in all, at its own rate if it has one."""
        rate = bytes_per_s or self._moved_bytes_per_s
        return Work(max(self.device.kernel_floor_s, size_bytes / rate), 1)

    def product(self, size_bytes: float, rank: int) -> Work:
        """A matrix of `size_bytes` times a narrow one of `rank` columns: a pass over its bytes.

        As fast as measured, with the nearest number of columns; else as other kernels.
        """
        products = self.overheads.narrow_products if self.overheads else ()
        nearest = min(products, key=lambda each: abs(each.rank - rank), default=None)
        return self.moved(size_bytes, nearest.bytes_per_s.value if nearest else None)

    @property
    def _moved_bytes_per_s(self) -> float:
        """Read plus written."""
        measured = self.overheads and self.overheads.copy_bytes_per_s
        preset = self.device.memory_bandwidth_bytes_per_s * self.device.memory_efficiency
        return measured.value if measured else preset

    def _copied(
        self, parameter: Parameter, passes: int = 2, bytes_per_s: float | None = None
    ) -> Work:
        """So many passes over a gradient's memory; two: from gradient to bucket or back.

        On a CPU its bytes alone: what else an operator costs is in `parameter_hook_s`, which was
        measured there, copies of tiny parameters and all.
        """
        size_bytes = passes * parameter.size_bytes
        if self.device.kind == "cpu":
            return Work(size_bytes / (bytes_per_s or self._moved_bytes_per_s), 1)
        return self.moved(size_bytes, bytes_per_s)

    def accumulated(self, parameter: Parameter) -> Work:
        """A later micro-batch's gradient added to what is there (torch's accumulate_grad.h).

        Two are read, one is written. The first micro-batch's is kept as it is: zero_grad left none.
        """
        return self._copied(parameter, 3)

    def copy_in(self, parameter: Parameter) -> Work:
        """Gradient to bucket: a fused copy and divide, also under gradient_as_bucket_view.

        The time of a byte goes linearly with the logarithm of the size between measured ones.
        Where the hook was measured in the model's own backward: all of it that every hook has not.
        """
        if parameter.ddp_hook_s is not None and self.device.kind == "cpu":
            return Work(max(0.0, parameter.ddp_hook_s - self._default_hook_s), 1)
        if not self._copies_in:
            return self._copied(parameter)
        from ddpsim.importers.profiles.part import interpolated  # noqa: PLC0415 -- a profile's

        sizes, byte_s = self._copies_in
        own_s = interpolated(math.log(max(1, parameter.size_bytes)), sizes, byte_s)
        return self._copied(parameter, bytes_per_s=1 / own_s)

    def zeroed(self, parameter: Parameter) -> Work:
        """What comes into the bucket in place of a gradient that there is none of."""
        return self._copied(parameter, 1)

    @cached_property
    def _copies_in(self) -> tuple[tuple[float, ...], ...]:
        """Logarithms of measured sizes, ascending, and seconds a byte; empty where none was."""
        copies = self.overheads.copy_in if self.overheads else ()
        points = sorted((math.log(p.gradient_bytes), 1 / p.bytes_per_s.value) for p in copies)
        return tuple(zip(*points, strict=True))

    def copy_back(self, parameters: Sequence[Parameter]) -> Work:
        """Bucket to gradients after the all-reduce: a copy of each, saved by the view."""
        if self.ddp.gradient_as_bucket_view:
            return Work(0.0)
        copies = [self._copied(parameter) for parameter in parameters]
        each_s = self._copy_back_s
        return Work(sum(copy.device_s + each_s for copy in copies), len(copies))

    @property
    def _copy_back_s(self) -> float:
        """What of a measured hook comes after the backward; the view copies nothing back."""
        copy_back_s = self.overheads and self.overheads.hook_s and self.overheads.copy_back_s
        return copy_back_s.value if copy_back_s and not self.ddp.gradient_as_bucket_view else 0.0

    def hook(self, size_bytes: int, dtype: str = "float32") -> HookWork:
        """What happens to one full bucket around its all-reduce; all of it is of one dtype."""
        sent = self.ddp.sent_dtype
        if sent:
            wire_bytes = size_bytes // ITEM_BYTES[dtype] * ITEM_BYTES[sent]
            if dtype == sent:  # nothing is cast, and copied back to itself
                return HookWork(self.moved(2 * wire_bytes), wire_bytes, Work(0.0))
            measured = self.overheads if dtype == "float32" else None
            before = self._compress(size_bytes, wire_bytes, measured)
            return HookWork(before, wire_bytes, self._decompress(size_bytes, wire_bytes, measured))
        divides = self.ddp.torch == "1.4" or self.ddp.comm_hook in _DIVIDING
        before = self.moved(2 * size_bytes) if divides else Work(0.0)
        return HookWork(before, size_bytes, Work(0.0))

    def _compress(self, size_bytes: int, wire_bytes: int, overheads: Overheads | None) -> Work:
        """A cast to a new tensor and a division in place; bfloat16 is taken to be as float16."""
        measured = overheads and overheads.compress_bytes_per_s
        if measured:
            least_s = 2 * self.device.kernel_floor_s
            return Work(max(least_s, size_bytes / measured.value), 2)
        cast, division = self.moved(size_bytes + wire_bytes), self.moved(2 * wire_bytes)
        return Work(cast.device_s + division.device_s, 2)

    def _decompress(self, size_bytes: int, wire_bytes: int, overheads: Overheads | None) -> Work:
        measured = overheads and overheads.decompress_bytes_per_s
        if measured:
            return self.moved(size_bytes, measured.value)
        return self.moved(size_bytes + wire_bytes)

    @property
    def parameter_hook_s(self) -> float:
        """Host seconds that DDP adds to the backward per parameter, launches of copies apart.

        Measured are the default options, on a GPU with the launches of a copy in and a copy back;
        others then take as many times as long as published.
        """
        measured = self.overheads and self.overheads.hook_s
        if not measured:
            return max(0.0, self._hook_s - self._copy_back_s)
        launches_s = 0.0 if self.device.kind == "cpu" else 2 * self.device.launch_s
        whole_s = self._hook_s * (max(0.0, measured.value - launches_s) / _HOOK_S)
        return max(0.0, whole_s - self._copy_back_s)

    @property
    def _default_hook_s(self) -> float:
        """`parameter_hook_s` under the default options, whatever the options are."""
        default = Ddp(backend=self.ddp.backend)
        return replace(self, ddp=default).parameter_hook_s

    @property
    def _hook_s(self) -> float:
        if self.ddp.finds_unused:
            return 7.5e-6
        if self.ddp.static_graph:
            return 5.8e-6
        return 4.3e-6 if self.ddp.gradient_as_bucket_view else _HOOK_S

    @property
    def host_times(self) -> float:
        """How many times as long Python takes the host as the one on which units were measured.

        A GPU's host is as much slower as its operators are, where those are stated or measured: a
        preset's are of whole loops. On a CPU DDP's own hooks tell, where they were measured.
        """
        if self.device.kind != "cpu":
            is_trusted = self.device.launching_trust(compiled=False) in ("stated", "measured")
            return self.device.operator_s / _OPERATOR_S if is_trusted else 1.0
        measured = self.overheads and self.overheads.hook_s
        return measured.value / _HOOK_S if measured else 1.0

    @property
    def unit_hook_times(self) -> float:
        """How many times as long units' hooks take: a CPU's kernels take the caches, too."""
        return self.host_times * (_IN_A_STEP if self.device.kind == "cpu" else 1)

    @property
    def forward_hook_s(self) -> float:
        """Host seconds that DDP adds to the forward per parameter; find_unused walks the graph."""
        return 1.6e-6 if self.ddp.finds_unused else 0.55e-6

    @property
    def launch_collective_s(self) -> float:
        """Host seconds to launch one bucket's collective."""
        hooks = (self.ddp.optimizer_in_backward, self.ddp.mixed_precision)
        in_python = self.ddp.comm_hook != "none" or any(hooks)
        return PYTHON_COLLECTIVE_S if in_python else _LAUNCH_COLLECTIVE_S

    def operator(self, work: Work) -> Work:
        """Work that one operator of the training loop launches, with the host's time for it."""
        host_s = 0.0 if self.device.kind == "cpu" else self.device.operator_s
        return work._replace(host_s=host_s)

    def optimizer_part(self, whole: Work, device_s: float, few: float) -> Work:
        """The part of an optimizer that takes `device_s`, with `few` of all kernels.

        A kernel takes the device's shortest time at least, unless the whole takes less.
        """
        kernels = ceil(whole.kernels * few)
        floor_s = min(kernels * self.device.kernel_floor_s, whole.device_s)
        return Work(max(floor_s, device_s), kernels, few * whole.host_s)

    def broadcasts(self, buffers: Sequence[Buffer]) -> tuple[BufferBroadcast, ...]:
        """What is broadcast together: buffers of one dtype, up to 250 MiB (_sync_buffers)."""
        return self._together(buffers) if self.ddp.broadcast_buffers else ()

    def first_broadcasts(self, model: Model) -> tuple[BufferBroadcast, ...]:
        """What DDP's constructor broadcasts, likewise: parameters and buffers.

        Source: torch's distributed/utils.py (_sync_module_states), which takes frozen ones too.
        """
        states = [Buffer(each.dtype, each.numel) for each in model.parameters]
        frozen = [Buffer("uint8", model.frozen_bytes)] if model.frozen_bytes else []
        return self._together([*states, *frozen, *model.buffers])

    def _together(self, buffers: Sequence[Buffer]) -> tuple[BufferBroadcast, ...]:
        sizes_bytes = [buffer.size_bytes for buffer in buffers]
        dtypes = [buffer.dtype for buffer in buffers]
        groups = assign_by_size(sizes_bytes, dtypes, [_BROADCAST_BYTES])
        return tuple(self._broadcast([buffers[i] for i in group]) for group in groups)

    def _broadcast(self, buffers: Sequence[Buffer]) -> BufferBroadcast:
        size_bytes = sum(buffer.size_bytes for buffer in buffers)
        copies = [self.moved(2 * buffer.size_bytes) for buffer in buffers]
        unflatten = Work(sum(copy.device_s for copy in copies), len(copies))
        return BufferBroadcast(size_bytes, self.moved(2 * size_bytes), unflatten)


@dataclass(frozen=True)
class Prices(DdpCosts):
    """The costs of a device in the engine's ticks, on the clock of the model's launches."""

    ticks: Ticks = field(kw_only=True)

    def passed(self, size_bytes: float) -> Work:
        """One operator that reads and writes `size_bytes` in all."""
        return self.operator(self.moved(size_bytes))

    def launch(self, works: Iterable[Work]) -> Launch:
        """Launch several pieces of work as one; without any, nothing."""
        return self.ticks.launch(joined([Work(0.0), *works]))

    def moved_ns(self, size_bytes: float) -> int:
        """The device's time to read and write `size_bytes` in all; none for none."""
        return self.ticks.launch(self.moved(size_bytes)).device_ns if size_bytes else 0

    @property
    def call_ns(self) -> int:
        """The host's time to call one collective from Python."""
        return self.ticks.host_ns(PYTHON_COLLECTIVE_S)
