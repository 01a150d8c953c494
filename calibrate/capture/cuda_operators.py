"""The operators that CUDA runs where a CPU runs others: casts, fused attention, dropout, RNNs.

They are put in below torch's Python and above autograd, where CUDA's own autocast stands: an
autocast key of the dispatcher that no device here uses, whose kernels cast and call on. The lists
are those of torch 2.13, aten/src/ATen/autocast_mode.h; the rules of casting and of the cache of
cast weights are autocast_mode.cpp's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from calibrate.capture.describe import names_of
from calibrate.capture.recurrent import RECURRENT, cudnn_rnn

aten = torch.ops.aten
_KEY = "AutocastIPU"  # of no device that torch 2.11 to 2.13 has kernels for
_KEYS = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))  # noqa: SLF001

_LOWER = names_of(
    "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul "
    "einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention"
)
_FLOAT32 = names_of(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm "
    "rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div "
    "l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist "
    "pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim"
)
_FLOAT32_OUT = names_of(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm "
    "linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
_WIDEST = names_of(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)


class _Casts:
    """Copies of weights in the lower precision, which live until the outermost autocast ends."""

    def __init__(self) -> None:
        self._cached: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        self._cached.clear()

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A floating tensor in a dtype; a leaf's cast is kept, as ATen's cached_cast does."""
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        is_kept = (
            dtype == torch.get_autocast_dtype("cuda")
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()  # noqa: SLF001 - it has no public name
            and torch.is_autocast_cache_enabled()
        )
        if not is_kept:
            return tensor.to(dtype)
        if id(tensor) not in self._cached:
            self._cached[id(tensor)] = (tensor, tensor.to(dtype))
        return self._cached[id(tensor)][1]


_CASTS = _Casts()


def _all_cast(tree: Any, dtype: torch.dtype) -> Any:
    """Nested arguments with each floating tensor in a dtype."""
    return tree_map_only(Tensor, lambda tensor: _CASTS.cast(tensor, dtype), tree)


def _lower(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = _all_cast((args, kwargs), torch.get_autocast_dtype("cuda"))
    return func(*args, **kwargs)


def _float32(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = _all_cast((args, kwargs), torch.float32)
    return func(*args, **kwargs)


def _float32_out(func: Any, args: Any, kwargs: Any) -> Any:
    first = args[0]
    is_lower = first.dtype in (torch.float16, torch.bfloat16)
    place = [argument.name for argument in func._schema.arguments].index("dtype")  # noqa: SLF001
    if is_lower and len(args) <= place and kwargs.get("dtype") is None:
        kwargs = kwargs | {"dtype": torch.float32}
    return func(*args, **kwargs)


def _widest(func: Any, args: Any, kwargs: Any) -> Any:
    floats = {t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
    if torch.float32 in floats:
        return _float32(func, args, kwargs)
    return func(*args, **kwargs)


def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """CUDA's fused kernel. Source: aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable."""
    values, probability, train = args
    if train and 0 < probability < 1 and values.numel():
        return torch.native_dropout(values, probability, train)[0]
    return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the operator's own
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Fused attention in place of scaled_dot_product_attention: flash, or with a mask efficient."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = _all_cast((query, key, value), torch.get_autocast_dtype("cuda"))
    if query.dim() != 4 or max(query.shape[-1], value.shape[-1]) > 256:
        mathematical: Tensor = aten._scaled_dot_product_attention_math(  # noqa: SLF001
            query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return mathematical
    if mask is None:
        flash = aten._scaled_dot_product_flash_attention  # noqa: SLF001
        out: Tensor = flash(query, key, value, dropout, is_causal, scale=scale)[0]
        return out
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    bias = mask
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -1e9)
    bias = bias.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    efficient = aten._scaled_dot_product_efficient_attention  # noqa: SLF001
    masked: Tensor = efficient(
        query, key, value, bias, query.requires_grad, dropout, is_causal, scale=scale
    )[0]
    return masked


def _recurrent(mode: int) -> Callable[..., Any]:
    """cuDNN's operator in place of a layer; autocast takes all of it to the lower precision.

    Source: aten/src/ATen/cudnn/AutocastRNN.cpp.
    """

    def run(_: Any, args: Any, kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cuda"):
            args = _all_cast(args, torch.get_autocast_dtype("cuda"))
        return cudnn_rnn(mode, (*args, *kwargs.values()))

    return run


@cache
def _library() -> tuple[Any, ...]:
    """The kernels, put in once; they run only inside `cuda_operators`."""
    everywhere = torch.library.Library("_", "IMPL", _KEY)  # type: ignore[no-untyped-call]
    everywhere.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
    library = torch.library.Library("aten", "IMPL", _KEY)  # type: ignore[no-untyped-call]

    def put(name: str, kernel: Callable[..., Any], *, casts: bool = True) -> None:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(aten, packet, None), overload or "default", None)
        if func is None:  # another version of torch has no such operator
            return

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_KEYS):  # noqa: SLF001
                if casts and not torch.is_autocast_enabled("cuda"):
                    return func(*args, **kwargs)
                return kernel(func, args, kwargs)

        library.impl(name, run, _KEY)  # type: ignore[no-untyped-call]

    lists = ((_LOWER, _lower), (_FLOAT32, _float32), (_FLOAT32_OUT, _float32_out))
    for names, kernel in (*lists, (_WIDEST, _widest)):
        for name in names:
            put(name, kernel)
    put("dropout", _dropout, casts=False)
    for name, mode in RECURRENT.items():
        put(name, _recurrent(mode), casts=False)
    attention = "scaled_dot_product_attention"
    put(attention, lambda _, args, kwargs: _attention(*args, **kwargs), casts=False)
    return everywhere, library


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Run what CUDA runs: an autocast of the device that tensors say, meta, is CUDA's."""
    _library()
    begin, end = torch.autocast.__init__, torch.autocast.__exit__

    def on_cuda(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, "cuda" if device_type == "meta" else device_type, *args, **kwargs)

    def ended(self: torch.autocast, *args: Any) -> Any:
        result = end(self, *args)
        if not torch.is_autocast_enabled("cuda"):
            _CASTS.clear()
        return result

    has_cuda = "torch.cuda.amp.common.amp_definitely_not_available"
    with ExitStack() as stack:
        stack.enter_context(patch(has_cuda, lambda: False))
        stack.enter_context(patch("torch.cuda.is_bf16_supported", lambda *_, **__: True))
        stack.enter_context(patch.object(torch.autocast, "__init__", on_cuda))
        stack.enter_context(patch.object(torch.autocast, "__exit__", ended))
        # what is run again is run under the autocast that it was run under
        stack.enter_context(patch("torch.utils.checkpoint._infer_device_type", lambda *_: "cuda"))
        if "transformers" in sys.modules:
            # it looks for packed sequences and padding, and there are neither
            masks = "transformers.masking_utils"
            stack.enter_context(patch(f"{masks}.find_packed_sequence_indices", lambda *_: None))
            if hasattr(sys.modules["transformers"].masking_utils, "fast_all"):
                stack.enter_context(patch(f"{masks}.fast_all", lambda *_: True))
        stack.callback(_CASTS.clear)
        stack.callback(_use_key, used=False)
        _use_key(used=True)
        yield


def _use_key(*, used: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, used)  # noqa: SLF001
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, not used)  # noqa: SLF001
