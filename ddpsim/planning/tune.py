"""The best options of DDP for a scenario: a grid where it is small enough, else a sampler.

Only what leaves the training as it is: bucket caps, gradient_as_bucket_view, and, where a global
batch is given, how it is split into micro-batches. Hooks that round gradients, and strategies that
shard the model, must be asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, product
from typing import Any

from ddpsim.errors import DdpsimError, Problem, ScenarioError
from ddpsim.planning.compare import compare, hook_settings, option
from ddpsim.planning.dials import dialled
from ddpsim.planning.many import AtLeast, Best, attempt_many
from ddpsim.planning.shardings import is_sharding, shardings, strategy_name
from ddpsim.prediction.resolve import resolve
from ddpsim.progress import Stage, stage
from ddpsim.result.changes import Change, Comparison, Tuning
from ddpsim.result.model import Brief
from ddpsim.result.sweep import FLAT
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.set_aside import as_ddp
from ddpsim.units import format_bytes, format_duration

# MiB; the second part: a small first bucket starts the communication early
_CAPS = ("default", *map(str, (1, 2, 5, 10, 15, 25, 35, 50, 75, 100, 150, 250, 500)))
_LISTS = tuple(f"[{first}, {cap}]" for first in (1, 5) for cap in (5, 10, 50, 100, 250, 500))
_LOWEST_MIB, _HIGHEST_MIB = 0.5, 1000.0
_MOST_STEPS = 64  # micro-batches


class TuneError(DdpsimError):
    """Nothing can be tuned: why, and what to do."""


@dataclass(frozen=True)
class Limits:
    """The limits of a search.

    `memory_bytes` of a GPU (None: the device's); `global_batch` samples a step (None: the
    scenario's batch and accumulation stay); `may_round`: hooks that send 16 bits may be chosen;
    `each_strategy`: so may zero1, deepspeed, fully_shard and hsdp.
    `trials`: scenarios that a sampler tries beside the grid, with lists of any caps.
    """

    memory_bytes: float | None = None
    global_batch: int | None = None
    may_round: bool = False
    trials: int = 0
    each_strategy: bool = False


@dataclass(frozen=True)
class _Choice:
    """Settings that differ from the scenario's own, and the figures with them.

    `is_least`: nothing was simulated, but these settings are not among the best.
    """

    settings: tuple[str, ...]
    brief: Brief
    is_least: bool = False

    @property
    def sample_s(self) -> float:
        """Time per sample."""
        return 1 / self.brief.throughput_samples_per_s


def tune(document: Document, limits: Limits | None = None) -> Tuning:
    """The options to take, and their effect.

    Raises ScenarioError for the scenario, TuneError where nothing fits the limits or Optuna is
    asked for and missing.
    """
    limits = limits or Limits()
    search = _Search(document, limits)
    if search.scenario.cluster.algorithm == "data_parallel":
        raise TuneError("DataParallel has no buckets and none of DDP's options: nothing to tune")
    ddp, searches = search.scenario.ddp, limits.each_strategy and is_sharding(search.scenario)
    if not (ddp.is_ddp or searches):
        raise TuneError(f"ddp.strategy: {ddp.strategy} has no {_other_way(search.scenario)}")
    unchanged = search.simulated([()])
    if not unchanged:
        raise ScenarioError([Problem("scenario", "", next(iter(search.refused.values())))])
    search.allow_noise(unchanged[0].brief)
    search.simulated(search.grid())
    if limits.trials:
        _sample(search)
    fitting = [choice for choice in search.choices if search.fits(choice)]
    if not fitting:
        least = min(c.brief.memory_bytes_per_gpu.total for c in search.choices)
        limit = format_bytes(search.memory_limit_bytes)
        raise TuneError(
            f"none of {len(search.choices)} combinations fits into {limit} a "
            f"GPU: the least needs {format_bytes(least)}; take a smaller batch_per_rank, or more "
            f"GPUs{'' if limits.each_strategy else ', or shard the model: add --each-strategy'}"
        )
    fastest = min(fitting, key=lambda choice: choice.sample_s)
    good = [c for c in fitting if c.sample_s <= fastest.sample_s * (1 + search.within)]
    pick = min(good, key=lambda choice: (len(choice.settings), choice.sample_s))
    changes = _changes(document, [pick, fastest])
    caps = search.caps_with_other_options(pick) if _has_buckets(document, pick.settings) else {}
    default = caps.get("default")
    flat = tuple(cap for cap, choice in caps.items() if choice in good)

    def regret(choice: _Choice | None) -> float | None:
        return choice.sample_s / fastest.sample_s - 1 if choice else None

    return Tuning(
        search.scenario.name,
        search.scenario.cluster.world_size,
        changes[0],
        changes[1],
        flat,
        regret(unchanged[0] if search.fits(unchanged[0]) else None),
        regret(default and search.choice_of(default.settings)),
        len(search.choices),
        len(search.choices) - len(fitting),
        tuple(_constraints(limits)),
        changes[0].warnings,
        search.noise,
        search.within,
        search.refused,
    )


def _has_buckets(document: Document, settings: Sequence[str]) -> bool:
    return parse(document.changed(settings)).ddp.is_ddp


def compared_caps(document: Document, tuning: Tuning) -> Comparison:
    """Caps of the grid and flat ones, with the other options of a search's pick, as changes."""
    others = [s for s in tuning.pick.settings if not s.startswith("ddp.bucket_cap_mb=")]
    has_buckets = _has_buckets(document, tuning.pick.settings)
    caps = dict.fromkeys((*_CAPS, *tuning.flat_caps)) if has_buckets else ()
    options = [option(document, *others, *_cap(cap), title=cap) for cap in caps]
    return compare(parse(document), options)


def _other_way(scenario: Scenario) -> str:
    """What a strategy lacks for tune, and the command that answers in its place."""
    if scenario.ddp.shards_model:
        return "buckets to tune; search all: ddpsim tune FILE --each-strategy"
    if dial := dialled(scenario):
        key, values = dial[0].key, ",".join(dial[2])
        return f"bucket_cap_mb to tune; try its own key: ddpsim sweep FILE --set {key}={values}"
    return "buckets to tune; compare it: ddpsim compare FILE --each-strategy"


def _changes(document: Document, choices: Sequence[_Choice]) -> list[Change]:
    """The effect of each choice; equal ones are compared once."""
    options = {
        each.settings: option(
            document, *each.settings, title=", ".join(each.settings) or "as it is"
        )
        for each in choices
    }
    with stage("choices compared", len(options)) as progress:
        compared = compare(parse(document), options.values()).changes
        progress.advance(len(options))
    changes = dict(zip(options, compared, strict=True))
    return [changes[each.settings] for each in choices]


def _constraints(limits: Limits) -> Iterator[str]:
    if limits.memory_bytes:
        yield f"at most {format_bytes(limits.memory_bytes)} a GPU"
    if limits.global_batch:
        yield f"{limits.global_batch:,} samples a step"
    yield "gradients may be rounded to 16 bits" if limits.may_round else "no rounding of gradients"
    if limits.each_strategy:
        yield "strategies that shard the model too"


class _Search:
    """Simulates combinations of options, equal ones once."""

    def __init__(self, document: Document, limits: Limits) -> None:
        self.scenario = parse(document)
        self.limits = limits
        self._document = document
        self._outcomes: dict[tuple[str, ...], _Choice | None] = {}
        self._refused: dict[str, list[tuple[str, ...]]] = {}  # by reason
        self._strategies: dict[tuple[str, ...], str] = {}
        self._best = Best(self._fits, FLAT)
        self._differing: dict[str, bool] = {}
        self.noise = 0.0

    @property
    def within(self) -> float:
        """A choice that takes longer than the fastest by this share or less is as good."""
        return self._best.within

    def allow_noise(self, brief: Brief) -> None:
        """Treat choices as equal that differ by no more than two runs do by chance."""
        self.noise = brief.iteration_time_s.noise(self.scenario.run.iterations)
        self._best.within = max(FLAT, self.noise)

    @property
    def choices(self) -> list[_Choice]:
        """Choices that can be simulated."""
        return [choice for choice in self._outcomes.values() if choice]

    @property
    def memory_limit_bytes(self) -> float:
        """Bytes a GPU may use."""
        return self._limit_bytes(self.choices[0].brief)

    def _limit_bytes(self, brief: Brief) -> float:
        device = brief.memory_bytes_per_gpu.device
        return min(device, self.limits.memory_bytes or device)

    def fits(self, choice: _Choice) -> bool:
        """Whether a choice keeps to the memory limit and has the wanted global batch."""
        return self._fits(choice.brief)

    def _fits(self, brief: Brief) -> bool:
        if brief.memory_bytes_per_gpu.total > self._limit_bytes(brief):
            return False
        wanted = self.limits.global_batch
        samples = brief.throughput_samples_per_s * brief.iteration_time_s.mean  # of a step
        return wanted is None or round(samples) == wanted

    def choice_of(self, settings: tuple[str, ...]) -> _Choice | None:
        """A choice with its simulated step, not a lower bound of it; None if it has an error."""
        choices = self.simulated([settings])
        if choices and choices[0].is_least:
            self._simulate({settings: parse(self._document.changed(settings))}, Stage(), None)
        return self._outcomes[settings]

    def simulated(self, combinations: Iterable[tuple[str, ...]]) -> list[_Choice]:
        """The choices of these combinations of settings that can be simulated."""
        wanted = list(dict.fromkeys(combinations))
        scenarios: dict[tuple[str, ...], Scenario] = {}
        for settings in wanted:
            if settings not in self._outcomes:
                try:
                    scenarios[settings] = parse(self._document.changed(settings))
                except ScenarioError as error:
                    self._refuse(settings, error)
        if scenarios:
            with stage("combinations", len(scenarios)) as progress:
                # only those with the same micro-batches can share a simulation
                for _, alike in groupby(scenarios.items(), lambda each: _micro_batches(each[1])):
                    self._simulate(dict(alike), progress, self._best if self.choices else None)
        return [choice for settings in wanted if (choice := self._outcomes[settings])]

    def _simulate(
        self, scenarios: Mapping[tuple[str, ...], Scenario], progress: Stage, best: Best | None
    ) -> None:
        outcomes = attempt_many(scenarios.values(), progress.advance, best)
        for settings, outcome in zip(scenarios, outcomes, strict=True):
            match outcome:
                case Brief():
                    self._outcomes[settings] = _Choice(settings, outcome)
                    self._best.hear(outcome)
                case AtLeast(brief):
                    self._outcomes[settings] = _Choice(settings, brief, is_least=True)
                case _:
                    self._refuse(settings, outcome)
        fitting = [choice for choice in self.choices if self.fits(choice)]
        if fitting:
            first = min(fitting, key=lambda choice: choice.sample_s)
            step = format_duration(first.brief.iteration_time_s.mean)
            settings = first.settings or ("no change",)
            progress.findings = [f"best so far: {step} a step with", *settings]

    def _refuse(self, settings: tuple[str, ...], error: DdpsimError) -> None:
        self._outcomes[settings] = None
        self._refused.setdefault(error.reason, []).append(settings)

    @property
    def refused(self) -> dict[str, str]:
        """Why strategies, or options in every combination, cannot be simulated."""
        reasons: dict[str, str] = {}
        tried = {self._strategies.get(choice.settings) for choice in self.choices}
        for reason, refused in self._refused.items():
            names = {self._strategies[each]: reason for each in refused if each in self._strategies}
            common = [each for each in refused[0] if all(each in other for other in refused)]
            reasons |= names or {", ".join(common or refused[0]): reason}
        return {name: reason for name, reason in reasons.items() if name not in tried}

    def grid(self) -> Iterator[tuple[str, ...]]:
        """All combinations, each with the settings that differ from the scenario's own."""
        caps, is_ddp = [_cap(cap) for cap in self._caps()], self.scenario.ddp.is_ddp
        plain = [() if is_ddp else as_ddp(self.scenario.ddp)]
        views = [(f"ddp.gradient_as_bucket_view={value}",) for value in ("false", "true")]
        of_ddp = product(self._batches(), plain, self._hooks(), views, caps)
        rounds = self.limits.may_round
        sharded = shardings(self.scenario, rounds=rounds) if self.limits.each_strategy else []
        for chosen in chain(of_ddp, product(self._batches(), sharded)):
            settings = self.differing([setting for settings in chosen for setting in settings])
            if chosen[-1] in sharded:
                self._strategies[settings] = strategy_name(chosen[-1])
            yield settings

    def differing(self, settings: Sequence[str]) -> tuple[str, ...]:
        """The settings that change the scenario."""
        return tuple(setting for setting in settings if self._differs(setting))

    def _differs(self, setting: str) -> bool:
        if setting not in self._differing:
            try:
                changed = parse(self._document.changed([setting]))
            except ScenarioError:  # said where it is simulated
                changed = None
            self._differing[setting] = changed != self.scenario
        return self._differing[setting]

    def _caps(self) -> Sequence[str]:
        return _CAPS if self.scenario.ddp.is_torch_1 else (*_CAPS, *_LISTS)

    def _hooks(self) -> list[tuple[str, ...]]:
        current = self.scenario.ddp.comm_hook
        hooks: set[str] = {current, "none"}
        if self.limits.may_round:
            hooks |= {self.scenario.cluster.device.two_byte_hooks[0]}
        elif current.endswith("compress") or self.scenario.ddp.averages_after_hook:
            hooks = {current}
        return [hook_settings(self.scenario.ddp, hook) for hook in sorted(hooks)]

    def _batches(self) -> list[tuple[str, ...]]:
        """Ways to make the global batch of micro-batches."""
        wanted, ranks = self.limits.global_batch, self.scenario.cluster.world_size
        if wanted is None:
            return [()]
        if wanted % ranks:
            near = [n * ranks for n in (wanted // ranks, wanted // ranks + 1) if n]
            raise TuneError(
                f"a global batch of {wanted:,} samples does not divide by {ranks:,} ranks; wanted "
                f"for instance {' or '.join(f'{batch:,}' for batch in near)}"
            )
        per_rank, stated = wanted // ranks, self.scenario.workload.batch_per_rank
        steps = [n for n in range(1, min(per_rank, _MOST_STEPS) + 1) if per_rank % n == 0]
        if resolve(self.scenario).model.basis != "roofline":  # measured with its own batch
            steps = [n for n in steps if per_rank // n == stated]
            if not steps:
                raise TuneError(
                    f"the scenario's times are those of batch_per_rank {stated}, which does not "
                    f"make {wanted:,} samples on {ranks:,} ranks in whole micro-batches; choose a "
                    f"multiple of {stated * ranks:,}, to {_MOST_STEPS} times that"
                )
        return [
            (f"workload.batch_per_rank={per_rank // n}", f"ddp.accumulation_steps={n}")
            for n in steps
        ]

    def caps_with_other_options(self, pick: _Choice) -> dict[str, _Choice]:
        """Every cap of the grid with the other options of a choice."""
        others = [s for s in pick.settings if not s.startswith("ddp.bucket_cap_mb=")]
        choices: dict[str, _Choice] = {}
        for cap in self._caps():
            settings = self.differing([*others, *_cap(cap)])
            if simulated := self.simulated([settings]):
                choices[cap] = simulated[0]
        return choices


def _micro_batches(scenario: Scenario) -> tuple[int, int]:
    return scenario.workload.batch_per_rank, scenario.ddp.accumulation_steps


def _cap(cap: str) -> tuple[str, ...]:
    return (f"ddp.bucket_cap_mb={cap}",)


def _sample(search: _Search) -> None:
    """Lists of three caps, any number of MiB, by Optuna's sampler, with the best other options."""
    try:
        import optuna  # noqa: PLC0415 -- an extra
    except ImportError:
        raise TuneError("--trials needs Optuna: pip install 'ddpsim[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    fitting = [choice for choice in search.choices if search.fits(choice)]
    if not fitting or search.scenario.ddp.is_torch_1:
        return
    best = min(fitting, key=lambda choice: choice.sample_s)
    others = [s for s in best.settings if not s.startswith("ddp.bucket_cap_mb=")]

    def sample_s(trial: Any) -> float:
        caps = [
            trial.suggest_float(name, _LOWEST_MIB, _HIGHEST_MIB, log=True)
            for name in ("first", "second", "rest")
        ]
        listed = ", ".join(f"{cap:.4g}" for cap in caps)
        choice = search.choice_of(search.differing([*others, f"ddp.bucket_cap_mb=[{listed}]"]))
        return choice.sample_s if choice and search.fits(choice) else float("inf")

    seed = search.scenario.run.seed % 2**32  # numpy's older generators take no more
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(sampler=sampler)
    study.optimize(sample_s, n_trials=search.limits.trials)
