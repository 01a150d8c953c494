"""Files that others wrote: logs in both layouts of nccl-tests, CSV tables, profiles, lists.

Every log written here is SYNTHETIC. With DDPSIM_REFERENCE_DATA naming a folder of published
logs (`nccl/logs/ID.txt`, and their in-place times in `nccl/all_reduce.csv`), those are read too.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nccl_log_writer import TIMES, nccl_log

from ddpsim.errors import DdpsimError, ImportFailedError
from ddpsim.importers.all_reduce import read_all_reduce
from ddpsim.importers.profiles import model
from ddpsim.importers.profiles.model import read_parameters, read_profile
from ddpsim.scenario.quantity import SourceFile
from ddpsim.workload.model import ITEM_BYTES, Buffer

Write = Callable[..., SourceFile]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def call(text: str, name: str = "file.txt") -> SourceFile:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return SourceFile(name, path)

    return call


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
    data = _json()
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


def _json(*, nodes: int = 2, processes: int = 2, threads: int = 1, gpus: int = 1) -> dict[str, Any]:
    """As nccl-tests' src/util.cu writes it: one device entry a process. SYNTHETIC."""
    ranks = nodes * processes * threads * gpus

    def half(size: int, time_us: float) -> dict[str, Any]:
        algbw = size / time_us / 1e3
        return {
            "time": time_us,
            "alg_bw": algbw,
            "bus_bw": algbw * 2 * (ranks - 1) / ranks,
            "nwrong": 0.0,
        }

    hosts = [f"node{node}" for node in range(nodes) for _ in range(processes)]
    return {
        "version": 2,
        "args": ["all_reduce_perf", "-J", "log.json"],
        "config": {
            "nthreads": threads,
            "ngpus": gpus,
            "devices": [
                {"rank": i, "group": 0, "hostname": host, "device_info": "GPU"}
                for i, host in enumerate(hosts)
            ],
        },
        "results": [
            {"size": size, "out_of_place": half(size, 2 * us), "in_place": half(size, us)}
            for size, us in TIMES.items()
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
    }


@pytest.mark.parametrize(
    ("threads", "gpus"),
    [(1, 1), (1, 4), (2, 1), (2, 4)],
    ids=["a process a GPU", "four GPUs a process", "two threads", "two threads of four GPUs"],
)
def test_the_json_of_nccl_tests(write: Write, threads: int, gpus: int) -> None:
    log = read_all_reduce(write(json.dumps(_json(threads=threads, gpus=gpus)), "log.json"))
    assert (log.kind, log.nodes, log.gpus_per_node) == ("nccl-tests JSON", 2, 2 * threads * gpus)
    assert log.gpus == ("GPU",)
    assert log.samples == tuple((size, pytest.approx(us * 1e-6)) for size, us in TIMES.items())


def test_json_whose_sums_nobody_checked(write: Write) -> None:
    """`-c 0` writes null for what the text calls N/A."""
    log = _json()
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
    log = _json()
    spoil(log)
    with pytest.raises(ImportFailedError, match=re.escape(message)):
        read_all_reduce(write(json.dumps(log), "log.json"))


def test_json_that_was_cut_off(write: Write) -> None:
    with pytest.raises(ImportFailedError, match=r"this is not JSON .*was the run cut off"):
        read_all_reduce(write(json.dumps(_json())[:-20], "log.json"))


def test_nccl_tests_of_one_node_and_of_rows_out_of_order(write: Write) -> None:
    text = nccl_log(root=True, nodes=1, gpus=4, times={1024: 30.0, 512: 10.0, 0: 1.0})
    log = read_all_reduce(write(text))
    assert (log.nodes, log.gpus_per_node) == (1, 4)
    assert [size for size, _ in log.samples] == [512, 1024]


def test_a_repeated_size_counts_once_by_its_median(write: Write) -> None:
    rows = [f"4096,{time_us},1,2" for time_us in (10, 90, 20)]
    log = read_all_reduce(write("\n".join(["size_bytes,time_us,nodes,gpus_per_node", *rows])))
    assert log.samples == ((4096, pytest.approx(20e-6)),)


def test_csv_with_comments_other_columns_and_another_order(write: Write) -> None:
    text = (
        "# SYNTHETIC\n"
        "size_bytes,nodes,gpus_per_node,note,time_us\n"
        "8,2,8,a,11.5\n"
        "1048576,2,8,b,140\n"
    )
    log = read_all_reduce(write(text, "file.csv"))
    assert (log.kind, log.world_size) == ("all-reduce CSV", 16)
    assert log.samples == ((8, pytest.approx(11.5e-6)), (1_048_576, pytest.approx(140e-6)))


def test_a_column_named_twice(write: Write) -> None:
    text = "# SYNTHETIC\nsize_bytes,time_us,time_us,nodes,gpus_per_node\n8,11.5,99,2,8\n"
    with pytest.raises(
        ImportFailedError, match=r"file\.txt:2: names the column time_us twice; keep"
    ):
        read_all_reduce(write(text))


def test_times_that_no_link_can_reach(write: Write) -> None:
    """Milliseconds, taken for microseconds; what is small tells nothing."""
    header = "size_bytes,time_us,nodes,gpus_per_node\n"
    said = "says that 1048576 bytes took 0.09 us on 8 ranks, which no link can reach (a bus "
    with pytest.raises(ImportFailedError, match=re.escape(said)):
        read_all_reduce(write(f"{header}1024,0.02,1,8\n1048576,0.09,1,8\n"))
    assert read_all_reduce(write(f"{header}1024,0.00001,1,8\n1048576,0.1,1,8\n")).samples


def test_csv_columns_in_any_order(write: Write) -> None:
    text = "nodes,gpus_per_node, time_us,size_bytes\n2,8,11.5,8\n"
    assert read_all_reduce(write(text)).samples == ((8, pytest.approx(11.5e-6)),)


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


PROFILE: dict[str, Any] = {
    "schema": "ddpsim.model-profile/1",
    "batch_per_rank": 8,
    "ready_origin": "backward_start",
    "forward_s": 0.001,
    "backward_s": 0.002,
    "optimizer_s": 0.0001,
    "parameters": [
        {"name": "a.weight", "numel": 100, "dtype": "float32", "ready_s": 0.002},
        {"name": "a.bias", "numel": 10, "dtype": "torch.bfloat16", "ready_s": 0.0015},
        {"name": "unused", "numel": 1, "dtype": "float32", "ready_s": None, "sparse": True},
    ],
    "buffers": [{"numel": 4, "dtype": "bool"}],
}


def test_json_profile(write: Write) -> None:
    profile = read_profile(write(json.dumps(PROFILE), "profile.json"))
    assert profile.in_registration_order
    assert profile.ready_origin == "backward_start"
    assert (profile.forward_s, profile.backward_s, profile.optimizer_s) == (0.001, 0.002, 0.0001)
    assert profile.batch_per_rank == 8
    assert profile.buffers == (("bool", 4),)
    assert [(p.name, p.numel, p.dtype, p.ready_s, p.sparse) for p in profile.parameters] == [
        ("a.weight", 100, "float32", 0.002, False),
        ("a.bias", 10, "bfloat16", 0.0015, False),
        ("unused", 1, "float32", None, True),
    ]


def test_a_model_without_buffers_needs_no_word_of_them(write: Write) -> None:
    silent = {key: value for key, value in PROFILE.items() if key != "buffers"}
    assert read_profile(write(json.dumps(silent), "p.json")).buffers == ()


def test_gradients_that_come_after_the_backward_are_of_another_unit(write: Write) -> None:
    """Medians, each taken on its own, need not add up: 5 % later are none."""
    for backward_s in (0.002 / 1.04, 0.002 / 1.06):
        path = write(json.dumps(PROFILE | {"backward_s": backward_s}), "p.json")
        if backward_s > 0.0019:
            assert read_profile(path).backward_s == backward_s
            continue
        said = "ready_s of 'a.weight' is 0.002, but the whole backward takes 0.00188679; wanted sec"
        with pytest.raises(ImportFailedError, match=re.escape(said)):
            read_profile(path)


def test_a_scaled_profile_is_no_measurement(write: Write) -> None:
    scaled = PROFILE | {"scaled_to": "a100-sxm-40gb"}
    assert read_profile(write(json.dumps(scaled), "p.json")).scaled_to == "a100-sxm-40gb"
    assert read_profile(write(json.dumps(PROFILE), "p.json")).scaled_to is None


@pytest.mark.parametrize("key", ["device", "optimizer", "scaled_to"])
@pytest.mark.parametrize("value", ["", 4])
def test_what_a_profile_was_measured_with_is_a_name(write: Write, key: str, value: object) -> None:
    with pytest.raises(ImportFailedError, match=f"{key} is {value!r}; wanted a name"):
        read_profile(write(json.dumps(PROFILE | {key: value}), "p.json"))


def test_iterations_tell_their_spread(write: Write) -> None:
    known = PROFILE | {"iterations_s": [[0.1, 0.2], [0.3, 0.4]]}
    assert read_profile(write(json.dumps(known), "p.json")).iterations_s == ((0.1, 0.2), (0.3, 0.4))


def test_a_later_micro_batch_may_be_known(write: Write) -> None:
    later = {"later_forward_s": 0.0009, "later_backward_s": 0.0025}
    profile = read_profile(write(json.dumps(PROFILE | later), "p.json"))
    assert (profile.later_forward_s, profile.later_backward_s) == (0.0009, 0.0025)
    assert read_profile(write(json.dumps(PROFILE), "p.json")).later_backward_s is None
    for key, seconds in later.items():
        half = PROFILE | {key: seconds}
        with pytest.raises(ImportFailedError, match=f"{key} stands alone; wanted later_forward_s "):
            read_profile(write(json.dumps(half), "p.json"))
        with pytest.raises(ImportFailedError, match=key):
            read_profile(write(json.dumps(PROFILE | later | {key: 0}), "p.json"))


@pytest.mark.parametrize("sigma", [0, 0.004, 1])
def test_how_far_times_may_be_off_is_stated_or_unknown(write: Write, sigma: float) -> None:
    assert read_profile(write(json.dumps(PROFILE | {"sigma": sigma}), "p.json")).sigma == sigma
    for unknown in (PROFILE, PROFILE | {"sigma": None}):
        assert read_profile(write(json.dumps(unknown), "p.json")).sigma is None


def test_the_step_with_ddp_is_longer_or_unknown(write: Write) -> None:
    known = PROFILE | {"with_ddp_s": 1.0}
    assert read_profile(write(json.dumps(known), "p.json")).with_ddp_s == 1.0
    assert read_profile(write(json.dumps(PROFILE), "p.json")).with_ddp_s is None
    for wrong in (0, -1, "x", 1e-4):
        with pytest.raises(ImportFailedError, match="with_ddp_s is"):
            read_profile(write(json.dumps(PROFILE | {"with_ddp_s": wrong}), "p.json"))


def test_how_a_model_fares_beside_all_reduces_may_be_known(write: Write) -> None:
    def read(**more: Any) -> Any:
        return read_profile(write(json.dumps(PROFILE | more), "p.json")).interference_exponent

    assert read(interference_exponent=0.8, interference_exponent_stderr=0.04) == (0.8, 0.04)
    assert read(interference_exponent=1.1) == (1.1, 0.0)
    assert read() is None
    assert read(interference_exponent=None) is None
    for wrong in (
        {"interference_exponent": -1},
        {"interference_exponent": 11},
        {"interference_exponent": "x"},
    ):
        with pytest.raises(ImportFailedError, match="interference_exponent is"):
            read(**wrong)
    assert read(interference_exponent=0.04, interference_exponent_stderr=0.06) == (0.04, 0.06)
    with pytest.raises(ImportFailedError, match="exponent_stderr is 11; wanted at most 10"):
        read(interference_exponent=1, interference_exponent_stderr=11)


def test_a_hook_of_ddp_may_be_known(write: Write) -> None:
    first, *others = PROFILE["parameters"]

    def with_hook(seconds: Any) -> SourceFile:
        parameters = [first | {"ddp_hook_s": seconds}, *others]
        return write(json.dumps(PROFILE | {"parameters": parameters}), "p.json")

    for known in (0, 2e-5, None):
        hooks = [p.ddp_hook_s for p in read_profile(with_hook(known)).parameters]
        assert hooks == [known, *(None for _ in others)]
    for wrong in (-1e-6, "x", True):
        with pytest.raises(ImportFailedError, match=f"ddp_hook_s of {first['name']!r} is"):
            read_profile(with_hook(wrong))


@pytest.mark.parametrize("sigma", [-0.1, 1.5, "small", True, [0.1]])
def test_what_is_no_sigma(write: Write, sigma: Any) -> None:
    with pytest.raises(ImportFailedError, match=r"sigma is .*; wanted a"):
        read_profile(write(json.dumps(PROFILE | {"sigma": sigma}), "p.json"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0.1, 0.2], "iterations_s must be a list of iterations, each a list of one number"),
        ([[0.1], [0.1, 0.2]], "iterations_s must be a list of iterations, each a list of one"),
        ([[]], "iterations_s must be a list of iterations, each a list of one number per rank"),
        ([[0.0]], "iterations_s"),
        ([["x"]], "iterations_s"),
    ],
)
def test_iterations_that_are_none(write: Write, rows: Any, message: str) -> None:
    with pytest.raises(ImportFailedError, match=message):
        read_profile(write(json.dumps(PROFILE | {"iterations_s": rows}), "p.json"))


