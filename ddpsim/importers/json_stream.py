"""JSON that others wrote, read value by value: it is never whole in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from json import JSONDecodeError
from typing import Any, TextIO

from ddpsim.files import json_value

_MOST_ITEMS = 12_000_000  # of a list: 1 GiB of events has fewer
_LONGEST_VALUE = 2**24  # characters of a value in a stream
_CHUNK = 2**20  # characters
_SPACE = re.compile(r"[ \t\n\r]*")


class TooLargeError(ValueError):
    """A stream is longer than what is read of it."""


class JsonStream:
    """Values of a JSON text in the order in which they stand, each forgotten after its use.

    At most `most` characters are read. All methods raise ValueError in our words where the text
    is no JSON, and TooLargeError where it, one list or one value is too large.
    """

    def __init__(self, text: TextIO, most: int) -> None:
        self._text, self._most, self._left = text, most, most
        self._held, self._at, self._lines = "", 0, 0

    @property
    def taken(self) -> int:
        """How many characters were read."""
        return self._most - self._left

    @property
    def line(self) -> int:
        """The line that was reached, from 1."""
        return self._lines + self._held.count("\n", 0, self._at) + 1

    def members(self) -> Iterator[str]:
        """Names of the object that follows; the caller takes each one's value before the next."""
        self._expect("{")
        if self.next_mark() == "}":
            self._at += 1
            return
        while True:
            if self.next_mark() != '"':
                raise ValueError("Expecting property name enclosed in double quotes")
            name: str = self.value()
            self._expect(":")
            yield name
            if self._expect(",}") == "}":
                return

    def items(self) -> Iterator[Any]:
        """Values of the list that follows."""
        self._expect("[")
        if self.next_mark() == "]":
            self._at += 1
            return
        for _ in range(_MOST_ITEMS):
            yield self.value()
            if self._expect(",]") == "]":
                return
        raise TooLargeError(f"a list holds more than {_MOST_ITEMS:,} items")

    def next_mark(self) -> str:
        """The character that a value or the rest begins with; empty at the end."""
        while True:
            self._at = _SPACE.match(self._held, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._more():
                return ""

    def value(self) -> Any:
        """Parse the value that follows."""
        self.next_mark()
        while True:
            try:
                value, end = json_value(self._held, self._at)
            except JSONDecodeError as error:  # or the rest of it is still to come
                if len(self._held) - self._at > _LONGEST_VALUE:
                    raise TooLargeError(f"a value is broken ({error.msg}) or too long") from None
                begun = self._at
                if not self._more():
                    self._at = error.pos - begun
                    raise ValueError(error.msg) from None
                continue
            if end == len(self._held) and self._more():  # a number may go on
                continue
            self._at = end
            return value

    def _expect(self, marks: str) -> str:
        mark = self.next_mark()
        if not mark or mark not in marks:
            raise ValueError(f"expecting {' or '.join(map(repr, marks))}")
        self._at += 1
        return mark

    def _more(self) -> bool:
        """Hold as much again as is held and unused; False at the end of the text."""
        self._lines += self._held.count("\n", 0, self._at)
        rest = self._held[self._at :]
        new = self._text.read(max(_CHUNK, len(rest)))
        self._left -= len(new)
        if self._left < 0:
            raise TooLargeError(f"holds more than {self._most >> 30} GiB of JSON")
        self._held, self._at = rest + new, 0
        return bool(new)
