"""Strategies that leave a training as it is, and part its model over ranks in different ways."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ddpsim.errors import InputError, ScenarioError
from ddpsim.prediction.fitting import ways_to_fit
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from ddpsim.scenario.options.fully_shard import AS_AUTOCAST
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.set_aside import set_aside

_SECTIONS = ("deepspeed", "fully_shard")  # of options that a scenario of another strategy lacks
_STAGE = "ddp.deepspeed.stage"
_PARAMS = "ddp.deepspeed.params"
_RESHARDS = "ddp.fully_shard.reshard_after_forward"
ALL_REDUCE_EACH = "ddp.fully_shard.all_reduce_last_only=false"
_WORDS = {
    "ddp.gradient_as_bucket_view": "gradient views",
    "ddp.fully_shard.offload_policy": "offloaded",
    "workload.checkpointing": "checkpointing",
    "ddp.accumulation_steps": "micro-batches",
}


def is_sharding(scenario: Scenario) -> bool:
    """Whether a scenario's strategy is DDP or one of `shardings`."""
    ddp, alone = scenario.ddp, scenario.cluster.algorithm == "data_parallel"
    return (ddp.is_ddp or ddp.shards_model or ddp.strategy == "deepspeed") and not alone


def _as_fully_shard(ddp: Ddp) -> dict[str, Any] | None:
    """Units and precision of FSDP1 as those of fully_shard; None where it has none."""
    if ddp.fsdp1 is None:
        return None
    flat = ddp.fsdp1.model_dump(mode="json")
    mixed = flat["mixed_precision"]
    return {"units": flat["units"], "mixed_precision": {k: mixed[k] for k in ("param", "reduce")}}


def strategy_name(settings: Sequence[str]) -> str:
    """A strategy and what sets it apart: `fully_shard, reshard_after_forward=false`, or its stage.

    `settings`: those of `shardings`, or of DDP.
    """
    values = dict(setting.split("=", 1) for setting in settings)
    strategy = values.get("ddp.strategy", "ddp")
    kept = values.get(_RESHARDS, "default")
    if _STAGE in values:
        rounded = f", params={values[_PARAMS]}" if _PARAMS in values else ""
        return f"{strategy}, stage={values[_STAGE]}{rounded}"
    return strategy if kept == "default" else f"{strategy}, reshard_after_forward={kept}"


def own_options(document: Document) -> dict[str, Any]:
    """The sections `deepspeed` and `fully_shard` of a scenario of these strategies, or of FSDP1.

    The section of its strategy is empty, for the defaults, where the scenario has none.
    """
    ddp = parse(document).ddp
    sections = {
        key: document.data["ddp"][key] for key in _SECTIONS if getattr(ddp, key) is not None
    }
    if ddp.is_fully_sharded or ddp.strategy == "deepspeed":
        sections.setdefault("deepspeed" if ddp.strategy == "deepspeed" else "fully_shard", {})
    flat = _as_fully_shard(ddp)
    return sections if flat is None else sections | {"fully_shard": flat}


def shardings(
    scenario: Scenario, options: Mapping[str, Any] | None = None, *, rounds: bool = False
) -> list[tuple[str, ...]]:
    """Settings for zero1, deepspeed (stages 1 and 2), fully_shard (ZeRO-3, ZeRO-2, a copy in each
    node), hsdp, and FSDP1 as it is.

    A scenario's own options of a strategy stay, or those in `options` (see `own_options`). Without
    any, units are gathered in autocast's type, and DeepSpeed overlaps. `rounds`: where compute is
    in bfloat16, DeepSpeed is there a second time, with parameters and gradients in bfloat16.
    """
    ddp, cluster, options = scenario.ddp, scenario.cluster, options or {}
    usual = set_aside(dict(ddp), "fully_shard")
    sharding = options.get("fully_shard", _as_fully_shard(ddp))
    if sharding is not None:
        usual = (*usual, f"ddp.fully_shard={json.dumps(sharding)}")
    elif not (ddp.fully_shard or ddp.is_fully_sharded):
        usual = (*usual, *([AS_AUTOCAST] if scenario.workload.precision == "amp-bf16" else []))
    keeps: list[str] = ["default", "false"]
    has_nodes = cluster.nodes > 1 and cluster.gpus_per_node > 1
    if has_nodes:
        keeps.append(str(cluster.gpus_per_node))
    deepspeed = _deepspeed(scenario, options.get("deepspeed"), rounds=rounds)
    choices = [("ddp.strategy=zero1", *set_aside(dict(ddp), "zero1")), *deepspeed]
    last_only = (sharding or dict(ddp.sharding)).get("all_reduce_last_only")
    among_all = (*usual, ALL_REDUCE_EACH) if last_only else usual
    choices += [_sharded("fully_shard", among_all, kept) for kept in keeps]
    if has_nodes:
        choices += [_sharded("hsdp", usual, kept) for kept in ("default", "false")]
    return [*choices, ("ddp.strategy=fsdp1",)] if ddp.strategy == "fsdp1" else choices


def _deepspeed(
    scenario: Scenario, options: Mapping[str, Any] | None, *, rounds: bool
) -> list[tuple[str, ...]]:
    """Stages 1 and 2 with a scenario's own options, or overlapped; DeepSpeed clips by itself."""
    ddp, workload = scenario.ddp, scenario.workload
    usual = set_aside(dict(ddp), "deepspeed", clips=bool(workload.clip_grad_norm))
    types: list[tuple[str, ...]] = [()]
    if options is not None:
        usual = (*usual, f"ddp.deepspeed={json.dumps(options)}")
    elif not (ddp.deepspeed or ddp.strategy == "deepspeed"):
        usual = (*usual, "ddp.deepspeed.overlap_comm=true")
        if rounds and workload.precision in ("amp-bf16", "bf16"):
            types.append((f"{_PARAMS}=bfloat16",))
    stages = [("ddp.strategy=deepspeed", *usual, f"{_STAGE}={stage}") for stage in (1, 2)]
    return [(*stage, *params) for params in types for stage in stages]


def _sharded(strategy: str, usual: tuple[str, ...], kept: str) -> tuple[str, ...]:
    return (f"ddp.strategy={strategy}", *usual, f"{_RESHARDS}={kept}")


def settings_to_fit(
    document: Document,
    settings: Sequence[str],
    size: tuple[int, int] | None = None,
    parts: Parts | None = None,
) -> tuple[str, ...]:
    """Settings that make a document with `settings` fit into memory; none if it fits or cannot.

    They are micro-batches, checkpointing, offloading or views of buckets. `size`: nodes and GPUs of
    each, in place of the document's. `parts`: see `resolve`.
    """
    try:
        scenario = parse(document.changed(settings))
        if size is not None:
            scenario = scenario.having(cluster=scenario.cluster.resized(*size))
        ways = ways_to_fit(resolve(scenario, parts=parts), same_strategy=True)
    except (InputError, ScenarioError):
        return ()
    return next((way.settings for way in ways if way.why.startswith("fits")), ())


def fit_in_words(settings: Sequence[str]) -> str:
    """`checkpointing, 4 micro-batches`; empty without any."""
    values = dict(setting.split("=", 1) for setting in settings)
    words = [word for key, word in _WORDS.items() if key in values]
    steps = values.get("ddp.accumulation_steps")
    return ", ".join(f"{steps} {word}" if word == "micro-batches" else word for word in words)
