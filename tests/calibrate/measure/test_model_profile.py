"""A model's profile: gradients, buffers, compiled models, and other devices."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

import torch
from measure_helpers import Pair
from measured.measuring import profiled
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from calibrate.cli import app
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.profile import ready_times, scale_ends, scale_profile, write_profile
from calibrate.measure.model.samples import Samples
from calibrate.measure.model.training import (
    Training,
    _moved,
    broadcast_buffers,
    prepare,
    reduced_parameters,
)
from calibrate.measure.ranks.job import process_group
from ddpsim import load_scenario, simulate
from ddpsim.errors import ImportFailedError
from ddpsim.importers.profiles.model import read_profile
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.quantity import SourceFile
from ddpsim.workload.model import Model, total_s


def test_a_profile_becomes_a_simulation(tmp_path: Path) -> None:
    document = profiled("two_layers")
    path = tmp_path / "profile.json"
    write_profile(document, path)
    read = read_profile(SourceFile("profile.json", path))
    assert [(p.name, p.numel) for p in read.parameters] == [
        ("0.weight", 8192), ("0.bias", 128), ("2.weight", 1280), ("2.bias", 10),
    ]  # fmt: skip
    assert read.batch_per_rank == 16
    measured = document["measured"]
    assert read.later_forward_s == measured["later_forward_s"] > 0
    assert read.later_backward_s == measured["later_backward_s"] > 0
    by_time = sorted(read.parameters, key=lambda p: p.ready_s or 0)
    assert [p.name for p in by_time] == ["2.bias", "2.weight", "0.bias", "0.weight"]
    scenario = {
        "schema": "ddpsim/1",
        "workload": {"profile": str(path), "batch_per_rank": 16},
        "ddp": {"backend": "gloo", "torch": "2.13"},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "cpu-core"},
    }
    result = simulate(load_scenario(scenario))
    assert result.iteration_time_s.mean > measured["forward_s"] + measured["backward_s"]


def test_a_model_made_again_is_alike_and_its_loss_its_own() -> None:
    made = prepare("measure_helpers:uncopyable", 4, torch.device("cpu"), "adamw", fused=False)
    again = made.again()
    assert again.optimizer is not made.optimizer
    assert again.optimizer.defaults["lr"] == made.optimizer.defaults["lr"]
    for (name, mine), (same, other) in zip(
        made.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert name == same
        assert mine is not other
        assert torch.equal(mine, other)
    assert torch.equal(again.forward(), made.forward())
    again.forward().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert all(parameter.grad is not None for parameter in again.model.parameters())


class Nested(torch.nn.Module):
    """A parameter and a buffer of its own and of a part, and a weight under two names."""

    def __init__(self, ignored: Collection[str]) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mine", torch.ones(4))
        self.norm, self.first, self.second = (
            torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 5),
        )  # fmt: skip
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        set_ignored = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        set_ignored(self, ignored)


@pytest.mark.parametrize(
    "ignored",
    [
        (),
        ("own", "mine"),
        (".own", ".mine"),
        ("first.weight", "norm.running_mean"),
        ("second.weight", "norm.weight", "norm"),
        ("first.weight", "second.weight", "norm.num_batches_tracked"),
    ],
)
def test_what_is_reduced_and_broadcast_is_what_ddp_says(ignored: tuple[str, ...]) -> None:
    model = Nested(ignored)
    with process_group("gloo"):
        ddp = DistributedDataParallel(model)
        wanted, _ = ddp._build_params_for_reducer()
    reduced, named = reduced_parameters(model), dict(model.named_parameters(remove_duplicate=False))
    assert list(map(id, reduced.values())) == list(map(id, wanted))
    assert all(named[name] is parameter for name, parameter in reduced.items())
    assert list(map(id, broadcast_buffers(model))) == list(map(id, ddp.modules_buffers))


def test_tensors_are_moved_in_whatever_holds_them() -> None:
    @dataclass(frozen=True)
    class Sample:
        image: Tensor
        label: str = "cat"

    x, meta = torch.ones(2), torch.device("meta")
    packed = torch.nn.utils.rnn.pack_sequence([x])
    inputs = (Pair(x, [x, 1]), Sample(x), {"a": (x, None)}, MappingProxyType({"b": x}), packed)
    pair, sample, nested, mapping, sequence = _moved(inputs, meta)
    moved = (pair.first, pair.second[0], sample.image, nested["a"][0], mapping["b"], sequence.data)
    assert {tensor.device for tensor in moved} == {meta}
    assert isinstance(pair, Pair)
    assert (pair.second[1], sample.label, nested["a"][1]) == (1, "cat", None)
    assert inputs[1].image.device.type == "cpu"


def test_where_two_micro_batches_do_not_fit_only_one_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory runs out in a forward beside gradients: the second of a step."""
    forward = Training.forward

    def out_of_memory_beside_gradients(training: Training) -> torch.Tensor:
        if any(parameter.grad is not None for parameter in training.model.parameters()):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(training)

    monkeypatch.setattr(Training, "forward", out_of_memory_beside_gradients)
    measured = profiled("two_layers")["measured"]
    assert measured["backward_s"] > 0
    assert not {"later_forward_s", "later_backward_s"} & set(measured)


