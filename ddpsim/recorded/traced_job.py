"""The scenario of a job from the traces of its ranks: what they tell, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpsim.importers.kineto.measured import KinetoStep
from ddpsim.importers.kineto.ranks import RankTraces
from ddpsim.recorded.learned import StartingPoint
from ddpsim.scenario import catalog
from ddpsim.scenario.cluster import NEWEST_NCCL, OLDEST_NCCL
from ddpsim.scenario.ddp import Ddp
from ddpsim.strategies.ddp.buckets import plan_buckets
from ddpsim.workload.model import Model

_USUAL_CAPS_MB = (
    *(None, 1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, 50, 64),
    *(100, 128, 200, 256, 512, 1024),
)
_GPUS_PER_NODE = 8


def traced_job(traces: RankTraces) -> StartingPoint:
    """The scenario of traced steps, which names the traces, and what it assumes."""
    typical = traces.typical
    nodes, gpus = usual_layout(traces.world_size or 1)
    device, unknown = _device(traces)
    workload: dict[str, Any] = {"trace": traces.source, "batch_per_rank": 1}
    if typical.optimizer in ("sgd", "adam", "adamw"):
        workload["optimizer"] = {"name": typical.optimizer}
    cluster: dict[str, Any] = {"device": device, "nodes": nodes, "gpus_per_node": gpus}
    if nodes * gpus > 1 and traces.points:
        cluster["all_reduce"] = traces.source
    cluster |= nccl_key(typical.nccl)
    document = {
        "schema": "ddpsim/1",
        "name": f"replay of {traces.source}",
        "workload": workload,
        "ddp": {"backend": "nccl" if typical.on_gpu else "gloo", **_options(traces)},
        "cluster": cluster,
        "run": {"allow_extrapolation": True},
    }
    return StartingPoint(document, (*_assumed(traces, nodes, gpus), *unknown))


def _options(traces: RankTraces) -> dict[str, Any]:
    """The options of DDP that a trace shows, where they are not the usual ones."""
    step = traces.typical.typical
    options: dict[str, Any] = {}
    if step.earlier:
        options["accumulation_steps"] = len(step.micro_batches)
    if step.earlier and step.reductions > 1:
        options["no_sync"] = False
    if len(step.bucket_elements or ()) > 1 and not step.sends_early:
        options["bucket_order"] = "reversed"
    if traces.looks_for_unused:
        options["find_unused_parameters"] = True
    return options


def nccl_key(version: str | None) -> dict[str, str]:
    """NCCL's version as a key of the cluster, if ddpsim has its tables."""
    parts = (version or "").split(".")
    is_known = len(parts) in (2, 3) and all(part.isdecimal() for part in parts) and parts[0] == "2"
    return (
        {"nccl": version or ""} if is_known and OLDEST_NCCL <= int(parts[1]) <= NEWEST_NCCL else {}
    )


def usual_layout(ranks: int) -> tuple[int, int]:
    """Nodes, and ranks of each, which no trace has."""
    if ranks <= _GPUS_PER_NODE:
        return 1, ranks
    of_a_node = _GPUS_PER_NODE if ranks % _GPUS_PER_NODE == 0 else 1
    return ranks // of_a_node, of_a_node


def _device(traces: RankTraces) -> tuple[str, tuple[str, ...]]:
    """A preset's name, and an assumption where it is only the nearest."""
    name = traces.typical.device
    if not traces.on_gpu:
        return "cpu-core", ()
    try:
        return catalog.resolve("device", name or ""), ()
    except ValueError:
        usual = next((each for each in _FAMILIES if each in (name or "").lower()), "a100")
        nearest = catalog.resolve("device", usual)
        return nearest, (f"the device is {nearest}: {name} is not a preset (cluster.device)",)


_FAMILIES = ("b300", "b200", "h200", "h100", "a100", "v100", "mi300x", "mi250x", "t4", "l4", "a10g")


def _assumed(traces: RankTraces, nodes: int, gpus: int) -> Iterator[str]:
    yield "a step has one sample a rank: no trace tells the batch (workload.batch_per_rank)"
    if nodes * gpus > 1:
        yield f"{nodes} x {gpus} ranks: no trace tells the nodes (cluster.nodes, gpus_per_node)"
    if not traces.is_whole:
        count, size = len(traces.traces), traces.world_size
        yield (
            f"all-reduces take what {count} of {size} ranks show, waits for the others included; "
            "record every rank, and give the folder"
        )


def with_bucket_caps(model: Model, ddp: Ddp, step: KinetoStep) -> tuple[Ddp, str]:
    """The options under which DDP makes the buckets that were traced, and in words how they are.

    An explicit cap and the default one differ in the first bucket.
    """
    traced = step.bucket_elements
    if not traced:
        return ddp, ""
    for cap in (ddp.bucket_cap_mb, *_USUAL_CAPS_MB):
        tried = ddp.model_copy(update={"bucket_cap_mb": cap})
        if _elements(model, tried) == sorted(traced):
            return tried, "" if cap == ddp.bucket_cap_mb else f"ddp.bucket_cap_mb: {cap}"
    return ddp, ""


def _elements(model: Model, ddp: Ddp) -> list[int]:
    """The elements of each bucket after the rebuild, ascending."""
    buckets = plan_buckets(model.parameters, model.ready_order, ddp, model.tied).rebuilt
    return sorted(sum(model.parameters[i].numel for i in bucket) for bucket in buckets)
