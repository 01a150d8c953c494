"""Options of calibrate's commands: their types, and the parsing of what users write."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, get_args

import typer
from pydantic import ValidationError

from calibrate.records.rounds import OptimizerName
from calibrate.records.variant import Variant
from ddpsim.cli import parsed
from ddpsim.errors import printable, shown
from ddpsim.importers.measured import Layout, Operation, parse_layout
from ddpsim.scenario.suggest import did_you_mean, in_own_words
from ddpsim.settings import split_values
from ddpsim.units import parse_bytes, parse_bytes_per_s

_STOPPED = 130  # as typer has it where nobody tells of Ctrl-C: 128, and SIGINT
LONGEST_S = 1e6  # of a budget: days

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
    typer.Option(
        help='Nominal rate of a node\'s network link, "10 Gbit/s", if you know it; testbed knows.',
        envvar="DDPSIM_LINE_RATE",
        show_envvar=False,
    ),
]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        metavar="KEY=VALUE,...",
        help="Another variant, with keys of a scenario's ddp section: strategy=fully_shard,"
        "units=[layers.0,layers.1]; bucket_cap_mb=default is torch's own.",
    ),
]
Layouts = Annotated[
    list[str] | None,
    typer.Option(
        "--layout",
        metavar="NODESxGPUS",
        help="Ranks of logs that do not list them, such as 2x8: once for all, or once a log.",
    ),
]
Operations = Annotated[
    list[str] | None,
    typer.Option(
        "--operation",
        help="What to read: all_reduce (the default), and broadcast, reduce_scatter or all_gather "
        "if given too.",
    ),
]


def layouts(texts: list[str] | None, logs: int) -> list[Layout | None]:
    """One of --layout for each of so many logs; None without the option."""
    read: list[Layout | None] = [parsed(parse_layout, text, "--layout") for text in texts or ()]
    if len(read) not in (0, 1, logs):
        problem = f"was given {len(read)} times for {logs} logs; give one, or one for each log"
        raise typer.BadParameter(problem, param_hint="--layout")
    return read if len(read) == logs else (read or [None]) * logs


def operations(given: list[str] | None) -> list[Operation]:
    """The collectives of --operation; all-reduces must be there, as a profile is fitted to them."""
    chosen = [parsed(_operation, text, "--operation") for text in given or ["all_reduce"]]
    if "all_reduce" not in chosen:
        problem = "a profile needs all-reduces; add --operation all_reduce"
        raise typer.BadParameter(problem, param_hint="--operation")
    return [*dict.fromkeys(chosen)]


def _operation(text: str) -> Operation:
    for each in get_args(Operation):
        if text == each:
            operation: Operation = each
            return operation
    raise ValueError(f"{text!r} is none of {', '.join(get_args(Operation))}")


def check_ranks_devices(device: str, threads: int) -> None:
    """Refuse a device or threads of the user's: ranks compute where DDP has them do."""
    if device != "auto" or threads != 1:
        option = "--device" if device != "auto" else "--threads"
        problem = "several ranks each take a device of their own, on a CPU with one thread"
        raise typer.BadParameter(f"{problem}; drop it", param_hint=option)


_OF_FSDP1 = " Write reshard_after_forward, where SHARD_GRAD_OP is false and FULL_SHARD true."


def variants_of(texts: list[str] | None) -> list[Variant]:
    """One of each --variant."""
    return [_variant(text) for text in texts or ()]


def _variant(text: str) -> Variant:
    def refused(words: str) -> typer.BadParameter:
        return typer.BadParameter(f"{shown(text)}: {words}", param_hint="--variant")

    keys: dict[str, str] = {}
    for part in split_values(text):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            raise refused(f"{shown(part)} has no value; write KEY=VALUE")
        if key in keys:
            raise refused(f"{key} is given twice; keep one of them")
        keys[key] = value
    if keys.get("bucket_cap_mb") == "default":  # as in a scenario
        del keys["bucket_cap_mb"]
    try:
        return Variant.model_validate_strings(keys)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = "".join(map(str, problem["loc"]))
        reason = in_own_words(problem)
        if problem["type"] == "extra_forbidden":
            names = list(Variant.model_fields)
            hint = _OF_FSDP1 if place == "sharding_strategy" else did_you_mean(place, names)
            reason = f"is no key of a variant.{hint} Known: {', '.join(names)}"
        raise refused(f"{place} {reason}".strip()) from None


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


@contextmanager
def reporting_once() -> Iterator[None]:
    """Let the first rank alone say how a torchrun job ends; Ctrl-C has its own code."""
    from calibrate.measure.errors import RefusedError, StoppedError

    try:
        yield
    except RefusedError:
        if is_first():
            raise
        raise typer.Exit(1) from None
    except StoppedError as error:
        print(printable(str(error)), file=sys.stderr)
        raise typer.Exit(_STOPPED) from None


def is_first(local: int | None = None) -> bool:
    """Whether this process speaks: it starts the ranks itself, is alone, or is rank 0 of several.

    A RANK that is left over from another job means nothing without a WORLD_SIZE.
    """
    alone = local is not None or os.environ.get("WORLD_SIZE", "1") == "1"
    return alone or os.environ.get("RANK", "0") == "0"
