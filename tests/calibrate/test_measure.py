"""Measuring: real gloo jobs of two ranks on this machine, the ways they fail, and profiles."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

import torch
import torch.distributed as dist
import typer
from measure_helpers import Pair
from rich.console import Console
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from calibrate.cli import _is_first
from calibrate.cli import profile as command
from calibrate.files import unwritable
from calibrate.measure.clock import Clock, Lap
from calibrate.measure.cluster.plan import Slot, Task, Team, default_plan, teams
from calibrate.measure.cluster.rounds import build_round
from calibrate.measure.cluster.session import Options, measure, measure_locally, relative_mad
from calibrate.measure.ddp.log import logged, start_log
from calibrate.measure.errors import LostContactError, MeasureError
from calibrate.measure.host.clocks import clock_offsets
from calibrate.measure.host.doctor import check_clocks, clock_offset, diagnose
from calibrate.measure.host.environment import (
    Facts,
    check_same,
    check_same_machine,
    environment,
    rank_facts,
)
from calibrate.measure.host.inspect import Host, inspect_host
from calibrate.measure.host.machine import free_memory_bytes, stolen_s, text_of
from calibrate.measure.host.nvidia_smi import Gpu
from calibrate.measure.model.ddp_alone import around_hook
from calibrate.measure.model.document import ready_times
from calibrate.measure.model.profile import (
    Document,
    ProfileOptions,
    profile,
    profile_alone,
    profile_in_job,
    profile_locally,
    write_profile,
)
from calibrate.measure.model.samples import Samples, hook_cost_s
from calibrate.measure.model.scaling import scale_ends, scale_profile
from calibrate.measure.model.training import (
    Training,
    _moved,
    broadcast_buffers,
    prepare,
    reduced_parameters,
)
from calibrate.measure.ranks.job import _told, join, read_place
from calibrate.measure.ranks.launch import _problem, free_port
from calibrate.measure.ranks.process_group import process_group
from calibrate.measure.ranks.progress import Reporter
from calibrate.measure.ranks.rank import FAILED, LOST
from calibrate.records.record import Layout, Record, load_record
from calibrate.records.rounds import Beside
from ddpsim import load_scenario, simulate
from ddpsim.errors import ImportFailedError
from ddpsim.importers.profiles.model import read_profile
from ddpsim.scenario.quantity import SourceFile

HERE = Path(__file__).parent.parent
# seconds, not minutes: few repetitions, and no room for the largest all-reduces
SMALL = {"most_repetitions": 2, "memory_budget_bytes": 160 * 2**20, "time_budget_s": 300.0}


def ranks(count: int, output: Path, **options: Any) -> Record:
    return measure_locally(count, Options.model_validate({"output": output, **SMALL, **options}))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    path = tmp_path_factory.mktemp("measure") / "record.json"
    return path, ranks(2, path, data_loader="measure_helpers:batches")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of one rank, in this process."""
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in (place | {"MASTER_PORT": free_port()}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    assert not dist.is_initialized()


# --- measure -----------------------------------------------------------------------------------


def test_a_record_of_two_ranks_holds_every_kind(measured: tuple[Path, Record]) -> None:
    path, record = measured
    assert load_record(path) == record
    assert {m.kind for m in record.measurements} == {
        "all_reduce", "broadcast", "reduce_scatter", "all_gather", "point_to_point",
        "device_copy", "device_cast", "optimizer", "ddp_hook", "compute", "jitter", "data_loader",
    }  # fmt: skip
    variants = {(m.kind, m.variant) for m in record.measurements}
    assert variants >= {
        ("all_reduce", "alone"), ("all_reduce", "in turn with gemm"), ("all_reduce", "beside gemm"),
        ("all_reduce", "with gemm"), ("all_reduce", "with memory"), ("compute", "gemm alone"),
        ("all_reduce", "alone half"), ("all_reduce", "with gemm half"),
        ("compute", "gemm with all_reduce half"),
        ("compute", "gemm with all_reduce"), ("compute", "memory with all_reduce"),
        ("compute", "layer alone"), ("compute", "layer with all_reduce"),
        ("compute", "layer with one all_reduce"), ("compute", "gemm with one all_reduce half"),
        ("all_reduce", "rested"), ("all_reduce", "in a row"),
        ("ddp_hook", "with ddp"), ("ddp_hook", "without"), ("ddp_hook", "copies back"),
        ("device_copy", "alone"), ("device_copy", "together"), ("device_cast", "compress"),
        ("device_cast", "compress together"), ("device_cast", "decompress together"),
        ("optimizer", "adamw foreach"),
    }  # fmt: skip
    assert (record.layout.nodes, record.layout.gpus_per_node) == (1, 2)
    assert record.environment.backend == "gloo"
    assert record.environment.variables["OMP_NUM_THREADS"] == "1"
    assert record.environment.details["threads_per_rank"] == "1"
    assert "memory budget" in record.environment.details["skipped"]
    assert all(min(m.samples_s) > 0 and len(m.warmup_s) == 3 for m in record.measurements)


def test_ddps_hook_runs_between_what_times_it(alone: None) -> None:
    """A gradient is in the bucket after it, and not before."""
    dist.init_process_group("gloo")
    try:
        layers = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
        ddp = torch.nn.parallel.DistributedDataParallel(layers)
        buckets, before, after = list[Tensor](), list[bool](), list[bool]()

        def keep(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            buckets.append(bucket.buffer())
            done = torch.futures.Future[Tensor]()
            done.set_result(bucket.buffer())
            return done

        def is_there(parameter: Tensor) -> bool:
            assert parameter.grad is not None
            wanted, held = parameter.grad.flatten(), buckets[-1].detach()
            return any(torch.equal(part, wanted) for part in held.unfold(0, len(wanted), 1))

        keep.__annotations__.clear()  # torch does not take them as text
        ddp.register_comm_hook(None, keep)
        for seed in (1, 2, 3):  # buckets are rebuilt after the first
            if seed == 3:
                for parameter in layers.parameters():
                    around_hook(
                        parameter,
                        lambda p: before.append(is_there(p)),
                        lambda p: after.append(is_there(p)),
                    )
            torch.manual_seed(seed)
            ddp(torch.rand(7, 3)).pow(2).sum().backward()
            layers.zero_grad()
        assert (before, after) == ([False] * 4, [True] * 4)
    finally:
        dist.destroy_process_group()


def test_what_ddps_hooks_take_is_told_of_weights_and_of_biases(alone: None) -> None:
    """The lap begins after the biases' hooks, and ends after the weights'."""
    job = join(10.0)
    try:
        slot = Slot("ddp_hook", "copies in", size_bytes=2**19, parameters=4)
        run = build_round(Task((slot,), Team("none", 1, 1, (0,))), job, None)
        for _ in range(3):  # buckets are rebuilt after the first
            (lap,) = run()
            assert isinstance(lap.start, float)
            assert isinstance(lap.end, float)
            assert lap.start > 0
            assert lap.end > 0
    finally:
        job.leave()


def test_jitter_is_kept_by_rank_and_in_order(measured: tuple[Path, Record]) -> None:
    (jitter,) = (m for m in measured[1].measurements if m.kind == "jitter")
    first, second = jitter.samples_by_rank_s
    assert jitter.samples_s == tuple(map(max, first, second))
    assert len(first) == 2


def test_compute_beside_all_reduces_is_kept_by_rank(measured: tuple[Path, Record]) -> None:
    found = [m for m in measured[1].measurements if m.kind == "compute"]
    assert found
    for compute in found:
        assert compute.samples_s == tuple(map(max, *compute.samples_by_rank_s))


def test_resume_repeats_nothing(measured: tuple[Path, Record]) -> None:
    path, record = measured
    again = ranks(2, path, data_loader="measure_helpers:batches", resume=True, time_budget_s=1e-3)
    assert again.measurements == record.measurements


def test_resume_refuses_the_record_of_another_layout_or_machine(
    measured: tuple[Path, Record], tmp_path: Path, alone: None
) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(measured[0].read_bytes())
    with pytest.raises(MeasureError) as raised:
        measure(Options(output=path, resume=True))
    assert str(raised.value) == (
        f"{path} was measured with gpus_per_node 2, but this job has 1: name another file"
    )
    document = json.loads(path.read_text())
    document["environment"]["machine"] = "abacus"
    path.write_text(json.dumps(document))
    with pytest.raises(MeasureError, match="was measured with machine abacus, but this job has "):
        measure(Options(output=path, resume=True))


def test_resume_refuses_another_processor_of_the_same_name(
    measured: tuple[Path, Record], tmp_path: Path
) -> None:
    here = measured[1].environment
    assert here.processor
    elsewhere = here.model_copy(update={"details": here.details | {"processor": "model 3"}})
    silent = here.model_copy(update={"details": {}})
    record, fresh = measured[1], measured[1]
    path = tmp_path / "record.json"
    said = f"was measured with processor model 3, but this job has {here.processor}: name another"
    with pytest.raises(MeasureError, match=re.escape(said)):
        check_same_machine(record.model_copy(update={"environment": elsewhere}), fresh, path)
    check_same_machine(record.model_copy(update={"environment": silent}), fresh, path)


@pytest.mark.parametrize(
    ("cpuinfo", "machine", "processor"),
    [
        (
            (
                "processor : 0\nvendor_id : AuthenticAMD\ncpu family : 26\nmodel : 2\n"
                "model name : AMD EPYC\n\nprocessor : 1\nmodel : 9\nmodel name : other\n"
            ),
            "AMD EPYC, ",
            "vendor_id AuthenticAMD, cpu family 26, model 2",
        ),
        (
            "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40\n",
            f"{platform.machine()}, ",
            "CPU implementer 0x41, CPU part 0xd40",
        ),
        ("", f"{platform.machine()}, ", ""),
    ],
)
def test_a_processor_is_known_by_its_makers_numbers(
    cpuinfo: str, machine: str, processor: str, tmp_path: Path, alone: None
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(cpuinfo)
    job = join(10.0)
    try:
        found = environment(job, rank_facts(job), tmp_path)
    finally:
        job.leave()
    assert found.machine.startswith(machine)
    assert found.processor == processor
    assert found.model_copy(update={"device": "NVIDIA A100"}).processor == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"variables": {"OMP_NUM_THREADS": "7"}}, "with OMP_NUM_THREADS 7, but this job has "),
        ({"rate": 2e9}, "with --line-rate 16 Gbit/s, but this job has 8 Gbit/s: name another"),
    ],
)
def test_resume_refuses_other_settings(
    change: dict[str, Any], said: str, tmp_path: Path, alone: None
) -> None:
    path = tmp_path / "record.json"
    options = Options(output=path, line_rate_bytes_per_s=1e9, resume=True)
    measure(options, small_plan())
    document = json.loads(path.read_text())
    document["environment"]["variables"] |= change.get("variables", {})
    document["layout"]["line_rate_bytes_per_s"] = change.get("rate", 1e9)
    path.write_text(json.dumps(document))
    with pytest.raises(MeasureError, match=f"was measured {said}"):
        measure(options, small_plan())


