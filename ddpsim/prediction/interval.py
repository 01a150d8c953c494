"""How far a prediction may be off: the uncertainty of each input, carried through the model.

Each input's standard deviation is measured where it could be and a stated assumption where not
(docs/explanation/accuracy.md). Inputs move the step on their own: the scenario is run
again with each one low and high, without jitter, and the differences add in quadrature.
What is not modelled can only lengthen a step, and widens the interval upwards: gloo's interference
with compute where it was not calibrated, as seen on a testbed; ranks, hosts and loaders taken as
equal, by how much longer published jobs take than one GPU says. Half of the jobs lose at most
`usual`, which is added as it is; what the others lose beyond it adds in quadrature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import hypot, sqrt
from typing import NamedTuple

from ddpsim.provenance import Uncertainty
from ddpsim.result.model import IntervalSource, PredictionInterval

LEVEL = 0.8

# what holds four in five measured steps, each predicted by those of other publishers, by kind of
# model; and of a device of which only its peaks are known (docs/validation.md, section 3)
ROOFLINE = {
    "convolutional": Uncertainty(0.15, "the error of 180 measured steps, by other publishers'"),
    "attention": Uncertainty(0.11, "the error of 180 measured steps and 72 jobs, by others'"),
}
# medians of 12 kinds of layers and GPUs (docs/explanation/compute.md): root mean square
RECURRENT = Uncertainty(0.44, "DeepBench's recurrent layers; none set the estimate")
# of a device of which at least so many steps are measured, what holds four in five of models whose
# families are left out (section 3)
MANY_STEPS = 300
MANY_MODELS = Uncertainty(0.10, "the error of 781 measured steps, by those of other families")
UNKNOWN_DEVICE = Uncertainty(0.26, "the error of 287 measured steps, by one efficiency for all")
COMPILED = Uncertainty(0.28, "the roofline's error over 3 published steps under torch.compile")
COMPUTE = {
    "measured": Uncertainty(0.02, "assumed repeatability of a measured step time"),
    "slowed": Uncertainty(0.20, "assumed: bound by the host, whose launches the profiler slowed"),
    "scaled": Uncertainty(0.20, "assumed: as of the roofline, by whose rates it was scaled"),
    "other device": Uncertainty(
        0.20, "assumed: as of the roofline, by which the slowest node's device is estimated"
    ),
}
# how far measured hosts are from what those of other publishers take, by generation (section 3)
HOST = Uncertainty(0.41, "16 measured hosts, each by those of other publishers")
FLOAT8 = Uncertainty(0.35, "assumed: float8 products as near their peak as those of bf16")
COMPILED_HOST = Uncertainty(0.50, "assumed: compiled code's launches as uncertain as operators")
# hooks of units and the optimizer over DTensors, which no publisher times on a GPU's host
GPU_HOOKS = Uncertainty(0.41, "assumed: units' hooks as uncertain as operators of measured hosts")
CPU_HOOKS = Uncertainty(0.34, "units' hooks of eight models on a CPU")
STATED_HOST = Uncertainty(0.10, "assumed: the host's times as stated in the scenario")
MEASURED_HOST = Uncertainty(0.10, "assumed: the host's times as measured by `calibrate device`")
MEASURED_DEVICE = "the device file's error, where half of the zoo's models predict the others"
DATA = Uncertainty(0.10, "assumed: a loader's rate as stated in the scenario")
# compute while a gloo collective is in flight, on a shared-core testbed (docs/validation.md)
GLOO_SLOWDOWN = 0.22
# what each broadcast of a short message takes longer in gloo's queue than alone: the median and the
# ninth decile of ten models and machines (docs/explanation/accuracy.md)
SHORT_MESSAGE_BYTES = 64 * 1024
QUEUED_USUAL_S, QUEUED_MOST_S = 0.28e-3, 0.55e-3


class RankVariation(NamedTuple):
    """How much longer jobs take than one GPU's step and communication say: parts of a step.

    Half of them at most `usual`, nine in ten `most`.
    """

    usual: float
    most: float
    of: str


# published jobs of 2 to 32 GPUs by what they read (docs/validation.md, section 1)
UNEQUAL_RANKS = {
    "images": RankVariation(0.06, 0.12, "published jobs that read images"),
    "other": RankVariation(0.008, 0.05, "published jobs that decode nothing"),
}
_INPUTS = {
    "compute": "compute time",
    "host": "host time",
    "network": "network model",
    "data": "data rate",
    "interference": "interference",
    "interference_exponent": "interference exponent",
    "overheads": "DDP's hooks and copies",
}
_BOTH = {"compute", "host"}
_MANY_TIMES = 10.0  # as long: no longer told in per cent
_DEVICE_AND_HOST = (_INPUTS["compute"], _INPUTS["host"])


def prediction_interval(
    mean_s: float,
    step_s: Callable[..., float],
    uncertainties: Mapping[str, Uncertainty],
    longer: Sequence[IntervalSource],
    spread_s: tuple[float, float],
) -> PredictionInterval:
    """The 80 % interval around a mean step.

    `step_s` simulates the step, with `compute`, `host`, `network`, `data`, `interference`,
    `interference_exponent` or `overheads` stretched by a factor; `uncertainties` has those terms.
    `longer`: sources that only lengthen it. `spread_s` is p10 and p90 over iterations.
    """
    base_s = step_s()
    sources = [
        _effect(term, uncertainty, mean_s / base_s, base_s, step_s)
        for term, uncertainty in uncertainties.items()
    ]
    sources = _as_device_or_host(sources, step_s, uncertainties, mean_s / base_s)
    low, high = spread_s
    if high > low:
        below, above = max(0.0, mean_s - low), max(0.0, high - mean_s)
        sources.append(IntervalSource("jitter", below, above, "p10 to p90 of the iterations"))
    sources += longer
    below_s, above_s = together(sources)
    return PredictionInterval(LEVEL, max(0.0, mean_s - below_s), mean_s + above_s, tuple(sources))


def uncalibrated_interference(hidden_s: float) -> IntervalSource:
    """What `hidden_s` of communication under compute may add where it was not calibrated."""
    slowed_s = GLOO_SLOWDOWN * hidden_s
    basis = (
        f"assumed: compute up to {GLOO_SLOWDOWN:.0%} slower under communication "
        "(our testbed's rounds)"
    )
    return lengthening("uncalibrated interference", slowed_s, slowed_s, basis)


def ranks_differ(variation: RankVariation, mean_s: float) -> IntervalSource:
    """What ranks that are taken as equal may add to a step of `mean_s`."""
    usual, most, jobs = variation
    basis = f"GPUs, hosts and loaders differ: up to {most:.0%} in 9 of 10 {jobs}"
    return lengthening("rank variation", usual * mean_s, most * mean_s, basis)


def lengthening(name: str, usual_s: float, most_s: float, basis: str) -> IntervalSource:
    """What adds at most `usual_s` to half of all steps, and `most_s` to nine in ten."""
    return IntervalSource(name, 0.0, most_s, basis, usual_s)


def variants(uncertainties: Mapping[str, Uncertainty]) -> Iterator[dict[str, float]]:
    """The factors of all steps that `prediction_interval` asks for."""
    yield {}
    for term, uncertainty in uncertainties.items():
        yield from ({term: factor} for factor in uncertainty.edges)
    if uncertainties.keys() >= _BOTH:
        yield _both_short(uncertainties)


def _both_short(uncertainties: Mapping[str, Uncertainty]) -> dict[str, float]:
    """Factors that shorten both, together as likely as one of them alone at its edge."""
    return {term: uncertainties[term].edges[0] ** sqrt(0.5) for term in ("compute", "host")}


def _as_device_or_host(
    sources: list[IntervalSource],
    step_s: Callable[..., float],
    uncertainties: Mapping[str, Uncertainty],
    scale: float,
) -> list[IntervalSource]:
    """Widen compute and host downwards, where a step waits for whichever of the two is later.

    Where they tie, the step shortens only if both do. What both gain together beyond what each
    gains alone is divided between them.
    """
    if not uncertainties.keys() >= _BOTH:
        return sources
    shorter_s = max(0.0, step_s() - step_s(**_both_short(uncertainties))) * scale
    alone_s = [s.low_s for s in sources if s.input in _DEVICE_AND_HOST]
    if shorter_s <= hypot(*alone_s):
        return sources
    missing_s2 = (shorter_s**2 - hypot(*alone_s) ** 2) / 2
    return [
        replace(s, low_s=sqrt(s.low_s**2 + missing_s2)) if s.input in _DEVICE_AND_HOST else s
        for s in sources
    ]


def if_measured(mean_s: float, interval: PredictionInterval, sigma: float) -> tuple[float, float]:
    """The interval's edges if a measured step replaced an estimate with the deviation `sigma`.

    The effect of compute shrinks as its deviation does; the measurement has the host's.
    """
    measured, estimated = COMPUTE["measured"].edges, Uncertainty(sigma, "").edges
    low, high = ((1 - m) / (1 - e) for m, e in zip(measured, estimated, strict=True))
    sources = [
        replace(source, low_s=low * source.low_s, high_s=high * source.high_s)
        if source.input == _INPUTS["compute"]
        else source
        for source in interval.sources
        if source.input != _INPUTS["host"]
    ]
    below_s, above_s = together(sources)
    return max(0.0, mean_s - below_s), mean_s + above_s


def together(sources: Sequence[IntervalSource]) -> tuple[float, float]:
    """Seconds below and above: in quadrature, but what usually lengthens adds as it is."""
    below_s = hypot(*(source.low_s for source in sources))
    above_s = hypot(*(source.high_s - source.usual_s for source in sources))
    return below_s, above_s + sum(source.usual_s for source in sources)


def _effect(
    term: str,
    uncertainty: Uncertainty,
    scale: float,
    base_s: float,
    step_s: Callable[..., float],
) -> IntervalSource:
    """The step with one input low and high, each at its edge of the 80 % range."""
    low, high = uncertainty.edges
    low_s = max(0.0, base_s - step_s(**{term: low})) * scale
    high_s = max(0.0, step_s(**{term: high}) - base_s) * scale
    edges_said = f"{low - 1:.0%} / {high - 1:+.0%}" if high < _MANY_TIMES else f"/ or x {high:.3g}"
    basis = f"input {edges_said}: {uncertainty.basis}"
    return IntervalSource(_INPUTS[term], low_s, high_s, basis)
