"""A result on one screen: answer first, cause second, trust third, next command last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddpsim.errors import printable
from ddpsim.provenance import Provenance
from ddpsim.report.lines import (
    columns,
    command,
    cut,
    indented,
    interval_in_words,
    labelled,
    screen_width,
    warned,
)
from ddpsim.report.training import step_in_words, training_lines
from ddpsim.result.model import (
    Breakdown,
    BucketTimes,
    CollectiveTimes,
    IntervalSource,
    MemoryPeak,
    PredictionInterval,
    Result,
)
from ddpsim.units import (
    format_bytes,
    format_duration,
    format_number,
    format_percent,
)
from ddpsim.wording import ranks

if TYPE_CHECKING:
    from ddpsim.result.verdict import Verdict

__all__ = ["PARTS", "render"]

_BUCKET_ROWS = 8
_STRAGGLERS = 3  # lines
_SHOWN = 0.02  # of the widest source: what moves the interval less is for --verbose
_COLLECTIVE_ROWS = 10
PARTS = {
    "forward": "forward",
    "backward_compute": "backward",
    "exposed_comm": "exposed comm",
    "optimizer": "optimizer",
    "data_wait": "data wait",
    "other": "other",
}

# what a row of the table is, by strategy
_REDUCED = {
    **dict.fromkeys(("ddp", "zero1", "data_parallel"), "bucket"),
    **dict.fromkeys(("fully_shard", "distributed_optimizer"), "reduce-scatter"),
    "parameter_server": "reduce",
    **dict.fromkeys(("hsdp", "fsdp1", "deepspeed"), "reduction"),
}


def render(
    result: Result,
    file: str,
    verdict: Verdict | None = None,
    settings: Sequence[str] = (),
    *,
    verbose: bool = False,
) -> str:
    """The answer as text, as wide as the screen, but for what a shell must find on one line.

    `file` and `settings` name the scenario, and its `--set` options, in the next commands.
    `verbose`: the first collectives of a step, and all of what the inputs and the interval rest on.
    """
    lines = [
        *_answer(result),
        *(_verdict(verdict, file, settings) if verdict else ()),
        "",
        *_breakdown(result),
        "",
        *_buckets(result.buckets, _REDUCED.get(result.strategy, "all-reduce")),
        "",
        *(_collectives(result.collectives) if verbose else ()),
        *_trust(result),
        *_inputs(result.provenance, whole=verbose),
        *_interval_sources(result.prediction_interval_s, whole=verbose),
        *_estimate(result),
        *_next(result, file, settings),
    ]
    return printable("\n".join(line.rstrip() for line in lines))


def _answer(result: Result) -> Iterator[str]:
    size = ranks(result.nodes, result.gpus_per_node, result.gpus_by_node)
    head = f"{cut(result.name, 70)}   {size}"
    batch = step_in_words(result.training) if result.training else ""
    has_room = len(f"{head}, {batch}") <= screen_width()
    yield f"{head}, {batch}" if batch and has_room else head
    yield ""
    times = result.iteration_time_s
    spread = ""
    if times.p90 > times.p10:
        spread = f"   p10 {format_duration(times.p10)}, p90 {format_duration(times.p90)}"
    yield from labelled("step", f"{format_duration(times.mean)}   {_interval(result)}{spread}")
    yield from labelled(
        "throughput",
        f"{format_number(result.throughput_samples_per_s)} samples/s global   "
        f"{format_number(result.throughput_per_gpu)} per GPU   "
        f"scaling {format_percent(result.scaling_efficiency)} of one device without DDP",
    )
    if result.training:
        yield from labelled("batch", batch) if not has_room else ()
        yield from training_lines(result.training)
    yield from labelled("bottleneck", f"{result.bottleneck.kind}: {result.bottleneck.text}")
    label = "held up by"
    for straggler in result.stragglers[:_STRAGGLERS]:
        cost = f"{format_duration(straggler.cost_s)} a step" if straggler.cost_s else "nothing"
        yield from labelled(label, f"{straggler.text}: costs {cost}")
        label = ""
    yield from warned(result.warnings)


def _interval(result: Result) -> str:
    interval = result.prediction_interval_s
    if interval is None:
        return "no interval can be had: the uncertainty of the inputs is unknown"
    return interval_in_words(interval)


def _verdict(verdict: Verdict, file: str, settings: Sequence[str]) -> Iterator[str]:
    yield from labelled("measured", verdict.text)
    for explanation in verdict.explanations:
        yield from labelled("", f"- {explanation}")
    if verdict.explanations:
        yield from labelled("", "to tell them apart, and to see the step without each cause:")
        measured = f"{1e3 * verdict.measured_s:.10g} ms"
        yield from command(file, settings, name="diagnose", options=("--measured", measured))


def _breakdown(result: Result) -> Iterator[str]:
    whole = result.iteration_time_s.mean
    for key, label in PARTS.items():
        part = getattr(result.breakdown_s, key)
        if part or key in {"forward", "backward_compute", "exposed_comm"}:
            bar = "#" * round(40 * part / whole)
            yield f"  {label:<13}{format_duration(part):>11}{part / whole:>8.1%}  {bar}"
    yield f"  {'= step':<13}{format_duration(_sum(result.breakdown_s)):>11}"
    if result.overlap_fraction is not None:
        late = f", {format_duration(result.skew_s)} waiting for late peers" if result.skew_s else ""
        yield from indented(
            f"communication in flight {format_duration(result.comm_time_s)}, "
            f"{result.overlap_fraction:.1%} hidden under compute{late}"
        )
    naive = result.baselines_s
    if result.is_disturbed:
        yield "  for comparison, of equal ranks that wait for nothing else:"
    yield from indented(
        f"{'  ' if result.is_disturbed else 'for comparison: '}"
        f"compute only {format_duration(naive.compute_only)}, "
        f"perfect overlap {format_duration(naive.perfect_overlap)}, "
        f"no overlap {format_duration(naive.no_overlap)}"
    )


def _sum(breakdown: Breakdown) -> float:
    parts: list[float] = [getattr(breakdown, key) for key in PARTS]
    return sum(parts)


def _buckets(buckets: tuple[BucketTimes, ...], called: str) -> Iterator[str]:
    width = len(called)
    yield f"  {called}{'size':>11}{'params':>8}{'ready':>12}{'start':>12}{'end':>12}"
    shown = buckets if len(buckets) <= _BUCKET_ROWS else (*buckets[:5], *buckets[-2:])
    for row, bucket in enumerate(shown):
        if row == 5 and len(shown) < len(buckets):
            yield f"  {'...':>{width}}   {len(buckets) - len(shown)} more (--json lists them all)"
        size = format_bytes(bucket.size_bytes)
        times = "".join(
            f"{format_duration(time):>12}"
            for time in (bucket.ready_s, bucket.start_s, bucket.end_s)
        )
        yield f"  {bucket.index:>{width}}{size:>11}{bucket.num_params:>8}{times}"
    yield "  times from the start of backward; launched in this order"


def _collectives(collectives: tuple[CollectiveTimes, ...]) -> Iterator[str]:
    """The first ones of a step, and an empty line."""
    yield f"  {'operation':<14}{'size':>10}{'ready':>11}{'start':>11}{'end':>11}  ranks  cause"
    for each in collectives[:_COLLECTIVE_ROWS]:
        moments = (each.ready_s, each.start_s, each.end_s)
        times = "".join(f"{format_duration(moment):>11}" for moment in moments)
        size = format_bytes(each.size_bytes)
        room = screen_width() - 68
        cause = each.cause if len(each.cause) <= room else f"...{each.cause[3 - room :]}"
        yield f"  {each.operation:<14}{size:>10}{times}  {each.group:<7}{cause}"
    more = len(collectives) - _COLLECTIVE_ROWS
    listed = f"; {more} more (--json lists them all)" if more > 0 else ""
    yield f"  times from the start of the step; launched in this order{listed}"
    yield ""


def _trust(result: Result) -> Iterator[str]:
    memory = result.memory_bytes_per_gpu
    without = "" if memory.activations is not None else ", activations unknown"
    needed, device = format_bytes(memory.total), format_bytes(memory.device)
    verdict = "" if memory.fits else ": does not fit"
    yield from labelled("memory", f"{needed} of {device} a rank{without}{verdict}")
    if result.memory_peak:
        yield from labelled("", _peak_words(result.memory_peak))
    if result.warmup_s:
        rebuilt = result.buckets_rebuilt_at
        never = ", buckets never rebuilt" if result.strategy in ("ddp", "zero1") else ""
        when = never if rebuilt is None else " before the bucket rebuild"
        first = format_duration(result.warmup_s[0])
        yield from labelled("warm-up", f"first iteration {first}{when}, start-up costs not counted")


def _inputs(provenance: Sequence[Provenance], *, whole: bool) -> Iterator[str]:
    """What each input is, and how it is known."""
    rows = [(entry.trust, f"{entry.input}: {entry.source}") for entry in provenance]
    yield from columns("inputs", rows, whole=whole)


def _interval_sources(interval: PredictionInterval | None, *, whole: bool) -> Iterator[str]:
    """What the interval allows for, how far it moves the step, and on what grounds."""
    sources = interval.sources if interval else ()
    widest_s = max((max(source.low_s, source.high_s) for source in sources), default=0.0)
    least_s = 0.0 if whole else _SHOWN * widest_s
    moving = [source for source in sources if max(source.low_s, source.high_s) > least_s]
    rows = [(source.input, _effect(source), source.basis) for source in moving]
    yield from columns("interval", rows, whole=whole)


def _estimate(result: Result) -> Iterator[str]:
    """Which of host and device an estimated step waits for, and what a measured one would save."""
    estimate = result.estimate
    if estimate is None:
        return
    low, high = map(format_duration, (estimate.measured_low_s, estimate.measured_high_s))
    yield from labelled(
        "estimate",
        f"{estimate.regime}, host {estimate.host_share:.0%} of device; "
        f"a measured step_time would leave {low} to {high}",
    )


def _effect(source: IntervalSource) -> str:
    """On the step: `-18.2 / +21.5 ms`, `+83.4 ms`."""
    below, above = format_duration(source.low_s), f"+{format_duration(source.high_s)}"
    if not source.low_s:
        return above
    number, unit = below.split()
    return f"-{number if above.endswith(f' {unit}') else below} / {above}"


def _next(result: Result, file: str, settings: Sequence[str]) -> Iterator[str]:
    """What to try or measure next, each with a command to paste."""
    label = "next"
    for step in result.next_steps:
        yield from labelled(label, step.why)
        yield from command(file, settings, step.settings)
        label = ""


def _peak_words(peak: MemoryPeak) -> str:
    """What is held apart from shards and activations where that is most."""
    parts = {
        "whole parameters": peak.parameters,
        "gradients": peak.gradients,
        "inputs of reductions": peak.reductions,
    }
    held = ", ".join(f"{format_bytes(size)} of {what}" for what, size in parts.items() if size)
    return f"most in {peak.at}: {held}"
