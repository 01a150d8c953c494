"""The answer to "how many GPUs": world sizes with their time and cost, as `ddpsim.plan/1`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddpsim.provenance import Provenance
from ddpsim.result.model import Distribution, IntervalSource, NextStep, Tabled, rounded
from ddpsim.result.training import LearningRate
from ddpsim.units import format_long_duration

PLAN_SCHEMA = "ddpsim.plan/1"
KNEE_EFFICIENCY = 0.8  # of twice the throughput: our convention, and said wherever it is used


@dataclass(frozen=True, slots=True)
class Target:
    """The work, `epochs` times `amount` samples or tokens, and the seconds it may take.

    `certainty`: the share of runs that must be in time; None: half of them.
    """

    epochs: int
    amount: int
    unit: Literal["samples", "tokens"]
    within_s: float | None = None
    certainty: float | None = None


@dataclass(frozen=True, slots=True)
class Money:
    """An amount in a currency; the currency is a label, as its user wrote it."""

    amount: float
    currency: str


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of what interrupts a run: the settings, and what it makes of the median time."""

    what: str
    settings: tuple[str, ...]
    time_s: float
    saved_s: float


@dataclass(frozen=True, slots=True)
class LongRun:
    """The whole work with its failures, over many simulated runs.

    `certain_s`: the time that the target's share of runs keep. `shares` of the mean time go to
    `steps` (the goodput), `checkpoints`, `lost_work` and others. `mtbf_s`: between crashes and
    notices of the whole job. `checkpoint_every` steps, `interval_s` seconds of steps;
    `daly_interval_s`: the best by Daly 2006. `gpu_hours` and `cost` count the spares.
    `remedies`: the most useful first; of a plan's answer alone. `sources`: of all inputs.
    """

    runs: int
    time_s: Distribution
    certain_s: float
    shares: dict[str, float]
    interruptions: float
    mtbf_s: float | None
    checkpoint_every: int | None
    interval_s: float | None
    daly_interval_s: float | None
    spares: int
    paid_gpus: int
    gpu_hours: Distribution
    cost: Distribution | None
    sources: tuple[Provenance, ...]
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True, slots=True)
class Energy:
    """What the work takes from the grid, `watts_per_gpu` on average with its share of the host.

    `co2_kg`: None where nobody stated the grid's carbon.
    """

    kwh: float
    co2_kg: float | None
    watts_per_gpu: float
    basis: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """The whole work on one world size.

    `marginal_efficiency`: throughput over twice that of half the GPUs, None where half of them was
    not simulated. `time_interval_s`: the edges of the step's prediction interval, times the steps.
    `fits`: whether the known memory need fits; None where activations are unknown.
    `long_run`: with the scenario's failures, which the other figures leave out.
    `samples_factor`: so many times the target's samples are needed at this global batch, 1 where no
    critical batch is given; throughputs are then compared over it. `mfu`: as in `Training`.
    """

    gpus: int
    nodes: int
    gpus_per_node: int
    batch_per_rank: int
    accumulation_steps: int
    global_batch: int
    step_s: float
    throughput_samples_per_s: float
    scaling_efficiency: float
    marginal_efficiency: float | None
    steps: int
    time_s: float
    time_interval_s: tuple[float, float] | None
    gpu_hours: float
    cost: float | None
    memory_bytes: int
    fits: bool | None
    bottleneck: str
    warnings: tuple[str, ...]
    samples_factor: float = 1.0
    tokens_per_s: float | None = None
    mfu: float | None = None
    long_run: LongRun | None = None
    energy: Energy | None = None

    @property
    def expected_s(self) -> float:
        """The time to plan with: that of the steps, or with failures as surely as was asked."""
        return self.long_run.certain_s if self.long_run else self.time_s

    @property
    def calendar_s(self) -> tuple[float, tuple[float, float] | None]:
        """The median time with failures, p10 and p90; or that of the steps and its interval."""
        if self.long_run is None:
            return self.time_s, self.time_interval_s
        time_s = self.long_run.time_s
        return time_s.p50, (time_s.p10, time_s.p90)

    @property
    def paid_gpus(self) -> int:
        """GPUs of the job and of its spare nodes."""
        return self.long_run.paid_gpus if self.long_run else self.gpus

    @property
    def billed(self) -> tuple[float, float | None]:
        """GPU-hours and cost: in the median run, with spare nodes, where failures are known."""
        if self.long_run is None:
            return self.gpu_hours, self.cost
        cost = self.long_run.cost
        return self.long_run.gpu_hours.p50, cost.p50 if cost else None

    @property
    def cost_interval(self) -> tuple[float, float] | None:
        """What the time at its edges costs."""
        if self.long_run:
            cost = self.long_run.cost
            return (cost.p10, cost.p90) if cost else None
        if self.cost is None or self.time_interval_s is None:
            return None
        low_s, high_s = self.time_interval_s
        return self.cost * low_s / self.time_s, self.cost * high_s / self.time_s

    @property
    def progress(self) -> float:
        """Samples of the target a second; failures and batches that need more samples lower it."""
        steady = self.throughput_samples_per_s / self.samples_factor
        return steady * self.time_s / self.long_run.time_s.p50 if self.long_run else steady


