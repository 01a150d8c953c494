"""What `ddpsim run --verbose` adds to the first screen: buckets, collectives, sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from ddpsim.report.lines import columns, indented, labelled, screen_width
from ddpsim.result.model import (
    BucketTimes,
    CollectiveTimes,
    Estimate,
    IntervalSource,
    MemoryPeak,
    Result,
    StartUp,
)
from ddpsim.units import format_bytes, format_duration

_BUCKET_ROWS = 8
_TELLING = 1.02  # of the memory in use, from which on what is reserved is told
_COLLECTIVE_ROWS = 10

# what a row of the table is, by strategy
_REDUCED = {
    **dict.fromkeys(("ddp", "zero1", "data_parallel"), "bucket"),
    **dict.fromkeys(("fully_shard", "distributed_optimizer"), "reduce-scatter"),
    "parameter_server": "reduce",
    **dict.fromkeys(("hsdp", "fsdp1", "deepspeed"), "reduction"),
}


def tables(result: Result) -> Iterator[str]:
    """Other steps to compare with, then buckets and collectives, an empty line after each."""
    yield from _baselines(result)
    yield ""
    yield from _buckets(result.buckets, _REDUCED.get(result.strategy, "all-reduce"))
    yield ""
    yield from _collectives(result.collectives)
    yield ""


def sources(result: Result) -> Iterator[str]:
    """Memory at its peak, the warm-up, and all of what inputs and interval rest on."""
    if result.memory_peak:
        yield from labelled("", _peak_words(result.memory_peak))
    memory = result.memory_bytes_per_gpu
    if memory.reserved and memory.reserved > _TELLING * memory.total:
        kept = (
            f"torch's allocator reserves {format_bytes(memory.reserved)}, as it keeps freed blocks"
        )
        yield from labelled("", f"{kept} (max_memory_reserved)")
    yield from _start_up(result.start_up)
    yield from _warm_up(result)
    inputs = [(entry.trust, f"{entry.input}: {entry.source}") for entry in result.provenance]
    yield from columns("inputs", inputs)
    interval = result.prediction_interval_s
    moving = [each for each in (interval.sources if interval else ()) if each.width_s > 0]
    yield from columns("interval", [(each.input, effect(each), each.basis) for each in moving])
    if result.estimate:
        yield from _estimate(result.estimate)


_WITHOUT = "without copies and hooks"


def _baselines(result: Result) -> Iterator[str]:
    naive = result.baselines_s
    if result.is_disturbed:
        yield f"  for comparison, of equal ranks that wait for nothing else, {_WITHOUT}:"
    yield from indented(
        f"{'  ' if result.is_disturbed else f'for comparison, {_WITHOUT}: '}"
        f"compute only {format_duration(naive.compute_only)}, "
        f"perfect overlap {format_duration(naive.perfect_overlap)}, "
        f"no overlap {format_duration(naive.no_overlap)}"
    )


def _buckets(buckets: tuple[BucketTimes, ...], called: str) -> Iterator[str]:
    width = len(called)
    yield f"  {called}{'size':>11}{'params':>8}{'ready':>11}{'start':>11}{'end':>11}  layers"
    shown = buckets if len(buckets) <= _BUCKET_ROWS else (*buckets[:5], *buckets[-2:])
    layers = dict(zip((bucket.index for bucket in buckets), _layers(buckets), strict=True))
    for row, bucket in enumerate(shown):
        if row == 5 and len(shown) < len(buckets):
            yield f"  {'...':>{width}}   {len(buckets) - len(shown)} more (--json lists them all)"
        size = format_bytes(bucket.size_bytes)
        times = "".join(
            f"{format_duration(time):>11}"
            for time in (bucket.ready_s, bucket.start_s, bucket.end_s)
        )
        figures = f"  {bucket.index:>{width}}{size:>11}{bucket.num_params:>8}{times}  "
        yield f"{figures}{_in_room(layers[bucket.index], screen_width() - len(figures))}"
    yield "  times from the start of backward; launched in this order"


def _layers(buckets: Sequence[BucketTimes]) -> list[tuple[str, ...]]:
    """The modules of each bucket's first and last parameter, without what all names begin with."""
    parts = [[_module(name).split(".") for name in (b.first, b.last)] for b in buckets]
    every = [names for both in parts for names in both]
    alike = takewhile(lambda same: len(set(same)) == 1, zip(*every, strict=False))
    start = min([len(list(alike)), *(len(names) - 1 for names in every)])
    start -= start > 0 and any(names[start].isdigit() for names in every)  # of what?
    return [tuple(dict.fromkeys(".".join(names[start:]) for names in both)) for both in parts]


