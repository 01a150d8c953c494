"""Smaller micro-batches of the same global batch, where a batch does not fit into memory."""

from __future__ import annotations

from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.schema import Scenario

__all__ = ["split_to_fit"]


def split_to_fit(scenario: Scenario) -> Scenario | None:
    """The fewest micro-batches of the same global batch that fit into memory; None: none do."""
    if scenario.cluster.algorithm == "data_parallel":  # it has no no_sync
        return None
    batch, steps = scenario.workload.batch_per_rank, scenario.ddp.accumulation_steps
    for parts in (parts for parts in range(1, batch + 1) if batch % parts == 0):
        workload = scenario.workload.model_copy(update={"batch_per_rank": batch // parts})
        ddp = scenario.ddp.model_copy(update={"accumulation_steps": parts * steps})
        split = scenario.model_copy(update={"workload": workload, "ddp": ddp})
        if resolve(split).memory().fits:
            return split
    return None
