"""Published steps that set nothing, predicted as a user would: `tests/data/judging-steps.csv`."""

from __future__ import annotations

import gzip
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from published_steps import PublishedStep, estimated_s, published_steps, scenario_of

import ddpsim
from ddpsim.prediction.interval import ROOFLINE
from ddpsim.prediction.uncertainty import edges
from held_out.own_models import MODELS

__all__ = ["Judged", "judged"]

STEPS = MODELS.parent / "judging-steps.csv"


class Judged(NamedTuple):
    """A step as published, and as predicted with its 80 % interval; seconds."""

    step: PublishedStep
    predicted_s: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        """Predicted over published, minus 1."""
        return self.predicted_s / self.step.step_s - 1

    @property
    def is_covered(self) -> bool:
        """Whether the interval holds the step."""
        return self.low_s <= self.step.step_s <= self.high_s


@cache
def judged() -> tuple[Judged, ...]:
    """Predict all rows."""
    models: dict[str, Any] = json.loads(gzip.decompress(MODELS.read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        files = {f"own-{name}": Path(folder) / f"{name}.json" for name in models}
        for file in files.values():
            file.write_text(json.dumps(models[file.stem]), encoding="utf-8")
        return tuple(_judged(step, files.get(step.model)) for step in published_steps(STEPS))


def _judged(step: PublishedStep, file: Path | None) -> Judged:
    if step.head:  # no scenario has the model without its heads
        step_s = estimated_s(step)
        return Judged(step, step_s, *(step_s * edge for edge in edges(ROOFLINE["attention"])))
    scenario = scenario_of(step)
    if file:
        del scenario["workload"]["image_size"]  # the file holds one
        scenario["workload"]["model"] = str(file)
    result = ddpsim.simulate(ddpsim.load_scenario(scenario))
    interval = result.prediction_interval_s
    if interval is None:
        raise ValueError("a step without its interval")
    return Judged(step, result.iteration_time_s.mean, interval.low, interval.high)
