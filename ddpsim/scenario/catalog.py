"""The names a scenario may use for models and devices, and where their tables are."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo

from ddpsim.errors import shown
from ddpsim.scenario.options.model_file import read_model_file, table_of
from ddpsim.scenario.quantity import source_file
from ddpsim.scenario.suggest import did_you_mean, most_like

_DATA = Path(__file__).parent.parent / "data"  # importlib.resources takes 3 % of the start-up

# other spellings in use: Hugging Face hub names, torchvision's, papers'
_MODEL_ALIASES = {
    "bert": "bert-base",
    "bert-base-uncased": "bert-base",
    "bert-base-cased": "bert-base",
    "bert-large-uncased": "bert-large",
    "bert-large-cased": "bert-large",
    "gpt2-small": "gpt2",
    "gpt2-124m": "gpt2",
    "gpt2-355m": "gpt2-medium",
    "gpt2-774m": "gpt2-large",
    "gpt2-1.5b": "gpt2-xl",
    "llama-3.2-1b": "llama-1b",
    "llama3.2-1b": "llama-1b",
    "llama-3.2-3b": "llama-3b",
    "llama3.2-3b": "llama-3b",
    "llama-3.1-8b": "llama-8b",
    "llama3.1-8b": "llama-8b",
    "llama-2-13b": "llama-13b",
    "llama2-13b": "llama-13b",
    "llama-3.1-70b": "llama-70b",
    "llama3.1-70b": "llama-70b",
    "gpt-neox": "gpt-neox-20b",
    "resnext50": "resnext50_32x4d",
    "resnext101": "resnext101_32x8d",
    "vit-base": "vit_b_16",
    "vit-large": "vit_l_16",
    "vit-g": "vit_g_14",
    "vit-b/16": "vit_b_16",
    "vit-g/14": "vit_g_14",
    "vit-l/16": "vit_l_16",
    "convnext-t": "convnext_tiny",
    "convnext-b": "convnext_base",
    "swin-tiny": "swin_t",
    "swin-base": "swin_b",
    "maxvit-tiny": "maxvit_t",
    "qwen2.5-0.5b-instruct": "qwen2.5-0.5b",
    "qwen2.5-7b-instruct": "qwen2.5-7b",
    "mistral": "mistral-7b",
    "mistral-7b-v0.3": "mistral-7b",
    "mixtral": "mixtral-8x7b",
    "whisper-large": "whisper-large-v3",
    "sd15": "sd15-unet",
    "sd-1.5": "sd15-unet",
    "stable-diffusion-1.5": "sd15-unet",
    "stable-diffusion-v1-5": "sd15-unet",
    "sdxl": "sdxl-unet",
    "stable-diffusion-xl": "sdxl-unet",
    "stable-diffusion-xl-base-1.0": "sdxl-unet",
    "dit-xl/2": "dit-xl-2",
    "dlrm": "dlrm-dense",
}
_MACHINE_ALIASES = {
    "dgx-1": "dgx-1-v100",
    "dgx1": "dgx-1-v100",
    # what CoreWeave, Lambda and others rent: the same boards and NICs
    "hgx-h100": "dgx-h100",
    "hgx-h200": "dgx-h200",
    "hgx-b200": "dgx-b200",
    "coreweave-h100": "dgx-h100",
    "coreweave-h200": "dgx-h200",
    "coreweave-b200": "dgx-b200",
    "lambda-h100": "dgx-h100",
    "lambda-b200": "dgx-b200",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "p3dn": "p3dn.24xlarge",
    "p4d": "p4d.24xlarge",
    "p4de": "p4de.24xlarge",
    "p5": "p5.48xlarge",
    "p5e": "p5e.48xlarge",
    "p5en": "p5en.48xlarge",
    "p6-b200": "p6-b200.48xlarge",
    "p6-b300": "p6-b300.48xlarge",
    "p6e-gb200": "p6e-gb200.36xlarge",
    "u-p6e-gb200x72": "p6e-gb200.36xlarge",
    "a2-high": "a2-highgpu-8g",
    "a2-ultra": "a2-ultragpu-8g",
    "a3-high": "a3-highgpu-8g",
    "a3-megagpu-8g": "a3-mega",
    "a3-ultra": "a3-ultragpu-8g",
    "a4-high": "a4-highgpu-8g",
    "standard-nd40rs-v2": "nd40rs-v2",
    "standard-nd96asr-v4": "nd96asr-v4",
    "standard-nd96amsr-a100-v4": "nd96amsr-a100-v4",
    "standard-nd96isr-h100-v5": "nd96isr-h100-v5",
    "standard-nd96isr-h200-v5": "nd96isr-h200-v5",
    "standard-nd96isr-mi300x-v5": "nd96isr-mi300x-v5",
    "standard-nd128isr-ndr-gb200-v6": "nd128isr-gb200-v6",
    "g4dn": "g4dn.12xlarge",
    "g5": "g5.12xlarge",
    "g6": "g6.12xlarge",
}
_DEVICE_ALIASES = {
    "p100": "p100-sxm-16gb",
    "v100": "v100-sxm-32gb",
    "v100-pcie": "v100-pcie-16gb",
    "a100": "a100-sxm-80gb",
    "h100": "h100-sxm-80gb",
    "h200": "h200-sxm-141gb",
    "h800": "h800-sxm-80gb",
    "h20": "h20-sxm-96gb",
    "h100-nvl": "h100-nvl-94gb",
    "h100-96gb": "h100-sxm-96gb-hbm2e",
    "h100-96gb-hbm2e": "h100-sxm-96gb-hbm2e",
    "gh200": "gh200-96gb",
    "mi250x": "mi250x-gcd",
    "cpu": "cpu-core",
    # as the driver and torch.cuda.get_device_name call them, without the brand
    "p100-sxm2-16gb": "p100-sxm-16gb",
    "v100-sxm2-16gb": "v100-sxm-16gb",
    "v100-sxm2-32gb": "v100-sxm-32gb",
    "a100-sxm4-40gb": "a100-sxm-40gb",
    "a100-sxm4-80gb": "a100-sxm-80gb",
    "a100-80gb-pcie": "a100-pcie-80gb",
    "h100-80gb-hbm3": "h100-sxm-80gb",
    "h100-pcie": "h100-pcie-80gb",
    "gh200-480gb": "gh200-96gb",
    "b300-sxm6-ac": "b300",
    "rtx-6000-ada-generation": "rtx-6000-ada",
    "rtx-pro-6000-blackwell": "rtx-pro-6000",
    "rtx-pro-6000-blackwell-workstation-edition": "rtx-pro-6000",
    "dgx-spark": "gb10",
    # as people call them for short
    "1080ti": "gtx-1080ti",
    "2080ti": "rtx-2080ti",
    **{name: f"rtx-{name}" for name in ("3060", "3080", "3090", "4080", "4090", "5080", "5090")},
    **{name: f"rtx-{name}" for name in ("a4000", "a5000", "a6000")},
}
_CAPTURE_HINT = (
    ". Or your own: `ddpsim calibrate capture MODULE:FUNCTION -o model.json`, then model.json"
)
_BRANDS = ("nvidia", "tesla", "geforce", "quadro", "amd", "instinct")


@cache
def model_names() -> tuple[str, ...]:
    """Every model of the zoo, sorted."""
    return tuple(sorted(name for names in _zoo_names().values() for name in names))


@cache
def _zoo_names() -> dict[str, list[str]]:
    """Families of the zoo, and the models in each family's file, line by line."""
    names: dict[str, list[str]] = json.loads((_DATA / "zoo" / "names.json").read_text("utf-8"))
    return names


