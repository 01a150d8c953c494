"""Options of loops that share gradients or parameters in another way than DDP alone."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ddpsim.scenario.base import Spec

__all__ = ["Join", "JoinField", "LocalSgd", "ParameterServers"]


class LocalSgd(Spec):
    """Local SGD: ranks train alone, and average their parameters now and then."""

    every: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="steps per averaging, the period of torch's PeriodicModelAverager; "
        "run.iterations is rounded up to a multiple"
    )


class ParameterServers(Spec):
    """Options of strategy: parameter_server."""

    servers: Annotated[int, Field(ge=1, le=100_000)] = Field(
        1, description="ranks that hold the optimizer, each of a part of the parameters"
    )


class Join(Spec):
    """DDP's join(), for ranks with unequal numbers of inputs."""

    divide_by_initial_world_size: bool = Field(
        default=True,
        description="gradients are divided by all ranks; false: by those with inputs, for whose "
        "number the host waits in each backward",
    )


def _join(value: Any) -> Any:
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


JoinField = Annotated[
    Join | None, BeforeValidator(_join, json_schema_input_type=Join | bool | None)
]
