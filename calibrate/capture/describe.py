"""One aten operator call as `Operator`s: its kind, dimensions, FLOPs and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from calibrate.capture.recurrent import backward_operators, forward_operators
from calibrate.capture.shapes import operands
from ddpsim.workload.operators import Kind, Operator, moving

_T = TypeVar("_T")


def names_of(words: str) -> frozenset[str]:
    """Names in a text."""
    return frozenset(words.split())


# allocations and reshapes whose schema does not say that they alias; no kernel is launched
_FREE = names_of(
    "_unsafe_view empty empty_like empty_strided new_empty new_empty_strided detach lift_fresh "
    "_reshape_alias resize_ set_ sym_size sym_stride sym_numel sym_storage_offset "
    "_local_scalar_dense"
)


def _by_name(names: Mapping[_T, str]) -> dict[str, _T]:
    return {name: value for value, text in names.items() for name in text.split()}


# the place of an argument that is not read in full: only their shape matters, or one element of a
# row is picked (nll_loss), or they are about to be overwritten
_UNREAD = _by_name(
    {
        0: (
            "copy_ embedding _embedding_bag fill_ full_like new_full new_ones new_zeros ones_like "
            "nll_loss_forward nll_loss2d_forward rand_like randn_like zero_ zeros_like"
        ),
        1: (
            "_adaptive_avg_pool2d_backward avg_pool2d_backward max_pool2d_with_indices_backward "
            "nll_loss_backward nll_loss2d_backward"
        ),
    }
)
_KINDS: dict[Kind, str] = {
    "normalization": (
        "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_functional _batch_norm_with_update cudnn_batch_norm "
        "_fused_rms_norm batch_norm_stats batch_norm_elemt batch_norm_gather_stats_with_counts"
    ),
    "normalization_backward": (
        "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward "
        "batch_norm_backward cudnn_batch_norm_backward _fused_rms_norm_backward"
    ),
    "softmax": (
        "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax"
    ),
    "embedding": "embedding _embedding_bag _embedding_bag_forward_only embedding_renorm_",
    "embedding_backward": (
        "embedding_dense_backward _embedding_bag_dense_backward embedding_sparse_backward "
        "_embedding_bag_sparse_backward _embedding_bag_backward"
    ),
    "pooling": (
        "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward "
        "max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward "
        "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d "
        "_adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward im2col "
        "col2im grid_sampler_2d grid_sampler_2d_backward"
    ),
    "copy": (
        "_to_copy clone copy_ cat stack constant_pad_nd roll flip repeat slice_backward "
        "select_backward slice_scatter select_scatter as_strided_scatter unfold_backward "
        "diagonal_backward _foreach_copy_ reflection_pad2d replication_pad2d split_copy "
        "split_with_sizes_copy permute_copy pixel_shuffle pixel_unshuffle channel_shuffle tril "
        "triu"
    ),
    "reduction": (
        "sum mean amax amin max min any all argmax argmin var var_mean std std_mean norm prod "
        "linalg_vector_norm logsumexp nll_loss_forward nll_loss2d_forward mv dot count_nonzero"
    ),
}
_KIND = _by_name(_KINDS)
_POINTWISE_NAMES = names_of(
    "native_dropout native_dropout_backward bernoulli_ bernoulli fill_ zero_ zeros zeros_like "
    "ones ones_like full full_like new_zeros new_ones new_full arange linspace scalar_tensor rand "
    "randn rand_like randn_like masked_fill masked_fill_ uniform_ normal_ glu glu_backward "
    "nll_loss_backward nll_loss2d_backward cumsum"
)
_MULTIPLIED = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "_scaled_mm": (0, 1),
}


def describe(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Operator]:
    """What one call of an aten operator launches; nothing for views and allocations."""
    if func.is_view or func.namespace == "prim":
        return []
    name = func._opname  # noqa: SLF001 - the name without overload, which the packet makes anew
    written = operands(out)
    if name in _FREE or not written:
        return []
    if name == "convolution_backward":
        return _convolution_backward(args, written)
    if (recurrent := _RECURRENT.get(name)) is not None:
        return recurrent(args)
    read = [arg for place, arg in enumerate(args) if place != _UNREAD.get(name)]
    read_bytes, written_bytes = _bytes(operands(read, kwargs)), _bytes(written)
    read_bytes += out.numel() * out.element_size() if name == "embedding" else 0  # rows picked
    if (described := _MULTIPLYING.get(name)) is not None:
        dimensions = described(name, args, out)
        counted = flop_registry.get(func.overloadpacket)  # it knows no products of groups
        flops = (
            int(counted(*args, **kwargs, out_val=out))
            if counted
            else int(2 * dimensions.count * dimensions.m * dimensions.n * dimensions.k)
        )
        return [
            dimensions._replace(flops=flops, bytes_read=read_bytes, bytes_written=written_bytes)
        ]
    kind = _kind_of(func, name, args, written)
    items = max(written, key=Tensor.numel).element_size()
    return [moving(kind, read_bytes, written_bytes, items)]


def _kind_of(func: Any, name: str, args: Sequence[Any], written: Sequence[Tensor]) -> Kind:
    if kind := _KIND.get(name):
        return kind
    if name.startswith(("upsample", "_upsample")):
        return "pooling"
    if name in _POINTWISE_NAMES or torch.Tag.pointwise in func.tags:
        return "pointwise"
    if "rms_norm" in name or "layer_norm" in name or "batch_norm" in name:
        return "normalization_backward" if name.endswith("backward") else "normalization"
    largest = max((t.numel() for t in operands(args)), default=0)
    elementwise = name.startswith("_foreach") or name.endswith("_backward")
    return "pointwise" if elementwise and largest == written[0].numel() else "other"


def _product(name: str, args: Sequence[Any], _: Any) -> Operator:
    left, right = (args[place] for place in _MULTIPLIED[name])
    count = left.shape[0] if left.dim() == 3 else 1
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    return Operator("product", count, m, n, k, item_bytes=left.element_size())


def _grouped_product(_: str, args: Sequence[Any], out: Tensor) -> Operator:
    """A product of groups, whose rows or sums are shared out: in equal parts, as nobody knows."""
    left, right = args[:2]
    groups = next((one.shape[0] for one in (right, left, out) if one.dim() == 3), 1)
    m, k = Fraction(left.shape[-2]), Fraction(left.shape[-1])
    if left.dim() == 2 and right.dim() == 3:
        m /= groups
    elif left.dim() == 2:
        k /= groups
    exact: Any = (m, right.shape[-1], k)
    return Operator("product", groups, *exact)._replace(item_bytes=left.element_size())


def _convolution(_: str, args: Sequence[Any], out: Tensor) -> Operator:
    image, weight, stride, transposed, groups = args[0], args[1], args[3], args[6], args[8]
    return _forward(image, weight, out, int(groups), stride, is_transposed=bool(transposed))


def _forward(
    image: Tensor,
    weight: Tensor,
    out: Tensor,
    groups: int,
    stride: Sequence[int],
    *,
    is_transposed: bool,
) -> Operator:
    """A convolution from `image` to `out`, which have samples and channels first."""
    kernel = math.prod(weight.shape[2:])
    return Operator(
        "convolution_input_gradient" if is_transposed else "convolution",
        groups,
        out.shape[0] * math.prod(out.shape[2:]),
        out.shape[1] // groups,
        image.shape[1] // groups * kernel,
        kernel,
        max(stride),
        item_bytes=image.element_size(),
    )


def _convolution_backward(args: Sequence[Any], out: Sequence[Tensor]) -> list[Operator]:
    """Gradients of input and weight, and the bias's sum; `out` holds those that are asked for."""
    gradient, image, weight, _, stride, _, _, is_transposed, _, groups, wanted_gradients = args[:11]
    made = iter(out)
    operators = []
    # flop_counter multiplies all input with all output channels for a weight's gradient, also those
    # of different groups: here each product has two FLOPs for each of its multiply-adds
    if wanted_gradients[0]:
        of_input = _forward(
            gradient, weight, next(made), groups, stride, is_transposed=not is_transposed
        )
        operators.append(_moving(of_input, (gradient, weight), (image,)))
    if wanted_gradients[1]:
        small, large = (image, gradient) if is_transposed else (gradient, image)
        kernel = math.prod(weight.shape[2:])
        of_weight = Operator(
            "convolution_weight_gradient",
            groups,
            small.shape[1] // groups,
            large.shape[1] // groups * kernel,
            small.shape[0] * math.prod(small.shape[2:]),
            kernel,
            max(stride),
            item_bytes=image.element_size(),
        )
        operators.append(_moving(of_weight, (gradient, image), (next(made),)))
    if wanted_gradients[2]:
        bias = next(made)
        moved = _bytes([gradient]), _bytes([bias])
        operators.append(moving("reduction", *moved, bias.element_size()))
    return operators


