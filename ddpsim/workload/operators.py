"""One kernel-launching operator of a training step, as a capture records it and a law prices it."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Kind = Literal[
    "product",
    "convolution",
    "convolution_input_gradient",
    "convolution_weight_gradient",
    "attention",
    "attention_backward",
    "normalization",
    "normalization_backward",
    "softmax",
    "pointwise",
    "copy",  # casts and changes of layout too
    "reduction",
    "pooling",  # of windows, interpolation too
    "embedding",
    "embedding_backward",
    "other",
    "recurrence",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
# those that have dimensions of a matrix product
MULTIPLYING: frozenset[Kind] = frozenset((*KINDS[:6], "recurrence"))


class Operator(NamedTuple):
    """One operator that launches work: its kind, its shape as a matrix product, FLOPs and bytes.

    A multiplying kind does `count` products of m x k by k x n. A convolution is its implicit
    product: `count` groups; forward m = samples x output pixels, n = output channels of a group,
    k = input channels of a group x kernel elements; for the input's gradient m = samples x input
    pixels, n = input channels of a group, k = output channels of a group x kernel elements; for the
    weight's m = output channels of a group, n = input channels of a group x kernel elements,
    k = samples x output pixels. A transposed convolution is named as the direction that it runs in.
    Attention: `count` samples x heads, m queries, n keys, k the width of a head. A recurrence is
    `count` products one after another, each with its pointwise operators, and `kernel` all its
    kernels. All are 0 for other kinds.
    `kernel`: elements of the convolution's window; `stride`: its largest. `flops`: 2 for each
    multiply-add. Bytes are those of distinct memory at its own dtype: a broadcast operand counts
    once. `item_bytes`: of an element that is multiplied, or of the largest tensor. A recording has
    exact numbers; a capture read at some batch and size may round them.
    """

    kind: Kind
    count: float = 0  # type: ignore[assignment] # not the method of tuples
    m: float = 0
    n: float = 0
    k: float = 0
    kernel: float = 1
    stride: float = 1
    flops: float = 0
    bytes_read: float = 0
    bytes_written: float = 0
    item_bytes: float = 0


def product(m: float, n: float, k: float, item_bytes: float) -> Operator:
    """One product of two matrices that share no memory."""
    moved_bytes = item_bytes * (m + n) * k, item_bytes * m * n
    return Operator("product", 1, m, n, k, 1, 1, 2 * m * n * k, *moved_bytes, item_bytes)


def moving(kind: Kind, read: float, written: float, item_bytes: float = 0) -> Operator:
    """One operator that multiplies nothing, by the bytes that it reads and writes."""
    return Operator(kind, bytes_read=read, bytes_written=written, item_bytes=item_bytes)