def test_a_profile_says_what_is_never_ready_sparse_or_a_buffer() -> None:
    document = profiled("branched", batch=8, optimizer="sgd")
    measured, names = document["measured"], document["parameters"]["name"]
    idle = [n for n, ready_s in zip(names, measured["ready_s"], strict=True) if ready_s is None]
    assert idle == measured["never_ready"] == ["idle.weight", "idle.bias"]
    assert [names[place] for place in document["parameters"]["sparse"]] == ["embed.weight"]
    assert "frozen.weight" not in names
    assert document["buffers"]["dtype"] == ["float32", "float32", "int64"]
    assert document["buffers"]["shape"] == [[32], [32], []]
    assert measured["source"].startswith("measure_helpers:branched with batch 8 on cpu, 1 thread")
    assert "each, taken off the ready times" in measured["source"]


@pytest.mark.parametrize("name", ["compiled", "compiled_in_place"])
def test_a_compiled_models_ready_times_are_those_without(name: str) -> None:
    """Of equal layers the last one's gradient comes early, where a compiled graph's all come last.

    Loads on the machine may halve or double a share of the backward.
    """
    document = profiled(name)
    measured = document["measured"]
    names = [name.removeprefix("_orig_mod.") for name in document["parameters"]["name"]]
    ready = dict(zip(names, measured["ready_s"], strict=True))
    assert measured["compiled"] is True
    assert "which are those of the uncompiled model, in proportion" in measured["source"]
    assert ready["3.weight"] < 0.6 * measured["backward_s"]
    assert ready["3.weight"] < ready["2.weight"] < ready["1.weight"] < ready["0.weight"]
    assert "compiled" not in profiled("of_equal_layers")["measured"]


def test_a_profile_holds_what_run_reads(tmp_path: Path) -> None:
    document = profiled("of_buffers")
    assert document["parameters"]["name"] == ["linear.weight", "linear.bias"]
    assert document["buffers"]["dtype"] == ["complex64", "float8_e4m3fn", "uint16"]
    path = tmp_path / "profile.json"
    write_profile(document, path)
    written = path.read_text(encoding="utf-8")
    document["buffers"]["dtype"][0] = "complex32"
    with pytest.raises(ImportFailedError, match="'complex32' is no dtype of a buffer; wanted one"):
        write_profile(document, path)
    assert path.read_text(encoding="utf-8") == written


def test_a_ready_time_is_a_part_of_its_own_backward() -> None:
    """Of the second gradient, which the second of three iterations lacks."""
    samples = Samples(
        hooked_backward_s=[1.0, 7.0, 2.0],
        ready_s={"a": [(0.25, 1.0), (3.5, 7.0), (0.5, 2.0)], "b": [(0.5, 1.0), (1.0, 2.0)]},
        order=["a", "b"],
    )
    assert ready_times(samples, 0.0, 4.0) == pytest.approx({"a": 1.0, "b": 2.0})


