"""What torch's caching allocator reserves beyond the memory in use."""

from __future__ import annotations

from typing import Any

import pytest

import ddpsim
from ddpsim.report.text import render
from ddpsim.result.model import Memory, Result

TOKENS, GPT2_WORDS = 8 * 512, 50257


def simulated(precision: str = "amp-bf16", **keys: Any) -> Result:
    workload = {"model": "gpt2", "batch_per_rank": 8, "seq_len": 512, "precision": precision}
    cluster = {"device": "a100-sxm-80gb", "nodes": 1, "gpus_per_node": 8} | keys.pop("cluster", {})
    document = {"schema": "ddpsim/1", "workload": workload | keys.pop("workload", {})}
    return ddpsim.simulate(ddpsim.load_scenario(document | {"cluster": cluster} | keys))


def memory(*arguments: Any, **keys: Any) -> Memory:
    return simulated(*arguments, **keys).memory_bytes_per_gpu


@pytest.mark.parametrize("precision", ["amp-bf16", "bf16"])
def test_logits_in_half_leave_a_block_that_nothing_fits(precision: str) -> None:
    """The loss casts them to float32, of which the backward's first gradients are."""
    held = memory(precision)
    assert held.reserved == held.total + 2 * TOKENS * GPT2_WORDS


def test_logits_in_float32_leave_one_that_the_backward_takes() -> None:
    held = memory("fp32")
    assert held.reserved == held.total


def test_all_gathers_have_blocks_of_their_own() -> None:
    """The most of whole parameters, where the sum counts what is held at one moment."""
    result = simulated(ddp={"strategy": "fully_shard"})
    held, peak = result.memory_bytes_per_gpu, result.memory_peak
    assert peak is not None
    assert held.reserved is not None
    assert held.activations is not None
    apart = held.reserved - 2 * TOKENS * GPT2_WORDS - (held.total - held.buckets)
    assert apart >= peak.parameters
    assert apart > 4 * 50257 * 768  # the root's embedding, gathered whole


def test_nothing_is_told_where_activations_are_unknown_or_on_a_cpu() -> None:
    on_cpu = {"device": "cpu-core", "gpus_per_node": 2}
    assert memory("fp32", cluster=on_cpu, ddp={"backend": "gloo"}).reserved is None


def test_verbose_says_what_is_reserved() -> None:
    result = simulated(workload={"batch_per_rank": 4, "seq_len": 1024, "checkpointing": "full"})
    told = ["max_memory_reserved" in render(result, "a.yaml", verbose=v) for v in (True, False)]
    assert told == [True, False]
