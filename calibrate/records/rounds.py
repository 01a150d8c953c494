"""Real DDP iterations as measured: JSON, schema `ddpsim.ddp-rounds/1`. Knows nothing of torch.

Rounds: in each, every variant runs one iteration, and between them the bare model a few,
without any communication, in an order that rotates; then all-reduces of a few sizes. Slow drift of
the machine or of the network meets them all. Samples are seconds, `[round][rank]`, in the order
they were taken; the ranks start each iteration together, at a barrier that is not timed.

A file holds one run, the rounds of one set of processes; several runs of the same can be taken
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

from pydantic import Field

from calibrate.files import FileName, Part, load_json, name_as_text, save_json
from calibrate.records.record import Environment, JobOptions, Layout
from calibrate.records.variant import CAPS, Variant
from ddpsim.errors import ImportFailedError
from ddpsim.wording import counted

_CALM = 0.01  # of an iteration may be stolen by a hypervisor
_FEW = 5
ALONE_PER_ROUND = 3  # of each kind of iteration alone: predictions rest on them, and their noise
KEEP_S = 30.0  # between rounds, for what Ctrl-C or a dead rank would lose
CORES_OF_RANKS = "cores_of_ranks"  # in an environment's details: "0,1 | 2,3"
Samples = tuple[tuple[float, ...], ...]  # seconds, [round][rank]
_S = TypeVar("_S", bound="Steps")
_P = TypeVar("_P", bound=Part)
OptimizerName = Literal["sgd", "adam", "adamw"]
SCHEMA = "ddpsim.ddp-rounds/1"
_LONGEST_S = 1e6  # of what a round measures: days
_NEVER_ZERO = ("whole_s", "backward_s", "beside_s", "layers_s", "samples_s")


class ModelOptions(JobOptions):
    """A model that ranks of a job step."""

    model: str = Field(description="MODULE:FUNCTION as for `calibrate.measure.model.training`")
    batch: int | None = Field(None, ge=1, description="default: the function's own")
    optimizer: OptimizerName = Field("sgd", description="a class of torch.optim")
    fused: bool = Field(default=False, description="the optimizer's fused implementation")


class RoundOptions(ModelOptions):
    """What to measure, and how long."""

    output: FileName = Field(description="the rounds, JSON")
    variants: tuple[Variant, ...] = tuple(Variant(bucket_cap_mb=cap) for cap in CAPS)
    find_unused_parameters: bool = Field(default=False, description="as DDP, in every variant")
    rounds: tuple[int, int] = Field((6, 15), description="least and most rounds that are timed")
    budget_s: float = Field(100.0, gt=0, description="for the timed rounds, above the least")
    line_rate_bytes_per_s: float | None = Field(None, gt=0, description="of a node's link")

    @property
    def kept(self) -> str:
        """Say where the rounds are."""
        return (
            f"The rounds until then are in {self.output}, if it is there yet: once there are "
            f"{self.rounds[0]}, they are written every {KEEP_S:.0f} s."
        )


class Parameter(Part):
    """A trained parameter; `ready_s[rank]` from the start of backward, None: never ready.

    `ddp_hook_s[rank]`: what DDP's hook on it takes, copy into the bucket and all, in a backward
    under DDP of that rank alone; empty where that was not measured.
    """

    name: str
    numel: int
    dtype: str
    ready_s: tuple[float | None, ...]
    ddp_hook_s: tuple[float | None, ...] = ()
    sparse: bool = Field(default=False, description="its gradient is")
    rows: int | None = Field(None, description="the extent of its first dimension")

    def at(self, factors: Sequence[float]) -> Parameter:
        """A copy whose ready times take so many times as long, by rank."""
        pairs = zip(self.ready_s, factors, strict=True)
        ready_s = tuple(None if seconds is None else seconds * by for seconds, by in pairs)
        return self.model_copy(update={"ready_s": ready_s})


class Steps(Part):
    """Seconds of whole iterations and their parts, [round][rank].

    `optimizer_s` holds step() and zero_grad(). Forward and backward are sums over micro-batches.
    """

    whole_s: Samples
    forward_s: Samples
    backward_s: Samples
    optimizer_s: Samples
    stolen_s: Samples = Field(
        (), description="taken by a hypervisor from the rank's cores meanwhile, in ticks of 10 ms"
    )


class Beside(Part):
    """A model's backward and a layer's two passes, alone and beside all-reduces: [round][rank].

    In turns, on all ranks at once, beside the same all-reduces of a queue (two at a time with
    gloo), which last longer than the backward; the layers are those of a record.
    """

    layers_s: Samples = Field(min_length=1)
    layers_beside_s: Samples = Field(min_length=1)
    backward_s: Samples = Field(min_length=1)
    backward_beside_s: Samples = Field(min_length=1)


class Alone(Steps):
    """The model without DDP, all ranks at once, a few times a round: [iteration][rank].

    On a CPU a few copies of the model take turns, and the optimizer comes after what DDP does with
    gradients, copies into buckets, an all-reduce, and copies back, none of which counts.
    Ready times come from iterations with hooks, one a round. `ddp_backward_s`: the backward under
    DDP of each rank alone, without the copies back at its end, also a few times a round; empty
    where that was not measured. `beside`: the same beside all-reduces, as often.
    """

    hooked_backward_s: Samples
    hook_s: tuple[float, ...] = Field(description="cost of a gradient hook by rank, taken off")
    accumulating: Steps | None = Field(
        None, description="iterations of two micro-batches, a few a round, where a variant has more"
    )
    ddp_backward_s: Samples = ()
    beside: Beside | None = None


class Logged(Part):
    """What DDP's own logger says of the same iterations, seconds [round][rank].

    `forward_s` and `backward_compute_s` as DDP counts them (the loss belongs to the latter);
    `comm_s` from the first bucket's being ready until all are reduced and copied back;
    `overlap_s` the part of it before backward's compute ends.
    """

    forward_s: Samples
    backward_compute_s: Samples
    comm_s: Samples
    overlap_s: Samples


class VariantSamples(Steps):
    """One variant as measured. `backward_s` holds what reduces gradients after the backward."""

    variant: Variant
    bucket_bytes: tuple[int, ...] = Field(
        description="as DDP logged them, rebuilt, launch order; else of gradients sent together, "
        "in the loop's order; none of fully_shard"
    )
    units: tuple[str, ...] = Field((), description="modules that fully_shard shards on their own")
    warmup_s: Samples = Field(description="whole iterations before the timed ones")
    logged: Logged | None = Field(None, description="of DDP alone")


class AllReduceSamples(Part):
    """All-reduces of one size, taken between the iterations: seconds [round][rank]."""

    size_bytes: int = Field(ge=1)
    samples_s: Samples


class Rounds(Part):
    """One model on one cluster."""

    schema_: Literal["ddpsim.ddp-rounds/1"] = Field("ddpsim.ddp-rounds/1", alias="schema")
    environment: Environment
    layout: Layout
    model: str
    batch_per_rank: int
    optimizer: OptimizerName = "sgd"
    fused: bool = False
    find_unused_parameters: bool = False
    parameters: tuple[Parameter, ...]
    buffers: tuple[tuple[str, int], ...] = Field(description="dtype and elements of each")
    alone: Alone
    variants: tuple[VariantSamples, ...]
    all_reduce: tuple[AllReduceSamples, ...]
    elapsed_s: float = Field(description="of the whole measurement")

    def calm(self) -> Rounds:
        """Without the iterations of which a hypervisor stole more than 1 % on any rank.

        Where fewer than half of a kind, or than five, are so calm, more than from the calmest three
        quarters, or five, of it: the same limit holds for all kinds, so that what is predicted and
        what is measured were disturbed alike. What was taken of all iterations, ready times and the
        backward under DDP of each rank alone, shortens as each rank's backward does.
        """
        kinds = (self.alone, self.alone.accumulating, *self.variants)
        most = max(_stolen_at_most(kind) for kind in kinds if kind)
        alone = _calm(self.alone, most)
        usual_s, calm_s = (rank_medians(each.backward_s) for each in (self.alone, alone))
        shorter = [calm / usual for calm, usual in zip(calm_s, usual_s, strict=True)]
        ddp_s = tuple(
            tuple(by * seconds for by, seconds in zip(shorter, row, strict=True))
            for row in alone.ddp_backward_s
        )
        return self.model_copy(
            update={
                "alone": alone.model_copy(update={"ddp_backward_s": ddp_s}),
                "variants": tuple(_calm(variant, most) for variant in self.variants),
                "parameters": tuple(parameter.at(shorter) for parameter in self.parameters),
            }
        )

    @property
    def subject(self) -> object:
        """What was measured, and on what; hashable. Rounds of one subject are runs of the same."""
        here = self.environment
        return (
            *(here.machine, here.device, here.torch, here.backend, here.library),
            frozenset(here.variables.items()),
            *(self.oversubscribed, self.layout, self.model, self.batch_per_rank, self.buffers),
            *(self.optimizer, self.fused, self.find_unused_parameters),
            *((p.name, p.numel, p.dtype) for p in self.parameters),
            *((v.variant, v.bucket_bytes, v.units) for v in self.variants),
            *(row.size_bytes for row in self.all_reduce),
        )

    @property
    def oversubscribed(self) -> bool:
        """Whether ranks of one machine compute on shared cores, with fewer than two cores a rank.

        False where it is not told which cores they may use, and where they compute on GPUs.
        """
        if self.environment.device != "cpu":
            return False
        detail = self.environment.details.get(CORES_OF_RANKS, "")
        ranks = [frozenset(part.strip().split(",")) for part in detail.split("|") if part.strip()]
        cores = frozenset[str]().union(*ranks)
        share = sum(len(rank) for rank in ranks) > len(cores)
        return share and len(cores) < 2 * len(ranks)


def _stolen(steps: Steps) -> list[float]:
    """The share that was stolen of each iteration, on the rank that lost most of it."""
    return [
        max(stolen / whole for stolen, whole in zip(stolen_s, whole_s, strict=True))
        for stolen_s, whole_s in zip(steps.stolen_s, steps.whole_s, strict=False)
    ]


def _stolen_at_most(steps: Steps) -> float:
    """The share that an iteration may lose, so that enough of them are left."""
    shares = sorted(_stolen(steps))
    calm = sum(share <= _CALM for share in shares)
    if not shares or calm >= max(_FEW, len(shares) / 2):
        return _CALM
    return max(_CALM, shares[: max(_FEW, 3 * len(shares) // 4)][-1])


def _calm(steps: _S, most: float) -> _S:
    if not steps.stolen_s:
        return steps
    kept = [i for i, share in enumerate(_stolen(steps)) if share <= most]

    def of(samples: Samples) -> Samples:
        return tuple(samples[i] for i in kept)

    parts: dict[str, object] = {name: of(getattr(steps, name)) for name in Steps.model_fields}
    if isinstance(steps, VariantSamples) and steps.logged:
        parts["logged"] = Logged(**{name: of(samples) for name, samples in steps.logged})
    if isinstance(steps, Alone) and steps.accumulating:
        parts["accumulating"] = _calm(steps.accumulating, most)
    return steps.model_copy(update=parts)


@dataclass(frozen=True)
class Runs:
    """Rounds of one subject by file, each measured in processes of its own."""

    by_file: Mapping[Path, Rounds]

    @classmethod
    def of(cls, by_file: Mapping[Path, Rounds]) -> list[Runs]:
        """Rounds without disturbed iterations, those of one subject together."""
        same: dict[object, dict[Path, Rounds]] = {}
        for path, rounds in by_file.items():
            same.setdefault(rounds.subject, {})[path] = rounds.calm()
        return [cls(runs) for runs in same.values()]

    @property
    def each(self) -> tuple[Rounds, ...]:
        """The runs."""
        return tuple(self.by_file.values())

    @property
    def first_file(self) -> str:
        """The name of the first run's file."""
        return name_as_text(next(iter(self.by_file)))

    @cached_property
    def pooled(self) -> Rounds:
        """The samples of all, run by run; all else is the first's."""
        first, *others = self.each
        if not others:
            return first

        def joined(part: str) -> tuple[Part, ...]:
            return tuple(
                _joined(same) for same in zip(*(getattr(r, part) for r in self.each), strict=True)
            )

        return first.model_copy(
            update={
                "alone": _joined([run.alone for run in self.each]),
                "variants": joined("variants"),
                "all_reduce": joined("all_reduce"),
                "elapsed_s": sum(run.elapsed_s for run in self.each),
            }
        )


