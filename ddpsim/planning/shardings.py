"""Strategies that leave a training as it is, and part its model over ranks in different ways."""

from __future__ import annotations

from ddpsim.planning.compare import without_ddp_options
from ddpsim.scenario.schema import Scenario

__all__ = ["AS_DDP", "is_sharding", "shardings"]

AS_DDP = ("ddp.strategy=ddp", "ddp.fully_shard=null")
_AS_AUTOCAST = "ddp.fully_shard.mixed_precision={param: bfloat16, reduce: float32}"


def is_sharding(scenario: Scenario) -> bool:
    """Whether a scenario's strategy is DDP or one of `shardings`."""
    ddp, alone = scenario.ddp, scenario.cluster.algorithm == "data_parallel"
    return (ddp.is_ddp or ddp.is_fully_sharded) and not alone


def shardings(scenario: Scenario) -> list[tuple[str, ...]]:
    """Settings for zero1, fully_shard (ZeRO-3, ZeRO-2, a copy in each node) and hsdp.

    A scenario's own units and precision stay; without any, what autocast computes in is gathered.
    """
    ddp, cluster = scenario.ddp, scenario.cluster
    usual = without_ddp_options(ddp)
    if ddp.fully_shard is None and scenario.workload.precision == "amp-bf16":
        usual = (*usual, _AS_AUTOCAST)
    drops = () if ddp.fully_shard is None else ("ddp.fully_shard=null",)
    keeps: list[str] = ["true", "false"]
    has_nodes = cluster.nodes > 1 and cluster.gpus_per_node > 1
    if has_nodes:
        keeps.append(str(cluster.gpus_per_node))
    found = [("ddp.strategy=zero1", *drops)]
    found += [_sharded("fully_shard", usual, kept) for kept in keeps]
    if has_nodes:
        found += [_sharded("hsdp", usual, kept) for kept in ("true", "false")]
    return found


def _sharded(strategy: str, usual: tuple[str, ...], kept: str) -> tuple[str, ...]:
    reshards = f"ddp.fully_shard.reshard_after_forward={kept}"
    return (f"ddp.strategy={strategy}", *usual, reshards)
