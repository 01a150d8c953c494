"""What a trace says of one step: its pieces of work, its gradients, and its collectives."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
}
_NAME = re.compile(
    r"nccl(?:Dev)?Kernel_AllReduce_(?:[A-Za-z0-9]+_)*?(?P<algorithm>RING|TREE|COLLNET|NVLS)(?=_|\b)"
)
_RING_THREADS = {
    **dict.fromkeys((544, 288), "Simple"),  # 512 or 256 of them, and a warp
    **dict.fromkeys((512, 256, 128, 64), "LL"),
    **dict.fromkeys((320,), "LL128"),
}
_TREE_THREADS = dict.fromkeys((512, 256, 128, 64), "LL")


class Piece(NamedTuple):
    """Seconds that the device works, and that the host takes to launch it."""

    device_s: float
    host_s: float


class Gradient(NamedTuple):
    """What a trace with shapes tells of a gradient; None without.

    `in_checkpoint`: made by a reentrant checkpoint, which makes them of its inputs too. `hook_s`:
    the host's time in DDP's hook on it, copy into the bucket and all; None without DDP.
    """

    shape: tuple[int, ...] | None
    dtype: str | None
    in_checkpoint: bool = False
    hook_s: float | None = None

    @property
    def numel(self) -> int | None:
        """Number of elements."""
        return None if self.shape is None else prod(self.shape)


class MeasuredCollective(NamedTuple):
    """One collective of the rank, waiting for late peers included; None: size not recorded.

    `start_s` by the rank's own clock; `kernel`: the name of NCCL's kernel, launched with so many
    `blocks` of so many `threads`; gloo has none. `delay_s`: what passed until a thread of gloo
    that was free had begun it.
    """

    operation: str
    elements: int | None
    dtype: str | None
    duration_s: float
    of_gradients: bool
    start_s: float = 0.0
    kernel: str = ""
    blocks: int | None = None
    threads: int | None = None
    delay_s: float = 0.0

    @property
    def end_s(self) -> float:
        """End by the rank's own clock."""
        return self.start_s + self.duration_s

    @property
    def size_bytes(self) -> int:
        """What is sent; 0 where it is not recorded."""
        return (self.elements or 0) * ITEM_BYTES.get(self.dtype or "", 0)


class OwnOfDdp(NamedTuple):
    """Seconds that DDP's own copies take a CPU's main thread.

    `before`: what of the forward comes before the first broadcast; `buffers`: of buffers, up to
    the call of each broadcast, and after the last one; `copy_back`: of each gradient out of its
    bucket, in order.
    """

    before: float = 0.0
    buffers: tuple[float, ...] = ()
    copy_back: tuple[float, ...] = ()


class StepParts(NamedTuple):
    """Seconds of a step by what the device does, on a CPU the main thread; they sum to the step.

    The terms are those of a result's breakdown: `backward` holds DDP's copies into buckets, `other`
    those out of them and the gaps in which the device waits for the host.
    """

    data_wait: float = 0.0
    forward: float = 0.0
    backward_compute: float = 0.0
    exposed_comm: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0


