"""What a sweep found: its points, the best of them, how flat it is around that, and the front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpsim.errors import missing
from ddpsim.result.model import Brief, Tabled, rounded
from ddpsim.settings import Setting
from ddpsim.wording import counted

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

SCHEMA = "ddpsim.sweep/1"
# of the best: what differs by less is as good. From there on differences between bucket caps come
# true as predicted (docs/explanation/accuracy.md)
FLAT = 0.002


class Goal(NamedTuple):
    """A figure to choose by; `sign` is -1 where less is better."""

    title: str
    sign: int
    of: Callable[[Brief], float]


GOALS = {
    "throughput": Goal("samples/s of all GPUs", 1, lambda brief: brief.throughput_samples_per_s),
    "per-gpu": Goal("samples/s per GPU", 1, lambda brief: brief.throughput_per_gpu),
    "efficiency": Goal("scaling efficiency", 1, lambda brief: brief.scaling_efficiency),
    "step": Goal("step time", -1, lambda brief: brief.iteration_time_s.mean),
    "exposed": Goal("exposed communication", -1, lambda brief: brief.exposed_comm_s),
    "gpus": Goal("GPUs", -1, lambda brief: brief.world_size),
    "memory": Goal("memory per GPU", -1, lambda brief: brief.memory_bytes_per_gpu.total),
}


_WITHOUT_NOISE = ("gpus", "memory")
_OF_SAMPLES = ("throughput", "per-gpu")


@dataclass(frozen=True)
class Point:
    """One scenario of a sweep; `problem` says why it has no `brief`.

    `interval_s`: the 80 % interval of its step, where that was asked for. `set_aside`: settings
    that take back options which its strategy has not. `sample_size`: the key that sets what a
    sample is, and its value; None: it has none, or is unknown.
    """

    settings: tuple[Setting, ...]
    brief: Brief | None
    problem: str | None = None
    interval_s: tuple[float, float] | None = None
    set_aside: tuple[str, ...] = ()
    sample_size: tuple[str, int] | None = None

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a sample; None where it has none, or nobody knows."""
        key, size = self.sample_size or ("", 0)
        return size if key == "seq_len" else None

    @property
    def usable(self) -> Brief | None:
        """Figures of a point, unless it would run out of memory."""
        return self.brief if self.brief and self.brief.memory_bytes_per_gpu.fits else None


@dataclass(frozen=True)
class FlatRegion:
    """The values of one axis that, all else as in the best point, are as good as the best.

    `keep` is the scenario's own value where that is one of them, or where the scenario as it is
    is as good, otherwise the best one.
    """

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    keep: tuple[str, ...]


