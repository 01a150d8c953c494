"""Options of activation checkpointing: which blocks run again, and what of them is kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ddpsim.scenario.base import Spec, fail, word_or_modules

Kept = Literal[
    "attention", "product", "alternate_product", "convolution", "normalization", "softmax"
]


class Checkpointing(Spec):
    """Blocks that run again in the backward (torch.utils.checkpoint, use_reentrant=False)."""

    blocks: tuple[str, ...] | None = Field(
        None, strict=False, description="their names; default: all"
    )
    every: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None,
        description="every so many blocks: 2 is the second, the fourth, ...; torchtitan's "
        "selective_ac_option",
    )
    keep: tuple[Kept, ...] = Field(
        (),
        strict=False,
        description="operators whose outputs stay, as by create_selective_checkpoint_contexts; "
        "alternate_product is a block's first, third, ... matrix product",
    )

    memory_budget: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="torch.compile's activation_memory_budget: the part that stays of what the "
        "compiled model would keep for the backward",
    )

    @model_validator(mode="after")
    def _one_choice(self) -> Checkpointing:
        if self.blocks is not None and self.every:
            raise fail("blocks and every both choose blocks; drop one of them", "every")
        if self.memory_budget is not None and (self.blocks is not None or self.every or self.keep):
            raise fail("lets the compiler choose; drop the other options", "memory_budget")
        if {"product", "alternate_product"} <= {*self.keep}:
            raise fail("holds product, which every alternate_product is; drop one", "keep")
        return self


# torchtitan's policy for each operator (torchtitan/distributed/activation_checkpoint.py)
WORDS = {
    "none": None,
    "full": Checkpointing(),
    "selective": Checkpointing(keep=("attention", "alternate_product")),
}


def _checkpointing(value: Any) -> Any:
    """A word, names of blocks, or the options; nothing for an empty list."""
    if value is None or isinstance(value, (Checkpointing, dict)):
        return value
    chosen = word_or_modules(value, tuple(WORDS), "blocks")
    return WORDS[chosen] if isinstance(chosen, str) else ({"blocks": chosen} if chosen else None)


CheckpointingField = Annotated[
    Checkpointing | None,
    BeforeValidator(
        _checkpointing,
        json_schema_input_type=Literal["none", "full", "selective"]
        | tuple[str, ...]
        | Checkpointing
        | None,
    ),
]
