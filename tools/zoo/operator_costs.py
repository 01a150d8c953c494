"""What an operator costs: its FLOPs, and the bytes that it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

COSTS = ("matmul_flops", "matmul_elements", "other_elements")


aten = torch.ops.aten


# Allocations and reshapes whose schema does not say that they alias; no kernel is launched.
FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


# Tensor arguments (by position) that are not read in full: only their shape matters, or only one
# element per row is picked (nll_loss), or they are about to be overwritten.
UNREAD: dict[str, tuple[int, ...]] = {
    "_adaptive_avg_pool2d_backward": (1,),
    "copy_": (0,),
    "embedding": (0,),
    "fill_": (0,),
    "max_pool2d_with_indices_backward": (1,),
    "new_zeros": (0,),
    "nll_loss_backward": (1,),
    "nll_loss_forward": (0,),
    "ones_like": (0,),
    "zero_": (0,),
    "zeros_like": (0,),
}


@dataclass
class Cost:
    """Work of a run of operators: FLOPs, elements read plus written, kernel launches."""

    matmul_flops: int = 0
    matmul_elements: int = 0
    other_elements: int = 0
    kernels: int = 0

    def add(self, other: Cost) -> None:
        """Add the work of `other` to this one."""
        self.matmul_flops += other.matmul_flops
        self.matmul_elements += other.matmul_elements
        self.other_elements += other.other_elements
        self.kernels += other.kernels


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested arguments or results, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def touched(tensor: Tensor) -> int:
    """Elements of storage behind a tensor: a dimension of stride 0 (expand) counts once."""
    if tensor.numel() == 0:
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride)


def storage_of(tensor: Tensor) -> Any:
    """Hashable identity of the storage behind a tensor, never reused while it is held."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def traffic(group: Iterable[Tensor]) -> int:
    """Elements of distinct views in a group of tensors, at most the size of each storage."""
    views: dict[Any, dict[tuple[Any, ...], int]] = {}
    capacity: dict[Any, int] = {}
    for tensor in group:
        storage = storage_of(tensor)
        key = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        views.setdefault(storage, {})[key] = touched(tensor)
        capacity[storage] = tensor.untyped_storage().nbytes() // tensor.element_size()
    return sum(min(sum(sizes.values()), capacity[key]) for key, sizes in views.items())


def name_of(func: Any) -> str:
    """Name of an operator without namespace and overload, such as "addmm"."""
    return str(func.overloadpacket.__name__)


def is_free(func: Any) -> bool:
    """Whether an operator launches nothing: views, metadata, allocations."""
    return bool(func.is_view) or name_of(func) in FREE


def convolution_backward_flops(args: Sequence[Any], out: Any) -> int:
    """FLOPs of aten.convolution_backward; args as in its schema."""
    formula = flop_registry[aten.convolution_backward]
    needs_input, needs_weight, _ = args[10]
    by_input = int(formula(*args[:10], [needs_input, False, False], out_val=out))
    by_weight = int(formula(*args[:10], [False, needs_weight, False], out_val=out))
    # flop_counter multiplies all input with all output channels for the weight gradient, also
    # those of different groups ("I skip those" in its conv_backward_flop).
    return by_input + by_weight // int(args[9])


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one matmul-class operator call, 2 per multiply-add."""
    if func.overloadpacket is aten.convolution_backward:
        return convolution_backward_flops(args, out)
    return int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))


def reads_of(name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Elements that one operator call reads."""
    unread = UNREAD.get(name, ())
    read = [arg for position, arg in enumerate(args) if position not in unread]
    picked = int(out.numel()) if name == "embedding" else 0
    return traffic(tensors((read, kwargs))) + picked


def cost_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Cost:
    """Work of one operator call."""
    written = tensors(out)
    if is_free(func) or not written:
        return Cost()
    name = name_of(func)
    elements = reads_of(name, args, kwargs, out) + traffic(written)
    if func.overloadpacket not in flop_registry:
        return Cost(other_elements=elements, kernels=1)
    kernels = sum(args[10][:2]) if name == "convolution_backward" else 1
    return Cost(flops_of(func, args, kwargs, out), elements, 0, kernels)
