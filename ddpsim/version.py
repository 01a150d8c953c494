"""The version of ddpsim, as its installed metadata has it."""

from __future__ import annotations

from importlib import metadata


def _installed() -> str:
    """The installed version, or "0+unknown" in a source tree that is not installed."""
    try:
        return metadata.version("ddpsim")
    except metadata.PackageNotFoundError:
        return "0+unknown"


__version__ = _installed()
