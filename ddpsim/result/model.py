"""The answer: frozen figures in SI units, as `ddpsim.result/1` lists them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddpsim.provenance import Provenance

__all__ = [
    "Baselines",
    "Bottleneck",
    "Breakdown",
    "Brief",
    "BucketTimes",
    "CriticalPart",
    "Distribution",
    "Engine",
    "IntervalSource",
    "Memory",
    "NextStep",
    "PredictionInterval",
    "Result",
    "Stretch",
    "rounded",
]

RESULT_SCHEMA = "ddpsim.result/1"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds over the measured iterations; percentiles interpolate linearly."""

    mean: float
    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class IntervalSource:
    """What widens the interval: seconds below and above, and the assumption they rest on."""

    input: str
    low_s: float
    high_s: float
    basis: str


@dataclass(frozen=True, slots=True)
class PredictionInterval:
    """Where the mean iteration time lies with probability `level`, as far as is assumed."""

    level: float
    low: float
    high: float
    sources: tuple[IntervalSource, ...]


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
    """

    index: int
    size_bytes: int
    num_params: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What to change first."""

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
    """Naive answers to lay beside ours, in seconds per iteration."""

    compute_only: float
    no_overlap: float
    perfect_overlap: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per GPU; `activations` None where nothing is known of them."""

    parameters: int
    gradients: int
    buckets: int
    optimizer: int
    buffers: int
    activations: int | None
    device: int

    @property
    def total(self) -> int:
        """What is known to be needed, together."""
        known = (self.parameters, self.gradients, self.buckets, self.optimizer, self.buffers)
        return sum(known) + (self.activations or 0)

    @property
    def fits(self) -> bool:
        """Whether the device has what is known to be needed."""
        return self.total <= self.device


@dataclass(frozen=True, slots=True)
class Engine:
    """How the answer was computed."""

    mode: str
    ranks_simulated: int
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank, a link or traffic that holds the others up: the step without it is shorter by that.

    `kind`: rank, link, traffic or stalls. `cost_s` is of a mean step without jitter; of stalls it
    is the mean over the simulated steps. Costs of several do not add up: each is alone taken away.
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
    """One term (`compute`, `host`, `network`) `factor` times as long, alone: a step of `step_s`.

    `suffices`: that is the measured step; otherwise even this last believable factor falls short.
    """

    term: str
    factor: float
    step_s: float
    suffices: bool


@dataclass(frozen=True, slots=True)
class Brief:
    """What a sweep asks of each of its scenarios; every figure as `Result` has it."""

    iteration_time_s: Distribution
    throughput_samples_per_s: float
    throughput_per_gpu: float
    scaling_efficiency: float
    comm_time_s: float
    exposed_comm_s: float
    world_size: int
    memory_bytes_per_gpu: Memory


@dataclass(frozen=True)
class Result:
    """One prediction. Times in seconds, on the rank that ends last, for steady iterations.

    `throughput_samples_per_s` is global; `scaling_efficiency` compares the throughput per GPU
    with one device's without DDP. `comm_time_s` is the union of the times in which a collective
    is in flight, `skew_s` the part of it spent waiting for late peers, `overlap_fraction`
    1 - exposed / comm (None without communication). `buckets_rebuilt_at` is the iteration, from 0,
    that first uses the rebuilt buckets (None: they are never rebuilt).
    """

    name: str
    world_size: int
    nodes: int
    gpus_per_node: int
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

    @property
    def is_disturbed(self) -> bool:
        """Whether a step waits for more than its own communication, which no baseline does."""
        waits = any(straggler.kind != "link" for straggler in self.stragglers)
        return waits or self.breakdown_s.data_wait > 0

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON's types (schema `ddpsim.result/1`), floats to 12 decimals."""
        plain = {"schema": RESULT_SCHEMA, **rounded(asdict(self))}
        plain["memory_bytes_per_gpu"]["total"] = self.memory_bytes_per_gpu.total
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
