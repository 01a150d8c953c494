"""The models of the zoo: how each is made, and at which sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from calibrate.capture.sources import Sizes, Source, image_source, imported, token_source, versions
from zoo.others import OTHERS, Spec


def called(kind: str, arguments: dict[str, Any]) -> str:
    """A call as Python writes it."""
    return f"{kind}({', '.join(f'{key}={value}' for key, value in arguments.items())})"


def vision(name: str, title: str, kind: str = "", side: int = 224, **sizes: int) -> Spec:
    """A torchvision model: a function of its name, or a class with sizes that it has none for.

    `side`: of the usual image in pixels.
    """

    def make() -> Source:
        models = imported("torchvision").models

        def build() -> nn.Module:
            model: nn.Module = getattr(models, kind or name)(**sizes)
            return model

        told = f"{versions('torchvision')} {called(kind or name, sizes)}"
        pixels = (Sizes("image_size", side, (64, 160, 1024), side, 32),)
        return image_source(name, told, build, (3, side, side), title=title, sizes=pixels)

    return name, make


def language(name: str, title: str, kind: str, config: dict[str, Any], sizes: Sizes) -> Spec:
    """A transformers model built from a configuration, with fused attention."""

    def make() -> Source:
        library = imported("transformers")
        # GPT-2 logs that its class names no loss and that it takes the causal one, as it should
        library.logging.set_verbosity_error()
        architecture = getattr(library, kind)

        def build() -> nn.Module:
            options = architecture.config_class(**config, attn_implementation="sdpa")
            model: nn.Module = architecture(options)
            return model

        stated = {key: value for key, value in config.items() if key != "use_cache"}
        told = f"{versions('transformers')} {called(kind, stated)}"
        return token_source(name, told, build, (sizes,), title=title)

    return name, make


def tokens(default: int, longest: int) -> Sizes:
    """Sequence length in tokens."""
    return Sizes("seq_len", default, (8, 61, longest), default if default != longest else 200)


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


# config.json of mistralai/Mistral-7B-v0.3 on huggingface.co
MISTRAL = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": False,
}
# config.json of mistralai/Mixtral-8x7B-v0.1 on huggingface.co: Mistral with 8 experts, 2 a token
MIXTRAL = {**MISTRAL, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}


def qwen(
    name: str, title: str, kind: str, width: int, inner: int, layers: int, heads: int, kv: int
) -> Spec:
    """A Qwen, as config.json of Qwen/Qwen2.5-* and Qwen/Qwen3-* on huggingface.co has it.

    Up to 3B the head is the embedding.
    """
    is_second = kind == "Qwen2ForCausalLM"
    config = {
        "vocab_size": 152064 if is_second and width >= 3584 else 151936,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 32768 if is_second else 40960,
        "tie_word_embeddings": width <= 2048,
        "use_cache": False,
    } | ({} if is_second else {"head_dim": 128})
    return language(name, title, kind, config, tokens(2048, config["max_position_embeddings"]))


def t5(name: str, title: str, width: int, inner: int, layers: int, heads: int) -> Spec:
    """A T5 of version 1.0, whose output has as many tokens as its input.

    Source: config.json of google-t5/t5-* on huggingface.co.
    """
    config = {
        "vocab_size": 32128,
        "d_model": width,
        "d_ff": inner,
        "num_layers": layers,
        "num_heads": heads,
        "d_kv": 64,
        "decoder_start_token_id": 0,
        "use_cache": False,
    }
    sizes = Sizes("seq_len", 512, (64, 128, 1024), 512, 64)
    return language(name, title, "T5ForConditionalGeneration", config, sizes)


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


ZOO: dict[str, Callable[[], Source]] = dict(
    (
        vision("resnet18", "ResNet-18 (torchvision)"),
        vision("resnet34", "ResNet-34 (torchvision)"),
        vision("resnet50", "ResNet-50 (torchvision)"),
        vision("resnet101", "ResNet-101 (torchvision)"),
        vision("resnet152", "ResNet-152 (torchvision)"),
        vision("resnext50_32x4d", "ResNeXt-50 32x4d (torchvision)"),
        vision("resnext101_32x8d", "ResNeXt-101 32x8d (torchvision)"),
        vision("vgg16", "VGG-16 (torchvision)"),
        vision("vit_b_16", "ViT-B/16 (torchvision)"),
        vision("vit_l_16", "ViT-L/16 (torchvision)"),
        vision(
            "vit_g_14",
            "ViT-g/14 (torchvision)",
            "VisionTransformer",
            image_size=224,
            patch_size=14,
            num_layers=40,
            num_heads=16,
            hidden_dim=1408,
            mlp_dim=6144,
        ),
        vision("convnext_tiny", "ConvNeXt-T (torchvision)"),
        vision("convnext_base", "ConvNeXt-B (torchvision)"),
        vision("swin_t", "Swin-T (torchvision)"),
        vision("swin_b", "Swin-B (torchvision)"),
        vision("maxvit_t", "MaxViT-T (torchvision)"),
        vision("efficientnet_b0", "EfficientNet-B0 (torchvision)"),
        vision("efficientnet_b4", "EfficientNet-B4 (torchvision)", side=384),
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
        qwen(
            "qwen2.5-0.5b", "Qwen 2.5 0.5B (transformers)", "Qwen2ForCausalLM", 896, 4864, 24, 14, 2
        ),
        qwen(
            "qwen2.5-7b", "Qwen 2.5 7B (transformers)", "Qwen2ForCausalLM", 3584, 18944, 28, 28, 4
        ),
        qwen("qwen3-8b", "Qwen 3 8B (transformers)", "Qwen3ForCausalLM", 4096, 12288, 36, 32, 8),
        language(
            "mistral-7b",
            "Mistral 7B v0.3 (transformers)",
            "MistralForCausalLM",
            MISTRAL,
            tokens(2048, 32768),
        ),
        language(
            "mixtral-8x7b",
            "Mixtral 8x7B, equal experts (transformers)",
            "MixtralForCausalLM",
            MIXTRAL,
            tokens(2048, 32768),
        ),
        t5("t5-base", "T5 base (transformers)", 768, 3072, 12, 12),
        t5("t5-large", "T5 large (transformers)", 1024, 4096, 24, 16),
        *OTHERS,
    )
)
