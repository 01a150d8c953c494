"""Options of communication hooks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddpsim.scenario.base import Spec, fail


class DdpMixedPrecision(Spec):
    """DDP's own mixed precision, a hook too; keys are those of torch's _MixedPrecision."""

    param: Literal["bfloat16", "float16"] = Field(
        description="param_dtype: of the copies of the parameters that forward and backward use"
    )
    reduce: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="reduce_dtype: of reduced gradients; omitted: as param"
    )
    buffer: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="buffer_dtype: to which all buffers are cast; omitted: they stay"
    )

    @property
    def sent(self) -> Literal["float32", "bfloat16", "float16"]:
        """The type of reduced gradients."""
        return self.reduce or self.param


class PowerSgd(Spec):
    """PowerSGD: gradients as products of narrow matrices. Keys are torch's PowerSGDState's."""

    matrix_approximation_rank: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="columns of the matrices"
    )
    batched: bool = Field(
        default=False,
        description="torch's batched_powerSGD_hook: each bucket is one square matrix",
    )
    wrapper: Literal["fp16_compress", "bf16_compress"] | None = Field(
        None, description="torch's fp16_compress_wrapper or bf16_compress_wrapper around the hook"
    )
    start_powerSGD_iter: Annotated[int, Field(ge=2, le=1000)] = Field(  # noqa: N815 -- torch's name
        2, description="backwards before, of plain all-reduces; torch's default is 1000"
    )
    min_compression_rate: Annotated[float, Field(gt=0, le=1000)] = Field(
        2.0, description="a parameter that would shrink by less is reduced as it is"
    )

    @model_validator(mode="after")
    def _weighs_no_bucket(self) -> PowerSgd:
        if self.batched and self.min_compression_rate != 2:
            raise fail(
                "the batched hook compresses every bucket; drop one of them",
                "min_compression_rate",
            )
        return self


class TopK(Spec):
    """Top-k sparsification: of each bucket only the largest elements are sent, by all ranks."""

    fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.01, description="of a bucket's elements that are sent, as values and int64 indices"
    )
    error_feedback: bool = Field(
        default=True, description="what is not sent is added to the next gradients"
    )
