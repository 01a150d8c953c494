"""What a cause of slow jobs is: its odds, its change of a scenario, and how it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpsim.diagnosis.case import Case, Change

__all__ = ["Hypothesis"]


@dataclass(frozen=True)
class Hypothesis:
    """One cause. `odds` are those before anything was measured, against the others'.

    `sizes`: how large it may be in a case, the mildest first, none where it cannot apply; a
    `graded` one may have any size between two of them. By logarithm all are equally likely, or less
    by the power `falls` of the distance to the mildest. `said`: a size in words, for `{size}` in
    `text`. `signs`: what a check shows, by the check's key; usual signs are left out. `shows`:
    what NCCL's log or traces show otherwise than expected, by a `Fact`'s name.
    """

    key: str
    odds: float
    text: str
    remedy: str
    sizes: Callable[[Case], Sequence[float]]
    change: Callable[[Case, float], Change]
    said: Callable[[float], str] = str
    graded: bool = True
    falls: float = 0.0
    signs: Mapping[str, str] = field(default_factory=dict)
    shows: Mapping[str, str] = field(default_factory=dict)

    def in_words(self, size: float) -> str:
        """The cause with its size."""
        return self.text.format(size=self.said(size))
