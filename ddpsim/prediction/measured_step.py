"""Check that a measured step is still that of a scenario with changed settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpsim.errors import DdpsimError, Problem, ScenarioError
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.workload import MEASURED

_OF_A_STEP = (
    *("model", "parameters", "batch_per_rank", "seq_len", "image_size", "precision"),
    *("compile", "memory_format", "attention", "checkpointing", "set_to_none"),
)


def as_stated(document: Document) -> Scenario | None:
    """The scenario without its `--set`; None where there is none, or it is invalid without."""
    try:
        return None if document.stated is None else parse(document.stated)
    except ScenarioError:
        return None


def check_measured(original: Scenario, changed: Scenario, together: str) -> None:
    """Raise ScenarioError where a step was measured with another model, batch, precision or device.

    Or with another optimizer, if the step has its time. `together`: how to change the step too.
    """

    def differ(keys: Sequence[str]) -> list[str]:
        ours, theirs = original.workload, changed.workload
        return [f"workload.{key}" for key in keys if getattr(ours, key) != getattr(theirs, key)]

    measured = original.workload.measured_by
    others = differ(_OF_A_STEP)
    if original.cluster.device != changed.cluster.device:
        others.append("cluster.device")
    if not others and measured and differ(["optimizer"]) and _take_as_long(original, changed):
        others.append("workload.optimizer")
    if measured and others and not differ(MEASURED):
        reason = (
            f"workload.{measured} was measured with another, and says nothing of this one; let it "
            f"change along ({together}), or drop workload.{measured} for an estimate"
        )
        raise ScenarioError([Problem("--set", others[0], reason)])


def _take_as_long(one: Scenario, other: Scenario) -> bool:
    """Whether the computes of two scenarios do; False where one is refused, elsewhere too."""
    try:
        first_s, second_s = (resolve(s).compute_only_s() for s in (one, other))
    except DdpsimError:
        return False
    return math.isclose(first_s, second_s, rel_tol=1e-6)
