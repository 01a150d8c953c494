"""The answer: frozen figures in SI units, as `ddpsim.result/1` lists them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ddpsim.provenance import Z_80, Provenance
from ddpsim.result.training import Training
from ddpsim.units import format_duration

if TYPE_CHECKING:
    from ddpsim.report.notebook.figures import Figure

RESULT_SCHEMA = "ddpsim.result/1"


OUT_OF_MEMORY = "run out of memory"  # a warning of this is said with what would make it fit


_NONE = "no interval can be had"


class Drawn:
    """An answer with a figure; `ddpsim.report.notebook.figures` says what each one shows."""

    __slots__ = ()

    def plot(self) -> Figure:
        """The answer as a plotly figure: parts of a step, steps of a sweep, changes, causes, days.

        >>> result = ddpsim.simulate(ddpsim.load_scenario("scenario.yaml"))
        >>> print(*(trace.name for trace in result.plot().data), sep=" | ")
        forward | backward | exposed comm | optimizer | other | step, 80% interval
        >>> grid = ddpsim.Grid.of(["ddp.bucket_cap_mb=1,25", "cluster.nodes=2,4"])
        >>> print(*(line.name for line in ddpsim.sweep("scenario.yaml", grid).plot().data))
        cluster.nodes=2 cluster.nodes=4
        """
        from ddpsim.report.notebook.figures import figure_of  # noqa: PLC0415 -- plotly is slow

        return figure_of(self)


class Tabled(Drawn):
    """An answer with a table too."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """The answer as a notebook shows it: a table of HTML, of many points the best 40."""
        from ddpsim.report.notebook.tables import table_of  # noqa: PLC0415 -- a room above

        return table_of(self)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds over the measured iterations; percentiles interpolate linearly."""

    mean: float
    p10: float
    p50: float
    p90: float

    def noise(self, steps: int) -> float:
        """Relative difference, by chance, of the means of two runs of so many steps.

        Two standard errors, with the standard deviation that p10 and p90 tell.
        """
        sigma = (self.p90 - self.p10) / (2 * Z_80)
        return 2 * sqrt(2 / steps) * sigma / self.mean


@dataclass(frozen=True, slots=True)
class IntervalSource:
    """One uncertain input: seconds it adds to the interval on each side, and what they rest on.

    `usual_s`: of `high_s` what is added as it is, and not in quadrature, since it only lengthens.
    """

    input: str
    low_s: float
    high_s: float
    basis: str
    usual_s: float = 0.0

    @property
    def width_s(self) -> float:
        """Seconds between its two edges, by which sources are ranked."""
        return self.low_s + self.high_s


