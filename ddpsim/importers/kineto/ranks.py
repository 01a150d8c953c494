"""Traces of several ranks of one job, aligned by their steps and by their all-reduces.

The rank that joins a collective last waits for nobody: its time is the transfer's, and what the
others take longer is their wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ddpsim.errors import ImportFailedError
from ddpsim.importers.kineto.measured import KinetoStep, MeasuredCollective
from ddpsim.importers.kineto.trace import KinetoTrace, read_trace
from ddpsim.scenario.quantity import SourceFile

__all__ = ["RankTraces", "read_rank_traces"]

_SUFFIXES = (".json", ".json.gz")
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class RankTraces:
    """What the traces of a job's ranks say together, in seconds; medians over steps.

    `all_reduces`: bytes and transfer of each all-reduce of gradients, in the order of a step; none
    of a single rank, whose times hold its waits. `compute_s`: by rank, its own work of a step.
    `exposed_s`: collectives with no compute of the model under way; None on a CPU.
    """

    source: str
    world_size: int | None
    step_s: float
    data_wait_s: float
    exposed_s: float | None
    compute_s: dict[int, float]
    all_reduces: tuple[tuple[int, float], ...]


def read_rank_traces(path: Path) -> RankTraces:
    """Read a folder with one trace a rank, or one trace; raises ImportFailedError."""
    traces = _by_rank(path)
    sizes = {trace.world_size for trace in traces.values()}
    if len(sizes) > 1:
        raise ImportFailedError(
            str(path), "its traces are of jobs of different sizes; keep one job"
        )
    steps = _common_steps(path, traces)
    every = [step for of_rank in steps.values() for step in of_rank]
    on_gpu = all(trace.on_gpu for trace in traces.values())
    return RankTraces(
        source=str(path),
        world_size=sizes.pop(),
        step_s=median(step.length_s for step in every),
        data_wait_s=median(step.loader_s for step in every),
        exposed_s=median(map(_exposed_s, every)) if on_gpu else None,
        compute_s={rank: median(s.busy_s for s in of_rank) for rank, of_rank in steps.items()},
        all_reduces=tuple(_transfers(path, steps)) if len(traces) > 1 else (),
    )


def _by_rank(path: Path) -> dict[int, KinetoTrace]:
    found: dict[int, KinetoTrace] = {}
    for file in _files(path):
        trace = read_trace(SourceFile(str(file), file))
        rank = 0 if trace.rank is None else trace.rank
        if rank in found:
            raise ImportFailedError(str(file), f"is of rank {rank}, as {found[rank].source} is")
        found[rank] = trace
    return dict(sorted(found.items()))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    if not files:
        raise ImportFailedError(
            str(path), f"holds no trace: no file ends in {' or '.join(_SUFFIXES)}"
        )
    return files


def _common_steps(
    path: Path, traces: Mapping[int, KinetoTrace]
) -> dict[int, tuple[KinetoStep, ...]]:
    """The steps that every rank recorded, by their names."""
    named = {rank: {s.name: s for s in trace.steps} for rank, trace in traces.items()}
    first = next(iter(named.values()))
    common = [name for name in first if all(name in steps for steps in named.values())]
    if not common:
        raise ImportFailedError(
            str(path), "its traces have no step in common; record the same steps on every rank"
        )
    return {rank: tuple(steps[name] for name in common) for rank, steps in named.items()}


def _exposed_s(step: KinetoStep) -> float:
    under_way_s = sum(collective.duration_s for collective in step.collectives)
    return max(0.0, under_way_s - step.beside_comm_s)


def _transfers(
    path: Path, steps: Mapping[int, Sequence[KinetoStep]]
) -> Iterator[tuple[int, float]]:
    """Of each all-reduce of a step, in its order."""
    reduced = {
        rank: [[c for c in step.collectives if c.of_gradients] for step in of_rank]
        for rank, of_rank in steps.items()
    }
    counts = {len(of_step) for of_rank in reduced.values() for of_step in of_rank}
    if len(counts) > 1:
        raise ImportFailedError(
            str(path),
            f"its steps hold {min(counts)} to {max(counts)} all-reduces of gradients; record whole "
            "steps of one job, alike on every rank",
        )
    for index in range(counts.pop()):
        of_it = [[of_step[index] for of_step in of_rank] for of_rank in reduced.values()]
        size = _size_bytes(of_it[0][0])
        if size:
            least_s = (min(c.duration_s for c in at_once) for at_once in zip(*of_it, strict=True))
            yield size, median(least_s)


def _size_bytes(collective: MeasuredCollective) -> int:
    """0 where it is not recorded."""
    return (collective.elements or 0) * _BYTES.get(collective.dtype or "", 0)
