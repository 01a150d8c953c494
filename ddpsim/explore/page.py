"""The page of `ddpsim explore`: it holds no scenario, and asks `answer` for all that it shows."""

from __future__ import annotations

from ddpsim.report.page.shell import packaged, render


def explore_page(worker: str = "") -> str:
    """The page as one file; it may call the server that it came from, and nothing else.

    `worker`: the script beside it that answers in place of a server, see templates/worker.js.
    """
    return render(
        packaged("explore.html"),
        "ddpsim explore",
        {"worker": worker},
        {},
        scripts=("drawing.js", "explore.js"),
        styles=("page.css", "explore.css"),
        connect="'none'" if worker else "'self'",
        workers="'self'" if worker else "'none'",
    )
