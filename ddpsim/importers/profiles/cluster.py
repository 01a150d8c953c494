"""A cluster profile: what calibration found about a cluster, as JSON `ddpsim.profile/1`.

Seconds and bytes throughout. `calibrate fit` writes profiles; `cluster.profile` names one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from ddpsim.importers.measured import Operation
from ddpsim.importers.profiles.nccl import NcclModel
from ddpsim.importers.profiles.part import ProfilePart as _Part
from ddpsim.importers.profiles.part import interpolated
from ddpsim.importers.text import parsed, read_text
from ddpsim.scenario.quantity import SourceFile
from ddpsim.units import MIB

SCHEMA: Literal["ddpsim.profile/1"] = "ddpsim.profile/1"
LEAST_BUCKET_BYTES = MIB  # torch's first bucket: smaller messages are called small


class Fitted(_Part):
    """One fitted figure with its standard error (None: could not be told)."""

    value: float
    stderr: float | None = Field(None, ge=0)

    def times(self, factor: float) -> Fitted:
        """The figure times a factor above 0."""
        stderr = None if self.stderr is None else self.stderr * factor
        return Fitted(value=self.value * factor, stderr=stderr)


NO_LIMIT = 1e11  # bytes a second between ranks of one host: more than its memory carries (assumed)


class GlooRing(_Part):
    """gloo's segmented ring (gloo/allreduce.cc): its formula is in docs/explanation/nccl.md."""

    kind: Literal["gloo-ring"] = "gloo-ring"
    queue_s: Fitted = Field(description="once a collective")
    segment_s: Fitted = Field(description="software latency of a segment")
    wire_bytes_per_byte: Fitted = Field(description="line rate over payload rate, above 1")
    reduce_bytes_per_s: Fitted = Field(description="one thread adding two buffers of float32")
    reduce_half_bytes_per_s: Fitted | None = Field(None, description="the same of float16")
    burst_bytes: Fitted = Field(description="that pass before a shaper limits the rate")
    rested_burst_bytes: Fitted = Field(
        Fitted(value=0), description="that pass too where the link rested as long as they take"
    )
    rested_delay_s: Fitted = Field(
        Fitted(value=0), description="that it takes to get going again, off what these bytes save"
    )
    line_rate_bytes_per_s: float = Field(gt=0, description="of the links it was measured on")

    @property
    def takes_no_limit(self) -> bool:
        """Whether the messages were too short to tell of a line rate."""
        return self.line_rate_bytes_per_s >= 0.9999 * NO_LIMIT


class MeasuredTime(_Part):
    """A collective that was measured, alone; what the law misses there is interpolated."""

    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    size_bytes: int = Field(ge=1)
    time_s: float = Field(gt=0)
    line_rate_bytes_per_s: float | None = Field(None, gt=0, description="of a node's link")


class ValidRange(_Part):
    """What was measured; outside it a prediction is an extrapolation."""

    size_bytes: tuple[int, int]
    layouts: tuple[tuple[int, int], ...] = Field(description="(nodes, gpus_per_node)")
    line_rates_bytes_per_s: tuple[float, ...] = ()


class ComputeKept(_Part):
    """The share of its speed that compute keeps while a rank sends so many bytes a second."""

    sent_bytes_per_s: float = Field(gt=0)
    share: Fitted = Field(description="beside two all-reduces in flight")
    beside_one: Fitted | None = Field(None, description="beside one; None: as beside two")
    spread: float = Field(
        0, ge=0, description="standard deviation of the share, from burst to burst and rank to rank"
    )

    @field_validator("share", "beside_one")
    @classmethod
    def _is_a_share(cls, share: Fitted | None) -> Fitted | None:
        if share and not 0 < share.value <= 1:
            raise ValueError(f"{share.value:g} is no share: above 0, at most 1")
        return share


