"""The effect of a change to a scenario, and whether it exceeds its uncertainty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

from ddpsim.errors import DdpsimError, InputError, ScenarioError, attempted
from ddpsim.planning.many import brief_of
from ddpsim.planning.other_training import other_training
from ddpsim.planning.shardings import (
    ALL_REDUCE_EACH,
    fit_in_words,
    settings_to_fit,
    shardings,
    strategy_name,
)
from ddpsim.prediction.api import predicted
from ddpsim.prediction.interval import GLOO_SLOWDOWN
from ddpsim.prediction.job import Job
from ddpsim.prediction.measured_step import as_stated, check_measured
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.resolve import resolve
from ddpsim.prediction.uncertainty import uncertainties
from ddpsim.progress import Stage, stage
from ddpsim.result.changes import BUFFERS_DIFFER, Change, Comparison
from ddpsim.result.model import Brief
from ddpsim.scenario.ddp import OF_HOOKS, Ddp
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from ddpsim.scenario.options.checkpointing import WORDS
from ddpsim.scenario.options.linear_layers import BASES
from ddpsim.scenario.options.zero_redundancy import ZERO_HOOKS, ZeroRedundancy
from ddpsim.scenario.other_strategies import other_strategies
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.set_aside import as_ddp, set_aside
from ddpsim.scenario.workload import Workload
from ddpsim.settings import setting
from ddpsim.units import format_duration
from ddpsim.workload.numerics import other_numerics

_CAPS_MB = (1, 10, 25, 50, 100)
_ZERO1 = "ddp.zero1"
_OVERLAPS = f"{_ZERO1}.overlap_with_ddp"
_BUDGETS = (0.5, 0.8)  # of torch.compile's partitioner

_EVERY = 4  # as in the example of torch's PeriodicModelAverager
_Changed = tuple[Sequence[str], str]  # settings, and an effect other than time
_Steps = dict[tuple[int, str, float], float]  # by side, term and its factor


@dataclass(frozen=True)
class Option:
    """A scenario to compare with another, or the error that prevents it."""

    title: str
    scenario: Scenario | ScenarioError
    settings: tuple[str, ...] = ()
    note: str = ""


def compare(base: Scenario, options: Iterable[Option], baseline: str = "") -> Comparison:
    """Compare each option with a base scenario, in time for the samples of the base's step.

    `baseline` says which scenario the base is, as the options' titles do for theirs.

    The difference's interval varies what is uncertain in both (compute, network ...) in both at
    once, as it would be wrong in the same way; what is known from different sources varies on its
    own. Raises ScenarioError if the first cannot be simulated.
    """
    parts, options = Parts(), list(options)
    with stage("scenarios", len(options) + 1) as progress:
        job = resolve(base, parts=parts)
        result = predicted(job)
        first = _Side(job, Brief.of(result))
        _report(progress, baseline or base.name, first)
        others = list[_Side | DdpsimError]()
        for each in options:
            others.append(attempted(_Side.of, each.scenario, parts))
            _report(progress, each.title, others[-1])
        sides = [first, *(side for side in others if isinstance(side, _Side))]
        steps_s = _steps_s(sides, progress)
    return Comparison(
        base.name,
        base.cluster.world_size,
        job.scenario.global_batch,
        result.iteration_time_s.mean,
        result.prediction_interval_s,
        tuple(_change(first, *each, steps_s) for each in zip(options, others, strict=True)),
        result.warnings,
        baseline,
        result.iteration_time_s.noise(base.run.iterations),
        result.memory_bytes_per_gpu.fits,
        result.gpus,
        base.workload.tokens_per_sample,
    )


def _report(progress: Stage, title: str, side: _Side | DdpsimError) -> None:
    """Report that a side is simulated: half of its work, or all of it where it cannot be."""
    if isinstance(side, _Side):
        step = format_duration(side.brief.iteration_time_s.mean)
        progress.findings.append(f"{title}: {step} a step")
    progress.advance(0.5 if isinstance(side, _Side) else 1.0)


@dataclass(frozen=True)
class _Side:
    job: Job
    brief: Brief

    @classmethod
    def of(cls, scenario: Scenario | ScenarioError, parts: Parts) -> _Side:
        if isinstance(scenario, ScenarioError):
            raise scenario
        job = resolve(scenario, parts=parts)
        return cls(job, brief_of(job, parts))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What `simulate` warns of."""
        return self.job.warnings(self.brief.iteration_time_s.mean)

    @property
    def hidden_s(self) -> float:
        """Communication that overlaps compute, where no interference is calibrated."""
        brief, calibrated = self.brief, self.job.network.interference is not None
        return 0.0 if calibrated else brief.comm_time_s - brief.exposed_comm_s


