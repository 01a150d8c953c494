"""Whether a step that was measured is still the step of a scenario that was changed."""

from __future__ import annotations

from collections.abc import Sequence

from ddpsim.errors import Problem
from ddpsim.scenario.schema import MEASURED, Scenario

__all__ = ["not_measured"]

_OF_A_STEP = ("model", "parameters", "batch_per_rank", "seq_len", "image_size", "precision")


def not_measured(own: Scenario, changed: Scenario, together: str) -> Problem | None:
    """A measured step is of its model, batch, precision and device; None where it still is.

    `together`: how both can be changed.
    """

    def differ(keys: Sequence[str]) -> list[str]:
        ours, theirs = own.workload, changed.workload
        return [f"workload.{key}" for key in keys if getattr(ours, key) != getattr(theirs, key)]

    measured = own.workload.measured_by
    others = differ(_OF_A_STEP)
    if own.cluster.device != changed.cluster.device:
        others.append("cluster.device")
    if not measured or not others or differ(MEASURED):
        return None
    return Problem(
        "--set",
        others[0],
        f"workload.{measured} was measured with another, and says nothing of this one; let it "
        f"change along ({together}), or drop workload.{measured} for an estimate",
    )
