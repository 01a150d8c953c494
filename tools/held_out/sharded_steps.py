"""Published steps of language models under FSDP, each as a whole job: its time, and what fits.

Constants are those that other publishers' steps set; communication is that of the machine's preset,
but where the publisher tells its network. MPT and Llama 2 are captured models. Llama 8B is the
zoo's, as torchtitan trains it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ddpsim.prediction.api import load_scenario, predict
from ddpsim.result.model import Result
from ddpsim.scenario.cluster import Stragglers
from ddpsim.scenario.schema import Scenario
from held_out.efficiency import Place, chip_of
from held_out.errors import constants
from held_out.judging import own_models
from held_out.language_steps import language_models, language_rows
from held_out.predicted import Predicted, predicted_s

__all__ = ["Judged", "judged_steps", "levels_table", "steps_of_unequal_gpus"]

FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "published-sharded-steps.csv"
_MACHINES = {"h100-sxm-80gb": "dgx-h100", "a100-sxm-80gb": "dgx-a100"}


class Job(NamedTuple):
    """A published step; `model`: the width of an MPT, a Llama 2, or a name of the zoo."""

    publisher: str
    model: str
    seq_len: int
    gpus: int
    device: str
    micro_batch: int
    accumulation: int
    checkpointing: str
    step_s: float
    compiled: bool = False
    float8: bool = False
    memory_gib: float | None = None


@dataclass(frozen=True)
class Judged(Predicted):
    """A job, and what is predicted of it without its publisher."""

    job: Job
    reserved_bytes: int
    fits: bool

    @property
    def memory_error(self) -> float | None:
        """Predicted over published reserved memory, minus 1; None where none is published."""
        return self.job.memory_gib and self.reserved_bytes / 2**30 / self.job.memory_gib - 1


def _jobs() -> Iterator[Job]:
    for row in language_rows():
        step, model = row.step, str(row.step.width)
        seconds = step.accumulation * row.step_s
        yield Job(
            *(row.publisher, model, step.seq_len, step.gpus, step.device, step.micro_batch),
            *(step.accumulation, "full" if step.checkpointing else "none", seconds),
        )
    lines = [line for line in FILE.read_text("utf-8").splitlines() if not line.startswith("#")]
    for values in csv.DictReader(lines):
        yield Job(
            *(values["source"], values["model"], int(values["seq_len"]), int(values["gpus"])),
            *(values["device"], int(values["micro_batch"]), int(values["accumulation"])),
            *(values["checkpointing"], float(values["step_s"])),
            *(values["compiled"] == "yes", values["float8"] == "yes"),
            float(values["memory_gib"]) if values["memory_gib"] else None,
        )


@cache
def judged_steps(every: int = 1, publisher: str = "") -> tuple[Judged, ...]:
    """All of them, or one in so many, of a publisher or of all."""
    jobs = (job for job in _jobs() if publisher in ("", job.publisher))
    with TemporaryDirectory() as folder:
        for name, table in (language_models() | own_models()).items():
            (Path(folder) / f"{name}.json").write_text(json.dumps(table), "utf-8")
        return tuple(_judged(job, Path(folder)) for job in islice(jobs, 0, None, every))


def _judged(job: Job, folder: Path) -> Judged:
    result = _predicted(_scenario(job, folder), job)
    times_s, memory = (job.step_s, *predicted_s(result)), result.memory_bytes_per_gpu
    return Judged(*times_s, job, memory.reserved or memory.total, memory.fits)


def steps_of_unequal_gpus(job: Job, sigma: float, seeds: Iterable[int]) -> list[float]:
    """Seconds of torchtitan's step where GPUs differ by so much, drawn with each seed."""
    scenario = _scenario(job, FILE.parent)
    stragglers = Stragglers.model_validate({"distribution": "lognormal", "sigma": sigma})
    cluster = scenario.cluster.model_copy(update={"stragglers": stragglers})
    runs = (scenario.run.model_copy(update={"seed": seed}) for seed in seeds)
    drawn = (scenario.model_copy(update={"cluster": cluster, "run": run}) for run in runs)
    return [_predicted(each, job).iteration_time_s.mean for each in drawn]


