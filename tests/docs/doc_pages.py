"""The pages of the documentation, their fenced blocks and their prose."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["DOCS", "README", "ROOT", "Block", "blocks", "pages", "prose", "sentences"]

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
_MADE = "validation.md"  # tools/make_validation.py writes it
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A fenced block: what is in it, and where its body begins and ends in the page."""

    language: str
    title: str | None
    body: str
    start: int
    end: int


def pages() -> list[Path]:
    """Every page that a person writes, but the README."""
    return sorted(path for path in DOCS.rglob("*.md") if path.name != _MADE)


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [_block(match) for match in _FENCE.finditer(text)]


def _block(match: re.Match[str]) -> Block:
    language, _, rest = match["info"].strip().partition(" ")
    title = re.search(r'title="([^"]+)"', rest)
    body = re.sub(f"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
    return Block(language, title and title[1], body, match.start("body"), match.end("body"))


def prose(text: str) -> list[tuple[int, str]]:
    """Numbered lines that are neither code, nor a table, nor a heading."""
    bare = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    bare = re.sub(r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), bare, flags=re.DOTALL)
    return [
        (number, line)
        for number, line in enumerate(bare.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith(("|", "#", ":::", "<", "!["))
    ]


def sentences(text: str) -> list[str]:
    """The sentences of a page's prose; a list's item ends one."""
    lines = [line.strip() for _, line in prose(text)]
    joined = " ".join(re.sub(r"^([-*]|\d+\.) ", "\0", line) for line in lines)
    ends = re.split(r"\0|(?<=[.!?:])\**\)?\s+(?=[A-Z`*\[(])", re.sub(r"\]\([^)]*\)", "]", joined))
    return [sentence.strip() for sentence in ends if sentence.strip()]
