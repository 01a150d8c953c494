"""Sizes that a log does not have."""

from __future__ import annotations

import pytest

from ddpsim.cluster.cost import AllReduceLogCost
from ddpsim.cluster.transfers import duration_ns
from ddpsim.errors import InputError
from ddpsim.importers.all_reduce import AllReduceLog


def log(*samples: tuple[int, float]) -> AllReduceLogCost:
    return AllReduceLogCost(AllReduceLog("ar.log", "nccl-tests", 2, 8, samples))


def test_a_sum_of_norms_takes_the_latency_of_a_log_from_8_bytes_on() -> None:
    sent = log((8, 30e-6), (2**20, 90e-6)).transfer("all_reduce", 4)
    assert duration_ns(sent) == 30_000


def test_a_log_of_large_messages_tells_no_latency() -> None:
    with pytest.raises(InputError, match="lies outside the sizes measured"):
        log((2**20, 90e-6), (2**21, 180e-6)).transfer("all_reduce", 4)
