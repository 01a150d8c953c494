"""Three zoo models as `calibrate profile` wants them: MODULE:FUNCTION, called with a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from calibrate.measure.zoo.models import build, inputs_of, loss_of

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
