"""The clocks of a job's nodes, compared."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

from calibrate.measure.host.clocks import check_clocks, clock_offset, clock_offsets
from calibrate.measure.ranks.job import join
from calibrate.measure.ranks.launch import free_port

pytestmark = pytest.mark.usefixtures("warm_python")


def test_clock_offset_of_the_quickest_exchange() -> None:
    exchanges = [(0.0, 7.9, 4.0), (10.0, 15.5, 11.0), (20.0, 26.0, 23.0)]
    assert clock_offset(exchanges) == (5.0, 0.5)
    (finding,) = check_clocks({1: (5.0, 0.5), 2: (0.2, 0.15)})
    assert str(finding) == (
        "warning: the clock of rank 1 is 5.000 s ahead of rank 0's; "
        "run NTP or chrony: traces of several ranks will not line up"
    )


@pytest.mark.parametrize(
    ("ahead_s", "says"),
    [
        (0, "all nodes were reached, and their clocks agree"),
        (5, "warning: the clock of rank 1 is 5.0"),
    ],
)
def test_doctor_compares_the_clocks_of_a_jobs_nodes(ahead_s: int, says: str) -> None:
    """Two ranks, each of a node of its own; the second one's clock is ahead."""
    port = free_port()
    code = (
        "import sys, time; real, ahead = time.time, float(sys.argv.pop(1)); "
        "time.time = lambda: real() + ahead; from calibrate.cli import main; main()"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(ahead_s * rank), "doctor"],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    first, second = (rank.communicate(timeout=120)[0] for rank in ranks)
    assert says in first
    assert "clock of rank" not in second
    assert [rank.returncode for rank in ranks] == [1, 1]  # as lo reaches no other node


def test_clocks_of_a_job_of_one_rank(alone: None) -> None:
    job = join(10.0)
    assert clock_offsets(job) == {}
    job.leave()
