"""Quantities with their units: text to SI numbers, SI numbers to text, seconds to clock ticks.

Bits and bytes, decimal and binary prefixes, rates and amounts are all distinct; a bare number
is an error. The simulation clock counts integer nanoseconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Context, Decimal

NS_PER_S = 1_000_000_000
MIB = 1_048_576
_LONGEST = 60  # characters of a quantity: longer text is not one, and no message repeats it

_QUANTITY = re.compile(r"^\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S.*?)?\s*$")
_EXACT = Context(prec=4 * _LONGEST)  # digits: more than a quantity and its unit have
_SECONDS = {
    unit: Decimal(seconds)
    for unit, seconds in {
        "ns": "1e-9",
        "us": "1e-6",
        "µs": "1e-6",  # micro sign U+00B5
        "μs": "1e-6",  # Greek mu U+03BC, what many keyboards give
        "ms": "1e-3",
        "s": "1",
        "min": "60",
        "h": "3600",
        "hour": "3600",
        "hours": "3600",
        "day": "86400",
        "days": "86400",
    }.items()
}
_LONG = {"days": 3 * 86400.0, "h": 3600.0, "min": 120.0}  # and from how many seconds on
_PREFIX = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PREFIX |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_AMOUNT = re.compile(r"^(Ki|Mi|Gi|Ti|[kKMGT])?(bit|bits|b|bytes|byte|B)$")
_RATE = re.compile(r"^(Ki|Mi|Gi|Ti|[kKMGT])?(bit|bits|b|bytes|byte|B)(?:/s|/sec|ps)$")
_UNSURE_RATE = re.compile(r"^([kmgt])b(?:/s|/sec|ps)$", re.IGNORECASE)  # 'mb/s': bits, bytes?
_FLOPS = re.compile(r"^([MGTP])?(?:FLOPS|FLOP/s|flops|flop/s)$")


def parse_duration(text: str) -> float:
    """Seconds in `"5 us"`; raises ValueError without a unit of time, or below zero."""
    number, unit = _split(text, "a time such as '5 us', '391.2 ms' or '1.5 s'")
    if unit not in _SECONDS:
        raise ValueError(_unknown_unit(text, unit, "a time in ns, us, ms, s, min, h or days"))
    return _times(number, _SECONDS[unit])


def parse_bytes(text: str) -> float:
    """Bytes in `"25 MiB"`; a number of bits is refused, as memory and messages count bytes."""
    number, unit = _split(text, "a size such as '25 MiB' or '80 GB'")
    match = _AMOUNT.match(unit)
    if not match or _is_bit(match):
        raise ValueError(_unknown_unit(text, unit, "a size in B, kB, MB, GB, KiB, MiB or GiB"))
    return _times(number, _PREFIX[match[1] or ""])


def parse_bytes_per_s(text: str) -> float:
    """Bytes per second in `"100 Gbit/s"` (12.5e9) or `"20 GB/s"` (20e9)."""
    wanted = "a bandwidth such as '100 Gbit/s' (a link) or '20 GB/s' (a bus bandwidth)"
    number, unit = _split(text, wanted)
    match = _RATE.match(unit)
    if match:
        bytes_ = Decimal("0.125") if _is_bit(match) else 1
        return _times(number, _PREFIX[match[1] or ""] * bytes_)
    if either := _AMOUNT.match(unit) or _UNSURE_RATE.match(unit):
        raise ValueError(_ambiguous_rate(text, unit, either[1] or ""))
    raise ValueError(_unknown_unit(text, unit, wanted))


def parse_flops_per_s(text: str) -> float:
    """Floating-point operations per second in `"312 TFLOP/s"`."""
    wanted = "a rate such as '312 TFLOP/s'"
    number, unit = _split(text, wanted)
    match = _FLOPS.match(unit)
    if not match:
        raise ValueError(_unknown_unit(text, unit, wanted))
    return _times(number, (_PREFIX | {"P": 10**15})[match[1] or ""])


def parse_samples_per_s(text: str) -> float:
    """Samples per second in `"2500 samples/s"`."""
    wanted = "a rate such as '2500 samples/s'"
    number, unit = _split(text, wanted)
    if unit not in {"samples/s", "sample/s"}:
        raise ValueError(_unknown_unit(text, unit, wanted))
    return float(number)


def to_ns(seconds: float) -> int:
    """Clock ticks of a duration, rounded once, half to even; raises ValueError if not finite."""
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds} s is no duration")
    return round(seconds * NS_PER_S)


def format_duration(seconds: float) -> str:
    """A duration as a person reads it, in three digits: `412 ms`, `2.50 s`, `22.5 h`."""
    rounded = _in_three_digits(seconds)
    if abs(seconds) >= _LONG["h"]:
        return f"{'-' if rounded < 0 else ''}{format_long_duration(abs(seconds))}"
    if abs(rounded) < 0.5 / NS_PER_S:
        return "0 s"
    if abs(rounded) >= 1:
        return f"{_three(rounded)} s"
    scale, unit = (1e3, "ms") if abs(rounded) >= 1e-3 else (1e6, "us")
    return f"{_three(rounded * scale)} {unit}"


def format_long_duration(seconds: float) -> str:
    """Time to train as a person reads it, in three digits: `45.0 min`, `21.3 h`, `12.5 days`."""
    unit = next((unit for unit, least_s in _LONG.items() if seconds >= least_s), None)
    if unit is None:
        return format_duration(seconds)
    return f"{long_duration_in(unit, seconds)} {unit}"


def long_duration_in(unit: str, seconds: float) -> str:
    """Seconds as a number of that unit of time, in three digits: `21.3`."""
    return format_number(seconds / float(_SECONDS[unit]))


def format_number(value: float) -> str:
    """A number as a person reads it, in three digits: `1,560`, `97.2`, `4.05`."""
    return f"{_in_three_digits(value):,.{_decimals(value)}f}"


def format_percent(share: float) -> str:
    """A share in three digits at most: `78.5%`, `104%`."""
    return f"{share:.0%}" if abs(share) >= 0.9995 else f"{share:.1%}"


def format_bytes(size_bytes: float) -> str:
    """A size in binary units, as torch counts buckets and memory: `25.0 MiB`, `80.0 GiB`."""
    return f"{_with_prefix(size_bytes, ('Ti', 'Gi', 'Mi', 'Ki'))}B"


def format_bytes_per_s(rate: float) -> str:
    """A bandwidth in decimal bytes per second, as links are sold: `12.5 GB/s`."""
    return f"{_with_prefix(rate, 'TGMk')}B/s"


def _with_prefix(value: float, prefixes: Sequence[str]) -> str:
    """By the largest prefix that leaves one or more in three digits: 999.7 kB/s are 1.00 MB/s."""
    for prefix in prefixes:
        if abs(_in_three_digits(value / _PREFIX[prefix])) >= 1:
            return f"{_three(value / _PREFIX[prefix])} {prefix}"
    return f"{round(value)} "


def _in_three_digits(value: float) -> float:
    """Rounded before the unit is chosen, so that 999.6 ms is 1.00 s and not 1,000 ms."""
    return float(f"{value:.2e}")


def _three(value: float) -> str:
    """Without a mark for thousands, so that what is printed can be read back."""
    return f"{_in_three_digits(value):.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    """Digits after the point, three at most: the clock counts nanoseconds, and prints us."""
    rounded = abs(_in_three_digits(value))
    return max(0, min(3, 2 - math.floor(math.log10(rounded)))) if rounded else 0


def _times(number: Decimal, unit: Decimal | int) -> float:
    """The float nearest to so many units: equal quantities are equal, whatever their units."""
    return float(_EXACT.multiply(number, unit))


def _split(text: str, wanted: str) -> tuple[Decimal, str]:
    match = _QUANTITY.match(text) if len(text) <= _LONGEST else None
    if not match:
        shown = repr(text) if len(text) <= _LONGEST else f"{text[:20]!r}..."
        raise ValueError(f"{shown} is not a quantity; write {wanted}")
    digits, unit = match[1].replace("_", ""), match[2]
    if not unit:
        raise ValueError(f"{text.strip()} has no unit; write {wanted}")
    if unit.startswith(","):
        raise ValueError(f"{text!r} has a comma; write a decimal point and no thousands marks")
    if float(digits) < 0:
        raise ValueError(f"{text!r} is negative; write {wanted}")
    if not math.isfinite(float(digits)):
        raise ValueError(f"{text!r} is not finite; write {wanted}")
    return Decimal(digits) if float(digits) else Decimal(0), unit  # of any exponent


def _is_bit(match: re.Match[str]) -> bool:
    return match[2] in {"bit", "bits", "b"}


def _ambiguous_rate(text: str, unit: str, prefix: str) -> str:
    number = text.strip().removesuffix(unit).strip()
    prefix = prefix.replace("m", "M").replace("g", "G").replace("t", "T")
    return (
        f"{text!r} is ambiguous: write '{number} {prefix}bit/s' (a link's bits per second) "
        f"or '{number} {prefix}B/s' (bytes per second)"
    )


def _unknown_unit(text: str, unit: str, wanted: str) -> str:
    amount = _AMOUNT.match(unit)
    kinds = {
        "a time": unit in _SECONDS,
        "a rate": _RATE.match(unit),
        "a number of bits": amount and _is_bit(amount),
        "a size": amount,
    }
    if kind := next((kind for kind, matches in kinds.items() if matches), None):
        return f"{text!r} is {kind}; write {wanted}"
    near = _near_unit(unit)
    hint = f" (did you mean {near!r}?)" if near else ""
    return f"{text!r} has the unknown unit {unit!r}{hint}; write {wanted}"


def _near_unit(unit: str) -> str | None:
    spellings = [*_SECONDS, "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s", "MB/s", "GB/s", "GiB/s"]
    spellings += ["B", "kB", "MB", "GB", "KiB", "MiB", "GiB", "samples/s"]
    folded = unit.lower().replace("bps", "bit/s").replace("sec", "s").replace(" ", "")
    return next((name for name in spellings if name.lower() == folded), None)
