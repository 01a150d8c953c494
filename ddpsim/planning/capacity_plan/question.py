"""The question of a capacity plan: the work and its samples, limits, a world size's scenario."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, exp, log
from pathlib import Path

from ddpsim.cluster.logs import LOGS
from ddpsim.errors import ImportFailedError, InputError, blamed_on
from ddpsim.importers.text import ForeignFile, read_text
from ddpsim.planning.capacity_plan.long_run import HALF, Campaign
from ddpsim.prediction.fitting import split_to_fit
from ddpsim.prediction.program import pauses_of
from ddpsim.prediction.resolve import resolve
from ddpsim.result.capacity import Energy, LongRun, Money, Target
from ddpsim.result.model import Result
from ddpsim.result.training import paused_s
from ddpsim.scenario.catalog import board_watts
from ddpsim.scenario.device import Device
from ddpsim.scenario.quantity import SourceFile
from ddpsim.scenario.schema import Scenario
from ddpsim.wording import counted

_MOST_RANKS = 2_000_000
_S_PER_HOUR = 3600

_COLUMNS = ("batch", "steps")
_NOISE = 0.8  # of the samples that a smaller batch needs (assumed): fewer is another target

# of a board's power, assumed: while it waits for the network, or for a restart
_IDLE = 0.3
# of a board's power, for host, NICs, switches and fans: half of what the whole system takes at
# most beside its boards, in NVIDIA's data sheets of DGX A100 (6.5 kW, 8 x 400 W) and DGX H100
# (10.2 kW, 8 x 700 W)
_HOST = 0.46
_BUSY_CAUSES = ("steps", "checkpoints", "lost_work", "slow_steps")
_J_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Question:
    """Target and limits of a plan, and the scenario of each world size."""

    scenario: Scenario
    target: Target
    price: Money | None
    budget: Money | None
    global_batch: int | None
    max_gpus: int
    critical_batch: int | None = None
    steps_by_batch: StepsByBatch | None = None
    answer_gpus: int | None = None
    site: Site | None = None

    def check(self) -> None:
        """Raise InputError for what does not fit together."""
        whole_node = self.scenario.cluster.gpus_per_node
        least = 1 if self.scenario.cluster.nodes == 1 else whole_node
        if not least <= self.max_gpus <= _MOST_RANKS:
            which = "one node's GPUs" if least > 1 else "one GPU"
            wanted = f"wanted {least} ({which}) to {_MOST_RANKS}"
            raise InputError("max_gpus", f"{self.max_gpus} is out of range: {wanted}")
        if self.budget and self.budget.currency != "GPU-hours":
            _check_currency(self.budget, self.price)
        if self.global_batch is not None:
            self._check_global_batch(self.global_batch)
        if self.critical_batch is not None and not 1 <= self.critical_batch <= 10**12:
            reason = f"{self.critical_batch} is out of range: wanted 1 to 10^12 samples"
            raise InputError("critical_batch", reason)
        if self.target.certainty is not None and self.scenario.reliability is None:
            reason = (
                "a certainty needs what fails; state reliability (--mtbf '50000 h'), or drop it"
            )
            raise InputError("target", reason)
        if self.critical_batch is not None and self.steps_by_batch:
            raise InputError("steps_by_batch", "says what critical_batch says; drop one")
        if self.site:
            self.site.check(self.scenario.cluster.device)
        _ = self.samples

    def _check_global_batch(self, wanted: int) -> None:
        if not 1 <= wanted <= 10**9:
            raise InputError("global_batch", f"{wanted} is out of range: wanted 1 to 10^9 samples")
        if resolve(self.scenario).model.basis != "roofline":
            workload = self.scenario.workload
            raise InputError(
                "global_batch",
                f"workload.{workload.measured_by} was measured with {workload.batch_per_rank} "
                "samples a rank, and says nothing of other batches; drop --global-batch "
                "(batch_per_rank then stays), or plan with a zoo model's estimate, without it",
            )

    @property
    def seq_len(self) -> int | None:
        """Tokens in a sample; None where the model has no such thing."""
        return self.scenario.workload.tokens_per_sample

    @property
    def samples(self) -> int:
        """Samples in one epoch; raises InputError where tokens cannot be counted."""
        if self.target.unit == "samples":
            return self.target.amount
        if self.seq_len is None:
            raise InputError(
                "target",
                "this workload has no seq_len, so its tokens cannot be counted; write a number "
                "of samples",
            )
        return ceil(self.target.amount / self.seq_len)

    @property
    def of_a_log(self) -> bool:
        """Whether times of collectives are a log's, which is of one world size."""
        return any(getattr(self.scenario.cluster, log) for log in LOGS)

    @property
    def accumulated(self) -> int:
        """Micro-batches in a step."""
        return self.scenario.ddp.accumulation_steps

    def has(self, gpus: int) -> bool:
        """Whether the global batch divides by so many GPUs and their micro-batches."""
        replica = self.scenario.cluster.replica
        ranks, rest = divmod(gpus, replica.gpus if replica else 1)
        if rest or not ranks:
            return False
        return self.global_batch is None or self.global_batch % (ranks * self.accumulated) == 0

    def at(self, nodes: int, gpus_per_node: int) -> Scenario:
        """The scenario on another world size; raises InputError where it does not exist."""
        cluster = self.scenario.cluster.resized(nodes, gpus_per_node)
        workload, ranks = self.scenario.workload, cluster.world_size
        if self.global_batch is not None:
            batch, rest = divmod(self.global_batch, ranks * self.accumulated)
            if rest:
                each = f" x {self.accumulated} micro-batches" if self.accumulated > 1 else ""
                raise InputError(
                    "global_batch", f"{self.global_batch} samples do not divide by the GPUs{each}"
                )
            workload = workload.having(batch_per_rank=batch)
        sized = self.scenario.having(cluster=cluster, workload=workload)
        if not sized.ddp.reshards_among(sized.sharding_ranks):
            kept, share = sized.ddp.sharding.kept_by, counted(sized.sharding_ranks, "rank")
            reason = f"{kept} does not divide {share}"
            raise InputError("ddp.fully_shard.reshard_after_forward", reason)
        sized = _with_pauses_of(sized, self.scenario)
        self.growth(sized)
        return sized if self.global_batch is None else split_to_fit(sized) or sized

    def campaign(
        self, scenario: Scenario, step_s: float, edges_s: tuple[float, float] | None
    ) -> Campaign:
        """A world size's work as a run of days, with the scenario's failures."""
        certainty = self.target.certainty or HALF
        steps = self.steps(scenario)
        return Campaign(scenario, steps, step_s, edges_s, certainty, self.price)

    def time_s(self, scenario: Scenario, step_s: float) -> float:
        """Seconds of all steps, with the pauses between them."""
        workload = scenario.workload
        if workload.evaluation or workload.checkpoint_write:
            step_s += paused_s(pauses_of(resolve(scenario)))
        return self.steps(scenario) * step_s

    def steps(self, scenario: Scenario) -> int:
        """Steps of all epochs; the last of each is whole, as torch's DistributedSampler pads it."""
        steps = self.target.epochs * ceil(self.samples / scenario.global_batch)
        return ceil(steps * self.growth(scenario)) if self.grows else steps

    @property
    def grows(self) -> bool:
        """Whether larger batches need more samples."""
        return self.critical_batch is not None or self.steps_by_batch is not None

    def growth(self, scenario: Scenario) -> float:
        """How many times the target's samples a global batch needs: 1 + B / critical batch.

        Source: McCandlish et al. 2018 (arXiv:1812.06162); or as measured, of the smallest batch.
        1 where it is not known. Raises InputError for a batch outside of what was measured.
        """
        if self.steps_by_batch:
            return self.steps_by_batch.growth(scenario.global_batch)
        if self.critical_batch is None:
            return 1.0
        return 1 + scenario.global_batch / self.critical_batch

    def cost(self, gpus: int, time_s: float) -> float | None:
        """Cost at the price of a GPU-hour; None without a price."""
        return None if self.price is None else self.price.amount * gpu_hours(gpus, time_s)

    def in_time(self, time_s: float) -> bool:
        """Whether the deadline is met; True without one."""
        return self.target.within_s is None or time_s <= self.target.within_s

    def affordable(self, gpus: int, time_s: float) -> bool:
        """Whether the budget suffices; True without one."""
        if self.budget is None:
            return True
        hours = gpu_hours(gpus, time_s)
        spent = hours if self.budget.currency == "GPU-hours" else self.cost(gpus, time_s)
        return spent is not None and spent <= self.budget.amount


