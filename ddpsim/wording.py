"""Numbers of things in words, as messages and screens say them."""

from __future__ import annotations

__all__ = ["counted", "ranks"]


def counted(number: int, noun: str) -> str:
    """A number of things: `1 rank`, `1,024 ranks`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def ranks(nodes: int, gpus_per_node: int) -> str:
    """A cluster's size in words: `16 ranks (2 x 8)`."""
    count = nodes * gpus_per_node
    return f"{count} rank{'s' * (count > 1)} ({nodes} x {gpus_per_node})"
