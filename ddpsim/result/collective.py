"""One collective over message sizes, as `ddpsim.collective/1` lists it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "ddpsim.collective/1"


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One message: `algbw` = size / time, `busbw` = what each rank's link carries of it.

    `sent_bytes`: what a GPU sends, 2(N-1)/N of the size in an all-reduce of N ranks, on average in
    a tree; to parameter servers the size. NVLink's switches that add spare about half of it.
    The time lies between `low_s` and `high_s` in 80 % of cases. `choice` is the algorithm and
    protocol, "" where a log or a profile says the time.
    `measured_s`: from the log that it is compared with.
    """

    size_bytes: int
    time_s: float
    low_s: float
    high_s: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    sent_bytes: float
    choice: str = ""
    measured_s: float | None = None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured, of the time."""
        return None if self.measured_s is None else self.time_s / self.measured_s - 1


@dataclass(frozen=True)
class CollectiveTable:
    """A collective over sizes on the ranks of a cluster."""

    operation: str
    nodes: int
    gpus_per_node: int
    network: str
    rows: tuple[CollectiveRow, ...]
    against: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Gives JSON's types (schema `ddpsim.collective/1`)."""
        rows = [asdict(row) | {"error": row.error} for row in self.rows]
        return {"schema": SCHEMA, **asdict(self), "rows": rows}
