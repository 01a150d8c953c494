"""Casts of what units hand on: where they are, and what they move."""

from __future__ import annotations

import pytest

from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.strategies.fully_shard.strategy import with_casts
from ddpsim.strategies.fully_shard.unit_step import LaunchedPiece, Pass
from ddpsim.strategies.instructions import Compute
from ddpsim.strategies.ticks import Launch


def test_outputs_are_cast_out_of_a_unit_and_into_the_next() -> None:
    """As profiled of torch 2.13: cast, hooks, work, hooks, cast; and the model's own at its end.

    The embedding's output is of the parameters' type.
    """
    chains = [(0,), (0, 1), (0, 1, 2), (0, 3), (0,)]
    casts = {unit: Launch(0, unit + 1) for unit in range(4)}
    pieces = [LaunchedPiece(chain, Launch(0, 100)) for chain in chains]
    cast = with_casts(Pass(pieces, pieces[::-1]), casts, casts_inputs=True)
    found = [(piece.chain, piece.launch.device_ns) for piece in cast.forward]
    assert [each for each in found if each[1] < 100] == [((0,), 2), ((0,), 2), ((0,), 4), ((0,), 1)]
    assert [place for place, each in enumerate(found) if each[1] < 100] == [3, 4, 6, 8]
    assert cast.backward == cast.forward[::-1]


def test_casts_move_what_units_hand_on() -> None:
    """GPT-2's blocks 768 values a token, its head 50,257: read as bfloat16, written as float32."""

    def job_of(output: str | None) -> Job:
        mixed = {"param": "bfloat16", "reduce": "float32", "output": output}
        workload = {"model": "gpt2", "batch_per_rank": 16, "precision": "amp-bf16"}
        ddp = {"strategy": "fully_shard", "fully_shard": {"mixed_precision": mixed}}
        cluster = {"device": "a100-sxm-80gb", "nodes": 1, "gpus_per_node": 2}
        keys = {"schema": "ddpsim/1", "workload": workload, "ddp": ddp, "cluster": cluster}
        return resolve(load_scenario(keys))

    def busy_s(output: str | None) -> float:
        step = job_of(output).program.steady_step
        return 1e-9 * sum(i.device_ns for i in step if isinstance(i, Compute))

    device = job_of(None).scenario.cluster.device
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    values = 16 * 1024 * (23 * 768 + 50257)
    assert busy_s("float32") - busy_s(None) == pytest.approx(2 * 6 * values / rate, rel=1e-4)
    assert busy_s("bfloat16") == busy_s(None)
