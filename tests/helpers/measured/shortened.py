"""`python -m measured.shortened OPTIONS`: a rank of two that measures all kinds, in less time.

Beside compute, sizes of messages differ in nothing but time: the smallest is kept, and float16
beside one of the works.
"""

from __future__ import annotations

from calibrate.measure.cluster.options import Options
from calibrate.measure.cluster.plan import MIB, Task, default_plan
from calibrate.measure.cluster.session import measure
from calibrate.measure.ranks.rank import run_rank
from calibrate.records.record import HALF, Layout


def _is_kept(task: Task) -> bool:
    first = task.first
    if first.kind != "compute" or first.size_bytes == MIB:
        return True
    return "gemm" in first.variant and first.variant.endswith(HALF)


def _measure(text: str) -> None:
    options = Options.model_validate_json(text)
    layout = Layout(nodes=1, gpus_per_node=2, line_rate_bytes_per_s=None)
    plan = default_plan(layout, gpu=False, data_loader=options.data_loader)
    measure(options, [task for task in plan if _is_kept(task)])


if __name__ == "__main__":
    run_rank(_measure)
