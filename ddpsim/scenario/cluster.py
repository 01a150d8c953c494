"""The cluster section: nodes, what joins them, and what else goes on there."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ddpsim.errors import InputError, shown
from ddpsim.scenario.base import (
    MOST_RANKS,
    Fraction,
    Number,
    Spec,
    fail,
    first_rank,
    ranks_by_node,
)
from ddpsim.scenario.device import AnyDevice, Device, Machine, read_device, read_machine
from ddpsim.scenario.links import (
    InterNode,
    IntraNode,
    LinkKind,
    StatedInter,
    StatedIntra,
    beside_a_device,
    near_a_part,
    refuse_gpu_direct_of_tcp,
    with_usual_latency,
)
from ddpsim.scenario.options.host import Host, refuse_impossible_host
from ddpsim.scenario.options.replica import Replica, refuse_what_replicas_lack
from ddpsim.scenario.quantity import SourceField, SourceFileField
from ddpsim.scenario.run import Background, Stragglers

OLDEST_NCCL, NEWEST_NCCL = 4, 30  # minor versions of NCCL 2 whose tables are known


_TELLING = {  # of a node unlike the others; of the rest the others' holds
    "intra_node": ("bandwidth",),
    "inter_node": ("bandwidth", "nics_per_node", "oversubscription"),
}


class OtherNode(Spec):
    """A node unlike the others; what it does not say is as in them."""

    device: (
        Annotated[Device, BeforeValidator(read_device, json_schema_input_type=AnyDevice)] | None
    ) = Field(None, description="its devices: slower or faster as the model's roofline says")
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="its ranks, fewer than the others': 2 of a job on 4 + 2 GPUs"
    )
    intra_node: StatedIntra = Field(
        None, description="its bandwidth, if another; no other key is for one node"
    )
    inter_node: StatedInter = Field(
        None, description="its bandwidth, nics_per_node and oversubscription, if others"
    )

    @model_validator(mode="after")
    def _keys_count(self) -> OtherNode:
        for key, telling in _TELLING.items():
            link = getattr(self, key)
            fields = type(link).model_fields if link else {}
            stated = [fields[name].alias or name for name in (link.written_fields if link else ())]
            for name in sorted(set(stated) - set(telling)):
                raise fail(
                    f"cannot be one node's alone (of its {key} can: {', '.join(telling)}); drop it",
                    f"{key}.{name}",
                )
        return self


Algorithm = Literal[
    "auto",
    "ring",
    "gloo_ring",
    "tree",
    "nvls",
    "halving_doubling",
    "hierarchical",
    "direct",
    "parameter_server",
    "data_parallel",
]


OF_UNEQUAL_NODES = ("auto", "ring", "tree", "gloo_ring")  # nodes with unlike numbers of GPUs


def _a_machine_is_enough(schema: dict[str, Any]) -> None:
    """Lets a machine stand for a device and how many of them there are."""
    brought = ["device", "gpus_per_node"]
    schema["required"] = [key for key in schema["required"] if key not in brought]
    schema["anyOf"] = [{"required": ["machine"]}, {"required": brought}]


class Cluster(Spec):
    """Ranks, the devices they run on, and the links between them."""

    model_config = ConfigDict(json_schema_extra=_a_machine_is_enough)

    nodes: Annotated[int, Field(ge=1, le=MOST_RANKS)] = Field(description="machines")
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = Field(description="ranks per machine")
    machine: (
        Annotated[Machine, BeforeValidator(read_machine, json_schema_input_type=Machine | str)]
        | None
    ) = Field(None, description="a preset's name, or its values: gives device and gpus_per_node")
    device: Annotated[Device, BeforeValidator(read_device, json_schema_input_type=AnyDevice)] = (
        Field(
            description="a preset's name, a device file (.json), {preset: EITHER, ...}, or the "
            "values themselves"
        )
    )
    all_reduce: SourceField | None = Field(
        None,
        description="an nccl-tests log, our CSV, or a folder of the profiler's traces, measured on "
        "these very ranks",
    )
    reduce_scatter: SourceField | None = Field(
        None, description="an nccl-tests log of reduce_scatter_perf, measured on these very ranks"
    )
    all_gather: SourceField | None = Field(
        None, description="an nccl-tests log of all_gather_perf, measured on these very ranks"
    )
    profile: SourceFileField | None = Field(
        None, description="a cluster profile (ddpsim.profile/1), as `calibrate fit` writes it"
    )
    algorithm: Algorithm = Field(
        "auto", description="auto: NCCL's own choice for each size; gloo's is its ring"
    )
    protocol: Literal["auto", "LL", "LL128", "Simple"] = Field(
        "auto", description="of NCCL; auto: its own choice for each size"
    )
    nccl: NcclVersion | None = Field(
        None, description="NCCL's version, 2.4 to 2.30: its tuner chooses; default: the newest"
    )
    nccl_env: dict[str, str | int] | None = Field(
        None, description="NCCL's environment variables, added to those that the machine sets"
    )
    servers: Annotated[int, Field(ge=1, le=MOST_RANKS)] | None = Field(
        None, description="of algorithm parameter_server; default 1"
    )
    intra_node: StatedIntra = Field(None, description="default: the machine's")
    host: Host | None = Field(
        None, description="what joins GPUs without NVLink; default: as users' boxes usually are"
    )
    inter_node: StatedInter = Field(None, description="default: the machine's")
    nvlink_domain: Annotated[int, Field(ge=1, le=MOST_RANKS)] | None = Field(
        None,
        description="GPUs that NVLink joins, over nodes too: 72 of a GB200 NVL72; default: the "
        "machine's, or a node's",
    )
    replica: Replica | None = Field(
        None, description="several GPUs for one copy of the model; omitted: each GPU has one"
    )
    weak_links: dict[Number, Fraction] | None = Field(
        None, description="rank: the part of its bandwidth that is left of the link to it"
    )
    other_nodes: dict[Number, OtherNode] | None = Field(
        None, description="node: in what it differs from the others"
    )
    background: Background | None = Field(None, description="other traffic; omitted: none")
    stragglers: Stragglers | None = Field(None, description="omitted: none")

    @property
    def is_measured(self) -> bool:
        """Whether a log or a profile says times of collectives."""
        return any((self.all_reduce, self.reduce_scatter, self.all_gather, self.profile))

    @property
    def gpus(self) -> int:
        """GPUs in the job: nodes x gpus_per_node, less where a node has fewer."""
        return first_rank(self.nodes, self.gpus_per_node, self.smaller_nodes)

    @property
    def world_size(self) -> int:
        """Ranks of data parallelism: a GPU each, or a replica each."""
        return self.gpus // (self.replica.gpus if self.replica else 1)

    @property
    def nodes_per_domain(self) -> int:
        """Nodes that NVLink joins."""
        if self.nvlink_domain is None and self.machine and self.machine.nvlink_domain:
            return max(1, self.machine.nvlink_domain // self.machine.gpus_per_node)
        return max(1, (self.nvlink_domain or 1) // self.gpus_per_node)

    @property
    def smaller_nodes(self) -> tuple[tuple[int, int], ...]:
        """Nodes with fewer ranks than gpus_per_node, and their ranks."""
        sizes = ((node, other.gpus_per_node) for node, other in (self.other_nodes or {}).items())
        return tuple(sorted((node, n) for node, n in sizes if n and n != self.gpus_per_node))

    @property
    def gpus_by_node(self) -> tuple[int, ...] | None:
        """Ranks of each node; None where all have as many."""
        if not self.smaller_nodes:
            return None
        return ranks_by_node(self.nodes, self.gpus_per_node, self.smaller_nodes)

    def ranks_of(self, node: int) -> range:
        """The ranks of a node; ranks are numbered node by node."""
        smaller = self.smaller_nodes
        ends = (first_rank(each, self.gpus_per_node, smaller) for each in (node, node + 1))
        return range(*ends)

    @property
    def nccl_minor(self) -> int:
        """30 of NCCL 2.30."""
        return int(self.nccl.split(".")[1]) if self.nccl else NEWEST_NCCL

    @property
    def nccl_variables(self) -> dict[str, str | int]:
        """NCCL's environment: the machine's, and over it the scenario's own."""
        return {**(self.machine.nccl_env if self.machine else {}), **(self.nccl_env or {})}

    @property
    def links_used(self) -> tuple[LinkKind, ...]:
        """Which kinds of link its ranks have between them."""
        inside: tuple[LinkKind, ...] = ("intra_node",) if self.gpus_per_node > 1 else ()
        return (*inside, "inter_node") if self.nodes > 1 else inside

    def link(self, key: LinkKind) -> IntraNode | InterNode | None:
        """Gives the link of a kind: the scenario's, else the machine's, else the device's.

        What is stated beside a named machine changes that alone of it; a bandwidth stated beside a
        device is another network than that of its usual machine. A part of a machine's GPUs has a
        part of its NICs.
        """
        of_machine = getattr(self.machine, key) if self.machine else None
        preset: IntraNode | InterNode | None = of_machine or getattr(self.device, key)
        if self.machine:
            preset = near_a_part(preset, self.gpus_per_node, self.machine.gpus_per_node)
        stated: IntraNode | InterNode | None = getattr(self, key)
        if stated is None or preset is None:
            return stated or preset
        rate = stated.bandwidth_bytes_per_s
        if rate is None or self.machine:
            usual = preset if rate is None else preset.with_bandwidth(rate)
            changed = usual.model_copy(update=stated.written_fields)
            return with_usual_latency(changed, stated, preset)
        return beside_a_device(stated, preset, by_nccl=self.device.kind == "gpu")

    def states_latency(self, key: LinkKind) -> bool:
        """Whether the scenario itself says how long a step over such a link takes."""
        stated = getattr(self, key)
        return stated is not None and stated.latency_s is not None

    def resized(self, nodes: int, gpus_per_node: int) -> Cluster:
        """Gives another number of these machines; raises InputError for a key that does not fit."""
        if self.smaller_nodes:
            node, _ = self.smaller_nodes[0]
            raise InputError(
                f"cluster.other_nodes.{node}.gpus_per_node",
                "is of this job alone: other numbers of nodes are of one size; drop it",
            )
        changed = self.having(nodes=nodes, gpus_per_node=gpus_per_node)
        try:
            changed._ranks_exist()  # type: ignore[operator]  # noqa: SLF001 -- its own class's
            changed._algorithm_fits()  # type: ignore[operator]  # noqa: SLF001
        except PydanticCustomError as error:
            at = (error.context or {}).get("at", "")
            raise InputError(f"cluster.{at}".rstrip("."), error.message()) from None
        return changed

    @model_validator(mode="before")
    @classmethod
    def _of_a_machine(cls, data: Any) -> Any:
        """A machine brings its device and how many of them it has."""
        machine = data.get("machine") if isinstance(data, dict) else None
        try:
            preset = read_machine(machine) if isinstance(machine, str) else machine
        except ValueError as error:
            raise fail(str(error), "machine") from None
        if isinstance(preset, dict):
            brought = {k: preset[k] for k in ("device", "gpus_per_node") if k in preset}
            return brought | {k: v for k, v in data.items() if v is not None or k not in brought}
        return data

    @model_validator(mode="after")
    def _ranks_exist(self) -> Cluster:
        if self.world_size > MOST_RANKS:
            raise fail(f"{self._product()}, more than the {MOST_RANKS} simulated here", "nodes")
        self._machine_has_them()
        self._groups_fit()
        refuse_gpu_direct_of_tcp(self.inter_node, self.link("inter_node"))
        device = self.device
        limits = device.pcie, device.bridge_bandwidth_bytes_per_s
        refuse_impossible_host(self.host, self.gpus_per_node, device.name, *limits)
        if self.background and self.nodes == 1:
            raise fail("is traffic between nodes, and there is one; drop it", "background")
        for key, ranks in (
            ("stragglers.factors", (self.stragglers and self.stragglers.factors) or {}),
            ("weak_links", self.weak_links or {}),
        ):
            for rank in ranks:
                if not 0 <= rank < self.world_size:
                    raise fail(
                        f"rank {shown(rank)} does not exist: {self._product()}, "
                        f"0 to {self.world_size - 1}",
                        key,
                    )
        for node in self.other_nodes or {}:
            if not 0 <= node < self.nodes:
                raise fail(
                    f"node {shown(node)} does not exist: 0 to {self.nodes - 1}", "other_nodes"
                )
        for node, other in (self.other_nodes or {}).items():
            precisions = set(self.device.peak_flops_per_s)
            if other.device and not precisions & set(other.device.peak_flops_per_s):
                raise fail(
                    f"node {node}: {other.device.name} and {self.device.name} have no peak_flops "
                    "in common to compare them by",
                    "other_nodes",
                )
        return self

    @model_validator(mode="after")
    def _nodes_fit_together(self) -> Cluster:
        """Fewer GPUs in a node: NCCL and gloo's ring know what to do, other algorithms do not."""
        for node, gpus in self.smaller_nodes:
            key = f"other_nodes.{node}.gpus_per_node"
            if gpus > self.gpus_per_node:
                raise fail(
                    f"{gpus} is more than cluster.gpus_per_node: write the largest node's there, "
                    "and the others' here",
                    key,
                )
            if self.algorithm not in OF_UNEQUAL_NODES:
                raise fail(
                    f"{self.algorithm} needs nodes with as many GPUs each; choose one of "
                    f"{', '.join(OF_UNEQUAL_NODES)}",
                    "algorithm",
                )
        if len(self.smaller_nodes) == self.nodes:
            raise fail(
                "no node has so many: write the largest node's number of GPUs", "gpus_per_node"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_fits(self) -> Cluster:
        if self.servers is not None and self.algorithm != "parameter_server":
            raise fail("belongs to algorithm: parameter_server; drop it", "servers")
        most = self.nodes if self.nodes > 1 else self.gpus_per_node
        if self.servers is not None and self.servers > most:
            what = "nodes" if self.nodes > 1 else "GPUs of the node"
            raise fail(
                f"{self.servers} is more than the {most} {what} that send to them", "servers"
            )
        if self.algorithm == "data_parallel" and self.nodes > 1:
            raise fail(
                "data_parallel is one process with the GPUs of one node; set nodes: 1", "algorithm"
            )
        if not OLDEST_NCCL <= self.nccl_minor <= NEWEST_NCCL:
            versions = f"2.{OLDEST_NCCL} to 2.{NEWEST_NCCL}"
            raise fail(
                f"{self.nccl} is not known here; write one of {versions}, or drop it", "nccl"
            )
        if self.protocol != "auto" and self.algorithm not in ("auto", "ring", "tree", "nvls"):
            raise fail(f"is NCCL's, and {self.algorithm} is not; drop it", "protocol")
        return self

    def _groups_fit(self) -> None:
        """Replicas and NVLink domains are made of whole nodes, or of parts of one."""
        domain, leaf = self.nvlink_domain, self.inter_node and self.inter_node.nodes_per_leaf
        if domain and domain % self.gpus_per_node:
            raise fail(
                f"{domain} GPUs are no whole nodes of {self.gpus_per_node}; write a multiple",
                "nvlink_domain",
            )
        joined = self.nodes_per_domain
        if joined > 1:
            for node, other in (self.other_nodes or {}).items():
                if other.gpus_per_node or other.intra_node or other.inter_node:
                    raise fail(
                        f"node {node} is in an NVLink domain of {joined} nodes, which are alike "
                        "but for their device; drop its other keys",
                        "other_nodes",
                    )
            if leaf and leaf % joined:
                raise fail(
                    f"{leaf} nodes are no whole NVLink domains of {joined}; write a multiple",
                    "inter_node.nodes_per_leaf",
                )
        if self.replica is None:
            return
        refuse_what_replicas_lack(self)
        nodes, _, _ = self.replica.layout(self.nodes, self.gpus_per_node)
        if nodes < self.nodes and (leaf or 1 < joined < self.nodes):
            what = "inter_node.nodes_per_leaf" if leaf else "NVLink domains of some of the nodes"
            raise fail(
                f"a replica on several nodes is not modelled with {what}; drop one", "replica"
            )

    def _machine_has_them(self) -> None:
        if self.machine and self.gpus_per_node > self.machine.gpus_per_node:
            has = self.machine.gpus_per_node
            raise fail(
                f"{shown(self.gpus_per_node)} is more than the {has} GPUs that "
                f"{self.machine.name} has; state its device and links instead of the machine",
                "gpus_per_node",
            )

    def _product(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        each = self.gpus_by_node
        gpus = "of " + " + ".join(map(str, each)) if each else f"x {self.gpus_per_node}"
        return f"{nodes} {gpus} GPUs = {self.world_size} ranks"


_NCCL = r"^2\.\d+(\.\d+)?$"


def _nccl_version(value: Any) -> Any:
    """Refuses a version that is no text: 2.20 as a number would be 2.2."""
    if isinstance(value, str) and re.match(_NCCL, value):
        return value
    raise ValueError(
        f"{shown(value)} is no version of NCCL; write one with its quotes, such as "
        """nccl: "2.19", or --set 'cluster.nccl="2.19"'"""
    )


NcclVersion = Annotated[str, Field(pattern=_NCCL), BeforeValidator(_nccl_version)]
