"""How fast a machine was while a file was measured: by its compute beside which nothing is sent.

Such compute takes as long at every line rate; what it takes longer in one file than in another
others on the machine did to it, and to all else in that file. Or it was another machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

from calibrate.records.record import LAYER, WORKS, Record, load_record
from calibrate.records.rounds import Rounds, load_rounds, slowest

LAYER_ALONE = f"{LAYER} alone"
_ALONE = tuple(f"{work} alone" for work in WORKS)
_Name = TypeVar("_Name")


def slowness(files: Iterable[Path]) -> dict[Path, float]:
    """How many times as long each file's bare compute took as in the fastest of these files.

    Of records (`record*.json`) the pieces of compute, of rounds the model without DDP and a
    record's layer, each against its like; the most of it. A file that holds no bare compute is
    left out.
    """
    return times_the_least({file: _bare_s(file) for file in files})


def times_the_least(bare_s: Mapping[_Name, Mapping[str, float]]) -> dict[_Name, float]:
    """How many times the least of its kind something took in each, the most of all kinds."""
    least: dict[str, float] = {}
    for found in bare_s.values():
        for what, seconds in found.items():
            least[what] = min(seconds, least.get(what, seconds))
    return {
        name: max(seconds / least[what] for what, seconds in found.items())
        for name, found in bare_s.items()
        if found
    }


def bare_compute_s(record: Record) -> dict[str, float]:
    """Median seconds of each piece of compute beside which nothing was sent."""
    times: dict[str, list[float]] = {}
    for measurement in record.measurements:
        if measurement.kind == "compute" and measurement.variant in _ALONE:
            times.setdefault(measurement.variant, []).extend(measurement.samples_s)
    return {what: median(found) for what, found in times.items()}


def bare_rounds_s(rounds: Rounds) -> dict[str, float]:
    """Median seconds of the model without DDP, and of a record's layer."""
    alone = rounds.calm().alone
    found = {f"{rounds.model} on {rounds.layout.world_size} ranks": median(slowest(alone.whole_s))}
    return found | ({LAYER_ALONE: median(slowest(alone.beside.layers_s))} if alone.beside else {})


def layer_s(records: Iterable[Record]) -> float | None:
    """Median seconds of a layer's two passes, the mean of the records; None if none has them."""
    found = [
        bare_s[LAYER_ALONE]
        for record in records
        if LAYER_ALONE in (bare_s := bare_compute_s(record))
    ]
    return fmean(found) if found else None


def _bare_s(file: Path) -> dict[str, float]:
    if file.name.startswith("record"):
        return bare_compute_s(load_record(file))
    return bare_rounds_s(load_rounds(file))
