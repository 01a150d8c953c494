"""A file with a text."""

from __future__ import annotations

from pathlib import Path

import pytest
from logs.measured_files import Write

from ddpsim.scenario.quantity import SourceFile


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def call(text: str, name: str = "file.txt") -> SourceFile:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return SourceFile(name, path)

    return call
