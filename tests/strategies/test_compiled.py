"""Gradients under torch.compile, with torch's own graphs and real DDP as the oracle."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from campaigns import unpacked
from logs.measured_files import model_file

import ddpsim
from ddpsim.errors import ScenarioError
from ddpsim.planning.compare import each_flag
from ddpsim.prediction.measured_step import check_measured
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.document import load
from ddpsim.scenario.load import parse
from ddpsim.strategies.ddp.buckets import plan_buckets
from ddpsim.strategies.ddp.compiled_graphs import compiled_model
from ddpsim.workload.model import Model, Parameter, Work, total_s


@dataclass(frozen=True)
class Seen:
    """What torch did with a model: parameters in registration order, gradients by their index."""

    parameters: tuple[Parameter, ...]
    eager_order: tuple[int, ...]
    graph_bytes: tuple[int, ...]  # of the parameters that DDPOptimizer counts in each
    order: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]

    def model(self) -> Model:
        """As ddpsim has it, each gradient after a second of work, and one second behind them."""
        return model_of(self.parameters, self.eager_order)


def model_of(parameters: tuple[Parameter, ...], ready_order: tuple[int, ...]) -> Model:
    return Model(
        parameters=parameters,
        ready_order=ready_order,
        buffers=(),
        forward=(Work(1.0),),
        backward=tuple(Work(1.0, 2, 0.5) for _ in range(len(ready_order) + 1)),
        optimizer=Work(0.0),
        launch_s=0.0,
        activation_bytes=None,
        basis="measured",
        provenance=(),
    )


@pytest.fixture
def alone() -> Iterator[None]:
    pytest.importorskip("torch", reason="torch is the oracle")
    from calibrate.measure.ranks.job import process_group

    with process_group("gloo"):
        yield


def perceptron() -> tuple[Any, Any]:
    """Layers of 0.3 to 2.4 MB, one after another."""
    import torch
    from torch import nn

    widths = (256, 300, 700, 900, 500, 400, 800, 300, 900, 100)
    layers = [
        layer
        for i in range(len(widths) - 1)
        for layer in (nn.Linear(widths[i], widths[i + 1]), nn.ReLU())
    ]
    return nn.Sequential(*layers), torch.randn(4, widths[0])


def convolutional() -> tuple[Any, Any]:
    """Convolutions of 0.1 to 2.4 MB with batch norm, and a classifier."""
    import torch
    from torch import nn

    layers: list[nn.Module] = []
    channels = (3, 64, 96, 128, 192, 256, 192, 256)
    for inputs, outputs in pairwise(channels):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 500)]
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)


def transformer() -> tuple[Any, Any]:
    """Blocks with residuals, attention in the order in which they use its parts."""
    import torch
    from torch import nn

    block = nn.TransformerEncoderLayer(192, 4, 768, dropout=0.0, batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    return (
        nn.Sequential(nn.Embedding(1000, 192), blocks, nn.LayerNorm(192), nn.Linear(192, 1000)),
        torch.randint(0, 1000, (2, 8)),
    )


def seen(
    build: Callable[[], tuple[Any, Any]],
    cap: float | None,
    *,
    optimize_ddp: bool,
    blocks: Sequence[str] = (),
) -> Seen:
    """Train under DDP of this process, bare and compiled (graphs run by torch's own kernels).

    `blocks`: modules that are compiled on their own, in the place of the whole.
    """
    import torch
    from torch._dynamo import config
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch.nn.parallel import DistributedDataParallel

    split: list[Any] = []
    compile_fn = DDPOptimizer.compile_fn

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        done = compile_fn(self, *args, **options)
        split.append(self.buckets)
        return done

    def trained(*, compiled: bool) -> tuple[Any, dict[str, str]]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, inputs = build()
        wrapped = model
        if compiled and not blocks:
            wrapped = torch.compile(model, backend="aot_eager")
        for block in blocks if compiled else ():
            model.get_submodule(block).compile(backend="aot_eager")
        ddp = DistributedDataParallel(wrapped, bucket_cap_mb=cap)
        for _ in range(4):
            ddp(inputs).sum().backward()
            ddp.zero_grad()
        return model, {key: str(value) for key, value in ddp._get_ddp_logging_data().items()}

    with pytest.MonkeyPatch.context() as patch, config.patch(optimize_ddp=optimize_ddp):
        patch.setattr(DDPOptimizer, "compile_fn", spy)
        model, eager = trained(compiled=False)
        _, compiled = trained(compiled=True)
    return Seen(
        tuple(Parameter(name, p.numel(), "float32") for name, p in model.named_parameters()),
        in_order(eager["prev_iteration_grad_ready_order_indices"]),
        tuple(bucket.size for graph in reversed(split) for bucket in reversed(graph)),
        in_order(compiled["prev_iteration_grad_ready_order_indices"]),
        tuple(
            tuple(int(i) for i in bucket.split())
            for bucket in compiled["rebuilt_per_bucket_param_indices"].split(",")
        ),
    )


def in_order(text: str) -> tuple[int, ...]:
    return tuple(int(index) for index in text.split(",") if index.strip())


def ends_s(model: Model) -> list[float]:
    """When each gradient is there, in the order in which they come."""
    return [total_s(model.backward[: i + 1]) for i in range(len(model.ready_order))]


def graph_bytes(model: Model, compiled: Model) -> tuple[int, ...]:
    """Of the gradients that come at once, in the order of time."""
    ends = ends_s(compiled)
    return tuple(
        sum(
            model.parameters[i].size_bytes
            for i, at in zip(compiled.ready_order, ends, strict=True)
            if at == end
        )
        for end in sorted(set(ends))
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("build", "cap"), [(perceptron, None), (convolutional, 1.0)])
def test_layers_in_a_row_are_split_and_ordered_as_by_torch(
    build: Callable[[], tuple[Any, Any]], cap: float | None
) -> None:
    torch_did = seen(build, cap, optimize_ddp=True)
    ddp = Ddp.model_validate({"bucket_cap_mb": cap})
    compiled = compiled_model(torch_did.model(), ddp)
    assert len(torch_did.graph_bytes) > 1
    assert graph_bytes(torch_did.model(), compiled) == torch_did.graph_bytes
    assert compiled.ready_order == torch_did.order
    assert plan_buckets(compiled.parameters, compiled.ready_order, ddp).rebuilt == torch_did.buckets


@pytest.mark.usefixtures("alone")
def test_blocks_with_residuals_are_split_as_by_torch() -> None:
    torch_did = seen(transformer, 1.0, optimize_ddp=True)
    compiled = compiled_model(torch_did.model(), Ddp.model_validate({"bucket_cap_mb": 1.0}))
    assert len(torch_did.graph_bytes) > 1
    assert graph_bytes(torch_did.model(), compiled) == torch_did.graph_bytes


def alike() -> tuple[Any, Any]:
    """Blocks of one kind, which Dynamo compiles once, between layers that it does not see."""
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(300, 1200), nn.Linear(1200, 300)

        def forward(self, x: Any) -> Any:
            return x + self.narrow(self.wide(x).relu())

    blocks = [Residual() for _ in range(3)]
    return nn.Sequential(nn.Linear(20, 300), *blocks, nn.Linear(300, 50)), torch.randn(4, 20)


@pytest.mark.usefixtures("alone")
def test_blocks_compiled_on_their_own_are_each_split_as_by_torch() -> None:
    """What is outside of them comes gradient by gradient."""
    blocks = ("1", "2", "3")
    torch_did = seen(alike, 1.0, optimize_ddp=True, blocks=blocks)
    model = replace(torch_did.model(), compiled_blocks=blocks)
    ddp = Ddp.model_validate({"bucket_cap_mb": 1.0})
    compiled = compiled_model(model, ddp)
    sizes = graph_bytes(model, compiled)
    outside = [model.parameters[index].size_bytes for index in (15, 14, 1, 0)]
    assert [*sizes[:2], *sizes[-2:]] == outside
    assert sizes[2:-2] == torch_did.graph_bytes * 3
    assert compiled.ready_order == torch_did.order
    assert plan_buckets(compiled.parameters, compiled.ready_order, ddp).rebuilt == torch_did.buckets
    whole = compiled_model(model, Ddp.model_validate({"optimize_ddp": False}))
    assert len(graph_bytes(model, whole)) == len(outside) + len(blocks)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("build", [perceptron, transformer])
def test_without_the_split_gradients_come_in_torchs_order(
    build: Callable[[], tuple[Any, Any]],
) -> None:
    torch_did = seen(build, None, optimize_ddp=False)
    ddp = Ddp.model_validate({"optimize_ddp": False})
    compiled = compiled_model(torch_did.model(), ddp)
    assert torch_did.graph_bytes == ()
    assert compiled.ready_order == torch_did.order
    assert plan_buckets(compiled.parameters, compiled.ready_order, ddp).rebuilt == torch_did.buckets
    assert set(ends_s(compiled)) == {total_s(torch_did.model().backward)}


# --- split by hand: no torch -------------------------------------------------------------------


def layers_of(*sizes_mib: float) -> Model:
    """Layers of one weight each, of which the last one's gradient comes first."""
    parameters = tuple(
        Parameter(f"{i}.weight", int(mib * 2**18), "float32") for i, mib in enumerate(sizes_mib)
    )
    return model_of(parameters, tuple(reversed(range(len(parameters)))))


@pytest.mark.parametrize(
    ("cap", "at_s"),
    [
        (None, [1, 6, 6, 6, 6, 6, 9, 9]),  # 1 MiB, then 25, then what is left and the tail
        (25.0, [1, 6, 6, 6, 6, 6, 9, 9]),  # torch's split has the small first graph all the same
        (10.0, [1, 3, 3, 5, 5, 9, 9, 9]),
        ((2.0, 10.0), [1, 3, 3, 5, 5, 9, 9, 9]),  # of a list the largest
    ],
)
def test_a_graph_ends_where_its_parameters_reach_the_cap(cap: Any, at_s: list[int]) -> None:
    model = layers_of(1, 1, 4, 6, 6, 5, 5, 1)
    compiled = compiled_model(model, Ddp.model_validate({"bucket_cap_mb": cap}))
    assert ends_s(compiled) == at_s
    assert total_s(compiled.backward) == total_s(model.backward)
    assert sum(w.kernels for w in compiled.backward) == sum(w.kernels for w in model.backward)
    assert sum(w.host_s for w in compiled.backward) == sum(w.host_s for w in model.backward)
    assert sorted(compiled.ready_order) == sorted(model.ready_order)


def simulate(document: dict[str, Any]) -> ddpsim.Result:
    return ddpsim.simulate(ddpsim.load_scenario(document))


def gpt2(**changes: Any) -> dict[str, Any]:
    """GPT-2 on 16 GPUs whose network takes half as long as their backward."""
    workload = {"model": "gpt2", "batch_per_rank": 12, "precision": "amp-bf16"}
    return {
        "schema": "ddpsim/1",
        "workload": workload | {"step_time": "135 ms"} | changes.pop("workload", {}),
        "ddp": changes,
        "cluster": {
            "nodes": 2,
            "gpus_per_node": 8,
            "device": "a100-sxm-80gb",
            "inter_node": {"bandwidth": "100 Gbit/s", "latency": "5 us"},
        },
    }


def test_without_the_split_nothing_is_hidden() -> None:
    """All buckets are launched when the backward ends, beside nothing but copies."""
    whole = simulate(gpt2(workload={"compile": True}, optimize_ddp=False))
    split = simulate(gpt2(workload={"compile": True}))
    assert all(bucket.start_s >= whole.buckets[0].ready_s for bucket in whole.buckets)
    assert whole.exposed_comm_s > 0.9 * whole.comm_time_s
    assert split.exposed_comm_s < 0.5 * split.comm_time_s
    assert split.iteration_time_s.mean < whole.iteration_time_s.mean


def test_a_step_measured_of_one_is_not_taken_for_the_other() -> None:
    base = load(gpt2())
    with pytest.raises(ScenarioError, match=r"workload.compile: workload.step_time was measured"):
        check_measured(parse(base), ddpsim.load_scenario(gpt2(workload={"compile": True})), "both")
    flags = [option.settings for option in each_flag(load(gpt2(workload={"compile": True})))]
    assert ("ddp.optimize_ddp=false",) in flags
    assert ("ddp.optimize_ddp=false",) not in [option.settings for option in each_flag(base)]


def test_optimize_ddp_changes_nothing_of_what_is_not_compiled() -> None:
    assert simulate(gpt2(optimize_ddp=False)).iteration_time_s == simulate(gpt2()).iteration_time_s


def test_one_operator_alone_is_as_if_it_were_not_compiled() -> None:
    model = layers_of(3)
    compiled = compiled_model(model, Ddp())
    assert compiled.ready_order == model.ready_order
    assert total_s(compiled.backward[:1]) == 2.0  # the tail belongs to the graph


# --- profiles ----------------------------------------------------------------------------------

TIMES = {"batch_per_rank": 4, "forward_s": 0.010, "backward_s": 0.020, "optimizer_s": 0.001}
READY_S = {"a.weight": 0.020, "b.weight": 0.012, "c.weight": 0.004}


def run_profile(folder: Path, known: dict[str, Any], **workload: Any) -> ddpsim.Result:
    told = model_file([(name, 2**20, at_s) for name, at_s in READY_S.items()], **TIMES | known)
    (folder / "model.json").write_text(json.dumps(told))
    return simulate(
        {
            "schema": "ddpsim/1",
            "workload": {"profile": str(folder / "model.json"), "batch_per_rank": 4} | workload,
            "ddp": {"backend": "gloo", "bucket_cap_mb": 1},
            "cluster": {
                "nodes": 2,
                "gpus_per_node": 1,
                "device": "cpu",
                "inter_node": {"bandwidth": "10 Gbit/s", "latency": "50 us"},
            },
        }
    )


def test_a_profile_of_a_compiled_model_says_so_itself(tmp_path: Path) -> None:
    told = run_profile(tmp_path, {"compiled": True})
    asked = run_profile(tmp_path, {}, compile=True)
    assert told.iteration_time_s == asked.iteration_time_s
    assert [p.input for p in told.provenance].count("torch.compile") == 1
    assert not told.warnings
    assert any("changes no time of" in warning for warning in asked.warnings)
    assert not any(p.input == "torch.compile" for p in run_profile(tmp_path, {}).provenance)


@pytest.mark.parametrize("option", ["bucket_cap_mb", "optimize_ddp"])
def test_scenarios_simulated_together_have_graphs_of_their_own(option: str) -> None:
    """Whatever was built for one: a wider cap makes fewer graphs, and none makes one."""
    values = [1, 25, 500] if option == "bucket_cap_mb" else [True, False]
    documents = [gpt2(workload={"compile": True}, **{option: value}) for value in values]
    alone = [simulate(document).iteration_time_s.mean for document in documents]
    together = ddpsim.simulate_many([ddpsim.load_scenario(document) for document in documents])
    assert [brief.iteration_time_s.mean for brief in together] == alone
    assert len(set(alone)) == len(values)


# --- real DDP over a shaped network -------------------------------------------------------------

DATA = Path(__file__).parent.parent / "data" / "compiled-ddp"
CLUSTER = unpacked() / "testbed-fast-xeon"


def real_steps() -> list[dict[str, str]]:
    lines = (DATA / "steps.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize(
    "row", [row for row in real_steps() if row["step_ms"]], ids=lambda r: r["graphs"]
)
def test_real_steps_of_compiled_models_are_predicted(row: dict[str, str], tmp_path: Path) -> None:
    """By the profile of another machine of that kind, measured before: none of it is fitted."""
    compiled = row["graphs"] != "eager"
    alone = "bare-compiled" if compiled else "bare-eager"
    (bare,) = (step for step in real_steps() if step["graphs"] == alone)
    known = json.loads((DATA / "model.json").read_text())
    known["measured"]["compiled"] = compiled
    (tmp_path / "model.json").write_text(json.dumps(known))
    parts = ("forward", "backward", "optimizer")
    result = simulate(
        {
            "schema": "ddpsim/1",
            "workload": {
                "profile": str(tmp_path / "model.json"),
                "batch_per_rank": 2,
                "step_time": {part: f"{bare[f'{part}_ms']} ms" for part in parts},
            },
            "ddp": {
                "backend": "gloo",
                "bucket_cap_mb": row["bucket_cap_mb"]
                if row["bucket_cap_mb"] == "default"
                else float(row["bucket_cap_mb"]),
                "optimize_ddp": row["graphs"] == "split",
            },
            "cluster": {
                "nodes": 2,
                "gpus_per_node": 1,
                "device": "cpu-core",
                "profile": str(CLUSTER / "cluster.json"),
                "inter_node": {"bandwidth": "1 Gbit/s", "latency": "50 us"},
            },
            "run": {"allow_extrapolation": True},
        }
    )
    assert result.iteration_time_s.p50 * 1e3 == pytest.approx(float(row["step_ms"]), rel=0.025)
    buckets = [int(size) for size in row["buckets"].split()]
    exact = 0.004 if row["graphs"] == "split" else 0  # residuals: the order is an approximation
    assert [bucket.size_bytes for bucket in result.buckets] == pytest.approx(buckets, rel=exact)
