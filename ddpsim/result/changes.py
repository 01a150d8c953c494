"""Effects of changes to a scenario, what a search found, and the step's sensitivity to inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ddpsim.result.model import Drawn, PredictionInterval, Result, Tabled, rounded
from ddpsim.result.sweep import FLAT
from ddpsim.wording import counted

BUFFERS_DIFFER = "buffers differ between ranks"  # a note that a language model need not heed


@dataclass(frozen=True)
class Change:
    """One scenario compared with a first one; `problem` says why there are no figures.

    `step_s` is its step. `change_s` is the difference in time for as many samples as one step of
    the first scenario has, negative where it is faster; `low_s` to `high_s` is the 80 % interval of
    that difference, in which inputs that both share are wrong in the same way. `memory_bytes` is
    the additional memory per GPU. `note`: an effect other than time. `warnings`: those of `run`.
    """

    title: str
    settings: tuple[str, ...] = ()
    step_s: float | None = None
    change_s: float = 0.0
    change: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    memory_bytes: int = 0
    fits: bool = True
    note: str = ""
    problem: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_sure(self) -> bool:
        """Whether the difference is larger than what is uncertain about it."""
        return self.low_s > 0 or self.high_s < 0


@dataclass(frozen=True)
class Comparison(Tabled):
    """Changes of a first scenario, in the order that they were asked for.

    `warnings`: those of `run` for the first scenario. `baseline`: its name. `fits`: into memory.
    `noise`: by how much two runs of it differ by chance, relative. `gpus`: of the first scenario.
    `tokens_per_sample`: None: a sample has none, or nobody knows.
    """

    name: str
    world_size: int
    samples: int
    step_s: float
    prediction_interval_s: PredictionInterval | None
    changes: tuple[Change, ...]
    warnings: tuple[str, ...] = ()
    baseline: str = ""
    noise: float = 0.0
    fits: bool = True
    gpus: int = 0
    tokens_per_sample: int | None = None

    def samples_per_s(self, change: Change) -> float:
        """Throughput with a change, on all GPUs."""
        return self.samples / (self.step_s + change.change_s)

    @property
    def best(self) -> Change | None:
        """The fastest change that fits and trains the same on as many GPUs.

        None: nothing fits, or the first scenario does and is faster.
        """
        same = (one for one in self.changes if one.fits and not one.problem)
        likely = [one for one in same if one.note in ("", BUFFERS_DIFFER)]
        best = min(likely, key=lambda change: change.change_s, default=None)
        return None if best and self.fits and best.change_s >= 0 else best

    def __repr__(self) -> str:
        possible = [change for change in self.changes if not change.problem]
        best = min(possible, key=lambda change: change.change, default=None)
        best_in_words = f", {best.title} {best.change:+.1%}" if best else ""
        return f"<Comparison of {self.name}: {counted(len(self.changes), 'change')}{best_in_words}>"

    def to_dict(self) -> dict[str, Any]:
        """Gives JSON's types (schema `ddpsim.comparison/1`)."""
        changes = [asdict(change) | {"is_sure": change.is_sure} for change in self.changes]
        return {"schema": "ddpsim.comparison/1", **rounded(asdict(self) | {"changes": changes})}


@dataclass(frozen=True)
class Phase:
    """A part of the chain that sets the step's length."""

    text: str
    length_s: float


@dataclass(frozen=True)
class Sensitivity:
    """One input changed, all else equal: the step, without noise, is longer by `change_s`."""

    what: str
    change_s: float
    change: float


@dataclass(frozen=True)
class Explanation(Drawn):
    """Why a step is as long as it is; `helps`: the changes that would shorten it most."""

    result: Result
    phases: tuple[Phase, ...]
    sensitivities: tuple[Sensitivity, ...]
    helps: tuple[Change, ...]

    def __repr__(self) -> str:
        return f"<Explanation of {self.result!r}>"

    def to_dict(self) -> dict[str, Any]:
        """Gives JSON's types (schema `ddpsim.explanation/1`)."""
        plain = asdict(self)
        result = plain.pop("result")
        keys = ("name", "iteration_time_s", "bottleneck", "warnings")
        answer = {key: result[key] for key in keys}
        answer["iteration_time_s"] = self.result.iteration_time_s.mean
        return {"schema": "ddpsim.explanation/1", **rounded(answer | plain)}


@dataclass(frozen=True)
class Tuning(Drawn):
    """The options to take, compared with a scenario as it is.

    `pick` changes the fewest keys of all that are `within` of the fastest found, per sample, and
    fit into memory; without settings the scenario is as good as any. `fastest` is the fastest
    itself; `flat_caps` the bucket caps that with the other options of `pick` are `within` of it,
    none where it has no buckets.
    `own_regret` and `default_regret`: by how much the scenario's own options (None where they do
    not keep to the limits), and torch's default caps with the other options of `pick`, take longer
    than `fastest`. `tried` scenarios were simulated, of which `unfit` do not keep to the limits.
    `warnings`: what `run` warns of with the options of `pick`. `noise`: by how much two runs of the
    scenario differ by chance, relative; `within` is that, or FLAT where it is more. `refused`: what
    cannot be simulated, and why.
    """

    name: str
    world_size: int
    pick: Change
    fastest: Change
    flat_caps: tuple[str, ...]
    own_regret: float | None
    default_regret: float | None
    tried: int
    unfit: int
    constraints: tuple[str, ...]
    warnings: tuple[str, ...]
    noise: float = 0.0
    within: float = FLAT
    refused: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        pick = f"{self.pick.title}, {self.pick.change:+.1%}" if self.pick.settings else "as it is"
        return f"<Tuning of {self.name}: {pick}>"

    def to_dict(self) -> dict[str, Any]:
        """Gives JSON's types (schema `ddpsim.tuning/1`)."""
        changes = {
            key: asdict(change) | {"is_sure": change.is_sure}
            for key, change in (("pick", self.pick), ("fastest", self.fastest))
        }
        return {"schema": "ddpsim.tuning/1", **rounded(asdict(self) | changes)}
