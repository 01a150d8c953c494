"""Logs as people publish them: without devices, of several collectives, labelled, retyped.

What is written here is SYNTHETIC. With DDPSIM_REFERENCE_DATA naming a folder of published logs,
those of `nccl/awkward` are read too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs.measured_files import Write
from logs.nccl_log_writer import TIMES, nccl_log

from ddpsim.errors import DdpsimError, ImportFailedError
from ddpsim.importers.all_reduce import AllReduceLog, read_all_reduce
from ddpsim.importers.measured import Operation, OtherCollectiveError, parse_layout
from ddpsim.scenario.quantity import SourceFile


def without_devices(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if " Rank " not in line)


# --- ranks that are not listed -------------------------------------------------------------------


def test_a_layout_is_taken_for_a_log_without_devices(write: Write) -> None:
    text = nccl_log(root=True, nodes=2, gpus=2)
    log = read_all_reduce(write(without_devices(text)), layout=(2, 2))
    listed = read_all_reduce(write(text), layout=(1, 4))
    assert (log.nodes, log.gpus_per_node, log.ranks_listed) == (2, 2, False)
    assert (listed.nodes, listed.gpus_per_node, listed.ranks_listed) == (2, 2, True)
    assert log.samples == listed.samples


@pytest.mark.parametrize("ranks", [2, 3, 8, 16, 64])
def test_rows_tell_how_many_ranks_they_are_of(write: Write, ranks: int) -> None:
    times = {2**20: 60.5, 2**30: 2000.5}
    path = write(without_devices(nccl_log(root=True, nodes=1, gpus=ranks, times=times)))
    said = (
        "file.txt:5: does not list its devices ('#  Rank  0 ... on HOST device 0'); it is of "
        f"{ranks} ranks"
    )
    with pytest.raises(ImportFailedError, match=re.escape(f"{said}; state nodes x GPUs of each")):
        read_all_reduce(path)
    with pytest.raises(ImportFailedError, match=re.escape(f"{said}, but 5x1 are 5; state the")):
        read_all_reduce(path, layout=(5, 1))
    assert read_all_reduce(path, layout=(ranks, 1)).nodes == ranks


def test_rows_of_few_digits_leave_the_ranks_to_the_layout(write: Write) -> None:
    """Below 0.01 GB/s a row tells nothing."""
    path = write(without_devices(nccl_log(root=True, times={8: 20.0, 16: 20.5})))
    assert read_all_reduce(path, layout=(4, 8)).world_size == 32
    said = r"file\.txt:5: does not list its devices \(.*\); state nodes x GPUs of each, such as --"
    with pytest.raises(ImportFailedError, match=said):
        read_all_reduce(path)


def test_layouts_are_nodes_times_gpus() -> None:
    assert (parse_layout("2x8"), parse_layout(" 16 X 4")) == ((2, 8), (16, 4))
    for wrong in ("16", "2x", "0x8", "2x8x4", "two"):
        with pytest.raises(ValueError, match="is no layout: wanted nodes x GPUs of each, such as"):
            parse_layout(wrong)


# --- several collectives -------------------------------------------------------------------------


def run_of(test: str, redop: str = "sum      -1", share: float = 1.0, **how: int) -> str:
    """A run with its banners; its busbw is `share` of an all-reduce's."""
    text = nccl_log(root=True, **how).replace("sum      -1", redop)
    rows = [_with_busbw(line, share) for line in text.splitlines()]
    banner = f"# Collective test starting: {test}\n" if test else ""
    return f"{banner}# nThread 1 nGpus 1 minBytes 1024\n" + "\n".join(rows) + "\n"


def _with_busbw(line: str, share: float) -> str:
    cells = line.split()
    if not line.endswith("0e+00") or share == 1.0:
        return line
    for at in (7, 11):
        cells[at] = f"{float(cells[at]) * share:.2f}"
    return "  " + "  ".join(cells)