def usable(sizes: Iterable[Capacity]) -> list[Capacity]:
    """The sizes that fit in memory as far as is known; all of them where none fits."""
    sizes = list(sizes)
    return [size for size in sizes if size.fits is not False] or sizes


def marginal_efficiencies(throughputs: Mapping[int, float]) -> dict[int, float]:
    """Throughput over twice that of half the GPUs, for each number whose half is known too."""
    return {
        gpus: rate / (2 * throughputs[gpus // 2])
        for gpus, rate in throughputs.items()
        if gpus % 2 == 0 and gpus // 2 in throughputs
    }


def knee(throughputs: Mapping[int, float]) -> int | None:
    """The number of GPUs from which doubling first gives less than 80 % of twice the throughput.

    `throughputs` are by number of GPUs; None where every doubling gives more.
    """
    efficiencies = marginal_efficiencies(throughputs)
    late = [gpus for gpus, efficiency in efficiencies.items() if efficiency < KNEE_EFFICIENCY]
    return min(late) // 2 if late else None


@dataclass(frozen=True, slots=True)
class NextDoubling:
    """Twice the answer's GPUs, against twice the answer's throughput on today's network.

    `efficiency` is with today's network; `without_network_time` and `unlimited_efficiency` (of this
    link's bandwidth) are the bounds. `needed_*`: the slowest network that meets the knee's
    criterion, and `needed_efficiency` what it gives; None where today's does, or no bandwidth does.
    `link` "all_reduce": a log or a profile says the times, and `needed_speedup` divides them.
    `gain_*`: of throughput on the answer's own GPUs, with that network or without any network time.
    `limit`: what bounds the step where the link's bandwidth is not enough. `samples_growth`: so
    many times the samples are needed at the doubled global batch; efficiencies count that.
    """

    gpus: int
    nodes: int
    gpus_per_node: int
    efficiency: float
    without_network_time: float
    gain_without_network_time: float
    link: Literal["inter_node", "intra_node", "all_reduce"]
    bandwidth_bytes_per_s: float | None = None
    unlimited_efficiency: float | None = None
    needed_speedup: float | None = None
    needed_bandwidth_bytes_per_s: float | None = None
    needed_efficiency: float | None = None
    gain_without_doubling: float | None = None
    limit: str = ""
    samples_growth: float = 1.0


@dataclass(frozen=True, slots=True)
class SizesLeftOut:
    """World sizes (as nodes x GPUs) that the scenario cannot have, and why."""

    sizes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class CapacityPlan(Tabled):
    """World sizes for a piece of work, and the one that answers.

    `met`: the answer keeps within target and budget, and fits in memory as far as is known; None
    where neither was given: then the answer is the knee. `within_budget`: the fastest that the
    budget pays for, where the answer is another. `sure`: the smallest of `sizes` that meets the
    target at the slow edge of its interval too. `knee_gpus`: None where every doubling gives at
    least the criterion. `scaling`: weak keeps batch_per_rank, strong the global batch. `widest`:
    what widens the answer's interval most. `critical_batch`: as asked;
    `counts_pauses`: evaluations and checkpoints, after as many samples on each size;
    `steps_by_batch`: measured global batches and steps to the target. `learning_rate`: advice for
    the answer's global batch, where the scenario states one. `asked_gpus`: the answer's size, where
    it was given.
    """

    name: str
    target: Target
    samples_per_epoch: int
    seq_len: int | None
    price: Money | None
    budget: Money | None
    scaling: Literal["weak", "strong"]
    sizes: tuple[Capacity, ...]
    answer: Capacity
    met: bool | None
    within_budget: Capacity | None
    sure: Capacity | None
    knee_gpus: int | None
    next_doubling: NextDoubling | None
    make_it_fit: NextStep | None
    searched: str
    left_out: tuple[SizesLeftOut, ...]
    most_gpus: int
    interval_level: float | None
    widest: IntervalSource | None
    critical_batch: int | None = None
    steps_by_batch: tuple[tuple[int, int], ...] | None = None
    counts_pauses: bool = False
    learning_rate: LearningRate | None = None
    asked_gpus: int | None = None

    def __repr__(self) -> str:
        answer = f"{self.answer.gpus} GPUs, {format_long_duration(self.answer.time_s)}"
        return (
            f"<CapacityPlan of {self.name}: {answer}{'' if self.met is not False else ', not met'}>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Gives JSON's types (schema `ddpsim.plan/1`), floats to 12 decimals."""
        plain: dict[str, Any] = rounded(asdict(self))
        return {"schema": PLAN_SCHEMA, "knee_efficiency": KNEE_EFFICIENCY, **plain}
