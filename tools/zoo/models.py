"""The models of the zoo: how each is made, and at which sizes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """What the user may choose: the JSON entry, and the sizes to measure at.

    `points` are used for the fit (one more than the degree in x), `check` is held out.
    """

    entry: dict[str, Any]
    points: tuple[int, ...]
    check: int

    def x(self, size: int) -> int:
        """The variable of the cost polynomials: pixels, tokens per sample, or a constant."""
        return size * size if self.entry["variable"] == "pixels" else size

    @property
    def default(self) -> int:
        """The default size, in image side length or tokens."""
        return int(self.entry["default"])


@dataclass(frozen=True)
class Spec:
    """How to build one zoo model and its loss."""

    name: str
    title: str
    family: str
    library: str
    call: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Callable[[], Tensor]]
    size: Size


def image_loss(model: nn.Module, batch: int, size: int) -> Callable[[], Tensor]:
    """Cross entropy of `batch` square RGB images with side `size` pixels."""
    images = torch.empty(batch, 3, size, size, device="meta")
    labels = torch.empty(batch, dtype=torch.long, device="meta")
    return lambda: functional.cross_entropy(model(images), labels)


def token_loss(model: nn.Module, batch: int, size: int) -> Callable[[], Tensor]:
    """The model's own loss for `batch` sequences of `size` tokens, every token labelled."""
    ids = torch.empty(batch, size, dtype=torch.long, device="meta")
    arguments = {"input_ids": ids, "labels": ids}
    if type(model).__name__ == "BertForPreTraining":
        arguments["next_sentence_label"] = torch.empty(batch, dtype=torch.long, device="meta")

    def run() -> Tensor:
        loss: Tensor = model(**arguments).loss
        return loss

    return run


def import_torchvision() -> Any:
    """torchvision, also when its compiled operators cannot be loaded.

    The import registers shape functions for two of these operators, and fails where a torchvision
    built for another torch (CPU against CUDA) could not define them. No zoo model uses them.
    """
    try:
        return import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    return import_module("torchvision")


def import_transformers() -> Any:
    """transformers, which imports torchvision wherever that is installed."""
    with suppress(ModuleNotFoundError):
        import_torchvision()
    return import_module("transformers")


def transformer(name: str, title: str, size: Size, **sizes: int) -> Spec:
    """A vision transformer of torchvision's class, with sizes that it has no function for."""

    def build() -> nn.Module:
        model: nn.Module = import_torchvision().models.VisionTransformer(**sizes)
        return model

    call = f"VisionTransformer({', '.join(f'{key}={value}' for key, value in sizes.items())})"
    return Spec(name, title, "vision", "torchvision", call, build, image_loss, size)


def vision(name: str, title: str, size: Size) -> Spec:
    """A torchvision model with the default arguments."""

    def build() -> nn.Module:
        model: nn.Module = getattr(import_torchvision().models, name)()
        return model

    return Spec(name, title, "vision", "torchvision", f"{name}()", build, image_loss, size)


def language(name: str, title: str, architecture: str, config: dict[str, Any], size: Size) -> Spec:
    """A transformers model built from a configuration, with fused attention."""

    def build() -> nn.Module:
        library = import_transformers()
        # GPT-2 logs that its class names no loss and that it takes the causal one, as it should.
        library.logging.set_verbosity_error()
        kind = getattr(library, architecture)
        model: nn.Module = kind(kind.config_class(**config, attn_implementation="sdpa"))
        return model

    arguments = ", ".join(f"{key}={value}" for key, value in config.items() if key != "use_cache")
    call = f"{architecture}({arguments})"
    return Spec(name, title, "language", "transformers", call, build, token_loss, size)


def entry(key: str, default: int, variable: str, step: int, bounds: tuple[int, int | None]) -> Any:
    """The "size" object of the JSON format."""
    names = ("key", "default", "variable", "multiple_of", "min", "max")
    return dict(zip(names, (key, default, variable, step, *bounds), strict=True))


def tokens(default: int, longest: int) -> Size:
    """Sequence length in tokens; costs are quadratic in it."""
    return Size(entry("seq_len", default, "seq_len", 1, (8, longest)), (24, 61, 160), 200)


