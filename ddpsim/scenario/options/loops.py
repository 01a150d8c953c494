"""Options of loops that share gradients or parameters in another way than DDP alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ddpsim.errors import shown
from ddpsim.scenario.base import Spec

__all__ = ["Join", "JoinField", "LocalSgd", "ParameterServers", "PostLocalSgd"]


class LocalSgd(Spec):
    """Local SGD: ranks train alone, and average their parameters now and then."""

    every: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="steps per averaging, the period of torch's PeriodicModelAverager; "
        "run.iterations is rounded up to a multiple"
    )


class PostLocalSgd(Spec):
    """Options of comm_hook: post_localSGD, which goes with torch's PeriodicModelAverager."""

    period: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="steps per averaging of all parameters; run.iterations is rounded up to a "
        "multiple"
    )
    start_localSGD_iter: Annotated[int, Field(ge=2, le=1000)] = Field(  # noqa: N815 -- torch's name
        2, description="steps before, with all-reduces among all ranks; torch's example has 100"
    )
    post_local_gradient_allreduce: bool = Field(
        default=True, description="false: from then on gradients are not reduced at all"
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
    if isinstance(value, bool):
        return {} if value else None
    if value is None or isinstance(value, (Mapping, Join)):
        return value
    raise ValueError(
        f"{shown(value)} is neither true nor false, nor options; write true, or "
        "{divide_by_initial_world_size: false}"
    )


JoinField = Annotated[
    Join | None, BeforeValidator(_join, json_schema_input_type=Join | bool | None)
]
