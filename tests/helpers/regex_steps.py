"""How many steps a backtracking matcher takes: the clock of a busy machine proves nothing.

Patterns are parsed by Python's own parser and carried out by a plain machine that counts. Bounds of
repeats are cut to `_BOUND`, so that short texts tell what is bounded from what is not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

if sys.version_info >= (3, 11):
    from re import _constants as sre
    from re import _parser as parser
else:
    import sre_constants as sre
    import sre_parse as parser

_State = tuple[int, int, dict[int, int]]  # instruction, place, where loops were entered
_BOUND = 6
_END = "\x01"
_CATEGORIES = {
    sre.CATEGORY_DIGIT: (str.isdecimal, "1"),
    sre.CATEGORY_SPACE: (str.isspace, " "),
    sre.CATEGORY_WORD: (lambda c: c.isalnum() or c == "_", "a"),
}
_NEGATED = {
    sre.CATEGORY_NOT_DIGIT: (lambda c: not c.isdecimal(), "a"),
    sre.CATEGORY_NOT_SPACE: (lambda c: not c.isspace(), "a"),
    sre.CATEGORY_NOT_WORD: (lambda c: not (c.isalnum() or c == "_"), " "),
}
_KINDS = _CATEGORIES | _NEGATED


def steps(pattern: re.Pattern[str], text: str, *, at_start: bool) -> int:
    """Of a search in a text, or of a match at its start."""
    machine = _Machine(pattern)
    total = 0
    for start in [0] if at_start else range(len(text) + 1):
        found, took = machine.run(machine.program, text, start)
        total += took + 1
        if found:
            break
    return total


def attacks(pattern: re.Pattern[str], count: int) -> Iterator[str]:
    """Texts that repeat what one of the pattern's unbounded repeats takes, and then fail."""
    tree = parser.parse(pattern.pattern, pattern.flags)
    whole = _sample(tree)
    for before, unit, after in _pumped(list(tree), "", ""):
        for each in dict.fromkeys((unit, after, whole, unit + after)):
            if each:
                yield before + each * count + _END
                yield each * count


class _Machine:
    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.flags = pattern.flags
        self.program = self._compiled(parser.parse(pattern.pattern, pattern.flags))

    def _compiled(self, tree: Any) -> list[tuple[Any, ...]]:
        program: list[tuple[Any, ...]] = []
        self._add(program, tree)
        return [*program, ("end",)]

    def _add(self, program: list[tuple[Any, ...]], tree: Any) -> None:
        for kind, value in tree:
            if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
                self._repeat(program, *value, greedy=kind is sre.MAX_REPEAT)
            elif kind is sre.BRANCH:
                self._branch(program, value[1])
            elif kind is sre.SUBPATTERN:
                self._add(program, value[-1])
            elif kind in (sre.ASSERT, sre.ASSERT_NOT):
                behind = value[0] < 0
                inner = self._compiled(value[1])
                width = value[1].getwidth()[0] if behind else 0
                program.append(("assert", inner, kind is sre.ASSERT, width))
            elif kind is sre.AT:
                program.append(("at", value))
            else:
                program.append(("char", _taken_by(kind, value, self.flags)))

    def _repeat(self, program: Any, least: int, most: Any, body: Any, *, greedy: bool) -> None:
        unbounded = most is sre.MAXREPEAT
        for _ in range(min(least, _BOUND)):
            self._add(program, body)
        for _ in range(1 if unbounded else max(0, min(most, _BOUND) - min(least, _BOUND))):
            at = len(program)
            program.append(("split",))
            program.append(("enter", at))
            self._add(program, body)
            if unbounded:
                program.append(("again", at))
            program[at] = ("split", at + 1, len(program), greedy)

    def _branch(self, program: Any, options: Any) -> None:
        jumps = []
        for each in options[:-1]:
            at = len(program)
            program.append(("split",))
            self._add(program, each)
            jumps.append(len(program))
            program.append(("jump",))
            program[at] = ("split", at + 1, len(program), True)
        self._add(program, options[-1])
        for at in jumps:
            program[at] = ("jump", len(program))

    def run(self, program: Any, text: str, start: int) -> tuple[bool, int]:
        """Whether it matches there, and after how many steps."""
        stack: list[_State] = [(0, start, {})]
        took = 0
        while stack:
            state: _State | None = stack.pop()
            while state is not None:
                took += 1
                what = program[state[0]]
                if what[0] == "end":
                    return True, took
                if what[0] == "assert":
                    holds, more = self._looks(what, text, state[1])
                    took += more
                    state = (state[0] + 1, *state[1:]) if holds else None
                else:
                    state = _step(what, text, state, stack)
        return False, took

    def _looks(self, what: Any, text: str, place: int) -> tuple[bool, int]:
        _, inner, wanted, width = what
        found, took = self.run(inner, text, place - width) if place >= width else (False, 0)
        return found is wanted, took


