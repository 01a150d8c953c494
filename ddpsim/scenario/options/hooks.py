"""Options of communication hooks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddpsim.scenario.base import Spec, fail

__all__ = ["PowerSgd"]


class PowerSgd(Spec):
    """PowerSGD: gradients as products of narrow matrices. Keys are torch's PowerSGDState's."""

    matrix_approximation_rank: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="columns of the matrices; more than 2 need a wrapper"
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
    def _is_orthogonalised_by_gram_schmidt(self) -> PowerSgd:
        """Torch takes a QR for float32 and more than two columns (powerSGD_hook.py, 31)."""
        if self.matrix_approximation_rank > 2 and self.wrapper is None:
            raise fail(
                f"{self.matrix_approximation_rank} columns of float32 need a QR, which is not "
                "priced; write at most 2, or a wrapper",
                "matrix_approximation_rank",
            )
        return self
