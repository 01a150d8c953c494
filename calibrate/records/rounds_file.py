"""Files of rounds, `ddpsim.ddp-rounds/1`: read with one clear error, and written whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from calibrate.files import load_json
from calibrate.records.rounds import Rounds, Samples, Steps, VariantSamples
from ddpsim.errors import ImportFailedError
from ddpsim.files import write_atomically
from ddpsim.wording import counted

__all__ = ["load_rounds", "save_rounds"]

SCHEMA = "ddpsim.ddp-rounds/1"
_LONGEST_S = 1e6  # of what a round measures: days
_NEVER_ZERO = ("whole_s", "backward_s", "beside_s", "layers_s", "samples_s")


def load_rounds(path: Path) -> Rounds:
    """Read rounds; raises ImportFailedError with what is wrong and where."""
    rounds = load_json(Rounds, path, SCHEMA)
    for problem in _problems(rounds):
        raise ImportFailedError(str(path), f"is no {SCHEMA}: {problem}")
    return rounds


def _problems(rounds: Rounds) -> Iterator[str]:
    """Where samples lack ranks or rounds that others have, or are no times."""
    for name, rows in (("variants", rounds.variants), ("all_reduce", rounds.all_reduce)):
        if not rows:
            yield f"{name}: wanted one or more"
    ranks = rounds.layout.world_size
    for name, samples, count in _tables(rounds):
        yield from (f"{name}: {problem}" for problem in _unfit(name, samples, count, ranks))
    by_rank: dict[str, Sequence[float | None]] = {"alone.hook_s": rounds.alone.hook_s}
    for i, parameter in enumerate(rounds.parameters):
        by_rank[f"parameters.{i}.ready_s"] = parameter.ready_s
        by_rank[f"parameters.{i}.ddp_hook_s"] = parameter.ddp_hook_s or parameter.ready_s
    for name, figures in by_rank.items():
        if len(figures) != ranks:
            yield f"{name}: of {counted(len(figures), 'rank')}, but the layout has {ranks}"


def _unfit(name: str, samples: Samples, count: int | None, ranks: int) -> Iterator[str]:
    if len(samples) != (count or len(samples) or 1):
        yield f"has {counted(len(samples), 'round')}, wanted {count or 'one or more'}"
    for row in samples:
        if len(row) != ranks:
            yield f"a round of {counted(len(row), 'rank')}, but the layout has {ranks}"
    for seconds in chain.from_iterable(samples):
        if not _is_time(name, seconds):
            yield f"{seconds:g} s is no time of an iteration"


def _is_time(name: str, seconds: float) -> bool:
    if "logged" in name:  # by DDP's own clock marks, whose differences may be below zero
        return abs(seconds) <= _LONGEST_S
    return 0 <= seconds <= _LONGEST_S and (seconds > 0 or not name.endswith(_NEVER_ZERO))


def _tables(rounds: Rounds) -> Iterator[tuple[str, Samples, int | None]]:
    """All samples by name, and how many rounds they must have; None: any, but one at least."""
    alone = rounds.alone
    steps: dict[str, Steps] = {"alone": alone}
    if alone.accumulating:
        steps["alone.accumulating"] = alone.accumulating
    steps |= {f"variants.{i}": variant for i, variant in enumerate(rounds.variants)}
    for name, each in steps.items():
        for part in Steps.model_fields:
            samples = getattr(each, part)
            if part != "stolen_s" or samples:
                yield f"{name}.{part}", samples, len(each.whole_s) or None
        if isinstance(each, VariantSamples):
            for part, samples in each.logged or ():
                yield f"{name}.logged.{part}", samples, len(each.whole_s)
    if alone.ddp_backward_s:
        yield "alone.ddp_backward_s", alone.ddp_backward_s, None
    for part, samples in alone.beside or ():
        yield f"alone.beside.{part}", samples, len(alone.beside.layers_s) if alone.beside else None
    for i, row in enumerate(rounds.all_reduce):
        yield f"all_reduce.{i}.samples_s", row.samples_s, None


def save_rounds(rounds: Rounds, path: Path) -> None:
    """Write rounds whole, or leave the old ones as they were; raises OSError."""
    write_atomically(path, rounds.model_dump_json(by_alias=True) + "\n")
