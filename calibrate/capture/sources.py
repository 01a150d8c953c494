"""Models to capture: a user's MODULE:FUNCTION, or a library's and what it calls the model.

The libraries: torchvision's and timm's images, transformers' configurations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from calibrate.capture.shapes import META, building, drop_memory, tensors, without_memory
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.training import (
    SIZES,
    Made,
    checked,
    default_of,
    find_function,
    one_line,
    users_own_errors,
)
from ddpsim.errors import shown
from ddpsim.files import json_of, read_regular

SizeKey = Literal["seq_len", "image_size"]
_STRIDE = 32  # of most convolutional networks as a whole: images of other sizes are padded
_LARGEST_BYTES = 2**24  # of a configuration
_TOKENS = 1024  # of a sample, where a configuration allows more


@dataclass(frozen=True)
class Sizes:
    """The sizes to capture at: three that the polynomials go through, and one that checks them."""

    key: SizeKey
    default: int
    points: tuple[int, int, int]
    check: int
    multiple_of: int = 1

    def x(self, size: int) -> int:
        """The variable of the polynomials: tokens, or pixels."""
        return size * size if self.key == "image_size" else size

    def entry(self, *, is_free: bool) -> dict[str, Any]:
        """The document's "size" object."""
        least, most = (self.points[0], self.points[-1]) if is_free else (self.default,) * 2
        return {
            "key": self.key,
            "default": self.default,
            "variable": ("pixels" if self.key == "image_size" else "seq_len")
            if is_free
            else "none",
            "multiple_of": self.multiple_of if is_free else self.default,
            "min": least,
            "max": most,
        }

    @classmethod
    def around(cls, key: SizeKey, default: int) -> Iterator[Sizes]:
        """What to try for a model whose limits nobody states, the widest first."""
        if key == "image_size":
            low = max(_STRIDE, default // 2 // _STRIDE * _STRIDE)
            check = default if default not in (low, 2 * low) else low + _STRIDE
            if default % _STRIDE == 0:
                yield cls(key, default, (low, 2 * low, 4 * low), check, _STRIDE)
            return
        quarter, half = default // 4, default // 2
        if quarter < 2:
            return
        # no more than the usual one: a lookup of positions that a model lacks shows no shape
        yield cls(key, default, (quarter, half + 1, default), default - 1)
        if default % 16 == 0:  # what takes whole blocks alone
            yield cls(key, default, (quarter, half, default), 3 * quarter, quarter)


@dataclass(frozen=True)
class Source:
    """A model that can be made at a batch and a size.

    `make`: called with both, with the model and the inputs without memory. `batch`, `sizes`: the
    usual ones, and those to try; none where the model takes no size. `origin`: the model in words.
    """

    name: str
    title: str
    family: str
    origin: str
    make: Callable[[int, int | None], Made]
    batch: int
    default: int | None = None
    sizes: tuple[Sizes, ...] = ()


def function_source(reference: str, batch: int | None, size: int | None) -> Source:
    """MODULE:FUNCTION, with the batch and the size that the user gave; raises MeasureError."""
    function = find_function(reference)
    parameters = inspect.signature(function).parameters
    key = next((key for key in SIZES if key in parameters), None)
    default = None
    if key:
        default = default_of(reference, parameters[key], size)
    elif size is not None:
        raise MeasureError(
            f"{reference} takes no size: write an argument seq_len or image_size, or drop --size"
        )
    takes_batch = "batch" in parameters
    usual = default_of(reference, parameters["batch"], batch) if takes_batch else (batch or 2)

    def make(batch: int, size: int | None) -> Made:
        options: dict[str, int] = {"batch": batch} if takes_batch else {}
        if key:
            options[key] = size or default or 1
        with users_own_errors(reference), building():
            made = checked(reference, function(**options))
        drop_memory(made.model)
        inputs = without_memory(made.inputs)
        return made._replace(inputs=inputs if takes_batch else of_batch(inputs, batch))

    if not takes_batch and batch is None:
        with users_own_errors(reference), building():
            usual = batch_of(checked(reference, function()).inputs)
    sizes = tuple(Sizes.around(key, default)) if key and default else ()  # type: ignore[arg-type]
    name = reference.rpartition(":")[2]
    return Source(name, reference, "own", reference, make, usual, default, sizes)


def batch_of(inputs: Any) -> int:
    """The first extent that all inputs have."""
    extents = {tensor.shape[0] for tensor in tensors(inputs) if tensor.dim()}
    if len(extents) != 1:
        raise MeasureError(
            "the inputs have no common first dimension to take as the batch: write an argument "
            "batch of the function"
        )
    return int(extents.pop())


def of_batch(inputs: Any, batch: int) -> Any:
    """Inputs with another first extent."""

    def resized(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        return torch.empty(batch, *tensor.shape[1:], dtype=tensor.dtype, device=META)

    return tree_map_only(Tensor, resized, inputs)


def source_of(reference: str, batch: int | None, size: int | None) -> Source:
    """What `calibrate capture` is given; raises MeasureError with what is wrong."""
    library, _, name = reference.partition(":")
    if short := _SHORT.get(library):
        return short(name, size)
    if library.endswith(".py"):
        meant = f"{library.removesuffix('.py').replace('/', '.')}:{name}"
        raise MeasureError(f"{library} is a file: write its module, {meant}")
    try:
        return function_source(reference, batch, size)
    except MeasureError as error:
        if not isinstance(error.__cause__, ModuleNotFoundError) or error.__cause__.name != library:
            raise
        ways = ", ".join(f"{way}:" for way in _SHORT)
        raise MeasureError(
            f"there is no module {library} here: go to its folder, or name a library's model by "
            f"{ways}"
        ) from None


def _torchvision(name: str, size: int | None) -> Source:
    models = imported("torchvision").models
    if name not in models.list_models():
        raise MeasureError(f"torchvision has no model {shown(name)}: see torchvision.models")
    side = size or 299 if name == "inception_v3" else size or 224
    origin = f"{versions('torchvision')} {name}()"
    with users_own_errors(f"torchvision:{name}"):
        return image_source(name, origin, lambda: models.get_model(name), (3, side, side))


def _timm(name: str, size: int | None) -> Source:
    library = imported("timm")
    if not library.is_model(name):
        near = ", ".join(library.list_models(f"{name.partition('_')[0]}*")[:5])
        raise MeasureError(f"timm has no model {shown(name)}{f': some are {near}' if near else ''}")
    with users_own_errors(f"timm:{name}"):
        with building():
            model = None
            if size is not None:
                with suppress(TypeError):  # a convolutional one takes any
                    model = library.create_model(name, img_size=size)
            model = model or library.create_model(name)
        channels, side, _ = model.pretrained_cfg["input_size"]  # of the name that it has now
        origin = f"{versions('timm')} create_model({name})"
        return image_source(name, origin, lambda: model, (channels, size or side, size or side))


def _transformers(name: str, size: int | None) -> Source:
    """A configuration's file, or MODULE:CLASS of a configuration with its defaults."""
    library = imported("transformers")
    library.logging.set_verbosity_error()
    with users_own_errors(f"transformers:{name}"):
        config = _config(library, name)
        architecture = _architecture(library, config)
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # a T5 asks for one, and no value matters here
    most = getattr(config, "max_position_embeddings", None) or _TOKENS
    default = size or min(most, _TOKENS)
    config.use_cache = False
    sizes = tuple(Sizes.around("seq_len", default))
    if not sizes:
        raise MeasureError(f"a sequence of {default} tokens is too short to capture")
    called = architecture.__name__
    with users_own_errors(f"transformers:{name}"):
        return token_source(
            Path(name).stem,
            f"{versions('transformers')} {called}",
            lambda: architecture(config),
            sizes,
        )


def _config(library: Any, name: str) -> Any:
    path = Path(name)
    if path.suffix != ".json":
        kind = getattr(library, name, None)
        if kind is None or not hasattr(kind, "from_dict"):
            raise MeasureError(
                f"transformers:{name}: wanted the file of a configuration, config.json, or the "
                "name of a configuration's class, such as LlamaConfig"
            )
        return kind()
    try:
        stated = json_of(read_regular(path, _LARGEST_BYTES).decode("utf-8"))
        return library.AutoConfig.for_model(**stated)
    except OSError as error:
        raise MeasureError(f"{name} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise MeasureError(
            f"{name} is no configuration of transformers: {one_line(error)}"
        ) from None


def _architecture(library: Any, config: Any) -> Any:
    """The class that the configuration names, or the one for its language modelling."""
    for name in config.architectures or ():
        if hasattr(library, name):
            return getattr(library, name)
    for kind in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM"):
        mapping = getattr(library, f"MODEL_FOR_{kind}_MAPPING")
        if type(config) in mapping:
            return mapping[type(config)]
    raise MeasureError(
        f"{type(config).__name__} names no language model: add architectures to config.json, or "
        "write a function and capture MODULE:FUNCTION"
    )


def _lightning(name: str, size: int | None) -> Source:
    """A LightningModule: the forward of its example inputs, and the mean of what it returns."""
    if size is not None:
        raise MeasureError("lightning:MODULE:CLASS takes no size: its example_input_array has one")
    kind = find_function(name)
    with users_own_errors(f"lightning:{name}"), building():
        model = kind().train()
    example = getattr(model, "example_input_array", None)
    if example is None:
        raise MeasureError(
            f"{name} has no example_input_array: set it in __init__, or write a function and "
            "capture MODULE:FUNCTION"
        )
    shapes = without_memory(example)

    def make(batch: int, _: int | None) -> Made:
        return Made(model, of_batch(shapes, batch), mean_of)

    origin = f"forward of {name}, the mean of its output as loss"
    return Source(name.rpartition(":")[2], name, "own", origin, make, batch_of(shapes))


_SHORT: dict[str, Callable[[str, int | None], Source]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
    "lightning": _lightning,
}


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
            raise MeasureError(f"{library} cannot be imported: {one_line(error)}") from None
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    return _genuine(library)


def _genuine(library: str) -> Any:
    """The library, and not a folder or a file of its name; raises MeasureError."""
    module = import_module(library)
    if not hasattr(module, "__version__"):
        where = next(iter(getattr(module, "__path__", ())), module.__file__)
        raise MeasureError(
            f"{where} is imported in the place of the library {library}, and is none: rename it, "
            "or work in another folder"
        )
    return module


def versions(library: str) -> str:
    """A library's name and version."""
    return f"{library} {import_module(library).__version__.partition('+')[0]}"


def image_source(
    name: str,
    origin: str,
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

        def loss(output: Any) -> Tensor:
            return functional.cross_entropy(_logits(output), labels)

        return Made(model, images, loss)

    tried = tuple(Sizes.around("image_size", side)) if sizes is None else sizes
    return Source(name, title or name, "vision", origin, make, 2, side, tried)


def _logits(output: Any) -> Tensor:
    """A classifier's output; of several, such as an Inception's, the first."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output


def mean_of(output: Any) -> Tensor:
    """A loss of a model that states none: the mean of all floating tensors that it returns."""
    means = [one.mean() for one in tensors(output) if one.is_floating_point()]
    return torch.stack(means).sum()


def token_source(
    name: str,
    origin: str,
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
        return Made(model, inputs, lambda output: output.loss)

    return Source(name, title or name, "language", origin, make, 2, default, sizes)


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    with building():
        return build().train()
