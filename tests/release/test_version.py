"""One version: of the metadata, of the module, of the command."""

from __future__ import annotations

from importlib import metadata
from typing import NoReturn

import pytest

import ddpsim
from ddpsim import version


def test_the_module_has_the_version_of_the_metadata() -> None:
    assert ddpsim.__version__ == metadata.version("ddpsim")


def test_a_source_tree_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert version._installed() == "0+unknown"
