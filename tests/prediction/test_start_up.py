"""What comes before the first step: DDP's broadcast, as torch sends it, and NCCL's communicator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shipped_scenarios import load, predict

from ddpsim.prediction.api import predict as predicted
from ddpsim.prediction.resolve import resolve
from ddpsim.prediction.start_up import start_up_of
from ddpsim.report.text import render

NAME = "resnet50-2x8-25gbit"


def test_the_broadcast_is_that_of_ddps_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="its constructor is the oracle")
    import torch.distributed as dist

    from calibrate.measure.zoo.models import build

    sent: list[int] = []

    def broadcast(_: Any, tensors: list[Any], *others: Any) -> None:
        sent.append(sum(tensor.nbytes for tensor in tensors))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "_broadcast_coalesced", broadcast)
        torch.nn.parallel.DistributedDataParallel(build("resnet18", torch.device("cpu")))
    finally:
        dist.destroy_process_group()
    found = start_up_of(resolve(load(NAME, "workload.model=resnet18")))
    assert found is not None
    assert found.broadcast_bytes == sum(sent)


def test_its_time_is_the_networks() -> None:
    """102 MB at 3.12 GB/s, and a few steps of a pipeline more."""
    start_up = predict(NAME).start_up
    assert start_up is not None
    assert start_up.broadcast_bytes
    assert start_up.broadcast_s
    assert 1 < start_up.broadcast_s / (start_up.broadcast_bytes / 3.125e9) < 1.2
    assert start_up.communicator_s == (0.66, 4.1)


def test_what_is_not_there_is_not_told() -> None:
    one = ("cluster.nodes=1", "cluster.gpus_per_node=1")
    assert start_up_of(resolve(load(NAME, *one))) is None
    assert start_up_of(resolve(load(NAME, one[0], "cluster.algorithm=data_parallel"))) is None
    sharded = start_up_of(resolve(load(NAME, "ddp.strategy=fully_shard")))
    assert sharded is not None
    assert (sharded.broadcast_bytes, sharded.broadcast_s) == (None, None)
    many = start_up_of(resolve(load(NAME, "cluster.nodes=128")))
    assert many is not None
    assert many.communicator_s == (0.66, 150.0)


def test_it_is_one_line_of_the_long_answer_and_no_part_of_the_step() -> None:
    result = predicted(load(NAME))
    assert "start-up" not in render(result, "s.yaml")
    text = " ".join(render(result, "s.yaml", verbose=True).split())
    told = "start-up once, not in the step: 97.7 MiB of parameters and buffers broadcast in 36.9 ms"
    assert told in text
    assert result.to_dict()["start_up"]["communicator_s"] == [0.66, 4.1]


def test_a_table_without_the_broadcasts_size_still_answers(tmp_path: Path) -> None:
    """Buckets of at most 30 MiB are in it, and the broadcast of 98 is not."""
    rows = Path("scenarios/all-reduce-8xa100.csv").read_text(encoding="utf-8")
    table = tmp_path / "table.csv"
    table.write_text(rows.partition("67108864,")[0], encoding="utf-8")
    told = predict("resnet50-nccl-log", f"cluster.all_reduce={table}").start_up
    assert told is not None
    assert told.broadcast_s is None
