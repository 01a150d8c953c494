"""Models as torch's own code showed them to an oracle."""

from __future__ import annotations

from typing import Any

from ddpsim.workload.model import Model, Parameter, Work

__all__ = ["timeless_model"]


def timeless_model(case: dict[str, Any]) -> Model:
    """Without times: the forward goes through the units in the reverse of the backward's order."""
    nothing = Work(0.0)
    return Model(
        parameters=tuple(
            Parameter(name, numel, "float32", shape=_shape(numel, rows))
            for name, numel, rows in case["parameters"]
        ),
        ready_order=tuple(case["ready_order"]),
        buffers=(),
        forward=(nothing,),
        backward=(nothing,) * (len(case["ready_order"]) + 1),
        optimizer=nothing,
        launch_s=0.0,
        activation_bytes=None,
        basis="measured",
        provenance=(),
    )


def _shape(numel: int, rows: int | None) -> tuple[int, ...]:
    return (rows, numel // rows) if rows else ()
