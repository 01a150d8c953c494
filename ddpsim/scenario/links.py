"""Links inside nodes and between them: bandwidth, latency, and what takes from them."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from ddpsim.scenario.base import MOST_RANKS, Spec, fail
from ddpsim.scenario.quantity import Bandwidth, Duration

# of a small message to another node, software included: InfiniBand as NCCL's tables have it; EFA of
# p5 (awsome-distributed-training), TCP and TCPX assumed from T4 and a3-mega sweeps
Transport = Literal["rdma", "efa", "slingshot", "tcpx", "tcp"]
USUAL_LATENCY_S: dict[Transport, float] = {
    "rdma": 5e-6,
    "efa": 33e-6,
    "slingshot": 5e-6,
    "tcpx": 45e-6,
    "tcp": 45e-6,
}
# 10 Gbit/s, assumed: a TCP flow or two fill them
EASY_FOR_TCP_BYTES_PER_S = 1.25e9
# 25 Gbit/s: InfiniBand has no port of that rate, and clouds that rent such lines (p3.16xlarge,
# NC24s v3) have no RDMA on them
_TCP_TO_BYTES_PER_S = 3.125e9
# 100 Gbit/s, assumed: faster than NCCL's sockets, so that who states such NICs has bought RDMA
_RDMA_FROM_BYTES_PER_S = 12.5e9

_AnyLink = TypeVar("_AnyLink", bound="_Link")
# of attributes, by how their names end
_UNITS = {"_flops_per_s": "FLOP/s", "_bytes_per_s": "B/s", "_bytes": "B", "_s": "s"}
LinkKind = Literal["intra_node", "inter_node"]
_StepLatency = Annotated[
    Duration | None,
    Field(
        alias="latency",
        description="one ring step, software included; default: NCCL's own, or the device's",
    ),
]


class _Link(Spec):
    """What links of both kinds have in common."""

    @property
    def written_fields(self) -> dict[str, Any]:
        """The fields that a scenario states, with their values; `null` states nothing."""
        written = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: value for name, value in written.items() if value is not None}

    @model_serializer(mode="wrap")
    def _as_written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write the stated fields alone: a default, read back, would override a preset."""
        fields = type(self).model_fields
        names = {key for name in self.written_fields for key in (name, fields[name].alias)}
        return {key: value for key, value in dump(self).items() if key in names}


class IntraNode(_Link):
    """What one GPU can send in one direction to its ring neighbour in the node."""

    example: ClassVar[str] = "{bandwidth: 12 GB/s, path: pcie}, or drop it for the device's own"
    bandwidth_bytes_per_s: Bandwidth | None = Field(
        None, alias="bandwidth", description="bus bandwidth, one direction; default: the preset's"
    )
    latency_s: _StepLatency = None
    path: Literal["nvlink", "pcie"] | None = Field(
        None, description="what NCCL sees; default: nvlink from 30 GB/s up"
    )
    switch_bandwidth_bytes_per_s: Bandwidth | None = Field(
        None,
        alias="switch_bandwidth",
        description="bus bandwidth of all-reduces that the switch sums (NVLS); omitted: in "
        "proportion to the preset's, or it cannot",
    )

    def with_bandwidth(self, bytes_per_s: float) -> IntraNode:
        """Gives a link of another bandwidth, and of a switch in proportion."""
        before, update = self.bandwidth_bytes_per_s, {"bandwidth_bytes_per_s": bytes_per_s}
        if before and self.switch_bandwidth_bytes_per_s:
            switch_bytes_per_s = self.switch_bandwidth_bytes_per_s * (bytes_per_s / before)
            update["switch_bandwidth_bytes_per_s"] = switch_bytes_per_s
        return self.model_copy(update=update)


class InterNode(_Link):
    """The network between nodes: one NIC, one direction."""

    example: ClassVar[str] = "{bandwidth: 100 Gbit/s, transport: rdma}, or drop it for a machine's"
    bandwidth_bytes_per_s: Bandwidth | None = Field(
        None, alias="bandwidth", description="one NIC, one direction; default: the preset's"
    )
    latency_s: _StepLatency = None
    nics_per_node: Annotated[int, Field(ge=1, le=1000)] = Field(
        1, description="NICs that a ring may use"
    )
    shared_by: Annotated[float, Field(ge=1, le=100_000)] = Field(
        1.0, description="groups of ranks that send over a node's NICs at once, each a part of them"
    )
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = Field(
        1.0, description="ratio of access to uplink capacity of a leaf switch; 1 = none"
    )
    nodes_per_leaf: Annotated[int, Field(ge=1, le=MOST_RANKS)] | None = Field(
        None, description="so many nodes are joined without an uplink; omitted: none are"
    )
    uplinks: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None, description="equal paths out of a leaf; flows hashed onto one collide (ECMP)"
    )
    message_overhead_s: Duration | None = Field(
        None,
        alias="message_overhead",
        description="how long a message keeps a NIC busy, its bytes aside; default: by transport",
    )
    tuner_latency_s: Duration | None = Field(
        None,
        alias="tuner_latency",
        description="what the network's plugin tells NCCL's tuner; default: by transport",
    )
    gpu_direct: bool | None = Field(
        None,
        description="false: NICs write to host memory, and NCCL has no LL128 between nodes; "
        "default: the preset's, or true",
    )
    flow_bandwidth_bytes_per_s: Bandwidth | None = Field(
        None,
        alias="flow_bandwidth",
        description="what one TCP connection carries at most, where a cloud limits it; default: "
        "the preset's (5 Gbit/s on AWS), or no limit",
    )
    connections: Annotated[int, Field(ge=1, le=64)] | None = Field(
        None,
        description="TCP connections of a NIC that the limit counts one by one, which "
        "NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD multiply; default: the preset's, or 2, "
        "one for each of NCCL's channels",
    )
    transport: Transport = Field(
        "rdma",
        description="default: the preset's; of a stated bandwidth up to 25 Gbit/s, or below 100 "
        "where the device's usual machine has no RDMA, tcp",
    )

    @property
    def passes_through_hosts(self) -> bool:
        """Whether NICs use host memory where others would reach GPUs; TCP's cost has it in it."""
        return self.gpu_direct is False and self.transport != "tcp"

    def with_bandwidth(self, bytes_per_s: float) -> InterNode:
        """Gives a link of another bandwidth."""
        return self.having(bandwidth_bytes_per_s=bytes_per_s)