def _with_pauses_of(sized: Scenario, usual: Scenario) -> Scenario:
    """Keeps evaluations and checkpoints after as many samples: after fewer of larger steps."""
    share = usual.global_batch / sized.global_batch
    pauses = {
        key: pause.having(every=max(1, round(pause.every * share)))
        for key in ("evaluation", "checkpoint_write")
        if (pause := getattr(sized.workload, key)) and pause.every != "auto"
    }
    return sized.having("workload", **pauses) if pauses else sized


def _check_currency(budget: Money, price: Money | None) -> None:
    if price is None:
        raise InputError(
            "budget",
            "needs --price, of a GPU-hour (no price is assumed here); or write GPU-hours",
        )
    if price.currency != budget.currency:
        raise InputError(
            "budget",
            f"is in {budget.currency}, the price in {price.currency}; write both in one currency",
        )


def gpu_hours(gpus: int, time_s: float) -> float:
    """GPU-hours of so many GPUs for so many seconds."""
    return gpus * time_s / _S_PER_HOUR


@dataclass(frozen=True)
class StepsByBatch:
    """Measured steps to one target, `points` of global batch and steps, by batch."""

    source: str
    points: tuple[tuple[int, int], ...]

    def growth(self, batch: int) -> float:
        """How many times the samples of the smallest measured batch another one needs.

        Between two measured batches samples are a power of the batch. Raises InputError outside.
        """
        (least, steps), (most, _) = self.points[0], self.points[-1]
        if not least <= batch <= most:
            raise InputError(
                "steps_by_batch",
                f"a global batch of {batch:,} lies outside of {least:,} to {most:,}, which "
                f"{self.source} has steps for",
            )
        return self._samples(batch) / (least * steps)

    def _samples(self, batch: int) -> float:
        below = max(point for point in self.points if point[0] <= batch)
        above = min(point for point in self.points if point[0] >= batch)
        samples = [size * steps for size, steps in (below, above)]
        if below == above:
            return float(samples[0])
        part = log(batch / below[0]) / log(above[0] / below[0])
        return exp((1 - part) * log(samples[0]) + part * log(samples[1]))