def _step(what: Any, text: str, state: _State, stack: list[_State]) -> _State | None:
    """What follows an instruction; None where it does not hold. Another way goes on the stack."""
    at, place, entered = state
    if what[0] == "char":
        takes = place < len(text) and what[1](text[place])
        return (at + 1, place + 1, entered) if takes else None
    if what[0] == "split":
        first, other = (1, 2) if what[3] else (2, 1)
        stack.append((what[other], place, entered))
        return what[first], place, entered
    if what[0] == "enter":
        return at + 1, place, {**entered, what[1]: place}
    if what[0] == "again" and entered.get(what[1]) == place:  # nothing was taken
        return None
    if what[0] == "at":
        return (at + 1, place, entered) if _holds(what[1], text, place) else None
    return what[1], place, entered


def _holds(what: Any, text: str, place: int) -> bool:
    if what in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        return place == 0
    if what in (sre.AT_END, sre.AT_END_STRING):
        return place == len(text) or text[place:] == "\n"

    def is_word(at: int) -> bool:
        return 0 <= at < len(text) and (text[at].isalnum() or text[at] == "_")

    return (is_word(place - 1) != is_word(place)) is (what is sre.AT_BOUNDARY)


def _taken_by(kind: Any, value: Any, flags: int) -> Any:
    """Whether a character is one that the pattern takes here."""
    fold = bool(flags & re.IGNORECASE)
    if kind is sre.ANY:
        return lambda c: c != "\n"
    if kind is sre.LITERAL:
        return lambda c: c == chr(value) or (fold and c.lower() == chr(value).lower())
    if kind is sre.NOT_LITERAL:
        return lambda c: c != chr(value)
    assert kind is sre.IN, kind
    negated = value[0][0] is sre.NEGATE
    return lambda c: _is_in(value, c) is not negated


def _is_in(items: Any, c: str) -> bool:
    for kind, value in items:
        if kind is sre.LITERAL and ord(c) == value:
            return True
        if kind is sre.RANGE and value[0] <= ord(c) <= value[1]:
            return True
        if kind is sre.CATEGORY and _KINDS[value][0](c):
            return True
    return False


def _sample(tree: Any) -> str:
    """A short text that a pattern takes, looking ahead and behind aside."""
    return "".join(map(_sample_of, tree))


def _sample_of(node: Any) -> str:
    kind, value = node
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        return _sample(value[2]) * min(max(value[0], 1), _BOUND)
    if kind is sre.BRANCH:
        return _sample(value[1][0])
    if kind is sre.SUBPATTERN:
        return _sample(value[-1])
    if kind in (sre.ASSERT, sre.ASSERT_NOT, sre.AT):
        return ""
    takes = _taken_by(kind, value, 0)
    if kind is sre.IN and value[0][0] is sre.LITERAL:
        return chr(value[0][1])
    return next(filter(takes, "1a _.-:/|[]{}'\"#(),;=+<>•%\t\nKMGTZeEx-N\x1b"), "") or chr(value)


def _pumped(nodes: list[Any], before: str, after: str) -> Iterator[tuple[str, str, str]]:
    """What leads to each unbounded repeat, what it takes, and what follows it."""
    for number, (kind, value) in enumerate(nodes):
        rest = "".join(map(_sample_of, nodes[number + 1 :])) + after
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            if value[1] is sre.MAXREPEAT:
                yield before, _sample(value[2]), rest
            yield from _pumped(list(value[2]), before, rest)
        elif kind is sre.BRANCH:
            for each in value[1]:
                yield from _pumped(list(each), before, rest)
        elif kind in (sre.SUBPATTERN, sre.ASSERT):
            yield from _pumped(list(value[-1]), before, rest)
        before += _sample_of((kind, value))