@pytest.mark.parametrize("key", sorted(set(PROFILE) - {"buffers"}))
def test_a_profile_needs_each_key(write: Write, key: str) -> None:
    lacking = {name: value for name, value in PROFILE.items() if name != key}
    with pytest.raises(ImportFailedError, match=key):
        read_profile(write(json.dumps(lacking), "profile.json"))


def test_csv_profile_is_a_backward_list(write: Write) -> None:
    text = "order,param_name,numel,ready_us\n0,fc.bias,10,0\n1,fc.weight,1000,12.5\n"
    profile = read_profile(write(text, "profile.csv"))
    assert not profile.in_registration_order
    assert profile.ready_origin is None
    assert profile.forward_s is None
    assert [(p.name, p.numel, p.ready_s) for p in profile.parameters] == [
        ("fc.bias", 10, 0.0),
        ("fc.weight", 1000, pytest.approx(12.5e-6)),
    ]


def test_parameter_list(write: Write) -> None:
    text = "name,shape,dtype\nw,512x3x7x7,float32\nb,512,torch.float16\nt,2X2,float64\n"
    found = read_parameters(write(text, "parameters.csv")).parameters
    assert [(p.name, p.numel, p.dtype, p.dimensions, p.ready_s) for p in found] == [
        ("w", 512 * 3 * 49, "float32", 4, None),
        ("b", 512, "float16", 1, None),
        ("t", 4, "float64", 2, None),
    ]


