"""Published hosts: what an operator took each of them, from `tests/data/published-hosts.csv`.

python tools/published_hosts.py: microseconds by host, their geometric mean, and their spread.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from ddpsim.scenario.catalog import device_table

__all__ = ["PublishedHost", "preset_operator_s", "published_hosts", "spread", "usual_s"]

FILE = Path(__file__).resolve().parent.parent / "tests" / "data" / "published-hosts.csv"


class PublishedHost(NamedTuple):
    """A host, the year of its times, what it ran, and the seconds an operator of each."""

    name: str
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
        found.append(PublishedHost(name, int(own[0]["year"]), ran, tuple(map(_operator_s, own))))
    return found


def _operator_s(row: dict[str, str]) -> float:
    return (float(row["time_ms"]) - float(row["other_ms"])) / 1e3 / int(row["kernels"])


def preset_operator_s(preset: str = "a100-sxm-80gb") -> float:
    """Seconds an operator, with one launch, as a preset takes them."""
    table = device_table(preset)
    return float(table["operator_s"] + table["launch_s"])


def usual_s(hosts: Sequence[PublishedHost]) -> float:
    """The geometric mean of hosts, seconds an operator."""
    return geometric_mean([host.operator_s for host in hosts])


def spread(hosts: Sequence[PublishedHost], about_s: float) -> float:
    """Root mean square of the logarithms about a time."""
    return math.sqrt(sum(math.log(host.operator_s / about_s) ** 2 for host in hosts) / len(hosts))


def main() -> None:
    """Print every host's figure, and what they come to."""
    hosts, preset_s = published_hosts(), preset_operator_s()
    for host in hosts:
        print(f"{host.name:12} {host.year} {1e6 * host.operator_s:5.1f} us   {', '.join(host.ran)}")
    usual_us = 1e6 * usual_s(hosts)
    off = spread(hosts, preset_s)
    print(f"{len(hosts)}: {usual_us:.1f} us; {off:.2f} about the presets' {1e6 * preset_s:.0f}")


if __name__ == "__main__":
    main()
