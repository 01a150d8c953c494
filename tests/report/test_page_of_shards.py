"""The page of a strategy that shards: its slider reshards, and memory is drawn over the step."""

from __future__ import annotations

import pytest
from page_reading import Page

from ddpsim.planning.storyboard import storyboard
from ddpsim.report.page.page import page
from ddpsim.result.storyboard import Storyboard

FEW = ("workload.model=gpt2", "run.iterations=1", "cluster.nodes=2", "cluster.gpus_per_node=2")


@pytest.fixture(scope="module")
def board() -> Storyboard:
    return storyboard("scenarios/gpt2-xl-hsdp.yaml", [*FEW, "ddp.strategy=fully_shard"])


def test_the_slider_goes_over_ways_to_reshard(board: Storyboard) -> None:
    assert [choice.cap for choice in board.choices] == ["default", "2", "false"]
    assert board.choices[0].words == "reshard_after_forward: default"
    text = page(board)
    assert "<code>ddp.fully_shard.reshard_after_forward</code>" in text
    assert "bucket_cap_mb" not in text.partition('<section id="trust"')[0].partition("<body")[2]
    assert '<th scope="col">units</th>' in text
    assert "buckets end after it" not in text
    operations = {c.span.operation for c in board.choices[0].step.ranks[0].collectives}
    assert operations == {"all_gather", "reduce_scatter"}


def test_memory_over_the_step_has_the_results_peak(board: Storyboard) -> None:
    """As it is held in time: parameters are freed, and each end is within the step."""
    found = Page(page(board))
    assert "memory" in {attributes.get("id") for _, attributes in found.tags}
    areas = found.data["figures"]["memory"]["data"]
    whole = [sum(sizes) for sizes in zip(*(area["y"] for area in areas), strict=True)]
    memory, peak = board.result.memory_bytes_per_gpu, board.result.memory_peak
    assert peak
    resident = memory.parameters + memory.optimizer + memory.buffers
    most = resident + peak.parameters + peak.gradients + peak.reductions
    assert max(whole) * 2**30 == pytest.approx(most)
    times_ms = areas[0]["x"]
    assert times_ms == sorted(times_ms)
    assert times_ms[-1] == board.choices[board.current].step.length_ns / 1e6
    kept = board.choices[-1].held  # not freed after the forward
    assert max(held.parameters for _, held in kept) >= peak.parameters


SMALL = ("workload.model=resnet18", "workload.seq_len=null", "cluster.gpus_per_node=2")
SMALLER = (*SMALL, "workload.checkpointing=none", "run.iterations=1")


@pytest.mark.parametrize(
    ("name", "settings", "key", "shown"),
    [
        ("llama-8b-megatron", (), "distributed_optimizer.bucket_size", "40 000 000 elements"),
        (
            "llama-8b-megatron",
            ("ddp.distributed_optimizer={params: bfloat16}",),
            "distributed_optimizer.overlap_grad_reduce",
            "overlap_grad_reduce: true",
        ),
        ("llama-3b-deepspeed", (), "deepspeed.reduce_bucket_size", "40 000 000 elements"),
    ],
)
def test_other_shards_have_a_page(
    name: str, settings: tuple[str, ...], key: str, shown: str
) -> None:
    """Their slider is about buckets; memory begins with the step."""
    own = storyboard(f"scenarios/{name}.yaml", [*SMALLER, "cluster.nodes=1", *settings])
    assert own.dial.key == f"ddp.{key}"
    assert shown in {choice.words for choice in own.choices}
    assert own.choices[own.current].held[0][0] == 0
    found = Page(page(own))
    areas = found.data["figures"]["memory"]["data"]
    assert max(areas[1]["y"]) * 2**30 >= own.result.memory_bytes_per_gpu.gradients / 2 > 0
