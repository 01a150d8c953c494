"""Which ranks and steps of a run a trace shows, and its files."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Literal

from ddpsim.errors import InputError
from ddpsim.files import write_atomically
from ddpsim.prediction.api import observe
from ddpsim.prediction.resolve import resolve
from ddpsim.progress import stage
from ddpsim.report.trace import Traced
from ddpsim.report.trace_text import Written
from ddpsim.scenario.schema import Scenario

SAMPLED = 16  # ranks shown where nobody chose them
_STEPS = 3
_MOST_STEPS = 32  # where nobody said how many


def trace(
    scenario: Scenario,
    ranks: Sequence[int] | None = None,
    steps: int | Literal["all"] | None = None,
    *,
    warmup: bool = False,
) -> Traced:
    """The part of a scenario's run that its trace shows.

    `ranks`: None: all up to 16, of more a sample with the slowest. `steps`: how many, after the
    warm-up if `warmup` is False; "all"; None: three, or as many as have each kind of step. Raises
    ValueError for a rank and InputError for a step that is not there, and ScenarioError as
    `simulate`.
    """
    cluster = scenario.cluster
    size = cluster.world_size
    nodes = [cluster.ranks_of(node) for node in range(cluster.nodes)]
    wanted = sample_ranks(nodes) if ranks is None else sorted(set(ranks))
    timeline = observe(scenario, wanted)
    if ranks is None:
        wanted = list(timeline.ranks)
    first = 0 if warmup else timeline.warmup
    available = len(timeline.slowest.step_ends_ns) + timeline.repeats - first
    if steps is None:  # three, or all until a step with an average, or a read loss, comes again
        steps = min(available, _MOST_STEPS, max(_STEPS, resolve(scenario).program.strategy.period))
    elif steps != "all" and steps > available:
        reason = f"the run has {available} to show: at most {available}, or set run.iterations"
        raise InputError("--steps", reason)
    shown = range(first, first + (available if steps == "all" else steps))
    return Traced(
        timeline,
        wanted,
        shown,
        _choice(ranks, wanted, size, timeline.slowest_rank),
        scenario.name,
        size,
        [node.start for node in nodes],
        cluster.device.name,
        scenario.ddp.backend,
        {} if warmup else resolve(scenario).bucket_names,
    )


def write_traces(traced: Traced, folder: Path, *, compressed: bool = False) -> Written:
    """Write `merged.json` and `ranks/rankN.json`, and touch nothing else that is there.

    Ranks have a folder of their own: HTA reads every .json and .gz of a folder, each as a rank.
    Raises InputError if `folder` is a file, and OSError.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError("--output", f"{folder} is a file; name a folder")
    ending = ".json.gz" if compressed else ".json"

    def write(path: Path, text: str) -> int:
        content = text.encode("utf-8")
        if compressed:
            content = _gzipped(content)
        write_atomically(path, content)
        return len(content)

    merged, ranks = folder / f"merged{ending}", folder / "ranks"
    paths = [ranks / f"rank{rank}{ending}" for rank in traced.ranks]
    with stage("files written", len(paths) + 1) as progress:
        merged_bytes, ranks_bytes = write(merged, traced.merged()), 0
        for path, rank in zip(paths, traced.ranks, strict=True):
            progress.advance()
            ranks_bytes += write(path, traced.of_rank(rank))
        progress.advance()
    there = {path for path in ranks.iterdir() if path.suffix in (".json", ".gz")}
    others = sorted(path.name for path in there.difference(paths))
    return Written(str(merged), merged_bytes, str(ranks), paths[0].name, ranks_bytes, others)


def _gzipped(content: bytes) -> bytes:
    """Compresses to bytes that depend on the content alone: no date, no name."""
    packed = BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as file:
        file.write(content)
    return packed.getvalue()


def sample_ranks(nodes: Sequence[range]) -> list[int]:
    """Picks at most 16 ranks: all, or 15 (the slowest is added) spread evenly, node ends first."""
    world_size = nodes[-1].stop
    if world_size <= SAMPLED:
        return list(range(world_size))
    ends = sorted({end for node in nodes for end in (node[0], node[-1])})
    chosen = _spread(ends, SAMPLED - 1)
    if len(chosen) < SAMPLED - 1:
        others = sorted(set(range(world_size)) - set(chosen))
        chosen += _spread(others, SAMPLED - 1 - len(chosen))
    return sorted(chosen)


def _spread(values: Sequence[int], count: int) -> list[int]:
    """`count` of the values, evenly spread from the first to the last."""
    if len(values) <= count:
        return list(values)
    return [values[i * (len(values) - 1) // max(1, count - 1)] for i in range(count)]


def _choice(
    ranks: Sequence[int] | None, shown: Sequence[int], world_size: int, slowest: int
) -> str:
    if len(shown) == world_size:
        return "all"
    if ranks is not None:
        return "as chosen"
    return f"first and last ranks of nodes, evenly spread, and rank {slowest}, the slowest"
