"""How far a long question has come: reported where it is answered, shown where somebody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Stage:
    """The progress of one question: `ended` of `total` parts, which are called `what`.

    `findings`: lines with what is known so far; `say`: prints what to know before it begins.
    """

    what: str = ""
    total: int = 0
    ended: float = 0.0
    findings: list[str] = field(default_factory=list)
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
    """The stage of the questions that are asked within; empty until the first of them begins."""
    listener = Stage()
    token = _heard.set(listener)
    try:
        yield listener
    finally:
        _heard.reset(token)


@contextmanager
def stage(what: str, total: int) -> Iterator[Stage]:
    """Begin a question of so many parts; questions within it report no progress of their own."""
    listener = _heard.get() or Stage()
    listener.what, listener.total, listener.ended = what, total, 0.0
    token = _heard.set(None)
    try:
        yield listener
    finally:
        _heard.reset(token)