class Interference(_Part):
    """Compute and communication in flight together: how many times longer each takes.

    Threads that move bytes take processor time from compute, and wait for it. To `comm_slowdown`
    `comm_slowdown_s2_per_byte2` x (bytes a rank sends a second, alone) squared is added: seen, and
    as it should be, for they need the processor more often and it is busier then. Compute takes
    `compute_slowdown` times as long, and keeps the share of its speed that `compute_kept` tells
    for the bytes that a rank sends a second, so slowed.
    A transfer that begins while a rank computes takes `comm_delay_s` longer: its threads wait for
    the processor first. Of the time in which a transfer leaves the link idle another one in flight
    uses `idle_link_use`; the rest of the two takes 1 + `crowded_slowdown_s_per_byte` x (bytes a
    rank sends a second, alone) times as long as one after the other.
    """

    compute_slowdown: Fitted
    compute_kept: tuple[ComputeKept, ...] = ()
    half_compute_kept: tuple[ComputeKept, ...] = Field(
        (), description="of float16, whose addition takes the processor longer; empty: the same"
    )
    comm_slowdown: Fitted
    comm_slowdown_s2_per_byte2: Fitted = Fitted(value=0)
    comm_delay_s: Fitted = Fitted(value=0)
    idle_link_use: Fitted = Fitted(value=1)
    crowded_slowdown_s_per_byte: Fitted = Fitted(value=0)

    def kept(self, *, half: bool) -> tuple[ComputeKept, ...]:
        """What compute keeps beside float16, or else float32, in the order of the bytes sent.

        Beside fewer bytes than float16 was measured with, compute lacks as many times what it lacks
        beside float32 as there: with both, most of what lacks goes to moving the same bytes.
        """
        single, halves = _in_order(self.compute_kept), _in_order(self.half_compute_kept)
        if not (half and halves):
            return single
        slowest = halves[0]
        sent = [0.0, *(point.sent_bytes_per_s for point in single)]
        shares = [1.0, *(point.share.value for point in single)]  # all of it beside no bytes
        lacks = 1 - interpolated(slowest.sent_bytes_per_s, sent, shares)
        times = (1 - slowest.share.value) / lacks if lacks > 0 else 1.0
        slower = (p for p in single if p.sent_bytes_per_s < slowest.sent_bytes_per_s)
        return (*(_lacking(times, point, slowest.share.value) for point in slower), *halves)


def _in_order(points: Iterable[ComputeKept]) -> tuple[ComputeKept, ...]:
    return tuple(sorted(points, key=lambda point: point.sent_bytes_per_s))


def _lacking(times: float, point: ComputeKept, least: float) -> ComputeKept:
    """A point whose compute lacks so many times as much, and keeps `least` at least."""

    def share(figure: Fitted) -> Fitted:
        kept = 1 - times * (1 - figure.value)
        return figure.model_copy(update={"value": min(1.0, max(least, kept))})

    one = point.beside_one
    return point.model_copy(
        update={"share": share(point.share), "beside_one": share(one) if one else None}
    )


class MeasuredSigma(_Part):
    """How well measured all-reduces of a line rate tell of others there, from 1 MiB up.

    `small`: the smaller ones, which wait for the processor more than for the link.
    """

    line_rate_bytes_per_s: float | None = Field(gt=0, description="of a node's link; None: unknown")
    left_out: float = Field(
        ge=0, description="RMS relative error, each left out of its own correction"
    )
    repeated: float | None = Field(
        ge=0, description="relative standard deviation of what was measured twice; None: nothing"
    )
    small: float | None = Field(
        None, ge=0, description="`left_out` of those below 1 MiB; None: too few were measured"
    )


class CopyIn(_Part):
    """How fast gradients of a size are copied to buckets, read plus written.

    In a backward whose caches this takes; large ones are in none.
    """

    gradient_bytes: int = Field(ge=1)
    bytes_per_s: Fitted


class NarrowProducts(_Part):
    """PowerSGD's three products with `rank` columns: the matrix's bytes a second, in each."""

    rank: int = Field(ge=1)
    bytes_per_s: Fitted