@pytest.mark.parametrize("dtype", ["int64", "torch.uint8", "bool"])
def test_a_parameter_of_integers_gets_no_gradient(write: Write, dtype: str) -> None:
    said = f"{dtype!r} is no dtype of a parameter that gets a gradient; list those alone, wanted"
    with pytest.raises(ImportFailedError, match=f"list.csv:3: {said}"):
        read_parameters(write(f"name,shape,dtype\nw,2,float32\nids,2,{dtype}\n", "list.csv"))
    parameters = [p | {"dtype": dtype} for p in PROFILE["parameters"]]
    with pytest.raises(ImportFailedError, match=f"p.json: {said}"):
        read_profile(write(json.dumps(PROFILE | {"parameters": parameters}), "p.json"))


def test_a_profile_names_each_parameter_once(write: Write) -> None:
    parameters = [*PROFILE["parameters"], PROFILE["parameters"][0]]
    with pytest.raises(ImportFailedError, match=r"p\.json: lists 'a\.weight' twice; a parameter"):
        read_profile(write(json.dumps(PROFILE | {"parameters": parameters}), "p.json"))
    with pytest.raises(ImportFailedError, match=r"p\.csv: lists 'a' twice; a parameter"):
        read_profile(write("param_name,numel,ready_us\na,4,1\na,4,2\n", "p.csv"))


