"""A collective by size as nccl-tests prints them, so that a table can be laid beside a real log."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from ddpsim.report.lines import as_text
from ddpsim.result.collective import CollectiveRow, CollectiveTable
from ddpsim.units import format_bytes


@as_text
def render_table(table: CollectiveTable) -> Iterator[str]:
    """The columns of nccl-tests, then ddpsim's own."""
    ranks = table.nodes * table.gpus_per_node
    yield f"# {table.operation}, {ranks} ranks ({table.nodes} x {table.gpus_per_node}), in place"
    yield f"# {table.network}"
    held = table.against is not None
    more = f"{'measured':>11}{'error':>8}" if held else ""
    yield (
        f"#{'size':>14}{'count':>14}{'type':>8}{'redop':>7}{'time':>11}{'algbw':>9}{'busbw':>9}"
        f"{more}{'a GPU sends':>13}{'80 % of times':>22}  choice"
    )
    units = f"{'(us)':>11}{'':>8}" if held else ""
    yield (
        f"#{'(B)':>14}{'(elements)':>14}{'':>8}{'':>7}{'(us)':>11}{'(GB/s)':>9}{'(GB/s)':>9}{units}"
        f"{'':>13}{'(us)':>22}"
    )
    redop = "sum" if table.operation in ("all_reduce", "reduce_scatter") else "none"
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
        f"{row.busbw_bytes_per_s / 1e9:>9.2f}{beside}"
        f"{format_bytes(row.sent_bytes):>13}"
        f"  {f'{row.low_s * 1e6:.4g} to {row.high_s * 1e6:.4g}':>20}  {row.choice}"
    )


def _summary(table: CollectiveTable) -> Iterator[str]:
    if table.against is None:
        return
    errors = [abs(row.error) for row in table.rows if row.error is not None]
    spread = f"median error {median(errors):.1%}, worst {max(errors):.1%}"
    yield f"# against {table.against}: {len(errors)} sizes, {spread}"
