"""The version of torch whose rules are followed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from ddpsim.errors import shown

__all__ = ["TorchVersion"]

_KnownTorch = Literal["1.4", "2.11", "2.12", "2.13", "2.14", "2.15"]
_KNOWN_TORCH: tuple[str, ...] = get_args(_KnownTorch)


def _torch_version(value: Any) -> Any:
    """`torch: 2.13` without quotes is a number to YAML, and so is 2.10, which is then 2.1."""
    version = str(value) if isinstance(value, float) else value
    if version in _KNOWN_TORCH or not isinstance(version, str):
        return version
    unquoted = " (without quotes 2.10 is the number 2.1 to YAML)" if value == 2.1 else ""
    raise ValueError(
        f"the rules of torch {shown(version)}{unquoted} are not known here; known: "
        f"{', '.join(_KNOWN_TORCH)}. Write the nearest one in quotes, its bucket rules can be "
        "used: '2.11' for 2.0 to 2.10 (a list of caps is new in 2.11; the rest was not compared)"
    )


TorchVersion = Annotated[
    _KnownTorch,
    BeforeValidator(_torch_version, json_schema_input_type=_KnownTorch | float),
]
