"""Published all-reduce sweeps, by profiles fitted to those of other numbers of nodes.

python tools/nccl_carried.py       prints the table of docs/validation.md, section 4
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from nccl_sweeps import Point, log_of, pooled_odd_rows, preset_of

from calibrate.fit.profile import fit_logs
from ddpsim.importers.profiles.cluster import ClusterProfile
from ddpsim.prediction.api import load_scenario, predict
from ddpsim.prediction.collective_times import collective_table, load_cluster

_LEAST_BYTES, _MOST_BYTES = 64 * 1024, 256 * 2**20


class Case(NamedTuple):
    """Sweeps of one machine that are fitted, and those of other numbers of nodes."""

    fitted: tuple[str, ...]
    asked: tuple[str, ...]


class Group(NamedTuple):
    """Cases that are judged together; `links`: the scenario states the machine's network too."""

    said: str
    cases: tuple[Case, ...]
    links: bool = False


_ALPS = tuple(
    f"alps-{environment}-ofi{plugin}"
    for environment in ("no_gdrcopy", "cross_nic")
    for plugin in ("1.13.0", "1.9.2")
)


def _alps(fitted: Sequence[int], asked: int) -> tuple[Case, ...]:
    """Four GH200 a node over Slingshot, by the plugin's version and settings."""
    return tuple(
        Case(tuple(f"{kind}-{nodes}x4" for nodes in fitted), (f"{kind}-{asked}x4",))
        for kind in _ALPS
    )


def _polaris() -> tuple[Case, ...]:
    """Four A100 a node over Slingshot."""
    names = {
        environment: [
            f"polaris-nccl_2_21-{nodes}x4-{environment}-2024-04-29-{hour}"
            for nodes, hour in ((2, "19-08-14"), (8, "21-23-48"), (256, "19-19-41"))
        ]
        for environment in ("env4", "env5")
    }
    return tuple(Case((two, eight), (many,)) for two, eight, many in names.values())


def _abci(kind: str, fitted: Sequence[int], asked: int) -> tuple[Case, ...]:
    names = [f"abci-{kind}-{nodes}x{8 if kind == 'A' else 4}" for nodes in (*fitted, asked)]
    return (Case(tuple(names[:-1]), (names[-1],)),)


_FOUR, _TWO = (1, 2, 4, 8), (1, 2)
GROUPS = (
    *(Group(f"GH200 over Slingshot, 1 to 8 -> {n}", _alps(_FOUR, n)) for n in (16, 64, 512)),
    *(Group(f"GH200 over Slingshot, 1 and 2 -> {n}", _alps(_TWO, n)) for n in (16, 64, 512)),
    Group("A100 over Slingshot, 2 and 8 -> 256", _polaris()),
    *(Group(f"A100 over HDR, 1 and 2 -> {n}", _abci("A", _TWO, n), links=True) for n in (4, 8, 16)),
    *(
        Group(f"V100 over EDR, 1, 2 and 4 -> {n}", _abci("V", (1, 2, 4), n), links=True)
        for n in (8, 16, 32)
    ),
    *(Group(f"V100 over EDR, 1 and 2 -> {n}", _abci("V", _TWO, n), links=True) for n in (4, 16)),
)


@cache
def _fitted(names: tuple[str, ...]) -> ClusterProfile:
    return fit_logs([log_of(name) for name in names], "elsewhere")


@contextmanager
def _profile_of(names: Sequence[str]) -> Iterator[str]:
    """The path of a fit of these sweeps, for as long as it is needed."""
    profile = _fitted(tuple(names))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(profile.model_dump_json(by_alias=True), encoding="utf-8")
        yield str(path)


@cache
def elsewhere(names: tuple[str, ...], asked: str, *, links: bool) -> tuple[Point, ...]:
    """A sweep's rows of 64 KiB to 256 MiB, by a fit of sweeps of other numbers of nodes."""
    log = log_of(asked)
    wanted = [row for row in log.samples if _LEAST_BYTES <= row[0] <= _MOST_BYTES]
    keys: dict[str, Any] = {"nodes": log.nodes, "gpus_per_node": log.gpus_per_node}
    if links:
        keys = preset_of(asked) | keys
    else:
        (gpu,) = log.gpus
        keys["device"] = gpu
    with _profile_of(names) as path:
        scenario = load_cluster({"cluster": keys | {"profile": path}})
        rows = collective_table(scenario, "all_reduce", [size for size, _ in wanted]).rows
    return tuple(
        Point(size, measured_s, row.time_s, (row.low_s, row.high_s))
        for row, (size, measured_s) in zip(rows, wanted, strict=True)
    )


@cache
def points_of(group: Group) -> tuple[Point, ...]:
    """The rows of all sweeps of a group."""
    return tuple(
        point
        for case in group.cases
        for asked in case.asked
        for point in elsewhere(case.fitted, asked, links=group.links)
    )


def carried_table() -> Iterator[str]:
    """Sweeps by fits of other numbers of nodes."""
    yield "| fitted -> predicted nodes | rows | median | bias | 80 % range holds |"
    yield "|---|---|---|---|---|"
    for group in GROUPS:
        points = points_of(group)
        errors = [point.error for point in points]
        held = fmean(point.is_held for point in points)
        yield (
            f"| {group.said} | {len(errors)} | {median(map(abs, errors)):.0%} | "
            f"{median(errors):+.0%} | {held:.0%} |"
        )


@cache
def steps_elsewhere() -> dict[int, float]:
    """ResNet-50 on 8 x 4 V100 by a fit of 1 x 4 and 2 x 4: error against the same by its log.

    By the milliseconds of compute that a step has: of few, communication sets the pace.
    """
    log = Path(os.environ["DDPSIM_REFERENCE_DATA"]) / "nccl" / "logs" / "abci-V-8x4.txt"
    links = {key: preset_of("abci-V-8x4")[key] for key in ("nccl", "inter_node")}
    with _profile_of(("abci-V-1x4", "abci-V-2x4")) as path:
        return {
            compute_ms: _step_s(compute_ms, profile=path, **links)
            / _step_s(compute_ms, all_reduce=str(log))
            - 1
            for compute_ms in (10, 20, 40, 80)
        }


def _step_s(compute_ms: int, **network: Any) -> float:
    cluster = {"nodes": 8, "gpus_per_node": 4, "device": "v100-sxm-16gb"}
    workload = {"model": "resnet50", "batch_per_rank": 64, "step_time": f"{compute_ms} ms"}
    scenario = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster | network}
    return predict(load_scenario(scenario)).iteration_time_s.mean


def levels() -> dict[str, str]:
    """Figures of the fits, in words."""
    odd = [abs(point.error) for point in pooled_odd_rows()]
    found = {
        "odd rows of all sweeps, fitted to the even ones": (
            f"median {median(odd):.1%}, worst {max(odd):.1%} of {len(odd)} rows"
        )
    }
    steps = (
        "ResNet-50's step on 8 x 4 V100, 1 x 4 + 2 x 4 fitted, against the same by the log of 8 x 4"
    )
    found[steps] = ", ".join(
        f"{error:+.1%} with {ms} ms of compute" for ms, error in steps_elsewhere().items()
    )
    return found


if __name__ == "__main__":
    print("\n".join(carried_table()))
    for what, level in levels().items():
        print(f"{what}: {level}")