def _scenario(job: Job, folder: Path) -> Scenario:
    """FSDP1 as llm-foundry and fms-fsdp call it; torchtitan's FSDP2.

    llm-foundry reduces each micro-batch. fms-fsdp trains 7B under HSDP.
    """
    is_fsdp1 = job.publisher != "torchtitan"
    strategy = "fsdp1" if is_fsdp1 else "fully_shard"
    file = folder / f"{job.model}.json"
    types = {"param": "bfloat16", "reduce": "bfloat16" if is_fsdp1 else "float32"}
    options: dict[str, Any] = {"mixed_precision": types}
    if job.model == "llama2-7b":
        options["sharding_strategy"] = "HYBRID_SHARD"
    workload = {
        "model": str(file) if file.exists() else job.model,
        "batch_per_rank": job.micro_batch,
        "seq_len": job.seq_len,
        "precision": "amp-bf16",
        "optimizer": {"name": "adamw", "weight_decay": 0.01, "fused": not is_fsdp1},
        "checkpointing": {"every": 2} if job.checkpointing == "every 2" else job.checkpointing,
    }
    if job.compiled:
        workload["compile"] = "blocks"
    if job.float8:
        workload["float8"] = {"all_gather": True, "precompute_scales": True, "skip": ["lm_head"]}
    ddp: dict[str, Any] = {"strategy": strategy, strategy: options}
    if job.accumulation > 1:
        ddp |= {"accumulation_steps": job.accumulation, "no_sync": False}
    cluster = _cluster(job) | {"nodes": job.gpus // 8}
    told = {"schema": "ddpsim/1", "workload": workload, "ddp": ddp, "cluster": cluster}
    return load_scenario(told)


def _cluster(job: Job) -> dict[str, Any]:
    if job.publisher == "ibm-fms" and job.device.startswith("a100"):
        network = {"bandwidth": "400 Gbit/s", "transport": "rdma"}
        return {"device": job.device, "gpus_per_node": 8, "inter_node": network}
    machine = _MACHINES.get(job.device)
    return {"machine": machine} if machine else {"device": job.device, "gpus_per_node": 8}


def _predicted(scenario: Scenario, job: Job) -> Result:
    """On a device with what other publishers' steps say of its GPU."""
    reached = constants(job.publisher).reached.of(Place(chip_of(job.device), "half"))
    device = scenario.cluster.device
    update = {"matmul_efficiency": dict.fromkeys(device.peak_flops_per_s, reached)}
    cluster = scenario.cluster.model_copy(update={"device": device.model_copy(update=update)})
    return predict(scenario.model_copy(update={"cluster": cluster}))


def levels_table() -> str:
    """By kind of job: how many, median error, bias, the worst, coverage, and how many fit."""
    lines = ["| steps | number | median | bias | worst | 80 % interval holds | said to fit |"]
    lines.append("|---|---|---|---|---|---|---|")
    kinds = {
        "MPT, blocks not checkpointed": lambda job: (
            (job.model.isdigit(), job.checkpointing) == (True, "none")
        ),
        "MPT, checkpointed": lambda job: (job.model.isdigit(), job.checkpointing) == (True, "full"),
        "Llama 3.1 8B (torchtitan)": lambda job: job.publisher == "torchtitan",
        "Llama 2, 7B to 70B (fms-fsdp)": lambda job: job.publisher == "ibm-fms",
        "all": lambda _: True,
    }
    for name, is_such in kinds.items():
        found = [judged for judged in judged_steps() if is_such(judged.job)]
        errors = [judged.error for judged in found]
        lines.append(
            f"| {name} | {len(found)} | {median(map(abs, errors)):.1%} | {median(errors):+.1%} "
            f"| {max(errors, key=abs):+.0%} | {fmean(one.is_covered for one in found):.0%} "
            f"| {sum(one.fits for one in found)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    for one in judged_steps():
        print(f"{one.error:+6.1%} {one.is_covered:d} {one.reserved_bytes / 1e9:6.1f} GB {one.job}")
    print(levels_table())
