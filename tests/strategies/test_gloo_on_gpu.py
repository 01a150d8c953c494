"""gloo on GPU tensors: copies to the host and back, and a host that waits."""

from __future__ import annotations

import pytest

import ddpsim

SCENARIO = "scenarios/gloo-on-gpus.yaml"


def test_a_tensor_is_copied_down_sent_and_copied_up() -> None:
    """Of 102 MB at 24 GB/s: 4.26 ms each way, of which nothing is hidden after the backward."""
    settings = ["run.iterations=1", "ddp.strategy=naive_flat"]
    result = ddpsim.simulate(ddpsim.load_scenario(SCENARIO, settings))
    (flat,) = result.collectives
    copied_s = flat.size_bytes / 24e9
    in_all_s = flat.end_s - flat.start_s + 2 * copied_s
    assert result.exposed_comm_s == pytest.approx(in_all_s, rel=1e-3)
    on_gpus = ddpsim.load_scenario(SCENARIO, [*settings, "ddp.backend=nccl"])
    (alone,) = ddpsim.simulate(on_gpus).collectives
    assert flat.ready_s - alone.ready_s == pytest.approx(copied_s, abs=1e-4)
