"""Logs of nccl-tests: what they measured, and which are refused.

Every log written here is SYNTHETIC. With DDPSIM_REFERENCE_DATA naming a folder of published
logs (`nccl/logs/ID.txt`, and their in-place times in `nccl/all_reduce.csv`), those are read too.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest
from logs.measured_files import Write, json_of
from logs.nccl_log_writer import TIMES, nccl_log

from ddpsim.errors import ImportFailedError
from ddpsim.importers.all_reduce import read_all_reduce
from ddpsim.scenario.quantity import SourceFile


@pytest.mark.parametrize("root", [False, True], ids=["older layout", "layout with root"])
def test_nccl_tests(write: Write, *, root: bool) -> None:
    log = read_all_reduce(write(nccl_log(root=root)))
    assert (log.kind, log.source) == ("nccl-tests log", "file.txt")
    assert (log.nodes, log.gpus_per_node, log.world_size) == (2, 2, 4)
    assert log.samples == tuple((size, pytest.approx(us * 1e-6)) for size, us in TIMES.items())


@pytest.mark.parametrize("root", [False, True], ids=["largest error", "count of wrong elements"])
@pytest.mark.parametrize("last", ["0", "N/A", "2e-07", "7"])
def test_nccl_tests_whose_sums_are_wrong(write: Write, last: str, *, root: bool) -> None:
    """Older versions print the largest error in the count's place, and N/A stands for no check."""
    lines = nccl_log(root=root).splitlines()
    row = next(i for i, line in enumerate(lines) if line.endswith("0e+00"))
    lines[row] = lines[row].removesuffix("0e+00") + last
    path = write("\n".join(lines))
    if not root or last in ("0", "N/A"):
        assert len(read_all_reduce(path).samples) == len(TIMES)
        return
    said = f"file.txt:{row + 1}: in-place #wrong is {last}: so many elements of the sum came out"
    with pytest.raises(ImportFailedError, match=re.escape(said)):
        read_all_reduce(path)


@pytest.mark.parametrize("root", [False, True], ids=["older layout", "layout with root"])
def test_nccl_tests_that_failed_say_so_at_their_end(write: Write, *, root: bool) -> None:
    lines = nccl_log(root=root).splitlines()
    end = lines.index("# Out of bounds values : 0 OK")
    lines[end] = "# Out of bounds values : 12 FAILED"
    said = f"file.txt:{end + 1}: the number of out of bounds values is 12: so many elements"
    with pytest.raises(ImportFailedError, match=re.escape(said)):
        read_all_reduce(write("\n".join(lines)))


def test_nccl_tests_name_their_gpus(write: Write) -> None:
    text = nccl_log(root=True)
    assert read_all_reduce(write(text)).gpus == ("GPU",)
    assert read_all_reduce(write(text.replace("] GPU", "]"))).gpus == ()
    mixed = text.replace("[0x01] GPU", "[0x01] NVIDIA H100 80GB HBM3 ")
    assert read_all_reduce(write(mixed)).gpus == ("GPU", "NVIDIA H100 80GB HBM3")


def test_nccl_tests_that_measured_the_processor(write: Write) -> None:
    text = nccl_log(root=True).replace("time ", "cputime ")
    said = "file.txt:7: its times are cputime: -C measures the processor's; wanted a run without it"
    with pytest.raises(ImportFailedError, match=re.escape(said)):
        read_all_reduce(write(text))


def test_nccl_tests_of_groups_side_by_side(write: Write) -> None:
    text = nccl_log(root=True).replace("Rank  1 Group  0", "Rank  1 Group  1")
    with pytest.raises(ImportFailedError, match=r"lists devices of 2 groups.*wanted a run of one"):
        read_all_reduce(write(text))


@pytest.mark.parametrize(
    ("redop", "said"),
    [
        ("none      -1", "redop none, root -1"),
        ("none       0", "redop none, root 0"),
        ("sum       0", "redop sum, root 0"),
    ],
)
def test_nccl_tests_of_another_collective(write: Write, redop: str, said: str) -> None:
    """Of two ranks: then its busbw tells nothing."""
    text = nccl_log(root=True, nodes=1).replace("sum      -1", redop)
    with pytest.raises(ImportFailedError, match=rf"txt:7: this row is of another .* \({said}\); w"):
        read_all_reduce(write(text))


