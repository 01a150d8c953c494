"""Finds the fewest changes, simulated, that make a job fit a GPU's memory.

All of them leave the global batch as it is: gradients as views of buckets, activation
checkpointing, smaller micro-batches, sharding of the optimizer or of everything, and sharded
gradients of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from ddpsim.errors import ScenarioError
from ddpsim.prediction.job import Job
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import NextStep
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.document import load
from ddpsim.scenario.load import parse
from ddpsim.scenario.options.checkpointing import Checkpointing
from ddpsim.scenario.options.fully_shard import (
    AS_AUTOCAST,
    CpuOffload,
    FullyShard,
    MixedPrecision,
)
from ddpsim.scenario.schema import Scenario
from ddpsim.units import format_bytes, format_duration

_MOST = 3  # ways that are named
_MOST_MICRO_BATCHES = 256  # of a way: to simulate more takes as many times as long
_KEPT = ("backend", "torch", "accumulation_steps", "no_sync")  # options that fully_shard has too


def ways_to_fit(job: Job, *, same_strategy: bool = False) -> tuple[NextStep, ...]:
    """The fewest changes with which a job fits, those with the shortest step first.

    Nothing where it fits. Where no changes suffice: those that need least. `same_strategy`: none
    that change ddp.strategy.
    """
    if job.memory().fits:
        return ()
    parts, least = job.parts_for_another or Parts(), None
    for together in _combinations(job, same_strategy=same_strategy):
        ways = [way for way in (_changed(job, each, parts) for each in together) if way]
        fitting = [way for way in ways if way.needs_bytes <= way.device_bytes]
        if fitting:
            ranked = sorted(fitting, key=lambda way: way.step_s)
            return tuple(way.as_next_step() for way in ranked[:_MOST])
        candidates = [*ways, least] if least else ways
        least = min(candidates, key=lambda way: way.needs_bytes, default=None)
    return (least.as_least(),) if least else ()


def split_to_fit(scenario: Scenario, parts: Parts | None = None) -> Scenario | None:
    """The fewest micro-batches of the same global batch that fit into memory; None: none do."""
    if scenario.cluster.algorithm == "data_parallel":  # it has no no_sync
        return None
    batch = scenario.workload.batch_per_rank
    if _fits(whole := _split(scenario, 1), parts):
        return whole
    if not _fits(smallest := _split(scenario, batch), parts):
        return None
    counts = (count for count in range(2, batch) if batch % count == 0)
    splits = (_split(scenario, count) for count in counts)
    return next((split for split in splits if _fits(split, parts)), smallest)


def _split(scenario: Scenario, count: int) -> Scenario:
    """Divide each micro-batch into `count`."""
    batch, steps = scenario.workload.batch_per_rank, scenario.ddp.accumulation_steps
    smaller = scenario.having("workload", batch_per_rank=batch // count)
    return smaller.having("ddp", accumulation_steps=count * steps)


def _fits(scenario: Scenario, parts: Parts | None) -> bool:
    """Whether a scenario fits, by two of its micro-batches where it has more."""
    few = scenario.having("ddp", accumulation_steps=min(2, scenario.ddp.accumulation_steps))
    return resolve(few, parts=parts).memory().fits


@dataclass(frozen=True)
class _Way:
    """Changes of a scenario, in words and as settings, and what it needs with them."""

    scenario: Scenario
    words: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    needs_bytes: int = 0
    device_bytes: int = 0
    step_s: float = 0.0

    def and_with(self, scenario: Scenario, words: str, *settings: str) -> _Way:
        """Return the way with one more change."""
        return _Way(scenario, (*self.words, words), (*self.settings, *settings))

    def priced(self, original: Scenario, parts: Parts) -> _Way | None:
        """Add what the way needs; None where it is refused, as settings of `original` too."""
        try:
            parse(load(original, self.settings))
            job = resolve(self.scenario, parts=parts)
        except ScenarioError:
            return None
        memory = job.memory()
        step_s = job.step_s() if memory.fits else 0.0
        return replace(self, needs_bytes=memory.total, device_bytes=memory.device, step_s=step_s)

    @property
    def _changes(self) -> str:
        *others, last = self.words
        return f"{', '.join(others)} and {last}" if others else last

    def as_next_step(self) -> NextStep:
        """Describe a way that fits."""
        needs, step = format_bytes(self.needs_bytes), format_duration(self.step_s)
        return NextStep(f"fits with {self._changes}: {needs}, {step} a step", self.settings)

    def as_least(self) -> NextStep:
        """Describe a way that does not fit either."""
        needs, device = format_bytes(self.needs_bytes), format_bytes(self.device_bytes)
        why = f"does not fit even with {self._changes}: {needs} of {device}"
        return NextStep(why, self.settings)


_Change = Callable[[_Way], _Way | None]


def _combinations(job: Job, *, same_strategy: bool) -> Iterator[list[Sequence[_Change]]]:
    """All ways of one change, then all of two, ...; the split comes last, as it fills what is left.

    Checkpoints and other batches are tried only where compute is estimated: none were measured.
    """
    estimated = job.model.basis == "roofline"
    groups: list[tuple[_Change, ...]] = [(_bucket_view,)]
    if not same_strategy:
        groups.append((_zero1, _fully_shard))
    if job.scenario.ddp.shards_model:
        groups.append((_reduces_each,))
    groups.append((_offload,))
    if estimated:
        groups += [(_checkpoints,), (_micro_batches,)]
    for count in range(1, len(groups) + 1):
        yield [chosen for some in combinations(groups, count) for chosen in product(*some)]


def _changed(job: Job, changes: Sequence[_Change], parts: Parts) -> _Way | None:
    way: _Way | None = _Way(job.scenario)
    for change in changes:
        way = way and change(way)
    return way and way.priced(job.scenario, parts)


def _is_alone(scenario: Scenario) -> bool:
    return scenario.cluster.algorithm == "data_parallel" or scenario.cluster.world_size == 1


def _bucket_view(way: _Way) -> _Way | None:
    ddp = way.scenario.ddp
    if way.scenario.cluster.algorithm == "data_parallel" or not ddp.is_ddp:
        return None
    if ddp.gradient_as_bucket_view or ddp.torch == "1.4":
        return None
    viewed = way.scenario.having("ddp", gradient_as_bucket_view=True)
    words = "gradient_as_bucket_view"
    return way.and_with(viewed, words, "ddp.gradient_as_bucket_view=true")


def _zero1(way: _Way) -> _Way | None:
    ddp = way.scenario.ddp
    if _is_alone(way.scenario) or ddp.strategy != "ddp" or ddp.is_torch_1:
        return None
    return way.and_with(way.scenario.having("ddp", strategy="zero1"), "zero1", "ddp.strategy=zero1")


def _fully_shard(way: _Way) -> _Way | None:
    """fully_shard, unless the scenario has options of DDP that fully_shard lacks."""
    ddp = way.scenario.ddp
    usual = Ddp(**{key: getattr(ddp, key) for key in _KEPT})
    refused = way.scenario.workload.sync_batch_norm or ddp.is_torch_1
    if _is_alone(way.scenario) or ddp != usual or refused:
        return None
    if way.scenario.workload.precision != "amp-bf16":
        sharded = way.scenario.having("ddp", strategy="fully_shard")
        return way.and_with(sharded, "fully_shard", "ddp.strategy=fully_shard")
    mixed = FullyShard(mixed_precision=MixedPrecision(param="bfloat16", reduce="float32"))
    sharded = way.scenario.having("ddp", strategy="fully_shard", fully_shard=mixed)
    return way.and_with(sharded, "fully_shard", "ddp.strategy=fully_shard", AS_AUTOCAST)


def _reduces_each(way: _Way) -> _Way | None:
    """Gradients reduced each micro-batch, so that a GPU keeps only its shard between them."""
    ddp, is_one = way.scenario.ddp, way.scenario.workload.batch_per_rank == 1
    if not ddp.no_sync or ddp.host_copies or (ddp.accumulation_steps == 1 and is_one):
        return None
    reduced = way.scenario.having("ddp", no_sync=False)
    return way.and_with(reduced, "gradients reduced each micro-batch", "ddp.no_sync=false")


def _offload(way: _Way) -> _Way | None:
    """Shards, gradients and optimizer on the host, unless other work would then run there too."""
    scenario, ddp = way.scenario, way.scenario.ddp
    needs_gpu = scenario.workload.clip_grad_norm or scenario.workload.scales_loss
    adds_there = ddp.accumulation_steps > 1 and not ddp.no_sync
    if not ddp.is_fully_sharded or ddp.host_copies or needs_gpu or adds_there:
        return None
    moved = ddp.sharding.having(offload_policy=CpuOffload())
    setting = "ddp.fully_shard.offload_policy=CPUOffloadPolicy"
    offloaded = scenario.having("ddp", fully_shard=moved)
    return way.and_with(offloaded, "CPUOffloadPolicy", setting)


def _checkpoints(way: _Way) -> _Way | None:
    workload = way.scenario.workload
    full = Checkpointing()
    refused = workload.sync_batch_norm or workload.checkpointing == full
    if refused or workload.model is None:
        return None
    checkpointed = way.scenario.having("workload", checkpointing=full)
    words = "activation checkpointing"
    return way.and_with(checkpointed, words, "workload.checkpointing=full")


def _micro_batches(way: _Way) -> _Way | None:
    """Splits the batch into as few micro-batches as fit, or into the smallest there are."""
    scenario = way.scenario
    if scenario.cluster.algorithm == "data_parallel" or scenario.workload.batch_per_rank == 1:
        return None
    try:
        split = split_to_fit(scenario) or _split(scenario, scenario.workload.batch_per_rank)
    except ScenarioError:
        return None
    batch, steps = split.workload.batch_per_rank, split.ddp.accumulation_steps
    if steps > _MOST_MICRO_BATCHES:
        return None
    settings = (f"workload.batch_per_rank={batch}", f"ddp.accumulation_steps={steps}")
    return way.and_with(split, f"{steps} micro-batches of {batch}", *settings)
