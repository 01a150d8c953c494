"""Options of linear layers: float8 as torchao trains them, and LoRA's adapters beside them."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from ddpsim.scenario.base import Spec, fail


class Float8(Spec):
    """Linear layers whose products are of float8, scaled by what tensors hold (torchao.float8)."""

    recipe: Literal["tensorwise", "rowwise"] = Field(
        "tensorwise", description="one scale a tensor, or one a row; torchao's recipe names"
    )
    skip: tuple[str, ...] = Field(
        (),
        strict=False,
        description="linear layers whose names hold one of these stay as they are, as torchtitan's "
        "filter_fqns; extents that 16 does not divide always do",
    )
    all_gather: bool = Field(
        default=False,
        description="enable_fsdp_float8_all_gather: fully_shard gathers those weights in float8",
    )
    precompute_scales: bool = Field(
        default=False,
        description="precompute_float8_dynamic_scale_for_fsdp after the optimizer: one all-reduce "
        "in place of one a weight and all-gather",
    )

    @model_validator(mode="after")
    def _gathers_by_tensor(self) -> Float8:
        if self.all_gather and self.recipe != "tensorwise":
            raise fail("torchao gathers tensorwise weights alone; drop it", "all_gather")
        if self.precompute_scales and not self.all_gather:
            raise fail("has no effect without all_gather; drop it", "precompute_scales")
        return self


Base = Literal["int8", "nf4"]
BASES: tuple[Base, ...] = get_args(Base)


class Lora(Spec):
    """Adapters of a low rank beside linear layers; all else is frozen (peft.LoraConfig).

    Adapters have the type of the model's weights. Dropout and trained biases are not modelled.
    """

    rank: Annotated[int, Field(ge=1, le=4096)] = Field(16, description="r of LoraConfig")
    modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None,
        strict=False,
        description="target_modules: linear layers whose names end so; default: all but the last "
        "one that is called, as all-linear",
    )
    base: Base | None = Field(
        None,
        description="linear layers are stored in 8 or 4 bits and cast to bfloat16 before each "
        "product, as bitsandbytes does nf4 (QLoRA); default: the type of the weights",
    )
