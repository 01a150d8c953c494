"""How far the wall clocks of a job's ranks are apart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from calibrate.measure.host.doctor import Finding
from calibrate.measure.ranks.job import Job, taking_part
from calibrate.records.record import JobOptions

_EXCHANGES = 20
_SKEW_S = 0.1


def clocks_of_nodes() -> list[Finding]:
    """Findings about nodes whose clock differs from the first's; every rank of the job calls this.

    Raises MeasureError where the ranks do not meet within a minute.
    """
    with taking_part(JobOptions(timeout_s=60.0)) as job:
        offsets = clock_offsets(job)
        firsts = range(0, job.world_size, job.place.local_world_size)
        return check_clocks({rank: offsets[rank] for rank in firsts if rank})


def clock_offsets(job: Job) -> dict[int, tuple[float, float]]:
    """Each rank's (seconds ahead of rank 0, bound of the error); every rank calls this.

    A clock is read after a gather that began at `sent`, and told in another that ends before
    `back`: so it was read between the two.
    """
    exchanges = []
    for _ in range(_EXCHANGES):
        sent = time.time()
        job.numbers([0.0])
        times = job.numbers([time.time()])
        exchanges.append((sent, [row[0] for row in times], time.time()))
    mine = {
        rank: clock_offset([(sent, times[rank], back) for sent, times, back in exchanges])
        for rank in range(1, job.world_size)
    }
    return job.from_first(mine)


def clock_offset(exchanges: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds that another clock is ahead, and the bound of the error.

    Each exchange is (sent, the other's clock, received back); the quickest one tells the most:
    half its round trip bounds the error (D. Mills, RFC 5905, section 8).
    """
    sent, theirs, back = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return theirs - (sent + back) / 2, (back - sent) / 2


def check_clocks(offsets: Mapping[int, tuple[float, float]]) -> list[Finding]:
    """Findings about ranks whose clock surely differs from rank 0's by more than 0.1 s."""
    return [
        Finding(
            "warning",
            f"the clock of rank {rank} is {abs(ahead):.3f} s "
            f"{'ahead of' if ahead > 0 else 'behind'} rank 0's; run NTP or chrony: traces of "
            "several ranks will not line up",
        )
        for rank, (ahead, error) in sorted(offsets.items())
        if abs(ahead) - error > _SKEW_S
    ]
