"""What an iteration takes, without what others on the machine did to it meanwhile.

A shared machine is slower for tenths of a second now and then. The forward is the same work in
every variant of DDP of as many micro-batches, and over before gradients are sent: it tells how fast
the machine was in this very iteration. (Other strategies have forwards of their own.) What goes
with it is taken off, which halves the noise: a control variate. (Of two micro-batches each forward
took 0.6 and 5 % less than one alone, in the median of the sweeps on two machines: the slower rank
changes, and perhaps caches are warm.)

One run's rounds say how well it knows its own iterations, and not how well another would find
them: that, several runs tell.

How fast a machine was while a file was measured, its compute tells beside which nothing is sent. It
takes as long at every line rate; what it takes longer in one file than in another others on the
machine did to it, and to all else in that file. Or it was another machine.

A simulated step is cut into the phases into which DDP's own log and the rounds cut a measured one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import TypeVar

import numpy as np

from calibrate.fit.estimates import averaged, median_time, trimmed_mean
from calibrate.fit.solve import Floats
from calibrate.records.record import LAYER, WORKS, Record
from calibrate.records.rounds import Rounds, Steps, slowest
from calibrate.validate.report import Split
from ddpsim.importers.profiles.cluster import Fitted
from ddpsim.result.metrics import Step, steps_of
from ddpsim.result.timeline import Kind, Timeline
from ddpsim.units import NS_PER_S

_LEAST_ROUNDS = 10  # fewer tell no slope

_FORWARD: frozenset[Kind] = frozenset(("data_wait", "stall", "forward", "buffers"))
_BACKWARD: frozenset[Kind] = frozenset(("backward", "bucket_copy"))

LAYER_ALONE = f"{LAYER} alone"
_ALONE = tuple(f"{work} alone" for work in WORKS)
_Name = TypeVar("_Name")


def run_times(runs: Sequence[Rounds], alike: Sequence[int]) -> list[Fitted]:
    """The median seconds of an iteration of each run, the slower rank's.

    Over the rounds of the variants of these indices, each as it would have been had its forward
    taken what those of all variants with the same forward usually take: in logarithms the
    iteration is a line in its forward, by least squares over all of these rounds.
    """
    whole = [_logarithms([run.variants[i] for i in alike], "whole_s") for run in runs]
    forward = [_logarithms([run.variants[i] for i in alike], "forward_s") for run in runs]
    usual = _usual_forward(runs, runs[0].variants[alike[0]].variant.forward)
    slope = _slope(np.concatenate(forward), np.concatenate(whole))
    return [
        median_time(np.exp(iteration - slope * (forward_s - usual)).tolist())
        for iteration, forward_s in zip(whole, forward, strict=True)
    ]


def with_pooled_noise(
    times: Mapping[tuple[int, ...], Sequence[Fitted]], runs: Sequence[Rounds]
) -> dict[tuple[int, ...], list[Fitted]]:
    """Give each time the noise of an iteration of all variants with the same forward.

    They took turns on one machine, and few rounds of one say little of their own spread.
    """
    return {
        alike: [
            _pooled(time, run, alike, [(same, each[i]) for same, each in times.items()])
            for i, (time, run) in enumerate(zip(each_run, runs, strict=True))
        ]
        for alike, each_run in times.items()
    }


def _pooled(
    time: Fitted,
    run: Rounds,
    indices: tuple[int, ...],
    others: Iterable[tuple[tuple[int, ...], Fitted]],
) -> Fitted:
    def count(alike: tuple[int, ...]) -> int:
        return sum(len(run.variants[i].whole_s) for i in alike)

    forward = run.variants[indices[0]].variant.forward
    like = [
        (count(alike), (each.stderr or 0.0) / each.value)
        for alike, each in others
        if run.variants[alike[0]].variant.forward == forward
    ]
    variance = sum((n * error) ** 2 for n, error in like) / sum(n for n, _ in like)
    return Fitted(value=time.value, stderr=time.value * math.sqrt(variance / count(indices)))


def run_sigma(cases: Iterable[Sequence[Fitted]]) -> float:
    """The standard deviation of a run's time from run to run, relative; 0 of a single run.

    Pooled over the cases, each the times of the same runs.
    """
    medians = [[time.value for time in times] for times in cases]
    if any(len(values) < 2 for values in medians):
        return 0.0
    return math.sqrt(fmean((stdev(values) / fmean(values)) ** 2 for values in medians))


def steady_time(times: Sequence[Fitted], sigma: float = 0.0) -> Fitted:
    """The mean of the runs' times.

    The error is that of their medians, or of runs that are `sigma` apart where that is larger.
    """
    time = averaged(times)
    apart_s = time.value * sigma / math.sqrt(len(times))
    return Fitted(value=time.value, stderr=max(time.stderr or 0.0, apart_s))


def _slope(x: Floats, y: Floats) -> float:
    spread = x - x.mean()
    power = float(spread @ spread)
    return float(spread @ y) / power if power > 0 and len(x) >= _LEAST_ROUNDS else 0.0


def _usual_forward(runs: Sequence[Rounds], kind: object) -> float:
    """The mean of the runs' medians, as of all that is measured."""
    each = [[v for v in run.variants if v.variant.forward == kind] for run in runs]
    return fmean(float(np.median(_logarithms(like, "forward_s"))) for like in each)


