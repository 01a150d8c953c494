"""Zoo models as modules of torch alone, made at once, with inputs of a batch and a size.

Names, shapes and order of parameters are those of their libraries; attention is torch's
scaled_dot_product_attention, as in the zoo's tables. Sources: He et al., arXiv 1512.03385 (with
torchvision's stride, in the 3x3 of a bottleneck); Xie et al., arXiv 1611.05431; Simonyan and
Zisserman, arXiv 1409.1556; torchvision's ViT (Dosovitskiy et al., arXiv 2010.11929); Devlin et al.,
arXiv 1810.04805; Radford et al., 2019; the Llama 3.2 model card, and for the rotary embedding Su et
al., arXiv 2104.09864.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own custom

_CLASSES = 1000
_VGG16 = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # convolutions of a stage, channels
_DROPOUT = 0.1  # of BERT and GPT-2, as their configurations have it
_BLOCK = 2**16  # random numbers that all weights share: drawing all would take longer than steps
_SCALE = 0.02  # of weights: usual of transformers, and no overflow in half of any
_TOKENS = 30000  # every model's vocabulary holds them
Profiled = tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]


class _Layer(NamedTuple):
    """A convolution of a block, without a bias, and the batch norm behind it."""

    outputs: int
    size: int
    stride: int = 1
    groups: int = 1

    def convolution(self, inputs: int) -> nn.Conv2d:
        return nn.Conv2d(
            inputs,
            self.outputs,
            self.size,
            self.stride,
            padding=self.size // 2,
            groups=self.groups,
            bias=False,
        )


class _Block(nn.Module):
    """Convolutions and their batch norms beside a shortcut, which are added up."""

    def __init__(self, inputs: int, layers: Sequence[_Layer], stride: int) -> None:
        super().__init__()
        self._count, before = len(layers), inputs
        for i, layer in enumerate(layers, start=1):
            self.add_module(f"conv{i}", layer.convolution(before))
            self.add_module(f"bn{i}", nn.BatchNorm2d(layer.outputs))
            before = layer.outputs
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != before:
            shortcut = _Layer(before, 1, stride).convolution(inputs)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(before))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for i in range(1, self._count + 1):
            out = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(out))
            if i < self._count:
                out = self.relu(out)
        out += x if self.downsample is None else self.downsample(x)
        added: Tensor = self.relu(out)
        return added


class ResNet(nn.Sequential):
    """Four stages with so many blocks, basic ones or bottlenecks of grouped convolutions.

    Logits [batch, 1000] of [batch, 3, height, width].
    """

    def __init__(
        self, depths: Sequence[int], *, basic: bool = False, groups: int = 1, per_group: int = 64
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels = 64
        for stage, depth in enumerate(depths):
            blocks, width = [], 64 * 2**stage
            inner = width * per_group // 64 * groups
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                layers = (
                    (_Layer(width, 3, stride), _Layer(width, 3))
                    if basic
                    else (_Layer(inner, 1), _Layer(inner, 3, stride, groups), _Layer(4 * width, 1))
                )
                blocks.append(_Block(channels, layers, stride))
                channels = layers[-1].outputs
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, _CLASSES)


class _Vgg(nn.Sequential):
    """VGG with 16 layers, without batch norms: logits as a ResNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*_vgg_features())
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(4096, _CLASSES),
        )


def _vgg_features() -> Iterator[nn.Module]:
    channels = 3
    for convolutions, width in _VGG16:
        for _ in range(convolutions):
            yield nn.Conv2d(channels, width, 3, padding=1)
            yield nn.ReLU(inplace=True)
            channels = width
        yield nn.MaxPool2d(2, 2)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, width] as [batch, heads, tokens, width of a head]."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Vit(nn.Module):
    """A vision transformer of images of 224 x 224 in patches of 16 x 16."""

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
        query, key = (
            part * cosine + torch.cat((-second, first), dim=-1) * sine
            for part, (first, second) in ((one, one.chunk(2, dim=-1)) for one in (query, key))
        )
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        x = x + attention["o_proj"](_joined(attended))
        normed = self.post_attention_layernorm(x)
        gated = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        passed: Tensor = x + self.mlp["down_proj"](gated)
        return passed


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": partial(ResNet, (2, 2, 2, 2), basic=True),
    "resnet34": partial(ResNet, (3, 4, 6, 3), basic=True),
    "resnet50": partial(ResNet, (3, 4, 6, 3)),
    "resnet101": partial(ResNet, (3, 4, 23, 3)),
    "resnet152": partial(ResNet, (3, 8, 36, 3)),
    "resnext50_32x4d": partial(ResNet, (3, 4, 6, 3), groups=32, per_group=4),
    "resnext101_32x8d": partial(ResNet, (3, 4, 23, 3), groups=32, per_group=8),
    "vgg16": _Vgg,
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


def build(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A zoo model in training mode with random weights: fast, and the same each time."""
    with torch.device("meta"):
        model = BUILDERS[name]()
    model = model.to(dtype).to_empty(device=device).train()
    block = _SCALE * torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))
    block = block.to(device=device, dtype=dtype)
    with torch.no_grad():
        for tensor in model.parameters():  # numbers of the block, over and over
            flat = tensor.view(-1)
            whole = len(flat) // len(block) * len(block)
            flat[:whole].view(-1, len(block)).copy_(block)
            flat[whole:].copy_(block[: len(flat) - whole])
        for module in model.modules():
            _reset(module)
    return model


def _reset(module: nn.Module) -> None:
    """What torch or a model sets apart from random weights: norms, statistics, counted places."""
    if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
        module.reset_parameters()
        return
    tensors = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    for name, tensor in tensors:
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
