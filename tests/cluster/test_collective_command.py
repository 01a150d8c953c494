"""`ddpsim collective` and the cluster of `ddpsim explain`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clusters.collectives import BASE, MIB, cluster
from logs.nccl_log_writer import nccl_log

from ddpsim.cluster.logs import LOG, OTHER_GPUS
from ddpsim.cluster.network import Network
from ddpsim.cluster.transfers import duration_ns
from ddpsim.planning.options import parse_sizes
from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.collective_times import collective_table
from ddpsim.prediction.resolve import resolve


def test_sizes_are_read_as_nccl_tests_writes_them() -> None:
    assert parse_sizes("8..64") == (8, 16, 32, 64)
    assert parse_sizes("1M..5M") == (MIB, 2 * MIB, 4 * MIB)
    assert parse_sizes("25 MiB,1K,4 kB") == (1024, 4000, 25 * MIB)
    for wrong in ("", "8..4", "x", "1..2", "3 furlongs"):
        with pytest.raises(ValueError, match=r"\S"):
            parse_sizes(wrong)


def test_the_table_has_nccl_tests_columns(cli: Callable[..., Any]) -> None:
    shown = cli("collective", "--machine", "dgx-a100", "--sizes", "1M..4M").out.splitlines()
    assert shown[0] == "# all_reduce, 8 ranks (1 x 8), in place"
    assert shown[2].split()[:8] == ["#", "size", "count", "type", "redop", "time", "algbw", "busbw"]
    size, count, kind, redop, time_us, algbw, busbw, *ours = shown[4].split()
    sent, unit, low, _, high, *choice = ours
    assert (sent, unit) == ("1.75", "MiB")  # 2(N-1)/N of 1 MiB
    assert float(low) < float(time_us) < float(high)
    assert (size, count, kind, redop) == ("1048576", "262144", "float", "sum")
    assert float(algbw) == pytest.approx(MIB / float(time_us) / 1e3, abs=0.01)
    assert float(busbw) == pytest.approx(1.75 * float(algbw), abs=0.02)
    assert choice == ["ring", "LL"]


def test_servers_send_what_all_gpus_wait_for(cli: Callable[..., Any]) -> None:
    servers = ("--set", "cluster.algorithm=parameter_server", "--set", "cluster.servers=2")
    told = cli("collective", "--machine", "dgx-a100", *servers, "--sizes", "1M", "--json").out
    table = json.loads(told)
    assert table["network"].endswith("; 2 servers, sending 4 times the size each")
    assert table["rows"][0]["sent_bytes"] == MIB


def test_a_log_stands_beside_its_prediction(cli: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("size_bytes,time_us,nodes,gpus_per_node\n1048576,80,1,8\n4194304,140,1,8\n")
    table = json.loads(
        cli("collective", "--machine", "dgx-a100", "--against", str(log), "--json").out
    )
    assert table["schema"] == "ddpsim.collective/1"
    assert [row["measured_s"] for row in table["rows"]] == pytest.approx([80e-6, 140e-6])
    for row in table["rows"]:
        assert row["error"] == pytest.approx(row["time_s"] / row["measured_s"] - 1)
    shown = cli("collective", "--machine", "dgx-a100", "--against", str(log)).out
    assert "2 sizes, median error" in shown


def test_a_log_without_the_sizes_asked_for_is_refused(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    log = tmp_path / "log.csv"
    log.write_text("size_bytes,time_us,nodes,gpus_per_node\n1048576,80,1,8\n4194304,140,1,8\n")
    asked = ("collective", "--machine", "dgx-a100", "--against", str(log), "--sizes", "3M")
    outcome = cli(*asked)
    assert outcome.code == 2
    said = " ".join(outcome.err.split())
    assert "holds none of the sizes asked for, but 1.00 MiB to 4.00 MiB" in said


def test_a_log_of_other_ranks_is_refused(cli: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("size_bytes,time_us,nodes,gpus_per_node\n1048576,80,1,4\n")
    outcome = cli("collective", "--machine", "dgx-a100", "--against", str(log))
    assert outcome.code == 2
    assert "was measured on 1 x 4 ranks, but the cluster has 1 x 8" in " ".join(outcome.err.split())


def test_a_log_of_other_gpus_says_so(tmp_path: Path) -> None:
    """As a cluster profile of another device does; a log that names none may be of any."""
    log = tmp_path / "a100.txt"

    def network(gpu: str, device: str) -> Network:
        named = nccl_log(root=True, nodes=1, gpus=8).replace("] GPU", f"] {gpu}")
        log.write_text(named)
        asked = BASE | cluster(device=device, gpus_per_node=8, all_reduce=str(log))
        return resolve(load_scenario(asked | {"run": {"allow_extrapolation": True}})).network

    name = "NVIDIA A100-SXM4-80GB"
    (said,) = network(name, "h100-sxm-80gb").warnings
    assert said.endswith(f"was measured on {name}, and its times are taken for h100-sxm-80gb's")
    assert network(name, "h100-sxm-80gb").uncertainty == OTHER_GPUS
    for gpu, device in ((name, "a100-sxm-80gb"), ("GPU", "h100-sxm-80gb")):
        assert network(gpu, device).warnings == ()
        assert network(gpu, device).uncertainty == LOG


def test_a_row_of_a_log_that_is_left_out_is_told(tmp_path: Path) -> None:
    log = tmp_path / "cut.txt"
    text = nccl_log(root=True, nodes=1, gpus=8)
    log.write_text(text[: text.index("  67108864") + 40])
    asked = BASE | cluster(device="a100", gpus_per_node=8, all_reduce=str(log))
    found = resolve(load_scenario(asked | {"run": {"allow_extrapolation": True}})).network.warnings
    assert [
        said for said in found if said.endswith("1 row is left out, broken or cut off: line 17")
    ]


def test_a_bare_cluster_file_is_enough(cli: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("cluster: {machine: dgx-h100, nodes: 2}\n")
    shown = cli("collective", "--cluster", str(file), "--sizes", "64M").out
    assert "nvls Simple" in shown
    drawn = cli("explain", "cluster", str(file)).out
    assert drawn.startswith("dgx-h100: 2 nodes x 8 h100-sxm-80gb\n")
    assert "node 1: ranks 8 9 10 11 12 13 14 15" in drawn
    assert "8 x 50.0 GB/s a node (rdma)" in drawn


def test_a_cluster_section_alone_is_enough(cli: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("machine: dgx-h100\nnodes: 2\n")
    own = cli(
        "collective", "--cluster", str(file), "--sizes", "64M", "--set", "cluster.nodes=4"
    ).out
    usual = ("--machine", "dgx-h100", "--set", "cluster.nodes=4", "--sizes", "64M")
    assert own == cli("collective", *usual).out
    file.write_text("machine: dgx-h100\nnodes: two\n")
    refused = cli("collective", "--cluster", str(file)).err
    assert refused.startswith(f"{file}:2:8  cluster.nodes: wanted a whole number, got 'two'")


def test_the_tuners_table_can_be_seen(cli: Callable[..., Any]) -> None:
    shown = cli("collective", "--machine", "dgx-h100", "--tuning", "--sizes", "1M,64M").out
    assert shown.splitlines()[0].split() == ["LL", "LL128", "Simple"]
    assert "nvls  Simple" in shown


def test_a_log_or_gloo_has_no_tuner(cli: Callable[..., Any]) -> None:
    outcome = cli("collective", "--cluster", "scenarios/gloo-cpu.yaml", "--tuning")
    assert outcome.code == 2
    assert "NCCL's tuner chooses where" in " ".join(outcome.err.split())


def test_an_all_reduce_is_priced_as_the_step_prices_it() -> None:
    scenario = load_scenario(BASE)
    job = resolve(scenario)
    sent = sorted(set(job.program.sent_bytes("all_reduce")))
    rows = collective_table(scenario, "all_reduce", sent).rows
    for size, row in zip(sent, rows, strict=True):
        transfer = job.network.cost.transfer("all_reduce", size)
        assert row.time_s == pytest.approx(duration_ns(transfer) * 1e-9)
