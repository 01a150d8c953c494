"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def escaped(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same, with a line's end, of cells that may hold bars and several lines."""
    cells = ([cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows)
    return markdown(head, cells) + "\n"
