"""ViT, BERT, GPT-2 and Llama, with the names, shapes and order of parameters of their libraries.

Attention is torch's scaled_dot_product_attention, as in the zoo's tables. Sources: torchvision's
ViT (Dosovitskiy et al., arXiv 2010.11929); Devlin et al., arXiv 1810.04805; Radford et al., 2019;
the Llama 3.2 model card, and for the rotary embedding Su et al., arXiv 2104.09864.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own custom

_DROPOUT = 0.1  # of BERT and GPT-2, as their configurations have it


def _heads(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, width] as [batch, heads, tokens, width of a head]."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Vit(nn.Module):
    """Of images of 224 x 224 in patches of 16 x 16."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.conv_proj = nn.Conv2d(3, width, 16, 16)
        self.encoder = _VitEncoder(width, layers, heads)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(width, 1000)))

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, 1000] of [batch, 3, 224, 224]."""
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        classes = self.class_token.expand(len(images), -1, -1)
        logits: Tensor = self.heads(self.encoder(torch.cat([classes, patches], dim=1))[:, 0])
        return logits


class _VitEncoder(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.zeros(1, 14 * 14 + 1, width))
        named = {f"encoder_layer_{i}": _VitLayer(width, heads) for i in range(layers)}
        self.layers = nn.Sequential(OrderedDict(named))
        self.ln = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.ln(self.layers(x + self.pos_embedding))
        return encoded


class _VitLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(0.0),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln_1(x)
        attended, _ = self.self_attention(normed, normed, normed, need_weights=False)
        x = x + attended
        passed: Tensor = x + self.mlp(self.ln_2(x))
        return passed


class Bert(nn.Module):
    """With both pre-training heads; its loss is that of both, every token labelled."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bert = nn.ModuleDict(
            {
                "embeddings": _BertEmbeddings(width),
                "encoder": nn.ModuleDict(
                    {"layer": nn.ModuleList(_BertLayer(width, heads) for _ in range(layers))}
                ),
                "pooler": nn.ModuleDict({"dense": nn.Linear(width, width)}),
            }
        )
        self.cls = nn.Module()
        self.cls.predictions = _BertPredictions(width)
        self.cls.seq_relationship = nn.Linear(width, 2)
        embeddings: _BertEmbeddings = self.bert["embeddings"]  # type: ignore[assignment]
        self.cls.predictions.decoder.weight = embeddings.word_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of [batch, tokens]."""
        x = self.bert["embeddings"](tokens)
        for layer in self.bert["encoder"]["layer"]:  # type: ignore[index]
            x = layer(x)
        pooled = torch.tanh(self.bert["pooler"]["dense"](x[:, 0]))  # type: ignore[index]
        scores = self.cls.predictions(x)  # type: ignore[operator]
        related = self.cls.seq_relationship(pooled)  # type: ignore[operator]
        masked = F.cross_entropy(scores.flatten(0, 1), tokens.flatten())
        return masked + F.cross_entropy(related, torch.zeros_like(tokens[:, 0]))


class _BertEmbeddings(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(30522, width, padding_idx=0)
        self.position_embeddings = nn.Embedding(512, width)
        self.token_type_embeddings = nn.Embedding(2, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(512).expand(1, -1))
        self.register_buffer("token_type_ids", torch.zeros(1, 512, dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        types = self.token_type_ids[:, :length].expand(len(tokens), -1)  # type: ignore[index]
        x = self.word_embeddings(tokens) + self.token_type_embeddings(types)
        x = x + self.position_embeddings(self.position_ids[:, :length])  # type: ignore[index]
        return F.dropout(self.LayerNorm(x), _DROPOUT)


class _BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, width, eps=1e-12)
        parts = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
        output = nn.ModuleDict({"dense": nn.Linear(width, width), "LayerNorm": norm()})
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(parts), "output": output})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, 4 * width)})
        self.output = nn.ModuleDict({"dense": nn.Linear(4 * width, width), "LayerNorm": norm()})
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        parts: nn.ModuleDict = self.attention["self"]  # type: ignore[assignment]
        query, key, value = (_heads(parts[n](x), self._heads) for n in ("query", "key", "value"))
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=_DROPOUT)
        x = self._added(self.attention["output"], _joined(attended), x)  # type: ignore[arg-type]
        return self._added(self.output, F.gelu(self.intermediate["dense"](x)), x)

    @staticmethod
    def _added(output: nn.ModuleDict, hidden: Tensor, x: Tensor) -> Tensor:
        added: Tensor = output["LayerNorm"](F.dropout(output["dense"](hidden), _DROPOUT) + x)
        return added


class _BertPredictions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(30522))
        norm = nn.LayerNorm(width, eps=1e-12)
        self.transform = nn.ModuleDict({"dense": nn.Linear(width, width), "LayerNorm": norm})
        self.decoder = nn.Linear(width, 30522)
        self.decoder.bias = self.bias

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.decoder(
            self.transform["LayerNorm"](F.gelu(self.transform["dense"](x)))
        )
        return scores


class _Product(nn.Module):
    """A linear layer whose weight is [inputs, outputs], as GPT-2 has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        product = torch.addmm(self.bias, x.flatten(0, -2), self.weight)
        return product.view(*x.shape[:-1], product.shape[-1])


