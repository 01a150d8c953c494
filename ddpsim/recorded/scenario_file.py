"""A scenario to start from, as YAML, whose paths start at the folder that it is written to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

__all__ = ["scenario_text"]

_PATHS = (("workload", "trace"), ("cluster", "all_reduce"))


def scenario_text(document: Mapping[str, Any], notes: Sequence[str], folder: Path) -> str:
    """YAML with `notes` as comments above it; its paths are those of the current folder."""
    data = deepcopy(dict(document))
    for section, key in _PATHS:
        if data.get(section, {}).get(key):
            data[section][key] = os.path.relpath(data[section][key], folder)
    written = StringIO()
    yaml = YAML()
    yaml.width = 1000
    yaml.dump(data, written)
    return "".join(f"# {note}\n" for note in notes) + written.getvalue()