@pytest.mark.parametrize(
    ("program", "refused"),
    [
        ("all_reduce_perf", False),
        ("./build/all_reduce_perf_mpi", False),
        ("ours", False),
        ("scatter/all_reduce_perf", False),
        ("sendrecv_perf", True),
        ("/opt/reduce_scatter_perf_mpi", True),
    ],
)
def test_nccl_tests_name_their_test(write: Write, program: str, *, refused: bool) -> None:
    text = f"# Collective test starting: {program}\n{nccl_log(root=True)}"
    data = json_of()
    data["args"][0] = program
    for name, content, line in (("log.txt", text, ":1"), ("log.json", json.dumps(data), "")):
        if not refused:
            assert read_all_reduce(write(content, name)).samples
            continue
        said = rf"{name}{line}: is of [a-z_]*_perf; wanted the log of all_reduce_perf"
        with pytest.raises(ImportFailedError, match=said):
            read_all_reduce(write(content, name))


def test_nccl_tests_with_statistics_of_every_iteration(write: Write) -> None:
    """`-I` puts four columns after each half."""
    lines = nccl_log(root=True).splitlines()
    header = next(i for i, line in enumerate(lines) if "redop" in line)
    lines[header] = "#  size count type redop root " + 2 * "time algbw busbw #wrong i_min i_max "
    for i, line in enumerate(lines):
        if line.endswith("0e+00"):
            cells = line.split()
            cells[9:9] = cells[17:17] = ["1.0", "2.0", "3.0", "4.0"]
            lines[i] = " ".join(cells)
    assert read_all_reduce(write("\n".join(lines))).samples == tuple(
        (size, pytest.approx(us * 1e-6)) for size, us in TIMES.items()
    )


def test_nccl_tests_of_one_node_and_of_rows_out_of_order(write: Write) -> None:
    text = nccl_log(root=True, nodes=1, gpus=4, times={1024: 30.0, 512: 10.0, 0: 1.0})
    log = read_all_reduce(write(text))
    assert (log.nodes, log.gpus_per_node) == (1, 4)
    assert [size for size, _ in log.samples] == [512, 1024]


def test_a_repeated_size_counts_once_by_its_median(write: Write) -> None:
    rows = [f"4096,{time_us},1,2" for time_us in (10, 90, 20)]
    log = read_all_reduce(write("\n".join(["size_bytes,time_us,nodes,gpus_per_node", *rows])))
    assert log.samples == ((4096, pytest.approx(20e-6)),)


def test_times_that_no_link_can_reach(write: Write) -> None:
    """Milliseconds, taken for microseconds; what is small tells nothing."""
    header = "size_bytes,time_us,nodes,gpus_per_node\n"
    said = "says that 1048576 bytes took 0.09 us on 8 ranks, which no link can reach (a bus "
    with pytest.raises(ImportFailedError, match=re.escape(said)):
        read_all_reduce(write(f"{header}1024,0.02,1,8\n1048576,0.09,1,8\n"))
    assert read_all_reduce(write(f"{header}1024,0.00001,1,8\n1048576,0.1,1,8\n")).samples


def test_two_runs_of_the_same_layout_are_one_log(write: Write) -> None:
    twice = nccl_log(root=True) + nccl_log(root=False, times={2048: 25.0})
    log = read_all_reduce(write(twice))
    assert dict(log.samples).keys() == {1024, 2048, 1_048_576, 67_108_864}
    assert dict(log.samples)[2048] == pytest.approx(25e-6)


def test_two_runs_of_different_layouts_are_refused(write: Write) -> None:
    for first, second in (((2, 8), (1, 8)), ((1, 8), (2, 8)), ((2, 4), (1, 8))):
        text = "".join(nccl_log(root=True, nodes=n, gpus=g) for n, g in (first, second))
        with pytest.raises(ImportFailedError, match="holds several layouts"):
            read_all_reduce(write(text))


def test_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"\xef\xbb\xbf" + nccl_log(root=False).replace("\n", "\r\n").encode())
    assert len(read_all_reduce(SourceFile("log.txt", path)).samples) == len(TIMES)


def test_an_error_names_file_and_line(write: Write) -> None:
    lines = nccl_log(root=True).splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("  1048576"))
    lines[row] = lines[row][:60]
    with pytest.raises(ImportFailedError) as caught:
        read_all_reduce(write("\n".join(lines)))
    assert (caught.value.path, caught.value.line) == ("file.txt", row + 1)
    assert str(caught.value).startswith(f"file.txt:{row + 1}: ")


_REFERENCE = (
    Path(os.environ["DDPSIM_REFERENCE_DATA"]) if "DDPSIM_REFERENCE_DATA" in os.environ else None
)


_LOGS = sorted((_REFERENCE / "nccl" / "logs").glob("*.txt")) if _REFERENCE else []


