"""The command `ddpsim trace`: its files, its screen and its errors."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcome import Outcome

from ddpsim.planning.options import parse_ranks
from ddpsim.planning.trace import sample_ranks

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = Path(__file__).parent.parent / "golden" / "trace"
GOOD = str(Path(__file__).parent.parent / "invalid" / "files" / "good.yaml")
Cli = Callable[..., Outcome]
TINY = """\
schema: ddpsim/1
name: "a tiny model"
workload: {parameters: parameters.csv, batch_per_rank: 8, step_time: 90 us}
ddp: {bucket_cap_mb: 0.005, gradient_as_bucket_view: false}
cluster:
  nodes: 2
  gpus_per_node: 1
  device: a100-sxm-40gb
  inter_node: {bandwidth: 10 Gbit/s, latency: 5 us}
run: {iterations: 2, seed: 7, jitter: {sigma: 0.05}}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    rows = ["name,shape,dtype", "a,16x64,float32", "b,64x16,float32", "c,16,float32"]
    (tmp_path / "parameters.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    return str(tmp_path / "tiny.yaml")


def test_golden_files(
    cli: Cli, tiny: str, tmp_path: Path, golden: Callable[[str, Path], None]
) -> None:
    out = tmp_path / "out"
    outcome = cli("trace", tiny, "-o", str(out), "--steps", "1")
    assert (outcome.code, outcome.err) == (0, "")
    for name in ("merged.json", "ranks/rank0.json", "ranks/rank1.json"):
        golden((out / name).read_text("utf-8"), GOLDEN / name.replace("/", "-"))
    golden(outcome.out.replace(str(out), "OUT"), GOLDEN / "stdout.txt")


def test_only_our_own_files_are_written_again(cli: Cli, tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "ranks").mkdir(parents=True)
    mine = [out / "notes.txt", out / "ranks" / "rank7.json"]
    for path in mine:
        path.write_text("mine", encoding="utf-8")
    first = cli("trace", tiny, "-o", str(out))
    assert first.code == 0
    says = f"{out / 'ranks'} also holds rank7.json: HolisticTraceAnalysis reads them too\n"
    assert first.err == says
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert len(before) == 2 + 3
    assert cli("trace", tiny, "-o", str(out)) == first
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert all(path.read_text("utf-8") == "mine" for path in mine)


def test_gzip_holds_the_same(cli: Cli, tiny: str, tmp_path: Path) -> None:
    for folder, options in (("plain", ()), ("packed", ("--gzip",)), ("again", ("--gzip",))):
        assert cli("trace", tiny, "-o", str(tmp_path / folder), *options).code == 0
    for name in ("merged.json", "ranks/rank0.json", "ranks/rank1.json"):
        packed = (tmp_path / "packed" / f"{name}.gz").read_bytes()
        assert gzip.decompress(packed) == (tmp_path / "plain" / name).read_bytes()
        assert packed == (tmp_path / "again" / f"{name}.gz").read_bytes()


def test_the_warmup_is_shown_if_asked_for(cli: Cli, tiny: str, tmp_path: Path) -> None:
    outcome = cli("trace", tiny, "-o", str(tmp_path / "t"), "--warmup", "--steps", "all")
    assert "2 ranks, steps 0 to 3 (the first 2 warm up)" in outcome.out
    header = json.loads((tmp_path / "t" / "merged.json").read_text("utf-8"))["ddpsim"]
    assert (header["first_step"], header["last_step"], header["warmup_steps"]) == (0, 3, 2)


def test_of_many_ranks_a_sample_is_shown(cli: Cli, tmp_path: Path) -> None:
    path = str(ROOT / "scenarios" / "machines-64xh100.yaml")
    outcome = cli(
        "trace",
        path,
        "-o",
        str(tmp_path),
        "--steps",
        "1",
        "--set",
        "cluster.stragglers={factors: {13: 1.2}}",
    )
    assert outcome.code == 0
    assert outcome.err == (
        "16 of 64 ranks: first and last ranks of nodes, evenly spread, and rank 13, the slowest "
        "(--ranks chooses others)\n"
    )
    names = {path.stem for path in (tmp_path / "ranks").iterdir()}
    assert names >= {"rank0", "rank13", "rank63"}
    assert len(names) == 16
    header = json.loads((tmp_path / "ranks" / "rank13.json").read_text("utf-8"))
    assert header["ddpsim"]["slowest_rank"] == 13
    assert header["ddpsim"]["ranks_shown"].startswith("16 of 64: first and last ranks")
    assert header["distributedInfo"] == {"backend": "nccl", "rank": 13, "world_size": 64}
    assert header["deviceProperties"] == [{"id": 5, "name": "h100-sxm-80gb"}]


@given(st.integers(1, 300), st.integers(1, 32))
def test_samples(nodes: int, gpus: int) -> None:
    size = nodes * gpus
    ranks = sample_ranks([range(first, first + gpus) for first in range(0, size, gpus)])
    assert ranks == sorted(set(ranks))
    assert len(ranks) == (size if size <= 16 else 15)
    assert {0, size - 1} <= set(ranks) <= set(range(size))
    if size > 16 and 2 * nodes >= 15 and gpus > 1:
        assert all(rank % gpus in (0, gpus - 1) for rank in ranks)


def test_no_communication_is_said(cli: Cli, tmp_path: Path) -> None:
    alone = ("--set", "cluster.nodes=1", "--set", "cluster.gpus_per_node=1")
    outcome = cli("trace", GOOD, "-o", str(tmp_path), *alone)
    assert outcome.code == 0
    assert outcome.err == (
        "no communication takes time: HolisticTraceAnalysis calls its overlap NaN\n"
    )
    assert "overlap " not in outcome.out


def test_gloo_is_said(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("trace", str(ROOT / "scenarios/gloo-cpu.yaml"), "-o", str(tmp_path))
    assert outcome.err == (
        "gloo runs no kernels, nor does a CPU: HolisticTraceAnalysis finds none in the ranks' "
        "files\n"
    )
    assert "HolisticTraceAnalysis" not in outcome.out


def test_two_overlaps_are_said_where_the_device_idles(cli: Cli, tmp_path: Path) -> None:
    path = str(ROOT / "scenarios/resnet50-8xa100.yaml")
    small = ("--set", "workload.batch_per_rank=2")
    lines = cli("trace", path, "-o", str(tmp_path), *small).out.splitlines()
    assert lines[3:5] == [
        "overlap     98.86% of communication is hidden, on rank 0, the slowest",
        "            21.04% is under kernels, all that HolisticTraceAnalysis calls hidden",
    ]
    assert max(map(len, lines[3:5])) <= 100
    assert "under kernels" not in cli("trace", path, "-o", str(tmp_path)).out


def test_ranks_are_parsed() -> None:
    assert parse_ranks("11, 0,3,8-10,9", 16) == [0, 3, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0,16", "there is no rank 16: choose 0 to 15"),
        ("", "'' is no rank; write 0,3,8-11"),
        ("0;3", "'0;3' is no rank; write 0,3,8-11"),
        ("-1", "'-1' is no rank; write 0,3,8-11"),
        ("8-", "'8-' is no rank; write 0,3,8-11"),
        ("9-8", "'9-8' runs backwards; write 8-9"),
        ("0-99999999999", "'0-99999999999' is no rank; write 0,3,8-11"),
    ],
)
def test_wrong_ranks(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        parse_ranks(text, 16)


def test_too_many_ranks() -> None:
    assert len(parse_ranks("0-255", 10**6)) == 256
    for text in ("0-256", "0-255,999999"):
        with pytest.raises(ValueError, match="at most 256 ranks at a time"):
            parse_ranks(text, 10**6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--steps", "0"), "Invalid value for --steps: '0' is neither a number of steps nor all"),
        (("--steps", "few"), "Invalid value for --steps: 'few' is neither a number of steps nor"),
        (
            ("--steps", "21"),
            "Invalid value for --steps: the run has 20 to show: at most 20, or set run.iterations",
        ),
        (("--ranks", "99"), "Invalid value for --ranks: there is no rank 99: choose 0 to 15"),
    ],
)
def test_wrong_options(cli: Cli, tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    outcome = cli("trace", GOOD, "-o", str(tmp_path / "t"), *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert says in " ".join(outcome.err.replace("│", "").split())
    assert not (tmp_path / "t").exists()


def test_a_file_where_the_folder_should_be(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "t").touch()
    outcome = cli("trace", GOOD, "-o", str(tmp_path / "t"))
    assert (outcome.code, outcome.out) == (2, "")
    says = f"Invalid value for --output: {tmp_path / 't'} is a file; name a folder"
    assert says in " ".join(outcome.err.split())
    outcome = cli("trace", GOOD, "-o", str(tmp_path / "t" / "deeper"))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == f"ddpsim: {tmp_path / 't' / 'deeper'}: Not a directory\n"


def test_a_folder_is_needed(cli: Cli) -> None:
    outcome = cli("trace", GOOD)
    assert (outcome.code, outcome.out) == (2, "")
    assert "Missing option" in outcome.err
