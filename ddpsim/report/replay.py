"""Traced steps compared with the simulated ones, as text on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.report.lines import as_text, labelled, listed, warned
from ddpsim.result.replay import Replay, ReplayedKernel
from ddpsim.units import format_bytes, format_duration
from ddpsim.wording import counted

_TERMS = ("data_wait", "forward", "backward_compute", "exposed_comm", "optimizer", "other")
_LEAST = 0.002  # of a step, in a term that is worth a row
_MOST_ROWS = 8


@as_text
def render_replay(replay: Replay) -> list[str]:
    """The steps, where their time goes, collectives, and what else the traces show."""
    ranks = counted(replay.ranks, "rank")
    if replay.ranks != replay.world_size:
        ranks = f"{replay.ranks} of {replay.world_size} ranks"
    return [
        f"{replay.source}   {ranks}, {counted(len(replay.steps), 'step')}",
        "",
        *_terms(replay),
        "",
        *_collectives(replay),
        *_findings(replay),
        *warned(replay.warnings),
    ]


def _terms(replay: Replay) -> Iterator[str]:
    yield f"{'':<20}{'traced':>12}{'simulated':>12}{'error':>10}"
    yield _row("step", replay.traced_s, replay.simulated_s)
    for term in _TERMS:
        traced_s, simulated_s = getattr(replay.traced, term), getattr(replay.simulated, term)
        if max(abs(traced_s), simulated_s) > _LEAST * replay.traced_s:
            yield _row(f"  {term.replace('_', ' ')}", traced_s, simulated_s)
    yield from labelled("", "")
    lengths = [step.traced_s for step in replay.steps]
    spread = f"{format_duration(min(lengths))} to {format_duration(max(lengths))}"
    count = counted(len(lengths), "step")
    yield from labelled("error", f"{replay.error:.1%}, the median of {count} of {spread}")


def _row(name: str, traced_s: float, simulated_s: float) -> str:
    error = f"{simulated_s / traced_s - 1:+.1%}" if traced_s > 0 else ""
    times = f"{format_duration(traced_s):>12}{format_duration(simulated_s):>12}"
    return f"{name:<20}{times}{error:>10}"


def _collectives(replay: Replay) -> Iterator[str]:
    if not replay.collectives:
        return
    titles = f"{'size':>10}{'a step':>8}{'transfer':>12}{'simulated':>12}{'wait for ranks':>16}"
    yield f"{'collective':<16}{titles}"
    shown = sorted(replay.collectives, key=lambda each: -each.count * each.transfer_s)
    for each in shown[:_MOST_ROWS]:
        simulated = "" if each.simulated_s is None else format_duration(each.simulated_s)
        yield (
            f"{each.operation:<16}{format_bytes(each.size_bytes):>10}{each.count:>8}"
            f"{format_duration(each.transfer_s):>12}{simulated:>12}"
            f"{format_duration(each.wait_s):>16}"
        )
    yield ""


def _findings(replay: Replay) -> Iterator[str]:
    if replay.straggler:
        rank, times = replay.straggler
        yield from labelled(
            "straggler", f"rank {rank} computes {times:.2f} x as long as the others"
        )
    if replay.interference:
        text = f"the same work takes {replay.interference:.2f} x as long during a collective"
        yield from labelled("slowed", text)
    yield from listed("nccl", map(_kernel, replay.kernels[-_MOST_ROWS:]))
    error = replay.predicted_s / replay.traced_s - 1
    predicted = f"{format_duration(replay.predicted_s)} ({error:+.1%})"
    alone = "what run says of the job's scenario (-o writes it), on which what-ifs rest"
    yield from labelled("predicted", f"{predicted}: {alone}")
    yield from listed("assumed", replay.assumed)


def _kernel(kernel: ReplayedKernel) -> str:
    ran = " or ".join(kernel.algorithms)
    channels = f", {kernel.channels} channels" if kernel.channels else ""
    model = f"{kernel.model_algorithm} {kernel.model_protocol}, {kernel.model_channels} channels"
    verdict = "as the model" if kernel.agrees else "unlike the model"
    return (
        f"{format_bytes(kernel.size_bytes)}: {ran} {kernel.protocol or ''}".rstrip()
        + f"{channels}; {verdict}: {model}"
    )
