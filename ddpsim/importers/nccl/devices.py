"""The ranks of a run of nccl-tests: that all are listed, each with a GPU of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from ddpsim.errors import ImportFailedError
from ddpsim.importers.nccl.text import Device, Line, TextRow, device_of
from ddpsim.importers.text import listed

NO_DEVICES = "does not list its devices ('#  Rank  0 ... on HOST device 0')"
_AS_CSV = "write it as CSV: size_bytes,time_us,nodes,gpus_per_node"


def device_lists(
    name: str, lines: Iterable[Line], rows: Iterable[TextRow]
) -> list[tuple[Device, ...]]:
    """The devices of every run that lists them: a rank that comes again begins the next run."""
    rows_at = {row.line for row in rows}
    runs: list[dict[int, Device]] = []
    has_rows = False
    for line in lines:
        has_rows = has_rows or line.number in rows_at
        if device := device_of(line.text):
            before = runs[-1].get(device.rank) if runs else None
            if before and not has_rows:
                raise _ran_alone(name, line.number, before, device)
            if before or not runs:
                runs.append({})
                has_rows = False
            runs[-1][device.rank] = device
    for run in runs:
        _check_all_listed(name, run.keys())
    return [tuple(run.values()) for run in runs]


def layout_of(name: str, devices: Sequence[Device]) -> tuple[int, int]:
    """Nodes and devices of each; raises ImportFailedError where they are not alike."""
    _check_each_its_own(name, devices)
    of_node = Counter(device.host for device in devices)
    if len(set(of_node.values())) > 1:
        raise ImportFailedError(
            name, f"lists {len(devices)} ranks on {len(of_node)} nodes, which are not alike"
        )
    return len(of_node), len(devices) // len(of_node)


def only_layout(name: str, layouts: set[tuple[int, int]]) -> tuple[int, int]:
    """The one layout of a file; raises ImportFailedError where there are several."""
    if len(layouts) > 1:
        raise ImportFailedError(
            name, "holds several layouts (nodes, gpus_per_node); keep one a file"
        )
    return layouts.pop()


def check_one_group(name: str, devices: Iterable[Device]) -> None:
    """Raise ImportFailedError where several groups reduced side by side."""
    groups = {device.group for device in devices if device.group}
    if len(groups) > 1:
        raise ImportFailedError(
            name,
            f"lists devices of {len(groups)} groups, which reduced side by side "
            "(NCCL_TESTS_SPLIT): how many ranks a time is of is not known; wanted a run of one",
        )


def _ran_alone(name: str, line: int, first: Device, again: Device) -> ImportFailedError:
    return ImportFailedError(
        name,
        f"each process ran alone (rank {again.rank} is listed twice, on {first.host} and "
        f"{again.host}): nccl-tests was built without MPI; build it with MPI=1, or if a run ended "
        "before its first row, remove its lines",
        line,
    )


def _check_all_listed(name: str, ranks: Iterable[int]) -> None:
    there = set(ranks)
    missing = [*islice((rank for rank in range(max(there)) if rank not in there), 10)]
    if missing:
        raise ImportFailedError(
            name,
            f"lists ranks {listed(sorted(there))}, but others are missing ({listed(missing)}), "
            f"so how many there are is not known; list all of them, or {_AS_CSV}",
        )


def _check_each_its_own(name: str, devices: Iterable[Device]) -> None:
    """Two ranks on one GPU are two nodes of one name, or nothing that DDP does."""
    ranks: dict[tuple[str, str, str], int] = {}
    for device in devices:
        place = (device.host, device.ordinal, device.bus)
        if device.ordinal and ranks.setdefault(place, device.rank) != device.rank:
            raise ImportFailedError(
                name,
                f"lists device {device.ordinal} [{device.bus}] of {device.host} for ranks "
                f"{ranks[place]} and {device.rank}: if two nodes go by this name, as nccl-tests "
                f"cuts names at the first dot, name them apart in the list, or {_AS_CSV}",
            )
