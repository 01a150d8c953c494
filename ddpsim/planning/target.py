"""What a plan is asked for, as text: work and a deadline, a price, a budget."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from ddpsim.errors import shown
from ddpsim.result.capacity import Money, Target
from ddpsim.units import parse_duration

__all__ = ["parse_budget", "parse_price", "parse_target"]

_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?|\.\d+)(?:[eE]\+?(\d{1,3}))? ?([kKMGBT]?)")
_TARGET = re.compile(
    r"(?:(?P<epochs>\S.*?) ?epochs? of )?(?P<amount>\S.*?) ?(?P<unit>samples?|tokens?)"
    r"(?: in (?P<within>\S.*))?",
    re.IGNORECASE,
)
_MONEY = re.compile(r"(?P<sign>[$€£¥])? ?(?P<amount>[\d._]+(?: ?[kKM](?= |$))?) ?(?P<label>\S+)?")
_AN_HOUR = re.compile(r" ?/ ?(h|hour|gpu-hour)$|(?<=\S) an? (gpu-)?hour$", re.IGNORECASE)
_LONGEST = 100  # characters: longer text is no target, and no message repeats it
_MOST = 10**18
_GRAMMAR = (
    'write "[N epochs of] M samples [in DURATION]", such as "90 epochs of 1.28M samples in 24 h" '
    'or "300B tokens in 30 days"'
)


def parse_target(text: str) -> Target:
    """The work in `"90 epochs of 1.28M samples in 24 h"`; raises ValueError with what is wrong."""
    plain = _plain(text)
    found = _TARGET.fullmatch(plain)
    if found is None:
        raise ValueError(f"{shown(text)} is not a target; {_GRAMMAR}")
    epochs, within = found["epochs"], found["within"]
    unit: Literal["samples", "tokens"] = (
        "samples" if found["unit"].lower().startswith("sample") else "tokens"
    )
    return Target(
        epochs=1 if epochs is None else _count(epochs, "epochs"),
        amount=_count(found["amount"], unit),
        unit=unit,
        within_s=None if within is None else _deadline_s(within),
    )


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
    found = _NUMBER.fullmatch(text)
    if found is None:
        comma = "; write no commas" if "," in text else ""
        raise ValueError(
            f"{shown(text)} is not a number of {unit}{comma}; write such as 90, 1.28M or 300B"
        )
    digits, exponent, suffix = found.groups()
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


def _money(plain: str, text: str, wanted: str) -> Money:
    found = _MONEY.fullmatch(plain)
    label = found and (found["label"] or found["sign"])
    if found is None or not label or bool(found["sign"]) == bool(found["label"]):
        raise ValueError(f"{shown(text)} is not an amount with its currency; write {wanted}")
    digits = _NUMBER.fullmatch(found["amount"])
    if digits is None or any(c.isdigit() or c == "," for c in label) or len(label) > 12:
        raise ValueError(f"{shown(text)} is not an amount with its currency; write {wanted}")
    number = float(Decimal(digits[1].replace("_", "")) * _FACTORS[digits[3]])
    if not 0 < number <= _MOST:
        raise ValueError(f"{shown(text)} is out of range; write {wanted}, above zero")
    return Money(number, "GPU-hours" if label.lower() in _GPU_HOURS else label)


_GPU_HOURS = ("gpu-hour", "gpu-hours", "gpuh", "gpu-h")
