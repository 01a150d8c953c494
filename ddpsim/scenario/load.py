"""Document to Scenario: all problems that a round of checks finds, each in our own words."""

from __future__ import annotations

from typing import NoReturn

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ddpsim.errors import Problem, ScenarioError
from ddpsim.scenario.document import Document, KeyPath
from ddpsim.scenario.keys import description_at, keys_at, model_at
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.suggest import in_own_words, nearest
from ddpsim.scenario.unknown_keys import known_key


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
    """The path of the key that a misspelt one stands for, which is not reported as missing too."""
    return (*path[:-1], nearest(str(path[-1]), keys_at(path[:-1])) or "")


def _reading_order(problem: Problem) -> tuple[int, int]:
    place = problem.where.rsplit(":", 2)
    is_place = len(place) == 3 and all(part.isdecimal() for part in place[1:])
    return (int(place[1]), int(place[2])) if is_place else (0, 0)


def _problem(document: Document, details: ErrorDetails) -> Problem:
    path, kind = tuple(details["loc"]), details["type"]
    context = details.get("ctx", {})
    if kind in ("extra_forbidden", "invalid_key"):
        return document.problem(path, f"unknown key. {known_key(document, path)}", of_key=True)
    if kind == "missing":
        return document.problem(path, f"is missing; add it: {description_at(path)}", of_key=True)
    if kind == "scenario":
        path += tuple(str(context["at"]).split(".")) if context["at"] else ()
    path = tuple(step for step in path if step != "[key]")
    if path[-2:] == ("step_time", "total") and path not in document.value_places:
        path = path[:-1]  # the short form, `step_time: 391.2 ms`
    message = in_own_words(details)
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        message += _as_section(path)
    return document.problem(path, message)


def _as_section(path: KeyPath) -> str:
    """How the section at a path is written: an example of its own, or its keys."""
    model = model_at(path)
    example = getattr(model, "example", None)
    if example:
        return f"; write {path[-1]}: {example}"
    return f"; its keys: {', '.join(keys_at(path))}" if model else ""
