"""Options of fine-tuning: LoRA's adapters beside layers that are frozen."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from ddpsim.scenario.base import Spec

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
