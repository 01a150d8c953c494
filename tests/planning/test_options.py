"""Work, deadlines, prices and budgets are read from text, or refused with what to write."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpsim.planning.options import parse_budget, parse_price, parse_target
from ddpsim.result.capacity import Money, Target


@given(
    epochs=st.none() | st.integers(1, 10**6),
    amount=st.integers(1, 10**7),
    suffix=st.sampled_from([("", 1), ("k", 10**3), ("M", 10**6), ("B", 10**9), (" M", 10**6)]),
    unit=st.sampled_from(["samples", "tokens"]),
    within=st.none() | st.tuples(st.integers(1, 999), st.sampled_from(["h", "min", "days"])),
)
def test_a_target_is_read_as_it_is_written(
    epochs: int | None,
    amount: int,
    suffix: tuple[str, int],
    unit: str,
    within: tuple[int, str] | None,
) -> None:
    text = f"{amount}{suffix[0]} {unit}"
    text = text if epochs is None else f"{epochs} epochs of {text}"
    seconds = {"h": 3600.0, "min": 60.0, "days": 86400.0}
    expected_s = None
    if within:
        text += f" in {within[0]} {within[1]}"
        expected_s = within[0] * seconds[within[1]]
    assert parse_target(text) == Target(epochs or 1, amount * suffix[1], unit, expected_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("90 epochs of 1.28M samples in 24 h", Target(90, 1_280_000, "samples", 86_400.0)),
        ("300B tokens in 30 days", Target(1, 300 * 10**9, "tokens", 30 * 86_400.0)),
        ("3k samples in 5 h with 99.5% certainty", Target(1, 3000, "samples", 18_000.0, 0.995)),
        ("1 epoch of 1_281_167 samples", Target(1, 1_281_167, "samples")),
        ("  2  epochs of\n5e4 samples in 1.5 h ", Target(2, 50_000, "samples", 5400.0)),
        ("1 Sample", Target(1, 1, "samples")),
    ],
)
def test_targets(text: str, target: Target) -> None:
    assert parse_target(text) == target


NUMBERS = "write such as 90, 1.28M or 300B"
GRAMMAR = (
    'is not a target; write "[N epochs of] M samples [in DURATION [with P % certainty]]", such as '
    '"90 epochs of 1.28M samples in 24 h" or "300B tokens in 30 days with 90 % certainty"'
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("24 h", f"'24 h' {GRAMMAR}"),
        ("", f"'' {GRAMMAR}"),
        ("90 epochs in 24 h", f"'90 epochs in 24 h' {GRAMMAR}"),
        (
            "1,281,167 samples",
            "'1,281,167' is not a number of samples; write no commas, and a point for decimals; "
            + NUMBERS,
        ),
        (
            "many samples in 1 h",
            "'many' is not a number of samples; " + NUMBERS,
        ),
        ("1.5 epochs of 10 samples", "'1.5' epochs is not a whole number"),
        ("0 samples", "'0' samples is out of range: wanted 1 to 10^18"),
        ("9e30 tokens", "'9e30' tokens is out of range: wanted 1 to 10^18"),
        (
            "5 samples in 24",
            "24 has no unit; write a time such as '5 us', '391.2 ms' or '1.5 s'",
        ),
        (
            "5 samples in 2 weeks",
            "'2 weeks' has the unknown unit 'weeks'; write a time in ns, us, ms, s, min, h or days",
        ),
        ("5 images", "'5 images' is not a target: images are samples here; " + GRAMMAR[17:]),
        ("5 samples in 0 h", "the work takes longer than 0 h"),
    ],
)
def test_bad_targets(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_target(text)
    assert str(caught.value) == says


@settings(max_examples=60)
@given(st.text(max_size=150) | st.text("0123456789.kMB_,$ /epochsofaltn", max_size=40))
def test_no_text_makes_the_parsers_fail_otherwise(text: str) -> None:
    for parse in (parse_target, parse_price, parse_budget):
        with suppress(ValueError):
            parse(text)


@pytest.mark.parametrize(
    ("text", "money"),
    [
        ("2.50 USD", Money(2.5, "USD")),
        ("2.50 EUR/h", Money(2.5, "EUR")),
        ("2.50 USD / GPU-hour", Money(2.5, "USD")),
        ("2.50 USD per hour", Money(2.5, "USD")),
        ("2,50 USD", None),
        ("$2", Money(2.0, "$")),
        ("3 credits", Money(3.0, "credits")),
        ("5k USD", Money(5000.0, "USD")),
        ("800 GPU-hours", Money(800.0, "GPU-hours")),
        ("800 gpuh", Money(800.0, "GPU-hours")),
        ("2.50", None),
        ("USD 2.50", None),
        ("1,000 USD", None),
        ("0 USD", None),
        ("-5 USD", None),
    ],
)
def test_money(text: str, money: Money | None) -> None:
    if money is not None:
        assert parse_price(text) == money
        return
    with pytest.raises(ValueError, match="write a price per GPU-hour such as"):
        parse_price(text)
