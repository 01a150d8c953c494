"""RNN, GRU and LSTM layers as CUDA runs them: cuDNN's one operator for all steps and layers.

A step of a layer is a product and a fused pointwise kernel; the inputs of all steps are one
product, as are the gradients of weights. Source: J. Appleyard et al., "Optimizing performance of
recurrent neural networks on GPUs", arXiv 1604.01946. What cuDNN keeps for the backward is assumed:
the gates and states that the derivative of a step takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpsim.workload.operators import Operator, product

aten = torch.ops.aten
# cudnnRNNMode_t, and cuDNN's name of each layer that ATen has
RECURRENT = {"rnn_relu.input": 0, "rnn_tanh.input": 1, "lstm.input": 2, "gru.input": 3}
_LSTM = 2
# gates of a step, and what is kept of it in multiples of the hidden size: an LSTM's four gates and
# its cell; a GRU's three and the hidden part of the third
_GATES, _KEPT = (1, 1, 4, 3), (0, 0, 5, 4)
# hidden sizes up to which torch takes cuDNN's kernel of all steps, by mode, forward and backward.
# Source: aten/src/ATen/native/cudnn/RNN.cpp, use_rnn_persist_small_h
_SMALL = ((384, 384, 192, 192), (256, 256, 128, 128))
_STEP_KERNELS = 2


def cudnn_rnn(mode: int, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Run `_cudnn_rnn` for ATen's arguments of a layer, as RNN.cpp's _cudnn_impl does."""
    inputs, state, weights, _, layers, dropout, train, both_ways, batch_first = args
    hidden, cell = state if mode == _LSTM else (state, None)
    size = (hidden if cell is None else cell).shape[-1]
    projected = hidden.shape[-1] if cell is not None and hidden.shape[-1] != size else 0
    each = len(weights) // (layers * (2 if both_ways else 1))
    shape = (size, projected, layers, batch_first, dropout, train, both_ways)
    run = aten._cudnn_rnn  # noqa: SLF001 - it has no public name
    results = run(inputs, weights, each, None, hidden, cell, mode, *shape, [], None)
    return tuple(results[: 2 if cell is None else 3])


class _Layers(NamedTuple):
    """The extents of `_cudnn_rnn`'s layers; `out`: the width of a state that is handed on."""

    mode: int
    steps: int
    batch: int
    inputs: int
    hidden: int
    out: int
    layers: int
    directions: int
    item_bytes: int

    @classmethod
    def of(cls, image: Tensor, options: Sequence[Any]) -> _Layers:
        """From the input, and the arguments from `mode` to `bidirectional`."""
        mode, hidden, projected, layers, batch_first, _, _, both_ways = options
        batch, steps = image.shape[:2] if batch_first else image.shape[1::-1]
        out, directions = projected or hidden, 2 if both_ways else 1
        width = image.shape[-1]
        extents = (mode, steps, batch, width, hidden, out, layers, directions)
        return cls(*extents, image.element_size())

    @property
    def reserve_elements(self) -> int:
        """Kept of all steps; the outputs of the last layer are the operator's."""
        kept = self.layers * _KEPT[self.mode] * self.hidden + (self.layers - 1) * self.out
        return self.steps * self.batch * self.directions * kept

    @property
    def widths(self) -> Iterator[int]:
        """Sizes of the input of each layer and direction."""
        for layer in range(self.layers):
            width = self.inputs if layer == 0 else self.directions * self.out
            yield from (width,) * self.directions

    @property
    def gates(self) -> int:
        return _GATES[self.mode] * self.hidden

    def product(self, m: int, n: int, k: int) -> Operator:
        return product(m, n, k, self.item_bytes)

    def recurrence(self, n: int, k: int, *, is_forward: bool) -> Operator:
        """All steps, each of which waits for the one before."""
        one = self.product(self.batch, n, k)
        persists = self.out == self.hidden <= _SMALL[0 if is_forward else 1][self.mode]
        persists = persists and self.item_bytes < 8
        moved = self.batch * self.gates * self.item_bytes  # gates of a step, read or written
        return one._replace(
            kind="recurrence",
            count=self.steps,
            kernel=1 if persists else _STEP_KERNELS * self.steps,
            flops=self.steps * one.flops,
            bytes_read=self.steps * (one.bytes_read + moved),
            bytes_written=self.steps * (one.bytes_written + moved),
        )


def forward_shapes(image: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Results of `_cudnn_rnn`: output, states, what is kept as bytes, and no copy of weights."""
    hidden, cell, options = args[3], args[4], args[5:13]
    one = _Layers.of(image, options)
    batch_first, train = options[4], options[6]
    places = (one.batch, one.steps) if batch_first else (one.steps, one.batch)
    output = image.new_empty((*places, one.directions * one.out))
    kept = one.reserve_elements * one.item_bytes if train else 0
    reserve = image.new_empty(kept, dtype=torch.uint8)
    last = hidden.new_empty(0 if cell is None else cell.shape)
    return output, torch.empty_like(hidden), last, reserve, image.new_empty(0)


def backward_shapes(image: Tensor, weights: Sequence[Tensor], *args: Any) -> tuple[Any, ...]:
    """Gradients of input, states and weights."""
    hidden, cell, wanted_gradients = args[2], args[3], args[-1]
    like = (image, hidden, cell)
    made = [
        torch.empty_like(one) if wanted and one is not None else None
        for one, wanted in zip(like, wanted_gradients, strict=False)
    ]
    return (*made, [torch.empty_like(one) for one in weights] if wanted_gradients[3] else [])


def forward_operators(args: Sequence[Any]) -> list[Operator]:
    """The products of `_cudnn_rnn`, layer by layer and direction by direction."""
    one, operators = _Layers.of(args[0], args[6:14]), []
    for width in one.widths:
        operators.append(one.product(one.steps * one.batch, one.gates, width))
        operators.append(one.recurrence(one.gates, one.out, is_forward=True))
        if one.out != one.hidden:
            operators.append(one.recurrence(one.out, one.hidden, is_forward=True))
    return operators


def backward_operators(args: Sequence[Any]) -> list[Operator]:
    """The products of `_cudnn_rnn_backward`, the last layer first: of data, then of weights."""
    one, wanted_gradients = _Layers.of(args[0], args[10:18]), args[-1]
    rows, operators = one.steps * one.batch, []
    for width in reversed(list(one.widths)):
        if one.out != one.hidden:
            operators.append(one.recurrence(one.hidden, one.out, is_forward=False))
        operators.append(one.recurrence(one.out, one.gates, is_forward=False))
        operators.append(one.product(rows, width, one.gates))
        if wanted_gradients[3]:
            operators.append(one.product(one.gates, width, rows))
            operators.append(one.product(one.gates, one.out, rows))
            if one.out != one.hidden:
                operators.append(one.product(one.out, one.hidden, rows))
    return operators