class Overheads(_Part):
    """DDP's own cost on this machine; None or empty: not measured."""

    hook_s: Fitted | None = Field(None, description="a parameter, copies of tiny ones and all")
    copy_back_s: Fitted | None = Field(
        None, description="the part of `hook_s` that comes after the all-reduces"
    )
    copy_bytes_per_s: Fitted | None = Field(None, description="read plus written")
    copy_in: tuple[CopyIn, ...] = Field(
        (), description="of gradients to buckets, by their size; empty: as other copies"
    )
    compress_bytes_per_s: Fitted | None = Field(
        None, description="float32 of a bucket to float16, divided, as fp16_compress does"
    )
    decompress_bytes_per_s: Fitted | None = Field(None, description="float32, from float16")
    narrow_products: tuple[NarrowProducts, ...] = Field((), description="empty: as copies")
    sigma: float | None = Field(
        None, ge=0, description="of the logarithms of copies' times, from record to record"
    )

    @property
    def is_measured(self) -> bool:
        """Whether any of it was."""
        return self != Overheads()

    def stretched(self, factor: float) -> Overheads:
        """All of it taking so many times as long."""
        changed: dict[str, object] = {
            name: figure.times(1 / factor if name.endswith("_per_s") else factor)
            for name, figure in self
            if isinstance(figure, Fitted)
        }
        copy_in = (
            p.model_copy(update={"bytes_per_s": p.bytes_per_s.times(1 / factor)})
            for p in self.copy_in
        )
        return self.model_copy(update=changed | {"copy_in": tuple(copy_in)})


class Jitter(_Part):
    """Spread of compute time (standard deviations of its logarithm)."""

    iteration_sigma: float = Field(ge=0, description="from iteration to iteration, one rank")
    rank_sigma: float = Field(ge=0, description="between the ranks' medians")
    autocorrelation: float = Field(ge=-1, le=1, description="of consecutive iterations")


class Provenance(_Part):
    """Source of the figures."""

    created: str
    machine: str
    processor: str = Field(
        "", description="its maker's numbers for it, where ranks compute on it and it was told"
    )
    cores: int | None = Field(None, ge=1, description="of a machine whose ranks compute on them")
    software: str
    sources: tuple[str, ...] = Field(min_length=1, description="records or logs, by name")
    layer_s: float | None = Field(
        None, gt=0, description="median of a layer's two passes alone: how fast the machine was"
    )


class Correlated(_Part):
    """Two figures of the all-reduce's fit whose errors go together."""

    figures: tuple[str, str]
    correlation: float = Field(ge=-1, le=1, description="of their errors")


MEASURED_OTHERS: dict[Operation, str] = {  # collectives beside all-reduces, and their keys here
    "broadcast": "measured_broadcasts",
    "reduce_scatter": "measured_reduce_scatters",
    "all_gather": "measured_all_gathers",
}


class ClusterProfile(_Part):
    """A cluster as calibrated."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True
    )

    schema_: Literal["ddpsim.profile/1"] = Field(SCHEMA, alias="schema")
    name: str
    backend: Literal["gloo", "nccl"]
    all_reduce: Annotated[NcclModel | GlooRing, Field(discriminator="kind")]
    all_reduce_sigma: float = Field(
        ge=0,
        description="RMS of the fit's relative residuals, from 1 MiB up, or the spread of a log's "
        "times in place and out of place, if more",
    )
    correlated: tuple[Correlated, ...] = Field(
        (), description="figures of the fit that only together are well known, beyond 0.9"
    )
    measured: tuple[MeasuredTime, ...] = Field(
        (), description="what the law was fitted to, and is corrected by on the same ranks"
    )
    measured_broadcasts: tuple[MeasuredTime, ...] = Field(
        (), description="what the library's own way, priced from the law, is corrected by"
    )
    measured_reduce_scatters: tuple[MeasuredTime, ...] = Field(
        (), description="the same; their size is that of the input; empty: as all-reduces"
    )
    measured_all_gathers: tuple[MeasuredTime, ...] = Field(
        (), description="the same; their size is that of the output"
    )
    measured_sigma: tuple[MeasuredSigma, ...] = Field(
        (), description="how well what was measured tells of the same ranks, by line rate"
    )
    valid: ValidRange
    interference: Interference | None = None
    overheads: Overheads = Overheads()
    jitter: Jitter | None = None
    provenance: Provenance
    warnings: tuple[str, ...] = ()

    @property
    def measured_others(self) -> dict[Operation, tuple[MeasuredTime, ...]]:
        """What was measured of each collective beside all-reduces."""
        return {operation: getattr(self, key) for operation, key in MEASURED_OTHERS.items()}


def read_cluster_profile(source: SourceFile) -> ClusterProfile:
    """Read a profile; raises ImportFailedError with what is wrong and where."""
    text = read_text(source, f"a {SCHEMA} JSON file")
    return parsed(ClusterProfile, source.given, text, f"{SCHEMA} cluster profile")
