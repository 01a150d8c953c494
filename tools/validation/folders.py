"""Where the templates, the pages and the measurements are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
PAGES = {
    ROOT / "docs" / f"{name}.md": ROOT / "tools" / f"{name}.md.in"
    for name in ("validation", "campaigns")
}
