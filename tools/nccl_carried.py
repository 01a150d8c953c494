"""Published all_reduce_perf sweeps, by profiles fitted to those of other numbers of nodes.

python tools/nccl_carried.py       prints tables and figures of docs/validation.md, section 4
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import log1p, sqrt
from pathlib import Path
from statistics import fmean, median

from nccl_sweeps import Point, from_presets, log_of, pooled_odd_rows, preset_of, sweeps

from calibrate.fit.profile import fit_logs
from ddpsim.cluster.fitted.network import doublings
from ddpsim.importers.profiles.cluster import ClusterProfile
from ddpsim.prediction.api import load_scenario, predict
from ddpsim.prediction.collective_times import collective_table, load_cluster

# what is fitted, and what it predicts
ELSEWHERE = (
    (
        "V, 1 x 4 + 2 x 4 + 4 x 4 -> 8 x 4",
        ("abci-V-1x4", "abci-V-2x4", "abci-V-4x4"),
        "abci-V-8x4",
    ),
    ("V, 1 x 4 + 2 x 4 -> 8 x 4", ("abci-V-1x4", "abci-V-2x4"), "abci-V-8x4"),
    ("V, 1 x 4 + 2 x 4 -> 4 x 4", ("abci-V-1x4", "abci-V-2x4"), "abci-V-4x4"),
    ("V, 4 x 4 -> 8 x 4", ("abci-V-4x4",), "abci-V-8x4"),
    ("V, 8 x 4 -> 2 x 4", ("abci-V-8x4",), "abci-V-2x4"),
    ("A, 1 x 8 and its NICs -> 2 x 8", ("abci-A-1x8",), "abci-A-2x8"),
    ("A, 1 x 8 + 2 x 8 -> 4 x 8", ("abci-A-1x8", "abci-A-2x8"), "abci-A-4x8"),
    (
        "V, 1 x 4 + 2 x 4 + 4 x 4 -> 16 x 4",
        ("abci-V-1x4", "abci-V-2x4", "abci-V-4x4"),
        "abci-V-16x4",
    ),
    ("V, 1 x 4 + 2 x 4 -> 16 x 4", ("abci-V-1x4", "abci-V-2x4"), "abci-V-16x4"),
    ("A, 1 x 8 + 4 x 8 -> 2 x 8", ("abci-A-1x8", "abci-A-4x8"), "abci-A-2x8"),
)
_A_8X8 = "abci-A-8x8"
# the same to the largest jobs, which set nothing
LARGER = (
    ("V, 1 x 4 + 2 x 4 + 4 x 4 -> 32 x 4", ELSEWHERE[0][1], "abci-V-32x4"),
    ("V, the same + 8 x 4 -> 32 x 4", (*ELSEWHERE[0][1], "abci-V-8x4"), "abci-V-32x4"),
    ("A, 1 x 8 + 2 x 8 -> 16 x 8", ("abci-A-1x8", "abci-A-2x8"), "abci-A-16x8"),
    (
        "A, 1 x 8 + 2 x 8 + 4 x 8 -> 16 x 8",
        ("abci-A-1x8", "abci-A-2x8", "abci-A-4x8"),
        "abci-A-16x8",
    ),
    ("A, 1 x 8 + 2 x 8 + 4 x 8 -> 8 x 8", ("abci-A-1x8", "abci-A-2x8", "abci-A-4x8"), _A_8X8),
    ("V, presets -> 32 x 4", (), "abci-V-32x4"),
    ("A, presets -> 16 x 8", (), "abci-A-16x8"),
    ("A, presets -> 8 x 8", (), _A_8X8),
)


@cache
def _fitted(names: tuple[str, ...]) -> ClusterProfile:
    return fit_logs([sweeps()[name] for name in names], "elsewhere")


@contextmanager
def _profile_of(names: Sequence[str]) -> Iterator[str]:
    """The path of a fit of these sweeps, for as long as it is needed."""
    profile = _fitted(tuple(names))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(profile.model_dump_json(by_alias=True), encoding="utf-8")
        yield str(path)


@cache
def elsewhere(names: tuple[str, ...], target: str) -> tuple[Point, ...]:
    """A sweep, from 64 KiB, by a fit of those of other ranks, and of its NICs if these had none."""
    log = log_of(target)
    wanted = [sample for sample in log.samples if sample[0] >= 64 * 1024]
    with _profile_of(names) as path:
        scenario = load_cluster({"cluster": {"nodes": 1} | preset_of(target) | {"profile": path}})
        rows = collective_table(scenario, "all_reduce", [size for size, _ in wanted]).rows
    return tuple(
        Point(size, measured_s, row.time_s, (row.low_s, row.high_s))
        for row, (size, measured_s) in zip(rows, wanted, strict=True)
    )


def larger(names: tuple[str, ...], target: str) -> tuple[Point, ...]:
    """One of the largest jobs, from 64 KiB, by a fit or by presets alone."""
    if names:
        return elsewhere(names, target)
    return tuple(point for point in from_presets(target) if point.size_bytes >= 64 * 1024)


def larger_table() -> Iterator[str]:
    """The largest jobs of ABCI, which set nothing."""
    yield "| ABCI | rows | median | bias | worst | within the 80 % range |"
    yield "|---|---|---|---|---|---|"
    for said, names, target in LARGER:
        points = larger(names, target)
        errors = [point.error for point in points]
        held = sum(point.is_held for point in points)
        yield (
            f"| {said} | {len(errors)} | {median(map(abs, errors)):.1%} | {median(errors):+.1%} | "
            f"{max(errors, key=abs):+.0%} | {held} |"
        )


@cache
def steps_elsewhere() -> dict[int, float]:
    """ResNet-50 on 8 x 4 V100 by a fit of 1 x 4 and 2 x 4: error against the same by its log.

    By the milliseconds of compute that a step has: of few, communication sets the pace.
    """
    log = Path(os.environ["DDPSIM_REFERENCE_DATA"]) / "nccl" / "logs" / "abci-V-8x4.txt"
    with _profile_of(("abci-V-1x4", "abci-V-2x4")) as path:
        return {
            compute_ms: _step_s(compute_ms, profile=path) / _step_s(compute_ms, all_reduce=str(log))
            - 1
            for compute_ms in (10, 20, 40, 80)
        }


def _step_s(compute_ms: int, **network: str) -> float:
    cluster = {"nodes": 8, "gpus_per_node": 4, "device": "v100-sxm-16gb"}
    workload = {"model": "resnet50", "batch_per_rank": 64, "step_time": f"{compute_ms} ms"}
    scenario = {"schema": "ddpsim/1", "workload": workload, "cluster": cluster | network}
    return predict(load_scenario(scenario)).iteration_time_s.mean


def _doublings(measured: Sequence[str], asked: str) -> float:
    """How often the measured nodes must be doubled or halved; 0: none was measured over nodes."""
    logs = [sweeps()[name] for name in measured]
    if all(log.nodes == 1 for log in logs):
        return 0.0
    layouts = [(log.nodes, log.gpus_per_node) for log in logs]
    return doublings(log_of(asked).world_size, layouts)


def _rms(points: Sequence[Point]) -> float:
    """Of the logarithms of predicted over measured times."""
    return sqrt(fmean(log1p(point.error) ** 2 for point in points))


def per_doubling() -> dict[str, float]:
    """The root mean square error for each doubling of the nodes, by device, and of all devices."""
    found: dict[str, list[float]] = {}
    for said, measured, asked in ELSEWHERE:
        if times := _doublings(measured, asked):
            found.setdefault(said[0], []).append(_rms(elsewhere(measured, asked)) / times)
    each = {name: sqrt(fmean(rms**2 for rms in values)) for name, values in found.items()}
    return each | {"all": sqrt(fmean(rms**2 for rms in each.values()))}


def carried_table() -> Iterator[str]:
    """Sweeps by fits of other numbers of nodes, from 64 KiB."""
    yield "| ABCI: fitted -> predicted | doublings of the nodes | median | worst | rows | RMS |"
    yield "|---|---|---|---|---|---|"
    for said, measured, asked in ELSEWHERE:
        points = elsewhere(measured, asked)
        errors = [abs(point.error) for point in points]
        times = _doublings(measured, asked)
        yield (
            f"| {said} | {f'{times:g}' if times else 'from one node'} | "
            f"{median(errors):.1%} | {max(errors):.1%} | {len(errors)} | {_rms(points):.2f} |"
        )


def levels() -> dict[str, str]:
    """Figures of the fits, in words."""
    found = {"odd rows of all sweeps, fitted to the even ones": _level(pooled_odd_rows())}
    each = per_doubling()
    found["root mean square error for each doubling of the nodes"] = (
        f"V100 {each['V']:.2f}, A100 {each['A']:.2f}, both {each['all']:.2f}"
    )
    steps = (
        "ResNet-50's step on ABCI V, 1 x 4 + 2 x 4 -> 8 x 4, beside the same by the log of 8 x 4"
    )
    found[steps] = ", ".join(
        f"{error:+.1%} with {ms} ms of compute" for ms, error in steps_elsewhere().items()
    )
    return found


def _level(points: Sequence[Point]) -> str:
    errors = [abs(point.error) for point in points]
    return f"median {median(errors):.1%}, worst {max(errors):.1%} of {len(errors)} rows"


if __name__ == "__main__":
    print("\n".join(carried_table()))
    for what, level in levels().items():
        print(f"{what}: {level}")
