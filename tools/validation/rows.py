"""Measured steps beside predictions of them, and the errors of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddpsim.engine.batch import run_many
from ddpsim.engine.noise import draw_slowdowns
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.prediction.job import Job
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.resolve import resolve
from ddpsim.result.summary import mean_step_s
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from validation.markdown import markdown


@dataclass(frozen=True)
class Row:
    """One measured step (seconds) beside our prediction and the naive ones.

    `knowing_ddp_s`: ours, given the measured step under DDP on one device too.
    """

    label: str
    case: str
    measured_s: float
    predicted_s: float
    equal_gpus_s: float
    compute_only_s: float
    no_overlap_s: float
    perfect_overlap_s: float
    knowing_ddp_s: float | None = None

    def error(self, seconds: float | None = None) -> float:
        """(predicted - measured) / measured, of ours or of another prediction."""
        return (self.predicted_s if seconds is None else seconds) / self.measured_s - 1


def job_of(scenario: dict[str, Any], parts: Parts | None = None) -> Job:
    """A scenario given as a mapping, resolved; `parts`: what was built for others."""
    document = Document.from_mapping({"schema": "ddpsim/1"} | scenario, Path())
    return resolve(parse(document), parts=parts)


def step_s(job: Job) -> float:
    """The mean steady step of a job, with its stragglers."""
    return mean_step_s(run(_request(job)).timeline)


def steps_s(jobs: Sequence[Job]) -> list[float]:
    """The same of each of these, which are simulated together."""
    return [step.mean_s for step in run_many([_request(job) for job in jobs])]


def _request(job: Job) -> Request:
    scenario = job.scenario
    steps, warmup = job.program.iterations, job.program.warmup
    slowdowns = draw_slowdowns(scenario.cluster, scenario.run, steps, warmup=warmup)
    return Request(job.program, job.network.cost, scenario.cluster.world_size, slowdowns)


def levels(rows: tuple[Row, ...]) -> tuple[float, float]:
    """Median and worst absolute error."""
    errors = [abs(row.error()) for row in rows]
    return median(errors), max(errors)


def levels_knowing_ddp(rows: tuple[Row, ...]) -> tuple[float, float]:
    """The same of the rows that are given the step under DDP on one device, of that prediction."""
    errors = [abs(row.error(row.knowing_ddp_s)) for row in rows if row.knowing_ddp_s]
    return median(errors), max(errors)


def levels_text(rows: tuple[Row, ...]) -> str:
    """Median and worst absolute error, in words."""
    return in_words(*levels(rows))


def in_words(middle: float, worst: float) -> str:
    """These two errors in words."""
    return f"median {middle:.1%}, worst {worst:.1%}"


LINKS = {
    1: "none",
    2: "one NVLink",
    4: "log of 4 V100",
    8: "preset v100-sxm-32gb",
    16: "preset v100-sxm-32gb",
}


def row_table(rows: tuple[Row, ...], case: str) -> str:
    """The error of ours and of the naive predictions, a line a row; `case` is a column's head."""
    published = any(row.knowing_ddp_s for row in rows)
    head = ["", case, *(["network"] if published else []), "measured", "predicted", "error"]
    head += ["knowing DDP", "equal GPUs"] if published else []
    head += ["compute only", "no overlap", "perfect overlap"]
    lines = []
    for row in rows:
        cells = [row.label, row.case, *([LINKS[int(row.case)]] if published else [])]
        cells += [f"{row.measured_s * 1e3:.0f} ms", f"{row.predicted_s * 1e3:.1f} ms"]
        naive = (row.compute_only_s, row.no_overlap_s, row.perfect_overlap_s)
        others = (row.knowing_ddp_s, row.equal_gpus_s, *naive) if published else naive
        errors = ("" if other is None else f"{row.error(other):+.1%}" for other in others)
        cells += [f"**{row.error():+.1%}**", *errors]
        lines.append(cells)
    return markdown(head, lines)
