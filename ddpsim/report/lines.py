"""Lines of text on a screen: labels beside wrapped text, commands to paste."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from textwrap import shorten, wrap
from typing import ParamSpec

from ddpsim.errors import printable
from ddpsim.settings import Setting

_P = ParamSpec("_P")

_WIDEST = 100
_NARROWEST = 80  # of tables
_OF_ALL_STRATEGIES = ("accumulation_steps", "no_sync")


def screen_width() -> int:
    """The columns of a line: 100, or those of a screen that has fewer, 80 at least."""
    if not sys.stdout.isatty():
        return _WIDEST
    from shutil import get_terminal_size  # noqa: PLC0415 -- with all that unpacks archives

    return min(max(get_terminal_size().columns, _NARROWEST), _WIDEST)


def as_text(lines: Callable[_P, Iterable[str]]) -> Callable[_P, str]:
    """Let a function of lines return them as one text, without spaces at their ends."""

    @wraps(lines)
    def rendered(*args: _P.args, **options: _P.kwargs) -> str:
        return printable("\n".join(line.rstrip() for line in lines(*args, **options)))

    return rendered


def command(
    file: str,
    settings: Sequence[str],
    changes: Sequence[str] = (),
    *,
    name: str = "run",
    options: Sequence[str] = (),
) -> Iterator[str]:
    """What to run next: one line, or one an option with a backslash between.

    `changes` come after the user's own `settings`, and in place of those of the same keys; then
    `options` of the command `name`.
    """
    replaced = {Setting.parse(change).key for change in changes}
    kept = [text for text in settings if Setting.parse(text).key not in replaced]
    parts = [f"ddpsim {name} {shlex.quote(file)}"]
    parts += [f"--set {shlex.quote(setting)}" for setting in (*kept, *changes)]
    parts += [shlex.join(options)] if options else []
    indent = " " * 12
    if len(line := indent + " ".join(parts)) <= screen_width():
        yield line
    else:
        yield from f" \\\n{indent}    ".join([indent + parts[0], *parts[1:]]).split("\n")


def cut(text: str, most: int) -> str:
    """Text on one line, cut after a word, or inside one that takes most of the line."""
    text = " ".join(text.split())
    short = shorten(text, most, placeholder=" ...")
    return short if len(short) > most // 2 or short == text else f"{text[: most - 4]} ..."


def labelled(label: str, text: str) -> Iterator[str]:
    """A label and its text, wrapped beside it."""
    rows = wrap(text, screen_width() - 12, break_on_hyphens=False) or [""]
    for number, row in enumerate(rows):
        yield f"{label if number == 0 else '':<12}{row}"


def listed(label: str, texts: Iterable[str]) -> Iterator[str]:
    """Several texts below each other, a label beside the first."""
    for text in texts:
        yield from labelled(label, text)
        label = ""


def columns(label: str, rows: Sequence[Sequence[str]], *, whole: bool = True) -> Iterator[str]:
    """A label and rows of cells below each other; the last cells are wrapped.

    If not `whole`, they end with the last clause that has room on their line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    indent = 12 + sum(widths) + 2 * len(widths)
    for row in rows:
        cells = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        room = screen_width() - indent
        text = row[-1] if whole else _clauses(row[-1], room)
        texts = wrap(text, room, break_on_hyphens=False)
        yield f"{label:<12}{cells}{texts[0]}"
        yield from (f"{'':<{indent}}{text}" for text in texts[1:])
        label = ""


def _clauses(text: str, most: int) -> str:
    """The first clauses of a text, as many as fit, but at least one."""
    ends = [end.start() for end in re.finditer(r"[,;] ", text)]
    fitting = [end for end in (*ends, len(text)) if end <= most]
    return text[: max(fitting, default=min((*ends, len(text))))]


def named_rows(
    head: str, rows: Sequence[tuple[str, str]], figures: str, width: int
) -> Iterator[str]:
    """A table of names and their figures, `width` columns of these, under their heads.

    A name that has no room in its row stands above it, whole.
    """
    longest = max((len(name) for name, _ in rows), default=0)
    room = max(len(head), min(longest, screen_width() - width - 2))
    yield f"  {head:<{room}}{figures}"
    for name, row in rows:
        if len(name) > room:
            yield f"  {name}"
        yield f"  {name if len(name) <= room else '':<{room}}{row}"


def indented(text: str) -> Iterator[str]:
    """Indented text, whose further lines are indented more."""
    yield from wrap(text, screen_width(), initial_indent="  ", subsequent_indent="    ")


def settings_of_names(rows: Iterable[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Yields, below a table, the settings of its rows that their names do not hold.

    Left out are options that a row's strategy shares with the scenario, or takes back.
    """
    others = {name: ", ".join(_not_named(name, settings)) for name, settings in rows}
    yield from listed("with", by_text(others))


def by_text(texts: Mapping[str, str]) -> Iterator[str]:
    """Each text once, behind the names that have it: `fully_shard; hsdp: buffers differ`.

    A strategy is named alone where all its rows have one text: `hsdp` for `hsdp` and `hsdp, ...`.
    """
    families: dict[str, list[str]] = {}
    for name, text in texts.items():
        families.setdefault(name.partition(",")[0], []).append(text)
    names: dict[str, dict[str, None]] = {}
    for name, text in texts.items():
        family = name.partition(",")[0]
        are_alike = families[family].count(text) == len(families[family]) > 1
        names.setdefault(text, {})[family if are_alike else name] = None
    yield from (f"{'; '.join(of)}: {text}" for text, of in names.items() if text)


def _not_named(name: str, settings: Sequence[str]) -> Iterator[str]:
    words = {name, *name.split(", ")}
    for setting in settings:
        key, _, value = setting.partition("=")
        section, _, inner = key.partition(".")
        last = inner.rpartition(".")[2]
        is_own = section == "ddp" and inner == last and inner not in _OF_ALL_STRATEGIES
        if not (is_own or value == "default" or {setting, value, f"{last}={value}"} & words):
            yield setting


def noted_noise(noise: float) -> Iterator[str]:
    """The differences that jitter hides; nothing without jitter."""
    if noise:
        text = f"two runs of run.iterations steps differ by up to {noise:.1%} by chance"
        yield from labelled("noise", f"{text}: a smaller difference takes more of them to see")


def warned(warnings: Sequence[str]) -> Iterator[str]:
    """What a reader must know before trusting the answer."""
    for warning in warnings:
        yield from labelled("WARNING", warning)
