"""Models by name: a user's MODULE:FUNCTION, or a library's and what it calls the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from calibrate.capture.libraries import image_source, imported, mean_of, token_source, versions
from calibrate.capture.shapes import building, without_memory
from calibrate.capture.sources import Sizes, Source, batch_of, function_source, of_batch
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.training import Made
from calibrate.measure.model.user_code import find_function, said_of, users_own_errors
from ddpsim.errors import shown
from ddpsim.files import json_of, read_regular

__all__ = ["source_of"]

_LARGEST_BYTES = 2**24  # of a configuration
_TOKENS = 1024  # of a sample, where a configuration allows more


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
    told = f"{versions('torchvision')} {name}()"
    with users_own_errors(f"torchvision:{name}"):
        return image_source(name, told, lambda: models.get_model(name), (3, side, side))


def _timm(name: str, size: int | None) -> Source:
    library = imported("timm")
    if not library.is_model(name):
        near = ", ".join(library.list_models(f"{name.partition('_')[0]}*")[:5])
        raise MeasureError(f"timm has no model {shown(name)}{f': some are {near}' if near else ''}")
    with users_own_errors(f"timm:{name}"):
        model = _timm_model(library, name, size)
        channels, side, _ = model.pretrained_cfg["input_size"]  # of the name that it has now
        told = f"{versions('timm')} create_model({name})"
        return image_source(name, told, lambda: model, (channels, size or side, size or side))


def _timm_model(library: Any, name: str, size: int | None) -> Any:
    """For images of a size, where the model is made for one."""
    with building():
        if size is not None:
            with suppress(TypeError):  # a convolutional one takes any
                return library.create_model(name, img_size=size)
        return library.create_model(name)


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
            f"{name} is no configuration of transformers: {said_of(error)}"
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

    told = f"forward of {name}, the mean of its output as loss"
    return Source(name.rpartition(":")[2], name, "own", told, make, batch_of(shapes))


_SHORT: dict[str, Callable[[str, int | None], Source]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
    "lightning": _lightning,
}
