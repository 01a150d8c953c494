"""What NCCL's kernels in a trace tell: the algorithm, the protocol, and the channels.

A name tells less than it seems to. Kernels are compiled for LL alone and run the other protocols
too, and since 2.19 all that is no tree runs in the ring's kernel (nccl src/device/generate.py,
best_kernel; before, NCCL_FUNC5 in src/enqueue.cc). The protocol shows in the threads of a block:
Simple adds a warp to a ring's, and LL128 has up to 640 (src/enqueue.cc, src/include/device.h).
A channel is a block of the grid.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(
    r"nccl(?:Dev)?Kernel_AllReduce_(?:[A-Za-z0-9]+_)*?(?P<algorithm>RING|TREE|COLLNET|NVLS)(?=_|\b)"
)
_RING_THREADS = {
    **dict.fromkeys((544, 288), "Simple"),  # 512 or 256 of them, and a warp
    **dict.fromkeys((512, 256, 128, 64), "LL"),
    **dict.fromkeys((320,), "LL128"),
}
_TREE_THREADS = dict.fromkeys((512, 256, 128, 64), "LL")


class KernelChoice(NamedTuple):
    """What ran an all-reduce: the algorithms and the protocol that it may be; None: not told."""

    algorithms: tuple[str, ...]
    protocol: str | None
    channels: int | None

    def may_be(self, algorithm: str, protocol: str) -> bool:
        """Whether it may be this choice."""
        return algorithm in self.algorithms and self.protocol in (None, protocol)


def kernel_choice(name: str, channels: int | None, threads: int | None) -> KernelChoice | None:
    """Of an all-reduce's kernel; None for one of another name.

    >>> kernel_choice("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevKernelArgs4K)", 8, 512)
    KernelChoice(algorithms=('tree',), protocol='LL', channels=8)
    """
    match = _NAME.match(name)
    if match is None:
        return None
    is_tree = match["algorithm"] == "TREE"
    known = _TREE_THREADS if is_tree else _RING_THREADS
    protocol = known.get(threads or 0)
    since_2_19 = name.startswith("ncclDevKernel")
    others = ("ring", "nvls") if since_2_19 and protocol in (None, "Simple") else ("ring",)
    return KernelChoice(("tree",) if is_tree else others, protocol, channels)
