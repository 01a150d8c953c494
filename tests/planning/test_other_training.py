"""A change that is another training says which, and is not the best of a comparison."""

from __future__ import annotations

from typing import Any

import pytest

from ddpsim.planning.compare import compare, each_flag, option
from ddpsim.planning.other_training import other_training
from ddpsim.scenario.document import Document, load
from ddpsim.scenario.load import parse
from ddpsim.scenario.workload import Optimizer, Workload

LANGUAGE: dict[str, Any] = {
    "schema": "ddpsim/1",
    "workload": {
        "model": "llama-1b",
        "batch_per_rank": 4,
        "precision": "bf16",
        "optimizer": {"name": "adamw"},
        "dataset": {"samples": 1000},
    },
    "cluster": {"machine": "dgx-h100", "nodes": 1},
    "run": {"iterations": 1},
}
VISION = LANGUAGE | {"workload": {"model": "resnet50", "batch_per_rank": 4}}

# settings of the first, settings of the other, and what is another training
OTHERS = [
    (["workload.seq_len=512"], "seq_len 512 in place of 2,048"),
    (["workload.frozen=[model.embed_tokens]"], "other frozen modules"),
    (["workload.lora=8"], "LoRA"),
    (["workload.float8=rowwise"], "float8 layers"),
    (["workload.optimizer=sgd"], "another optimizer"),
    (["workload.optimizer.weight_decay=0.1"], "another rule of the optimizer"),
    (["workload.optimizer.state_bits=8"], "another rule of the optimizer"),
    (["workload.optimizer.masters=true"], "float32 master weights"),
    (["workload.precision=amp-bf16"], "another precision"),
    (["workload.model=llama-3b"], "another model"),
    (["workload.batch_per_rank=2"], "another batch"),
    (["workload.dataset.samples=2000"], "another dataset"),
    (["workload.clip_grad_norm=true"], "gradients are clipped"),
    (["ddp.accumulation_steps=2"], "another global batch"),
    (["ddp.comm_hook=top_k"], "another comm_hook"),
    (["ddp.comm_hook=post_localSGD", "ddp.post_local_sgd.period=4"], "another comm_hook"),
    (["ddp.strategy=local_sgd", "ddp.local_sgd.every=4"], "another training"),
    (["cluster.nodes=2"], "other GPUs"),
]
OF_PIXELS = [
    (["workload.image_size=192"], "image_size 192 in place of 224"),
    (["workload.sync_batch_norm=true"], "statistics of all ranks"),
]
ALIKE = [
    ["workload.seq_len=2048"],
    ["workload.compile=blocks"],
    ["workload.checkpointing=full"],
    ["workload.attention=eager"],
    ["workload.optimizer.fused=true"],
    ["workload.set_to_none=false"],
    ["workload.clip_grad_norm={error_if_nonfinite: true}", "workload.clip_grad_norm=null"],
    ["ddp.bucket_cap_mb=100"],
    ["ddp.gradient_as_bucket_view=true"],
    ["ddp.strategy=fully_shard"],
    ["ddp.comm_hook=allreduce"],
]


def notes(base: Document, *settings: str) -> str:
    (change,) = compare(parse(base), [option(base, *settings, title="other")]).changes
    assert not change.problem
    return change.note


@pytest.mark.parametrize(("settings", "note"), OTHERS)
def test_another_training_is_named(settings: list[str], note: str) -> None:
    base = load(LANGUAGE)
    assert note in notes(base, *settings).split(", ")


@pytest.mark.parametrize(("settings", "note"), OF_PIXELS)
def test_another_training_on_images_is_named(settings: list[str], note: str) -> None:
    assert notes(load(VISION), *settings) == note


@pytest.mark.parametrize("settings", ALIKE)
def test_what_changes_time_alone_is_not(settings: list[str]) -> None:
    first, other = parse(load(LANGUAGE)), parse(load(LANGUAGE).changed(settings))
    assert list(other_training(first, other)) == []


def test_adapters_and_float8_have_other_options() -> None:
    def between(first: str, other: str) -> list[str]:
        base = load(LANGUAGE)
        return [*other_training(*(parse(base.changed([each])) for each in (first, other)))]

    assert between("workload.lora=8", "workload.lora=16") == ["other adapters of LoRA"]
    assert between("workload.lora={base: nf4}", "workload.lora={base: null}") == [
        "the base is not rounded"
    ]
    assert between("workload.lora=8", "workload.lora=null") == ["all parameters in place of LoRA's"]
    assert between("workload.float8=rowwise", "workload.float8=tensorwise") == [
        "other float8 layers"
    ]


# of each key that changes time, memory or what the answer says besides
OF_TIME = {
    *("ready_origin", "compile", "memory_format", "attention", "checkpointing", "set_to_none"),
    *("read_loss_every", "barrier_every", "debug", "input_copy", "data", "evaluation"),
    *("checkpoint_write", "learning_rate"),
}
OF_TRAINING = {
    *("model", "profile", "trace", "parameters", "batch_per_rank", "seq_len", "image_size"),
    *("precision", "float8", "frozen", "lora", "step_time", "optimizer", "sync_batch_norm"),
    *("grad_scaler", "clip_grad_norm", "dataset"),
}


def test_every_key_of_the_workload_is_one_or_the_other() -> None:
    """A new key says here whether it is another training."""
    assert not OF_TIME & OF_TRAINING
    assert set(Workload.model_fields) == OF_TIME | OF_TRAINING
    of_rule = {"name", "momentum", "weight_decay", "state_bits", "ns_steps", "adamw"}
    assert set(Optimizer.model_fields) == {"fused", "masters"} | of_rule


@pytest.mark.parametrize("setting", ["workload.seq_len=128", "workload.lora=8"])
def test_another_training_is_never_the_best(setting: str) -> None:
    base = load(LANGUAGE)
    compared = compare(parse(base), [option(base, setting, title="b.yaml")])
    assert compared.changes[0].change_s < 0
    assert compared.best is None


def test_a_flag_that_is_another_training_says_so_once() -> None:
    base = load(LANGUAGE).changed(["workload.lora={base: nf4}", "ddp.accumulation_steps=2"])
    found = {each.title: each.note for each in compare(parse(base), each_flag(base)).changes}
    assert found["workload.lora=null"] == "all parameters in place of LoRA's"
    assert found["workload.lora.base=int8"] == "the base is rounded"
    assert found["ddp.accumulation_steps=4"] == "another global batch"
