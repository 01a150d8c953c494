"""How far a long question has come: said where it is answered, heard where somebody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Stage:
    """Parts of one question: `ended` of `total`, in words `what`.

    `known`: lines that say what is known so far; `say`: tells what to know before it begins.
    """

    what: str = ""
    total: int = 0
    ended: float = 0.0
    known: list[str] = field(default_factory=list)
    say: Callable[[str], None] = lambda _: None

    def at(self, ended: int, total: int) -> None:
        """So many parts have ended, of so many."""
        self.ended, self.total = ended, total

    def advance(self, count: float = 1.0) -> None:
        """So many parts more have ended, or that much of one."""
        self.ended += count


_heard: ContextVar[Stage | None] = ContextVar("heard", default=None)


@contextmanager
def heard() -> Iterator[Stage]:
    """The stage that questions asked within tell of; empty until the first of them begins."""
    listener = Stage()
    token = _heard.set(listener)
    try:
        yield listener
    finally:
        _heard.reset(token)


@contextmanager
def stage(what: str, total: int) -> Iterator[Stage]:
    """Begin a question of so many parts; what is asked within it tells nothing of its own."""
    found = _heard.get() or Stage()
    found.what, found.total, found.ended = what, total, 0.0
    token = _heard.set(None)
    try:
        yield found
    finally:
        _heard.reset(token)
