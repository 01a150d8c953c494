"""A scenario on one number of GPUs, as it was stated: what a hypothesis changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ddpsim.cluster.cost import LinkCost, ScheduledCost
from ddpsim.cluster.logs import LOGS
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.topology.host import is_nvlink
from ddpsim.cluster.wires import inside, link_of
from ddpsim.prediction.api import predict
from ddpsim.prediction.job import Job
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import Result
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.document import Document
from ddpsim.scenario.links import InterNode, IntraNode
from ddpsim.scenario.load import parse
from ddpsim.scenario.schema import Scenario

PEER_TRANSPORTS = ("P2P", "PXB")  # of NCCL, from GPU to GPU
_STEPS = 3  # of a run with other traffic
_FILES = {"workload": ("profile", "trace", "parameters"), "cluster": (*LOGS, "profile")}


@dataclass(frozen=True)
class Change:
    """What is different in a job: settings as `--set` takes them, and factors without a key.

    `factors`: as `Job.step_s` takes them.
    """

    settings: tuple[str, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Case:
    """A scenario and its job on one layout; `whole`: on all of the scenario's own ranks.

    `factors`: those of every change to it, as a `Change` has them. A case keeps its simulations,
    which several diagnoses of one scenario share.
    """

    stated: Scenario
    document: Document
    job: Job
    parts: Parts
    whole: bool
    factors: Mapping[str, float] = field(default_factory=dict)
    _jobs: dict[tuple[str, ...], Job] = field(init=False, repr=False, default_factory=dict)
    _others: dict[tuple[Any, ...], Case] = field(init=False, repr=False, default_factory=dict)

    @classmethod
    def of(cls, scenario: Scenario) -> Case:
        """The scenario as it stands; raises ScenarioError.

        Its noise is left out, and of other traffic, which comes and goes, few steps are simulated.
        """
        parts = Parts()
        calm = scenario.having("run", iterations=min(scenario.run.iterations, _STEPS))
        return cls(scenario, _document(calm), resolve(calm, parts=parts), parts, whole=True)

    def on(
        self,
        nodes: int,
        gpus_per_node: int,
        accumulation: int | None = None,
        batch: int | None = None,
    ) -> Case:
        """Puts this job on its first ranks alone, or gives it other micro-batches or samples.

        Links price the all-reduces there, as a log is of the scenario's own ranks. A measured step
        grows with its samples (assumed). Raises ScenarioError where the job does not fit.
        """
        layout = self.cluster.nodes, self.cluster.gpus_per_node
        changes: list[str] = []
        if (nodes, gpus_per_node) != layout:
            changes += [f"cluster.nodes={nodes}", f"cluster.gpus_per_node={gpus_per_node}"]
            changes += _without_others(self.cluster, nodes, gpus_per_node)
            share = gpus_per_node if self.scenario.ddp.shards_in_nodes else nodes * gpus_per_node
            if not self.scenario.ddp.reshards_among(share):
                changes.append("ddp.fully_shard.reshard_after_forward=default")
        if accumulation not in (None, self.scenario.ddp.accumulation_steps):
            changes.append(f"ddp.accumulation_steps={accumulation}")
        samples = self.scenario.workload.batch_per_rank
        if self.is_estimated and batch not in (None, samples):
            changes.append(f"workload.batch_per_rank={batch}")
        times = (batch or samples) / samples
        factors = {} if self.is_estimated or times == 1 else {"compute": times, "data": times}
        if not (changes or factors):
            return self
        key = (*changes, times)
        if key not in self._others:
            document = self.document.changed(changes)
            job = resolve(parse(document), parts=self.parts)
            whole = self.whole and (nodes, gpus_per_node) == layout
            self._others[key] = Case(self.stated, document, job, self.parts, whole, factors)
        return self._others[key]

    def changed(self, change: Change) -> Job:
        """The job with a change; raises ScenarioError where it does not fit this scenario.

        One job for all measurements, which simulates each of its steps once.
        """
        if not change.settings:
            return self.job
        if change.settings not in self._jobs:
            document = self.document.changed(change.settings)
            self._jobs[change.settings] = resolve(parse(document), parts=self.parts)
        return self._jobs[change.settings]

    @property
    def scenario(self) -> Scenario:
        """The scenario as stated."""
        return self.job.scenario

    @property
    def cluster(self) -> Cluster:
        """The cluster as stated."""
        return self.job.scenario.cluster

    @property
    def is_estimated(self) -> bool:
        """Whether compute times are estimated, so that they follow the scenario's options."""
        return self.job.model.basis == "roofline"

    @property
    def is_ddp(self) -> bool:
        """Whether gradients go through DDP's buckets."""
        return self.cluster.algorithm != "data_parallel" and self.scenario.ddp.is_ddp

    @property
    def has_links(self) -> bool:
        """Whether NCCL's all-reduces are priced by links, which can be others."""
        return isinstance(self.job.network.plain_cost, NcclCost)

    @property
    def is_priced_by_links(self) -> bool:
        """Whether all-reduces are priced by links, NCCL's or not, each of which can be weak."""
        costs = (NcclCost, LinkCost, ScheduledCost)
        return self.cluster.world_size > 1 and isinstance(self.job.network.plain_cost, costs)

    @property
    def intra(self) -> IntraNode | None:
        """The links in a node, where all-reduces use them."""
        link = link_of(self.cluster, "intra_node") if self.cluster.gpus_per_node > 1 else None
        return link if isinstance(link, IntraNode) and self.has_links else None

    @property
    def has_nvlink(self) -> bool:
        """Whether NVLink connects the GPUs of a node."""
        return self.intra is not None and is_nvlink(self.intra)

    @property
    def way(self) -> str | None:
        """NCCL's transport between GPUs without NVLink; None: a link is stated, or all NVLink."""
        way = inside(self.cluster)[1] if self.intra else None
        return way and way.transport

    @property
    def inter(self) -> InterNode | None:
        """The network between nodes, where all-reduces use it."""
        link = self.cluster.link("inter_node") if self.cluster.nodes > 1 else None
        return link if isinstance(link, InterNode) and self.has_links else None

    @cached_property
    def prediction(self) -> Result:
        """Predicts the scenario as stated."""
        return predict(self.stated)

    @cached_property
    def step_s(self) -> float:
        """The step as predicted, without noise."""
        return self.job.step_s()

    def inter_node(self, **stated: Any) -> tuple[str, ...]:
        """Settings of the network: what is `stated`, and what would be lost by stating it.

        A bandwidth stated beside a device's preset replaces all of it.
        """
        stated_link, link = self.cluster.inter_node, self.inter
        kept = self.cluster.machine or (stated_link and stated_link.bandwidth_bytes_per_s)
        if kept or link is None or "bandwidth" not in stated:
            return tuple(f"cluster.inter_node.{key}={value}" for key, value in stated.items())
        usual = {key: value for key, value in link.model_dump().items() if key != "latency"}
        return (f"cluster.inter_node={json.dumps(usual | stated)}",)


def _document(scenario: Scenario) -> Document:
    """A scenario as data that can be changed; its files stay where they are."""
    data = scenario.model_dump()
    for section, keys in _FILES.items():
        of = getattr(scenario, section)
        data[section] |= {key: getattr(of, key) for key in keys if getattr(of, key)}
    return Document.from_mapping(data, Path())


def _without_others(cluster: Cluster, nodes: int, gpus_per_node: int) -> list[str]:
    """Settings that remove the logs of other layouts, and the entries of ranks that are gone."""
    settings = []
    settings += [f"cluster.{log}=null" for log in LOGS if getattr(cluster, log)]
    if cluster.background and nodes == 1:
        settings.append("cluster.background=null")
    factors = cluster.stragglers.factors if cluster.stragglers else None
    entries: Sequence[tuple[str, Mapping[int, Any] | None, int]] = (
        ("cluster.weak_links", cluster.weak_links, nodes * gpus_per_node),
        ("cluster.stragglers", factors, nodes * gpus_per_node),
        ("cluster.other_nodes", cluster.other_nodes, nodes),
    )
    settings += [f"{key}=null" for key, table, count in entries if table and max(table) >= count]
    return settings
