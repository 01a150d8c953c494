"""A step that was measured must still be the step of a scenario that was changed."""

from __future__ import annotations

from collections.abc import Sequence

from ddpsim.errors import Problem, ScenarioError
from ddpsim.scenario.schema import MEASURED, Scenario

__all__ = ["check_measured"]

_OF_A_STEP = ("model", "parameters", "batch_per_rank", "seq_len", "image_size", "precision")


def check_measured(own: Scenario, changed: Scenario, together: str) -> None:
    """Raise ScenarioError where a step was measured with another model, batch, precision or device.

    `together`: how both can be changed.
    """

    def differ(keys: Sequence[str]) -> list[str]:
        ours, theirs = own.workload, changed.workload
        return [f"workload.{key}" for key in keys if getattr(ours, key) != getattr(theirs, key)]

    measured = own.workload.measured_by
    others = differ(_OF_A_STEP)
    if own.cluster.device != changed.cluster.device:
        others.append("cluster.device")
    if measured and others and not differ(MEASURED):
        reason = (
            f"workload.{measured} was measured with another, and says nothing of this one; let it "
            f"change along ({together}), or drop workload.{measured} for an estimate"
        )
        raise ScenarioError([Problem("--set", others[0], reason)])