def _logarithms(steps: Sequence[Steps], part: str) -> Floats:
    """Logarithms of the slower rank's seconds, round by round."""
    return np.log([seconds for one in steps for seconds in slowest(getattr(one, part))])


def usual_phases(timeline: Timeline, ranks: Iterable[int]) -> Split:
    """What forward, backward, exposed and optimizer usually take in the steady steps.

    The mean over these ranks of the timeline. `forward` holds the broadcast of buffers; `backward`
    ends with its last work, hooks and copies to buckets included; `exposed` from there until every
    gradient has been copied back (torch's reducer.cpp).

    Slow steps are left out as of measured ones (`calibrate.fit.estimates.trimmed_mean`).
    """
    lanes = ([*map(_phases_ns, steps_of(timeline.ranks[r])[timeline.warmup :])] for r in ranks)
    each = [
        {part: trimmed_mean([step[part] for step in lane]) for part in lane[0]} for lane in lanes
    ]
    usual = {part: fmean(lane[part] for lane in each) / NS_PER_S for part in each[0]}
    return Split(**usual, all_reduce=None)


def _phases_ns(step: Step) -> dict[str, int]:
    """What lies between two pieces of work belongs to the later one, a wait to the earlier.

    What fully_shard gathers once the backward has begun, before its first work, is the backward's.
    """
    spent = {"forward": 0, "backward": 0, "exposed": 0, "optimizer": 0}
    phase, now = "forward", step.start_ns
    for span in step.compute:
        begun = span.start_ns >= step.backward_start_ns
        if span.kind in _FORWARD:
            phase = "forward"
        elif span.kind in _BACKWARD or (begun and phase == "forward"):
            phase = "backward"
        elif span.kind == "optimizer":
            phase = "optimizer"
        elif phase == "backward":
            phase = "exposed"
        spent[phase] += span.end_ns - now
        now = span.end_ns
    spent["optimizer"] += step.end_ns - now
    return spent


def times_the_least(bare_s: Mapping[_Name, Mapping[str, float]]) -> dict[_Name, float]:
    """How many times the least of its kind something took in each, the most of all kinds."""
    least: dict[str, float] = {}
    for times in bare_s.values():
        for what, seconds in times.items():
            least[what] = min(seconds, least.get(what, seconds))
    return {
        name: max(seconds / least[what] for what, seconds in times.items())
        for name, times in bare_s.items()
        if times
    }


def bare_compute_s(record: Record) -> dict[str, float]:
    """Median seconds of each piece of compute beside which nothing was sent."""
    times: dict[str, list[float]] = {}
    for measurement in record.measurements:
        if measurement.kind == "compute" and measurement.variant in _ALONE:
            times.setdefault(measurement.variant, []).extend(measurement.samples_s)
    return {what: median(samples) for what, samples in times.items()}


def bare_rounds_s(rounds: Rounds) -> dict[str, float]:
    """Median seconds of the model without DDP, and of a record's layer."""
    alone = rounds.calm().alone
    times = {f"{rounds.model} on {rounds.layout.world_size} ranks": median(slowest(alone.whole_s))}
    return times | ({LAYER_ALONE: median(slowest(alone.beside.layers_s))} if alone.beside else {})


def layer_s(records: Iterable[Record]) -> float | None:
    """Median seconds of a layer's two passes, the mean of the records; None if none has them."""
    layers = [
        bare_s[LAYER_ALONE]
        for record in records
        if LAYER_ALONE in (bare_s := bare_compute_s(record))
    ]
    return fmean(layers) if layers else None