def read_steps_by_batch(path: str | Path) -> StepsByBatch:
    """A CSV with the columns batch and steps; raises InputError with file, line and fault."""
    name, points = str(path), dict[int, int]()
    with blamed_on("steps_by_batch"):
        if not Path(path).is_file():
            raise ImportFailedError(name, f"no such file; wanted a CSV of {','.join(_COLUMNS)}")
        content = read_text(SourceFile(name, Path(path)), "a CSV of batch,steps")
        file = ForeignFile(name)
        for line, row in file.table(content.splitlines(), _COLUMNS):
            batch, steps = (file.whole(line, row[column], column) for column in _COLUMNS)
            if batch in points:
                raise ImportFailedError(name, f"has the batch {batch} twice; keep one", line)
            points[batch] = steps
        if len(points) == 1:
            raise ImportFailedError(name, "has one batch; two at least have others between them")
        by_batch = tuple(sorted(points.items()))
        _check_is_plausible(name, by_batch)
    return StepsByBatch(name, by_batch)


def _check_is_plausible(name: str, points: tuple[tuple[int, int], ...]) -> None:
    """A larger batch needs no more steps, and no fewer samples, to the same target."""
    for (smaller, steps), (batch, fewer) in pairwise(points):
        fault = f"has {steps:,} steps at batch {smaller:,} and {fewer:,} at {batch:,}"
        if fewer > steps:
            raise ImportFailedError(name, f"{fault}; wanted no more at a larger batch")
        if batch * fewer < _NOISE * smaller * steps:
            raise ImportFailedError(
                name,
                f"{fault}, which are fewer samples; wanted steps to one and the same target",
            )


@dataclass(frozen=True)
class Site:
    """A building with machines: its power over theirs, and the carbon of its grid."""

    pue: float
    co2_g_per_kwh: float | None = None

    def check(self, device: Device) -> None:
        """Raise InputError for what no building has, or a device of unknown power."""
        if not 1 <= self.pue <= 10:
            raise InputError("pue", f"{self.pue:g} is out of range: wanted 1 to 10")
        if self.co2_g_per_kwh is not None and not 0 <= self.co2_g_per_kwh <= 5000:
            raise InputError("carbon", f"{self.co2_g_per_kwh:g} is out of range: wanted 0 to 5000")
        if board_watts(device.name) is None:
            raise InputError("pue", f"the board power of {device.name} is not known; drop it")


def energy_of(
    site: Site, device: Device, result: Result, gpus: int, run: LongRun | float
) -> Energy:
    """The energy of a run, or of so many seconds of steps.

    A board takes its full power while it computes, and a part of it at all other times.
    """
    watts = board_watts(device.name) or 0.0
    step_s = result.iteration_time_s.mean
    computes = max(0.0, 1 - result.exposed_comm_s / step_s)
    time_s, busy = (
        (run, 1.0)
        if isinstance(run, float)
        else (run.time_s.p50, sum(run.shares[cause] for cause in _BUSY_CAUSES))
    )
    utilisation = computes * busy
    each = watts * (_IDLE + (1 - _IDLE) * utilisation + _HOST)
    kwh = site.pue * gpus * each * time_s / _J_PER_KWH
    grams = site.co2_g_per_kwh
    return Energy(
        kwh=kwh,
        co2_kg=None if grams is None else kwh * grams / 1000,
        watts_per_gpu=each,
        basis=f"boards of {watts:g} W that compute {utilisation:.0%} of the time, assumed "
        f"{_IDLE:.0%} of that power else and {_HOST:.0%} more for host and network; PUE "
        f"{site.pue:g}",
    )
