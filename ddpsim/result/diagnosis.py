"""What slows a job down, how surely, what tells causes apart, and whether a step is normal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddpsim.result.model import Drawn, PredictionInterval, Result, Stretch, rounded
from ddpsim.units import format_duration, format_number, format_percent

DIAGNOSIS_SCHEMA = "ddpsim.diagnosis/1"
HEALTHY = "healthy"  # the key of the cause that is none
_DECIDED = 0.5
WORTH_SAYING = 0.05  # probability of a cause from which a screen names it

Quantity = Literal["step", "without_sync", "exposed", "data_wait", "all_reduce"]


@dataclass(frozen=True)
class Measurement:
    """Seconds that somebody measured on `nodes` nodes of `gpus_per_node` ranks.

    `quantity`: a step; a step under `no_sync` on a usual rank; of a step the time in which the
    device waits for communication; the time in which it waits for a batch; or one all-reduce of
    `size_bytes`. `accumulation`: of so many micro-batches, `batch`: of so many samples a rank;
    None: as the scenario has them.
    """

    quantity: Quantity
    seconds: float
    nodes: int
    gpus_per_node: int
    size_bytes: int | None = None
    accumulation: int | None = None
    batch: int | None = None

    @property
    def setting(self) -> tuple[int, int, int | None, int | None]:
        """What was measured: nodes, GPUs of each, accumulation and batch."""
        return self.nodes, self.gpus_per_node, self.accumulation, self.batch


@dataclass(frozen=True)
class Measured:
    """A measurement, and what the scenario predicts of it, in seconds."""

    measurement: Measurement
    predicted_s: float


@dataclass(frozen=True)
class Predicted:
    """What a cause predicts of other things that can be looked at, in seconds.

    `one_gpu_s`: a step on one GPU; the others on the scenario's own ranks, as of `Measurement`.
    None: there is no such thing.
    """

    step_s: float
    one_gpu_s: float
    without_sync_s: float
    exposed_s: float
    data_wait_s: float
    all_reduce_s: float | None


@dataclass(frozen=True)
class Cause:
    """A hypothesis, with its probability before (`prior`) and after what was measured.

    `settings` are the changes of the scenario that were simulated, as `--set` takes them; `factors`
    those that have no key: how many times as long compute, host or network takes. `mended_s`: the
    measured step without this cause; None where the step on the scenario's ranks was not measured,
    or the cause makes another one.
    """

    key: str
    text: str
    prior: float
    probability: float
    remedy: str
    settings: tuple[str, ...]
    factors: dict[str, float]
    mended_s: float | None
    predicts: Predicted | None


@dataclass(frozen=True)
class Fact:
    """What NCCL's log or traces show of a job, and what they show of one as the scenario says."""

    name: str
    expected: str
    seen: str


@dataclass(frozen=True)
class Outcome:
    """What a check `shows` where the cause with that key is the true one.

    `probability`: of the cause, once the check has shown that.
    """

    cause: str
    shows: str
    probability: float


@dataclass(frozen=True)
class CheckToRun:
    """An observation that tells likely causes apart; `command` is what to paste.

    `expected`: the probability that the likeliest cause then has, on average over the outcomes;
    causes that are not among them count as unlikely ones.
    """

    key: str
    text: str
    command: str
    outcomes: tuple[Outcome, ...]
    expected: float


@dataclass(frozen=True)
class Diagnosis(Drawn):
    """Causes of what was measured, the likeliest first.

    Last come those whose step is another one, unless no other cause is worth a word.
    `normal`: the measured step lies in the prediction interval, and steps of other settings are as
    many times as long as predicted; None where no step was measured on the scenario's own ranks, or
    there is no interval. `step`: that measured step; `mfu`: its MFU, where the device's peak bounds
    it; `misfit`: the step whose ratio to it differs most from the predicted one, where that is too
    much. `all_reduce_bytes`: the size of
    `Predicted`. `facts`: what NCCL's log and the traces show, where they were given.
    """

    name: str
    nodes: int
    gpus_per_node: int
    measured: tuple[Measured, ...]
    interval: PredictionInterval | None
    normal: bool | None
    causes: tuple[Cause, ...]
    check: CheckToRun | None
    all_reduce_bytes: int | None
    assumptions: tuple[str, ...]
    facts: tuple[Fact, ...] = ()
    step: Measured | None = None
    mfu: float | None = None
    misfit: Measured | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.gpus_per_node

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is likelier than that nothing is wrong."""
        return self.causes[0].key == HEALTHY

    @property
    def is_decided(self) -> bool:
        """Whether one cause is likelier than all others together."""
        return max(cause.probability for cause in self.causes) >= _DECIDED

    def __repr__(self) -> str:
        first = self.causes[0]
        return f"<Diagnosis of {self.name}: {first.probability:.0%} {first.text}>"

    def to_dict(self) -> dict[str, Any]:
        """Gives JSON's types (schema `ddpsim.diagnosis/1`), floats to 12 decimals."""
        plain = rounded(asdict(self))
        return {"schema": DIAGNOSIS_SCHEMA, **plain, "healthy": self.is_healthy}


