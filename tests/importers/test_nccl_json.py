"""The JSON of nccl-tests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from logs.measured_files import Write, json_of
from logs.nccl_log_writer import TIMES

from ddpsim.errors import ImportFailedError
from ddpsim.importers.all_reduce import read_all_reduce


@pytest.mark.parametrize(
    ("threads", "gpus"),
    [(1, 1), (1, 4), (2, 1), (2, 4)],
    ids=["a process a GPU", "four GPUs a process", "two threads", "two threads of four GPUs"],
)
def test_the_json_of_nccl_tests(write: Write, threads: int, gpus: int) -> None:
    log = read_all_reduce(write(json.dumps(json_of(threads=threads, gpus=gpus)), "log.json"))
    assert (log.kind, log.nodes, log.gpus_per_node) == ("nccl-tests JSON", 2, 2 * threads * gpus)
    assert log.gpus == ("GPU",)
    assert log.samples == tuple((size, pytest.approx(us * 1e-6)) for size, us in TIMES.items())


def test_json_whose_sums_nobody_checked(write: Write) -> None:
    """`-c 0` writes null for what the text calls N/A."""
    log = json_of()
    for row in log["results"]:
        row |= {"experiment_name": "AllReduce", "redop": "sum", "root": "    -1"}
        row["in_place"]["nwrong"] = None
    log["results"][0]["in_place"].pop("nwrong")
    assert len(read_all_reduce(write(json.dumps(log), "log.json")).samples) == len(TIMES)


def _of_two_groups(log: dict[str, Any]) -> None:
    log["config"]["devices"][1]["group"] = 1


def _to_a_root(log: dict[str, Any]) -> None:
    log["results"][1] |= {"redop": "sum", "root": "     0"}


def _called_another(log: dict[str, Any]) -> None:
    log["results"][1]["experiment_name"] = "SendRecv"


def _without_in_place(log: dict[str, Any]) -> None:
    log["results"][1]["in_place"] = None


def _of_wrong_sums(log: dict[str, Any]) -> None:
    log["results"][1]["in_place"]["nwrong"] = 7.0


def _of_the_processor(log: dict[str, Any]) -> None:
    log["results"][0]["in_place"]["cpu_time"] = log["results"][0]["in_place"].pop("time")


def _on_one_gpu(log: dict[str, Any]) -> None:
    for device in log["config"]["devices"]:
        device |= {"device": 0, "device_hex": "0000:0f:00"}


def _of_a_broadcast(log: dict[str, Any]) -> None:
    for row in log["results"]:
        row["in_place"]["bus_bw"] = row["in_place"]["alg_bw"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda log: log.pop("results"), "holds no results and config; wanted what"),
        (lambda log: log.pop("config"), "holds no results and config; wanted what"),
        (lambda log: log["results"].clear(), "its results are empty: nothing was measured"),
        (lambda log: log["config"].pop("devices"), "lists no devices, so its ranks are not known"),
        (lambda log: log["config"]["devices"].pop(), "lists 3 ranks on 2 nodes, which are not"),
        (_without_in_place, "result 2 has no in_place times, and DDP reduces in place"),
        (_of_the_processor, "result 1 has no time: -C measures the processor's"),
        (_of_wrong_sums, "nwrong of result 2 is 7.0: so many elements of the sum came out wrong"),
        (_of_two_groups, "lists devices of 2 groups, which reduced side by side"),
        (_to_a_root, "result 2 is of another collective (redop sum, root 0); wanted the log of"),
        (_called_another, "result 2 is of sendrecv; wanted the log of all_reduce_perf"),
        (_of_a_broadcast, "result 1: busbw/algbw is 1, but an all-reduce of the 4 ranks that"),
        (_on_one_gpu, "lists device 0 [0000:0f:00] of node0 for ranks 0 and 1: if two nodes go"),
    ],
)
def test_json_that_cannot_be_used(
    write: Write, spoil: Callable[[dict[str, Any]], object], message: str
) -> None:
    log = json_of()
    spoil(log)
    with pytest.raises(ImportFailedError, match=re.escape(message)):
        read_all_reduce(write(json.dumps(log), "log.json"))


def test_json_that_was_cut_off(write: Write) -> None:
    with pytest.raises(ImportFailedError, match=r"this is not JSON .*was the run cut off"):
        read_all_reduce(write(json.dumps(json_of())[:-20], "log.json"))
