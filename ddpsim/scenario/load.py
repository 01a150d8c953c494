"""Document to Scenario: all problems that a round of checks finds, each in our own words."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ddpsim.errors import Problem, ScenarioError
from ddpsim.scenario.document import Document, KeyPath
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.suggest import did_you_mean, in_own_words, nearest

_MOST_NAMED = 3  # keys of one name, of which a message can list all
_SHORT_NAME = 4  # letters, of which many names have some in common
# what other programs call keys of ours
_OTHER_NAMES = {
    **dict.fromkeys(
        ("batch", "batch_size", "micro_batch_size", "per_device_train_batch_size"),
        "workload.batch_per_rank",
    ),
    **dict.fromkeys(("lr", "base_lr"), "workload.learning_rate"),
    **dict.fromkeys(("amp", "dtype", "fp16", "bf16"), "workload.precision"),
    **dict.fromkeys(("gradient_checkpointing", "recompute"), "workload.checkpointing"),
    **dict.fromkeys(("gpu", "accelerator"), "cluster.device"),
    **dict.fromkeys(
        ("world_size", "num_gpus", "ngpus", "ranks", "num_processes"),  # of all nodes
        "cluster.nodes and cluster.gpus_per_node",
    ),
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines"), "cluster.nodes"),
    **dict.fromkeys(("network", "interconnect"), "cluster.inter_node"),
    **dict.fromkeys(("max_length", "max_seq_length", "block_size"), "workload.seq_len"),
    "nproc_per_node": "cluster.gpus_per_node",
    "mixed_precision": "workload.precision, or as ddp.fully_shard.mixed_precision",
    "epochs": "a target: ddpsim plan FILE --target '90 epochs of 1.28M samples'",
}


# of launchers: which rank a process is
_OF_ONE_RANK = ("machine_rank", "node_rank", "local_rank", "global_rank", "rank")


def parse(document: Document) -> Scenario:
    """The scenario that a document describes; raises ScenarioError with all its problems."""
    try:
        context = {"base": document.base, "files": document.files}
        return Scenario.model_validate(document.data, context=context)
    except ValidationError as error:
        _refuse(document, error)


def _refuse(document: Document, error: ValidationError) -> NoReturn:
    schema = document.data.get("schema")
    if isinstance(schema, str) and schema.startswith("ddpsim.") and "/" in schema:
        reason = f"this file is a {schema} and no scenario: name one, of schema ddpsim/1"
        raise ScenarioError([document.problem(("schema",), reason)]) from None
    errors = error.errors(include_url=False)
    meant = {_meant(details["loc"]) for details in errors if details["type"] == "extra_forbidden"}
    problems = [
        _problem(document, details)
        for details in errors
        if details["type"] != "missing" or details["loc"] not in meant
    ]
    raise ScenarioError(sorted(dict.fromkeys(problems), key=_reading_order)) from None


def _meant(path: KeyPath) -> KeyPath:
    """The path of the key that a misspelt one stands for: it is not missing as well."""
    return (*path[:-1], nearest(str(path[-1]), _keys(path[:-1])) or "")


def _reading_order(problem: Problem) -> tuple[int, int]:
    place = problem.where.rsplit(":", 2)
    is_place = len(place) == 3 and all(part.isdecimal() for part in place[1:])
    return (int(place[1]), int(place[2])) if is_place else (0, 0)


def _problem(document: Document, details: ErrorDetails) -> Problem:
    path, kind = tuple(details["loc"]), details["type"]
    context = details.get("ctx", {})
    if kind in ("extra_forbidden", "invalid_key"):
        return document.problem(path, f"unknown key. {_known_key(path)}", of_key=True)
    if kind == "missing":
        return document.problem(path, f"is missing; add it: {_description(path)}", of_key=True)
    if kind == "scenario":
        path += tuple(str(context["at"]).split(".")) if context["at"] else ()
    path = tuple(step for step in path if step != "[key]")
    if path[-2:] == ("step_time", "total") and path not in document.value_places:
        path = path[:-1]  # the short form, `step_time: 391.2 ms`
    said = in_own_words(details)
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        said += _as_section(path)
    return document.problem(path, said)


def _known_key(path: KeyPath) -> str:
    """The key that is meant by an unknown one, here or in another section, or all keys here."""
    name, here = str(path[-1]), _keys(path[:-1])
    if name.lower() in _OF_ONE_RANK:
        return "All ranks are simulated: drop it"
    hint = did_you_mean(name, here).strip()
    elsewhere = [key for key, _ in keys_named(name) if not (hint and key.startswith(f"{path[0]}."))]
    if name.lower() in _OTHER_NAMES:
        return f"Write it as {_OTHER_NAMES[name.lower()]}"
    if 0 < len(elsewhere) <= _MOST_NAMED:
        return f"Write it as {' or '.join(elsewhere)}"
    if hint:
        return hint
    by_name = {key.rpartition(".")[2]: key for key in all_keys()}
    near = nearest(name, by_name) if len(name) > _SHORT_NAME else None
    return f"Did you mean {by_name[near]}?" if near else f"Known here: {', '.join(here)}"


def _as_section(path: KeyPath) -> str:
    """How the section at a path is written: an example of its own, or its keys."""
    model = _model_at(path)
    example = getattr(model, "example", None)
    if example:
        return f"; write {path[-1]}: {example}"
    return f"; its keys: {', '.join(_keys(path))}" if model else ""


def all_keys() -> list[str]:
    """Every key of the format, as a dotted path."""
    return [".".join(path) for path, _ in _described(Scenario)]


def keys_named(name: str) -> Iterator[tuple[str, str]]:
    """Keys of the format with this name, or this path, as dotted paths with their meaning."""
    wanted = tuple(name.split("."))
    for path, meaning in _described(Scenario):
        if path[-len(wanted) :] == wanted:
            yield ".".join(path), meaning


def _described(
    model: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """All keys below a model, the outer ones first."""
    for name, field in model.model_fields.items():
        own = (*path, field.alias or name)
        yield own, field.description or ""
        inner = _model_in(field.annotation)
        yield from _described(inner, own) if inner else ()


def _keys(path: KeyPath) -> list[str]:
    model = _model_at(path)
    return (
        [] if model is None else [field.alias or key for key, field in model.model_fields.items()]
    )


def _description(path: KeyPath) -> str:
    model = _model_at(path[:-1])
    fields = model.model_fields if model else {}
    return next(f.description or "" for key, f in fields.items() if (f.alias or key) == path[-1])


def _model_at(path: KeyPath) -> type[BaseModel] | None:
    """The model whose keys stand at a path of the document."""
    annotation: Any = Scenario
    for step in path:
        model = _model_in(annotation)
        if model is None:
            annotation = _values_in(annotation)
            continue
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        if str(step) not in fields:
            return None
        annotation = fields[str(step)].annotation
    return _model_in(annotation)


def _values_in(annotation: Any) -> Any:
    """What a mapping holds; None for anything else."""
    if typing.get_origin(annotation) is dict:
        return typing.get_args(annotation)[1]
    parts = (_values_in(part) for part in typing.get_args(annotation))
    return next((part for part in parts if part is not None), None)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    origin = typing.get_origin(annotation)
    # dict[int, ...] is a type itself on Python 3.10, but no class
    if origin is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return next((m for part in typing.get_args(annotation) if (m := _model_in(part))), None)
    return None
