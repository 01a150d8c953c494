"""A result on one screen: answer first, cause second, trust third, next command last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddpsim.report import details
from ddpsim.report.lines import (
    as_text,
    columns,
    command,
    cut,
    labelled,
    listed,
    screen_width,
    warned,
)
from ddpsim.report.training import step_in_words, training_lines
from ddpsim.result.model import OUT_OF_MEMORY, IntervalSource, Result, interval_in_words
from ddpsim.units import format_bytes, format_duration, format_number, format_percent
from ddpsim.wording import counted, ranks

if TYPE_CHECKING:
    from ddpsim.result.diagnosis import Verdict

_SCREEN = 24  # lines
_STRAGGLERS = 3  # lines
_TRUSTED = 2  # inputs that matter most
PARTS = {
    "forward": "forward",
    "backward_compute": "backward",
    "exposed_comm": "exposed comm",
    "optimizer": "optimizer",
    "data_wait": "data wait",
    "other": "other",
}
# what a source of the interval is an uncertainty of, by the names of inputs: the first group of
# which one is known. The slower one of a host's way and the network is told first
_INPUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "compute time": (
        *(("workload.step_time",), ("workload.profile",), ("workload.trace",)),
        ("compute time",),
    ),
    "host time": (("host time",),),
    "network model": (
        *(("sharded collectives",), ("cluster.profile",), ("all-reduce time",)),
        *(("cluster.host", "cluster.inter_node"), ("cluster.intra_node",)),
    ),
    "rank variation": (("ranks",),),
    "interference": (("interference",),),
    "jitter": (("jitter",),),
}


@as_text
def render(
    result: Result,
    file: str,
    verdict: Verdict | None = None,
    settings: Sequence[str] = (),
    *,
    verbose: bool = False,
) -> list[str]:
    """The answer as text, as wide as the screen, but for what a shell must find on one line.

    `file` and `settings` name the scenario, and its `--set` options, in the next commands.
    Without a verdict it has 24 lines, or more where there are many warnings. `verbose` adds
    buckets, collectives, every next step, and the sources of all inputs and of the interval.
    """
    lines = [*_answer(result, verbose=verbose)]
    body = ["", *_breakdown(result), *(details.tables(result) if verbose else ("",))]
    if result.memory_bytes_per_gpu.fits:
        body += _memory(result)
    body += details.sources(result) if verbose else _trust(result)
    room = None if verbose else _SCREEN - 1 - len(lines) - len(body)
    body += _next(result, file, settings, room)
    if not verbose:
        body.append(f"{'more':<12}--verbose: buckets, collectives, the source of every input")
    return [*lines, *(_verdict(verdict, file, settings) if verdict else ()), *body]


def _answer(result: Result, *, verbose: bool) -> Iterator[str]:
    size = ranks(result.nodes, result.gpus_per_node, result.gpus_by_node)
    each = "GPU"
    if result.gpus_per_rank > 1:
        each = "replica"
        size = f"{counted(result.world_size, each)} of {result.gpus_per_rank} GPUs"
    head = f"{cut(result.name, 70)}   {size}"
    batch = step_in_words(result.training) if result.training else ""
    has_room = len(f"{head}, {batch}") <= screen_width()
    yield f"{head}, {batch}" if batch and has_room else head
    yield ""
    if not result.memory_bytes_per_gpu.fits:
        yield from _memory(result)
        yield from (row for step in result.next_steps[:1] for row in labelled("", step.why))
    times = result.iteration_time_s
    spread = ""
    if times.p90 > times.p10:
        spread = f"   p10 {format_duration(times.p10)}, p90 {format_duration(times.p90)}"
    interval = interval_in_words(result.prediction_interval_s)
    yield from labelled("step", f"{format_duration(times.mean)}   {interval}{spread}")
    yield from labelled(
        "throughput",
        f"{format_number(result.throughput_samples_per_s)} samples/s global   "
        f"{format_number(result.throughput_per_gpu)} per {each}   "
        f"scaling {format_percent(result.scaling_efficiency)} of one device without DDP",
    )
    if result.training:
        yield from labelled("batch", batch) if not has_room else ()
        yield from training_lines(result.training, result)
    yield from labelled("bottleneck", f"{result.bottleneck.kind}: {result.bottleneck.text}")
    yield from _stragglers(result, _STRAGGLERS if verbose else 1)
    yield from warned([text for text in result.warnings if OUT_OF_MEMORY not in text])


def _stragglers(result: Result, most: int) -> Iterator[str]:
    shown = result.stragglers[:most]
    costs = [
        f"{format_duration(each.cost_s)} a step" if each.cost_s else "nothing" for each in shown
    ]
    rows = [f"{each.text}: costs {cost}" for each, cost in zip(shown, costs, strict=True)]
    if (more := len(result.stragglers) - most) > 0:
        rows[-1] += f"; and {more} more"
    yield from listed("held up by", rows)


def _verdict(verdict: Verdict, file: str, settings: Sequence[str]) -> Iterator[str]:
    more = "; what could explain it:" if verdict.explanations else ""
    yield from labelled("measured", f"{verdict.text}{more}")
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
    if result.overlap_fraction is not None:
        late = f", {format_duration(result.skew_s)} waiting for late peers" if result.skew_s else ""
        yield (
            f"  communication in flight {format_duration(result.comm_time_s)}, "
            f"{result.overlap_fraction:.1%} hidden under compute{late}"
        )


def _memory(result: Result) -> Iterator[str]:
    memory = result.memory_bytes_per_gpu
    without = "" if memory.activations is not None else ", activations unknown"
    needed, device = format_bytes(memory.total), format_bytes(memory.device)
    fits = "fits" if memory.fits else "does not fit"
    yield from labelled("memory", f"{fits}: {needed} of {device} a rank{without}")


def _trust(result: Result) -> Iterator[str]:
    """The inputs that move the step most, within the interval, and how each is known."""
    interval = result.prediction_interval_s
    moving = sorted(
        (source for source in (interval.sources if interval else ()) if source.high_s),
        key=lambda source: -source.width_s,
    )[:_TRUSTED]
    rows = [(source.input, details.effect(source), _known_by(source, result)) for source in moving]
    yield from columns("trust", rows, whole=False)


def _known_by(source: IntervalSource, result: Result) -> str:
    """The trust and source of the input that a part of the interval belongs to."""
    for names in _INPUTS.get(source.input, ()):
        if entry := next((each for each in result.provenance if each.input in names), None):
            what = entry.source.partition("; ")[0].removeprefix(f"{entry.trust} in ")
            return f"{entry.trust}: {what}"
    return source.basis


def _next(
    result: Result, file: str, settings: Sequence[str], room: int | None = None
) -> Iterator[str]:
    """What to try or measure next, each with a command to paste, as far as there is room."""
    label, left = "next", room
    for step in result.next_steps:
        lines = [*labelled(label, step.why), *command(file, settings, step.settings)]
        if left is not None:
            if len(lines) > left and not label:
                continue
            left -= len(lines)
        yield from lines
        label = ""
