"""Progress on rank 0: a bar where there is a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Reporter:
    """Says what is done; `speaks` is False on every rank but the first."""

    def __init__(self, total: int, *, speaks: bool, console: Console | None = None) -> None:
        self._speaks = speaks
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not (speaks and self._console.is_terminal),
        )
        self._task = self._bar.add_task("measuring", total=total)

    def __enter__(self) -> Reporter:  # noqa: PYI034 -- Self is Python 3.11's
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, title: str) -> None:
        """A task begins."""
        self._bar.update(self._task, description=escape(title))

    def done(self, line: str = "") -> None:
        """A task is over; `line` says how."""
        self._bar.advance(self._task)
        if line:
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line."""
        if self._speaks:
            self._console.print(escape(line))
