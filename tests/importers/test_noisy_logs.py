"""Logs whose times in place and out of place differ. All are SYNTHETIC."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from logs.measured_files import Write
from logs.nccl_log_writer import nccl_log

from calibrate.fit.profile import fit_logs
from ddpsim import load_scenario, simulate
from ddpsim.cluster.logs import EXTRAPOLATED_LOG, LOG
from ddpsim.cluster.network import Network
from ddpsim.importers.all_reduce import read_all_reduce
from ddpsim.prediction.collective_times import collective_table, load_cluster
from ddpsim.prediction.resolve import resolve

MIB = 2**20
# those of DDP's buckets, on 2 x 2 ranks
QUIET = {size: 20.0 + size / 1e4 for size in (2**k for k in range(10, 28))}
USUAL = [size for size in QUIET if size >= MIB]


def noisy(factors: Mapping[int, float]) -> str:
    """A log whose times out of place are so many times those in place; 1: the same."""
    lines = nccl_log(root=True, times=QUIET).splitlines()
    for i, line in enumerate(lines):
        cells = line.split()
        if line.endswith("0e+00"):
            factor = factors.get(int(cells[0]), 1.0)
            cells[5] = f"{float(cells[9]) * factor}"
            lines[i] = "  " + "  ".join(cells)
    return "\n".join(lines)


def test_sizes_that_differ_are_warned_of_with_both_times(write: Write) -> None:
    log = read_all_reduce(write(noisy({MIB: 6.0, 8 * MIB: 1 / 1.6, 4 * MIB: 1.49})))
    (said,) = log.warnings
    assert said.startswith(
        "file.txt: times in place and out of place differ by more than 1.5 x at 2 of 18 sizes: "
        "1048576 B (125 us and 749 us), 8388608 B (859 us and 537 us); measure again "
    )
    assert log.apart == (MIB, 8 * MIB)


def test_many_sizes_that_differ_are_not_all_named(write: Write) -> None:
    (said,) = read_all_reduce(write(noisy(dict.fromkeys(QUIET, 2.0)))).warnings
    assert "at 18 of 18 sizes: 1024 B" in said
    assert "8192 B (20.8 us and 41.6 us), ...; measure again" in said


def test_the_spread_is_a_pooled_standard_deviation_at_ddps_sizes(write: Write) -> None:
    """Of two times t and 2 t: ln 2 over the root of 2; smaller messages do not count."""
    assert read_all_reduce(write(noisy({1024: 9.0}))).spread == 0.0
    every = dict.fromkeys(USUAL, 2.0)
    spread = math.log(2) / math.sqrt(2)
    assert read_all_reduce(write(noisy(every))).spread == pytest.approx(spread)
    one = read_all_reduce(write(noisy({MIB: 2.0}))).spread
    assert one == pytest.approx(spread / math.sqrt(len(USUAL)))


def test_a_log_of_one_time_a_size_has_no_spread(write: Write) -> None:
    log = read_all_reduce(write("size_bytes,time_us,nodes,gpus_per_node\n1048576,80,1,8\n"))
    assert (log.spread, log.apart, log.warnings) == (None, (), ())


def network(log: Path, **cluster: Any) -> Network:
    asked = {
        "schema": "ddpsim/1",
        "workload": {"model": "resnet50", "batch_per_rank": 32},
        "cluster": {
            "nodes": 2,
            "gpus_per_node": 2,
            "device": "a100-sxm-80gb",
            "all_reduce": str(log),
            **cluster,
        },
        "run": {"allow_extrapolation": True},
    }
    return resolve(load_scenario(asked)).network


def test_a_noisy_log_makes_a_prediction_as_uncertain(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(noisy(dict.fromkeys(USUAL, 1.04)))
    quiet = network(log)
    assert quiet.uncertainty == LOG
    assert not quiet.warnings
    assert "vary" not in quiet.provenance[0].source
    log.write_text(noisy(dict.fromkeys(USUAL, 2.0)))
    found = network(log)
    assert found.uncertainty is not None
    assert found.uncertainty.sigma == pytest.approx(math.log(2) / math.sqrt(2))
    assert found.uncertainty.basis == f"in-place and out-of-place times in {log}"
    assert found.provenance[0].source.endswith("128 MiB; in place and out of place vary by 49 %")
    assert "differ by more than 1.5 x at 8 of 18 sizes" in found.warnings[0]


def test_other_ranks_are_no_more_certain_than_a_noisy_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    for factor, sigma in ((1.2, EXTRAPOLATED_LOG.sigma), (2.0, math.log(2) / math.sqrt(2))):
        log.write_text(noisy(dict.fromkeys(USUAL, factor)))
        found = network(log, gpus_per_node=4)
        assert found.uncertainty is not None
        assert found.uncertainty.sigma == pytest.approx(sigma)


def test_a_log_without_ranks_takes_the_scenarios_and_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    text = nccl_log(root=True, times=QUIET)
    log.write_text("\n".join(line for line in text.splitlines() if " Rank " not in line))
    (said,) = network(log).warnings
    assert said == (
        f"{log} does not say on which nodes and GPUs it was measured: its times are taken for "
        "this cluster's 4 ranks (2 nodes x 2)"
    )
    with pytest.raises(Exception, match=r"cluster\.all_reduce: .*it is of 4 ranks, but 2x4 are 8"):
        network(log, gpus_per_node=4)


def test_a_profile_of_a_noisy_log_is_as_uncertain(write: Write) -> None:
    quiet = fit_logs([read_all_reduce(write(noisy({})))], "cluster")
    log = read_all_reduce(write(noisy(dict.fromkeys(USUAL, 2.0))))
    found = fit_logs([log], "cluster")
    assert [each.repeated for each in quiet.measured_sigma] == [None]
    assert found.all_reduce_sigma == max(log.spread or 0.0, quiet.all_reduce_sigma)
    assert [each.repeated for each in found.measured_sigma] == [log.spread]
    assert found.all_reduce == quiet.all_reduce


# --- the command ---------------------------------------------------------------------------------

Cli = Callable[..., Any]


def imported(cli: Cli, *arguments: object) -> Any:
    return cli("calibrate", "import", "nccl-tests", *map(str, arguments))


def test_the_layout_of_every_log(cli: Cli, tmp_path: Path) -> None:
    text = "\n".join(line for line in noisy({}).splitlines() if " Rank " not in line)
    one, other, profile = (tmp_path / name for name in ("one.txt", "other.txt", "c.json"))
    one.write_text(text)
    other.write_text(text.replace("  1024  ", "  512  "))
    layouts = ("--layout", "2x2", "--layout", "1x4")
    assert imported(cli, one, other, "-o", profile, *layouts).code == 0
    assert '"layouts":[[1,4],[2,2]]' in "".join(profile.read_text().split())
    many = imported(cli, one, "-o", profile, *layouts)
    assert "was given 2 times for 1 logs; give one, or one for each log" in many.err
    other.write_text(noisy({}))
    refused = imported(cli, other, "-o", profile, "--layout", "1x4")
    assert refused.err.startswith("other.txt: lists 2x2 ranks, but --layout says 1x4; drop --lay")


def test_collectives_of_shards_in_logs(cli: Cli, tmp_path: Path) -> None:
    """A profile prices them by their own times; the logs of each are told apart."""
    each = {"all_reduce": 1.0, "reduce_scatter": 0.7, "all_gather": 0.6}
    texts = [
        nccl_log(root=True, times={s: part * t for s, t in QUIET.items()}, operation=operation)
        for operation, part in each.items()
    ]
    log, profile = tmp_path / "all.txt", tmp_path / "cluster.json"
    log.write_text("\n".join("# nThread 1 nGpus 1\n" + text for text in texts))
    asked = [word for operation in each for word in ("--operation", operation)]
    done = imported(cli, log, "-o", profile, *asked)
    assert (done.code, done.err) == (0, "")
    cluster = {"nodes": 2, "gpus_per_node": 2, "device": "a100-sxm-80gb", "profile": str(profile)}
    for operation, part in each.items():
        (row,) = collective_table(load_cluster({"cluster": cluster}), operation, [MIB]).rows
        assert row.time_s == pytest.approx(part * QUIET[MIB] * 1e-6, rel=1e-4)
    job = {"model": "gpt2", "batch_per_rank": 1}
    sharded = {"cluster": cluster, "workload": job, "ddp": {"strategy": "fully_shard"}}
    inputs = simulate(load_scenario({"schema": "ddpsim/1"} | sharded)).provenance
    assert {entry.input: entry.trust for entry in inputs}["all-gather time"] == "measured"
    assert "sharded collectives" not in {entry.input for entry in inputs}
    files = [log.with_name(f"{operation}.txt") for operation in each]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    of_all, apart = profile.read_text(), tmp_path / "apart.json"
    assert imported(cli, *files, "-o", apart, *asked).code == 0
    for key in (f"measured_{operation}s" for operation in ("reduce_scatter", "all_gather")):
        assert json.loads(apart.read_text())[key] == json.loads(of_all)[key] != []
    refused = imported(cli, files[0], files[2], "-o", apart, *asked).err
    assert "holds no reduce_scatter; drop --operation reduce_scatter" in refused
    refused = imported(cli, files[1], "-o", apart).err
    assert "but an all-reduce of the 4 ranks that are listed has 1.5" in " ".join(refused.split())


def test_broadcasts_in_a_log(cli: Cli, tmp_path: Path) -> None:
    log, other, profile = (tmp_path / name for name in ("a.txt", "b.txt", "c.json"))
    log.write_text(noisy({}))
    ranks = 4
    rows = noisy({}).replace("sum      -1", "none      0").replace("  sum  -1  ", "  none  0  ")
    halved = [
        line.replace(cells[11], f"{float(cells[11]) * ranks / (2 * ranks - 2):.2f}")
        if line.endswith("0e+00") and (cells := line.split())
        else line
        for line in rows.splitlines()
    ]
    other.write_text("\n".join(halved))
    both = ("--operation", "all_reduce", "--operation", "broadcast")
    done = imported(cli, log, other, "-o", profile, *both)
    assert (done.code, done.err) == (0, "")
    assert '"measured_broadcasts":[{"nodes":2' in "".join(profile.read_text().split())
    for options, said in (
        (("--operation", "broadcast"), "a profile needs all-reduces; add --operation all_reduce"),
        (
            ("--operation", "gather"),
            "'gather' is none of all_reduce, broadcast, reduce_scatter, all_gather",
        ),
        (both, "a.txt: holds no broadcast; drop --operation broadcast"),
    ):
        assert said in " ".join(imported(cli, log, "-o", profile, *options).err.split())
