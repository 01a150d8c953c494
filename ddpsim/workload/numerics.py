"""The types of a training's weights and of its compute: what another strategy may change."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.scenario.schema import Scenario
from ddpsim.workload.model import ITEM_BYTES, Model

_HALF = ("amp-fp16", "amp-bf16", "bf16")


def keeps_numerics(first: Scenario, other: Scenario, model: Model) -> bool:
    """Whether two strategies update and compute a model in the same types."""
    return not list(other_numerics((first, model), (other, model)))


def other_numerics(first: tuple[Scenario, Model], other: tuple[Scenario, Model]) -> Iterator[str]:
    """How the second training's types differ from the first's, in words."""
    had, has = has_float32_weights(*first), has_float32_weights(*other)
    if had != has:
        yield "float32 master weights" if has else "no float32 master weights"
    if _compute_type(first[0]) != _compute_type(other[0]):
        yield "another precision"
    if reduces_in_half(*other) and not reduces_in_half(*first):
        yield "gradients are rounded to 16 bits on the wire"


def has_float32_weights(scenario: Scenario, model: Model) -> bool:
    """Whether the optimizer updates float32 weights: parameters, or copies of them."""
    in_full = ITEM_BYTES[model.parameters[0].dtype] >= ITEM_BYTES["float32"]
    return in_full or scenario.ddp.has_own_masters or scenario.workload.optimizer.masters


def reduces_in_half(scenario: Scenario, model: Model) -> bool:
    """Whether gradients are added up over ranks in 16 bits."""
    ddp, dtype = scenario.ddp, model.parameters[0].dtype
    if ddp.shards_model:
        types = (
            ddp.flat.mixed_precision if ddp.strategy == "fsdp1" else ddp.sharding.mixed_precision
        )
        dtype = types.reduce or types.param or dtype
    elif ddp.strategy == "deepspeed":
        dtype = ddp.zero.params or dtype
    elif ddp.shards_optimizer:
        dtype = "bfloat16" if ddp.shards.grad_reduce_in_bf16 else "float32"
    elif ddp.mixed_precision:
        dtype = ddp.mixed_precision.sent
    return ITEM_BYTES[ddp.sent_dtype or dtype] < ITEM_BYTES["float32"]


def _compute_type(scenario: Scenario) -> str:
    """The type of products: by `precision`, or the 16 bits that are gathered."""
    precision = scenario.workload.precision
    return "half" if scenario.ddp.gathers_half and precision not in _HALF else precision
