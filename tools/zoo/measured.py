"""Models to measure on a GPU and to capture, none of which set the estimate: families of their own.

`calibrate capture zoo.measured:CASES.NAME` captures one. Each makes a model, inputs and a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own custom

from calibrate.capture.sources import imported
from zoo.own_code import Dit, Dlrm

__all__ = ["BATCHES", "CASES", "SHARDED"]

Case = Callable[[int], tuple[nn.Module, Any, Callable[[Any], Tensor]]]


def _images(library: str, name: str, side: int = 224) -> Case:
    def make(batch: int) -> Any:
        if library == "timm":
            model = imported("timm").create_model(name)
        else:
            model = imported("torchvision").models.get_model(name)
        labels = torch.randint(0, 1000, (batch,))
        return model.train(), torch.randn(batch, 3, side, side), _classified(labels)

    return make


def _classified(labels: Tensor) -> Callable[[Any], Tensor]:
    """Cross entropy of logits, or of the first of several outputs."""

    def loss(said: Any) -> Tensor:
        logits = said if isinstance(said, Tensor) else said[0]
        return F.cross_entropy(logits.float(), labels)

    return loss


def _text(kind: str, length: int, **config: Any) -> Case:
    def make(batch: int) -> Any:
        architecture = getattr(imported("transformers"), kind)
        options = {"vocab_size": 32000, "use_cache": False, **config}
        model = architecture(architecture.config_class(**options, attn_implementation="sdpa"))
        ids = torch.randint(3, 32000, (batch, length))
        return model.train(), {"input_ids": ids, "labels": ids}, lambda said: said.loss

    return make


class _Recurrent(nn.Module):
    """A language model of recurrent layers."""

    def __init__(self, kind: Callable[..., nn.Module], width: int, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20000, width)
        self.layers = kind(width, width, num_layers=2, batch_first=True, **options)
        both = 2 if options.get("bidirectional") else 1
        self.head = nn.Linear(both * width, 20000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0]).flatten(0, 1)


def _recurrent(kind: Callable[..., nn.Module], width: int, **options: Any) -> Case:
    def make(batch: int) -> Any:
        tokens = torch.randint(0, 20000, (batch, 128))
        return _Recurrent(kind, width, **options), tokens, _classified(tokens.flatten())

    return make


class _UNet(nn.Module):
    """Three levels of convolutions, down and up, with transposed ones."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width << level for level in range(4)]
        self.first = self._level(3, width)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(self._level(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs)
        self.across = nn.ModuleList(self._level(2 * a, a) for a, _ in pairs)
        self.out = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _level(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        again = nn.Conv2d(outputs, outputs, 3, padding=1)
        norms = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        return nn.Sequential(convolution, norms[0], nn.ReLU(), again, norms[1], nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.first(x)]
        for level in self.down:
            kept.append(level(F.max_pool2d(kept[-1], 2)))
        y = kept.pop()
        for up, level in zip(reversed(self.up), reversed(self.across), strict=True):
            y = level(torch.cat([up(y), kept.pop()], 1))
        return self.out(y)


def _mean(said: Tensor) -> Tensor:
    return said.float().square().mean()


def _unet(batch: int) -> Any:
    return _UNet(), torch.randn(batch, 3, 256, 256), _mean


def _dit(batch: int) -> Any:
    times, labels = torch.randint(0, 1000, (batch,)), torch.randint(0, 1000, (batch,))
    inputs = {"latents": torch.randn(batch, 4, 32, 32), "times": times, "labels": labels}
    return Dit(768, 12, 12, patch=2), inputs, _mean


def _dlrm(batch: int) -> Any:
    return Dlrm(), (torch.randn(batch, 13), torch.randn(batch, 26, 128)), _mean


def _translator(batch: int) -> Any:
    model = nn.Transformer(512, 8, 6, 6, 2048, batch_first=True)
    return model, (torch.randn(batch, 256, 512), torch.randn(batch, 256, 512)), _mean


def _mlp(batch: int) -> Any:
    layers = (nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)) for _ in range(2))
    return nn.Sequential(*layers), torch.randn(batch, 256), _mean


_LLAMA = {
    "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
_QWEN = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2,
}  # fmt: skip
_MIXTRAL = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8,
}  # fmt: skip
_PYTHIA = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16,
}  # fmt: skip
_T5 = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}

CASES = SimpleNamespace(
    mlp=_mlp,
    lstm=_recurrent(nn.LSTM, 1024),
    gru=_recurrent(nn.GRU, 512, bidirectional=True),
    unet=_unet,
    dit_b_2=_dit,
    dlrm=_dlrm,
    translator=_translator,
    resnet50=_images("torchvision", "resnet50"),
    convnext_small=_images("torchvision", "convnext_small"),
    swin_s=_images("torchvision", "swin_s"),
    regnety_032=_images("timm", "regnety_032"),
    mobilenetv3_large_100=_images("timm", "mobilenetv3_large_100"),
    vit_small_patch16_224=_images("timm", "vit_small_patch16_224"),
    beit_base_patch16_224=_images("timm", "beit_base_patch16_224"),
    mixer_b16_224=_images("timm", "mixer_b16_224"),
    efficientnet_b3=_images("timm", "efficientnet_b3", 288),
    eca_nfnet_l0=_images("timm", "eca_nfnet_l0"),
    densenet121=_images("timm", "densenet121"),
    poolformer_s24=_images("timm", "poolformer_s24"),
    repvgg_b1=_images("timm", "repvgg_b1"),
    coatnet_0_rw_224=_images("timm", "coatnet_0_rw_224"),
    gpt2_medium=_text("GPT2LMHeadModel", 1024, n_embd=1024, n_layer=24, n_head=16),
    opt_125m=_text("OPTForCausalLM", 1024),
    pythia_410m=_text("GPTNeoXForCausalLM", 1024, **_PYTHIA),
    llama_600m=_text("LlamaForCausalLM", 2048, **_LLAMA),
    qwen2_500m=_text("Qwen2ForCausalLM", 2048, **_QWEN),
    bert_base=_text("BertForMaskedLM", 512),
    distilbert=_text("DistilBertForMaskedLM", 512),
    t5_base=_text("T5ForConditionalGeneration", 512, **_T5),
    mixtral_small=_text("MixtralForCausalLM", 1024, **_MIXTRAL),
)
# two of each model: one that the host bounds on a large GPU, one that the device does
BATCHES = {
    **dict.fromkeys(vars(CASES), (8, 64)),
    "dlrm": (2048, 32768),
    **dict.fromkeys(("gpt2_medium", "opt_125m", "pythia_410m", "t5_base"), (2, 16)),
    **dict.fromkeys(("llama_600m", "qwen2_500m", "mixtral_small"), (1, 8)),
}
# those that are measured under DDP, FSDP and checkpoints too
SHARDED = (
    *("mlp", "lstm", "dit_b_2", "translator", "resnet50", "swin_s", "vit_small_patch16_224"),
    *("densenet121", "gpt2_medium", "llama_600m", "bert_base", "t5_base"),
)