def test_the_bytes_of_every_buffer_that_is_read_are_known(write: Write) -> None:
    kinds = ("complex64", "complex128", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint64")
    buffers = [{"numel": 4, "dtype": f"torch.{kind}"} for kind in kinds]
    read = read_profile(write(json.dumps(PROFILE | {"buffers": buffers}), "p.json")).buffers
    assert [Buffer(*each).size_bytes for each in read] == [32, 64, 4, 4, 8, 32]
    assert ITEM_BYTES.keys() == set(model._BUFFER_DTYPES)


@pytest.mark.parametrize(
    ("shape", "extents"),
    [
        ("(512, 3)", (512 * 3, 2)),
        ('"(512, 3)"', (512 * 3, 2)),
        ("torch.Size([512, 3])", (512 * 3, 2)),
        ("(512,)", (512, 1)),
        ("()", (1, 0)),
        ("torch.Size([])", (1, 0)),
    ],
)
def test_shapes_as_torch_prints_them(write: Write, shape: str, extents: tuple[int, int]) -> None:
    text = f"# from named_parameters()\nname,shape,dtype\nw,{shape},torch.float32\n"
    (found,) = read_parameters(write(text)).parameters
    assert (found.name, found.dtype) == ("w", "float32")
    assert (found.numel, found.dimensions) == extents


def test_an_error_below_comments_names_its_line(write: Write) -> None:
    with pytest.raises(ImportFailedError) as caught:
        read_parameters(write("# a\n\nname,shape,dtype\nw,(0, 5),float32\n"))
    assert caught.value.line == 4


_LOG = nccl_log(root=True)


@given(
    st.integers(0, len(_LOG)),
    st.integers(0, 40),
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from([_LOG, json.dumps(PROFILE), "name,shape,dtype\nw,5x5,float32\n"]),
)
def test_a_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int, junk: str, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.txt"
    start %= len(text)
    path.write_text(text[:start] + junk + text[start + length :], encoding="utf-8")
    for read in (read_all_reduce, read_profile, read_parameters):
        message = _refusal(read, SourceFile("damaged.txt", path))
        assert message is None or message.startswith("damaged.txt:")
        assert message is None or len(message) < 500


def _refusal(read: Callable[[SourceFile], object], source: SourceFile) -> str | None:
    try:
        read(source)
    except DdpsimError as error:
        return str(error)
    return None


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


_PREFIXES = {
    "srun --label": " 0: ",
    "mpirun --tag-output": "[1,0]<stdout>:",
    "mpirun 5": "[prterun-node0-1234@1,0]<stdout>: ",
    "skypilot": "(head, rank=0, pid=3808) [1,0]<stdout>:",
    "kubectl --timestamps": "2024-11-05T10:11:12.123456789Z ",
    "quoted": "> ",
    "indented": "    ",
    "coloured": "\x1b[1;36m",
}


@pytest.mark.parametrize("root", [False, True], ids=["older layout", "layout with root"])
@pytest.mark.parametrize("prefix", _PREFIXES.values(), ids=_PREFIXES)
def test_nccl_tests_behind_a_prefix(write: Write, prefix: str, *, root: bool) -> None:
    lines = nccl_log(root=root).splitlines()
    plain = read_all_reduce(write("\n".join(lines)))
    assert read_all_reduce(write("\n".join(prefix + line for line in lines))) == plain


def test_a_prefix_before_rows_alone(write: Write) -> None:
    text = nccl_log(root=True)
    labelled = re.sub(r"^ +(?=\d+ )", "[STAT]:", text, flags=re.MULTILINE)
    assert labelled.count("[STAT]:1048576 ") == 1
    assert read_all_reduce(write(labelled)) == read_all_reduce(write(text))


def test_a_row_that_is_a_comment_is_not_read(write: Write) -> None:
    text = nccl_log(root=True).replace("  1048576  ", "[0] #  1048576  ")
    assert 1_048_576 not in dict(read_all_reduce(write(text)).samples)


def _broken(at: int, by: str, *, root: bool = True, host: str = "node0") -> str:
    """A log whose row of 1 MiB is broken before a cell."""
    lines = nccl_log(root=root).replace("node0", host).splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("  1048576"))
    cells = lines[row].split()
    lines[row] = f"  {'  '.join(cells[:at])}{by}"
    lines.insert(row + 2, f"   {'  '.join(cells[at:])}")
    return "\n".join(lines)


