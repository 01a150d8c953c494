"""How fast a machine was while a file was measured: by its compute beside which nothing is sent.

Such compute takes as long at every line rate; what it takes longer in one file than in another
others on the machine did to it, and to all else in that file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from calibrate.ddp_rounds import load_rounds, slowest
from calibrate.record import WORKS, load_record

__all__ = ["slowness"]

_ALONE = tuple(f"{work} alone" for work in WORKS)


def slowness(files: Iterable[Path]) -> dict[Path, float]:
    """How many times as long each file's bare compute took as in the fastest of these files.

    Of records (`record*.json`) the pieces of compute, of rounds the model without DDP, each
    against its like; the most of it. A file that holds no bare compute is left out.
    """
    bare = {file: _bare_s(file) for file in files}
    least: dict[str, float] = {}
    for found in bare.values():
        for what, seconds in found.items():
            least[what] = min(seconds, least.get(what, seconds))
    return {
        file: max(seconds / least[what] for what, seconds in found.items())
        for file, found in bare.items()
        if found
    }


def _bare_s(file: Path) -> dict[str, float]:
    """Median seconds of each kind of bare compute."""
    if not file.name.startswith("record"):
        rounds = load_rounds(file)
        what = f"{rounds.model} on {rounds.layout.world_size} ranks"
        return {what: median(slowest(rounds.calm().alone.whole_s))}
    times: dict[str, list[float]] = {}
    for measurement in load_record(file).measurements:
        if measurement.kind == "compute" and measurement.variant in _ALONE:
            times.setdefault(measurement.variant, []).extend(measurement.samples_s)
    return {what: median(found) for what, found in times.items()}