def test_a_scaled_profile_says_that_it_is_an_estimate() -> None:
    times = {"forward_s": 1.0, "backward_s": 2.0, "optimizer_s": 3.0}
    known = {"source": "m:f", "ready_s": [1.0, None], **times}

    def scaled(old: str, new: str, **more: object) -> dict[str, Any]:
        measured: dict[str, Any] = scale_profile({"measured": known | more}, old, new)["measured"]
        return measured

    same = scaled("cpu-core", "cpu-core")
    assert same["source"] == (
        "ESTIMATE, not measured: m:f; scaled from cpu-core to cpu-core, forward and backward x 1 "
        "(by memory it would be 1), optimizer x 1"
    )
    assert {key: same[key] for key in times} == times
    faster = scaled("a100-sxm-80gb", "h100-sxm-80gb", later_forward_s=1.0, later_backward_s=2.0)
    assert faster["backward_s"] < 2.0
    assert faster["ready_s"] == [faster["forward_s"], None]
    assert faster["later_forward_s"] == faster["forward_s"]
    assert faster["later_backward_s"] == faster["backward_s"]
    with pytest.raises(MeasureError, match="unknown device 'h1000'"):
        scale_ends("h1000:a100")
    with pytest.raises(MeasureError, match=r"--scale 'h100': wanted FROM:TO"):
        scale_ends("h100")
    assert scale_ends("NVIDIA H100 80GB HBM3:t4") == ("h100-sxm-80gb", "t4")
    with pytest.raises(MeasureError, match=r"is from h100-sxm-80gb, but this is measured on Tesla"):
        scaled("h100-sxm-80gb", "t4", device="Tesla T4")


def test_a_captured_model_is_measured_later(tmp_path: Path) -> None:
    """One file holds both; its measurement is taken where it is of the step that is asked for."""
    path, bare = tmp_path / "model.json", tmp_path / "bare.json"
    app(["capture", "measure_helpers:two_layers", "-o", str(path)], standalone_mode=False)
    document = profiled("two_layers")
    write_profile(document, path)
    write_profile(document, bare)
    measured = document["measured"]
    step_s = sum(measured[key] for key in ("forward_s", "backward_s", "optimizer_s"))

    def model(file: Path, **workload: Any) -> Model:
        scenario = {
            "schema": "ddpsim/1",
            "workload": {"model": str(file), "batch_per_rank": 16} | workload,
            "ddp": {"backend": "gloo", "torch": "2.13"},
            "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "cpu-core"},
        }
        return resolve(load_scenario(scenario)).model

    ticks_s = 1e-8  # which keep the order of gradients whose medians fall on one instant
    for known in (model(path), model(bare)):
        known_s = total_s((*known.forward, *known.backward, known.optimizer))
        assert known_s == pytest.approx(step_s, abs=ticks_s)
        assert known.basis == "measured"
        assert [p.ddp_hook_s for p in known.parameters] == measured["ddp_hook_s"]
    assert model(path).forward_modules == ("0", "2")
    for other, said in (
        ({"batch_per_rank": 8}, "of batch 16"),
        ({"compile": True}, "without torch.compile"),
        ({"frozen": ["0"]}, "without workload.frozen"),
        ({"lora": 2}, "without workload.lora"),
    ):
        estimated = model(path, **other)
        assert estimated.basis == "roofline"
        assert f"its measured part is of a step {said}" in " ".join(estimated.warnings)
    with pytest.raises(MeasureError, match="of other parameters, and would lose what was captured"):
        write_profile(profiled("of_buffers"), path)
    app(["capture", "measure_helpers:two_layers", "-o", str(bare)], standalone_mode=False)
    assert bare.read_text() == path.read_text()
