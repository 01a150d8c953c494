"""Zoo models by name: made at once, with inputs of a batch and a size, and a loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own custom

from calibrate.measure.zoo.convolutional import resnet, vgg16
from calibrate.measure.zoo.transformers import Bert, Gpt2, Llama, Vit

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": partial(resnet, (2, 2, 2, 2), basic=True),
    "resnet34": partial(resnet, (3, 4, 6, 3), basic=True),
    "resnet50": partial(resnet, (3, 4, 6, 3)),
    "resnet101": partial(resnet, (3, 4, 23, 3)),
    "resnet152": partial(resnet, (3, 8, 36, 3)),
    "resnext50_32x4d": partial(resnet, (3, 4, 6, 3), groups=32, per_group=4),
    "resnext101_32x8d": partial(resnet, (3, 4, 23, 3), groups=32, per_group=8),
    "vgg16": vgg16,
    "vit_b_16": partial(Vit, 768, 12, 12),
    "vit_l_16": partial(Vit, 1024, 24, 16),
    "bert-base": partial(Bert, 768, 12, 12),
    "bert-large": partial(Bert, 1024, 24, 16),
    "gpt2": partial(Gpt2, 768, 12, 12),
    "gpt2-medium": partial(Gpt2, 1024, 24, 16),
    "gpt2-large": partial(Gpt2, 1280, 36, 20),
    "gpt2-xl": partial(Gpt2, 1600, 48, 25),
    "llama-1b": Llama,
}
_BLOCK = 2**16  # random numbers that all weights share: drawing all would take longer than steps
_SCALE = 0.02  # of weights: usual of transformers, and no overflow in half of any
_TOKENS = 30000  # every model's vocabulary holds them


def build(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A zoo model in training mode with random weights: fast, and the same each time."""
    with torch.device("meta"):
        model = BUILDERS[name]()
    model = model.to(dtype).to_empty(device=device).train()
    block = _SCALE * torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))
    block = block.to(device=device, dtype=dtype)
    with torch.no_grad():
        for tensor in model.parameters():
            _fill(tensor, block)
        for module in model.modules():
            _reset(module)
    return model


def _fill(tensor: Tensor, block: Tensor) -> None:
    """Weights take numbers of the block, over and over; norms and biases are set besides."""
    flat = tensor.view(-1)
    whole = len(flat) // len(block) * len(block)
    if whole:
        flat[:whole].view(-1, len(block)).copy_(block)
    flat[whole:].copy_(block[: len(flat) - whole])


def _reset(module: nn.Module) -> None:
    """What torch or a model sets apart from random weights: norms, statistics, counted places."""
    if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
        module.reset_parameters()
        return
    own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    for name, tensor in own:
        if name == "weight" and tensor.dim() == 1:
            tensor.fill_(1.0)
        elif name == "position_ids":
            tensor.copy_(torch.arange(tensor.shape[-1], device=tensor.device))
        elif name == "inv_freq":
            tensor.copy_(torch.logspace(0, -5.7, len(tensor), device=tensor.device))
        elif name == "token_type_ids" or (name.endswith("bias") and tensor.dim() == 1):
            tensor.zero_()


def inputs_of(model: nn.Module, batch: int, size: int, device: torch.device) -> Tensor:
    """Random images [batch, 3, size, size] of the model's dtype, or tokens [batch, size]."""
    torch.manual_seed(0)
    if isinstance(model, Bert | Gpt2 | Llama):
        return torch.randint(0, _TOKENS, (batch, size)).to(device)
    dtype = next(model.parameters()).dtype
    return torch.randn(batch, 3, size, size).to(device=device, dtype=dtype)


def loss_of(output: Tensor) -> Tensor:
    """A scalar: of logits the cross entropy; language models return their own loss."""
    if output.dim() == 0:
        return output
    return F.cross_entropy(
        output.float(), torch.zeros(len(output), dtype=torch.long, device=output.device)
    )


Profiled = tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]


def resnet50(batch: int = 64) -> Profiled:
    """Images of 224 x 224."""
    return _profiled("resnet50", batch, 224)


def vit_b_16(batch: int = 32) -> Profiled:
    """Images of 224 x 224."""
    return _profiled("vit_b_16", batch, 224)


def gpt2(batch: int = 8) -> Profiled:
    """Sequences of 512 tokens."""
    return _profiled("gpt2", batch, 512)


def _profiled(name: str, batch: int, size: int) -> Profiled:
    here = torch.device("cpu")
    model = build(name, here)
    return model, inputs_of(model, batch, size, here), loss_of
