"""A captured model's file: what stays free, what is refused, and that a scenario takes it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="a capture runs torch")

from helpers.oracles.compiled_layouts import is_turned
from torch import nn

from calibrate.capture.capture import Inexact, capture, fit, render, value_at
from calibrate.capture.record import record
from calibrate.capture.sources import Source, function_source, source_of
from calibrate.cli import app
from calibrate.measure.errors import MeasureError
from ddpsim import load_scenario, simulate
from ddpsim.errors import ScenarioError
from ddpsim.scenario.catalog import zoo_document
from ddpsim.scenario.options.model_file import read_model_file
from ddpsim.scenario.starters import captured_text
from ddpsim.scenario.workload import Workload
from ddpsim.workload.arithmetic import arithmetic_of
from ddpsim.workload.operators import MULTIPLYING, Operator
from ddpsim.workload.zoo.law import Law
from ddpsim.workload.zoo.step import step_of

CODE = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(x.shape[1]):
            x = self.linear(x)
        return x

def mean(y):
    return y.float().mean()

def sized(batch: int = 4, seq_len: int = 32):
    model = nn.Sequential(
        nn.Embedding(50, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    )
    return model, torch.randint(0, 50, (batch, seq_len)), mean

class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)

def spared(batch: int = 4):
    return Spare(), torch.randn(batch, 4), mean

def by_length(batch: int = 4, seq_len: int = 16):
    return Odd(), torch.randn(batch, seq_len, 4), mean

def by_inputs():
    return nn.Linear(4, 4), torch.randn(3, 4), mean

def one_batch():
    wanted = torch.randn(3, 4)
    return nn.Linear(4, 4), torch.randn(3, 4), lambda y: nn.functional.mse_loss(y, wanted)

def looks(batch: int = 4):
    return nn.Linear(4, 4), torch.randn(batch, 4), lambda y: y.sum() if y.mean() > 0 else y.mean()

def picks(batch: int = 4):
    return nn.Linear(4, 4), torch.randn(batch, 4), lambda y: y[y > 0].sum()

def to_numpy(batch: int = 4):
    return nn.Linear(4, 4), torch.randn(batch, 4), lambda y: mean(y) + y.detach().numpy().sum()

def address(batch: int = 4):
    return nn.Linear(4, 4), torch.randn(batch, 4), lambda y: mean(y) * y.data_ptr()

@torch.library.custom_op("own::kernel", mutates_args=())
def kernel(x: torch.Tensor) -> torch.Tensor:
    return x * 2

def extension(batch: int = 4):
    return nn.Linear(4, 4), torch.randn(batch, 4), lambda y: mean(y) + mean(kernel(y.detach()))

def many(batch: int = 4):
    return nn.Linear(4, 4), torch.randn(batch, 4), lambda y: y

def detached(batch: int = 4):
    return nn.Linear(4, 4), torch.randn(batch, 4), lambda y: mean(y.detach())

def on_cuda(batch: int = 4):
    shift = torch.zeros(4, device=torch.device("cuda", 0)) + torch.tensor(1.0, device="cuda")
    return nn.Linear(4, 4).cuda(), torch.randn(batch, 4).to("cuda"), lambda y: mean(y + shift)

def autocast(batch: int = 4):
    class Inside(nn.Linear):
        def forward(self, x):
            with torch.autocast(x.device.type, torch.bfloat16):
                return super().forward(x)
    return Inside(4, 4), torch.randn(batch, 4), mean

def compiled(batch: int = 4):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return torch.compile(model, backend="eager"), torch.randn(batch, 4), mean

LSTM = nn.LSTM(4, 200, 2, batch_first=True)

def recurrent(batch: int = 4, seq_len: int = 16):
    return LSTM, torch.randn(batch, seq_len, 4), lambda y: mean(y[0])

def sparse(batch: int = 4):
    return nn.Embedding(50, 16, sparse=True), torch.randint(0, 50, (batch, 3)), mean

class Convolved(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*(nn.Conv2d(*layer, bias=False) for layer in layers))

USUAL = (3, 96, 3), (96, 128, 3)
LAYERS = {
    "usual": USUAL,
    "small": ((3, 64, 3), (64, 64, 3)),
    "narrowing": (*USUAL, (128, 64, 3)),
    "narrowing_by_one": (*USUAL, (128, 64, 1)),
    "grouped": (*USUAL, (128, 128, 3, 1, 1, 1, 4)),
    "depthwise": (*USUAL, (128, 128, 3, 1, 1, 1, 128)),
}

def images():
    return torch.randn(2, 3, 16, 16)

def __getattr__(name):
    if name not in LAYERS:
        raise AttributeError(name)
    def convolved(batch: int = 2):
        return Convolved(*LAYERS[name]), images(), mean
    return convolved
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Source]:
    (tmp_path / "own_code.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def of(name: str, batch: int | None = None, size: int | None = None) -> Source:
        return function_source(f"own_code:{name}", batch, size)

    return of


@pytest.mark.parametrize(
    "name", ["usual", "small", "narrowing", "narrowing_by_one", "grouped", "depthwise"]
)
def test_compiled_convolutions_are_laid_out_as_torch_does(
    source: Callable[..., Source], name: str
) -> None:
    step = step_of(capture(source(name))["captured"], "fp32", 2, 0)
    operators = [one for row in step.forward for one in row]
    workload = Workload(batch_per_rank=2, model="resnet50", precision="fp32", compile=True)
    cluster = {"device": "a100-sxm-80gb", "nodes": 1, "gpus_per_node": 1}
    job = {"schema": "ddpsim/1", "workload": {"model": "resnet50", "batch_per_rank": 2}}
    device = load_scenario(job | {"cluster": cluster}).cluster.device
    law = Law.of(workload, device, arithmetic_of("fp32", device), 1.0, operators)
    own_code = sys.modules["own_code"]
    make = partial(own_code.Convolved, *own_code.LAYERS[name])
    assert law.channels_last == is_turned(make, (2, 3, 16, 16))


def test_the_batch_and_the_size_stay_free(source: Callable[..., Source]) -> None:
    """At a batch and a size that were not recorded the step is the recorded one."""
    document = capture(source("sized"))["captured"]
    assert document["batch"] is None
    assert document["size"] | {"min": 8, "max": 32, "multiple_of": 1} == document["size"]
    made = source("sized").make(7, 19)
    for name, precision in (("fp32", "fp32"), ("amp", "amp-bf16"), ("half", "bf16")):
        told = step_of(document, precision, 7, 19)  # type: ignore[arg-type]
        real = record(made.model, made.forward, name)  # type: ignore[arg-type]
        assert [list(row) for row in told.rows] == [*real.forward, *real.backward]
        assert [told.saved_bytes] == real.saved_bytes
        assert list(told.others_bytes) == real.others_bytes


@pytest.mark.parametrize(
    ("name", "batch", "size"),
    [
        ("by_length", None, {"default": 16, "min": 16, "max": 16}),
        ("by_inputs", None, None),
        ("one_batch", 3, None),
    ],
)
def test_what_a_model_does_not_allow_is_fixed(
    source: Callable[..., Source], name: str, batch: int | None, size: dict[str, int] | None
) -> None:
    document = capture(source(name))["captured"]
    assert document["batch"] == (batch and document["batch"] | {"only": batch})
    assert document["size"] == (size and document["size"] | size)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("looks", r"\(own_code.py, line \d+\): .*after module '': .*looks at a tensor's value"),
        ("picks", r"\(own_code.py, line \d+\): .*gives a shape that depends on values"),
        ("missing", "has no function 'missing'"),
        ("to_numpy", r"\(own_code.py, line \d+\): .*numpy.*: a capture has shapes alone"),
        ("address", r"\(own_code.py, line \d+\): .*after module '': data_ptr\(\) asks where"),
        ("extension", r"own::kernel is a kernel without a shape function"),
        ("many", r"the loss of own_code:many has the shape \[4, 4\]: return its mean or sum"),
        ("detached", "the loss of own_code:detached depends on no parameter that is trained"),
    ],
)
def test_what_needs_values_is_told_with_its_place(
    source: Callable[..., Source], name: str, said: str
) -> None:
    with pytest.raises(MeasureError, match=said):
        capture(source(name))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf:bert", r"no module hf here: .*, timm:, transformers:, light"),
        ("models/own.py:make", r"models/own\.py is a file: write its module, models\.own:make$"),
    ],
)
def test_an_unknown_module_is_told_with_what_to_write(name: str, said: str) -> None:
    with pytest.raises(MeasureError, match=said):
        source_of(name, None, None)


def test_what_users_write_is_captured(source: Callable[..., Source]) -> None:
    """Autocast of the tensors' device is CUDA's; torch.compile and sparse gradients do no harm.

    What is put on CUDA needs none.
    """
    assert capture(source("on_cuda"))["captured"]["parameter_count"] == 20
    kinds = {one[0] for one in capture(source("autocast"))["captured"]["operators"]}
    assert "copy" in kinds
    assert capture(source("compiled"))["captured"]["forward_modules"] == ["_orig_mod.0"]
    assert capture(source("sparse"))["parameters"]["sparse"] == [0]


def test_a_recurrent_layer_is_one_operator(source: Callable[..., Source]) -> None:
    """Holds for all steps, also in a model that was made before."""
    document = capture(source("recurrent"))["captured"]
    step = step_of(document, "fp32", 3, 12)
    products = [one for one in step.forward[0] if one.kind in MULTIPLYING]
    assert [one.kind for one in products] == ["product", "recurrence"] * 2
    recurrence = products[1]._replace(bytes_read=0, bytes_written=0)
    flops = 12 * 2 * 3 * 800 * 200
    assert recurrence == Operator("recurrence", 12, 3, 800, 200, 24, 1, flops, item_bytes=4)
    rows = 3 * 12  # of each, what is assumed: four gates and a cell of two layers, a state
    assert step.saved_bytes >= 4 * rows * (2 * 5 * 200 + 200)


def test_a_renamed_model_of_timm_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old name has no configuration, and only some models are made for a size."""

    def create_model(name: str, **options: int) -> nn.Module:
        if options:
            raise TypeError("unexpected keyword argument 'img_size'")
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model.pretrained_cfg = {"input_size": (3, 64, 64)}
        return model

    timm = SimpleNamespace(__version__="1.0", is_model=lambda _: True, create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert source_of("timm:old_name", None, None).default == 64
    assert capture(source_of("timm:old_name", None, 96))["captured"]["size"]["default"] == 96


def test_a_folder_of_a_librarys_name_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "timm", sys)  # so that what is imported is forgotten later
    monkeypatch.delitem(sys.modules, "timm")
    said = f"{tmp_path / 'timm'} is imported in the place of the library timm, and is none"
    with pytest.raises(MeasureError, match=re.escape(said)):
        source_of("timm:resnet18", None, None)