@pytest.mark.skipif(_REFERENCE is None, reason="DDPSIM_REFERENCE_DATA names no folder of logs")
def test_published_logs() -> None:
    assert _REFERENCE is not None
    assert _LOGS, f"no logs in {_REFERENCE / 'nccl' / 'logs'}"
    published: dict[str, list[dict[str, str]]] = defaultdict(list)
    with (_REFERENCE / "nccl" / "all_reduce.csv").open(encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table):
            published[row["id"]].append(row)
    for path in _LOGS:
        log, rows = read_all_reduce(SourceFile(path.name, path)), published[path.stem]
        times: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            times[int(row["size_bytes"])].append(float(row["time_us_in_place"]) * 1e-6)
        layouts = {(int(row["nodes"]), int(row["gpus_per_node"])) for row in rows}
        assert layouts == {(log.nodes, log.gpus_per_node)}, path.name
        expected = {size: median(found) for size, found in times.items() if size > 0}
        assert dict(log.samples) == pytest.approx(expected, rel=1e-9), path.name


def test_a_second_collective_in_a_log_is_found(write: Write) -> None:
    """A reduce_scatter prints the columns of an all-reduce, and half of its busbw."""
    text = nccl_log(root=True)
    rows = nccl_log(root=True, times={33_554_432: 3000.0}).splitlines()
    busbw = 33_554_432 / 3000.0 / 1e3 * 0.75
    rows = [re.sub(r"\S+ 0e\+00$", f"{busbw:.2f} 0e+00", row) for row in rows]
    line = len(text.splitlines()) + 1 + next(i for i, r in enumerate(rows) if "  33554432" in r)
    said = rf"txt:{line}: busbw/algbw is 0\.\d+, but an all-reduce of the 4 ranks that are listed"
    with pytest.raises(ImportFailedError, match=said):
        read_all_reduce(write(text + "\n".join(rows)))


@pytest.mark.parametrize("redop", ["-1", "0", ""], ids=["all_gather", "broadcast", "no root"])
def test_an_older_collective_without_redop_is_another(write: Write, redop: str) -> None:
    """A version that leaves the column blank."""
    text = nccl_log(root=True).replace("sum      -1", redop)
    with pytest.raises(
        ImportFailedError, match=r"txt:9: this row is of another collective \(it has"
    ):
        read_all_reduce(write(text))


def test_nccl_tests_without_mpi(write: Write) -> None:
    """Every process calls itself rank 0 of one."""
    own = nccl_log(root=True, nodes=1, gpus=2).splitlines()
    again = [line.replace("on node0", "on node1") for line in own]
    both = [line for pair in zip(own, again, strict=True) for line in pair]
    said = "each process ran alone (rank 0 is listed twice, on node0 and node1): nccl-tests was "
    with pytest.raises(ImportFailedError, match=re.escape(f"file.txt:6: {said}")):
        read_all_reduce(write("\n".join(both)))


@pytest.mark.parametrize("text", ['[{"numCycle":0,"name":"AllReduce"}]', "numCycle,collective,x\n"])
def test_the_file_of_rccl_tests(write: Write, text: str) -> None:
    with pytest.raises(ImportFailedError, match="is what rccl-tests writes with -Z; wanted what"):
        read_all_reduce(write(text))


def test_logs_in_other_encodings(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    text = f"D\u00e9but du job\n{nccl_log(root=True)}"
    for encoding in ("latin-1", "utf-16", "utf-8"):
        path.write_bytes(text.encode(encoding))
        assert len(read_all_reduce(SourceFile("log.txt", path)).samples) == len(TIMES)
    path.write_bytes(text.encode("latin-1") + b"\0")
    with pytest.raises(ImportFailedError, match=r"log\.txt: this is not text"):
        read_all_reduce(SourceFile("log.txt", path))


def test_nccl_tests_of_several_kinds_are_not_averaged(write: Write) -> None:
    """As `all_reduce_perf -d all` writes them; each kind has a speed of its own."""
    one = nccl_log(root=True)
    other = one.replace("  float  ", "  half  ")
    with pytest.raises(ImportFailedError, match=r"several kinds \(float sum, half sum\); keep"):
        read_all_reduce(write(one + other))
    document = json_of()
    again = [row | {"redop": "max"} for row in document["results"]]
    document["results"] = [*(row | {"redop": "sum"} for row in document["results"]), *again]
    with pytest.raises(ImportFailedError, match="several kinds"):
        read_all_reduce(write(json.dumps(document)))