def _change(first: _Side, option: Option, other: _Side | DdpsimError, steps_s: _Steps) -> Change:
    title, settings, note = option.title, option.settings, option.note
    if isinstance(option.scenario, Scenario):
        others = [*other_training(first.job.scenario, option.scenario)]
        if isinstance(other, _Side):
            others += other_numerics(*((s.job.scenario, s.job.model) for s in (first, other)))
        note = ", ".join(dict.fromkeys(part for part in (note, *others) if part))
    if isinstance(other, DdpsimError):
        return Change(title, settings, note=note, problem=other.reason)
    step_s, first_s = (side.brief.iteration_time_s.mean for side in (other, first))
    share = first.job.scenario.global_batch / other.job.scenario.global_batch
    change_s = share * step_s - first_s
    below_s, above_s = _margins(first, other, share, steps_s)
    memory, before = (side.brief.memory_bytes_per_gpu for side in (other, first))
    return Change(
        title,
        settings,
        step_s,
        change_s,
        change_s / first_s,
        change_s - below_s,
        change_s + above_s,
        memory.total - before.total,
        memory.fits,
        note,
        warnings=other.warnings,
    )


def _steps_s(sides: Sequence[_Side], progress: Stage) -> _Steps:
    """Every side's step without noise, as it is and with each uncertain term at its edges."""
    steps: _Steps = {}
    for side in sides:
        terms = uncertainties(side.job).items()
        variants = [_UNCHANGED, *((term, f) for term, each in terms for f in each.edges)]
        steps_s = side.job.steps_s([{term: factor} for term, factor in variants])
        steps |= {(id(side), *each): step_s for each, step_s in zip(variants, steps_s, strict=True)}
        progress.advance(0.5)
    return steps


_UNCHANGED = ("compute", 1.0)


def _margins(first: _Side, other: _Side, share: float, steps_s: _Steps) -> tuple[float, float]:
    """How far the difference may lie below and above what is predicted, in seconds."""

    def moves_s(side: _Side, term: str) -> list[float]:
        unchanged_s = steps_s[(id(side), *_UNCHANGED)]
        terms = uncertainties(side.job)
        if term not in terms:
            return [0.0, 0.0]
        return [steps_s[id(side), term, factor] - unchanged_s for factor in terms[term].edges]

    below, above = [0.0], [0.0]
    of_first, of_other = uncertainties(first.job), uncertainties(other.job)
    for term in sorted(of_first.keys() | of_other.keys()):
        ours, theirs = moves_s(first, term), [share * s for s in moves_s(other, term)]
        together = [t - o for o, t in zip(ours, theirs, strict=True)]
        alike = of_first.get(term) == of_other.get(term)
        for moves in [together] if alike else [[-o for o in ours], theirs]:
            below.append(max(0.0, *(-move for move in moves)))
            above.append(max(0.0, *moves))
    slowed_s = GLOO_SLOWDOWN * (share * other.hidden_s - first.hidden_s)
    return hypot(*below) + max(0.0, -slowed_s), hypot(*above) + max(0.0, slowed_s)


def option(document: Document, *settings: str, title: str = "", note: str = "") -> Option:
    """A document with settings, named by its `title`, or else by the settings."""
    title = title or ", ".join(settings)
    try:
        scenario = parse(document.changed(settings))
        for original in (as_stated(document), parse(document) if settings else None):
            if original is not None:
                check_measured(original, scenario, "set both")
    except ScenarioError as error:
        return Option(title, error, settings, note)
    return Option(title, scenario, settings, note)


