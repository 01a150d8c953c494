"""Steps that users published, each by what the other rows of `user-boxes.csv` set."""

from __future__ import annotations

import os
from statistics import median

import pytest
from held_out.user_jobs import deepspeed_steps, shared_weight_steps

pytestmark = pytest.mark.skipif(
    not os.environ.get("DDPSIM_REFERENCE_DATA"),
    reason="DDPSIM_REFERENCE_DATA is not set: no published steps",
)


def test_torch_1_7_hides_nothing_of_a_model_with_tied_weights() -> None:
    """GPT-2 on two RTX 3090, by the rates that steps of its other sizes set."""
    steps = shared_weight_steps().values()
    errors = [abs(step.error) for step in steps]
    assert len(errors) == 12
    assert median(errors) <= 0.02
    assert max(errors) <= 0.04
    assert sum(step.is_covered for step in steps) >= 11


def test_deepspeed_is_slower_than_ddp_on_both_jobs() -> None:
    """TinyLlama by the rate that DDP's steps set; a 3.4B model by DeepSpeed's own measurement."""
    steps = deepspeed_steps()
    assert all(step.is_covered for step in steps.values())
    assert steps["b15"].predicted > 1.15 * steps["b13"].predicted
    for key in ("b23", "b24"):
        assert steps[key].predicted > 2 * steps["b22"].predicted
    assert max(abs(step.error) for step in steps.values()) <= 0.27
