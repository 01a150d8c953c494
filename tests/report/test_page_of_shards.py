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
    assert [choice.cap for choice in board.choices] == ["true", "2", "false"]
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
    assert max(whole) * 1e9 == pytest.approx(most)
    times_ms = areas[0]["x"]
    assert times_ms == sorted(times_ms)
    assert times_ms[-1] == board.choices[board.own].step.length_ns / 1e6
    kept = board.choices[-1].held  # not freed after the forward
    assert max(held.parameters for _, held in kept) >= peak.parameters
