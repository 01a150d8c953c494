"""Buckets equal torch's: against its assignment function, real DDP runs and published counts."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from two_ranks import observed_of

from ddpsim.prediction.api import load_scenario
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.catalog import model_table
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.ddp.buckets import assign_by_size, bucket_limits, plan_buckets
from ddpsim.strategies.instructions import Communicate, Compute
from ddpsim.units import MIB
from ddpsim.workload.model import Model, Parameter, Work

TORCH_DTYPES = ("float32", "float16", "float64", "bfloat16")


def zoo_parameters(name: str) -> tuple[list[Parameter], list[int]]:
    table = model_table(name)
    columns = table["parameters"]
    parameters = []
    for parameter, shape in zip(columns["name"], columns["shape"], strict=True):
        numel = 1
        for extent in shape:
            numel *= extent
        parameters.append(Parameter(parameter, numel, "float32"))
    return parameters, table["ready_order"]


def rebuilt_elements(parameters: list[Parameter], ready: list[int], **options: Any) -> list[int]:
    plan = plan_buckets(parameters, ready, Ddp.model_validate(options))
    return [sum(parameters[i].numel for i in bucket) for bucket in plan.rebuilt]


@st.composite
def tensor_lists(draw: st.DrawFn) -> tuple[list[tuple[int, str, bool]], list[int], list[int]]:
    """Tensors (numel, dtype, sparse), limits in bytes, and an order (empty: as they stand)."""
    dtypes = st.sampled_from(TORCH_DTYPES[: draw(st.integers(1, 4))])
    tensor = st.tuples(
        st.integers(1, 3000), dtypes, st.booleans() if draw(st.booleans()) else st.just(False)
    )
    tensors = draw(st.lists(tensor, min_size=1, max_size=40))
    limits = draw(st.lists(st.integers(1, 12_000), min_size=1, max_size=4))
    order = draw(st.one_of(st.just([]), st.permutations(range(len(tensors)))))
    return tensors, limits, order


@settings(max_examples=200)
@given(tensor_lists())
def test_assignment_equals_torch(
    lists: tuple[list[tuple[int, str, bool]], list[int], list[int]],
) -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle of bucket assignment")
    import torch.distributed as dist

    tensors, limits, order = lists
    walked = [tensors[i] for i in order] if order else tensors
    real = [
        torch.empty(numel, dtype=getattr(torch, dtype), device="meta") for numel, dtype, _ in walked
    ]
    sparse = [is_sparse for _, _, is_sparse in tensors]
    expected, _ = dist._compute_bucket_assignment_by_size(real, limits, sparse, list(order))
    sizes = [tensor.numel() * tensor.element_size() for tensor in real]
    keys = [dtype for _, dtype, _ in walked]
    assert assign_by_size(sizes, keys, limits, sparse=sparse, indices=order) == expected


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(1, 5_000_000), st.sampled_from(TORCH_DTYPES)), min_size=1, max_size=60
    ),
    st.sampled_from([None, 1, 25, 0.5, [1, 25, 100]]),
    st.booleans(),
    st.booleans(),
)
def test_every_gradient_is_in_one_bucket(
    tensors: list[tuple[int, str]], cap: Any, static: bool, unused: bool
) -> None:
    parameters = [Parameter(f"p{i}", numel, dtype) for i, (numel, dtype) in enumerate(tensors)]
    spec = Ddp.model_validate(
        {"bucket_cap_mb": cap, "static_graph": static, "find_unused_parameters": unused}
    )
    plan = plan_buckets(parameters, list(range(len(parameters)))[::-1], spec)
    for assignment in (plan.initial, plan.rebuilt):
        assert sorted(i for bucket in assignment for i in bucket) == list(range(len(parameters)))
        for bucket in assignment:
            assert len({parameters[i].dtype for i in bucket}) == 1


def test_worked_example() -> None:
    """Sizes .5 .5 1 8 8 8 8 1 MiB, limits 1 and 25: torch gives these groups."""
    sizes = [int(mib * MIB) for mib in (0.5, 0.5, 1, 8, 8, 8, 8, 1)]
    assert assign_by_size(sizes, ["f"] * 8, [MIB, 25 * MIB]) == [[0, 1], [2, 3, 4, 5], [6, 7]]


def test_an_explicit_cap_removes_the_small_first_bucket() -> None:
    assert bucket_limits(Ddp()) == [MIB, 25 * MIB]
    assert bucket_limits(Ddp.model_validate({"bucket_cap_mb": 25})) == [25 * MIB]
    assert bucket_limits(Ddp.model_validate({"bucket_cap_mb": 25, "torch": "1.4"})) == [
        MIB,
        25 * MIB,
    ]


def test_resnet50_reduces_the_published_buckets() -> None:
    """The five all-reduces in the arguments of HTA's ResNet-50 trace on 2 x A100."""
    parameters, ready = zoo_parameters("resnet50")
    assert rebuilt_elements(parameters, ready) == [2049000, 7875584, 6563840, 6637568, 2431040]


