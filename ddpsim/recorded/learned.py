"""A scenario to start from, of what files tell of a job."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ddpsim.result.learned import Learned
from ddpsim.wording import counted

_MODEL, _SHARDED_MODEL, _BATCH = "resnet50", "gpt2", 32
_DEVICE, _FP8_DEVICE = "a100-sxm-80gb", "h100-sxm-80gb"

_PATHS = (("workload", "trace"), ("cluster", "all_reduce"))


@dataclass(frozen=True)
class StartingPoint:
    """A scenario as data, and each assumption in it, in words."""

    document: dict[str, Any]
    assumed: tuple[str, ...]


def starting_point(learned: Iterable[Learned]) -> StartingPoint:
    """The scenario that files make together; the first file with a key sets it."""
    document: dict[str, Any] = {"schema": "ddpsim/1"}
    assumed: list[str] = []
    global_batch: int | None = None
    for each in learned:
        assumed += each.assumed
        global_batch = global_batch or each.global_batch
        for section, keys in each.keys.items():
            document[section] = {**deepcopy(dict(keys)), **document.get(section, {})}
    workload, cluster = document.setdefault("workload", {}), document.setdefault("cluster", {})
    if not {"model", "trace", "parameters"} & set(workload):
        is_sharded = document.get("ddp", {}).get("strategy", "ddp") != "ddp"
        workload["model"] = _SHARDED_MODEL if is_sharded else _MODEL
        assumed.append(f"the model: {workload['model']} stands for yours (workload.model)")
    if "batch_per_rank" not in workload:
        workload["batch_per_rank"], reason = _batch_per_rank(document, global_batch)
        assumed.append(reason)
    if "optimizer" not in workload and "trace" not in workload:
        usual = "sgd" if workload.get("model") == _MODEL else "adamw"
        workload["optimizer"] = {"name": usual}
        assumed.append(f"the optimizer: {usual} stands for yours (workload.optimizer)")
    if not {"device", "machine"} & set(cluster):
        is_on_cpu = document.get("ddp", {}).get("backend") == "gloo"
        usual = _FP8_DEVICE if "float8" in workload else _DEVICE
        cluster["device"] = "cpu-core" if is_on_cpu else usual
        assumed.append(f"the device: {cluster['device']} stands for yours (cluster.device)")
    if "nodes" not in cluster:
        cluster |= {"nodes": 1, "gpus_per_node": cluster.get("gpus_per_node", 1)}
        assumed.append("one node (cluster.nodes, cluster.gpus_per_node)")
    return StartingPoint(document, tuple(dict.fromkeys(assumed)))


def _batch_per_rank(document: Mapping[str, Any], global_batch: int | None) -> tuple[int, str]:
    """Samples of a micro-batch, by those of a step on all ranks where they are told; and why."""
    cluster, ddp = document["cluster"], document.get("ddp", {})
    ranks = cluster.get("nodes", 1) * cluster.get("gpus_per_node", 1)
    batches = ranks * ddp.get("accumulation_steps", 1)
    is_known = "machine" not in cluster or "gpus_per_node" in cluster
    if not global_batch or not is_known or global_batch % batches:
        return _BATCH, f"{_BATCH} samples a rank and step (workload.batch_per_rank)"
    each = global_batch // batches
    on = f"{counted(ranks, 'rank')} for its {global_batch} samples a step"
    return each, f"{on}, {each} in a micro-batch (workload.batch_per_rank)"


def scenario_text(document: Mapping[str, Any], notes: Sequence[str], folder: Path) -> str:
    """YAML with `notes` as comments above it; its paths are those of the current folder."""
    data = deepcopy(dict(document))
    for section, key in _PATHS:
        if data.get(section, {}).get(key):
            data[section][key] = os.path.relpath(data[section][key], folder)
    written = StringIO()
    yaml = YAML()
    yaml.width = 1000
    yaml.dump(data, written)
    return "".join(f"# {note}\n" for note in notes) + written.getvalue()
