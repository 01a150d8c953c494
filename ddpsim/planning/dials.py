"""What the slider of a page changes, by strategy: the sizes of buckets, or what is kept."""

from __future__ import annotations

from ddpsim.result.storyboard import Dial
from ddpsim.scenario.options.ddp_values import BucketCaps
from ddpsim.scenario.options.fsdp1 import HYBRID
from ddpsim.scenario.schema import Scenario

_CAPS: tuple[BucketCaps, ...] = (None, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0)
_CAP = Dial(
    "ddp.bucket_cap_mb",
    "Bucket size",
    "buckets of another size",
    "Buckets",
    unit="MiB",
    usual="the default (1, then 25 MiB)",
)
_RESHARD = Dial(
    "ddp.fully_shard.reshard_after_forward",
    "Resharding",
    "parameters kept after the forward, or freed",
    "Reductions of gradients",
    "Resharding",
)
_FLAT = Dial(
    "ddp.fsdp1.sharding_strategy",
    "Sharding strategy",
    "another sharding strategy",
    "Reductions of gradients",
    "Sharding strategy",
)
_MEGATRON = Dial(
    "ddp.distributed_optimizer.bucket_size",
    "Bucket size",
    "buckets of another size",
    "Reduce-scatters of gradients",
    unit="elements",
)
_OVERLAP = Dial(
    "ddp.distributed_optimizer.overlap_grad_reduce",
    "Overlap",
    "gradients reduced under the backward",
    "Reduce-scatters of gradients",
    "Overlap",
)
_DEEPSPEED = Dial(
    "ddp.deepspeed.reduce_bucket_size",
    "Bucket size",
    "buckets of another size",
    "Reductions of gradients",
    unit="elements",
)
_STRATEGY = Dial(
    "ddp.strategy", "Strategy", "another strategy", "Reductions of gradients", "Strategies"
)
_LADDER = ("naive", "naive_flat", "per_parameter", "ddp")  # each does one thing better
_ELEMENTS = (10_000_000, 40_000_000, 100_000_000, 200_000_000, 500_000_000)


def strategies(scenario: Scenario) -> tuple[Dial, str, list[str]]:
    """The dial of a strategy that has none: itself, and then the ladder up to DDP."""
    current = scenario.ddp.strategy
    return _STRATEGY, current, list(dict.fromkeys((current, *_LADDER)))


def dialled(scenario: Scenario) -> tuple[Dial, str, list[str]] | None:
    """A dial, the scenario's own value, and all that it offers; None: the strategy has none."""
    ddp = scenario.ddp
    if ddp.is_ddp:
        caps = ddp.bucket_cap_mb
        return _CAP, _as_setting(caps), [_as_setting(cap) for cap in _caps(caps)]
    if ddp.shards_model:
        return _resharding(scenario)
    if ddp.strategy == "deepspeed":
        elements = ddp.zero.reduce_bucket_size
        return _DEEPSPEED, str(elements), [str(each) for each in sorted({*_ELEMENTS, elements})]
    if not ddp.shards_optimizer:
        return None
    if not ddp.shards.overlap_grad_reduce:
        return _OVERLAP, "false", ["false", "true"]
    size = ddp.shards.bucket_size
    sizes = sorted({*_ELEMENTS, size} if size else _ELEMENTS)
    return _MEGATRON, str(size) if size else "null", ["null", *map(str, sizes)]


def _resharding(scenario: Scenario) -> tuple[Dial, str, list[str]]:
    if scenario.ddp.strategy == "fsdp1":
        has_nodes = scenario.cluster.nodes > 1 and scenario.cluster.gpus_per_node > 1
        in_nodes: tuple[str, ...] = HYBRID if has_nodes else ()
        usual = ["FULL_SHARD", "SHARD_GRAD_OP", *in_nodes, "NO_SHARD"]
        return _FLAT, scenario.ddp.flat.sharding_strategy, usual
    kept = scenario.ddp.sharding.reshard_after_forward
    current = "default" if kept is None else str(kept).lower()
    gpus, share = scenario.cluster.gpus_per_node, scenario.sharding_ranks
    usual = ["default", *([str(gpus)] if 1 < gpus < share else []), "false"]
    return _RESHARD, current, usual if current in usual else [*usual[:-1], current, usual[-1]]


def _caps(stated: BucketCaps) -> list[BucketCaps]:
    """The usual caps and the scenario's own: the default, lists, then by size."""
    caps = _CAPS if stated in _CAPS else (*_CAPS, stated)
    numbers = sorted(cap for cap in caps if isinstance(cap, float))
    return [None, *(cap for cap in caps if isinstance(cap, tuple)), *numbers]


def _as_setting(cap: BucketCaps) -> str:
    """A cap as `--set` takes it."""
    if cap is None:
        return "default"
    if isinstance(cap, tuple):
        return f"[{','.join(f'{part:.15g}' for part in cap)}]"
    return f"{cap:.15g}"
