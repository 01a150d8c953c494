"""Where the template, the page and the measurements are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
PAGE, TEMPLATE = ROOT / "docs" / "validation.md", ROOT / "tools" / "validation.md.in"
