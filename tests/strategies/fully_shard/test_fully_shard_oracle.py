"""Collectives equal those that torch's fully_shard launches: their kind, size and order."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from jobs.timeless_model import timeless_model
from two_ranks import observed_of

from ddpsim.cluster.process_groups import Mesh
from ddpsim.prediction.program import compile_program
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.fully_shard.groups import divisors
from ddpsim.strategies.instructions import Await, Communicate, Compute
from ddpsim.strategies.strategy import Strategy


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, warm_python: None) -> list[dict[str, Any]]:
    pytest.importorskip("torch", reason="torch's fully_shard is the oracle of ours")
    return observed_of(
        "fsdp/fully_shard_oracle.py", tmp_path_factory.mktemp("fully_shard"), ranks=4
    )


def strategy_of(case: dict[str, Any], **device: Any) -> Strategy:
    scenario = Scenario.model_validate(
        {
            "schema": "ddpsim/1",
            "workload": {
                "model": "resnet18",
                "batch_per_rank": 1,
                "precision": "bf16",
                "clip_grad_norm": device.pop("clips", None),
            },
            "ddp": {"strategy": "fully_shard", **case["options"], **device.pop("ddp")},
            "cluster": {"nodes": device.pop("nodes", 1), "gpus_per_node": 2, **device},
        }
    )
    return compile_program(scenario, timeless_model(case)).strategy


def predicted(case: dict[str, Any], **device: Any) -> list[tuple[Any, ...]]:
    """Operation, bytes and ranks of what every step sends from rank 0, in order."""
    nodes, gpus = device.get("nodes", 1), device.get("gpus_per_node", 2)
    reshard = case["options"]["fully_shard"]["reshard_after_forward"]
    mesh = Mesh(nodes * gpus, gpus, reshard if type(reshard) is int else 1)
    step = strategy_of(case, **device).steps[0]
    return [
        (i.operation, i.size_bytes, list(mesh.members(i.group, 0)))
        for i in step
        if isinstance(i, Communicate)
    ]


def assert_called(case: dict[str, Any]) -> None:
    """Both steps, on a CPU and on a GPU, whose hosts wait at other places.

    Where all ranks share a copy it does not matter on which nodes they are.
    """
    nodes = case["nodes"]
    steps = [
        [(kind, count * width, ranks) for kind, count, width, ranks in step]
        for step in case["steps"]
    ]
    is_free = nodes == 2 and case["options"]["strategy"] == "fully_shard"
    for layout in [(1, 4), (2, 2), (4, 1)] if is_free else [(nodes, 2)]:
        on = dict(zip(("nodes", "gpus_per_node"), layout, strict=True))
        cpu = predicted(case, **on, device="cpu-core", ddp={"backend": "gloo"})
        gpu = predicted(case, **on, device="a100-sxm-80gb", ddp={"backend": "nccl"})
        for step in steps:
            assert cpu == gpu == step, case["case"]


def called(observed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [case for case in observed if "steps" in case]


def one_group(observed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [case for case in called(observed) if case["nodes"] == 1]


def test_memory_is_what_torchs_tracker_finds(observed: list[dict[str, Any]]) -> None:
    """Within 1 %: it counts activations too, which are small in these models."""
    peaks = [case for case in observed if "peak_bytes" in case]
    assert len(peaks) == 8
    for case in peaks:
        model = timeless_model(case)
        nodes = case["nodes"]
        strategy = strategy_of(case, nodes=nodes, device="a100-sxm-80gb", ddp={"backend": "nccl"})
        held = strategy.resident_bytes(model, 0)
        assert sum(held) == pytest.approx(case["peak_bytes"], rel=0.01)


def test_collectives_equal_those_of_fully_shard(observed: list[dict[str, Any]]) -> None:
    for case in one_group(observed):
        assert_called(case)


def test_collectives_of_a_mesh_equal_those_of_fully_shard(observed: list[dict[str, Any]]) -> None:
    """HSDP, and parameters that are gathered again in a node: among which ranks each is."""
    kinds = set()
    for case in (case for case in called(observed) if case["nodes"] == 2):
        assert_called(case)
        kinds |= {(case["case"][0], kind, *ranks) for kind, _, _, ranks in case["steps"][0]}
    assert kinds == {
        ("hsdp", "all_gather", 0, 1),
        ("hsdp", "reduce_scatter", 0, 1),
        ("hsdp", "all_reduce", 0, 2),
        ("fully_shard", "all_gather", 0, 1, 2, 3),
        ("fully_shard", "all_gather", 0, 1),
        ("fully_shard", "reduce_scatter", 0, 1, 2, 3),
    }


RANGE = re.compile(r"FSDP::(\w+)(?: for)? ?\(?([\w.]*)\)?$")
ORDERED = {
    "all_gather": "gather",
    "all_gather_copy_out": "copy out",
    "post_backward_reduce": "reduce",
    "post_backward_rs_wait": "wait to reduce",
}


def order_of(case: dict[str, Any]) -> list[list[str]]:
    """What the ranges that FSDP tells the profiler say, in order: what is done to which unit."""
    found: list[list[str]] = []
    ahead_until = 0.0
    for start, end, each in case["ranges"]:
        if each == "_c10d_functional::all_reduce":
            found.append(["sum of norms", ""])
        if not (matched := RANGE.match(each)):
            continue
        name, unit = matched.groups()
        if name == "backward_prefetch":
            ahead_until = end
        if name in ORDERED:
            ahead = name == "all_gather" and start < ahead_until
            found.append(["gather ahead" if ahead else ORDERED[name], unit])
    return found


def told(case: dict[str, Any]) -> list[list[str]]:
    """The same of our step: what is done to which unit."""
    clips = {"error_if_nonfinite": case["checks"]}
    on = {"nodes": 2, "device": "a100-sxm-80gb", "ddp": {"backend": "nccl"}}
    step = strategy_of(case, clips=clips, **on).steps[0]
    sent = {i.number: i for i in step if isinstance(i, Communicate)}
    found: list[list[str]] = []
    for now, after in pairwise(step):
        if isinstance(now, Communicate):
            what, unit = _launched(now)
            if found and found[-1] == ["wait to reduce", ""]:
                found[-1][1] = unit
            found += [[what, unit]] if what else []
        elif isinstance(now, Await) and sent[now.number].operation == "all_gather":
            found.append(["copy out", _launched(sent[now.number])[1]])
        elif isinstance(now, Await) and isinstance(after, Compute) and after.kind == "bucket_copy":
            found.append(["wait to reduce", ""])
    return found


def _launched(sent: Communicate) -> tuple[str, str]:
    """What it is in FSDP's words, and of which unit."""
    what, _, rest = sent.cause.partition(" of ")
    unit, _, when = rest.partition(", ")
    if sent.bucket == -1 and sent.operation == "all_reduce":
        return "sum of norms", ""
    if sent.operation == "all_gather":
        what = "gather ahead" if when.endswith("ahead") else "gather"
    else:
        what = "" if sent.operation == "all_reduce" else "reduce"
    return what, "" if unit == "the root" else unit


