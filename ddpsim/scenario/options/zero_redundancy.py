"""Options of strategy: zero1, those of torch's ZeroRedundancyOptimizer and of its hooks for DDP."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from ddpsim.scenario.base import Spec, fail

HookName = Literal["hook_with_zero_step", "hook_with_zero_step_interleaved"]
ZERO_HOOKS: tuple[HookName, ...] = get_args(HookName)


class ZeroRedundancy(Spec):
    """Options of strategy: zero1, with torch's names."""

    parameters_as_bucket_view: bool = Field(
        default=False,
        description="the parameters that a rank updates lie in one tensor, and are sent in one "
        "broadcast; false: in one each",
    )
    overlap_with_ddp: bool = Field(
        default=False,
        description="DDP's hook updates the parameters of a bucket and broadcasts them together, "
        "from the third step on (the fourth with static_graph); false: after the backward",
    )
    hook: HookName = Field(
        "hook_with_zero_step",
        description="of overlap_with_ddp: all buckets once the last one is full; interleaved: each "
        "once it is reduced, before the next one is",
    )
    shard_buckets: bool = Field(
        default=False,
        description="of overlap_with_ddp: a bucket is parted among several ranks; false: each is "
        "one rank's, in turn",
    )

    @model_validator(mode="after")
    def _overlaps_or_not(self) -> ZeroRedundancy:
        if self.overlap_with_ddp:
            if self.parameters_as_bucket_view:
                reason = "is ignored by torch with overlap_with_ddp, which has buckets of its own"
                raise fail(f"{reason}; drop one", "parameters_as_bucket_view")
            return self
        for key in ("hook", "shard_buckets"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise fail("is of overlap_with_ddp: true; write that, or drop it", key)
        return self
