"""Configs of other programs: each key becomes the scenario's, or is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpsim.errors import ImportFailedError
from ddpsim.importers.configs.programs import PROGRAMS, config_of, config_text, read_config
from ddpsim.prediction.api import load_scenario
from ddpsim.recorded.learned import starting_point
from ddpsim.recorded.recognise import recognise

FOLDER = Path(__file__).parent / "configs"
BF16 = {"param": "bfloat16", "reduce": "bfloat16"}
TOLD: dict[str, dict[str, Any]] = {
    "torchtitan.toml": {
        "workload.model": "llama-8b",
        "workload.batch_per_rank": 2,
        "workload.seq_len": 8192,
        "workload.precision": "amp-bf16",
        "workload.clip_grad_norm": True,
        "workload.compile": "blocks",
        "workload.checkpointing": "selective",
        "workload.float8": {"recipe": "tensorwise", "skip": ["lm_head"], "all_gather": True},
        "workload.optimizer": {"name": "adamw", "fused": True},
        "ddp.strategy": "fully_shard",
        "ddp.fully_shard.mixed_precision": {"param": "bfloat16", "reduce": "float32"},
    },
    "accelerate-fsdp1.yaml": {
        "cluster.nodes": 1,
        "cluster.gpus_per_node": 2,
        "workload.compile": True,
        "workload.precision": "amp-bf16",
        "ddp.strategy": "fsdp1",
        "ddp.fsdp1.sharding_strategy": "SHARD_GRAD_OP",
        "ddp.fsdp1.backward_prefetch": None,
        "ddp.fsdp1.forward_prefetch": True,
        "ddp.fsdp1.use_orig_params": True,
        "ddp.fsdp1.units": {"min_parameters": 100_000_000},
        "ddp.fsdp1.mixed_precision": BF16,
    },
    "accelerate-fsdp2.yaml": {
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 8,
        "workload.precision": "amp-bf16",
        "workload.checkpointing": "full",
        "ddp.strategy": "fully_shard",
        "ddp.fully_shard.reshard_after_forward": True,
        "ddp.fully_shard.mixed_precision": BF16,
    },
    "accelerate-deepspeed.yaml": {
        "cluster.nodes": 1,
        "cluster.gpus_per_node": 8,
        "workload.precision": "bf16",
        "ddp.accumulation_steps": 4,
        "ddp.strategy": "deepspeed",
        "ddp.deepspeed.stage": 2,
        "ddp.deepspeed.params": "bfloat16",
    },
    "trainer.json": {
        "workload.batch_per_rank": 4,
        "workload.precision": "amp-bf16",
        "workload.checkpointing": "full",
        "workload.clip_grad_norm": True,
        "workload.optimizer": {"name": "adamw", "fused": True},
        "ddp.accumulation_steps": 2,
        "ddp.strategy": "fsdp1",
        "ddp.fsdp1.sharding_strategy": "FULL_SHARD",
        "ddp.fsdp1.backward_prefetch": "BACKWARD_PRE",
        "ddp.fsdp1.forward_prefetch": False,
        "ddp.fsdp1.use_orig_params": True,
        "ddp.fsdp1.mixed_precision": BF16,
    },
    "trainer-zero3.json": {
        "workload.batch_per_rank": 1,
        "workload.precision": "amp-bf16",
        "ddp.strategy": "fully_shard",
        "ddp.fully_shard.offload_policy": "CPUOffloadPolicy",
        "ddp.fully_shard.mixed_precision": BF16,
    },
    "deepspeed.json": {
        "workload.batch_per_rank": 8,
        "workload.precision": "bf16",
        "workload.optimizer": {"name": "adamw", "fused": True},
        "ddp.accumulation_steps": 1,
        "ddp.strategy": "deepspeed",
        "ddp.deepspeed.stage": 2,
        "ddp.deepspeed.overlap_comm": True,
        "ddp.deepspeed.reduce_bucket_size": 500_000_000,
        "ddp.deepspeed.params": "bfloat16",
    },
    "lightning.yaml": {
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 4,
        "workload.batch_per_rank": 16,
        "workload.precision": "amp-bf16",
        "workload.clip_grad_norm": True,
        "workload.optimizer": {"name": "adamw"},
        "ddp.accumulation_steps": 2,
        "ddp.strategy": "fsdp1",
        "ddp.fsdp1.sharding_strategy": "SHARD_GRAD_OP",
        "ddp.fsdp1.mixed_precision": BF16,
    },
}
LEFT_OUT = {
    "torchtitan.toml": ("", "new_section.thing"),
    "trainer.json": ("", "some_new_key"),
    "trainer-zero3.json": ("optim: paged_adamw_8bit (8-bit, paged", ""),
    "lightning.yaml": ("", "trainer.strategy.init_args.activation_checkpointing_policy"),
}


@pytest.mark.parametrize("name", sorted(TOLD))
def test_a_config_becomes_a_scenario(name: str) -> None:
    """With a stand-in for what it does not tell, it can be predicted."""
    if name.endswith(".toml"):
        pytest.importorskip("tomllib")
    (learned,) = recognise(FOLDER / name)
    told = {
        f"{section}.{key}": value
        for section, keys in learned.keys.items()
        for key, value in keys.items()
    }
    wanted = {path: value for path, value in TOLD[name].items() if path.count(".") == 1}
    assert {path: told.get(path) for path in wanted} == wanted
    for path, value in TOLD[name].items():
        section, *inside = path.split(".")
        found: Any = learned.keys[section]
        for key in inside:
            found = found.get(key)
        assert found == value, path
    modelled, unknown = LEFT_OUT.get(name, ("", ""))
    notes = [fact for fact in learned.facts if fact.startswith("not ")]
    assert len(notes) == bool(modelled) + bool(unknown)
    assert not modelled or notes[0].startswith(f"not modelled: {modelled}")
    assert not unknown or notes[-1] == f"not known here: {unknown}"
    load_scenario(starting_point([learned]).document)


@pytest.mark.parametrize(
    ("document", "path", "value"),
    [
        (
            {"distributed_type": "MULTI_GPU", "num_processes": 6, "num_machines": 4},
            "cluster.gpus_per_node",
            None,
        ),
        ({"distributed_type": "NO", "num_machines": 0}, "cluster.nodes", None),
        (
            {"trainer": {"strategy": "ddp_find_unused_parameters_true"}},
            "ddp.find_unused_parameters",
            True,
        ),
        (
            {"trainer": {"strategy": "deepspeed_stage_2", "precision": "bf16-mixed"}},
            "workload.precision",
            "bf16",
        ),
        (
            {"per_device_train_batch_size": 2, "fsdp": ["shard_grad_op"]},
            "ddp.fsdp1.sharding_strategy",
            "SHARD_GRAD_OP",
        ),
        ({"per_device_train_batch_size": 2, "tf32": True}, "workload.precision", "tf32"),
        ({"model": {"flavor": "70B", "name": "llama3"}}, "workload.model", "llama-70b"),
        (
            {
                "model": {"flavor": "8B"},
                "parallelism": {
                    "data_parallel_replicate_degree": 4,
                    "data_parallel_shard_degree": 8,
                },
            },
            "ddp.strategy",
            "hsdp",
        ),
        (
            {"model": {"flavor": "8B"}, "training": {"data_parallel_shard_degree": 1}},
            "ddp.strategy",
            "ddp",
        ),
        (
            {
                "model": {"flavor": "8B"},
                "activation_checkpoint": {"mode": "selective", "selective_ac_option": "3"},
            },
            "workload.checkpointing",
            {"every": 3},
        ),
        (
            {
                "model": {"flavor": "8B"},
                "activation_checkpoint": {"mode": "memory_budget", "memory_budget": 0.3},
            },
            "workload.checkpointing",
            {"memory_budget": 0.3},
        ),
        ({"zero_optimization": {"stage": 0}}, "ddp.strategy", "ddp"),
        (
            {"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD"}},
            "workload.optimizer",
            {"name": "sgd"},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
            "ddp.fully_shard.reshard_after_forward",
            True,
        ),
        (
            {"trainer": {"devices": 2}, "optimizer": {"class_path": "torch.optim.Muon"}},
            "workload.optimizer",
            {"name": "muon"},
        ),
        (
            {"trainer": {"devices": 2}, "optimizer": {"class_path": "transformers.Adafactor"}},
            "workload.optimizer",
            None,
        ),
    ],
)
def test_keys_mean_what_their_program_does(document: Any, path: str, value: Any) -> None:
    config = config_of("x", document)
    assert config is not None
    assert config.settings.get(path) == value


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
            "fp16.enabled: true (bf16 is, and fp32)",
        ),
        (
            {"parallelism": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 8}},
            "tensor_parallel_degree: 8 (cluster.replica",
        ),
        ({"trainer": {"devices": [0, 1]}}, "trainer.devices: [0, 1], no number"),
        ({"trainer": {"devices": -1}}, "trainer.devices: -1"),
        ({"trainer": {"strategy": "colossalai"}}, "trainer.strategy: colossalai"),
        ({"distributed_type": "NO", "num_processes": -16}, "num_processes: -16, no number from 1"),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": "maybe"}},
            "fsdp_config.fsdp_reshard_after_forward: maybe",
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 3}},
            "fsdp_config.fsdp_version: 3",
        ),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type: MEGATRON_LM"),
        ({"per_device_train_batch_size": "big"}, "per_device_train_batch_size: big, no number"),
        (
            {"model": {"flavor": "8B", "converters": ["mx"]}},
            "model.converters: ['mx'] (float8 alone)",
        ),
    ],
)
def test_what_is_not_modelled_is_named(document: Any, message: str) -> None:
    config = config_of("x", document)
    assert config is not None
    assert any(message in each for each in config.not_modelled)


@given(
    st.sampled_from(PROGRAMS),
    st.dictionaries(
        st.text(st.characters(codec="ascii", categories=("L",)), min_size=9, max_size=12),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=2),
        max_size=3,
    ),
)
def test_a_key_is_read_or_named(program: Any, more: dict[str, Any]) -> None:
    """Whatever a value is, nothing else is raised."""
    odd = dict(zip(program.marks, more.values(), strict=False))
    config = read_config(program, more | odd)
    assert set(config.unknown) == {
        key for key in more if key not in program.table and key not in odd
    }


def test_what_cannot_be_read_is_one_error() -> None:
    for text, message in (
        ("distributed_type: [", "looks like a config, but is no YAML: "),
        (
            "distributed_type: FSDP\nmixed_precision: bf16\n  num_machines: 2\n",
            "x:3: looks like a config, but is no YAML: mapping values are not allowed here; look",
        ),
        ("[training]\nsteps = \n", "looks like a config, but is no TOML: "),
        ("trainer: &a\n  b: *a\n", "has more than 5000 keys"),
    ):
        if "[training]" in text:
            pytest.importorskip("tomllib")
        with pytest.raises(ImportFailedError, match=message):
            config_text("x", text)
    assert config_text("x", "iter 0: loss 10.9, time 990ms\n") is None
    assert config_of("x", json.loads('{"a": 1}')) is None