def test_order_is_that_of_fsdps_ranges(observed: list[dict[str, Any]]) -> None:
    """All-gathers, prefetches, copies out, waits and reductions, as torch tells its profiler."""
    cases = [case for case in observed if "ranges" in case]
    assert len(cases) == 9
    for case in cases:
        assert told(case) == order_of(case), case["options"]
    words = [what for case in cases for what, _ in order_of(case)]
    for what in ("gather", "gather ahead", "copy out", "wait to reduce", "reduce"):
        assert words.count(what) > 20
    assert words.count("sum of norms") == len(cases)


def test_divisors_of_gradients_are_torchs(observed: list[dict[str, Any]]) -> None:
    """Kernels of their own, for float16 alone."""
    (found,) = (case["divisors"] for case in observed if "divisors" in case)
    assert len(found) == 56
    for dtype, ranks, replicas, factor, before, after in found:
        ours = divisors(factor or ranks * replicas) if dtype == "float16" else (1, 1)
        assert ours == (before, after)


def test_units_by_size_are_those_of_torchs_policy(observed: list[dict[str, Any]]) -> None:
    """fully_shard as the wrapper of its recursion; each size shards other units."""
    sized = [case for case in called(observed) if isinstance(case["case"][3], int)]
    units = {
        len([call for call in case["steps"][0] if call[0] == "reduce_scatter"]) for case in sized
    }
    assert len(sized) == 6
    assert len(units) > 2


def test_the_oracle_tells_cases_apart(observed: list[dict[str, Any]]) -> None:
    """Parameters kept are not gathered again, and unsynchronised micro-batches reduce nothing.

    The root's are gathered again where it is told so.
    """
    trained = (case for case in one_group(observed) if case["case"][1] != "adapted")
    cases = list(trained)
    for place in range(0, len(cases), 6):
        usual, with_root, kept, quiet, _, synced = (
            [call[0] for call in case["steps"][0]] for case in cases[place : place + 6]
        )
        gathered, reduced = usual.count("all_gather"), usual.count("reduce_scatter")
        assert gathered > kept.count("all_gather") == reduced > 1
        assert 2 * reduced == with_root.count("all_gather") <= gathered + 1
        assert quiet.count("all_gather") == 2 * gathered
        assert quiet.count("reduce_scatter") == reduced
        assert synced.count("all_gather") == synced.count("reduce_scatter") == 2 * reduced