@pytest.mark.parametrize(
    ("model", "counts"), [("gpt2", (50, 13, 4, 1)), ("gpt2-large", (146, 109, 28, 6))]
)
def test_gpt2_makes_the_published_number_of_all_reduces(
    model: str, counts: tuple[int, ...]
) -> None:
    """Profiler counts published for n_positions 512 at explicit caps of 1, 25, 100 and 500."""
    parameters, ready = zoo_parameters(model)
    short = [
        Parameter(p.name, p.numel // 2, p.dtype) if p.name.endswith("wpe.weight") else p
        for p in parameters
    ]
    found = tuple(
        len(rebuilt_elements(short, ready, bucket_cap_mb=cap)) for cap in (1, 25, 100, 500)
    )
    assert found == counts


def test_recorded_ready_order_makes_the_same_buckets() -> None:
    """An order measured on a V100 (BytePS) and our table agree bucket by bucket."""
    reference = os.environ.get("DDPSIM_REFERENCE_DATA")
    if not reference:
        pytest.skip("DDPSIM_REFERENCE_DATA is not set: no recorded gradient-ready order")
    path = Path(reference) / "ready-times" / "resnet50_ready_times.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    recorded = [Parameter(row["param_name"], int(row["numel"]), "float32") for row in rows]
    expected = [2049000, 7875584, 6563840, 6637568, 2431040]
    assert rebuilt_elements(recorded, list(range(len(recorded)))) == expected


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, warm_python: None) -> list[dict[str, Any]]:
    """Bucket logs of a real 2-process gloo job over many models and options."""
    pytest.importorskip("torch", reason="real DDP is the oracle of bucket plans")
    return observed_of("ddp_oracle.py", tmp_path_factory.mktemp("ddp"))


def test_buckets_equal_those_of_real_ddp(observed: list[dict[str, Any]]) -> None:
    assert len(observed) > 30
    for case in observed:
        check_case(case)


def check_case(case: dict[str, Any]) -> None:
    label = f"{case['model']} with {case['options']}"
    parameters = [
        Parameter(p["name"], p["numel"], p["dtype"], p["sparse"]) for p in case["parameters"]
    ]
    last = case["steps"][-1]
    rebuilt_steps = [
        i for i, step in enumerate(case["steps"]) if step.get("has_rebuilt_buckets") == "1"
    ]
    ready = [
        int(i) for i in last.get("prev_iteration_grad_ready_order_indices", "").split(",") if i
    ]
    plan = plan_buckets(parameters, ready, options(case["options"]))
    assert sizes(parameters, plan.initial) == integers(case["steps"][0]["bucket_sizes"]), label
    if not rebuilt_steps:
        assert plan.rebuilt_at is None, label
        return
    assert plan.rebuilt_at == rebuilt_steps[0] - 1, label  # logged one forward after it happened
    indices = [
        tuple(int(i) for i in bucket.split())
        for bucket in last["rebuilt_per_bucket_param_indices"].split(",")
    ]
    assert list(plan.rebuilt) == indices, label
    assert sizes(parameters, plan.rebuilt) == integers(last["rebuilt_bucket_sizes"]), label


def options(name: str) -> Ddp:
    from ddp_oracle import OPTIONS

    given = dict(OPTIONS[name])
    if "bucket_cap_mb_list" in given:
        given["bucket_cap_mb"] = given.pop("bucket_cap_mb_list")
    return Ddp.model_validate({"torch": "2.13"} | given)


def sizes(parameters: list[Parameter], assignment: Any) -> list[int]:
    return [sum(parameters[i].size_bytes for i in bucket) for bucket in assignment]


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@pytest.mark.parametrize(
    "names",
    [
        ("weight", "bias"),
        ("w0", "w1", "w2"),
        ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
        ("layers.0.w1", "layers.0.b1", "layers.0.w2", "layers.0.b2", "head.weight", "head.bias"),
    ],
)
def test_a_list_is_ready_in_torchs_order(names: tuple[str, ...], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle of the ready order")
    is_bias = [name.rpartition(".")[2][0] == "b" or name.endswith("bias") for name in names]
    shapes = [(8,) if bias else (8, 8) for bias in is_bias]
    tensors = [torch.ones(*shape, requires_grad=True) for shape in shapes]
    ready: list[int] = []
    for i, tensor in enumerate(tensors):
        tensor.register_post_accumulate_grad_hook(lambda _, i=i: ready.append(i))
    x = torch.ones(2, 8)
    for i, bias in enumerate(is_bias):
        if not bias:
            own = tensors[i + 1] if is_bias[i + 1 : i + 2] == [True] else None
            x = torch.nn.functional.linear(x, tensors[i], own)
    x.sum().backward()
    rows = [f'{name},"{shape}",float32' for name, shape in zip(names, shapes, strict=True)]
    (tmp_path / "list.csv").write_text("\n".join(["name,shape,dtype", *rows]) + "\n")
    workload = {"parameters": str(tmp_path / "list.csv"), "batch_per_rank": 1, "step_time": "1 s"}
    cluster = {"nodes": 1, "gpus_per_node": 2, "device": "a100-sxm-40gb"}
    asked = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster}
    assert resolve(load_scenario(asked)).model.ready_order == tuple(ready)


