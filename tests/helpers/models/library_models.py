"""Small models of libraries: a test that takes one is skipped where its library is missing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from models.small_models import BATCH, Case
from torch import Tensor, nn

from calibrate.capture.sources import imported

__all__ = ["LIBRARY_MODELS"]


def _library(name: str) -> Any:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed, whose model this is")
    return imported(name)


def _timm(name: str, **options: Any) -> Case:
    def build() -> nn.Module:
        model: nn.Module = _library("timm").create_model(name, num_classes=10, **options)
        return model

    return build, lambda: torch.randn(BATCH, 3, 64, 64)


def _transformers(kind: str, **sizes: Any) -> Case:
    def build() -> nn.Module:
        architecture = getattr(_library("transformers"), kind)
        options = {"vocab_size": 50, "use_cache": False, **sizes}
        model: nn.Module = architecture(architecture.config_class(**options))
        return model

    def inputs() -> dict[str, Tensor]:
        ids = torch.randint(3, 50, (BATCH, 8))
        return {"input_ids": ids, "labels": ids}

    return build, inputs


_DECODER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
LIBRARY_MODELS: dict[str, Case] = {
    **{f"timm {name}": _timm(name) for name in ("test_convnext", "test_efficientnet", "test_vit")},
    "transformers qwen": _transformers("Qwen2ForCausalLM", **_DECODER, num_key_value_heads=2),
    "transformers bert": _transformers(
        "BertForMaskedLM", **_DECODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "transformers bart": _transformers(
        "BartForConditionalGeneration", d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, dropout=0.0, decoder_start_token_id=0,
    ),
    "transformers t5": _transformers(
        "T5ForConditionalGeneration", d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8,
        decoder_start_token_id=0, dropout_rate=0.0, attn_implementation="eager",
    ),
}  # fmt: skip