def test_a_scenario_takes_the_file(source: Callable[..., Source], tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    app(["capture", "own_code:sized", "-o", str(path)], standalone_mode=False)
    scenario: dict[str, Any] = {
        "schema": "ddpsim/1",
        "workload": {"model": str(path), "batch_per_rank": 6, "seq_len": 20},
        "cluster": {"nodes": 1, "gpus_per_node": 4, "device": "a100"},
    }
    assert simulate(load_scenario(scenario)).iteration_time_s.mean > 0
    scenario["workload"]["seq_len"] = 64
    with pytest.raises(ScenarioError, match="64 is not possible here; wanted from 8 to 32"):
        simulate(load_scenario(scenario))
    document = json.loads(path.read_text("utf-8"))
    document["captured"]["batch"] = {"only": 4, "because": "so it is"}
    path.write_text(render(document), encoding="utf-8")
    scenario["workload"]["seq_len"] = 20
    with pytest.raises(ScenarioError, match=r"at a batch of 4 alone \(so it is\)"):
        simulate(load_scenario(scenario))


def test_a_model_with_unused_parameters_starts_a_scenario_that_runs(
    source: Callable[..., Source], tmp_path: Path
) -> None:
    """DDP stops without the key; each remedy that the error names works."""
    path = tmp_path / "model.json"
    app(["capture", "own_code:spared", "-o", str(path)], standalone_mode=False)
    text = captured_text(path)
    assert "find_unused_parameters: true}    # 2 parameters without a gradient (first: " in text
    own = tmp_path / "own.yaml"
    own.write_text(text, encoding="utf-8")
    assert simulate(load_scenario(own)).iteration_time_s.mean > 0

    own.write_text(re.sub("(?m)^ddp: .*$", "", text), encoding="utf-8")
    with pytest.raises(ScenarioError) as raised:
        simulate(load_scenario(own))
    for key in ("find_unused_parameters: true", "static_graph: true", "workload.frozen: ["):
        assert key in str(raised.value)
    for remedy in ("ddp.static_graph=true", "workload.frozen=[spare]"):
        assert simulate(load_scenario(own, [remedy])).iteration_time_s.mean > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"schema": "ddpsim.model/1"},
            "its schema is 'ddpsim.model/1'; wanted ddpsim.model/3: make it anew",
        ),
        ({"rows": [[10**9]]}, "rows: 1000000000 is no place among"),
        ({"ready_order": [0, 0]}, "a parameter is ready twice"),
        ({"polynomials": [[1e300]]}, "polynomials.0.0"),
        ({"operators": [["product", 1]]}, "wanted a kind and 10 places"),
        ({"steps": {}}, "steps: "),
        ({"input_bytes": -1}, "input_bytes: "),
        ({"unknown": 1}, "unknown: "),
        (
            {"frozen": {"name": ["a"], "shape": [[1]], "dtype": "float32", "place": [0, 1]}},
            "frozen: place: wanted a rising one of each name",
        ),
        (None, "is no JSON"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(
    change: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    document = zoo_document("vgg16")
    captured = document["captured"]
    if change and change.keys() <= captured.keys():
        change = {"captured": captured | change}
    text = json.dumps(document | (change or {}))
    path.write_text(text if change else text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(ValueError, match=r"^'model\.json': ") as raised:
        read_model_file("model.json", path)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_polynomials_are_exact_or_none() -> None:
    points = [(b, x) for b in (2, 3) for x in (8, 61, 512)] + [(5, 200)]

    def figure(b: int, x: int) -> int:
        return 3 + 2 * x + b * (5 + x // 1 + 7 * x * x)

    found = fit(points, [figure(*point) for point in points])
    assert value_at(found, (11, 999)) == figure(11, 999)
    with pytest.raises(Inexact):
        fit(points, [b * b * x for b, x in points])
