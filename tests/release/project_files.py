"""The project's own files: its declared requirements, its workflows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from ruamel.yaml import YAML

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def requirements(extra: str | None = None) -> list[Requirement]:
    """What ddpsim itself needs, or what one of its extras adds."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return [Requirement(line) for line in lines]


def extras() -> list[str]:
    """The names of all extras."""
    return list(PROJECT["optional-dependencies"])


def yaml_file(path: Path) -> Any:
    """What a YAML 1.2 file holds: `on` is a word in it."""
    return YAML(typ="safe", pure=True).load(path)
