"""A config's text as a mapping: JSON, TOML or YAML, and the program whose keys it has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from ddpsim.errors import ImportFailedError
from ddpsim.importers.configs.programs import PROGRAMS
from ddpsim.importers.configs.read import Config, flat, read_config
from ddpsim.scenario.yaml_errors import why_no_yaml

LARGEST_CONFIG = 2**20
_TOML = re.compile(r"^\[(?:training|model|parallelism|job)\]", re.MULTILINE)
_YAML = re.compile(r"^(?:distributed_type|trainer)[ \t]*:", re.MULTILINE)


def config_text(name: str, text: str) -> Config | None:
    """The config that a text of TOML or YAML is; None for another text.

    Raises ImportFailedError for one that cannot be read.
    """
    is_toml = _TOML.search(text) is not None
    if len(text) > LARGEST_CONFIG or not (is_toml or _YAML.search(text)):
        return None
    try:
        document = _toml(text) if is_toml else YAML(typ="safe", pure=True).load(text)
    except ImportError:
        raise ImportFailedError(name, "is TOML, which Python reads from 3.11 on") from None
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        told = f"looks like a config, but is no YAML: {why_no_yaml(error)}"
        raise ImportFailedError(name, told, line) from None
    except (YAMLError, ValueError, RecursionError) as error:
        kind = "TOML" if is_toml else "YAML"
        said = " ".join(str(error).split())[:200]
        raise ImportFailedError(name, f"looks like a config, but is no {kind}: {said}") from None
    return config_of(name, document) if isinstance(document, Mapping) else None


def config_of(name: str, document: Mapping[str, Any]) -> Config | None:
    """What a config says; None for a document of no known program.

    Raises ImportFailedError for one that is too large.
    """
    try:
        keys = {key for key, _ in flat(document)}
        for program in PROGRAMS:
            if keys.intersection(program.marks):
                return read_config(program, document)
    except ValueError as error:
        raise ImportFailedError(name, str(error)) from None
    return None


def _toml(text: str) -> Any:
    return import_module("tomllib").loads(text)
