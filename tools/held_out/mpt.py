"""MPT as llm-foundry trains it, for `calibrate capture`; recorded in tests/data/mpt-models.json.gz.

`python -m held_out.mpt` (in tools/) writes the file. No biases, norms in half
(`LPLayerNorm`), fused attention, the head's weights are the embedding's, and a fused loss, which
keeps no float32 scores. Source: mosaicml/llm-foundry, llmfoundry/models/mpt/configuration_mpt.py
(norm_type, tie_word_embeddings, vocab_size); biases are left out, as in the published MPT-7B.
"""

from __future__ import annotations

import gzip
import json
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibrate.capture.capture import capture
from calibrate.capture.shapes import META, building
from calibrate.capture.sources import Sizes, Source
from calibrate.measure.model.training import Made
from held_out.language_steps import MODELS, language_steps

_WORDS, _LONGEST = 50368, 4096  # GPT-NeoX's words, padded


class _Norm(nn.LayerNorm):
    """A layer norm that autocast leaves in half."""

    def __init__(self, width: int) -> None:
        super().__init__(width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        with torch.autocast("cuda", enabled=False):
            return functional.layer_norm(x.to(kind), self.normalized_shape, self.weight.to(kind))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = _Norm(width), _Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = batch, length, 3, self.heads, width // self.heads
        each = (one.transpose(1, 2) for one in self.qkv(self.norm_1(x)).view(shape).unbind(2))
        attended = functional.scaled_dot_product_attention(*each, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class _Mpt(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_WORDS, width), nn.Embedding(_LONGEST, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = _Norm(width)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.words.weight)


def _loss(words: Tensor, scores: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        return functional.cross_entropy(scores.flatten(0, 1), words.flatten())


def _source(width: int, layers: int, heads: int) -> Source:
    with building():
        model = _Mpt(width, layers, heads)

    def make(batch: int, length: int | None) -> Made:
        words = torch.empty(batch, length or _LONGEST, dtype=torch.long, device=META)
        return Made(model, words, partial(_loss, words))

    sizes = Sizes("seq_len", 2048, (64, 1024, _LONGEST), 2048)
    told = f"MPT({width=}, {layers=}, {heads=})"
    return Source(f"mpt-{width}", told, "language", told, make, 2, sizes.default, (sizes,))


def main() -> None:
    """Capture each model of the published steps, and write the file."""
    shapes = dict.fromkeys((step.width, step.layers, step.heads) for step in language_steps())
    tables = {str(shape[0]): capture(_source(*shape)) for shape in shapes}
    text = json.dumps(tables, separators=(",", ":"))
    MODELS.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


if __name__ == "__main__":
    main()
