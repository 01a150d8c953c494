"""Steps that users published: tied weights under torch 1.7, and DDP and DeepSpeed on two machines.

Parameter lists in tests/data: pi05 by TensorAuto/OpenTau (pi05/paligemma_with_expert.py), with
transformers' PaliGemma, and TinyLlama 1.1B by its config.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from validation.folders import DATA
from validation.markdown import markdown

import ddpsim
from ddpsim.prediction.api import predict
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.schema import Scenario
from held_out.predicted import Predicted, predicted_s

SHARED = tuple(f"b{number}" for number in range(1, 13))
_RATES = {  # GB/s, of which the rows of other models take the best one
    "nvlink bridge": (36, 40, 44, 48, 52),
    "NCCL_P2P_DISABLE=1": (6.0, 6.3, 6.6, 6.9),
    "pcie": (0.6, 0.62, 0.64, 0.66, 0.68, 0.7),
}
# whyNLP/tinyllama at 41c63b387259, ds_config.json; DeepSpeed 0.9.5
_OF_TINYLLAMA = {
    "stage": 2,
    "overlap_comm": True,
    "reduce_bucket_size": 2e8,
    "use_multi_rank_bucket_allreduce": False,
    "params": "bfloat16",
    "version": "0.18",
}


@cache
def _rows() -> dict[str, dict[str, str]]:
    file = Path(os.environ["DDPSIM_REFERENCE_DATA"]) / "published" / "user-boxes.csv"
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith("#")]
    return {row["id"]: row for row in csv.DictReader(lines)}


def document(row: dict[str, str]) -> dict[str, Any]:
    """The scenario of a row of user-boxes.csv, as its thread tells it."""
    ddp: dict[str, Any] = {"accumulation_steps": int(row["accumulation"])}
    workload: dict[str, Any] = {"step_time": f"{row['one_gpu_ms']} ms"}
    workload |= {"batch_per_rank": int(row["batch"]), "optimizer": {"name": "adamw"}}
    if row["id"] in SHARED:
        ddp |= {"torch": "1.7", "find_unused_parameters": True}
        workload |= {"model": row["model"], "seq_len": int(row["seq_or_image"])}
    elif row["gpu"] == "rtx-4090":
        workload |= {"parameters": str(DATA / "tinyllama-parameters.csv"), "precision": "amp-bf16"}
        workload["step_time"] = {"total": workload["step_time"], "optimizer": "50 ms"}  # assumed
    elif row["model"] in ("vgg16", "resnet50"):
        workload |= {"model": row["model"], "precision": row["precision"]}
    else:
        workload |= {"parameters": str(DATA / "pi05-parameters.csv"), "read_loss_every": 1}
    if "ZeRO" in row["strategy"]:
        stage, is_old = int(row["strategy"][-1]), row["gpu"] == "rtx-4090"
        # OpenTau's lock file has DeepSpeed 0.18.5
        own = _OF_TINYLLAMA if is_old else {"overlap_comm": True, "version": "0.18.5"}
        ddp |= {"strategy": "deepspeed", "deepspeed": {**own, "stage": stage}}
    elif row["id"] in SHARED or row["gpu"] == "rtx-4090":
        workload["clip_grad_norm"] = True
    gpus = int(row["gpus_per_node"])
    cluster: dict[str, Any] = {"device": row["gpu"], "nodes": 1, "gpus_per_node": gpus}
    return {"schema": "ddpsim/1", "workload": workload, "ddp": ddp, "cluster": cluster}


def _scenario(row: dict[str, str], rate: float | None = None) -> Scenario:
    """`rate`: of the path between the two GPUs, in GB/s."""
    known = document(row)
    if rate:
        known["cluster"]["intra_node"] = {"bandwidth": f"{rate} GB/s"}
    return ddpsim.load_scenario(known)


def _rate(own: dict[str, str], others: Iterable[dict[str, str]]) -> float:
    """The one by which steps of others over the same path are predicted best."""
    same = [row for row in others if row["path"] == own["path"]]

    def error(rate: float) -> float:
        steps_s = [resolve(_scenario(row, rate)).step_s() for row in same]
        pairs = zip(steps_s, same, strict=True)
        return median(abs(1e3 * each / float(row["step_ms"]) - 1) for each, row in pairs)

    return min(_RATES[own["path"]], key=error)


def _step(row: dict[str, str], rate: float | None = None) -> Predicted:
    return Predicted(float(row["step_ms"]) / 1e3, *predicted_s(predict(_scenario(row, rate))))


@cache
def shared_weight_steps() -> dict[str, Predicted]:
    """GPT-2 on two RTX 3090, each at the rate that steps of the other two models set."""
    rows = [_rows()[key] for key in SHARED]
    first = {(row["model"], row["path"]): row for row in reversed(rows)}
    rates = {
        key: _rate(row, (each for each in rows if each["model"] != row["model"]))
        for key, row in first.items()
    }
    return {row["id"]: _step(row, rates[row["model"], row["path"]]) for row in rows}


@cache
def deepspeed_steps() -> dict[str, Predicted]:
    """Two jobs under DDP and DeepSpeed; steps under DDP set the rate of the two RTX 4090's path."""
    rows = _rows()
    by_ddp = [rows["b13"], rows["b14"]]
    steps = {
        key: _step(rows[key], _rate(rows[key], (row for row in by_ddp if row["id"] != key)))
        for key in ("b13", "b14", "b15")
    }
    return steps | {key: _step(rows[key]) for key in ("b22", "b23", "b24")}


def steps_table(steps: dict[str, Predicted]) -> str:
    """A line a step."""
    head = ["job", "GPUs", "measured", "predicted", "error", "80 % interval"]
    return markdown(head, [_line(_rows()[key], step) for key, step in steps.items()])


def _line(row: dict[str, str], step: Predicted) -> Sequence[str]:
    length = f", {row['seq_or_image']} tokens" if row["seq_or_image"] else ""
    more = f", accumulation {row['accumulation']}" if row["gpu"] == "rtx-4090" else ""
    strategy = "" if row["id"] in SHARED else f", {row['strategy']}"
    times = (f"{1e3 * each:.0f} ms" for each in (step.published, step.predicted))
    return (
        f"{row['model']}{length}{more}{strategy}",
        f"{row['gpus_per_node']} {row['gpu']}, {row['path']}",
        *times,
        f"{step.error:+.1%}",
        f"{1e3 * step.low:.0f} to {1e3 * step.high:.0f} ms",
    )