def _joined(parts: Sequence[_P]) -> _P:
    """The first, with the samples of all."""
    first, joined = parts[0], dict[str, object]()
    for name, value in first:
        values = [getattr(part, name) for part in parts]
        if isinstance(value, Steps | Logged):
            joined[name] = _joined(values)
        elif name.endswith("_s") and name != "hook_s":  # which holds one figure a rank
            joined[name] = tuple(chain.from_iterable(values))
    return first.model_copy(update=joined)


def slowest(samples: Samples) -> tuple[float, ...]:
    """The slowest rank's time of each round."""
    return tuple(max(row) for row in samples)


def rank_medians(samples: Samples) -> tuple[float, ...]:
    """Each rank's median."""
    return tuple(median(column) for column in zip(*samples, strict=True))


def load_rounds(path: Path) -> Rounds:
    """Read rounds; raises ImportFailedError with what is wrong and where."""
    rounds = load_json(Rounds, path, SCHEMA)
    for problem in _problems(rounds):
        raise ImportFailedError(str(path), f"is no {SCHEMA}: {problem}")
    return rounds


def _problems(rounds: Rounds) -> Iterator[str]:
    """Samples that lack ranks or rounds which others have, or are no times, in words."""
    for name, rows in (("variants", rounds.variants), ("all_reduce", rounds.all_reduce)):
        if not rows:
            yield f"{name}: wanted one or more"
    ranks = rounds.layout.world_size
    for name, samples, count in _tables(rounds):
        yield from (f"{name}: {problem}" for problem in _unfit(name, samples, count, ranks))
    by_rank: dict[str, Sequence[float | None]] = {"alone.hook_s": rounds.alone.hook_s}
    for i, parameter in enumerate(rounds.parameters):
        by_rank[f"parameters.{i}.ready_s"] = parameter.ready_s
        by_rank[f"parameters.{i}.ddp_hook_s"] = parameter.ddp_hook_s or parameter.ready_s
    for name, figures in by_rank.items():
        if len(figures) != ranks:
            yield f"{name}: of {counted(len(figures), 'rank')}, but the layout has {ranks}"


