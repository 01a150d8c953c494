"""The scenarios that `ddpsim init` prints: those of the project's `scenarios/` folder."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ddpsim.errors import InputError
from ddpsim.scenario.suggest import did_you_mean

__all__ = ["preset_text", "presets"]


def presets() -> dict[str, str]:
    """Names of the scenarios that need no other file, with what each shows."""
    texts = {
        path.stem: path.read_text(encoding="utf-8") for path in sorted(_folder().glob("*.yaml"))
    }
    alone = {name: text for name, text in texts.items() if not _needs_files(text)}
    return {name: text.splitlines()[0].lstrip("# ") for name, text in alone.items()}


def preset_text(name: str) -> str:
    """The YAML of a preset scenario; raises InputError with the nearest name."""
    known = presets()
    if name not in known:
        hint = did_you_mean(name, known)
        raise InputError("preset", f"unknown preset {name!r}.{hint} Known: {', '.join(known)}")
    return (_folder() / f"{name}.yaml").read_text(encoding="utf-8")


def _needs_files(text: str) -> bool:
    keys = {line.strip().split(":")[0] for line in text.splitlines()}
    return not keys.isdisjoint({"all_reduce", "profile", "parameters"})


def _folder() -> Path:
    """In a wheel beside the other data; in a checkout at its top."""
    package = Path(str(resources.files("ddpsim")))
    packed = package / "data" / "scenarios"
    return packed if packed.is_dir() else package.parent / "scenarios"