WIDTH, CAP_MIB = 512, 1
# an embedding with the head's weight, and two layers between them
SHARED = [
    *(("embedding.weight", 1024 * WIDTH), ("a.weight", WIDTH**2), ("a.bias", WIDTH)),
    *(("b.weight", WIDTH**2), ("b.bias", WIDTH)),
]


def torch_1_sends(*, find_unused: bool) -> list[tuple[int, int]]:
    """(gradients ready, elements) of each bucket, by torch's Reducer.

    It is made as distributed.py of torch 1.4 to 1.8 did, with a list of each module's parameters.
    """
    torch = pytest.importorskip("torch", reason="torch's Reducer is the oracle")
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    embedding, head = torch.nn.Embedding(1024, WIDTH), torch.nn.Linear(WIDTH, 1024, bias=False)
    head.weight = embedding.weight
    module = torch.nn.Sequential(
        embedding, torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH), head
    )
    listed = [p for each in module.modules() for p in each.parameters(recurse=False)]
    limits = [MIB, int(CAP_MIB * MIB)]
    found: list[tuple[int, int]] = []
    ready: list[bool] = []

    def hook(_: object, bucket: Any) -> Any:
        found.append((len(ready), bucket.buffer().numel()))
        reduced = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        sparse = [False] * len(listed)
        buckets, caps = dist._compute_bucket_assignment_by_size(listed, limits, sparse)
        own = (buckets[::-1], caps[::-1], dist.group.WORLD, sparse, limits[1], find_unused)
        reducer = dist.Reducer(listed, *own, False, {}, limits[0])
        dist._register_comm_hook(reducer, None, hook)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: ready.append(True))
        for _ in range(2):
            found.clear()
            ready.clear()
            reducer._rebuild_buckets()
            output = module(torch.arange(3))
            reducer.prepare_for_backward([output] if find_unused else [])
            output.sum().backward()
    finally:
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("version", ["1.7", "2.11"])
def test_torch_1_reduces_a_shared_weight_in_two_buckets(version: str, *, find_unused: bool) -> None:
    """One of them comes first unless they are rebuilt, and the weight is ready last."""
    model = Model(
        parameters=tuple(Parameter(name, numel, "float32") for name, numel in SHARED),
        ready_order=(4, 3, 2, 1, 0),
        buffers=(),
        forward=(Work(1e-3),) * 4,
        backward=(Work(1e-3),) * 6,
        optimizer=Work(1e-3),
        launch_s=0.0,
        activation_bytes=0,
        basis="measured",
        provenance=(),
        forward_modules=("embedding", "a", "b", "head"),
    )
    ddp = {"torch": version, "find_unused_parameters": find_unused, "bucket_cap_mb": CAP_MIB}
    cluster = {"nodes": 1, "gpus_per_node": 2, "device": "a100-sxm-80gb"}
    workload = {"model": "gpt2", "batch_per_rank": 1}
    keys = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster, "ddp": ddp}
    gradients, sent = 0, []
    for each in compile_program(Scenario.model_validate(keys), model).steady_step:
        gradients += isinstance(each, Compute) and each.kind == "backward"
        if isinstance(each, Communicate) and each.num_params:
            sent.append((gradients, each.size_bytes // 4))
    if version == "1.7":
        assert sent == torch_1_sends(find_unused=find_unused)
    assert sum(elements for _, elements in sent) == sum(numel for _, numel in SHARED) + (
        SHARED[0][1] if version == "1.7" else 0
    )
    assert (sent[0][0] == len(SHARED)) == (version == "1.7" and find_unused)


def test_a_shared_weight_of_torch_1_is_told() -> None:
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"model": "gpt2", "batch_per_rank": 4},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "rtx-3090"},
        "ddp": {"torch": "1.7", "find_unused_parameters": True},
    }
    job = resolve(load_scenario(scenario))
    (warning,) = (each for each in job.warnings(1.0) if each.startswith("ddp.torch"))
    assert "transformer.wte.weight, which is shared, twice, and no bucket before" in warning
    newer = load_scenario(scenario, ["ddp.torch='2.11'"])
    assert not any("shared" in each for each in resolve(newer).warnings(1.0))
