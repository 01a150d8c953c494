"""A job with a fault that is known, and what somebody would measure of it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from typing import Any

import ddpsim
from ddpsim.cluster.transfers import duration_ns
from ddpsim.prediction.job import Job as Prepared
from ddpsim.prediction.resolve import resolve
from ddpsim.result.metrics import steps_of
from ddpsim.units import NS_PER_S

COMPUTE_SIGMA, LINK_SIGMA, RANK_SIGMA, NOISE = 0.02, 0.1, 0.01, 0.02
_KEYS = {"accumulation": "ddp.accumulation_steps", "batch": "workload.batch_per_rank"}


@dataclass(frozen=True)
class Job:
    """What a scenario says, what is otherwise in truth, and what is measured.

    `cause`: the key of the true one. `fault`: settings; `slow`: ranks, with how many times as long
    they compute; `all_slow`: all of them; `stretched`: factors of `step_s`; `disk`: samples/s
    that all loaders of a node get. `measured`: quantities beside the step; `steps_on`: numbers of
    GPUs on which the step is measured too; `steps_at`: numbers of micro-batches and of samples at
    which it is, on all GPUs; `log`: what NCCL says, where its owner looked.
    """

    name: str
    cause: str
    workload: Mapping[str, Any]
    cluster: Mapping[str, Any]
    fault: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    steps_on: tuple[int, ...] = ()
    steps_at: tuple[str, ...] = ()
    slow: Mapping[int, float] = field(default_factory=dict)
    all_slow: float = 1.0
    stretched: Mapping[str, float] = field(default_factory=dict)
    disk: float = 0.0
    log: tuple[str, ...] = ()
    ddp: Mapping[str, Any] = field(default_factory=dict)

    def scenario(self, *settings: str) -> ddpsim.Scenario:
        """As its owner states it, but for settings."""
        sections = {"workload": self.workload, "ddp": self.ddp, "cluster": self.cluster}
        document = {"schema": "ddpsim/1", "name": self.name, **sections}
        return ddpsim.load_scenario(deepcopy(document), settings)

    def texts(self, seed: int = 0) -> dict[str, str]:
        """What is measured of it, as `diagnose` takes it; noise is drawn from its name and seed."""
        return Truth(self, random.Random(f"{self.name} {seed}" if seed else self.name)).texts()

    def saved_log(self, folder: Path) -> dict[str, Path]:
        """The option with a file of what NCCL says, if that is known."""
        if not self.log:
            return {}
        path = folder / f"{self.name}.log"
        path.write_text("".join(f"node:41:97 [0] NCCL INFO {line}\n" for line in self.log))
        return {"nccl_log": path}


class Truth:
    """A job as it is: with its fault, other links and compute than stated, and unequal ranks."""

    def __init__(self, job: Job, draw: random.Random) -> None:
        self.job, self.draw = job, draw
        whole = job.scenario(*job.fault)
        self.size, self.per_node = whole.cluster.world_size, whole.cluster.gpus_per_node
        sigma = COMPUTE_SIGMA if whole.workload.step_time else 0.1
        common = job.all_slow * exp(draw.gauss(0, sigma))
        self.factors = {
            rank: common * exp(draw.gauss(0, RANK_SIGMA)) * job.slow.get(rank, 1.0)
            for rank in range(self.size)
        }
        self.links = {
            f"cluster.{key}.bandwidth": link.bandwidth_bytes_per_s * exp(draw.gauss(0, LINK_SIGMA))
            for key in ("intra_node", "inter_node")
            if (link := getattr(whole.cluster, key)) and link.bandwidth_bytes_per_s
        }

    def on(self, gpus: int, *more: str) -> Prepared:
        """The true job on the first GPUs, with `more` settings."""
        nodes = max(1, gpus // self.per_node)
        factors = {rank: self.factors[rank] for rank in range(gpus)}
        settings = [
            *self.job.fault,
            *self.loaders(gpus // nodes),
            *(f"{key}={rate} B/s" for key, rate in self.links.items()),
            *(f"cluster.nodes={nodes}", f"cluster.gpus_per_node={gpus // nodes}"),
            f"cluster.stragglers={{factors: {factors}}}",
            "run.iterations=4",
            *more,
        ]
        return resolve(self.job.scenario(*settings))

    def loaders(self, per_node: int) -> list[str]:
        """Settings of those that share a disk."""
        rate = self.job.disk / per_node
        return [f"workload.data={{rate: {rate} samples/s, workers: 4}}"] if rate else []

    def texts(self) -> dict[str, str]:
        """Each quantity, noisy."""
        whole = self.on(self.size)
        steps = [f"{gpus}: {self.step(self.on(gpus))}" for gpus in self.job.steps_on]
        for at in self.job.steps_at:
            name, count = at.split()
            steps.append(f"{at}: {self.step(self.on(self.size, f'{_KEYS[name]}={count}'))}")
        found = {"measured": ", ".join([*steps, f"{self.size}: {self.step(whole)}"])}
        for quantity in self.job.measured:
            found[quantity] = getattr(self, quantity)(whole)
        return found

    def step(self, whole: Prepared) -> str:
        """Of all ranks of a job."""
        return self.seen(whole.step_s(**self.job.stretched))

    def seen(self, seconds: float) -> str:
        """With a measurement's noise."""
        return f"{1e3 * seconds * exp(self.draw.gauss(0, NOISE))} ms"

    def without_sync(self, whole: Prepared) -> str:
        """Of rank 0, whose loader works ahead."""
        own_s = self.factors[0] * whole.compute_only_s() + self.of_norms_s(whole)
        return self.seen(max(own_s, whole.batches_s))

    def of_norms_s(self, whole: Prepared) -> float:
        """What a micro-batch under no_sync takes beside its own work."""
        if not whole.scenario.workload.sync_batch_norm:
            return 0.0
        one, two = (self.on(self.size, f"ddp.accumulation_steps={n}") for n in (1, 2))
        own_s = two.compute_only_s() - one.compute_only_s()
        return two.step_s() - one.step_s() - own_s

    def exposed(self, whole: Prepared) -> str:
        """Of rank 0, as a profiler shows it."""
        return self.seen(self._of_rank_0(whole, "exposed_comm"))

    def data_wait(self, whole: Prepared) -> str:
        """Of rank 0; none without a loader."""
        waits = whole.scenario.workload.data is not None
        return self.seen(self._of_rank_0(whole, "data_wait") if waits else 0.0)

    def all_reduce(self, whole: Prepared) -> str:
        """Of 64 MiB, as nccl-tests shows it."""
        cost = whole.network.cost.stretched(self.job.stretched.get("network", 1.0))
        spent_ns = duration_ns(cost.transfer("all_reduce", 2**26))
        return f"64 MiB: {self.seen(spent_ns / NS_PER_S)}"

    def _of_rank_0(self, whole: Prepared, part: str) -> float:
        lane = ddpsim.observe(whole.scenario, [0]).ranks[0]
        steps = steps_of(lane)[-3:]
        return sum(getattr(step.breakdown(), part) for step in steps) / len(steps) / NS_PER_S
