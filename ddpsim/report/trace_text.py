"""The text about a trace that was written: where it is, what it shows, what to do with it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpsim.errors import printable
from ddpsim.report.trace import Overlap, Traced
from ddpsim.units import format_bytes

_HTA = "HolisticTraceAnalysis"


@dataclass(frozen=True)
class Written:
    """Paths of a trace that was written, with sizes in bytes.

    `others`: files in the ranks' folder that HTA will read as well.
    """

    merged: str
    merged_bytes: int
    ranks: str
    first_rank: str
    ranks_bytes: int
    others: Sequence[str]


def notes(traced: Traced, written: Written) -> Iterator[str]:
    """What to know before trusting these files."""
    shown = len(traced.ranks)
    if shown < traced.world_size:
        yield f"{shown} of {traced.world_size} ranks: {traced.choice} (--ranks chooses others)"
    if not traced.has_kernels:
        yield (f"gloo runs no kernels, nor does a CPU: {_HTA} finds none in the ranks' files")
    elif traced.overlap(traced.ranks[0]).fraction is None:
        yield f"no communication takes time: {_HTA} calls its overlap NaN"
    if written.others:
        names = ", ".join(written.others[:4]) + ", ..." * (len(written.others) > 4)
        yield f"{written.ranks} also holds {names}: {_HTA} reads them too"


def summary(traced: Traced, written: Written) -> str:
    """What was written, what it shows, and what to do with it."""
    first, last = traced.steps[0], traced.steps[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    warmup = traced.timeline.warmup
    kind = "steady" if first >= warmup else f"the first {warmup} warm up"
    count = len(traced.ranks)
    ranks = f"{count} rank{'s' * (count > 1)}"
    rank = traced.timeline.slowest_rank
    whose = f"rank {rank}, the slowest"
    if rank not in traced.ranks:
        rank = traced.ranks[0]
        whose = f"rank {rank}"
    files = f"{written.ranks}{os.sep}{written.first_rank}{' ...' * (count > 1)}"
    lines = [
        f"{written.merged}   {format_bytes(written.merged_bytes)}   {ranks}, {steps} ({kind})",
        f"{files}   {format_bytes(written.ranks_bytes)}   a file for each rank",
        "",
        *_overlap(traced.overlap(rank), whose, has_kernels=traced.has_kernels),
        f"next        open {written.merged} at https://ui.perfetto.dev",
    ]
    if traced.has_kernels:
        code = (
            "from hta.trace_analysis import TraceAnalysis as T; "
            f"print(T(trace_dir={json.dumps(written.ranks)}).get_comm_comp_overlap(visualize=False))"
        )
        lines += [
            f"            pip install {_HTA}",
            f"            HTA_DISABLE_NS_ROUNDING=1 python -c {shlex.quote(code)}",
        ]
    return printable("\n".join(lines))


def _overlap(overlap: Overlap, whose: str, *, has_kernels: bool) -> Iterator[str]:
    if overlap.fraction is None or overlap.under_kernels is None:
        return
    yield f"overlap     {overlap.fraction:.2%} of communication is hidden, on {whose}"
    if has_kernels and overlap.idle_comm_ns:
        under = f"{overlap.under_kernels:.2%} is under kernels"
        yield f"            {under}, all that {_HTA} calls hidden"
