"""The page of `ddpsim explore`: it holds no scenario, and asks `answer` for all that it shows."""

from __future__ import annotations

from ddpsim.report.page.shell import packaged, render

__all__ = ["explore_page"]


def explore_page() -> str:
    """The page as one file; it may call the server that it came from, and nothing else."""
    return render(
        packaged("explore.html"),
        "ddpsim explore",
        {},
        {},
        scripts=("drawing.js", "explore.js"),
        styles=("page.css", "explore.css"),
        connect="'self'",
    )
