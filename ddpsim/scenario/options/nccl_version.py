"""NCCL's version, as a scenario names it."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ddpsim.errors import shown

_NCCL = r"^2\.\d+(\.\d+)?$"


def _nccl_version(value: Any) -> Any:
    """As text: 2.20 as a number would be 2.2."""
    if isinstance(value, str) and re.match(_NCCL, value):
        return value
    raise ValueError(
        f"{shown(value)} is no version of NCCL; write one with its quotes, such as "
        """nccl: "2.19", or --set 'cluster.nccl="2.19"'"""
    )


NcclVersion = Annotated[str, Field(pattern=_NCCL), BeforeValidator(_nccl_version)]
