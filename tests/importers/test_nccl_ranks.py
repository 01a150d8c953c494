"""How many nodes and GPUs a log is of."""

from __future__ import annotations

import re

import pytest
from logs.measured_files import Write
from logs.nccl_log_writer import nccl_log

from ddpsim.errors import ImportFailedError
from ddpsim.importers.all_reduce import read_all_reduce


def _without(text: str, *ranks: int) -> str:
    kept = [line for line in text.splitlines() if not any(f"Rank {r:2} " in line for r in ranks)]
    return "\n".join(kept)


def test_ranks_that_are_not_all_listed(write: Write) -> None:
    text = nccl_log(root=True, nodes=2, gpus=8)
    for gone, said in (
        ((0,), "lists ranks 1, 2, 3, 4, 5, 6, 7, 8, ..., but others are missing (0), so how many"),
        (
            (*range(1, 7), *range(8, 15)),
            "lists ranks 0, 7, 15, but others are missing (1, 2, 3, 4, 5, 6, 8, 9, ...), so how",
        ),
        (range(8, 16), "busbw/algbw is 1.8743, but an all-reduce of the 8 ranks that are listed"),
    ):
        with pytest.raises(ImportFailedError, match=re.escape(said)):
            read_all_reduce(write(_without(text, *gone)))


def test_a_digit_of_busbw_tells_15_ranks_from_16(write: Write) -> None:
    text = nccl_log(root=True, nodes=1, gpus=16, times={2**30: 5000.0})
    assert read_all_reduce(write(text)).world_size == 16
    with pytest.raises(ImportFailedError, match=r"busbw/algbw is 1\.875\d*, but an all-reduce of"):
        read_all_reduce(write(_without(text, 15)))


def test_nodes_of_unequal_counts_are_not_alike(write: Write) -> None:
    """12 ranks are no 2 x 6 where one node has 8."""
    text = nccl_log(root=True, nodes=1, gpus=12)
    for rank in range(8, 12):
        text = text.replace(f"on node0 device {rank:2}", f"on node1 device {rank:2}")
    with pytest.raises(ImportFailedError, match="lists 12 ranks on 2 nodes, which are not alike"):
        read_all_reduce(write(text))


def test_two_nodes_of_one_name(write: Write) -> None:
    """Known by their addresses, of which nccl-tests prints what is before the first dot."""
    text = re.sub(r"node\d device", "10 device", nccl_log(root=True))
    said = "lists device 0 [0x00] of 10 for ranks 0 and 2: if two nodes go by this name, as nccl-"
    with pytest.raises(ImportFailedError, match=re.escape(said)):
        read_all_reduce(write(text))
    apart = re.sub(r"device +\d", "device  0", nccl_log(root=True))  # one GPU in each container
    assert read_all_reduce(write(apart)).nodes == 2
