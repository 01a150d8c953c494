"""How flows share a link."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

FULL = Fraction(1)


def fair_share(demands: Sequence[tuple[Fraction, Fraction]]) -> Fraction:
    """The most that any gets of one link: all that ask for less get it, the others this.

    `demands`: what a flow asks for, and how many such flows there are.
    """
    left, waiting = FULL, sum((count for _, count in demands), Fraction(0))
    for demand, count in sorted(demands):
        if demand * waiting > left:
            return left / waiting
        left -= demand * count
        waiting -= count
    return FULL
