"""What options say, from their text: work and money, sizes, ranks, steps.

The command line and Python read them here alike. Every reader raises ValueError, which names the
text, what is wrong with it and what to write instead; units are read in `ddpsim.units`, settings
in `ddpsim.settings`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from ddpsim.errors import shown
from ddpsim.result.capacity import Money, Target
from ddpsim.units import parse_bytes, parse_duration

_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?|\.\d+)(?:[eE]\+?(\d{1,3}))? ?([kKMGBT]?)")
_TARGET = re.compile(
    r"(?:(?P<epochs>\S.*?) ?epochs? of )?(?P<amount>\S.*?) ?(?P<unit>samples?|tokens?)"
    r"(?: in (?P<within>\S.*?)(?: with (?P<certainty>\S+?) ?% certainty)?)?",
    re.IGNORECASE,
)
_MONEY = re.compile(r"(?P<sign>[$€£¥])? ?(?P<amount>[\d._]+(?: ?[kKM](?= |$))?) ?(?P<label>\S+)?")
_OTHER_UNITS = re.compile(r"\b(images|sequences|examples|steps|iterations)\b", re.IGNORECASE)
_AN_HOUR = re.compile(r" ?/ ?(h|hour|gpu-hour)$|(?<=\S) (an?|per) (gpu-)?hour$", re.IGNORECASE)
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MOST_BYTES = 2**50
_MOST_RANKS = 256  # for eyes: beyond, the files get large and the page slow
_GPU_HOURS = ("gpu-hour", "gpu-hours", "gpuh", "gpu-h")
_LONGEST = 100  # characters: longer text is no target, and no message repeats it
_MOST = 10**18
_GRAMMAR = (
    'write "[N epochs of] M samples [in DURATION [with P % certainty]]", such as "90 epochs of '
    '1.28M samples in 24 h" or "300B tokens in 30 days with 90 % certainty"'
)


def parse_target(text: str) -> Target:
    """The work in `"90 epochs of 1.28M samples in 24 h"`; raises ValueError with what is wrong."""
    plain = _plain(text)
    match = _TARGET.fullmatch(plain)
    if match is None:
        raise ValueError(f"{shown(text)} is not a target{_hint(plain)}; {_GRAMMAR}")
    epochs, within = match["epochs"], match["within"]
    unit: Literal["samples", "tokens"] = (
        "samples" if match["unit"].lower().startswith("sample") else "tokens"
    )
    return Target(
        epochs=1 if epochs is None else _count(epochs, "epochs"),
        amount=_count(match["amount"], unit),
        unit=unit,
        within_s=None if within is None else _deadline_s(within),
        certainty=None if match["certainty"] is None else _share(match["certainty"]),
    )


def _hint(plain: str) -> str:
    """What was meant by a target in other units."""
    word = _OTHER_UNITS.search(plain)
    if word is None:
        return ""
    if word[0].lower() in ("steps", "iterations"):
        return f": {word[0]} depend on the GPUs, so count samples (steps x global batch)"
    return f": {word[0]} are samples here"


def parse_price(text: str) -> Money:
    """The price of a GPU-hour in `"2.50 USD"`; raises ValueError."""
    return _money(_AN_HOUR.sub("", _plain(text)), text, "a price per GPU-hour such as '2.50 USD'")


def parse_budget(text: str) -> Money:
    """The money in `"5000 USD"`, or `"800 GPU-hours"`; raises ValueError."""
    return _money(_plain(text), text, "a budget such as '5000 USD' or '800 GPU-hours'")


def _plain(text: str) -> str:
    return " ".join(text.split()) if len(text) <= _LONGEST else ""


def _count(text: str, unit: str) -> int:
    """A whole number above zero."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        comma = "; write no commas, and a point for decimals" if "," in text else ""
        raise ValueError(
            f"{shown(text)} is not a number of {unit}{comma}; write such as 90, 1.28M or 300B"
        )
    digits, exponent, suffix = match.groups()
    number = Decimal(digits.replace("_", "")).scaleb(int(exponent or 0)) * _FACTORS[suffix]
    if not 0 < number <= _MOST:
        raise ValueError(f"{shown(text)} {unit} is out of range: wanted 1 to 10^18")
    if number != int(number):
        raise ValueError(f"{shown(text)} {unit} is not a whole number")
    return int(number)


