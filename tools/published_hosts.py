"""Published hosts: what an operator took each of them, from `tests/data/published-hosts.csv`."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

__all__ = ["PublishedHost", "published_hosts"]

FILE = Path(__file__).resolve().parent.parent / "tests" / "data" / "published-hosts.csv"


class PublishedHost(NamedTuple):
    """A host, its GPU, the year of its times, what it ran, and the seconds an operator of each."""

    name: str
    gpu: str
    year: int
    ran: tuple[str, ...]
    operators_s: tuple[float, ...]

    @property
    def operator_s(self) -> float:
        """Seconds an operator, launch and all."""
        return geometric_mean(self.operators_s)


def published_hosts(file: Path = FILE) -> list[PublishedHost]:
    """All hosts, in the file's order."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    found = []
    for name in dict.fromkeys(row["host"] for row in rows):
        own = [row for row in rows if row["host"] == name]
        ran = tuple(f"{row['model']} {row['pass']}" for row in own)
        found.append(
            PublishedHost(
                name, own[0]["gpu"], int(own[0]["year"]), ran, tuple(map(_operator_s, own))
            )
        )
    return found


def _operator_s(row: dict[str, str]) -> float:
    return (float(row["time_ms"]) - float(row["other_ms"])) / 1e3 / int(row["kernels"])
