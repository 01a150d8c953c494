"""How far the wall clocks of a job's ranks are apart."""

from __future__ import annotations

import time
from collections.abc import Callable

from calibrate.measure.doctor import clock_offset
from calibrate.measure.job import Job

__all__ = ["clock_offsets"]

_EXCHANGES = 20


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
