"""Speech, diffusion and recommendation models of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibrate.capture.shapes import META, building
from calibrate.capture.sources import Sizes, Source, imported, mean_of, versions
from calibrate.measure.model.training import Made
from zoo.own_code import Dit, Dlrm

Spec = tuple[str, Callable[[], Source]]  # a name, and what makes its source
Inputs = Callable[[int, int], dict[str, Tensor]]  # of a batch and a size

_CLIP_TOKENS = 77  # of a prompt
_LATENT = 8  # pixels of an image's side for each of its latent

# unet/config.json of stable-diffusion-v1-5/stable-diffusion-v1-5 on huggingface.co
SD15 = {"cross_attention_dim": 768, "attention_head_dim": 8}
# unet/config.json of stabilityai/stable-diffusion-xl-base-1.0 on huggingface.co
SDXL = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
# config.json of openai/whisper-small and openai/whisper-large-v3 on huggingface.co
WHISPER_SMALL = {
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "num_mel_bins": 80,
    "vocab_size": 51865,
}
WHISPER_LARGE = {
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "vocab_size": 51866,
}
# NVIDIA NeMo, examples/asr/conf/fastconformer/fast-conformer_ctc_bpe.yaml, "Large"
FASTCONFORMER = {
    "hidden_size": 512,
    "num_hidden_layers": 18,
    "intermediate_size": 2048,
    "layerdrop": 0.0,
}


def _numbers(*shape: int) -> Tensor:
    return torch.empty(shape, device=META)


def _ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.long, device=META)


def _source(
    name: str,
    title: str,
    family: str,
    told: str,
    build: Callable[[], nn.Module],
    inputs: Inputs,
    loss: Callable[[Any], Tensor],
    sizes: Sizes | None = None,
) -> Source:
    with building():
        model = build().train()

    def make(batch: int, size: int | None) -> Made:
        return Made(model, inputs(batch, size or 0), loss)

    default, tried = (sizes.default, (sizes,)) if sizes else (None, ())
    return Source(name, title, family, told, make, 2, default, tried)


def whisper(name: str, title: str, config: dict[str, Any]) -> Spec:
    """A Whisper: 30 s of sound, and as many tokens of text as the size says."""

    def make() -> Source:
        library = imported("transformers")
        kind = library.WhisperForConditionalGeneration
        options = kind.config_class(**config, use_cache=False, attn_implementation="sdpa")
        bins = config["num_mel_bins"]

        def inputs(batch: int, size: int) -> dict[str, Tensor]:
            return {"input_features": _numbers(batch, bins, 3000), "labels": _ids(batch, size)}

        told = f"{versions('transformers')} {kind.__name__} with {config}"
        sizes = Sizes("seq_len", 448, (8, 61, 448), 200)
        return _source(
            name, title, "speech", told, lambda: kind(options), inputs, lambda one: one.loss, sizes
        )

    return name, make


def fastconformer(name: str, title: str) -> Spec:
    """A FastConformer with a CTC head, its loss the mean: CTC's own needs values."""

    def make() -> Source:
        library = imported("transformers")
        kind = library.ParakeetForCTC
        encoder = {**FASTCONFORMER, "attn_implementation": "sdpa"}
        options = kind.config_class(encoder_config=encoder)

        def inputs(batch: int, size: int) -> dict[str, Tensor]:
            return {"input_features": _numbers(batch, size, 80)}

        def loss(said: Any) -> Tensor:
            return functional.log_softmax(said.logits, -1, dtype=torch.float32).mean()

        told = f"{versions('transformers')} {kind.__name__} with {FASTCONFORMER}, mean as loss"
        sizes = Sizes("seq_len", 1536, (256, 768, 3072), 1536, 256)
        return _source(name, title, "speech", told, lambda: kind(options), inputs, loss, sizes)

    return name, make


def unet(name: str, title: str, config: dict[str, Any], side: int) -> Spec:
    """Stable Diffusion's UNet on latents of an image, with a prompt, and the noise's square error.

    `side`: of the usual image in pixels.
    """

    def make() -> Source:
        library = imported("diffusers")
        kind = library.UNet2DConditionModel
        width = config["cross_attention_dim"]

        def inputs(batch: int, size: int) -> dict[str, Any]:
            latent = size // _LATENT
            given: dict[str, Any] = {
                "sample": _numbers(batch, 4, latent, latent),
                "timestep": _ids(batch),
                "encoder_hidden_states": _numbers(batch, _CLIP_TOKENS, width),
            }
            if "addition_embed_type" in config:
                pooled = {"text_embeds": _numbers(batch, 1280), "time_ids": _ids(batch, 6)}
                given["added_cond_kwargs"] = pooled
            return given

        def loss(said: Any) -> Tensor:
            return functional.mse_loss(said.sample.float(), torch.empty_like(said.sample).float())

        told = f"{versions('diffusers')} {kind.__name__} with {config}"
        sizes = Sizes("image_size", side, (256, 512, 1024), 768, 64)
        return _source(name, title, "diffusion", told, lambda: kind(**config), inputs, loss, sizes)

    return name, make


def dit(name: str, title: str, width: int, depth: int, heads: int) -> Spec:
    """A DiT of patches of 2, at images of 256 pixels."""

    def inputs(batch: int, _: int) -> dict[str, Tensor]:
        latents = _numbers(batch, 4, 32, 32)
        return {"latents": latents, "times": _ids(batch), "labels": _ids(batch)}

    def loss(said: Tensor) -> Tensor:
        return functional.mse_loss(said, torch.empty_like(said))

    def make() -> Source:
        told = f"DiT of width {width}, {depth} blocks and {heads} heads, images of 256 pixels"
        build = lambda: Dit(width, depth, heads, patch=2)  # noqa: E731 -- one line is enough
        return _source(name, title, "diffusion", told, build, inputs, loss)

    return name, make


def dlrm(name: str, title: str) -> Spec:
    """DLRM's dense part."""

    def inputs(batch: int, _: int) -> dict[str, Tensor]:
        return {"features": _numbers(batch, 13), "embedded": _numbers(batch, 26, 128)}

    def make() -> Source:
        told = "DLRM of MLPerf without its tables, mean as loss"
        return _source(name, title, "recommendation", told, Dlrm, inputs, mean_of)

    return name, make


OTHERS = (
    whisper("whisper-small", "Whisper small (transformers)", WHISPER_SMALL),
    whisper("whisper-large-v3", "Whisper large v3 (transformers)", WHISPER_LARGE),
    fastconformer("fastconformer-large", "FastConformer-CTC large (transformers)"),
    unet("sd15-unet", "Stable Diffusion 1.5's UNet (diffusers)", SD15, 512),
    unet("sdxl-unet", "Stable Diffusion XL's UNet (diffusers)", SDXL, 1024),
    dit("dit-xl-2", "DiT-XL/2, 256 pixels", 1152, 28, 16),
    dlrm("dlrm-dense", "DLRM's dense part (MLPerf)"),
)