def test_resume_may_add_the_line_rate(tmp_path: Path, alone: None) -> None:
    path = tmp_path / "record.json"
    for rate, kept in ((None, None), (1e9, 1e9), (None, 1e9)):
        options = Options(output=path, line_rate_bytes_per_s=rate, resume=True)
        assert measure(options, small_plan()).layout.line_rate_bytes_per_s == kept


def test_resume_says_what_is_wrong_with_a_damaged_record(tmp_path: Path, alone: None) -> None:
    path = tmp_path / "record.json"
    path.write_text("{")
    with pytest.raises(MeasureError, match=r"record\.json"):
        measure(Options(output=path, resume=True), small_plan())


def test_what_takes_longer_than_the_time_left_is_left_out(tmp_path: Path, alone: None) -> None:
    """Twice 20 copies of 512 MiB do not fit into half a second; the smallest does."""
    team, sizes = Team("none", 1, 1, (0,)), (4096, 512 * 2**20)
    slots = [Slot("device_copy", "alone", size) for size in sizes]
    plan = [Task((slot,), team, (20, 40)) for slot in slots]
    record = measure(Options(output=tmp_path / "record.json", time_budget_s=0.5), plan)
    assert [m.size_bytes for m in record.measurements] == [4096]
    assert "536.9 MB: would take " in record.environment.details["skipped"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_end_of_the_parent_ends_the_ranks(number: signal.Signals, tmp_path: Path) -> None:
    """As of `timeout` or a scheduler, a terminal or Ctrl-C, while two ranks measure."""
    path = tmp_path / "record.json"
    code = (  # a shell's background jobs ignore Ctrl-C
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from calibrate.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "measure", "--local", "2", "-o", str(path)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as parent:
        try:
            while not path.exists():
                assert parent.poll() is None
                time.sleep(0.1)
            parent.send_signal(number)
            _, said = parent.communicate(timeout=60)
        finally:
            parent.kill()
    assert parent.returncode == 128 + number
    assert said == (
        f"stopped. What was measured so far is in {path}, if it is there yet; the same command "
        "with --resume goes on from it.\n"
    )
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(path) not in lines


def test_a_killed_rank_is_named_and_the_record_kept(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with pytest.raises(MeasureError) as raised:
        ranks(2, path, data_loader="measure_helpers:dies_on_rank_1")
    assert str(raised.value) == (
        f"rank 1 was killed by SIGKILL: was memory short? What was measured so far is in {path}, "
        "if it is there yet; the same command with --resume goes on from it."
    )
    assert load_record(path).layout.world_size == 2


def test_another_torch_on_a_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("FAKE_TORCH_ON_RANK", "1")
    with pytest.raises(MeasureError) as raised:
        ranks(2, tmp_path / "record.json", data_loader="measure_helpers:batches")
    assert str(raised.value).startswith(
        f"rank 1 has torch 2.12.0, but rank 0 has {torch.__version__}: all ranks must be alike"
    )


def test_ranks_must_be_alike() -> None:
    facts = Facts("2.13", "nccl", "2.29.7", "H100", 8)
    check_same([facts, facts])
    with pytest.raises(MeasureError, match=r"rank 1 has device H200, but rank 0 has H100"):
        check_same([facts, Facts("2.13", "nccl", "2.29.7", "H200", 8)])


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, "the job of 2 ranks did not come about at 127.0.0.1:{port} within 1 s: check that"),
        (1, "rank 1 cannot reach rank 0 at 127.0.0.1:{port} within 1 s: check that rank 0 runs"),
    ],
)
def test_an_unreachable_peer(rank: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in (place | {"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(MeasureError) as raised:
        join(1.0)
    assert str(raised.value).startswith(said.format(port=port))
    seen = "that every rank takes gloo, as this one, which sees 0 CUDA devices for 2 ranks here"
    assert seen in str(raised.value)
    assert not dist.is_initialized()


def test_variables_that_are_missing_or_wrong() -> None:
    given = dict.fromkeys(("LOCAL_RANK", "RANK"), "0") | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(MeasureError, match=r"^WORLD_SIZE, LOCAL_WORLD_SIZE not set: start the r"):
        read_place(given)
    with pytest.raises(MeasureError, match="WORLD_SIZE 3 is no multiple of LOCAL_WORLD_SIZE 2"):
        read_place(given | {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"})
    cyclic = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}
    with pytest.raises(
        MeasureError, match=r"RANK 1 is LOCAL_RANK 0 of 2: .* numbered node by node"
    ):
        read_place(given | cyclic)
    with pytest.raises(MeasureError, match="must be whole numbers"):
        read_place(given | {"WORLD_SIZE": "two", "LOCAL_WORLD_SIZE": "2"})


def small_plan() -> list[Task]:
    team = Team("none", 1, 1, (0,))
    slots = [Slot("device_copy", "alone", size) for size in (4096, 8192, 16384)]
    return [Task((slot,), team, (2, 3)) for slot in slots]


def test_a_full_disk_leaves_the_record_whole(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "record.json", []

    def full(handle: int) -> None:
        written.append(handle)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ddpsim.files.os.fsync", full)
    with pytest.raises(MeasureError) as raised:
        measure(Options(output=path), small_plan())
    assert str(raised.value) == (
        f"{path} cannot be written: the disk is full. Its last whole version is as it was; "
        "make room and go on with --resume"
    )
    assert [m.size_bytes for m in load_record(path).measurements] == [4096]
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_ctrl_c_keeps_the_record(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plan = tmp_path / "record.json", small_plan()

    def stop(self: Reporter, title: str) -> None:
        if "8.192 kB" in title:
            raise KeyboardInterrupt

    monkeypatch.setattr(Reporter, "begin", stop)
    with pytest.raises(MeasureError) as raised:
        measure(Options(output=path), plan)
    assert str(raised.value) == (
        f"stopped. What was measured so far is in {path}, if it is there yet; "
        "the same command with --resume goes on from it."
    )
    monkeypatch.undo()
    assert [m.size_bytes for m in load_record(path).measurements] == [4096]


def test_only_the_kinds_asked_for(tmp_path: Path, alone: None) -> None:
    record = measure(Options(output=tmp_path / "r.json", only=("device_cast",), time_budget_s=1))
    assert {m.kind for m in record.measurements} == {"device_cast"}
    assert relative_mad([1.0, 1.0, 2.0, 3.0, 1.0]) == 0


def test_the_budget_counts_rounds_by_the_clock(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of 20 ms tells of a thousand pieces: of half a second it has 25 at most, not 40."""

    def slow(_task: Task, job: Any, _loader: Any) -> Any:
        def run() -> list[Lap]:
            start = job.clock.mark()
            time.sleep(0.02)
            return [Lap(start, job.clock.mark(), 1000)]

        return run

    monkeypatch.setattr("calibrate.measure.cluster.session.build_round", slow)
    plan = [replace(small_plan()[0], repetitions=(3, 40))]
    record = measure(Options(output=tmp_path / "r.json", time_budget_s=0.5), plan)
    (measured,) = record.measurements
    assert 3 <= len(measured.samples_s) <= 25


def test_a_measurement_that_a_hypervisor_disturbed_is_taken_again(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after of each try: the second of three steals least, all steal too much."""
    clock = iter([0.0, 30.0, 30.0, 31.0, 31.0, 91.0])
    monkeypatch.setattr("calibrate.measure.cluster.session.stolen_s", lambda: next(clock))
    record = measure(Options(output=tmp_path / "r.json", most_repetitions=2), small_plan()[:1])
    (note,) = [m.notes[-1] for m in record.measurements]
    assert note.startswith("the hypervisor ran others on these cores for ")
    assert next(clock, None) is None

    calm = iter([0.0, 30.0, 30.0, 30.0])
    monkeypatch.setattr("calibrate.measure.cluster.session.stolen_s", lambda: next(calm))
    record = measure(Options(output=tmp_path / "s.json", most_repetitions=2), small_plan()[:1])
    assert not any("hypervisor" in note for m in record.measurements for note in m.notes)


def test_stolen_time_is_that_of_the_cores_that_a_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert stolen_s(tmp_path) == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(
        f"cpu  1 2 3 4 5 6 7 999 9 10\ncpu0 1 2 3 4 5 6 7 {tick} 9 10\n"
        f"cpu1 1 2 3 4 5 6 7 500 9 10\ncpu2 1 2 3 4 5 6 7 {2 * tick} 9 10\nintr 1 2 3\n"
    )
    assert stolen_s(tmp_path) == 1.5


@pytest.mark.parametrize("permitted", [True, False])
def test_gloos_threads_come_before_compute_where_that_is_permitted(
    permitted: bool, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def set_scheduler(thread: int, policy: int, parameter: os.sched_param) -> None:
        if not permitted:
            raise PermissionError
        assert (policy, parameter.sched_priority) == (os.SCHED_RR, 1)
        asked.append(thread)

    monkeypatch.setattr(os, "sched_setscheduler", set_scheduler)
    job = join(5.0, comm_first=True)
    try:
        names = {thread: text_of(Path(f"/proc/self/task/{thread}/comm")) for thread in asked}
        assert all("gloo" in name for name in names.values())
        assert bool(names) == permitted
        details = environment(job, rank_facts(job)).details
        said = "before compute" if permitted else "not permitted before compute"
        assert details["gloo_threads"] == said
    finally:
        job.leave()


def test_what_torch_cannot_do_is_left_out_with_its_reason(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("no such operation\nwith a long trace")

    monkeypatch.setattr("calibrate.measure.cluster.session.build_round", refuse)
    record = measure(Options(output=tmp_path / "r.json"), small_plan()[:1])
    assert record.measurements == ()
    assert record.environment.details["skipped"] == "device_copy 1x1 4.096 kB: no such operation"


def test_a_record_that_is_there_is_not_overwritten(tmp_path: Path, alone: None) -> None:
    path = tmp_path / "record.json"
    measure(Options(output=path), small_plan())
    there = path.read_bytes()
    with pytest.raises(MeasureError, match=r"is there already: go on from it with --resume, or"):
        measure(Options(output=path))
    assert path.read_bytes() == there


@pytest.mark.parametrize("resume", [False, True])
def test_what_is_there_and_no_record_is_named(tmp_path: Path, alone: None, resume: bool) -> None:
    path, pipe = tmp_path / "mine.py", tmp_path / "pipe"
    path.write_text("precious")
    os.mkfifo(pipe)
    other = "is no ddpsim.record/1 record" if resume else "is there already, and not of the kind"
    for output, said in (
        (path, other),
        (tmp_path, "is a folder: name a file in it"),
        (pipe, "is a device or a pipe, which keeps no record: name a file"),
        (path / "record.json", "cannot be written: File exists: name another file"),
        (tmp_path / ("x" * 300), "cannot be written: File name too long: name another file"),
    ):
        with pytest.raises(MeasureError, match=re.escape(str(output))) as raised:
            measure(Options(output=output, resume=resume))
        assert said in str(raised.value)
    assert path.read_text() == "precious"


def test_an_empty_file_is_filled(tmp_path: Path, alone: None) -> None:
    """As `mktemp` makes them."""
    path = tmp_path / "record.json"
    path.touch()
    assert len(measure(Options(output=path), small_plan()).measurements) == 3


@pytest.mark.parametrize(
    ("number", "is_there", "said"),
    [
        (errno.ENOSPC, False, "the disk is full: make room, or name another file"),
        (errno.EACCES, False, "Permission denied: name another file"),
        (
            errno.EACCES,
            True,
            (
                "Permission denied. Its last whole version is as it was; mend that and go on with "
                "--resume"
            ),
        ),
    ],
)
def test_what_is_said_of_a_record_that_cannot_be_written(
    number: int,
    is_there: bool,
    said: str,
    tmp_path: Path,
    alone: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "record.json"
    if is_there:
        measure(Options(output=path), small_plan())

    def fails(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ddpsim.files.os.fsync", fails)
    with pytest.raises(MeasureError) as raised:
        measure(Options(output=path, resume=is_there), small_plan())
    assert str(raised.value) == f"{path} cannot be written: {said}"


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ([0, 0], ""),
        ([FAILED, -9], "rank 0 says why"),
        ([LOST, -9], "rank 1 was killed by SIGKILL: was memory short?"),
        ([-6, LOST], "NCCL ended rank 0: [rank0] Watchdog caught collective operation timeout"),
        ([LOST, -6], "rank 1 was killed by SIGABRT: was memory short?"),
        ([LOST, 1], "rank 1 ended with exit code 1: rank 1 says why."),
        ([-15, LOST], "rank 1 says why"),
    ],
)
def test_why_a_job_failed(codes: list[int], said: str, tmp_path: Path) -> None:
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    watchdog = "[rank0] Watchdog caught collective operation timeout\n" if codes[0] == -6 else ""
    logs[0].write_text(f"{watchdog}rank 0 says why\n")
    logs[1].write_text("Traceback\nrank 1 says why\n")
    problem, by_a_rank = _problem(codes, logs)
    assert problem == said
    assert by_a_rank == said.endswith(" says why")


def test_the_rank_that_failed_is_quoted_and_not_the_one_that_lost_it(tmp_path: Path) -> None:
    with pytest.raises(MeasureError) as raised:
        ranks(2, tmp_path / "r.json", data_loader="measure_helpers:fails_on_rank_1")
    assert str(raised.value).startswith(
        "the data loader measure_helpers:fails_on_rank_1 failed: ValueError('bad sector')"
    )


def test_a_loader_without_batches(tmp_path: Path, alone: None) -> None:
    named = "measure_helpers:no_batches"
    with pytest.raises(MeasureError, match="no_batches returned an iterable without a batch"):
        measure(Options(output=tmp_path / "r.json", data_loader=named, only=("data_loader",)))


# --- plan --------------------------------------------------------------------------------------


def test_groups_differ_from_each_other() -> None:
    def named(nodes: int, gpus: int) -> list[tuple[str, tuple[int, ...]]]:
        layout = Layout(nodes=nodes, gpus_per_node=gpus, line_rate_bytes_per_s=None)
        return [(team.group, team.ranks) for team in teams(layout)]

    assert named(1, 1) == []
    assert named(1, 2) == [("world", (0, 1))]
    assert named(2, 1) == [("world", (0, 1))]
    assert named(2, 2) == [
        ("world", (0, 1, 2, 3)), ("intra_node", (0, 1)), ("one_per_node", (0, 2)),
    ]  # fmt: skip
    assert [group for group, _ in named(3, 4)] == [
        "world", "intra_node", "one_per_node", "pair", "pair",
    ]  # fmt: skip


@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 4), (3, 1)])
def test_no_two_tasks_of_a_plan_yield_the_same_measurement(layout: tuple[int, int]) -> None:
    nodes, gpus = layout
    plan = default_plan(
        Layout(nodes=nodes, gpus_per_node=gpus, line_rate_bytes_per_s=None),
        gpu=True,
        data_loader="a:b",
    )
    keys = [key for task in plan for key in task.keys]
    assert len(keys) == len(set(keys))


def test_progress_is_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        with Reporter(1, speaks=True, console=Console(file=file)) as reporter:
            reporter.begin("all_reduce")
            reporter.done("measured [1]")
        with Reporter(1, speaks=False, console=Console(file=file)) as reporter:
            reporter.done("not said")
    assert (tmp_path / "out").read_text() == "measured [1]\n"


# --- doctor ------------------------------------------------------------------------------------

GLOO = Host(
    "gloo",
    ranks_here=2,
    nodes=2,
    cores=8,
    variables={"OMP_NUM_THREADS": "3"},
    interfaces={"lo": True, "eth0": True, "eth1": False},
    host_address="10.0.0.1",
)


IDLE_GPU = Gpu(index=0, name="Tesla T4", free_memory_bytes=15 * 2**30, busy=0.0)


def found(host: Host = GLOO, **changes: Any) -> list[str]:
    variables = dict(host.variables) | changes.pop("variables", {})
    return [str(f) for f in diagnose(Host(**(vars(host) | {"variables": variables} | changes)))]


def test_doctor_finds_nothing_where_nothing_is() -> None:
    assert found(variables={"GLOO_SOCKET_IFNAME": "eth0"}) == []


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        (
            {"variables": {"GLOO_SOCKET_IFNAME": "eth7"}},
            ("error: GLOO_SOCKET_IFNAME names eth7, which this host lacks; "
            "name one that is up: lo, eth0"),
        ),
        (
            {"variables": {"GLOO_SOCKET_IFNAME": "eth1"}},
            ("error: GLOO_SOCKET_IFNAME names eth1, which is down; "
            "bring it up, or name one that is up: lo, eth0"),
        ),
        (
            {"variables": {"GLOO_SOCKET_IFNAME": "lo"}},
            ("error: GLOO_SOCKET_IFNAME names lo, which reaches no other node; "
            "name the interface that joins them"),
        ),
        (
            {},
            ("note: GLOO_SOCKET_IFNAME is not set; "
            "set it to the interface that joins the nodes (up here: lo, eth0)"),
        ),
        (
            {"host_address": "127.0.1.1"},
            ("error: this host's own name resolves to 127.0.1.1, which gloo would tell the other "
            "nodes; set GLOO_SOCKET_IFNAME, or mend /etc/hosts"),
        ),
        (
            {"backend": "nccl", "host_address": "127.0.1.1"},
            ("error: this host's own name resolves to 127.0.1.1, which gloo would tell the other "
            "nodes; set GLOO_SOCKET_IFNAME, or mend /etc/hosts"),
        ),
        (
            {"backend": "nccl", "variables": {"GLOO_SOCKET_IFNAME": "eth7"}},
            ("error: GLOO_SOCKET_IFNAME names eth7, which this host lacks; "
            "name one that is up: lo, eth0"),
        ),
        (
            {"master": "in use", "variables": {"MASTER_PORT": "29500"}},
            "error: MASTER_PORT 29500 is in use on this host; choose another port",
        ),
        (
            {"master": "silent", "variables": {"MASTER_ADDR": "n0", "MASTER_PORT": "29500"}},
            ("error: n0:29500 does not answer; "
            "check the address, and that no firewall is between"),
        ),
        (
            {"master": "unknown host", "variables": {"MASTER_ADDR": "n0"}},
            "error: MASTER_ADDR n0 is no known host; give its IP address, or mend DNS",
        ),
        (
            {"master": "refused", "variables": {"MASTER_ADDR": "n0", "MASTER_PORT": "29500"}},
            "note: n0 is there, but nobody listens on 29500 yet; start rank 0 first",
        ),
        (
            {"backend": "nccl", "infiniband": ("mlx5_0",), "variables": {"NCCL_IB_DISABLE": "1"}},
            ("warning: NCCL_IB_DISABLE is set, but there is mlx5_0; "
            "unset it, unless TCP is what you mean to measure"),
        ),
        (
            {"backend": "nccl"},
            ("note: no InfiniBand or RoCE device: NCCL will use TCP sockets; "
            "if there should be one, check its driver (ls /sys/class/infiniband)"),
        ),
        (
            {"backend": "nccl"},
            ("error: nvidia-smi shows no GPU; "
            "install or mend its driver, or measure gloo (--backend gloo)"),
        ),
        (
            {"backend": "nccl", "gpus": (IDLE_GPU,)},
            ("error: 2 ranks here, but 1 GPU; "
            "start a rank for each GPU (--nproc-per-node), or look at CUDA_VISIBLE_DEVICES"),
        ),
        (
            {"backend": "nccl", "gpus": (IDLE_GPU, replace(IDLE_GPU, name="NVIDIA L4"))},
            ("warning: the GPUs of this host differ: Tesla T4, NVIDIA L4; "
            "measure alike ones (CUDA_VISIBLE_DEVICES): a profile is of one kind"),
        ),
        (
            {"backend": "nccl", "gpus": (replace(IDLE_GPU, index=1, busy=0.98),)},
            ("warning: GPU 1 is busy 98% of the time: others compute on it; "
            "wait until it is idle (nvidia-smi names the processes)"),
        ),
        (
            {"backend": "nccl", "gpus": (replace(IDLE_GPU, free_memory_bytes=2**30),)},
            ("warning: 1.0 GiB of memory is free on GPU 0; "
            "free some, or lower --memory-budget; large all-reduces are left out"),
        ),
        (
            {"free_memory_bytes": 2**30},
            ("warning: 0.5 GiB of memory is free for each of 2 ranks; "
            "free some, or lower --memory-budget; large all-reduces are left out"),
        ),
        (
            {"load": 3.5},
            ("warning: the load average is 3.50 on 8 cores: others compute here; "
            "wait until the machine is idle"),
        ),
        (
            {"variables": {"OMP_NUM_THREADS": ""}},
            ("warning: 2 ranks x 8 threads on 8 cores (OMP_NUM_THREADS is not set); "
            "set OMP_NUM_THREADS=4, or start fewer ranks"),
        ),
        (
            {"variables": {"OMP_NUM_THREADS": "4"}},
            ("note: 2 ranks x 4 threads leave no core a rank to gloo's threads: they wait for the "
            "processor, and compute for them; "
            "set a lower OMP_NUM_THREADS, unless you will train like this"),
        ),
        (
            {"governor": "powersave"},
            ("warning: the CPU governor is powersave: clock rates change while one measures; "
            "set it to performance (cpupower frequency-set -g performance)"),
        ),
        (
            {"congestion_control": "bbr"},
            ("warning: TCP's congestion control is bbr, which pauses for 200 ms every 10 s: some "
            "all-reduces will be that much longer; use cubic, Linux's default (sysctl "
            "net.ipv4.tcp_congestion_control=cubic), unless you will train like this"),
        ),
    ],
)  # fmt: skip
def test_doctor_says_what_to_do(changes: dict[str, Any], finding: str) -> None:
    assert finding in found(**changes)


def test_doctor_finds_nothing_wrong_with_idle_gpus() -> None:
    gpus = (IDLE_GPU, replace(IDLE_GPU, index=1, free_memory_bytes=None, busy=None))
    host = replace(GLOO, backend="nccl", nodes=1, gpus=gpus)
    assert found(host) == []


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [(None, [0, 1]), ("1", [1]), ("GPU-8e1f", [0, 1]), ("", []), ("-1", []), ("0,1", [0, 1])],
)
def test_gpus_are_those_that_nvidia_smi_shows(
    visible: str | None, indexes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, Tesla T4, 15102, 3'\necho '1, Tesla T4, 9, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    host = inspect_host("nccl", {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.index for gpu in host.gpus] == indexes
    last = Gpu(index=1, name="Tesla T4", free_memory_bytes=9 * 2**20, busy=None)
    assert host.gpus[-1:] == ((last,) if indexes else ())
    assert inspect_host("gloo", {}).gpus == ()


def test_doctor_reads_a_host(tmp_path: Path) -> None:
    files = {
        "sys/class/net/eth0/flags": "0x1003\n", "sys/class/net/eth0/operstate": "up\n",
        "sys/class/net/eth1/flags": "0x1003\n", "sys/class/net/eth1/operstate": "down\n",
        "sys/class/net/lo/flags": "0x9\n", "sys/class/net/lo/operstate": "unknown\n",
        "sys/class/net/tun0/flags": "0x1002\n", "sys/class/infiniband/mlx5_0/x": "",
        "proc/loadavg": "0.50 0.1 0.1 1/2 3\n",
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4096 kB\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "proc/sys/net/ipv4/tcp_congestion_control": "cubic\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    port = free_port()
    variables = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    host = inspect_host("gloo", variables, root=tmp_path)
    assert host.interfaces == {"eth0": True, "eth1": False, "lo": True, "tun0": False}
    assert (host.infiniband, host.load, host.governor) == (("mlx5_0",), 0.5, "powersave")
    assert (host.ranks_here, host.nodes, host.free_memory_bytes) == (4, 2, 4096 * 1024)
    assert (host.master, host.congestion_control) == ("refused", "cubic")
    assert inspect_host("gloo", variables | {"RANK": "0"}, root=tmp_path).master == "free"


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 4096 * 1024), ("3000000", 1_500_000), ("9999999999", 4096 * 1024)]
)
def test_a_container_may_have_less_memory_than_its_machine(
    limit: str, free: int, tmp_path: Path
) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 4096 kB\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.current": "2000000\n",
        "sys/fs/cgroup/memory.stat": "anon 1500000\ninactive_file 500000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory_bytes(tmp_path) == free


def test_clock_offset_of_the_quickest_exchange() -> None:
    exchanges = [(0.0, 7.9, 4.0), (10.0, 15.5, 11.0), (20.0, 26.0, 23.0)]
    assert clock_offset(exchanges) == (5.0, 0.5)
    (finding,) = check_clocks({1: (5.0, 0.5), 2: (0.2, 0.15)})
    assert str(finding) == (
        "warning: the clock of rank 1 is 5.000 s ahead of rank 0's; "
        "run NTP or chrony: traces of several ranks will not line up"
    )


@pytest.mark.parametrize(
    ("ahead_s", "says"),
    [
        (0, "all nodes were reached, and their clocks agree"),
        (5, "warning: the clock of rank 1 is 5.0"),
    ],
)
def test_doctor_compares_the_clocks_of_a_jobs_nodes(ahead_s: int, says: str) -> None:
    """Two ranks, each of a node of its own; the second one's clock is ahead."""
    port = free_port()
    code = (
        "import sys, time; real, ahead = time.time, float(sys.argv.pop(1)); "
        "time.time = lambda: real() + ahead; from calibrate.cli import main; main()"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(ahead_s * rank), "doctor"],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    first, second = (rank.communicate(timeout=120)[0] for rank in ranks)
    assert says in first
    assert "clock of rank" not in second
    assert [rank.returncode for rank in ranks] == [1, 1]  # as lo reaches no other node


def test_clocks_of_a_job_of_one_rank(alone: None) -> None:
    job = join(10.0)
    assert clock_offsets(job) == {}
    job.leave()


# --- profile -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "options", "says"),
    [
        (
            "import sys\ndef make(batch=8): sys.exit(0)",
            [],
            "own:make (own.py, line 2): SystemExit: 0",
        ),
        (
            "import argparse\nargparse.ArgumentParser().parse_args()",
            [],
            "own ended the program while it was imported (exit code 2): put what only a script",
        ),
        (
            "raise AssertionError('not to be called')",
            ["--scale", "a100-sxm-80gb:h100-sxm-80gb"],
            "--scale is from a100-sxm-80gb, but this is measured on cpu: name that one",
        ),
    ],
)
@pytest.mark.parametrize("local", [[], ["--local", "2"]])
def test_a_profile_is_never_another_ones(
    code: str,
    options: list[str],
    says: str,
    local: list[str],
    tmp_path: Path,
) -> None:
    """A function that ends the program measured nothing: no file that lies there is its profile."""
    (tmp_path / "own.py").write_text(code)
    old = tmp_path / "old.json"
    other = json.dumps({"schema": "ddpsim.model-profile/1", "source": "another model"})
    old.write_text(other)
    command = [sys.executable, "-m", "calibrate", "profile", "own:make", *options, *local]
    done = subprocess.run(
        [*command, "-o", str(old)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert says in " ".join(done.stderr.split())
    assert "use it as" not in done.stdout
    assert old.read_text() == other


def test_what_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    assert f"{taken / 'x.json'} cannot be written: " in unwritable(taken / "x.json")
    assert unwritable(tmp_path / "new" / "x.json") == ""
    assert unwritable(Path("/dev/null")) == ""
    with pytest.raises(MeasureError, match="cannot be written"):
        profile_alone(ProfileOptions(model="no_such:function", output=taken / "x.json"))


def test_a_profile_that_cannot_be_written_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    taken = tmp_path / "file"
    taken.write_text("")
    document = profiled("two_layers")
    with pytest.raises(MeasureError) as told:
        write_profile(document, taken / "x.json")
    (where,) = re.findall(r"It is whole in (\S+): move it", str(told.value))
    assert json.loads(Path(where).read_text()) == document


def test_a_rank_left_over_from_another_job_silences_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert _is_first()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not _is_first()
    assert _is_first(local=2)


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    at = {"MASTER_PORT": str(free_port()), "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | at | {"GLOO_SOCKET_IFNAME": "nope0"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeasureError, match="GLOO_SOCKET_IFNAME names nope0, which has no address"):
        join(10.0)


def profiled(name: str, **options: Any) -> Document:
    return profile(f"measure_helpers:{name}", **({"iterations": 3, "device": "cpu"} | options))


def test_a_profile_becomes_a_simulation(tmp_path: Path) -> None:
    document = profiled("two_layers")
    path = tmp_path / "profile.json"
    write_profile(document, path)
    read = read_profile(SourceFile("profile.json", path))
    assert [(p.name, p.numel) for p in read.parameters] == [
        ("0.weight", 8192), ("0.bias", 128), ("2.weight", 1280), ("2.bias", 10),
    ]  # fmt: skip
    assert read.batch_per_rank == 16
    assert read.later_forward_s == document["later_forward_s"] > 0
    assert read.later_backward_s == document["later_backward_s"] > 0
    by_time = sorted(read.parameters, key=lambda p: p.ready_s or 0)
    assert [p.name for p in by_time] == ["2.bias", "2.weight", "0.bias", "0.weight"]
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"profile": str(path), "batch_per_rank": 16},
        "ddp": {"backend": "gloo", "torch": "2.13"},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "cpu-core"},
    }
    result = simulate(load_scenario(scenario))
    assert result.iteration_time_s.mean > document["forward_s"] + document["backward_s"]


def test_a_profile_holds_the_step_with_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.10 times as long as without, by steps taken in turns; within the noise it is not told."""

    def steps(*with_ddp: float) -> Iterator[float]:
        for seconds in with_ddp:
            yield from (seconds, 1.0)

    def measured(*with_ddp: float) -> Document:
        taken, kinds = steps(*with_ddp), list[bool]()

        def step_s(training: Training) -> float:
            kinds.append(isinstance(training.model, DistributedDataParallel))
            return next(taken)

        monkeypatch.setattr("calibrate.measure.model.profile.step_s", step_s)
        document = profiled("two_layers")
        assert kinds == [True, False] * len(with_ddp)
        assert not dist.is_initialized()
        return document

    told = measured(9, 9, 9, 1.11, 1.10, 1.09)  # the first three warm up
    iteration_s = median(seconds for (seconds,) in told["iterations_s"])
    assert told["with_ddp_s"] == pytest.approx(1.1 * iteration_s)
    assert "with_ddp_s" not in measured(9, 9, 9, 1.5, 1.1, 0.9)
    assert scale_profile(told, "cpu-core", "h100-sxm-80gb")["with_ddp_s"] is None


def test_ranks_profile_together_and_the_first_writes(tmp_path: Path) -> None:
    """What all-reduces within a machine cost a tiny model may be too little to tell."""
    options = ProfileOptions(
        output=tmp_path / "model.json", model="measure_helpers:two_layers", iterations=3
    )
    document = profile_locally(2, options)
    read = read_profile(SourceFile("model.json", options.output))
    assert read.batch_per_rank == document["batch_per_rank"] == 16
    assert all(p.ready_s for p in read.parameters)
    if read.interference_exponent is None:
        assert "suffers beside all-reduces is not in this profile" in document["warnings"][-1]
    else:
        assert read.interference_exponent == (
            document["interference_exponent"],
            document["interference_exponent_stderr"],
        )
    scaled = scale_profile(document | {"interference_exponent": 2.0}, "cpu-core", "h100-sxm-80gb")
    assert scaled["interference_exponent"] is None


@pytest.mark.usefixtures("alone")
def test_a_profile_of_ranks_tells_how_the_model_fares_beside_all_reduces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Enough rounds of both to tell, made up."""
    rows = tuple((1.0 + i / 1000, 1.0 + i / 1000) for i in range(9))

    def times(factor: float) -> tuple[tuple[float, float], ...]:
        return tuple((factor * a, factor * b) for a, b in rows)

    made_up = Beside(
        layers_s=rows, layers_beside_s=times(2), backward_s=rows, backward_beside_s=times(4)
    )
    steps: list[bool] = []

    class MadeUp:
        def __init__(self, *_: object) -> None: ...

        def step(self, *, warm: bool) -> None:
            steps.append(warm)

        def measured(self) -> Beside:
            return made_up

    monkeypatch.setattr("calibrate.measure.model.profile.BesideAllReduces", MadeUp)
    path = tmp_path / "model.json"
    options = ProfileOptions(output=path, model="measure_helpers:two_layers", iterations=30)
    document = profile_in_job(options)
    assert document["interference_exponent"] == pytest.approx(2, rel=1e-3)
    assert document["interference_exponent_stderr"] > 0
    assert (
        json.loads(path.read_text())["interference_exponent"] == document["interference_exponent"]
    )
    assert steps == [True] * 9 + [False] * 30


@pytest.mark.usefixtures("alone")
def test_a_profile_is_kept_whatever_becomes_of_it_beside_all_reduces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank without the memory for them is told; where another dies, the rest is in the file."""
    path = tmp_path / "model.json"
    options = ProfileOptions(output=path, model="measure_helpers:two_layers", iterations=3)

    class Dying:
        def __init__(self, *_: object) -> None: ...

        def step(self, *, warm: bool) -> None:
            raise dist.DistNetworkError(f"gone, warm: {warm}")

    def lacking(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError

    class Outlasted(Dying):
        def step(self, *, warm: bool) -> None: ...

        def measured(self) -> None:
            return None

    def beside(made: Callable[..., object]) -> Any:
        monkeypatch.setattr("calibrate.measure.model.profile.BesideAllReduces", made)
        path.unlink(missing_ok=True)
        return profile_in_job(options)

    (warning,) = beside(lacking)["warnings"]
    assert warning.endswith("stand for it: rank 0 has no memory for it; give a smaller --batch")
    assert "warnings" not in beside(Outlasted)  # one rank has nobody to reduce with
    with pytest.raises(MeasureError, match=rf"lost contact .* All but how .* is in {path}, if it"):
        beside(Dying)
    assert read_profile(SourceFile("model.json", path)).interference_exponent is None


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_every_optimizer_steps_under_ddp_too(optimizer: Any) -> None:
    document = profile("measure_helpers:two_layers", iterations=3, optimizer=optimizer)
    assert document["optimizer_s"] > 0
    assert all(parameter["ddp_hook_s"] is not None for parameter in document["parameters"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "branched",
            "parameter idle.weight and 1 other got no gradient, which DDP takes with find",
        ),
        ("of_one_model", "weight is the same parameter in each model that the function returns"),
        ("growing", "the function must return the same model each time that it is called (Runtim"),
        ("synchronised", "SyncBatchNorm layers only work with GPU modules"),
    ],
)
def test_a_profile_without_ddps_own_work_says_why(name: str, said: str, tmp_path: Path) -> None:
    document = profiled(name, batch=8)
    assert "with_ddp_s" not in document
    assert {p["ddp_hook_s"] for p in document["parameters"]} == {None}
    missing = "DDP's own work is not in this profile (with_ddp_s, ddp_hook_s): "
    assert document["warnings"][-1].startswith(missing + said)
    write_profile(document, tmp_path / "profile.json")
    read = read_profile(SourceFile("profile.json", tmp_path / "profile.json"))
    assert read.warnings == tuple(document["warnings"])
    with pytest.raises(ImportFailedError, match="warnings must be a list of texts"):
        write_profile(document | {"warnings": "text"}, tmp_path / "profile.json")


def test_warnings_of_a_profile_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "profile.json"
    command("measure_helpers:branched", output, batch=8, iterations=3, device="cpu")
    assert output.exists()
    assert capsys.readouterr().err.startswith("warning   DDP's own work is not in this profile")


@pytest.mark.parametrize("name", ["uncopyable", "lazy", "stepping_in_backward", "of_pairs"])
def test_what_ddp_takes_is_measured_under_it(name: str) -> None:
    document = profiled(name)
    assert "warnings" not in document
    assert all(p["ddp_hook_s"] is not None for p in document["parameters"])
    assert document["never_ready"] == []


def test_the_collectives_of_synchronised_layers_are_said_to_be_left_out(tmp_path: Path) -> None:
    said = "2 layers of SyncBatchNorm: the collectives of each, one in forward and one in backward"
    document, path = profiled("synchronised"), tmp_path / "profile.json"
    assert document["warnings"][0].startswith(said)
    write_profile(document, path)
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"profile": str(path), "batch_per_rank": 4},
        "ddp": {"backend": "gloo"},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "cpu-core"},
    }
    warnings = simulate(load_scenario(scenario)).warnings
    assert {f"{path}: {warning}" for warning in document["warnings"]} <= set(warnings)


def test_a_model_made_again_is_alike_and_its_loss_its_own() -> None:
    made = prepare("measure_helpers:uncopyable", 4, torch.device("cpu"), "adamw", fused=False)
    again = made.again()
    assert again.optimizer is not made.optimizer
    assert again.optimizer.defaults["lr"] == made.optimizer.defaults["lr"]
    for (name, mine), (same, other) in zip(
        made.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert name == same
        assert mine is not other
        assert torch.equal(mine, other)
    assert torch.equal(again.forward(), made.forward())
    again.forward().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert all(parameter.grad is not None for parameter in again.model.parameters())


class Nested(torch.nn.Module):
    """A parameter and a buffer of its own and of a part, and a weight under two names."""

    def __init__(self, ignored: Collection[str]) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mine", torch.ones(4))
        self.norm, self.first, self.second = (
            torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 5),
        )  # fmt: skip
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        set_ignored = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        set_ignored(self, ignored)


@pytest.mark.parametrize(
    "ignored",
    [
        (),
        ("own", "mine"),
        (".own", ".mine"),
        ("first.weight", "norm.running_mean"),
        ("second.weight", "norm.weight", "norm"),
        ("first.weight", "second.weight", "norm.num_batches_tracked"),
    ],
)
def test_what_is_reduced_and_broadcast_is_what_ddp_says(ignored: tuple[str, ...]) -> None:
    model = Nested(ignored)
    with process_group("gloo"):
        ddp = DistributedDataParallel(model)
        wanted, _ = ddp._build_params_for_reducer()
    reduced, named = reduced_parameters(model), dict(model.named_parameters(remove_duplicate=False))
    assert list(map(id, reduced.values())) == list(map(id, wanted))
    assert all(named[name] is parameter for name, parameter in reduced.items())
    assert list(map(id, broadcast_buffers(model))) == list(map(id, ddp.modules_buffers))


def test_tensors_are_moved_in_whatever_holds_them() -> None:
    @dataclass(frozen=True)
    class Sample:
        image: Tensor
        label: str = "cat"

    x, meta = torch.ones(2), torch.device("meta")
    packed = torch.nn.utils.rnn.pack_sequence([x])
    inputs = (Pair(x, [x, 1]), Sample(x), {"a": (x, None)}, MappingProxyType({"b": x}), packed)
    pair, sample, nested, mapping, sequence = _moved(inputs, meta)
    moved = (pair.first, pair.second[0], sample.image, nested["a"][0], mapping["b"], sequence.data)
    assert {tensor.device for tensor in moved} == {meta}
    assert isinstance(pair, Pair)
    assert (pair.second[1], sample.label, nested["a"][1]) == (1, "cat", None)
    assert inputs[1].image.device.type == "cpu"


def test_only_what_gloo_or_the_store_says_of_peers_is_lost_contact(alone: None) -> None:
    """Words of torch 2.13, as a rank said them whose peer was killed or silent."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(dist.DistStoreError) as silent:
        store.wait(["key"], timedelta(milliseconds=1))
    gloo = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
    for error in (
        silent.value,
        dist.DistNetworkError("Broken pipe"),
        RuntimeError(f"{gloo}pair.cc:553] Connection closed by peer [127.0.0.1]:41148."),
        RuntimeError(f"{gloo}unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation"),
        RuntimeError("Application timeout caused pair closure"),
    ):
        told = _told(error, 1, "Kept.")
        assert isinstance(told, LostContactError)
        assert str(told).startswith("rank 1 lost contact with another rank: did one die, or run")
    told = _told(RuntimeError("Trying to backward a second time.\nframe #0"), 1, "Kept.")
    assert type(told) is MeasureError
    assert str(told) == "rank 1: RuntimeError: Trying to backward a second time. Kept."
    assert _told(TypeError("ours"), 1, "Kept.") is None


def test_a_profile_tells_what_ddps_hooks_take(tmp_path: Path) -> None:
    """A copy of 8 MB takes longer than one of 4 kB; scaled to another device none is known."""
    document = profiled("large_and_small")
    write_profile(document, tmp_path / "profile.json")
    read = read_profile(SourceFile("profile.json", tmp_path / "profile.json"))
    hook_s = {p.name: p.ddp_hook_s or 0.0 for p in read.parameters}
    assert list(hook_s) == ["0.weight", "1.weight"]
    assert hook_s["0.weight"] > hook_s["1.weight"] >= 0
    scaled = scale_profile(document, "cpu-core", "h100-sxm-80gb")
    assert {p["ddp_hook_s"] for p in scaled["parameters"]} == {None}
    assert not dist.is_initialized()


def test_ddp_sums_up_what_it_logs_between_iterations_and_in_none() -> None:
    """It would otherwise, as each forward begins: a cost that a user's iterations do not have."""
    model = torch.nn.Linear(4, 4)
    with process_group("gloo"):
        ddp = DistributedDataParallel(model)
        start_log(ddp)
        for _ in range(3):
            ddp(torch.ones(2, 4)).sum().backward()
        assert ddp._get_ddp_logging_data().get("forward_compute_time", 0) == 0
        log = logged(ddp)
    assert min(log.forward_s, log.backward_compute_s, log.comm_s) > 0
    assert log.bucket_bytes == (4 * 20,)


def test_what_it_costs_to_look_at_a_hook_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, where looking takes as long as the hooks."""
    monkeypatch.setattr("calibrate.measure.model.ddp_alone._look_s", lambda: 1e3)
    assert {p["ddp_hook_s"] for p in profiled("two_layers")["parameters"]} == {0.0}


@pytest.mark.parametrize(
    ("device", "seen_s", "least_s", "most_s"),
    [("cpu", 0.0, 1e-7, 1e-3), ("cuda", 0.0, 0.0, 0.0), ("cuda", 1.0, 1e-7, 1e-3)],
)
def test_a_gpu_that_is_behind_hides_what_hooks_cost_its_host(
    device: str, seen_s: float, least_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny parameters tell the host's cost; a backward that hooks did not lengthen had none."""
    if device == "cuda":  # a clock of this host, as there is no GPU
        monkeypatch.setattr(
            "calibrate.measure.model.samples.Clock", lambda _: Clock(torch.device("cpu"))
        )
        monkeypatch.setattr(torch.nn.Module, "to", lambda module, _: module)
        monkeypatch.setattr(
            "calibrate.measure.model.samples.torch.ones", lambda n, **_: torch.zeros(n)
        )
    backward_s = [0.1] * 3
    hooked_s = [seconds + seen_s for seconds in backward_s]
    measured = Samples(backward_s=backward_s, hooked_backward_s=hooked_s, order=["a", "b"])
    assert least_s <= hook_cost_s(torch.device(device), measured) <= most_s


def test_where_two_micro_batches_do_not_fit_only_one_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory runs out in a forward beside gradients: the second of a step."""
    forward = Training.forward

    def out_of_memory_beside_gradients(training: Training) -> torch.Tensor:
        if any(parameter.grad is not None for parameter in training.model.parameters()):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(training)

    monkeypatch.setattr(Training, "forward", out_of_memory_beside_gradients)
    document = profiled("two_layers")
    assert document["backward_s"] > 0
    assert not {"later_forward_s", "later_backward_s"} & set(document)


def test_a_batch_that_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(_training: Training) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Training, "forward", out_of_memory)
    said = "batch 9 of measure_helpers:two_layers does not fit into the memory of cpu: give a small"
    with pytest.raises(MeasureError, match=said):
        profiled("two_layers", batch=9)


def test_a_gpu_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(MeasureError, match="cuda:2: this machine has 2 CUDA devices, counted"):
        profiled("two_layers", device="cuda:2")


def test_a_profile_says_what_is_never_ready_sparse_or_a_buffer() -> None:
    document = profiled("branched", batch=8, optimizer="sgd")
    parameters = {p["name"]: p for p in document["parameters"]}
    assert document["never_ready"] == ["idle.weight", "idle.bias"]
    assert [name for name, p in parameters.items() if p["ready_s"] is None] == [
        "idle.weight", "idle.bias",
    ]  # fmt: skip
    assert [name for name, p in parameters.items() if p["sparse"]] == ["embed.weight"]
    assert "frozen.weight" not in parameters
    assert document["buffers"] == [
        {"dtype": "float32", "numel": 32}, {"dtype": "float32", "numel": 32},
        {"dtype": "int64", "numel": 1},
    ]  # fmt: skip
    assert document["source"].startswith("measure_helpers:branched with batch 8 on cpu, 1 thread")
    assert "each, taken off the ready times" in document["source"]


@pytest.mark.parametrize("name", ["compiled", "compiled_in_place"])
def test_a_compiled_models_ready_times_are_those_without(name: str) -> None:
    """Of equal layers the last one's gradient comes early, where a compiled graph's all come last.

    Loads on the machine may halve or double a share of the backward.
    """
    document = profiled(name)
    ready = {p["name"].removeprefix("_orig_mod."): p["ready_s"] for p in document["parameters"]}
    assert document["compiled"] is True
    assert "which are those of the uncompiled model, in proportion" in document["source"]
    assert ready["3.weight"] < 0.6 * document["backward_s"]
    assert ready["3.weight"] < ready["2.weight"] < ready["1.weight"] < ready["0.weight"]
    assert "compiled" not in profiled("of_equal_layers")


def test_a_profile_holds_what_run_reads(tmp_path: Path) -> None:
    document = profiled("of_buffers")
    assert [p["name"] for p in document["parameters"]] == ["linear.weight", "linear.bias"]
    assert document["buffers"] == [
        {"dtype": "complex64", "numel": 8},
        {"dtype": "float8_e4m3fn", "numel": 3},
        {"dtype": "uint16", "numel": 5},
    ]
    path = tmp_path / "profile.json"
    write_profile(document, path)
    written = path.read_text(encoding="utf-8")
    document["buffers"][0]["dtype"] = "complex32"
    with pytest.raises(ImportFailedError, match="unknown dtype 'complex32'; wanted one of"):
        write_profile(document, path)
    assert path.read_text(encoding="utf-8") == written


def test_a_ready_time_is_a_part_of_its_own_backward() -> None:
    """Of the second gradient, which the second of three iterations lacks."""
    samples = Samples(
        hooked_backward_s=[1.0, 7.0, 2.0],
        ready_s={"a": [(0.25, 1.0), (3.5, 7.0), (0.5, 2.0)], "b": [(0.5, 1.0), (1.0, 2.0)]},
        order=["a", "b"],
    )
    assert ready_times(samples, 0.0, 4.0) == pytest.approx({"a": 1.0, "b": 2.0})


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("branched", {}, "measure_helpers:branched has no default batch: give --batch"),
        ("two_layers", {"batch": 0}, "batch is 0: wanted a whole number from 1"),
        ("two_layers", {"iterations": 0}, "0 iterations measure nothing: wanted 1 or more"),
        ("two_layers", {"device": "abacus"}, "'abacus' is no device: wanted auto, cpu or cuda:N"),
        ("missing", {}, "measure_helpers has no function 'missing'"),
        (
            "without_batch",
            {},
            (
                "measure_helpers:without_batch takes no argument batch: "
                "write def without_batch(batch: int)"
            ),
        ),
        (
            "half_a_model",
            {},
            "measure_helpers:half_a_model must return (model, inputs, loss), not a tuple of 2",
        ),
        (
            "not_a_model",
            {},
            (
                "measure_helpers:not_a_model must return (model, inputs, loss): "
                "a torch.nn.Module, a tensor, tuple or dict, and a function; "
                "got str, Tensor, builtin_function_or_method"
            ),
        ),
        (
            "constant_loss",
            {},
            "no parameter ever gets a gradient: does the loss depend on the model?",
        ),
        (
            "evaluating",
            {},
            (
                "the model of measure_helpers:evaluating is in evaluation mode, and training is "
                "measured: call model.train() before it is returned"
            ),
        ),
        (
            "without_a_number",
            {},
            (
                "the loss of measure_helpers:without_a_number is nan: arithmetic on such numbers "
                "may take another time than training does; give inputs and weights that train"
            ),
        ),
        (
            "dropping",
            {},
            (
                "layers.1.weight got a gradient in 3 of 4 iterations, and a profile is of steps "
                "that are alike: let the same layers take part in each (none dropped at random or "
                "by turns), or profile each path of the model on its own"
            ),
        ),
        (
            "by_turns",
            {},
            (
                "layers.0.weight got a gradient in 3 of 4 iterations, and a profile is of steps "
                "that are alike: let the same layers take part in each (none dropped at random or "
                "by turns), or profile each path of the model on its own"
            ),
        ),
        (
            "complex_weights",
            {},
            "weight is complex64: complex parameters, which DDP takes, are not modelled here",
        ),
        (
            "in_ddp",
            {},
            (
                "the model of measure_helpers:in_ddp is wrapped in DistributedDataParallel, and is "
                "wrapped here again: return the bare module"
            ),
        ),
        (
            "of_sparse_gradients",
            {"optimizer": "adam"},
            (
                "--optimizer adam cannot step the parameters of measure_helpers:of_sparse_gradients"
                " (RuntimeError: Adam does not support sparse gradients, please consider "
                "SparseAdam instead): give another"
            ),
        ),
    ],
)
def test_a_function_that_cannot_be_profiled(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(MeasureError) as raised:
        profiled(name, **options)
    assert str(raised.value) == said


def test_modules_that_cannot_be_imported() -> None:
    with pytest.raises(MeasureError, match=r"^nowhere cannot be imported: ModuleNotFoundError: "):
        profile("nowhere:model", batch=1)
    with pytest.raises(MeasureError, match=r"^'model' names no function: write MODULE:FUNCTION$"):
        profile("model", batch=1)


def test_a_scaled_profile_says_that_it_is_an_estimate() -> None:
    parameters = [{"name": "w", "ready_s": 1.0}, {"name": "idle", "ready_s": None}]
    times = {"forward_s": 1.0, "backward_s": 2.0, "optimizer_s": 3.0}
    document = {"source": "m:f", "parameters": parameters, **times}
    scaled = scale_profile(document, "cpu-core", "cpu-core")
    assert scaled["source"] == (
        "ESTIMATE, not measured: m:f; scaled from cpu-core to cpu-core, forward and backward x 1 "
        "(by memory it would be 1), optimizer x 1"
    )
    assert {key: scaled[key] for key in times} == times
    faster = scale_profile(document, "a100-sxm-80gb", "h100-sxm-80gb")
    assert faster["backward_s"] < 2.0
    assert [p["ready_s"] for p in faster["parameters"]] == [faster["forward_s"], None]
    two = document | {"later_forward_s": 1.0, "later_backward_s": 2.0}
    later = scale_profile(two, "a100-sxm-80gb", "h100-sxm-80gb")
    assert later["later_forward_s"] == faster["forward_s"]
    assert later["later_backward_s"] == faster["backward_s"]
    with pytest.raises(MeasureError, match="unknown device 'h1000'"):
        scale_ends("h1000:a100")
    with pytest.raises(MeasureError, match=r"--scale 'h100': wanted FROM:TO"):
        scale_ends("h100")
    assert scale_ends("NVIDIA H100 80GB HBM3:t4") == ("h100-sxm-80gb", "t4")
    with pytest.raises(MeasureError, match=r"is from h100-sxm-80gb, but this is measured on Tesla"):
        scale_profile(document | {"device": "Tesla T4"}, "h100-sxm-80gb", "t4")


def test_a_model_that_fails_later_is_told_with_its_place() -> None:
    with pytest.raises(MeasureError, match=r"^measure_helpers\.py, line \d+: RuntimeError: flaky$"):
        profiled("fails_later", iterations=20)


def test_ctrl_c_in_a_profile_of_one_device_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_given: object, **_options: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("calibrate.measure.model.samples.iterate", stop)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(typer.Exit) as ended:
        command("measure_helpers:two_layers", tmp_path / "model.json")
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "stopped. Nothing was kept\n"
    assert list(tmp_path.iterdir()) == []


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(MeasureError, match="--threads 4096: this machine has"):
        profiled("two_layers", threads=4096)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--time-budget-s", "inf"], "--time-budget-s"),
        (["--line-rate", "0 Gbit/s"], "--line-rate: '0 Gbit/s' is nothing to measure with"),
        (["--line-rate", "10 Gbits"], "--line-rate: "),
        (["--memory-budget", "0 GiB"], "--memory-budget: '0 GiB' is nothing to measure with"),
        (["--memory-budget", "4 GIBB"], "--memory-budget: "),
    ],
)
def test_options_that_cannot_be_taken_are_named(
    options: list[str], said: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "calibrate", "measure", "--local", "2", *options]
    output = tmp_path / "record.json"
    done = subprocess.run(
        [*command, "-o", str(output)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()
