"""Run operators on shapes alone: large tensors have no memory, small ones of the host their values.

A tensor on torch's meta device has a shape and no values. What a user's code makes on the host
stays real where it is small, so that code may look at its values (`torch.linspace(...).tolist()`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["META", "Shapes", "drop_memory", "tensors", "without_memory"]

META = torch.device("meta")
_SMALL = 2**16  # elements of a tensor that the host may hold: relative positions, schedules, labels


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested arguments or results, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Shapes(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """A mode in which an operator on anything without memory, or too large, has no memory either.

    `limit`: elements of a tensor that is made with its values.
    """

    def __init__(self, limit: int = _SMALL) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._limit = limit
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # each with what keeps its id its own

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        if any(tensor.is_meta for tensor in given):
            return self.on_shapes(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            return self.on_shapes(func, args, kwargs)
        if not given and "device" in kwargs:
            made = self.on_shapes(func, args, kwargs)
            if not isinstance(made, Tensor) or made.numel() > self._limit:
                return made
        return func(*args, **kwargs)

    def on_shapes(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one operator without memory, whatever its arguments are."""
        args, kwargs = tree_map_only(Tensor, self._bare, (args, kwargs))
        if "device" in kwargs:
            kwargs = kwargs | {"device": META, "pin_memory": None}
        return func(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory" or v})

    def _bare(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if tensor.dim() == 0 and not tensor.requires_grad:
            return tensor  # a number, which any device takes
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = (tensor, _empty(tensor))
        return self._copies[id(tensor)][1]


def without_memory(tree: Any) -> Any:
    """Nested inputs with each tensor as its shape alone."""
    return tree_map_only(Tensor, lambda leaf: leaf if leaf.is_meta else _empty(leaf), tree)


def drop_memory(model: nn.Module) -> None:
    """Take the memory of a model's parameters and buffers; each stays the object that it is."""
    for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        if not tensor.is_meta:
            bare = _empty(tensor)
            if isinstance(tensor, nn.Parameter):
                bare = nn.Parameter(bare, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, bare)  # type: ignore[no-untyped-call]


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device=META,
        requires_grad=tensor.requires_grad,
    )