@dataclass(frozen=True)
class KinetoStep:
    """One step: `backward[i]` ends with `gradients[i]`, one more piece is the tail.

    `start_s` and `length_s` are by the host's clock, `loader_s` its wait for a batch;
    `beside_comm_s` of the device's work was done while a collective was under way. `has_optimizer`:
    whether one stepped. `done_s`: when the device has done all of it, and `lasts_s` how long after
    the step before; on a CPU those of the host. `ddp_host_s`: what DDP itself takes the host,
    `own_of_ddp` of a CPU its parts.
    `reads`: how often the host reads a value from the device and waits for it. `sends_early`:
    whether a bucket is sent before the last gradient is there. `earlier`: the micro-batches before
    the last one, whose are the forward, backward and gradients; `loader_s`,
    `reads` and `collectives` are those of all.
    """

    name: str
    length_s: float
    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    optimizer: Piece
    gradients: tuple[Gradient, ...]
    collectives: tuple[MeasuredCollective, ...]
    loader_s: float
    beside_comm_s: float
    has_optimizer: bool
    start_s: float = 0.0
    done_s: float = 0.0
    lasts_s: float = 0.0
    ddp_host_s: float = 0.0
    own_of_ddp: OwnOfDdp = field(default_factory=OwnOfDdp)
    reads: int = 0
    sends_early: bool = True
    parts: StepParts = field(default_factory=StepParts)
    earlier: tuple[KinetoStep, ...] = ()

    @property
    def device_s(self) -> float:
        """All the device's work."""
        return sum(piece.device_s for piece in self._pieces)

    @property
    def host_s(self) -> float:
        """All that the host takes to launch it, waits left out."""
        return sum(piece.host_s for piece in self._pieces)

    @property
    def busy_s(self) -> float:
        """What the longer of the two takes."""
        return max(self.device_s, self.host_s)

    @property
    def _pieces(self) -> tuple[Piece, ...]:
        every = (*self.earlier, self)
        of_all = (piece for each in every for piece in (*each.forward, *each.backward))
        return (*of_all, self.optimizer)

    @property
    def micro_batches(self) -> tuple[KinetoStep, ...]:
        """All of them as steps of one, the last with the optimizer."""
        before = sum(len(each.collectives) for each in self.earlier)
        return (*self.earlier, replace(self, earlier=(), collectives=self.collectives[before:]))

    @property
    def typical_micro_batch(self) -> KinetoStep:
        """The one whose forward and backward are the median."""
        every = sorted(self.micro_batches, key=lambda each: each.busy_s - sum(each.optimizer))
        return every[(len(every) - 1) // 2]

    @property
    def usual_s(self) -> float:
        """`busy_s`, if all micro-batches were like the typical one."""
        if not self.earlier:
            return self.busy_s
        one = replace(self.typical_micro_batch, optimizer=Piece(0.0, 0.0))
        return len(self.micro_batches) * one.busy_s + max(self.optimizer)

    @property
    def reductions(self) -> int:
        """Micro-batches whose gradients are reduced: all or the last."""
        return 1 + sum(any(c.of_gradients for c in each.collectives) for each in self.earlier)

    @property
    def bucket_elements(self) -> tuple[int, ...] | None:
        """Elements of the gradients' all-reduces as launched; None where one has no size.

        Of several micro-batches that reduce, those of the last.
        """
        every = [c.elements for c in self.collectives if c.of_gradients]
        sizes = every[len(every) - len(every) // self.reductions :]
        return None if None in sizes else tuple(size for size in sizes if size is not None)


def range_of_unlike(counts: Iterable[int]) -> str:
    """Counts that differ in words, `3 to 5`; empty if all are the same."""
    values = set(counts)
    return f"{min(values)} to {max(values)}" if len(values) > 1 else ""


class KernelChoice(NamedTuple):
    """What ran an all-reduce: the algorithms and the protocol that it may be; None: not told.

    A kernel's name tells less than it seems to. Kernels are compiled for LL alone and run the other
    protocols too, and since 2.19 all that is no tree runs in the ring's kernel (nccl
    src/device/generate.py, best_kernel; before, NCCL_FUNC5 in src/enqueue.cc). The protocol shows
    in the threads of a block: Simple adds a warp to a ring's, and LL128 has up to 640
    (src/enqueue.cc, src/include/device.h). A channel is a block of the grid.
    """

    algorithms: tuple[str, ...]
    protocol: str | None
    channels: int | None


def kernel_choice(name: str, channels: int | None, threads: int | None) -> KernelChoice | None:
    """Reads NCCL's choice from an all-reduce's kernel; None for one of another name.

    >>> kernel_choice("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevKernelArgs4K)", 8, 512)
    KernelChoice(algorithms=('tree',), protocol='LL', channels=8)
    """
    match = _NAME.match(name)
    if match is None:
        return None
    is_tree = match["algorithm"] == "TREE"
    protocols = _TREE_THREADS if is_tree else _RING_THREADS
    protocol = protocols.get(threads or 0)
    since_2_19 = name.startswith("ncclDevKernel")
    others = ("ring", "nvls") if since_2_19 and protocol in (None, "Simple") else ("ring",)
    return KernelChoice(("tree",) if is_tree else others, protocol, channels)
