"""All-reduces by size as nccl-tests prints them, so that a table can be laid beside a real log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

__all__ = ["CollectiveRow", "CollectiveTable", "render_table"]

SCHEMA = "ddpsim.collective/1"


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One message: `algbw` = size / time, `busbw` = what each rank's link carries of it.

    `choice` is the algorithm and protocol, "" where a log or a profile says the time.
    `measured_s`: of a log that it is held against.
    """

    size_bytes: int
    time_s: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
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
        """As JSON's types (schema `ddpsim.collective/1`)."""
        rows = [asdict(row) | {"error": row.error} for row in self.rows]
        return {"schema": SCHEMA, **asdict(self), "rows": rows}


def render_table(table: CollectiveTable) -> str:
    """nccl-tests' columns, with those of ours behind."""
    return "\n".join(_lines(table))


def _lines(table: CollectiveTable) -> Iterator[str]:
    ranks = table.nodes * table.gpus_per_node
    yield f"# {table.operation}, {ranks} ranks ({table.nodes} x {table.gpus_per_node}), in place"
    yield f"# {table.network}"
    held = table.against is not None
    more = f"{'measured':>11}{'error':>8}" if held else ""
    yield (
        f"#{'size':>14}{'count':>14}{'type':>8}{'redop':>7}{'time':>11}{'algbw':>9}{'busbw':>9}"
        f"{more}  choice"
    )
    units = f"{'(us)':>11}{'':>8}" if held else ""
    yield (
        f"#{'(B)':>14}{'(elements)':>14}{'':>8}{'':>7}{'(us)':>11}{'(GB/s)':>9}{'(GB/s)':>9}{units}"
    ).rstrip()
    redop = "sum" if table.operation == "all_reduce" else "none"
    for row in table.rows:
        yield _row(row, redop, held=held)
    yield from _summary(table)


def _row(row: CollectiveRow, redop: str, *, held: bool) -> str:
    beside = ""
    if held:
        beside = f"{'-':>11}{'-':>8}"
        if row.measured_s is not None and row.error is not None:
            beside = f"{row.measured_s * 1e6:>11.2f}{row.error:>+8.1%}"
    return (
        f" {row.size_bytes:>14}{row.size_bytes // 4:>14}{'float':>8}{redop:>7}"
        f"{row.time_s * 1e6:>11.2f}{row.algbw_bytes_per_s / 1e9:>9.2f}"
        f"{row.busbw_bytes_per_s / 1e9:>9.2f}{beside}  {row.choice}"
    ).rstrip()


def _summary(table: CollectiveTable) -> Iterator[str]:
    if table.against is None:
        return
    errors = [abs(row.error) for row in table.rows if row.error is not None]
    yield f"# against {table.against}: {len(errors)} sizes, {_of(errors)}"


def _of(errors: Sequence[float]) -> str:
    return f"median error {median(errors):.1%}, worst {max(errors):.1%}"