@dataclass(frozen=True, slots=True)
class PredictionInterval:
    """The mean iteration time lies in it with probability `level`, if the assumptions hold."""

    level: float
    low: float
    high: float
    sources: tuple[IntervalSource, ...]

    @property
    def edges(self) -> tuple[float, float]:
        """Both ends, in seconds."""
        return self.low, self.high

    def holds(self, time_s: float) -> bool:
        """Whether a time lies in the interval."""
        return self.low <= time_s <= self.high


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an estimated step waits for, and the interval that a measured step_time would leave.

    `regime`: "host-bound" if the host needs longer for a step than the device; `host_share`: its
    time over the device's.
    """

    regime: Literal["device-bound", "host-bound"]
    host_share: float
    measured_low_s: float
    measured_high_s: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of the slowest rank's mean iteration; the parts sum to it.

    `backward_compute` holds the gradient-to-bucket copies; `other` the copies back, the buffer
    copies and the gaps in which the device waits for the host.
    """

    data_wait: float
    forward: float
    backward_compute: float
    exposed_comm: float
    optimizer: float
    other: float


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """One bucket of a median iteration, in launch order; seconds from the start of backward.

    `ready_s`: its last gradient is in it; `start_s`: all ranks have joined; `end_s`: reduced.
    `first` and `last`: the names of its parameters at both ends, in its own order.
    """

    index: int
    size_bytes: int
    num_params: int
    ready_s: float
    start_s: float
    end_s: float
    first: str = ""
    last: str = ""

    @property
    def names(self) -> str:
        """The names in words: "fc.bias ... layer4.1.bn2.weight", or the one that there is."""
        return self.first if self.first == self.last else f"{self.first} ... {self.last}"


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """One collective of a median iteration, in launch order; seconds from the start of the step.

    `operation` is torch.distributed's; `size_bytes` are sent; `group` names its ranks, first-last;
    `cause` says what it is for. Times as of a bucket.
    """

    operation: str
    size_bytes: int
    group: str
    cause: str
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What to change first: the largest cost, or compute, if that 10 % faster saves more."""

    kind: Literal["compute", "communication", "data", "host", "stragglers"]
    text: str


@dataclass(frozen=True, slots=True)
class CriticalPart:
    """One part of the chain that sets the step's length; seconds from the start of the step."""

    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Baselines:
    """Naive estimates for comparison, in seconds per iteration."""

    compute_only: float
    no_overlap: float
    perfect_overlap: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per GPU; `activations` is None where they are unknown.

    `reserved`: the most that torch.cuda.max_memory_reserved tells; None: unknown. The caching
    allocator keeps what is freed, and gives memory of one stream to no other. It frees that before
    it runs out of memory, so that a job may fit which reserves all of a device.
    """

    parameters: int
    gradients: int
    buckets: int
    optimizer: int
    buffers: int
    activations: int | None
    device: int
    reserved: int | None = None

    @property
    def total(self) -> int:
        """The sum of all known parts."""
        parts = (self.parameters, self.gradients, self.buckets, self.optimizer, self.buffers)
        return sum(parts) + (self.activations or 0)

    @property
    def fits(self) -> bool:
        """Whether the device has that much memory."""
        return self.total <= self.device


class HeldBytes(NamedTuple):
    """What a strategy that shards holds on a device, apart from shards and activations.

    Whole parameters; gradients, reduced ones on the shards too; inputs of their reductions.
    """

    parameters: int = 0
    gradients: int = 0
    reductions: int = 0


# what is held after so many works of the device's stream, at each change
MemoryWalk = tuple[tuple[int, HeldBytes], ...]


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The point of a step at which a strategy that shards holds most, and what that is in bytes.

    Apart from shards and activations: whole parameters, gradients (reduced ones too), and inputs of
    their reductions.
    """

    at: str
    parameters: int
    gradients: int
    reductions: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.reductions


@dataclass(frozen=True, slots=True)
class StartUp:
    """What comes before the first step, and is part of none.

    DDP's constructor broadcasts parameters and buffers, `broadcast_bytes` in `broadcast_s`; None
    with another strategy, or where a broadcast has no price. `communicator_s`: within which NCCL
    makes its communicator, as published for about as many ranks; None with gloo. The launcher's
    rendezvous and the load of the model are not in it.
    """

    broadcast_bytes: int | None
    broadcast_s: float | None
    communicator_s: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Engine:
    """How the answer was computed."""

    mode: str
    ranks_simulated: int
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank, link or traffic that delays the others; without it a step is `cost_s` shorter.

    `cost_s` is of a mean step without jitter; for stalls it is the mean over the simulated steps.
    Each cost is found by removing that straggler alone, so costs of several do not add up.
    """

    kind: Literal["rank", "link", "traffic", "stalls"]
    text: str
    cost_s: float


@dataclass(frozen=True, slots=True)
class NextStep:
    """Something to try or to measure: why, and the `--set` options that go with it."""

    why: str
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A step of `step_s` in which one term alone takes `factor` times as long.

    `term`: compute, host or network. `suffices`: the step is then the measured one; otherwise
    `factor` is the largest (or smallest) plausible one, and still falls short.
    """

    term: str
    factor: float
    step_s: float
    suffices: bool