def _deadline_s(text: str) -> float:
    seconds = parse_duration(text)
    if not seconds:
        raise ValueError(f"the work takes longer than {text}")
    return seconds


def _share(text: str) -> float:
    match = _NUMBER.fullmatch(text)
    percent = float(text) if match and not match[2] and not match[3] else 0.0
    if not 1 <= percent <= 99.9:
        raise ValueError(f"{shown(text)} % certainty is out of range: wanted 1 to 99.9")
    return percent / 100


def _money(plain: str, text: str, wanted: str) -> Money:
    if "," in plain:
        reason = "has a comma; write no commas, and a point for decimals"
        raise ValueError(f"{shown(text)} {reason}: write {wanted}")
    match = _MONEY.fullmatch(plain)
    label = match and (match["label"] or match["sign"])
    if match is None or not label or bool(match["sign"]) == bool(match["label"]):
        raise ValueError(f"{shown(text)} is not an amount with its currency; write {wanted}")
    digits = _NUMBER.fullmatch(match["amount"])
    if digits is None or any(c.isdigit() or c == "," for c in label) or len(label) > 12:
        raise ValueError(f"{shown(text)} is not an amount with its currency; write {wanted}")
    number = float(Decimal(digits[1].replace("_", "")) * _FACTORS[digits[3]])
    if not 0 < number <= _MOST:
        raise ValueError(f"{shown(text)} is out of range; write {wanted}, above zero")
    return Money(number, "GPU-hours" if label.lower() in _GPU_HOURS else label)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of "8..16G" (each twice the last) or "1M,25 MiB"; K, M and G alone are binary.

    Raises ValueError, naming what is wrong.
    """
    return tuple(sorted({size for part in text.split(",") for size in _doubled(part)}))


def _doubled(text: str) -> tuple[int, ...]:
    low, dots, high = text.partition("..")
    if not dots:
        return (_size(text),)
    first, last = _size(low), _size(high)
    if last < first:
        raise ValueError(f"{shown(text)} ends before it begins")
    sizes = [first]
    while sizes[-1] * 2 <= last:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def _size(text: str) -> int:
    word = text.strip()
    factor = _BINARY.get(word[-1:].upper(), 1)
    digits = word[:-1] if factor > 1 else word
    size = int(digits) * factor if digits.isdecimal() else round(parse_bytes(word))
    if not 4 <= size <= _MOST_BYTES:
        raise ValueError(f"{shown(word)} is out of range: wanted 4 B to 1024 T")
    return size


def parse_ranks(text: str, world_size: int) -> list[int]:
    """Ranks as in "0,3,8-11", in order; raises ValueError."""
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise ValueError(f"{part.strip()!r} is no rank; write 0,3,8-11")
        begin, end = int(first), int(last or first)
        if begin > end:
            raise ValueError(f"{part.strip()!r} runs backwards; write {end}-{begin}")
        if end >= world_size:
            raise ValueError(f"there is no rank {end}: choose 0 to {world_size - 1}")
        chosen.update(range(begin, min(end, begin + _MOST_RANKS) + 1))
        if len(chosen) > _MOST_RANKS:
            raise ValueError(f"at most {_MOST_RANKS} ranks at a time")
    return sorted(chosen)


def parse_steps(text: str) -> int | Literal["all"]:
    """A number of steps, or "all"; raises ValueError."""
    if text == "all":
        return "all"
    if not _is_number(text) or not int(text):
        raise ValueError(f"{text!r} is neither a number of steps nor all")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