def _unfit(name: str, samples: Samples, count: int | None, ranks: int) -> Iterator[str]:
    if len(samples) != (count or len(samples) or 1):
        yield f"has {counted(len(samples), 'round')}, wanted {count or 'one or more'}"
    for row in samples:
        if len(row) != ranks:
            yield f"a round of {counted(len(row), 'rank')}, but the layout has {ranks}"
    for seconds in chain.from_iterable(samples):
        if not _is_time(name, seconds):
            yield f"{seconds:g} s is no time of an iteration"


def _is_time(name: str, seconds: float) -> bool:
    if "logged" in name:  # by DDP's own clock marks, whose differences may be below zero
        return abs(seconds) <= _LONGEST_S
    return 0 <= seconds <= _LONGEST_S and (seconds > 0 or not name.endswith(_NEVER_ZERO))


def _tables(rounds: Rounds) -> Iterator[tuple[str, Samples, int | None]]:
    """All samples by name, and how many rounds they must have; None: any, but one at least."""
    alone = rounds.alone
    steps: dict[str, Steps] = {"alone": alone}
    if alone.accumulating:
        steps["alone.accumulating"] = alone.accumulating
    steps |= {f"variants.{i}": variant for i, variant in enumerate(rounds.variants)}
    for name, each in steps.items():
        for part in Steps.model_fields:
            samples = getattr(each, part)
            if part != "stolen_s" or samples:
                yield f"{name}.{part}", samples, len(each.whole_s) or None
        if isinstance(each, VariantSamples):
            for part, samples in each.logged or ():
                yield f"{name}.logged.{part}", samples, len(each.whole_s)
    if alone.ddp_backward_s:
        yield "alone.ddp_backward_s", alone.ddp_backward_s, None
    for part, samples in alone.beside or ():
        yield f"alone.beside.{part}", samples, len(alone.beside.layers_s) if alone.beside else None
    for i, row in enumerate(rounds.all_reduce):
        yield f"all_reduce.{i}.samples_s", row.samples_s, None


def save_rounds(rounds: Rounds, path: Path) -> None:
    """Write rounds whole, or leave the old ones as they were; raises OSError."""
    save_json(rounds, path, indent=None)
