"""What NCCL's log of a job says, and that it settles what step times leave open."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs.faulty_boxes import TWO_A6000, ring_of
from jobs.faulty_jobs import BERT, BETWEEN_NODES, IB_NODES, ONE_NODE, PCIE_NODE, TCP_NODES, Job

import ddpsim
from ddpsim.diagnosis.case import Case
from ddpsim.diagnosis.facts import facts_of
from ddpsim.errors import ImportFailedError, InputError
from ddpsim.importers.nccl.debug_log import Connection, read_debug_log
from ddpsim.report.diagnosis import render_diagnosis
from ddpsim.scenario.quantity import SourceFile

GBIT = {"bandwidth": "1 Gbit/s", "latency": "50 us"}
PREFIX = "[1,0]<stdout>:gpu-node-7:41:97 [0] NCCL INFO "


def log(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "nccl.log"
    path.write_text(
        "\n".join(["loss 3.1", *(PREFIX + line for line in lines), "loss 3.0"]), "utf-8"
    )
    return path


def read(path: Path) -> tuple[Connection, ...]:
    return read_debug_log(SourceFile(path.name, path)).connections


def channels(inside: str, between: str, nics: int = 1) -> list[str]:
    """Those of 2 x 4 ranks in a ring."""
    within = [f"Channel 00/0 : {i}[{i}] -> {i + 1}[{i + 1}] via {inside}" for i in (0, 1, 2)]
    across = [
        f"Channel 0{n}/0 : 3[3] -> 4[0] [send] via {between.replace('#', str(n))}"
        for n in range(nics)
    ]
    return within + across


@pytest.mark.parametrize(
    ("line", "connection"),
    [
        ("0[0] -> 1[1] via P2P/CUMEM/read", Connection(0, 1, "P2P", "CUMEM", None, False)),
        ("14[e1000] -> 13[a7000] via P2P/direct pointer/read",
         Connection(14, 13, "P2P", "direct pointer", None, False)),
        ("0[0] -> 1[1] via P2P/indirect/2[2]", Connection(0, 1, "P2P", "indirect", None, False)),
        ("1[1] -> 0[0] via SHM/direct/direct", Connection(1, 0, "SHM", "direct", None, False)),
        ("3[1] -> 1[1] [send] via NET/IB/2/GDRDMA", Connection(3, 1, "NET", "IB", 2, True)),
        ("3[1] -> 0[0] [send] via NET/IB/12/GDRDMA/Shared",
         Connection(3, 0, "NET", "IB", 12, True)),
        ("26[2] -> 33[1] [receive] via NET/IBext_v8/4",
         Connection(26, 33, "NET", "IBext_v8", 4, False)),
        ("0[0] -> 8[0] [send] via NET/Socket/0", Connection(0, 8, "NET", "Socket", 0, False)),
        ("0[0] -> 8[0] [send] via NET/AWS Libfabric/3(0)/GDRDMA",
         Connection(0, 8, "NET", "AWS Libfabric", 3, True)),
    ],
)  # fmt: skip
def test_lines_of_many_versions_are_read(tmp_path: Path, line: str, connection: Connection) -> None:
    assert read(log(tmp_path, f"Channel 00/0 : {line}")) == (connection,)
    assert read(log(tmp_path, f"Channel 00 : {line}")) == (connection,)


def test_a_file_in_which_nccl_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportFailedError, match=r"holds no line of NCCL such as 'Channel 00/0"):
        read(log(tmp_path, "Bootstrap : Using eth0:10.0.0.1<0>"))
    with pytest.raises(ImportFailedError, match="cannot be read"):
        read(tmp_path / "nothing.log")


@given(text=st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.log"
    path.write_text(f"Channel 00 : 0[0] -> 1[1] via {text}", "utf-8", errors="replace")
    try:
        found = read(path)
    except ImportFailedError:
        return
    assert all(connection.sender == 0 for connection in found[:1])


def facts(tmp_path: Path, cluster: dict[str, object], *lines: str) -> dict[str, tuple[str, str]]:
    debug = read_debug_log(SourceFile("nccl.log", log(tmp_path, *lines)))
    found = facts_of(debug, Case.of(Job("a job", "", BERT, cluster).scenario()))
    return {fact.name: (fact.expected, fact.seen) for fact in found}


def test_what_is_expected_follows_the_scenario(tmp_path: Path) -> None:
    good = facts(tmp_path, IB_NODES, *channels("P2P/CUMEM", "NET/IB/#/GDRDMA", nics=4))
    assert len(good) == 7
    assert all(expected == seen for expected, seen in good.values())
    bad = facts(tmp_path, IB_NODES, *channels("SHM/direct", "NET/Socket/0"))
    assert bad["inside a node"] == ("P2P", "host memory")
    assert bad["between nodes"] == ("RDMA", "TCP")
    few = facts(tmp_path, IB_NODES, *channels("P2P/CUMEM", "NET/IB/#", nics=2))
    assert few["GPUDirect RDMA"] == ("yes", "no")
    assert few["NICs of a node"] == ("all", "fewer")
    tcp = facts(tmp_path, TCP_NODES, "Channel 00 : 0[0] -> 1[0] [send] via NET/Socket/0")
    assert tcp["between nodes"] == ("TCP", "TCP")
    each = "AllReduce: opCount 3 sendbuff 0x7f recvbuff 0x7f count 6553600"
    logged = facts(tmp_path, ONE_NODE, *channels("P2P/x", "P2P/x"), each)
    assert logged["collectives in the log"] == ("none", "each")
    set_by = "NCCL_PROTO set by environment to LL."
    assert facts(tmp_path, ONE_NODE, *channels("P2P/x", "P2P/x"), set_by)["protocol"][1] == "LL"
    pcie = facts(tmp_path, PCIE_NODE, "Channel 00 : 0[0] -> 1[0] via SHM/direct/direct")
    assert pcie["inside a node"] == ("host memory", "host memory")
    pcie = facts(tmp_path, PCIE_NODE, "Channel 00 : 0[0] -> 1[0] via P2P/CUMEM")
    assert pcie["inside a node"] == ("P2P", "P2P")
    pcie = facts(tmp_path, PCIE_NODE, "Channel 00 : 0[0] -> 1[0] via NET/Socket/0")
    assert pcie["inside a node"] == ("P2P", "host memory")
    plugin = facts(tmp_path, IB_NODES, *channels("P2P/CUMEM", "NET/IBext_v8/#", nics=4))
    assert plugin["GPUDirect RDMA"] == ("yes", "no")


def test_the_path_between_cards_is_the_one_that_nccl_takes(tmp_path: Path) -> None:
    """Without a log both ways through PCIe may be the slow one."""
    job = Job("a box", "", BERT, TWO_A6000).scenario()
    slow = {"measured": "1.2 s", "exposed": "1.1 s"}
    odds = {}
    for way in ("SHM/direct/direct", "P2P/CUMEM", ""):
        told = {"nccl_log": log(tmp_path, *ring_of(2, way))} if way else {}
        causes = ddpsim.diagnose(job, **slow, **told).causes
        known = {cause.key: cause.probability for cause in causes}
        odds[way[:3]] = known["slow_host_path"] / known["slow_peer_to_peer"]
    assert odds["P2P"] < 0.1 < odds[""] < 10 < odds["SHM"]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("one NIC of four", channels("P2P/CUMEM", "NET/IB/0/GDRDMA")),
        ("no GPUDirect RDMA", channels("P2P/CUMEM", "NET/IB/#", nics=4)),
        ("NCCL_IB_DISABLE=1", channels("P2P/CUMEM", "NET/Socket/0")),
    ],
)
def test_a_log_settles_which_part_of_the_network_it_is(
    tmp_path: Path, name: str, lines: list[str]
) -> None:
    """Step times leave these open."""
    job = next(job for job in BETWEEN_NODES if job.name == name)
    found = ddpsim.diagnose(job.scenario(), **job.texts(), nccl_log=log(tmp_path, *lines))
    assert found.causes[0].key == job.cause
    assert found.causes[0].probability > 0.6
    assert found.check is None or found.check.key != "nccl_log"
    assert re.fullmatch(r"ddpsim\.diagnosis/1", found.to_dict()["schema"])


def test_the_log_of_another_job_is_refused(tmp_path: Path) -> None:
    ranks = (f"comm 0x1 rank {rank} nranks 2 cudaDev {rank} busId 1000" for rank in (0, 1))
    other = tmp_path / "other.log"
    lines = ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", *ranks)
    other.write_text("\n".join(f"gpu-7:41:97 [0] NCCL INFO {line}" for line in lines))
    with pytest.raises(InputError, match=r"of 1 x 2 ranks, but the scenario has 2 x 4"):
        diagnosed(IB_NODES, other)
    other.write_text(other.read_text().rpartition("\n")[0])  # of rank 0 alone
    with pytest.raises(InputError, match=r"of 2 ranks, but the scenario has 8"):
        diagnosed(IB_NODES, other)
    gloo = {"nodes": 2, "gpus_per_node": 1, "device": "cpu-core", "inter_node": GBIT}
    with pytest.raises(InputError, match=r"is NCCL's, and ddp.backend is gloo"):
        diagnosed(gloo, other, backend="gloo")


def diagnosed(cluster: dict[str, object], path: Path, backend: str = "nccl") -> None:
    scenario = {
        "schema": "ddpsim/1",
        "workload": {**BERT, "precision": "fp32"},
        "ddp": {"backend": backend},
        "cluster": cluster,
    }
    ddpsim.diagnose(ddpsim.load_scenario(scenario), "300 ms", nccl_log=path)


def test_what_a_log_shows_comes_first_where_no_other_cause_is_likely(tmp_path: Path) -> None:
    """Though no port's rate makes the measured step; it is not said what would be without it."""
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "llama-1b", "batch_per_rank": 4, "precision": "amp-bf16"},
        "cluster": {"machine": "dgx-h100", "nodes": 2},
    }
    path = log(
        tmp_path,
        "NCCL version 2.21.5+cuda12.4",
        "Channel 00/0 : 9[1] -> 0[0] [receive] via NET/Socket/0",
        "Channel 00/0 : 0[0] -> 7[7] via P2P/CUMEM/read",
    )
    found = ddpsim.diagnose(scenario, "1.9 s", nccl_log=path)
    assert [cause.key for cause in found.causes[:2]] == ["management_network", "sockets"]
    first = found.causes[0]
    assert first.probability > 0.5
    assert first.mended_s is None
    assert "not the measured one" in render_diagnosis(found, "job.yaml")
