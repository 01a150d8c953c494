"""SyncBatchNorm: which layers, what they send, what they must cost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from logs.measured_files import model_file

import ddpsim
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import CollectiveTimes, Result
from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import total_s

CHANNELS = 12


def scenario_of(nodes: int = 1, gpus: int = 8, **workload: Any) -> Scenario:
    return ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet50", "batch_per_rank": 32} | workload,
            "cluster": {"nodes": nodes, "gpus_per_node": gpus, "device": "a100-sxm-40gb"},
        }
    )


def synced(**options: Any) -> Job:
    return resolve(scenario_of(sync_batch_norm=True, **options))


def of_norms(result: Result, operation: str) -> list[CollectiveTimes]:
    found = [each for each in result.collectives if each.cause.startswith("sync_batch_norm")]
    return [each for each in found if each.operation == operation]


def test_every_batch_norm_of_resnet_exchanges_twice() -> None:
    """53 layers of 26560 channels in all: gathered in their order, reduced in reverse."""
    result = ddpsim.simulate(scenario_of(sync_batch_norm=True))
    gathered, reduced = (of_norms(result, each) for each in ("all_gather", "all_reduce"))
    assert len(gathered) == len(reduced) == 53
    assert sum(each.size_bytes for each in gathered) == 8 * 4 * (2 * 26560 + 53)
    assert sum(each.size_bytes for each in reduced) == 4 * 2 * 26560
    assert gathered[0].cause == reduced[-1].cause == "sync_batch_norm of bn1"
    assert {each.cause for each in gathered} == {each.cause for each in reduced}
    assert max(each.end_s for each in gathered) < min(each.ready_s for each in reduced)


def test_a_layer_waits_behind_buckets_under_way() -> None:
    """One communicator: a collective begins when the one launched before it has ended."""
    listed = ddpsim.simulate(scenario_of(nodes=4, sync_batch_norm=True)).collectives
    ends = [each.end_s for each in listed]
    assert ends == sorted(ends)
    assert all(b.start_s >= a.end_s for a, b in pairwise(listed))
    buckets = [i for i, each in enumerate(listed) if each.cause.startswith("bucket")]
    assert any(listed[i + 1].start_s > listed[i + 1].ready_s for i in buckets[:-1])


def test_it_costs_a_latency_each_way_and_layer_at_least() -> None:
    plain, norms = (
        ddpsim.simulate(scenario_of(nodes=2, sync_batch_norm=on)) for on in (False, True)
    )
    sent = of_norms(norms, "all_gather") + of_norms(norms, "all_reduce")
    least_s = sum(each.end_s - each.start_s for each in sent)
    longer_s = norms.iteration_time_s.mean - plain.iteration_time_s.mean
    assert 0 < least_s < longer_s
    assert norms.exposed_comm_s > plain.exposed_comm_s + 0.9 * least_s
    assert norms.baselines_s.compute_only == plain.baselines_s.compute_only


def test_one_rank_alone_synchronises_nothing() -> None:
    plain, norms = (
        ddpsim.simulate(scenario_of(gpus=1, sync_batch_norm=on)) for on in (False, True)
    )
    assert norms == plain


def profile(tmp_path: Path, *, buffers: bool = True) -> Path:
    import json

    names = ["conv.weight", "bn.weight", "bn.bias", "norm.weight", "norm.bias", "fc.weight"]
    numels = [500, CHANNELS, CHANNELS, CHANNELS + 1, CHANNELS + 1, 900]
    ready_s = [0.006, 0.004, 0.005, 0.002, 0.003, 0.001]
    times = {"forward_s": 0.003, "backward_s": 0.0065, "optimizer_s": 0.001, "batch_per_rank": 4}
    told = model_file(list(zip(names, numels, ready_s, strict=True)), **times)
    if buffers:
        dtypes = ["float32", "float32", "int64"]
        shapes = [CHANNELS, CHANNELS, 1]
        told["buffers"] = {"name": dtypes, "shape": shapes, "dtype": dtypes}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(told))
    return path


def test_a_profile_shows_its_batch_norms_by_their_buffers(tmp_path: Path) -> None:
    """Not the layer norm beside it, whose width no buffer has."""
    path = str(profile(tmp_path))
    options = {"model": None, "profile": path, "batch_per_rank": 4}
    model = synced(**options).model
    (norm,) = model.batch_norms
    assert (norm.name, norm.channels) == ("bn", CHANNELS)
    assert model.parameters[model.ready_order[norm.backward]].name == "bn.weight"
    share = model.forward[norm.forward].device_s / total_s(model.forward)
    assert share == pytest.approx(0.001 / 0.0065)
    assert total_s(model.forward) == pytest.approx(0.003)
    sent = [
        each.operation
        for each in ddpsim.simulate(scenario_of(sync_batch_norm=True, **options)).collectives
    ]
    assert sent == ["broadcast", "broadcast", "all_gather", "all_reduce", "all_reduce"]


def test_a_profile_without_them_is_refused(tmp_path: Path) -> None:
    path = str(profile(tmp_path, buffers=False))
    with pytest.raises(ddpsim.ScenarioError, match="the profile's buffers hold no batch norm"):
        ddpsim.simulate(
            scenario_of(model=None, profile=path, batch_per_rank=4, sync_batch_norm=True)
        )