_INFO = ":1000:1001 [0] NCCL INFO Channel 04/0 : 7[3] -> 0[0] [receive] via NET/IB/2"


@pytest.mark.parametrize("root", [False, True], ids=["older layout", "layout with root"])
@pytest.mark.parametrize("half", [0, 4])
@pytest.mark.parametrize(
    ("by", "host"),
    [
        (f"node0{_INFO}", "node0"),
        (f"2e3f9a{_INFO}", "2e3f9a"),
        (f"[0] far-away{_INFO}", "node0"),
        (f"\nnode0{_INFO}", "node0"),
        (
            "[2025-01-02 03:04:05] node0:1:1 [0] transport/net.cc:12 NCCL WARN slow",
            "node0",
        ),
    ],
    ids=["stuck to it", "host of digits", "label", "new line", "warning"],
)
def test_rows_that_nccl_broke_are_mended(
    write: Write, half: int, by: str, host: str, *, root: bool
) -> None:
    plain = nccl_log(root=root).replace("node0", host)
    log = read_all_reduce(write(_broken((5 if root else 4) + half, by, root=root, host=host)))
    assert log == read_all_reduce(write(plain))


def test_a_row_that_cannot_be_mended_is_left_out(write: Write) -> None:
    """The break goes through a number, or text sticks to the root."""
    text = _broken(6, f" 74node0{_INFO}")
    for broken in (text, _broken(5, f"[1,0]<stdout>:node0{_INFO}")):
        log = read_all_reduce(write(broken))
        assert [size for size, _ in log.samples] == [1024, 67_108_864]
        assert log.warnings == ("file.txt: 1 row is left out, broken or cut off: line 11",)
    several = "\n".join([text] * 10)
    (said,) = read_all_reduce(write(several)).warnings
    assert said.startswith("file.txt: 10 rows are left out, broken or cut off: lines 11, ")
    assert said.endswith(", ...")