def _module(parameter: str) -> str:
    """Name of a parameter without "weight" or "bias"; a number is part of the module's."""
    module, _, last = parameter.rpartition(".")
    return module if module and not last.isdigit() else parameter


def _in_room(names: Sequence[str], room: int) -> str:
    """Names with dots between them; long ones lose their ends, which adapters share."""
    left, shown = room - 5 * (len(names) - 1), dict[str, str]()
    for done, name in enumerate(sorted(names, key=len)):
        each = left // (len(names) - done)
        shown[name] = name if len(name) <= each else f"{name[: each - 3]}..."
        left -= len(shown[name])
    return " ... ".join(shown[name] for name in names)


def _collectives(collectives: tuple[CollectiveTimes, ...]) -> Iterator[str]:
    """The first collectives of a step."""
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


def _peak_words(peak: MemoryPeak) -> str:
    """What a rank holds at its peak beside shards and activations."""
    parts = {
        "whole parameters": peak.parameters,
        "gradients": peak.gradients,
        "inputs of reductions": peak.reductions,
    }
    held = ", ".join(f"{format_bytes(size)} of {what}" for what, size in parts.items() if size)
    return f"most in {peak.at}: {held}"


def _warm_up(result: Result) -> Iterator[str]:
    if not result.warmup_s:
        return
    rebuilt = result.buckets_rebuilt_at
    never = ", buckets never rebuilt" if result.strategy in ("ddp", "zero1") else ""
    when = never if rebuilt is None else " before the bucket rebuild"
    first = format_duration(result.warmup_s[0])
    yield from labelled("warm-up", f"first iteration {first}{when}")


def _start_up(start_up: StartUp | None) -> Iterator[str]:
    """What comes once before the first step."""
    if start_up is None:
        return
    parts = []
    if start_up.broadcast_bytes and start_up.broadcast_s:
        sent = format_bytes(start_up.broadcast_bytes)
        took = format_duration(start_up.broadcast_s)
        parts.append(f"{sent} of parameters and buffers broadcast in {took}")
    if start_up.communicator_s:
        low, high = map(format_duration, start_up.communicator_s)
        parts.append(f"NCCL's communicator in {low} to {high} (published for other clusters)")
    if parts:
        yield from labelled("start-up", f"once, not in the step: {'; '.join(parts)}")


def _estimate(estimate: Estimate) -> Iterator[str]:
    """Which of host and device an estimated step waits for, and what a measured one would save."""
    low, high = map(format_duration, (estimate.measured_low_s, estimate.measured_high_s))
    yield from labelled(
        "estimate",
        f"{estimate.regime}: the host needs {estimate.host_share:.0%} of the device's time; "
        f"a measured step_time would leave an interval of {low} to {high}",
    )


def effect(source: IntervalSource) -> str:
    """What an uncertain input does to the step: `-18.2 / +21.5 ms`, `+83.4 ms`."""
    below, above = format_duration(source.low_s), f"+{format_duration(source.high_s)}"
    if not source.low_s:
        return above
    number, unit = below.split()
    return f"-{number if above.endswith(f' {unit}') else below} / {above}"