@dataclass(frozen=True)
class Sweep(Tabled):
    """All points, in the order of the grid; `own` is the scenario without any setting of an axis.

    `fixed` are the settings that all points and `own` share; `axes` holds the keys that move
    together, with their values; `goals` names one goal, or two for which there is a front.
    `warnings`: what `run` warns of at the best point. `noise`: by how much two runs of the scenario
    as it is differ by chance, relative.
    """

    name: str
    fixed: tuple[str, ...]
    axes: tuple[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]], ...]
    goals: tuple[str, ...]
    own: Point
    points: tuple[Point, ...]
    warnings: tuple[str, ...] = ()
    noise: float = 0.0

    @property
    def within(self) -> float:
        """How much worse than the best a point is that is as good: FLAT, or more under jitter."""
        return FLAT if self.goals[0] in _WITHOUT_NOISE else max(FLAT, self.noise)

    @property
    def some_do_not_fit(self) -> bool:
        """Whether a point needs more memory than its GPUs have."""
        return any(point.brief and not point.usable for point in self.points)

    @cached_property
    def sample_sizes(self) -> frozenset[tuple[str, int] | None]:
        """What a sample is at the points and in the scenario as it is: several do not compare."""
        return frozenset(point.sample_size for point in (self.own, *self.points) if point.brief)

    @cached_property
    def counts_tokens(self) -> bool:
        """Whether throughput is in tokens, as points have samples of other lengths."""
        sizes = self.sample_sizes
        return len(sizes) > 1 and all(size and size[0] == "seq_len" for size in sizes)

    def title(self, goal: str) -> str:
        """A goal in words; throughput is in tokens or in samples."""
        title = GOALS[goal].title
        return title.replace("samples", "tokens") if self.counts_tokens else title

    def figure(self, brief: Brief, point: Point, goal: str) -> float:
        """The figure of a point, whose `brief` it is, by a goal."""
        tokens = goal in _OF_SAMPLES and self.counts_tokens and point.tokens_per_sample
        return GOALS[goal].of(brief) * (tokens or 1)

    @cached_property
    def ranked(self) -> list[Point]:
        """Points that fit into memory, the best by the first goal first."""
        usable = [point for point in self.points if point.usable]
        return sorted(usable, key=lambda point: -self._value(point, self.goals[0]))

    @property
    def best(self) -> Point | None:
        """The first of the best by the first goal; None where none fits into memory."""
        return next(iter(self.ranked), None)

    @property
    def set_aside(self) -> dict[str, tuple[str, ...]]:
        """By strategy, the settings that take back options which it lacks."""
        by_strategy: dict[str, tuple[str, ...]] = {}
        for point in self.points:
            if point.set_aside:
                strategy = dict(point.settings)["ddp.strategy"]
                by_strategy[strategy] = tuple(
                    dict.fromkeys((*by_strategy.get(strategy, ()), *point.set_aside))
                )
        return by_strategy

    @property
    def keeps_own(self) -> bool:
        """Whether the scenario's own values are `within` of the best, or better than it."""
        best = self.best
        if best is None or self.own.usable is None:
            return False
        return self._loss(self.own, best) <= self.within

    @cached_property
    def front(self) -> tuple[Point, ...]:
        """The points that no other beats in one goal without losing in the other."""
        if len(self.goals) < 2:
            return ()
        first, second = self.goals
        front: list[Point] = []
        for point in sorted(
            self.ranked, key=lambda point: (-self._value(point, first), -self._value(point, second))
        ):
            if not front or self._value(point, second) > self._value(front[-1], second):
                front.append(point)
        return tuple(front)

    def flat_regions(self) -> tuple[FlatRegion, ...]:
        """The values around the best point that are as good, for each axis of several values."""
        best = self.best
        if best is None:
            return ()
        points = {point.settings: point for point in self.points}
        return tuple(
            self._flat(best, points, keys, values) for keys, values in self.axes if len(values) > 1
        )

    def _flat(
        self,
        best: Point,
        points: dict[tuple[Setting, ...], Point],
        keys: tuple[str, ...],
        values: tuple[tuple[str, ...], ...],
    ) -> FlatRegion:
        def is_flat(value: tuple[str, ...]) -> bool:
            moved = dict(zip(keys, value, strict=True))
            point = points[tuple(Setting(k, moved.get(k, v)) for k, v in best.settings)]
            return point.usable is not None and self._loss(point, best) <= self.within

        chosen = tuple(setting.value for setting in best.settings if setting.key in keys)
        region = tuple(value for value in values if is_flat(value))
        stated = tuple(setting.value for setting in self.own.settings if setting.key in keys)
        keep = stated if stated in region or self.keeps_own else chosen
        return FlatRegion(keys, region, keep)

    def _loss(self, point: Point, best: Point) -> float:
        """How much worse a point is than the best, as a share of the best."""
        value, most = (self._value(each, self.goals[0]) for each in (point, best))
        return 0.0 if value == most else (most - value) / abs(most) if most else float("inf")

    def _value(self, point: Point, goal: str) -> float:
        if point.brief is None:
            return float("-inf")
        return GOALS[goal].sign * self.figure(point.brief, point, goal)

    def __repr__(self) -> str:
        best = ", ".join(map(str, self.best.settings)) if self.best else "none fits"
        return f"<Sweep of {self.name}: {counted(len(self.points), 'point')}, best: {best}>"

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a point: its settings, then its figures in SI units."""
        best, front = self.best, self.front
        return [
            dict(point.settings)
            | _figures(point)
            | {"best": point is best, "front": any(point is other for other in front)}
            for point in self.points
        ]

    def to_dict(self) -> dict[str, Any]:
        """Gives JSON's types (schema `ddpsim.sweep/1`)."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "fixed": self.fixed,
            "axes": [{"keys": keys, "values": values} for keys, values in self.axes],
            "goals": self.goals,
            "own": dict(self.own.settings) | _figures(self.own),
            "flat": [asdict(region) | {"within": self.within} for region in self.flat_regions()],
            "warnings": self.warnings,
            "noise": rounded(self.noise),
            "set_aside": self.set_aside,
            "points": self.rows(),
        }

    def to_polars(self) -> pl.DataFrame:
        """One row a point, as a polars DataFrame of shape (points, axes' keys + 16).

        Columns: a key of an axis each, as text; the figures of `rows` in seconds, bytes,
        samples/s and tokens/s, null where the point cannot be simulated or has no tokens; `problem`
        (why), `best` and `front`.
        Raises ImportError without polars: `pip install 'ddpsim[parquet]'`.

        >>> swept = ddpsim.sweep("scenario.yaml", ddpsim.Grid.of(["ddp.bucket_cap_mb=1,25"]))
        >>> table = swept.to_polars()
        >>> table.shape
        (2, 17)
        >>> table["ddp.bucket_cap_mb"].to_list()
        ['1', '25']
        """
        try:
            from polars import DataFrame  # noqa: PLC0415 -- an extra
        except ModuleNotFoundError as error:
            raise missing("polars", "ddpsim[parquet]") from error
        return DataFrame(self.rows(), infer_schema_length=None)

    def to_pandas(self) -> pd.DataFrame:
        """The table of `to_polars` as a pandas DataFrame, with None or NaN for null.

        Raises ImportError without pandas: `pip install pandas`.

        >>> swept = ddpsim.sweep("scenario.yaml", ddpsim.Grid.of(["ddp.bucket_cap_mb=1,25"]))
        >>> swept.to_pandas().shape
        (2, 17)
        """
        try:
            from pandas import DataFrame  # noqa: PLC0415 -- not among our requirements
        except ModuleNotFoundError as error:
            raise missing("pandas", "pandas") from error
        return DataFrame(self.rows())


_FIGURES = {  # by their names in a row
    "world_size": "world_size",
    "iteration_time_s": "iteration_time_s.mean",
    "iteration_time_s_p10": "iteration_time_s.p10",
    "iteration_time_s_p50": "iteration_time_s.p50",
    "iteration_time_s_p90": "iteration_time_s.p90",
    "throughput_samples_per_s": "throughput_samples_per_s",
    "throughput_per_gpu": "throughput_per_gpu",
    "scaling_efficiency": "scaling_efficiency",
    "comm_time_s": "comm_time_s",
    "exposed_comm_s": "exposed_comm_s",
    "memory_bytes_per_gpu": "memory_bytes_per_gpu.total",
    "fits": "memory_bytes_per_gpu.fits",
}


def _figures(point: Point) -> dict[str, Any]:
    figures = {
        name: rounded(attrgetter(path)(point.brief)) if point.brief else None
        for name, path in _FIGURES.items()
    }
    tokens, brief = point.tokens_per_sample, point.brief
    rate = rounded(tokens * brief.throughput_samples_per_s) if tokens and brief else None
    return figures | {"tokens_per_s": rate, "problem": point.problem}
