"""`python -m measured.shortened OPTIONS`: a rank of two that measures all kinds, in less time.

Sizes of messages differ in nothing but time: of those beside compute the smallest is kept, and
float16 beside one of the works, as small; of the others all that are small, or too large to be
measured.
"""

from __future__ import annotations

from dataclasses import replace

from calibrate.measure.cluster import rounds
from calibrate.measure.cluster.plan import MIB, Options, Task, default_plan
from calibrate.measure.cluster.session import measure
from calibrate.measure.ranks.launch import run_rank
from calibrate.records.record import HALF, Layout

rounds._LAYERS["cpu"] = (4, 128, 32)
rounds._QUEUED_BYTES = 8 * MIB


def _is_kept(task: Task, budget_bytes: int) -> bool:
    first = task.first
    if first.kind == "compute":
        in_half = "gemm" in first.variant and first.variant.endswith(HALF)
        return first.size_bytes == MIB or in_half
    return first.size_bytes < 64 * MIB or task.memory_bytes > budget_bytes


def _small(task: Task) -> Task:
    if task.first.kind != "compute":
        return task
    return replace(task, slots=tuple(replace(slot, size_bytes=MIB) for slot in task.slots))


def _measure(options: Options) -> None:
    layout = Layout(nodes=1, gpus_per_node=2, line_rate_bytes_per_s=None)
    plan = default_plan(layout, gpu=False, data_loader=options.data_loader)
    budget_bytes = options.memory_budget_bytes or 0
    measure(options, [_small(task) for task in plan if _is_kept(task, budget_bytes)])


if __name__ == "__main__":
    run_rank(_measure, Options)