@dataclass(frozen=True, slots=True)
class Brief:
    """The figures of `Result` that a sweep needs of each scenario."""

    iteration_time_s: Distribution
    throughput_samples_per_s: float
    throughput_per_gpu: float
    scaling_efficiency: float
    comm_time_s: float
    exposed_comm_s: float
    world_size: int
    memory_bytes_per_gpu: Memory

    @classmethod
    def of(cls, result: Result) -> Brief:
        """Takes the figures of a result."""
        return cls(**{field.name: getattr(result, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Result(Tabled):
    """One prediction. Times in seconds, on the rank that ends last, for steady iterations.

    `gpus_by_node`: the ranks of each node, where they differ; else None.
    `throughput_samples_per_s` is global; `scaling_efficiency` compares the throughput per GPU
    with one device's without DDP. `comm_time_s` is the union of the times in which a collective
    is in flight, `skew_s` the part of it spent waiting for late peers, `overlap_fraction`
    1 - exposed / comm (None without communication). `buckets_rebuilt_at` is the iteration, from 0,
    that first uses the rebuilt buckets (None: they are never rebuilt). `buckets` and `collectives`
    are those of an iteration with communication, where some have none. `strategy` is ddp.strategy,
    or data_parallel. `memory_peak`: where in the step a strategy that shards holds most, which
    `buckets` of `memory_bytes_per_gpu` is made of. `estimate`: of a step of a GPU that was not
    measured. `gpus_per_rank`: those of a replica that is a rank; JSON leaves out one. `start_up`:
    what comes once before the first step; None of one rank.
    """

    name: str
    world_size: int
    nodes: int
    gpus_per_node: int
    gpus_by_node: tuple[int, ...] | None
    iteration_time_s: Distribution
    prediction_interval_s: PredictionInterval | None
    throughput_samples_per_s: float
    throughput_per_gpu: float
    scaling_efficiency: float
    breakdown_s: Breakdown
    comm_time_s: float
    skew_s: float
    exposed_comm_s: float
    overlap_fraction: float | None
    buckets: tuple[BucketTimes, ...]
    bottleneck: Bottleneck
    critical_path: tuple[CriticalPart, ...]
    stragglers: tuple[Straggler, ...]
    baselines_s: Baselines
    warmup_s: tuple[float, ...]
    buckets_rebuilt_at: int | None
    memory_bytes_per_gpu: Memory
    provenance: tuple[Provenance, ...]
    warnings: tuple[str, ...]
    next_steps: tuple[NextStep, ...]
    seed: int
    engine: Engine
    collectives: tuple[CollectiveTimes, ...] = ()
    strategy: str = "ddp"
    training: Training | None = None
    memory_peak: MemoryPeak | None = None
    estimate: Estimate | None = None
    gpus_per_rank: int = 1
    start_up: StartUp | None = None

    @property
    def gpus(self) -> int:
        """All GPUs: of each rank one, or those of its replica."""
        return self.world_size * self.gpus_per_rank

    @property
    def edges_s(self) -> tuple[float, float] | None:
        """Both ends of the prediction interval; None without one."""
        return self.prediction_interval_s.edges if self.prediction_interval_s else None

    @property
    def is_disturbed(self) -> bool:
        """Whether ranks wait for stragglers or data, which the baselines leave out."""
        waits = any(straggler.kind != "link" for straggler in self.stragglers)
        return waits or self.breakdown_s.data_wait > 0

    def __repr__(self) -> str:
        step = format_duration(self.iteration_time_s.mean)
        return f"<Result of {self.name}: step {step}, bottleneck {self.bottleneck.kind}>"

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON's types (schema `ddpsim.result/1`), floats to 12 decimals."""
        plain = {"schema": RESULT_SCHEMA, **rounded(asdict(self))}
        plain["memory_bytes_per_gpu"]["total"] = self.memory_bytes_per_gpu.total
        if self.gpus_per_rank == 1:
            plain.pop("gpus_per_rank")
        return plain


def rounded(value: Any) -> Any:
    """Plain data with its floats to 12 decimals."""
    if isinstance(value, float):
        return round(value, 12)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def edges_in_words(interval: PredictionInterval | None) -> str:
    """Both edges: `70.1 ms to 85.3 ms`."""
    if interval is None:
        return _NONE
    return f"{format_duration(interval.low)} to {format_duration(interval.high)}"


def interval_name(interval: PredictionInterval | None) -> str:
    """The level: `80% interval`."""
    return f"{interval.level:.0%} interval" if interval else "interval"


def interval_in_words(interval: PredictionInterval | None) -> str:
    """Level and edges: `80% interval 70.1 ms to 85.3 ms`."""
    return f"{interval_name(interval)} {edges_in_words(interval)}" if interval else _NONE
