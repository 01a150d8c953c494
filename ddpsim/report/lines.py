"""Lines of text on a screen: labels beside wrapped text, commands to paste."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from textwrap import shorten, wrap

__all__ = ["WIDTH", "command", "counted", "cut", "labelled", "warned"]

WIDTH = 100


def command(file: str, settings: Sequence[str], changes: Sequence[str] = ()) -> Iterator[str]:
    """What to run next: one line, or one an option with a backslash between.

    `changes` come after the user's own `settings`, and in place of those of the same keys.
    """
    replaced = {change.partition("=")[0] for change in changes}
    kept = [s for s in settings if s.partition("=")[0].strip() not in replaced]
    parts = [f"ddpsim run {shlex.quote(file)}"]
    parts += [f"--set {shlex.quote(setting)}" for setting in (*kept, *changes)]
    indent = " " * 12
    if len(line := indent + " ".join(parts)) <= WIDTH:
        yield line
    else:
        yield from f" \\\n{indent}    ".join([indent + parts[0], *parts[1:]]).split("\n")


def counted(number: int, noun: str) -> str:
    """A number of things: `1 rank`, `1,024 ranks`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def cut(text: str, width: int) -> str:
    """Text on one line, cut after a word, or inside one that takes most of the line."""
    text = " ".join(text.split())
    short = shorten(text, width, placeholder=" ...")
    return short if len(short) > width // 2 or short == text else f"{text[: width - 4]} ..."


def labelled(label: str, text: str) -> Iterator[str]:
    """A label and its text, wrapped beside it."""
    rows = wrap(text, WIDTH - 12, break_on_hyphens=False) or [""]
    for number, row in enumerate(rows):
        yield f"{label if number == 0 else '':<12}{row}"


def warned(warnings: Sequence[str]) -> Iterator[str]:
    """What a reader must know before trusting the answer."""
    for warning in warnings:
        yield from labelled("WARNING", warning)
