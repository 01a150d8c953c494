"""What a cause of slow jobs is: its odds, its change of a scenario, and how it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpsim.diagnosis.case import Case, Change


class FactName:
    """Names of what NCCL's log and traces of ranks show, which `Hypothesis.shows` expects."""

    INSIDE, BETWEEN = "inside a node", "between nodes"
    RANKS, WORK = "ranks", "work of a rank"
    REDUCING, UNUSED = "micro-batches that reduce", "unused parameters"
    BUCKETS, FIRST = "all-reduces of gradients", "the first all-reduce"
    READS, LOGGED = "values that the host waits for", "collectives in the log"
    DIRECT, NICS = "GPUDirect RDMA", "NICs of a node"
    PROTOCOL, CHANNELS = "protocol", "channels"


@dataclass(frozen=True)
class Hypothesis:
    """One cause. `odds` are those before anything was measured, against the others'.

    `sizes`: how large it may be in a case, the mildest first, none where it cannot apply; a
    `graded` one may have any size between two of them. By logarithm all are equally likely, or less
    by the power `falls` of the distance to the mildest. `size_in_words` writes a size, for `{size}`
    in `text`. `signs`: what a check shows, by the check's key; usual signs are left out. `shows`:
    what NCCL's log or traces show otherwise than expected, by a `FactName`.
    """

    key: str
    odds: float
    text: str
    remedy: str
    sizes: Callable[[Case], Sequence[float]]
    change: Callable[[Case, float], Change]
    size_in_words: Callable[[float], str] = str
    graded: bool = True
    falls: float = 0.0
    signs: Mapping[str, str] = field(default_factory=dict)
    shows: Mapping[str, str] = field(default_factory=dict)

    def in_words(self, size: float) -> str:
        """The cause with its size."""
        return self.text.format(size=self.size_in_words(size))


def set_to(*settings: str) -> Callable[[Case, float], Change]:
    """A change by settings that hold `{size}` where they depend on it."""
    return lambda _case, size: Change(tuple(each.format(size=size) for each in settings))


def scaled(term: str) -> Callable[[Case, float], Change]:
    """A change that lengthens a term of `Job.step_s` by the size."""
    return lambda _case, times: Change(factors={term: times})


def switch(
    key: str,
    odds: float,
    text: str,
    remedy: str,
    applies: Callable[[Case], object],
    *settings: str,
    signs: Mapping[str, str],
    shows: Mapping[str, str] = {},
) -> Hypothesis:
    """A cause that is there or not, as a setting is; it `applies` where the setting is another."""

    def sizes(case: Case) -> Sequence[float]:
        return (1.0,) if applies(case) else ()

    change = set_to(*settings)
    return Hypothesis(
        key, odds, text, remedy, sizes, change, graded=False, signs=signs, shows=shows
    )
