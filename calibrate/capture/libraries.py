"""Models of libraries by name: torchvision's and timm's images, transformers' configurations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibrate.capture.shapes import META, building, tensors
from calibrate.capture.sources import Sizes, Source
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.training import Made
from calibrate.measure.model.user_code import said_of

__all__ = ["image_source", "imported", "mean_of", "token_source", "versions"]


def imported(library: str) -> Any:
    """A library, also where torchvision's compiled operators cannot be loaded.

    torchvision's import registers shape functions for two of these operators, and fails where one
    built for another torch could not define them. No model that is captured needs their kernels.
    """
    if library != "torchvision":  # timm and transformers import it where it is installed
        with suppress(MeasureError):
            imported("torchvision")
    try:
        return _genuine(library)
    except ModuleNotFoundError as error:
        raise MeasureError(
            f"{library} cannot be imported ({error}): pip install {error.name or library}"
        ) from None
    except MeasureError:
        raise
    except Exception as error:  # noqa: BLE001 - a folder of that name may hold anything
        if "torchvision::nms" not in str(error):
            raise MeasureError(f"{library} cannot be imported: {said_of(error)}") from None
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    return _genuine(library)


def _genuine(library: str) -> Any:
    """The library, and not a folder or a file of its name; raises MeasureError."""
    found = import_module(library)
    if not hasattr(found, "__version__"):
        where = next(iter(getattr(found, "__path__", ())), found.__file__)
        raise MeasureError(
            f"{where} is imported in the place of the library {library}, and is none: rename it, "
            "or work in another folder"
        )
    return found


def versions(library: str) -> str:
    """A library's name and version."""
    return f"{library} {import_module(library).__version__.partition('+')[0]}"


def image_source(
    name: str,
    told: str,
    build: Callable[[], nn.Module],
    shape: tuple[int, int, int],
    *,
    title: str = "",
    sizes: tuple[Sizes, ...] | None = None,
) -> Source:
    """A classifier of images: cross entropy of its output, or of the first of several."""
    model = _built(build)
    channels, side, _ = shape

    def make(batch: int, size: int | None) -> Made:
        extent = size or side
        images = torch.empty(batch, channels, extent, extent, device=META)
        labels = torch.empty(batch, dtype=torch.long, device=META)

        def loss(said: Any) -> Tensor:
            return functional.cross_entropy(_logits(said), labels)

        return Made(model, images, loss)

    tried = tuple(Sizes.around("image_size", side)) if sizes is None else sizes
    return Source(name, title or name, "vision", told, make, 2, side, tried)


def _logits(said: Any) -> Tensor:
    """A classifier's output; of several, such as an Inception's, the first."""
    while not isinstance(said, Tensor):
        said = next(iter(said.values() if isinstance(said, dict) else said))
    return said


def mean_of(said: Any) -> Tensor:
    """A loss of a model that states none: the mean of all floating tensors that it returns."""
    means = [one.mean() for one in tensors(said) if one.is_floating_point()]
    return torch.stack(means).sum()


def token_source(
    name: str,
    told: str,
    build: Callable[[], nn.Module],
    sizes: tuple[Sizes, ...],
    *,
    title: str = "",
) -> Source:
    """A language model of transformers with its own loss, every token labelled."""
    model, default = _built(build), sizes[0].default

    def make(batch: int, size: int | None) -> Made:
        ids = torch.empty(batch, size or default, dtype=torch.long, device=META)
        inputs = {"input_ids": ids, "labels": ids}
        if type(model).__name__ == "BertForPreTraining":
            inputs["next_sentence_label"] = torch.empty(batch, dtype=torch.long, device=META)
        return Made(model, inputs, lambda said: said.loss)

    return Source(name, title or name, "language", told, make, 2, default, sizes)


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    with building():
        return build().train()