def _moving(one: Operator, read: Sequence[Tensor], written: Sequence[Tensor]) -> Operator:
    """With its bytes, and two FLOPs for each multiply-add that is not of a transposed window.

    A strided convolution's input gradient multiplies each output pixel with the whole window, as
    the forward does; its implicit product by input pixels would count the holes between them.
    """
    flops = 2 * one.count * one.m * one.n * one.k
    if one.kind == "convolution_input_gradient":
        pixels = read[0].shape[0] * math.prod(read[0].shape[2:])
        flops = 2 * one.count * pixels * one.n * one.k
    return one._replace(flops=flops, bytes_read=_bytes(read), bytes_written=_bytes(written))


def _attention(name: str, args: Sequence[Any], _: Any) -> Operator:
    """An attention of queries and keys, both of samples x heads x tokens x width."""
    is_backward = name.endswith("backward")
    query, key = args[1:3] if is_backward else args[:2]
    count = query.shape[0] * query.shape[1]
    return Operator(
        "attention_backward" if is_backward else "attention",
        *(count, query.shape[2], key.shape[2], query.shape[3]),
        item_bytes=query.element_size(),
    )


_RECURRENT = {"_cudnn_rnn": forward_operators, "_cudnn_rnn_backward": backward_operators}
_MULTIPLYING: dict[str, Callable[[str, Sequence[Any], Any], Operator]] = {
    **dict.fromkeys(_MULTIPLIED, _product),
    "_grouped_mm": _grouped_product,
    "convolution": _convolution,
    **{
        f"_scaled_dot_product_{one}_attention{way}": _attention
        for one in ("flash", "efficient", "cudnn")
        for way in ("", "_backward")
    },
}


def _bytes(group: Iterable[Tensor]) -> int:
    """Bytes of distinct views in a group of tensors, at most the size of each storage."""
    group = [
        dense  # of a sparse one its places and values
        for each in group
        for dense in ((each._indices(), each._values()) if each.is_sparse else (each,))  # noqa: SLF001
    ]
    if len(group) == 1:
        return min(_touched(group[0]), group[0].untyped_storage().nbytes())
    views: dict[int, dict[tuple[Any, ...], int]] = {}
    capacity: dict[int, int] = {}
    for tensor in group:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - of the storage behind the object, which is made anew
        view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        views.setdefault(key, {})[view] = _touched(tensor)
        capacity[key] = storage.nbytes()
    return sum(min(sum(sizes.values()), capacity[key]) for key, sizes in views.items())


def _touched(tensor: Tensor) -> int:
    """Bytes of storage behind a tensor: a dimension of stride 0 (expand) counts once."""
    elements = tensor.numel()
    if elements == 0:
        return 0
    strides = tensor.stride()
    if 0 in strides:
        sizes = zip(tensor.shape, strides, strict=True)
        elements = math.prod(size for size, stride in sizes if stride)
    return elements * tensor.element_size()