def each_flag(document: Document) -> Iterator[Option]:
    """Every option of DDP with another value, and the fused optimizer; raises ScenarioError."""
    scenario = parse(document)
    alone = scenario.cluster.algorithm == "data_parallel"
    flags = () if alone else (*_flags(scenario), *_accumulation(scenario.ddp))
    for settings, note in (*flags, *_of_workload(scenario.workload)):
        yield option(document, *settings, note=note)


def hook_settings(ddp: Ddp, hook: str) -> tuple[str, ...]:
    """What sets a hook, without the options of another one."""
    drops = [key for key, owner in OF_HOOKS.items() if getattr(ddp, key) and hook != owner]
    return (f"ddp.comm_hook={hook}", *(f"ddp.{key}=null" for key in drops))


def each_strategy(document: Document, options: Mapping[str, Any] | None = None) -> Iterator[Option]:
    """A scenario of DDP with every other strategy, without DDP's options; raises ScenarioError.

    `document` has the settings of `as_ddp`. `options`: the `own_options` before these.
    """
    scenario = parse(document)
    if scenario.cluster.algorithm == "data_parallel":
        key, reason = "cluster.algorithm", "data_parallel is a strategy of its own; write auto"
        raise ScenarioError([document.blame(InputError(key, reason))])
    ddp = scenario.ddp

    def chosen(strategy: str) -> tuple[str, ...]:
        return (f"ddp.strategy={strategy}", *set_aside(dict(ddp), strategy))

    for name in ("naive", "naive_flat", "per_parameter", "parameter_server"):
        yield option(document, *chosen(name), title=name, note=_unlike(scenario))
    local = (*chosen("local_sgd"), f"ddp.local_sgd.every={_EVERY}")
    yield option(document, *local, title=f"local_sgd, every={_EVERY}")
    for name in other_strategies():
        yield option(document, *chosen(name), title=name, note="of another package")
    parts = Parts()
    for settings in shardings(scenario, options, rounds=True):
        name = strategy_name(settings)
        note = "" if name == "zero1" else _unlike(scenario)
        yield option(document, *settings, title=name, note=note)
        if changes := settings_to_fit(document, settings, parts=parts):
            fits = f"{name}, {fit_in_words(changes)}"
            yield option(document, *settings, *changes, title=fits, note=note)
        if name == "zero1":
            yield from _overlapped(document, settings, synced=ddp.no_sync)


def _overlapped(document: Document, settings: Sequence[str], *, synced: bool) -> Iterator[Option]:
    """ZeRO-1 within DDP's hooks, where torch can."""
    shared = (*settings, *(() if synced else ("ddp.no_sync=true",)))
    for hook in ZERO_HOOKS:
        changes = (*shared, f"{_OVERLAPS}=true", f"{_ZERO1}.hook={hook}")
        overlapped = option(document, *changes, title=f"zero1, {hook}")
        if isinstance(overlapped.scenario, Scenario):
            yield overlapped


def _unlike(scenario: Scenario) -> str:
    return BUFFERS_DIFFER if scenario.ddp.broadcast_buffers else ""


def _others(key: str, current: object, *values: object, note: str = "") -> Iterator[_Changed]:
    """A key with each of some values but its current one; without values, a switch turned over."""
    yield from (([setting(key, each)], note) for each in values or (True, False) if each != current)


def _of_workload(workload: Workload) -> Iterator[_Changed]:
    """Batch norms without other ranks, no barriers, other checkpoints, adapters and optimizers."""
    if workload.sync_batch_norm:
        yield ["workload.sync_batch_norm=false"], ""
    if workload.barrier_every:
        yield ["workload.barrier_every=null"], ""
    if not workload.measured_by:
        yield from _of_estimated(workload)
    optimizer = workload.optimizer
    if optimizer.name != "adafactor":
        yield from _others("workload.optimizer.fused", optimizer.fused)
    if optimizer.by_parameter:
        yield ["workload.optimizer=adamw"], ""


