"""How the pages are written: short lines, short sentences, plain words."""

from __future__ import annotations

import re
from pathlib import Path

import docs_pages
import pytest
from doc_pages import DOCS, README, pages, prose, sentences

# words that a reader must read twice, with what to write in their place
RETIRED = {
    r"pace": "speed, or what sets the step time",
    r"beside": "besides, next to, compared with",
    r"reach(es|ed)?": "achieve, get to, extrapolate",
    r"kept": "left, stored, held",
    r"felt": "seen, noticed",
    r"(is|are) known to \d+ %": "one standard deviation is",
    r"doubts?": "uncertainty",
    r"widened": "wider, extrapolated",
    r"as fast as their host": "limited by the host",
    r"nobody('s)? measured": "without a measured step",
    r"so that .{60,}, so that": "two sentences",
    r"as (he|she|it) comes": "at once",
    r"in vain": "without effect",
}
ALL = [README, *pages()]


def name_of(path: Path) -> str:
    return path.relative_to(README.parent).as_posix()


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_lines_are_short_and_without_words_that_are_retired(path: Path) -> None:
    lines = list(prose(path.read_text("utf-8")))
    assert [f"{number}: {line}" for number, line in lines if len(line) > 100] == []
    joined = " ".join(line for _, line in lines)
    found = [word for word in RETIRED if re.search(rf"\b(?:{word})\b", joined, re.IGNORECASE)]
    assert found == []


@pytest.mark.parametrize("path", [p for p in docs_pages.PAGES if "presets" not in p])
def test_words_that_are_retired_from_the_program(path: str) -> None:
    """From keys' meanings, fields, commands' help and the glossary, but not from cited sources."""
    text = docs_pages.PAGES[path]()
    found = [word for word in RETIRED if re.search(rf"\b(?:{word})\b", text, re.IGNORECASE)]
    assert found == []


def words(path: Path) -> int:
    """How many words a page has besides headings, tables, code and output."""
    text = "\n".join(line for _, line in prose(path.read_text("utf-8")))
    return len(re.findall(r"\w\S*", re.sub(r"\]\([^)]*\)", "]", text)))


def test_the_pages_are_few_and_short() -> None:
    """A newcomer can read them: what is said twice, or stands in the reference, goes."""
    explanation = sorted((DOCS / "explanation").glob("*.md"))
    guides = [path for path in (DOCS / "how-to").glob("*.md") if path.name != "index.md"]
    assert len(explanation) <= 14
    assert len(guides) <= 10
    assert [name_of(path) for path in explanation if words(path) > 700] == []
    assert sum(map(words, pages())) <= 18_000


@pytest.mark.parametrize("path", [README, DOCS / "tutorial" / "index.md"], ids=name_of)
def test_sentences_are_short(path: Path) -> None:
    found = sentences(path.read_text("utf-8"))
    assert len(found) > 20
    assert [s for s in found if len(s.split()) > 30] == []


def test_sentences_are_told_apart() -> None:
    text = "One two. Three `four` five:\n\n- six\n- seven eight. Nine\n\n```sh\nnot me\n```\n"
    assert sentences(text) == ["One two.", "Three `four` five:", "six", "seven eight.", "Nine"]