def model_name(value: Any, info: ValidationInfo) -> str:
    """A zoo model's own name, or where a captured model's file is; raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a model name")
    if not value.endswith(".json"):
        return resolve("model", value)
    path = str(source_file(value, info).path.resolve())
    model_table(path)
    return path


def is_measured_alone(value: Any, info: ValidationInfo) -> bool:
    """Whether a model's file holds a measurement, and nothing captured."""
    if not isinstance(value, str) or not value.endswith(".json"):
        return False
    with suppress(ValueError):  # which the key itself tells
        return read_model_file(value, source_file(value, info).path.resolve()).table is None
    return False


def model_table(name: str) -> dict[str, Any]:
    """The table of a model (schema `ddpsim.model/3`): of the zoo, or of a captured model's file.

    Raises ValueError for a file without a captured part.
    """
    if name.endswith(".json"):
        if (table := read_model_file(name, Path(name)).table) is None:
            raise ValueError(f"{shown(name)} holds a measurement alone; use it as workload.profile")
        return table
    return table_of(zoo_document(name))


@cache
def zoo_document(name: str) -> dict[str, Any]:
    """The document of a model of the zoo, as `calibrate capture` makes it."""
    family, names = next((f, names) for f, names in _zoo_names().items() if name in names)
    lines = _zoo_lines(family)
    document: dict[str, Any] = json.loads(lines[names.index(name)])
    return document


