"""What a file tells of a job: facts in words, keys of a scenario, a measured step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Learned", "StartingPoint", "starting_point"]

_MODEL, _SHARDED_MODEL, _BATCH = "resnet50", "gpt2", 32
_DEVICE, _FP8_DEVICE = "a100-sxm-80gb", "h100-sxm-80gb"


@dataclass(frozen=True)
class Learned:
    """One thing that a file turned out to be.

    `keys`: of a scenario, by section; `step_s`: a step that was measured; `option`: one of
    `ddpsim diagnose` that takes the file. `tells_nothing`: the facts say what it lacks.
    """

    file: str
    kind: str
    facts: tuple[str, ...]
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    step_s: float | None = None
    option: str | None = None
    assumed: tuple[str, ...] = ()
    tells_nothing: bool = False


@dataclass(frozen=True)
class StartingPoint:
    """A scenario as data, and what in it nobody told."""

    document: dict[str, Any]
    assumed: tuple[str, ...]


def starting_point(learned: Iterable[Learned]) -> StartingPoint:
    """The scenario that files tell together; of a key that two have, the first is taken."""
    document: dict[str, Any] = {"schema": "ddpsim/1"}
    assumed: list[str] = []
    for each in learned:
        assumed += each.assumed
        for section, keys in each.keys.items():
            document[section] = {**deepcopy(dict(keys)), **document.get(section, {})}
    workload, cluster = document.setdefault("workload", {}), document.setdefault("cluster", {})
    if not {"model", "trace", "parameters"} & set(workload):
        is_sharded = document.get("ddp", {}).get("strategy", "ddp") != "ddp"
        workload["model"] = _SHARDED_MODEL if is_sharded else _MODEL
        assumed.append(f"the model: {workload['model']} stands for yours (workload.model)")
    if "batch_per_rank" not in workload:
        workload["batch_per_rank"] = _BATCH
        assumed.append(f"{_BATCH} samples a rank and step (workload.batch_per_rank)")
    if not {"device", "machine"} & set(cluster):
        is_on_cpu = document.get("ddp", {}).get("backend") == "gloo"
        usual = _FP8_DEVICE if "float8" in workload else _DEVICE
        cluster["device"] = "cpu-core" if is_on_cpu else usual
        assumed.append(f"the device: {cluster['device']} stands for yours (cluster.device)")
    if "nodes" not in cluster:
        cluster |= {"nodes": 1, "gpus_per_node": cluster.get("gpus_per_node", 1)}
        assumed.append("one node (cluster.nodes, cluster.gpus_per_node)")
    return StartingPoint(document, tuple(dict.fromkeys(assumed)))
