"""The host that GPUs without NVLink meet in: board, sockets, slots, switches and bridges."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ddpsim.scenario.base import Spec, fail

Board = Literal["desktop", "workstation", "server", "rented"]


def _are_switches(text: str) -> str:
    if text != "none" and not re.fullmatch(r"[1-9]\d?x([2-9]|[1-9]\d)", text):
        raise ValueError("must be none, or switches x GPUs under each: 1x8, 2x4")
    return text


class Host(Spec):
    """What joins the GPUs of a node where NVLink does not; NVLink's pairs too."""

    board: Board | None = Field(
        None,
        description="default: desktop of up to 2 GeForce GPUs, workstation of up to 4, else server",
    )
    sockets: Annotated[int, Field(ge=1, le=8)] = Field(
        1, description="CPUs; a ring crosses the link between them once each way"
    )
    pcie: Literal[3, 4, 5] | None = Field(
        None, description="generation of the slots; default: the device's"
    )
    lanes: Literal[1, 2, 4, 8, 16] = Field(16, description="of each GPU's slot")
    switches: Annotated[str, AfterValidator(_are_switches)] = Field(
        "none", description="PCIe switches x GPUs under each: 1x8, 2x4"
    )
    peer_to_peer: Literal["auto"] | bool = Field(
        "auto",
        description="auto: as the device's driver and NCCL allow; true: between all GPUs (patched "
        "driver, NCCL_P2P_LEVEL=SYS); false: the driver does not allow it",
    )
    bridge: Literal["none", "nvlink"] = Field(
        "none", description="nvlink: bridges join GPUs in pairs"
    )
    cpu: Literal["intel", "amd", "other"] | None = Field(
        None,
        description="its vendor, by which NCCL goes peer to peer; default: the machine's, or intel",
    )

    gpus: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="of the node, other jobs' too: all send at once; default: gpus_per_node"
    )

    @property
    def under_a_switch(self) -> int:
        """GPUs under each PCIe switch; 1: there is none."""
        return 1 if self.switches == "none" else int(self.switches.split("x")[1])


def refuse_impossible_host(
    host: Host | None, gpus: int, device: str, pcie: int, bridge_bytes_per_s: float | None
) -> None:
    """Raises for a host that this device and this number of GPUs cannot have.

    `pcie`: the device's generation. `bridge_bytes_per_s`: of its NVLink bridge; None: it has none.
    """
    if host is None:
        return
    if host.bridge == "nvlink" and bridge_bytes_per_s is None:
        raise fail(
            f"{device} takes no NVLink bridge that is known; drop it, or state what a pair gets: "
            "device: {preset: ..., bridge_bandwidth: 50 GB/s}",
            "host.bridge",
        )
    if host.pcie is not None and host.pcie > pcie:
        raise fail(
            f"{device} has PCIe {pcie}, and runs at that in a faster slot; write {pcie}",
            "host.pcie",
        )
    if host.switches != "none":
        switches, each = (int(part) for part in host.switches.split("x"))
        if gpus > switches * each:
            raise fail(
                f"hold {switches * each} GPUs, and a node has {gpus}; write more, or fewer GPUs",
                "host.switches",
            )