@pytest.mark.parametrize("cells", [3, 5, 9, 12])
def test_a_last_row_that_was_cut_off_is_left_out(write: Write, cells: int) -> None:
    lines = nccl_log(root=True).splitlines()
    last = next(i for i, line in enumerate(lines) if line.startswith("  67108864"))
    cut = "  ".join(lines[last].split()[:cells])
    log = read_all_reduce(write("\n".join([*lines[:last], cut])))
    assert [size for size, _ in log.samples] == [1024, 1_048_576]
    assert log.warnings == (f"file.txt: 1 row is left out, broken or cut off: line {last + 1}",)
    head = next(i for i, line in enumerate(lines) if line.startswith("  1024"))
    with pytest.raises(ImportFailedError, match=r"holds no whole result row; wanted nccl-tests'"):
        read_all_reduce(write("\n".join([*lines[:head], cut])))


def test_a_damaged_row_in_the_middle_is_refused(write: Write) -> None:
    lines = nccl_log(root=True).splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("  1048576"))
    cells = lines[row].split()
    for cut, said in (
        (cells[:9], "this row has 9 of 13 columns: it is damaged; remove the row"),
        ([*cells[:4], "-1oops", *cells[5:]], "this row has '-1oops' as its root, which is no"),
    ):
        lines[row] = "  ".join(cut)
        with pytest.raises(ImportFailedError, match=re.escape(f"file.txt:{row + 1}: {said}")):
            read_all_reduce(write("\n".join(lines)))


@pytest.mark.parametrize("root", [False, True], ids=["older layout", "layout with root"])
def test_nccl_tests_without_their_header(write: Write, *, root: bool) -> None:
    text = nccl_log(root=root)
    headless = "\n".join(line for line in text.splitlines() if "redop" not in line)
    assert read_all_reduce(write(headless)) == read_all_reduce(write(text))


def test_a_root_tells_a_cut_off_row_without_a_header_from_a_whole_one(write: Write) -> None:
    """12 of 13 cells are as many as a table without roots has: no figure is read a cell early."""
    lines = [line for line in nccl_log(root=True).splitlines() if "redop" not in line]
    last = next(i for i, line in enumerate(lines) if line.startswith("  67108864"))
    log = read_all_reduce(write("\n".join([*lines[:last], lines[last].rpartition(" ")[0]])))
    assert [size for size, _ in log.samples] == [1024, 1_048_576]
    assert log.warnings == (f"file.txt: 1 row is left out, broken or cut off: line {last + 1}",)


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
    document = _json()
    again = [row | {"redop": "max"} for row in document["results"]]
    document["results"] = [*(row | {"redop": "sum"} for row in document["results"]), *again]
    with pytest.raises(ImportFailedError, match="several kinds"):
        read_all_reduce(write(json.dumps(document)))


def test_a_parameter_has_one_row(write: Write) -> None:
    rows = "name,shape,dtype\nw,4x4,float32\nb,4,float32\nw,8,float32\n"
    said = "file.txt:4: 'w' stands in line 2 already; a parameter has one row, shared ones too"
    with pytest.raises(ImportFailedError, match=re.escape(said)):
        read_parameters(write(rows))