def _of_estimated(workload: Workload) -> Iterator[_Changed]:
    """Other activation checkpointing and fine-tuning, where a model has some."""
    if checkpointing := workload.checkpointing:
        for budget in _BUDGETS if workload.compile else ():
            if checkpointing.memory_budget != budget:
                yield [f"workload.checkpointing={{memory_budget: {budget}}}"], ""
        for word, options in WORDS.items():
            if checkpointing != options:
                yield [f"workload.checkpointing={word}"], ""
    if workload.frozen:
        yield ["workload.frozen=[]"], ""
    if lora := workload.lora:
        yield ["workload.lora=null"], ""
        if workload.precision == "bf16":
            yield from _others("workload.lora.base", lora.base, None, *BASES)


def _of_another_strategy(ddp: Ddp) -> Iterator[_Changed]:
    """DDP instead, and Megatron's other type of gradients."""
    yield as_ddp(ddp), ""
    if ddp.strategy == "distributed_optimizer" and ddp.shards.params == "bfloat16":
        key = "ddp.distributed_optimizer.grad_reduce_in_bf16"
        yield from _others(key, ddp.shards.grad_reduce_in_bf16)


def _flags(scenario: Scenario) -> Iterator[_Changed]:
    ddp = scenario.ddp
    if not ddp.is_ddp:
        yield from _of_another_strategy(ddp)
        return
    if ddp.strategy == "zero1":
        yield from _of_zero1(ddp.zero1 or ZeroRedundancy())
    for key in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters"):
        yield from _others(f"ddp.{key}", getattr(ddp, key))
    yield from _others("ddp.broadcast_buffers", ddp.broadcast_buffers, note=_unlike(scenario))
    if scenario.workload.compile:
        yield from _others("ddp.optimize_ddp", ddp.optimize_ddp)
    if ddp.reduced_again:
        yield ["ddp.reduced_again=null"], ""
    for hook in ("none", "allreduce", *scenario.cluster.device.two_byte_hooks):
        if hook != ddp.comm_hook:
            yield hook_settings(ddp, hook), ""
    cap = "default" if ddp.bucket_cap_mb is None else ddp.bucket_cap_mb
    yield from _others("ddp.bucket_cap_mb", cap, *_CAPS_MB, "default")


def _of_zero1(zero1: ZeroRedundancy) -> Iterator[_Changed]:
    """Other options of ZeroRedundancyOptimizer."""
    if zero1.overlap_with_ddp:
        yield [f"{_ZERO1}=null"], ""
        yield from _others(f"{_ZERO1}.hook", zero1.hook, *ZERO_HOOKS)
        yield from _others(f"{_ZERO1}.shard_buckets", zero1.shard_buckets)
        return
    view = f"{_ZERO1}.parameters_as_bucket_view"
    yield from _others(view, zero1.parameters_as_bucket_view)
    drops = [f"{view}=false"] if zero1.parameters_as_bucket_view else []
    for hook in ZERO_HOOKS:
        yield [*drops, f"{_OVERLAPS}=true", f"{_ZERO1}.hook={hook}"], ""


def _accumulation(ddp: Ddp) -> Iterator[_Changed]:
    each = [ALL_REDUCE_EACH] if ddp.sharding.all_reduce_last_only else []
    for steps in (1, 2, 4):
        if steps != ddp.accumulation_steps:
            only = each if steps == 1 else []
            yield [f"ddp.accumulation_steps={steps}", *only], ""
    reduces = ddp.is_ddp or ddp.shards_model or ddp.strategy == "per_parameter"
    if ddp.accumulation_steps > 1 and reduces:
        yield [setting("ddp.no_sync", not ddp.no_sync), *each], ""
    if ddp.accumulation_steps > 1 and ddp.strategy == "hsdp" and not each:
        yield ["ddp.no_sync=false", ALL_REDUCE_EACH.replace("false", "true")], ""
