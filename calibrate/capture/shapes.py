"""Run operators on shapes alone: large tensors have no memory, small ones of the host their values.

A tensor on torch's meta device has a shape and no values. What a user's code makes on the host
stays real where it is small, so that code may look at its values (`torch.linspace(...).tolist()`).
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from calibrate.capture.recurrent import backward_shapes, forward_shapes

META = torch.device("meta")
_TORCH = Path(torch.__file__).parent
_TORCHS_OWN = ("aten", "prims", "prim")
_SMALL = 2**16  # elements of a tensor that the host may hold: relative positions, schedules, labels


_ALONE = "a capture has shapes alone; keep it out of the step, or profile the model on its device"
# what torch, extensions and Triton say to a tensor without memory, or on no device of theirs
_WITHOUT_MEMORY = re.compile(r"\bmeta\b|\bcuda\b|no data|active drivers", re.IGNORECASE)


class NoValuesError(RuntimeError):
    """A step cannot be recorded on shapes alone."""


@contextmanager
def without_values() -> Iterator[None]:
    """Tell what fails as it needs memory or a device; CUDA is asked for without any.

    A tensor that code puts on CUDA has no memory either, so that CUDA need not be there. An address
    of none is refused: what reads or writes there would end the process.
    """
    try:
        with (
            patch("torch.cuda._lazy_init", lambda: None),
            patch.object(Tensor, "data_ptr", _address(Tensor.data_ptr)),
            patch.object(torch.UntypedStorage, "data_ptr", _address(torch.UntypedStorage.data_ptr)),
        ):
            yield
    except NoValuesError:
        raise
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        words = " ".join(str(error).split())
        if _WITHOUT_MEMORY.search(words) is None:
            raise
        reason = NoValuesError(f"{words.rstrip('.')}: {_ALONE}")
        raise reason.with_traceback(error.__traceback__) from error


def _address(real: Callable[[Any], int]) -> Callable[[Any], int]:
    """The address of a tensor or a storage; torch itself may ask for one without memory."""

    def data_ptr(held: Any) -> int:
        caller = sys._getframe(1).f_code.co_filename  # noqa: SLF001 - inspect reads files
        if held.device.type == "meta" and not Path(caller).is_relative_to(_TORCH):
            raise NoValuesError(f"data_ptr() asks where a tensor's values are: {_ALONE}")
        return real(held)

    return data_ptr


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested arguments or results, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def operands(*values: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results, lists of them included, in order."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += operands(*value)
        elif isinstance(value, dict):
            tensors += operands(*value.values())
    return tensors


class Shapes(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """A mode in which an operator on what has no memory, or is too large, has none either."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # each with what keeps its id its own
        self._results: dict[Any, list[tuple[Any, ...]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = operands(args, kwargs)
        if given and any(tensor.is_meta for tensor in given):
            if any(tensor.dim() and not tensor.is_meta for tensor in given):
                args, kwargs = tree_map_only(Tensor, self._bare, (args, kwargs))
            return self.on_shapes(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            args, kwargs = tree_map_only(Tensor, self._bare, (args, kwargs))
            return self.on_shapes(func, args, kwargs)
        if not given and "device" in kwargs:
            made = self.on_shapes(func, args, kwargs)
            if not isinstance(made, Tensor) or made.numel() > _SMALL:
                return made
        return func(*args, **kwargs)

    def on_shapes(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one operator on arguments without memory, whatever device they ask for."""
        if "device" in kwargs:
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"} | {"device": META}
        key = None if func.is_view else _key(func, args, kwargs)
        if key is not None and (results := self._results.get(key)) is not None:
            made = [torch.empty_strided(*like[:2], dtype=like[2], device=META) for like in results]
            return tuple(made) if len(made) > 1 else made[0]
        out = _run(func, args, kwargs)
        if key is not None and (likes := _fresh(out, args)):
            self._results[key] = likes
        return out

    def _bare(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta or not tensor.dim():  # any device takes a number
            return tensor
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = (tensor, _empty(tensor))
        return self._copies[id(tensor)][1]


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on shapes; raises NoValuesError where it needs more."""
    try:
        return _SHAPE_FUNCTIONS.get(func, func)(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        name = func._schema.name  # noqa: SLF001 - it has no public name
        if torch.Tag.data_dependent_output in func.tags:
            what = "looks at a tensor's value, as .item(), bool() or a Python number of it do"
        elif torch.Tag.dynamic_output_shape in func.tags:
            what = "gives a shape that depends on values"
        elif isinstance(error, NotImplementedError) or func.namespace not in _TORCHS_OWN:
            what = "is a kernel without a shape function (torch.library.register_fake)"
        else:
            raise
        raise NoValuesError(f"{name} {what}: {_ALONE}") from None


def _grouped_product(
    left: Tensor, right: Tensor, ends: Tensor | None = None, *_: Any, out_dtype: Any = None
) -> Tensor:
    """A product of groups; torch's own shape function takes bfloat16 alone, its kernel more."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        groups = left.shape[0] if left.dim() == 3 or ends is None else ends.shape[0]
        shape = (groups, *shape)
    return torch.empty(shape, dtype=out_dtype or left.dtype, device=META)


# where torch has no shape function, or one that leaves something out: what cuDNN keeps
_SHAPE_FUNCTIONS: dict[Any, Any] = {
    torch.ops.aten._grouped_mm.default: _grouped_product,  # noqa: SLF001 - they have no public name
    torch.ops.aten._cudnn_rnn.default: forward_shapes,  # noqa: SLF001
    torch.ops.aten._cudnn_rnn_backward.default: backward_shapes,  # noqa: SLF001
}


def _key(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a call's result depends on; None where it writes to its arguments."""
    if func._schema.is_mutable:  # noqa: SLF001 - it has no public name
        return None
    try:
        key = (func, *map(_part, args), *((name, _part(value)) for name, value in kwargs.items()))
        hash(key)
    except TypeError:
        return None
    return key


def _part(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, (list, tuple)):
        return tuple(map(_part, value))
    return type(value), value  # 1, 1.0 and True are equal


def _fresh(out: Any, args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Shape, stride and dtype of each result, if all are new tensors; nothing otherwise."""
    made = out if isinstance(out, tuple) else (out,)
    if not all(isinstance(one, Tensor) and one.is_meta and not one.is_sparse for one in made):
        return []
    if any(one._is_view() or one.storage_offset() for one in made):  # noqa: SLF001 - no public name
        return []
    given = {one.untyped_storage()._cdata for one in operands(args) if one.is_meta}  # noqa: SLF001
    if any(one.untyped_storage()._cdata in given for one in made):  # noqa: SLF001
        return []
    return [(one.shape, one.stride(), one.dtype) for one in made]


class _OffCuda(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """A mode in which what goes to "cuda" goes to no memory: torch asks CUDA for its index."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0].to(META)
        kwargs = kwargs or {}
        if func is not torch.device:
            args = map(_off_cuda, args)
            kwargs = {name: _off_cuda(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _off_cuda(value: Any) -> Any:
    is_cuda = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"
    return META if is_cuda else value


@contextmanager
def building() -> Iterator[None]:
    """Make modules whose parameters never have memory, whatever their size."""
    made, unmade = nn.Parameter.__new__, UninitializedParameter.__new__

    def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:  # noqa: FBT001, FBT002 - torch's own
        if isinstance(data, Tensor) and not data.is_meta:
            data = _empty(data.detach())
        return made(cls, data, requires_grad)

    def later(cls: Any, requires_grad: bool = True, **options: Any) -> Any:  # noqa: FBT001, FBT002 - torch's own
        return unmade(cls, requires_grad, **options | {"device": META})

    with (
        patch.object(nn.Parameter, "__new__", parameter),
        patch.object(UninitializedParameter, "__new__", later),
        without_values(),
        _OffCuda(),
        Shapes(),
    ):
        yield


def without_memory(tree: Any) -> Any:
    """Nested inputs with each tensor as its shape alone."""
    return tree_map_only(Tensor, lambda leaf: leaf if leaf.is_meta else _empty(leaf), tree)


def drop_memory(model: nn.Module) -> None:
    """Take the memory of a model's parameters and buffers; each stays the object that it is.

    But those that are weakly referenced, as a recurrent layer's are: torch swaps none of them.
    """
    for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        if not tensor.is_meta and not is_lazy(tensor):
            bare = _empty(tensor)
            if isinstance(tensor, nn.Parameter):
                bare = nn.Parameter(bare, tensor.requires_grad)
            if not weakref.getweakrefs(tensor):
                torch.utils.swap_tensors(tensor, bare)  # type: ignore[no-untyped-call]
                continue
            for module in model.modules():
                tensors = (*module._parameters.items(), *module._buffers.items())  # noqa: SLF001 - as they are held
                for name in (name for name, held in tensors if held is tensor):
                    setattr(module, name, bare)


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device=META,
        requires_grad=tensor.requires_grad,
    )
