"""Quantities: what is read, what is refused, and what is printed."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ddpsim.units import (
    format_bytes,
    format_bytes_per_s,
    format_duration,
    parse_bytes,
    parse_bytes_per_s,
    parse_duration,
    parse_flops_per_s,
    parse_samples_per_s,
    to_ns,
)

Parse = Callable[[str], float]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_duration, "5 us", 5e-6),
        (parse_duration, "5us", 5e-6),
        (parse_duration, " 5 \u00b5s ", 5e-6),  # micro sign
        (parse_duration, "5 \u03bcs", 5e-6),  # Greek mu
        (parse_duration, "391.2 ms", 0.3912),
        (parse_duration, "1.5e-3 s", 1.5e-3),
        (parse_duration, ".5 s", 0.5),
        (parse_duration, "5. s", 5.0),
        (parse_duration, "+5 s", 5.0),
        (parse_duration, "2 min", 120.0),
        (parse_duration, "2 h", 7200.0),
        (parse_duration, "0 s", 0.0),
        (parse_duration, "12 ns", 12e-9),
        (parse_bytes, "25 MiB", 26_214_400),
        (parse_bytes, "80 GB", 80e9),
        (parse_bytes, "1_000 B", 1000),
        (parse_bytes, "16 KiB", 16384),
        (parse_bytes, "1 kB", 1000),
        (parse_bytes, "1 byte", 1),
        (parse_bytes_per_s, "100 Gbit/s", 12.5e9),
        (parse_bytes_per_s, "100 Gb/s", 12.5e9),
        (parse_bytes_per_s, "100Gbps", 12.5e9),
        (parse_bytes_per_s, "20 GB/s", 20e9),
        (parse_bytes_per_s, "20 GBps", 20e9),
        (parse_bytes_per_s, "1 GiB/s", 2**30),
        (parse_bytes_per_s, "8 bit/s", 1),
        (parse_flops_per_s, "312 TFLOP/s", 312e12),
        (parse_flops_per_s, "312 TFLOPS", 312e12),
        (parse_flops_per_s, "1 PFLOP/s", 1e15),
        (parse_samples_per_s, "2500 samples/s", 2500),
    ],
)
def test_reads(parse: Parse, text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_duration, "25", "25 has no unit; write a time such as '5 us'"),
        (parse_duration, "five ms", "'five ms' is not a quantity"),
        (parse_duration, "", "'' is not a quantity"),
        (parse_duration, "ms", "'ms' is not a quantity"),
        (parse_duration, "-1 ms", "'-1 ms' is negative"),
        (parse_duration, "nan ms", "'nan ms' is not a quantity"),
        (parse_duration, "inf ms", "'inf ms' is not a quantity"),
        (parse_duration, "1e400 ms", "'1e400 ms' is not finite"),
        (parse_duration, "5 MS", "unknown unit 'MS' (did you mean 'ms'?)"),
        (parse_duration, "5 parsec", "unknown unit 'parsec'; write a time in ns, us, ms"),
        (parse_duration, "1,5 ms", "'1,5 ms' has a comma; write a decimal point"),
        (parse_duration, "5 GB", "'5 GB' is a size; write a time in ns"),
        (parse_duration, "5 ms 3 us", "unknown unit 'ms 3 us'"),
        (parse_duration, "1.2.3 ms", "unknown unit '.3 ms'"),
        (parse_bytes, "25", "25 has no unit"),
        (parse_bytes, "80 Gbit", "'80 Gbit' is a number of bits; write a size"),
        (parse_bytes, "80 gb", "unknown unit 'gb' (did you mean 'GB'?)"),
        (parse_bytes, "25 M", "unknown unit 'M'"),
        (parse_bytes_per_s, "100Gb", "write '100 Gbit/s' (a link's bits per second) or '100 GB/s'"),
        (parse_bytes_per_s, "100 Gb", "'100 Gb' is ambiguous: write '100 Gbit/s'"),
        (parse_bytes_per_s, "100 GB", "'100 GB' is ambiguous: write '100 Gbit/s'"),
        (parse_bytes_per_s, "1.5e1 Gibit", "write '1.5e1 Gibit/s' (a link's bits per second)"),
        (parse_bytes_per_s, "1 mb/s", "write '1 Mbit/s' (a link's bits per second) or '1 MB/s'"),
        (parse_bytes_per_s, "10 gbps", "write '10 Gbit/s' (a link's bits per second) or '10 GB/s'"),
        (parse_bytes_per_s, "inf GB/s", "'inf GB/s' is not a quantity"),
        (parse_bytes_per_s, "100", "100 has no unit; write a bandwidth such as '100 Gbit/s'"),
        (parse_bytes_per_s, "5 ms", "'5 ms' is a time; write a bandwidth such as"),
        (parse_flops_per_s, "312", "312 has no unit"),
        (parse_flops_per_s, "312 T", "unknown unit 'T'; write a rate such as '312 TFLOP/s'"),
        (parse_flops_per_s, "312 mFLOP/s", "unknown unit 'mFLOP/s'"),
        (parse_samples_per_s, "2500", "2500 has no unit"),
        (parse_samples_per_s, "2500 images/s", "unknown unit 'images/s'"),
    ],
)
def test_refuses(parse: Parse, text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["9" * 100_000, "x" * 100_000, "1" * 9999 + "\nms", " " * 10_000])
def test_refuses_long_text_shortly(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_duration(text)
    assert len(str(caught.value)) < 200


@given(st.text(max_size=70))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    for parse in (parse_duration, parse_bytes, parse_bytes_per_s, parse_flops_per_s):
        try:
            value = parse(text)
        except ValueError:
            continue
        assert math.isfinite(value)
        assert value >= 0


_NUMBERS = st.decimals(0, 10**9, places=3)
_PINT_UNITS = {
    "ns": "nanosecond",
    "us": "microsecond",
    "ms": "millisecond",
    "s": "second",
    "min": "minute",
    "h": "hour",
    "B": "byte",
    "kB": "kilobyte",
    "MB": "megabyte",
    "GB": "gigabyte",
    "TB": "terabyte",
    "KiB": "kibibyte",
    "MiB": "mebibyte",
    "GiB": "gibibyte",
    "TiB": "tebibyte",
    "kbit/s": "kilobit/second",
    "Mbit/s": "megabit/second",
    "Gbit/s": "gigabit/second",
    "Tbit/s": "terabit/second",
    "Gibit/s": "gibibit/second",
    "MB/s": "megabyte/second",
    "GB/s": "gigabyte/second",
    "GiB/s": "gibibyte/second",
}


@pytest.fixture(scope="module")
def pint_registry() -> Any:
    return pytest.importorskip("pint").UnitRegistry()


@pytest.mark.parametrize("unit", _PINT_UNITS)
def test_agrees_with_pint(unit: str, pint_registry: Any) -> None:
    if "/s" in unit:
        parse, base = parse_bytes_per_s, "byte/second"
    else:
        parse, base = (parse_bytes, "byte") if "B" in unit else (parse_duration, "second")

    @given(_NUMBERS)
    def check(number: Any) -> None:
        expected = pint_registry.Quantity(float(number), _PINT_UNITS[unit]).to(base).magnitude
        assert parse(f"{number} {unit}") == pytest.approx(expected, rel=1e-12)

    check()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-0.0, "0 s"),
        (1e-12, "0 s"),
        (-1e-12, "0 s"),
        (1e-9, "0.001 us"),
        (9.812e-5, "98.1 us"),
        (9.996e-4, "1.00 ms"),
        (9.994e-4, "999 us"),
        (0.4123, "412 ms"),
        (-0.4123, "-412 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (1, "1.00 s"),
        (2.5, "2.50 s"),
        (3590, "3590 s"),
        (3599, "3600 s"),
        (86400, "24.0 h"),
        (-86400, "-24.0 h"),
        (1e6, "11.6 days"),
    ],
)
def test_formats_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (-0.3, "0 B"),
        (4, "4 B"),
        (999, "999 B"),
        (1023.4, "1023 B"),
        (1023.6, "1.00 KiB"),
        (1024, "1.00 KiB"),
        (102_228_128, "97.5 MiB"),
        (26_214_400, "25.0 MiB"),
        (1020 * 2**20, "1020 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (5e15, "4550 TiB"),
    ],
)
def test_formats_bytes(size_bytes: float, text: str) -> None:
    """As torch counts buckets and memory."""
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (-0.3, "0 B/s"),
        (999, "999 B/s"),
        (999.7, "1.00 kB/s"),
        (1000, "1.00 kB/s"),
        (999_600, "1.00 MB/s"),
        (26_214_400, "26.2 MB/s"),
        (80e9, "80.0 GB/s"),
        (5e15, "5000 TB/s"),
    ],
)
def test_formats_rates(rate: float, text: str) -> None:
    """As links are sold."""
    assert format_bytes_per_s(rate) == text


@given(st.integers(0, 10**12), st.integers(0, 9))
def test_equal_quantities_are_equal(number: int, places: int) -> None:
    """Whatever their units, and as near to what was written as a float can be."""
    units = {"ns": 0, "us": 3, "ms": 6, "s": 9}
    read = {
        parse_duration(f"{Decimal(number).scaleb(-places - shift):f} {unit}")
        for unit, shift in units.items()
    }
    assert read == {float(Fraction(number, 10 ** (places + 9)))}
    rates = {
        parse_bytes_per_s(f"{Decimal(number * times).scaleb(-shift):f} {unit}")
        for unit, shift, times in [
            ("B/s", 0, 1),
            ("kbit/s", 3, 8),
            ("Gbit/s", 9, 8),
            ("GB/s", 9, 1),
        ]
    }
    assert rates == {float(number)}


@given(st.floats(1e-6, 9e3))
def test_printed_durations_read_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=5.1e-3)


@given(st.floats(1e3, 9e15))
def test_printed_sizes_read_back(size_bytes: float) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=5.1e-3)
    rate = format_bytes_per_s(size_bytes)
    assert parse_bytes_per_s(rate) == pytest.approx(size_bytes, rel=5.1e-3)


@given(st.floats(1e-9, 1e15), st.floats(1e-9, 1e15))
def test_printing_keeps_the_order_of_units(one: float, other: float) -> None:
    """Nothing prints as 1000 of a unit: the next unit takes over."""
    for value in (one, other):
        number, unit = format_duration(value).split()
        assert unit in ("s", "days") or float(number) < 1000
        number, unit = format_bytes(value).split()
        assert float(number) < 1024


@given(st.integers(0, 10**15))
def test_whole_nanoseconds_survive(nanoseconds: int) -> None:
    assume(nanoseconds < 2**49)  # a float of seconds still tells these apart
    assert to_ns(nanoseconds / 1e9) == nanoseconds


@pytest.mark.parametrize(("seconds", "ticks"), [(0.5e-9, 0), (1.5e-9, 2), (2.5e-9, 2), (1, 10**9)])
def test_ticks_round_half_to_even(seconds: float, ticks: int) -> None:
    assert Fraction(ticks, 1) == to_ns(seconds)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_ticks_need_a_number(seconds: float) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        to_ns(seconds)
