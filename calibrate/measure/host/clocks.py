"""How far the wall clocks of a job's ranks are apart."""

from __future__ import annotations

import time
from collections.abc import Callable

from calibrate.measure.host.doctor import Finding, check_clocks, clock_offset
from calibrate.measure.ranks.job import Job, taking_part
from calibrate.records.record import JobOptions

_EXCHANGES = 20


def clocks_of_nodes(timeout_s: float = 60.0) -> list[Finding]:
    """Findings about nodes whose clock differs from the first's; every rank of the job calls this.

    Raises MeasureError where the ranks do not meet within `timeout_s`.
    """
    with taking_part(JobOptions(timeout_s=timeout_s)) as job:
        offsets = clock_offsets(job)
        firsts = range(0, job.world_size, job.place.local_world_size)
        return check_clocks({rank: offsets[rank] for rank in firsts if rank})


def clock_offsets(
    job: Job, clock: Callable[[], float] = time.time
) -> dict[int, tuple[float, float]]:
    """Each rank's (seconds ahead of rank 0, bound of the error); every rank calls this.

    A clock is read after a gather that began at `sent`, and told in another that ends before
    `back`: so it was read between the two.
    """
    exchanges = []
    for _ in range(_EXCHANGES):
        sent = clock()
        job.numbers([0.0])
        told = job.numbers([clock()])
        exchanges.append((sent, [row[0] for row in told], clock()))
    mine = {
        rank: clock_offset([(sent, told[rank], back) for sent, told, back in exchanges])
        for rank in range(1, job.world_size)
    }
    return job.from_first(mine)