class Gpt2(nn.Module):
    """A causal language model, whose loss is that of the next token."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(50257, width),
                "wpe": nn.Embedding(1024, width),
                "h": nn.ModuleList(_Gpt2Layer(width, heads) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, 50257, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of [batch, tokens]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = F.dropout(self.transformer["wte"](tokens) + self.transformer["wpe"](places), _DROPOUT)
        for layer in self.transformer["h"]:  # type: ignore[attr-defined]
            x = layer(x)
        return _next_token_loss(self.lm_head(self.transformer["ln_f"](x)), tokens)


class _Gpt2Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        projections = {"c_attn": _Product(width, 3 * width), "c_proj": _Product(width, width)}
        self.attn = nn.ModuleDict(projections)
        self.ln_2 = nn.LayerNorm(width)
        layers = {"c_fc": _Product(width, 4 * width), "c_proj": _Product(4 * width, width)}
        self.mlp = nn.ModuleDict(layers)
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        query, key, value = (_heads(part, self._heads) for part in parts)
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=_DROPOUT, is_causal=True
        )
        x = x + F.dropout(self.attn["c_proj"](_joined(attended)), _DROPOUT)
        hidden = _gelu(self.mlp["c_fc"](self.ln_2(x)))
        return x + F.dropout(self.mlp["c_proj"](hidden), _DROPOUT)


def _gelu(x: Tensor) -> Tensor:
    """GPT-2's, in operators of its own as transformers has it (gelu_new)."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The last token has no next one, and does not count (transformers, ForCausalLMLoss)."""
    following = F.pad(tokens, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.float().flatten(0, 1), following.flatten())


class Llama(nn.Module):
    """Llama 3.2 with 1 B parameters, whose loss is that of the next token."""

    def __init__(self, width: int = 2048, layers: int = 16, heads: int = 32) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(128256, width),
                "layers": nn.ModuleList(_LlamaLayer(width, heads) for _ in range(layers)),
                "norm": _RmsNorm(width),
            }
        )
        frequencies = 500000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.lm_head = nn.Linear(width, 128256, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of [batch, tokens]."""
        x = self.model["embed_tokens"](tokens)
        turned = self._angles(tokens, x.dtype)
        for layer in self.model["layers"]:  # type: ignore[attr-defined]
            x = layer(x, *turned)
        return _next_token_loss(self.lm_head(self.model["norm"](x)), tokens)

    def _angles(self, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary embedding, [1, 1, tokens, width of a head]."""
        places = torch.arange(tokens.shape[1], device=tokens.device).float()
        angles = torch.outer(places, self.inv_freq.float()).repeat(1, 2)[None, None]  # type: ignore[arg-type]
        return angles.cos().to(dtype), angles.sin().to(dtype)


class _RmsNorm(nn.Module):
    """In operators of its own, in fp32, as transformers has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        whole = x.float()
        scale = torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * (whole * scale).to(x.dtype)


class _LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        shared = width // 4  # of keys and values, of which four query heads share one
        outputs = {"q_proj": width, "k_proj": shared, "v_proj": shared, "o_proj": width}
        self.self_attn = nn.ModuleDict({name: linear(width, out) for name, out in outputs.items()})
        parts = {"gate_proj": linear(width, 4 * width), "up_proj": linear(width, 4 * width)}
        self.mlp = nn.ModuleDict(parts | {"down_proj": linear(4 * width, width)})
        self.input_layernorm = _RmsNorm(width)
        self.post_attention_layernorm = _RmsNorm(width)
        self._heads = heads

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed, attention = self.input_layernorm(x), self.self_attn
        query = _heads(attention["q_proj"](normed), self._heads)
        key = _heads(attention["k_proj"](normed), self._heads // 4)
        value = _heads(attention["v_proj"](normed), self._heads // 4)
        query, key = (part * cosine + _turned(part) * sine for part in (query, key))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        x = x + attention["o_proj"](_joined(attended))
        normed = self.post_attention_layernorm(x)
        gated = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        passed: Tensor = x + self.mlp["down_proj"](gated)
        return passed


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