PIXELS = Size(entry("image_size", 224, "pixels", 32, (64, None)), (64, 160), 288)
FIXED = Size(entry("image_size", 224, "none", 224, (224, 224)), (224,), 224)
BERT_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


# config.json of meta-llama/Llama-2-13b-hf on huggingface.co
LLAMA_13B = {
    "vocab_size": 32000,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "use_cache": False,
}
# config.json of EleutherAI/gpt-neox-20b on huggingface.co
NEOX_20B = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "max_position_embeddings": 2048,
    "use_cache": False,
}


def llama3(
    name: str, title: str, width: int, inner: int, layers: int, heads: int, factor: float
) -> Spec:
    """A Llama 3 of 8 key and value heads, as config.json of meta-llama/Llama-3.* has it.

    Up to 3B the head is the embedding. `factor`: of its rope scaling.
    """
    config = {
        "vocab_size": 128256,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": width < 4096,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "use_cache": False,
    }
    return language(name, title, "LlamaForCausalLM", config, tokens(2048, 131072))


def bert(name: str, title: str, config: dict[str, Any]) -> Spec:
    """A BERT with both pre-training heads; the library's defaults are the uncased base model."""
    return language(name, title, "BertForPreTraining", config, tokens(512, 512))


def gpt2(name: str, title: str, width: int, layers: int, heads: int) -> Spec:
    """A GPT-2 of the given hidden size and depth."""
    config = {"n_embd": width, "n_layer": layers, "n_head": heads, "use_cache": False}
    return language(name, title, "GPT2LMHeadModel", config, tokens(1024, 1024))


ZOO: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        vision("resnet18", "ResNet-18 (torchvision)", PIXELS),
        vision("resnet34", "ResNet-34 (torchvision)", PIXELS),
        vision("resnet50", "ResNet-50 (torchvision)", PIXELS),
        vision("resnet101", "ResNet-101 (torchvision)", PIXELS),
        vision("resnet152", "ResNet-152 (torchvision)", PIXELS),
        vision("resnext50_32x4d", "ResNeXt-50 32x4d (torchvision)", PIXELS),
        vision("resnext101_32x8d", "ResNeXt-101 32x8d (torchvision)", PIXELS),
        vision("vgg16", "VGG-16 (torchvision)", PIXELS),
        vision("vit_b_16", "ViT-B/16 (torchvision)", FIXED),
        vision("vit_l_16", "ViT-L/16 (torchvision)", FIXED),
        transformer(
            "vit_g_14",
            "ViT-g/14 (torchvision)",
            FIXED,
            image_size=224,
            patch_size=14,
            num_layers=40,
            num_heads=16,
            hidden_dim=1408,
            mlp_dim=6144,
        ),
        bert("bert-base", "BERT base (transformers)", {}),
        bert("bert-large", "BERT large (transformers)", BERT_LARGE),
        gpt2("gpt2", "GPT-2 124M (transformers)", 768, 12, 12),
        gpt2("gpt2-medium", "GPT-2 medium 355M (transformers)", 1024, 24, 16),
        gpt2("gpt2-large", "GPT-2 large 774M (transformers)", 1280, 36, 20),
        gpt2("gpt2-xl", "GPT-2 XL 1.5B (transformers)", 1600, 48, 25),
        llama3("llama-1b", "Llama 3.2 1B (transformers)", 2048, 8192, 16, 32, 32.0),
        llama3("llama-3b", "Llama 3.2 3B (transformers)", 3072, 8192, 28, 24, 32.0),
        llama3("llama-8b", "Llama 3.1 8B (transformers)", 4096, 14336, 32, 32, 8.0),
        language(
            "llama-13b",
            "Llama 2 13B (transformers)",
            "LlamaForCausalLM",
            LLAMA_13B,
            tokens(2048, 4096),
        ),
        llama3("llama-70b", "Llama 3.1 70B (transformers)", 8192, 28672, 80, 64, 8.0),
        language(
            "gpt-neox-20b",
            "GPT-NeoX 20B (transformers)",
            "GPTNeoXForCausalLM",
            NEOX_20B,
            tokens(2048, 2048),
        ),
    )
}
