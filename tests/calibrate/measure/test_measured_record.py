"""What a measured record holds: every kind, rank by rank, and what DDP's hooks take."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NoReturn

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

import torch
import torch.distributed as dist
from measured.measuring import small_plan, two_ranks_shortly
from torch import Tensor

from calibrate.measure.cluster.plan import Options, Slot, Task, Team
from calibrate.measure.cluster.rounds import build_round
from calibrate.measure.cluster.session import measure, relative_mad
from calibrate.measure.errors import MeasureError
from calibrate.measure.host.environment import environment, rank_facts
from calibrate.measure.host.machine import text_of
from calibrate.measure.model.samples import around_hook
from calibrate.measure.ranks.job import join
from calibrate.records.record import Record, load_record

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """Everything, of two ranks."""
    path = tmp_path_factory.mktemp("measure") / "record.json"
    return path, two_ranks_shortly(path, data_loader="measure_helpers:batches")


@pytest.mark.slow
def test_a_record_of_two_ranks_holds_every_kind(measured: tuple[Path, Record]) -> None:
    path, record = measured
    assert load_record(path) == record
    assert {m.kind for m in record.measurements} == {
        "all_reduce", "broadcast", "reduce_scatter", "all_gather", "point_to_point",
        "device_copy", "device_cast", "optimizer", "ddp_hook", "compute", "jitter", "data_loader",
        "narrow_products",
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
        ("all_reduce", "rested"),
        ("ddp_hook", "with ddp"), ("ddp_hook", "without"), ("ddp_hook", "copies back"),
        ("device_copy", "alone"), ("device_copy", "together"), ("device_cast", "compress"),
        ("device_cast", "compress together"), ("device_cast", "decompress together"),
        ("optimizer", "adamw foreach"),
        ("narrow_products", "rank 1"), ("narrow_products", "rank 2"),
    }  # fmt: skip
    assert (record.layout.nodes, record.layout.gpus_per_node) == (1, 2)
    assert record.environment.backend == "gloo"
    assert record.environment.variables["OMP_NUM_THREADS"] == "1"
    assert record.environment.details["threads_per_rank"] == "1"
    assert record.environment.details["allocator"] in ("kept", "returned")
    assert "memory budget" in record.environment.details["skipped"]
    assert all(min(m.samples_s) > 0 and len(m.warmup_s) == 3 for m in record.measurements)


def test_resume_repeats_nothing(measured: tuple[Path, Record], tmp_path: Path) -> None:
    record, path = measured[1], tmp_path / "record.json"
    path.write_bytes(measured[0].read_bytes())
    again = two_ranks_shortly(
        path, data_loader="measure_helpers:batches", resume=True, time_budget_s=1e-3
    )
    assert again.measurements == record.measurements


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


def test_only_the_kinds_asked_for(tmp_path: Path, alone: None) -> None:
    record = measure(Options(output=tmp_path / "r.json", only=("device_cast",), time_budget_s=1))
    assert {m.kind for m in record.measurements} == {"device_cast"}
    assert relative_mad([1.0, 1.0, 2.0, 3.0, 1.0]) == 0


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
    assert record.environment.details["skipped"] == "device_copy 1x1 4.00 KiB: no such operation"


def test_a_loader_without_batches(tmp_path: Path, alone: None) -> None:
    named = "measure_helpers:no_batches"
    with pytest.raises(MeasureError, match="no_batches returned an iterable without a batch"):
        measure(Options(output=tmp_path / "r.json", data_loader=named, only=("data_loader",)))
