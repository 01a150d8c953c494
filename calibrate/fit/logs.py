"""Logs of others' benchmarks, read for a profile: which collectives, on which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from calibrate.files import name_as_text
from ddpsim.errors import ImportFailedError
from ddpsim.importers.all_reduce import AllReduceLog, read_all_reduce
from ddpsim.importers.measured import Layout, Operation, OtherCollectiveError, named_layout
from ddpsim.scenario.quantity import SourceFile

__all__ = ["Logs", "read_logs"]


class Logs(NamedTuple):
    """What was taken of some files; another collective's times stand where an all-reduce's do."""

    all_reduces: list[AllReduceLog]
    others: dict[Operation, list[AllReduceLog]]

    @property
    def warnings(self) -> list[str]:
        """Of all files, each once."""
        logs = chain(self.all_reduces, *self.others.values())
        return [*dict.fromkeys(line for log in logs for line in log.warnings)]


def read_logs(
    paths: Sequence[Path], layouts: Sequence[Layout | None], operations: Sequence[Operation]
) -> Logs:
    """Every file must hold one of the operations; raises ImportFailedError.

    `layouts` has one for each file, None where the file is to list its ranks itself.
    """
    logs: dict[Operation, list[AllReduceLog]] = {operation: [] for operation in operations}
    for path, layout in zip(paths, layouts, strict=True):
        for operation, log in _read(path, layout, operations).items():
            logs[operation].append(log)
    all_reduces = logs.pop("all_reduce", [])
    for operation in (operation for operation, found in logs.items() if not found):
        names = ", ".join(map(name_as_text, paths))
        told = f"holds no {operation}; drop --operation {operation}"
        raise ImportFailedError(names, told)
    return Logs(all_reduces, logs)


def _read(
    path: Path, layout: Layout | None, operations: Sequence[Operation]
) -> dict[Operation, AllReduceLog]:
    source = SourceFile(name_as_text(path), path)
    tried = {each: _read_one(source, layout, each) for each in operations}
    found = {each: log for each, log in tried.items() if isinstance(log, AllReduceLog)}
    for error in tried.values():
        if isinstance(error, OtherCollectiveError) and not found:
            raise error
    return found


def _read_one(
    source: SourceFile, layout: Layout | None, operation: Operation
) -> AllReduceLog | OtherCollectiveError:
    try:
        log = read_all_reduce(source, layout=layout, operation=operation)
    except OtherCollectiveError as error:
        return error
    _check_layout(log, layout)
    return log


def _check_layout(log: AllReduceLog, layout: Layout | None) -> None:
    listed = log.nodes, log.gpus_per_node
    if layout and layout != listed:
        raise ImportFailedError(
            log.source,
            f"lists {named_layout(listed)} ranks, but --layout says {named_layout(layout)}; "
            "drop --layout, or give it once for each log, in their order",
        )
