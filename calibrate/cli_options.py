"""Options of calibrate's commands: their types, and the parsing of what users write."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from calibrate.records.rounds import OptimizerName
from ddpsim.cli import parsed
from ddpsim.units import parse_bytes, parse_bytes_per_s

__all__ = [
    "Batch",
    "Function",
    "Fused",
    "LineRate",
    "Local",
    "Optimizer",
    "Output",
    "bucket_cap_mb",
    "bytes_per_s",
    "check_ranks_devices",
    "memory_bytes",
]

Output = Annotated[Path, typer.Option("-o", "--output", help="The file to write.")]
Function = Annotated[
    str, typer.Argument(metavar="MODULE:FUNCTION", help="Returns (model, inputs, loss).")
]
Optimizer = Annotated[OptimizerName, typer.Option(help="torch.optim class.")]
Fused = Annotated[bool, typer.Option(help="The optimizer's fused implementation.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Passed on as batch=.")]
Local = Annotated[
    int | None, typer.Option(min=1, help="Start this many ranks here; otherwise torchrun did.")
]
LineRate = Annotated[
    str | None,
    typer.Option(help='Nominal rate of a node\'s network link, "10 Gbit/s", if you know it.'),
]


def check_ranks_devices(device: str, threads: int) -> None:
    """Refuse a device or threads of the user's: ranks compute where DDP has them do."""
    if device != "auto" or threads != 1:
        option = "--device" if device != "auto" else "--threads"
        told = "several ranks each take a device of their own, on a CPU with one thread"
        raise typer.BadParameter(f"{told}; drop it", param_hint=option)


def bucket_cap_mb(text: str) -> float | None:
    """MiB, or None for torch's default."""
    if text.strip() == "default":
        return None
    try:
        cap = float(text)
    except ValueError:
        cap = 0.0
    if not 0 < cap < math.inf:
        wanted = f"{text!r} is no bucket cap: wanted MiB, or default"
        raise typer.BadParameter(wanted, param_hint="--caps")
    return cap


def bytes_per_s(text: str | None) -> float | None:
    """Bytes per second of --line-rate."""
    return None if text is None else _above_zero(parse_bytes_per_s, text, "--line-rate")


def memory_bytes(text: str | None) -> int | None:
    """Bytes of --memory-budget."""
    return None if text is None else round(_above_zero(parse_bytes, text, "--memory-budget"))


def _above_zero(parse: Callable[[str], float], text: str, option: str) -> float:
    value = parsed(parse, text, option)
    if not 1 <= value < math.inf:
        raise typer.BadParameter(f"{text!r} is nothing to measure with", param_hint=option)
    return value