OTHERS = {
    "reduce_scatter": run_of("", share=0.5),
    "all_gather or alltoall": run_of("", "none      -1", 0.5),
    "broadcast": run_of("", "none       0", 1 / 1.5),
    "reduce": run_of("", "sum       0", 1 / 1.5),
    "sendrecv": run_of("sendrecv_perf", share=1 / 1.5),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_all_reduces_of_a_file_are_taken(write: Write, other: str) -> None:
    ours = run_of("all_reduce_perf" if other == "sendrecv" else "")
    alone = read_all_reduce(write(ours)).samples
    for text, line in (
        (ours + OTHERS[other], ours.count("\n") + 1),
        (OTHERS[other] + ours, 1),
    ):
        log = read_all_reduce(write(text))
        assert log.samples == alone
        said = f"all_reduce is read; the file also holds {other} (from line {line})"
        assert log.warnings == (f"file.txt: {said}",)


@pytest.mark.parametrize("other", OTHERS)
def test_a_file_without_all_reduces_says_what_it_is_of(write: Write, other: str) -> None:
    said = r"file\.txt:\d+: .*(is of another collective|is of sendrecv_perf|busbw/algbw is)"
    with pytest.raises(ImportFailedError, match=said):
        read_all_reduce(write(OTHERS[other]))


def test_another_layout_in_the_runs_of_others_is_no_matter(write: Write) -> None:
    text = run_of("") + run_of("", "none      -1", 0.5, nodes=1, gpus=8)
    assert read_all_reduce(write(text)).world_size == 4


def test_broadcasts_are_read_where_they_are_asked_for(write: Write) -> None:
    text = run_of("all_reduce_perf") + run_of("broadcast_perf", "none       0", 1 / 1.5)
    log = read_all_reduce(write(text), operation="broadcast")
    assert [size for size, _ in log.samples] == [*TIMES]
    assert log.warnings == (
        "file.txt: broadcast is read; the file also holds all_reduce (from line 1)",
    )
    with pytest.raises(OtherCollectiveError, match="is of all_reduce_perf; wanted the log of broa"):
        read_all_reduce(write(run_of("all_reduce_perf")), operation="broadcast")


# --- rows as launchers and people leave them -----------------------------------------------------


@pytest.mark.parametrize("label", ["[0]", "[1,0]<stdout>:", "node0:"])
def test_a_launchers_label_within_rows(write: Write, label: str) -> None:
    """nccl-tests writes a row in three parts."""
    text = nccl_log(root=True)
    lines = []
    for line in text.splitlines():
        cells = line.split()
        if line.endswith("0e+00"):
            parts = ("  ".join(part) for part in (cells[:5], cells[5:9], cells[9:]))
            lines.append(f"{label}   " + f"{label}   ".join(parts))
        else:
            lines.append(f"{label} {line}")
    assert read_all_reduce(write("\n".join(lines))) == read_all_reduce(write(text))


def test_a_table_in_markdown(write: Write) -> None:
    """Its header has no #, and it counts wrong elements."""
    lines = without_devices(nccl_log(root=True)).splitlines()
    rows = [f"| {' | '.join(line.split())} |" for line in lines if line.endswith("0e+00")]
    columns = "size count type redop root " + 2 * "time algbw busbw #wrong "
    header = [f"| {' | '.join(columns.split())} |", "|---" * 13 + "|"]
    log = read_all_reduce(write("\n".join([*header, *rows])), layout=(2, 2))
    assert log.samples == read_all_reduce(write(nccl_log(root=True))).samples
    rows[0] = rows[0].removesuffix("0e+00 |") + "3 |"
    with pytest.raises(ImportFailedError, match=r"file\.txt:3: in-place #wrong is 3"):
        read_all_reduce(write("\n".join([*header, *rows])), layout=(2, 2))


# --- other benchmarks ----------------------------------------------------------------------------

BENCH = """Environment:
- hardware: NVIDIA A100-SXM4-80GB node with 8 GPUs

The average bandwidth of all_reduce over 4 ranks (5 warmups / 20 trials):

| payload |    busbw   |    algbw   |
| ------: | ---------: | ---------: |
|   32KiB |   0.00GBps |   0.00GBps |
|    1MiB |  15.00GBps |  10.00GBps |
|    1GiB | 150.00GBps | 100.00GBps |
"""


def test_the_table_of_all_reduce_bench(write: Write) -> None:
    log = read_all_reduce(write(BENCH), layout=(1, 4))
    assert (log.kind, log.ranks_listed) == ("all_reduce_bench.py table", False)
    assert log.gpus == ("NVIDIA A100-SXM4-80GB",)
    assert log.samples == (
        (2**20, pytest.approx(2**20 / 10e9)),
        (2**30, pytest.approx(2**30 / 100e9)),
    )
    assert log.warnings == ("file.txt: rows whose algbw is printed as 0 are left out: lines 8",)


@pytest.mark.parametrize(
    ("text", "layout", "said"),
    [
        (BENCH, None, "txt:4: does not say on how many nodes its ranks were; it is of 4 ranks; st"),
        (
            BENCH,
            (2, 4),
            "txt:4: does not say on how many nodes its ranks were; it is of 4 ranks, b",
        ),
        (BENCH.replace("over 4 ranks", "over 8 ranks"), (1, 8), "txt:9: busbw/algbw is 1.5, but "),
        (
            BENCH.replace("of all_reduce", "of all_gather"),
            (1, 4),
            "txt:4: is of all_gather; wanted",
        ),
        (BENCH + BENCH, (1, 4), "txt:16: holds several tables; keep one a file"),
        (BENCH[: BENCH.index("|    1MiB")], (1, 4), "txt: holds no row with a bandwidth below"),
        (BENCH.replace("10.00GBps", "1.0.0GBps"), (1, 4), "txt:9: algbw is '1.0.0'; wanted a num"),
    ],
)
def test_tables_of_all_reduce_bench_that_are_refused(
    write: Write, text: str, layout: tuple[int, int] | None, said: str
) -> None:
    with pytest.raises(ImportFailedError, match=re.escape(said)):
        read_all_reduce(write(text), layout=layout)


OSU = """
# OSU MPI-CUDA Allreduce Latency Test v7.0
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
4                       1.98              1.90              2.10        1000
[1678205653.808236] [node:903]  ucc_coll.c:255  UCC_COLL INFO  coll_init
1048576               123.10            122.10            124.00         100
"""
OSU_BRIEF = re.sub(r"(us\)| \d+\.\d\d)   .*", r"\1", OSU)


@pytest.mark.parametrize("text", [OSU, OSU_BRIEF], ids=["with -f", "without -f"])
def test_tables_of_osu(write: Write, text: str) -> None:
    log = read_all_reduce(write(text), layout=(2, 4))
    assert (log.kind, log.world_size, log.ranks_listed) == ("OSU table", 8, False)
    assert log.samples == ((4, pytest.approx(1.98e-6)), (2**20, pytest.approx(123.1e-6)))
    assert log.warnings == (
        "file.txt: OSU times MPI's collectives, out of place; DDP reduces in place on the GPU",
    )


@pytest.mark.parametrize("prefix", ["0: ", "[1,0]<stdout>:", "2024-11-05T10:11:12.123Z ", "> "])
@pytest.mark.parametrize("text", [OSU, BENCH], ids=["OSU", "all_reduce_bench"])
def test_other_benchmarks_behind_a_prefix(write: Write, text: str, prefix: str) -> None:
    plain = read_all_reduce(write(text), layout=(1, 4))
    labelled = "\n".join(prefix + line for line in text.splitlines())
    assert read_all_reduce(write(labelled), layout=(1, 4)).samples == plain.samples


@given(
    st.sampled_from([OSU, BENCH, run_of("all_reduce_perf") + OTHERS["broadcast"]]),
    st.integers(0, 5000),
    st.integers(0, 40),
    st.text(st.characters(codec="utf-8"), max_size=12),
)
def test_a_damaged_table_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, start: int, length: int, junk: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged-table.txt"
    start %= len(text)
    path.write_text(text[:start] + junk + text[start + length :], encoding="utf-8")
    for operation in get_args(Operation):
        said = _refusal(SourceFile("a.txt", path), operation)
        assert said is None or said.startswith("a.txt:")
        assert said is None or len(said) < 500


def _refusal(source: SourceFile, operation: Operation) -> str | None:
    try:
        read_all_reduce(source, layout=(2, 2), operation=operation)
    except DdpsimError as error:
        return str(error)
    return None


def test_tables_of_osu_of_several_collectives(write: Write) -> None:
    text = OSU.replace("Allreduce", "Broadcast").replace("123.10", " 50.00") + OSU
    assert dict(read_all_reduce(write(text), layout=(1, 4)).samples)[2**20] > 100e-6
    log = read_all_reduce(write(text), layout=(1, 4), operation="broadcast")
    assert dict(log.samples)[2**20] == pytest.approx(50e-6)
    assert "the file also holds OSU's Allreduce test (line 8)" in log.warnings[0]


@pytest.mark.parametrize(
    ("text", "layout", "said"),
    [
        (OSU, None, "txt:2: is of the OSU micro-benchmarks, which do not print their ranks; state"),
        (OSU.replace("Allreduce", "Allgather"), (1, 4), "txt:2: is of OSU's Allgather test; want"),
        (OSU + OSU, (1, 4), "txt:8: holds 2 tables of OSU's Allreduce test; keep one a file"),
        (OSU[:50], (1, 4), "txt:2: this table of the OSU micro-benchmarks has no row"),
        (OSU.replace("123.10", "  0.00"), (1, 4), "txt:6: latency is '0.00'; wanted a number abo"),
    ],
)
def test_tables_of_osu_that_are_refused(
    write: Write, text: str, layout: tuple[int, int] | None, said: str
) -> None:
    with pytest.raises(ImportFailedError, match=re.escape(said)):
        read_all_reduce(write(text), layout=layout)


# --- published files -----------------------------------------------------------------------------

_REFERENCE = (
    Path(os.environ["DDPSIM_REFERENCE_DATA"]) / "nccl" / "awkward"
    if "DDPSIM_REFERENCE_DATA" in os.environ
    else None
)
# layout that is stated, layout, sizes, the time of one
_AWKWARD = {
    "gh200-2x4-slingshot-no-devices.txt": ((2, 4), (2, 4), 11, (2**20, 105.7e-6)),
    "h200-2x8-noisy-bfloat16.txt": (None, (2, 8), 8, (2**20, 1037.1e-6)),
    "issue1453-labels-within-rows.txt": (None, (2, 8), 6, (2**24, 1336.5e-6)),
    "osu_allreduce.txt": ((1, 4), (1, 4), 3, (2**24, 8630.58e-6)),
    "rccl-several-ops-one-file.txt": (None, (1, 8), 10, (2**30, 4675.42e-6)),
    "stas00-all_reduce_bench.txt": ((1, 4), (1, 4), 7, (2**32, 2**32 / 155.65e9)),
}


@pytest.mark.skipif(_REFERENCE is None, reason="DDPSIM_REFERENCE_DATA names no folder of logs")
@pytest.mark.parametrize("name", _AWKWARD)
def test_awkward_logs(name: str) -> None:
    assert _REFERENCE is not None
    source = SourceFile(name, _REFERENCE / name)
    stated, layout, sizes, (size, time_s) = _AWKWARD[name]
    log: AllReduceLog = read_all_reduce(source, layout=stated)
    assert ((log.nodes, log.gpus_per_node), len(log.samples)) == (layout, sizes)
    assert dict(log.samples)[size] == pytest.approx(time_s)
    if stated:
        with pytest.raises(ImportFailedError, match="state nodes x GPUs of each, such as --layout"):
            read_all_reduce(source)