_MOST = 4  # causes in words
_IF_FASTER = "check the unit, the batch, the precision and what was timed"
_MANY_TIMES = 20  # beyond which a percentage is hard to read


@dataclass(frozen=True)
class Verdict:
    """`difference` is (measured - predicted) / predicted; `normal`: inside the interval.

    `causes` are what could explain it, the likeliest first, `explanations` the likely ones in
    words. `stretches`: how many times as long one term alone would have to take.
    """

    measured_s: float
    difference: float
    normal: bool | None
    text: str
    stretches: tuple[Stretch, ...]
    explanations: tuple[str, ...]
    causes: tuple[Cause, ...] = ()


def is_normal(result: Result, measured_s: float) -> bool | None:
    """Whether a measured iteration time lies in the interval; None without an interval."""
    interval = result.prediction_interval_s
    return None if interval is None else interval.holds(measured_s)


def place_in_interval(
    interval: PredictionInterval,
    measured_s: float,
    mfu: float | None,
    *,
    name: str,
    is_healthy: bool,
) -> tuple[str, str]:
    """`normal` or `not normal`, and why; the first is empty where one healthy job in five is so.

    `mfu`: the step's, where the device's peak bounds it. `name`: of the interval. `is_healthy`:
    nothing is likelier than that nothing is wrong.
    """
    if interval.holds(measured_s):
        return "normal", f"inside the {name}"
    if is_healthy:
        return "", f"outside the {name}, as one healthy job in five is"
    if measured_s > interval.high:
        return "not normal", f"outside the {name}"
    needed = f", with an MFU of {format_percent(mfu)}" if mfu else ""
    impossible = ", more than the device can do" if mfu and mfu > 1 else ""
    return "not normal", f"faster than the {name}{needed}{impossible}; {_IF_FASTER}"


def verdict(
    result: Result,
    measured_s: float,
    stretches: Sequence[Stretch] = (),
    causes: Sequence[Cause] = (),
    mfu: float | None = None,
) -> Verdict:
    """Compare a measured iteration time in seconds with a prediction.

    `mfu`: the measured step's, where the device's peak bounds it.
    """
    predicted_s = result.iteration_time_s.mean
    difference = measured_s / predicted_s - 1
    interval, normal = result.prediction_interval_s, is_normal(result, measured_s)
    text = f"{format_duration(measured_s)} is {_compared(measured_s, predicted_s)}: "
    if interval is None:
        text += "without an interval nobody can say whether that is normal"
    else:
        place = place_in_interval(
            *(interval, measured_s, mfu),
            name=f"{interval.level:.0%} interval",
            is_healthy=bool(causes) and causes[0].key == HEALTHY,
        )
        text += ", ".join(filter(None, place))
    likely = [each for each in causes if each.probability >= WORTH_SAYING][:_MOST]
    words = tuple(f"{each.probability:.0%} {each.text}" for each in likely)
    return Verdict(measured_s, difference, normal, text, tuple(stretches), words, tuple(causes))


def _compared(measured_s: float, predicted_s: float) -> str:
    """`12.3% above the prediction`; far from it, how many times the prediction."""
    times = measured_s / predicted_s
    if times < 1:
        return f"{format_percent(1 - times)} below the prediction"
    if times < _MANY_TIMES:
        return f"{format_percent(times - 1)} above the prediction"
    return f"{format_number(times)} times the prediction (look at its unit)"
