"""Numbers and names of things in words, as messages and screens say them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MOST_SHOWN = 8  # nodes unlike each other, of which each is counted


def counted(number: int, noun: str) -> str:
    """A number of things: `1 rank`, `1,024 ranks`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def ranks(nodes: int, gpus_per_node: int, by_node: Sequence[int] | None = None) -> str:
    """A cluster's size in words: `16 ranks (2 x 8)`; of nodes unlike each other `6 ranks (4 + 2)`.

    `by_node`: the ranks of each node, where they differ.
    """
    count = sum(by_node) if by_node else nodes * gpus_per_node
    many = by_node and len(by_node) > _MOST_SHOWN
    layout = f"{nodes} x {gpus_per_node}" if not by_node else " + ".join(map(str, by_node))
    if many:
        layout = f"{nodes} nodes of up to {gpus_per_node}"
    return f"{count} rank{'s' * (count > 1)} ({layout})"


def ends_of(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The first and the last of the names of several works; one where they are the same."""
    listed = [name for each in names for name in each]
    return tuple(dict.fromkeys((listed[0], listed[-1]))) if listed else ()