def _if_stated(link: _AnyLink | None) -> _AnyLink | None:
    """The link; None where the scenario states nothing of it."""
    return link if link and link.written_fields else None


StatedIntra = Annotated[IntraNode | None, AfterValidator(_if_stated)]
StatedInter = Annotated[InterNode | None, AfterValidator(_if_stated)]


def near_a_part(
    link: IntraNode | InterNode | None, gpus: int, of: int
) -> IntraNode | InterNode | None:
    """A node's network with the NICs that are nearest to so many of its GPUs, rounded up.

    NCCL leaves by the NICs nearest to each GPU (nccl v2.30 src/graph/topo.cc,
    ncclTopoGetLocalNetType).
    """
    if not isinstance(link, InterNode) or gpus >= of:
        return link
    return link.having(nics_per_node=ceil(link.nics_per_node * gpus / of))


def beside_a_device(
    stated: IntraNode | InterNode, usual: IntraNode | InterNode, *, by_nccl: bool
) -> IntraNode | InterNode:
    """Links that a scenario states whole; the latency alone may be that of the usual machine.

    `by_nccl`: the device is a GPU.
    """
    if isinstance(stated, InterNode) and isinstance(usual, InterNode):
        stated = _with_transport(stated, usual, by_nccl=by_nccl)
    if stated.latency_s is not None:
        return stated
    changed = stated.having(latency_s=usual.latency_s)
    return with_usual_latency(changed, stated, usual)


def _with_transport(stated: InterNode, usual: InterNode, *, by_nccl: bool) -> InterNode:
    """A network of which nobody says how NCCL reaches it; other libraries keep to the usual way."""
    if "transport" in stated.model_fields_set:
        return stated
    rate, usual_rate = stated.bandwidth_bytes_per_s or 0.0, usual.bandwidth_bytes_per_s or 0.0
    is_of_rdma = by_nccl and rate >= _RDMA_FROM_BYTES_PER_S and rate > usual_rate
    has_rdma = usual.transport != "tcp" or is_of_rdma
    kind: Transport = "rdma" if has_rdma and rate > _TCP_TO_BYTES_PER_S else "tcp"
    return stated.having(transport=kind)


def with_usual_latency(
    changed: IntraNode | InterNode, stated: IntraNode | InterNode, preset: IntraNode | InterNode
) -> IntraNode | InterNode:
    """Another transport than the preset's has another latency."""
    if not (isinstance(changed, InterNode) and isinstance(preset, InterNode)):
        return changed
    if stated.latency_s is not None or changed.transport == preset.transport:
        return changed
    return changed.having(latency_s=USUAL_LATENCY_S[changed.transport])


def refuse_gpu_direct_of_tcp(stated: InterNode | None, link: IntraNode | InterNode | None) -> None:
    """Raises for what a scenario says of NICs and GPU memory where TCP carries its bytes."""
    if stated is None or stated.gpu_direct is None:
        return
    if isinstance(link, InterNode) and link.transport == "tcp":
        tcp = "tcp" if "transport" in stated.model_fields_set else "tcp, which is taken here,"
        raise fail(
            f"belongs to transport rdma or efa; {tcp} sends from host memory in any case; drop it, "
            "or set transport",
            "inter_node.gpu_direct",
        )


def as_stated(section: type[Spec], table: Mapping[str, Any]) -> dict[str, Any]:
    """What a table in SI units says of a section's keys, as a scenario would state it."""
    links: dict[str, type[Spec]] = {"intra_node": IntraNode, "inter_node": InterNode}
    stated: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        key = field.alias or name
        value = table.get(name, table.get(key))
        unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
        if value is None:
            continue
        if name in links:
            value = as_stated(links[name], value)
        elif unit and isinstance(value, Mapping):
            value = {each: f"{figure!r} {unit}" for each, figure in value.items()}
        stated[key] = f"{value!r} {unit}" if unit and not isinstance(value, Mapping) else value
    return stated