@cache
def _zoo_lines(family: str) -> list[bytes]:
    """The tables of a family, whose parameter names are alike: together they take a third."""
    import lzma  # noqa: PLC0415 -- what takes a profile or a captured model needs none

    return lzma.decompress((_DATA / "zoo" / f"{family}.jsonl.xz").read_bytes()).splitlines()


@cache
def _table(kind: str) -> dict[str, dict[str, Any]]:
    path = _DATA / f"{kind}.json"
    entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))[kind]
    return entries


def machine_names() -> tuple[str, ...]:
    """Every machine preset, in the order of the file."""
    return tuple(_table("machines"))


def machine_table(name: str) -> dict[str, Any]:
    """A machine preset (schema `ddpsim.machines/1`): its device and network, with their sources."""
    return _table("machines")[name]


def device_names() -> tuple[str, ...]:
    """Every device preset, in the order of the file."""
    return tuple(_table("devices"))


def device_table(name: str) -> dict[str, Any]:
    """A device preset (schema `ddpsim.devices/1`): figures in SI units, with their sources."""
    return _table("devices")[name]


def spellings(kind: str) -> dict[str, list[str]]:
    """Every name of a `model`, `device` or `machine`, with its other spellings."""
    listed, aliases = _KINDS[kind]
    return {name: [other for other, main in aliases.items() if main == name] for name in listed()}


def board_watts(device: str) -> float | None:
    """A device's board power by its data sheet (schema `ddpsim.power/1`); None where not known."""
    watts: dict[str, Any] = _table("power")
    return watts.get(device)


def failure_names() -> tuple[str, ...]:
    """Every preset of failures, in the order of the file."""
    return tuple(_table("failures"))


def failures_of(name: str | None) -> dict[str, Any]:
    """A preset of failures (schema `ddpsim.failures/1`): a mean time between them, its source.

    Raises ValueError with the nearest name.
    """
    presets = _table("failures")
    if name not in presets:
        hint = did_you_mean(str(name), list(presets))
        raise ValueError(f"unknown failures {shown(name)}.{hint} Known: {', '.join(presets)}")
    return presets[name]


def resolve(kind: str, name: str) -> str:
    """The catalogue's own name of a `model`, `device` or `machine`.

    A device may be called as its driver calls it, "NVIDIA A100-SXM4-80GB". Raises ValueError with
    the nearest one.
    """
    listed, aliases = _KINDS[kind]
    names = listed()
    known_as = {entry.replace("_", "-"): entry for entry in names} | aliases
    words = name.strip().lower().replace("_", "-").split()
    folded = "-".join(word for word in words if kind != "device" or word not in _BRANDS)
    if folded in known_as:
        return known_as[folded]
    squashed = {spelling.replace("-", ""): entry for spelling, entry in known_as.items()}
    if folded.replace("-", "") in squashed:
        return squashed[folded.replace("-", "")]
    near = ", ".join(most_like(folded, known_as))
    hint = _CAPTURE_HINT if kind == "model" else ""
    raise ValueError(
        f"unknown {kind} {shown(name)}. Nearest: {near}; `ddpsim list {kind}s` prints "
        f"all {len(names)}{hint}"
    )


def are_other_devices(name: str | None, other: str | None) -> bool:
    """Whether two names are of different devices; an unknown name may be of any."""
    try:
        return resolve("device", name or "") != resolve("device", other or "")
    except ValueError:
        return False


_KINDS: dict[str, tuple[Callable[[], tuple[str, ...]], dict[str, str]]] = {
    "model": (model_names, _MODEL_ALIASES),
    "device": (device_names, _DEVICE_ALIASES),
    "machine": (machine_names, _MACHINE_ALIASES),
}
