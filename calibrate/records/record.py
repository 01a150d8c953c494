"""A record: raw samples of what was measured, where, and with what; kept as it grows.

JSON, schema `ddpsim.record/1`. A record is saved whole and atomically after every measurement, so
an interrupted run loses only the one in flight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from calibrate.files import Part, load_json

SCHEMA = "ddpsim.record/1"
# compute, as variants name it, the most telling first: the two passes of a layer, or bound by
# arithmetic, or by bandwidth
LAYER = "layer"
WORKS = (LAYER, "gemm", "memory")
RESTED = "rested"  # the variant of what is reduced after a pause
TOGETHER = "together"  # ends the variant of what all ranks do at once, after a collective
PROCESSOR = "processor"  # in an environment's details
COPIES_IN, COPIES_BACK = "copies in", "copies back"  # of DDP, between gradients and buckets
NARROW_RANKS = (1, 2)  # of narrow products: those for which torch's PowerSGD needs no QR
HALF = " half"  # ends the variant of what reduces float16, as compressing hooks do

Kind = Literal[
    # all_reduce: size_bytes; variant "alone"; "rested" (after a pause in which nothing is sent; in
    # older records "in a row" is the next); "with gemm" and other works (of a queue, while compute
    # runs), "beside gemm" (the queue alone), "in turn with gemm" (one by one): these take turns, so
    # compare them with each other; float32, or float16 where the variant ends in " half"
    "all_reduce",
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "point_to_point",  # one way: half of there and back
    # size_bytes read and written once; "together": by all ranks at once, right after an all-reduce
    "device_copy",
    # size_bytes of float32: "compress" to a new float16 that is divided, as fp16_compress does;
    # "decompress" back; "compress together" and "decompress together" as of copies
    "device_cast",
    # of PowerSGD: a float32 matrix of size_bytes times narrow ones, its transpose likewise, and the
    # matrix of their product; variant "rank 1" or "rank 2", the columns of the narrow ones
    "narrow_products",
    "optimizer",  # variant names class and implementation: "adamw foreach"; size_bytes of gradients
    # one backward; variant "with ddp" or "without"; parameters counted, and size_bytes of all
    # weights where it is so large that copies tell. "copies back": what DDP logs after the compute;
    # "copies in": what its hooks take on all weights, less on as many biases
    "ddp_hook",
    # one fixed piece; variant "gemm alone", "gemm with all_reduce" (beside a queue of them, of
    # size_bytes each), "gemm with one all_reduce" (beside one of all these bytes), "memory ..."
    "compute",
    "jitter",  # a long series of one fixed piece of compute, in the order it ran
    "data_loader",  # one batch; variant names the user's function
]
KEY = ("kind", "variant", "group", "nodes", "gpus_per_node", "size_bytes", "parameters")
Group = Literal["world", "intra_node", "one_per_node", "pair", "none"]
Seconds = Annotated[float, Field(ge=0)]


class Environment(Part):
    """The origin of a record; two records fit together if their `machine` is the same.

    And `processor`, where both tell it.
    """

    created: str = Field(description="ISO 8601, UTC")
    machine: str = Field(description="the GPUs' name, or the processor: 'AMD EPYC, 2 cores'")
    device: str = Field(description="'cpu', or the GPU's name")
    torch: str
    backend: Literal["gloo", "nccl"]
    library: str = Field(description="NCCL's version; gloo has none of its own: torch's")
    variables: dict[str, str] = Field(description="NCCL_*, GLOO_*, TORCH_*, OMP_* as set")
    details: dict[str, str] = Field(description="driver, kernel, governor, topology, load ...")

    @property
    def processor(self) -> str:
        """Its maker's numbers for it, empty where they are not told.

        Of ranks that compute on it alone: clouds give many processors one name.
        """
        return self.details.get(PROCESSOR, "") if self.device == "cpu" else ""

    @property
    def cores(self) -> int | None:
        """Cores of the machine; None where ranks compute on GPUs, or it is not told."""
        count = self.details.get("cores", "") if self.device == "cpu" else ""
        return int(count) if count.isdecimal() else None


class Layout(Part):
    """The ranks of a record."""

    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    line_rate_bytes_per_s: float | None = Field(
        None, gt=0, description="the nominal rate of a node's network link, where it is known"
    )

    @property
    def world_size(self) -> int:
        """Ranks in the job."""
        return self.nodes * self.gpus_per_node


class JobOptions(Part):
    """What the ranks of a job are told."""

    timeout_s: float = Field(120.0, gt=0, description="wait for the other ranks, each time")
    comm_first: bool = Field(
        default=False, description="gloo's threads before compute, if permitted"
    )

    @property
    def kept(self) -> str:
        """What is kept of the work where it ends early, in words."""
        return ""


class Measurement(Part):
    """One thing measured: `samples_s[i]` is the i-th time, of the slowest rank taking part."""

    kind: Kind
    variant: str = "alone"
    group: Group = "none"
    nodes: int = Field(1, ge=1, description="nodes that take part")
    gpus_per_node: int = Field(1, ge=1, description="ranks a node that take part")
    size_bytes: int = Field(0, ge=0)
    parameters: int = Field(0, ge=0)
    warmup_s: tuple[Seconds, ...] = ()
    samples_s: tuple[Seconds, ...] = Field(min_length=1)
    samples_by_rank_s: tuple[tuple[Seconds, ...], ...] = Field(
        (), description="[rank][i], of jitter and compute"
    )
    notes: tuple[str, ...] = Field((), description="what to know of it, such as its noise")

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it the same measurement, for `--resume`."""
        return tuple(getattr(self, name) for name in KEY)


class Record(Part):
    """Everything measured on one cluster in one go."""

    schema_: Literal["ddpsim.record/1"] = Field("ddpsim.record/1", alias="schema")
    environment: Environment
    layout: Layout
    measurements: tuple[Measurement, ...] = ()

    def with_measurement(self, measurement: Measurement) -> Record:
        """The record with one more measurement; it takes the place of an earlier one."""
        kept = tuple(m for m in self.measurements if m.key != measurement.key)
        return self.model_copy(update={"measurements": (*kept, measurement)})


def load_record(path: Path) -> Record:
    """Read a record; raises ImportFailedError with what is wrong and where."""
    wanted = f"{SCHEMA} record (logs of nccl-tests go through `calibrate import nccl-tests`)"
    return load_json(Record, path, wanted)
