"""The arithmetic around a step, in words: global batch, epoch, learning rate, a plan's samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpsim.report.lines import labelled
from ddpsim.result.model import Result
from ddpsim.result.training import Epoch, LearningRate, Pause, Training
from ddpsim.units import (
    format_bytes,
    format_duration,
    format_long_duration,
    format_number,
    format_percent,
)
from ddpsim.wording import counted

if TYPE_CHECKING:
    from ddpsim.result.capacity import CapacityPlan


def step_in_words(training: Training) -> str:
    """`1,024 samples a step, 130,000 tokens/s, MFU 8.9%`."""
    tokens, mfu = training.tokens_per_s, training.mfu
    parts = [
        f"{training.global_batch:,} samples a step",
        *([f"{format_number(tokens)} tokens/s"] if tokens else []),
        *([f"MFU {format_percent(mfu)}"] if mfu else []),
    ]
    return ", ".join(parts)


def training_lines(training: Training, result: Result) -> Iterator[str]:
    """What the step means for a training: an epoch or an amount, pauses, the learning rate."""
    if training.epoch:
        yield from labelled("epoch", _epoch(training.epoch, result.gpus))
    else:
        per_s = result.throughput_samples_per_s, training.tokens_per_s
        yield from labelled("amount", amount_in_words(*per_s, result.gpus))
    if training.pauses:
        yield from labelled("pauses", "; ".join(map(_pause, training.pauses)))
    if rate := training.learning_rate:
        yield from labelled("advice", learning_rate_in_words(rate, training.global_batch))


def _pause(pause: Pause) -> str:
    took = f"{format_duration(pause.time_s)} every {counted(pause.every, 'step')}"
    if pause.batches is not None:
        return f"evaluation of {pause.batches:,} batch{'es' * (pause.batches != 1)} a rank, {took}"
    return f"checkpoint of {format_bytes(pause.size_bytes or 0)}, {took}"


def rate_in_words(samples_per_s: float, tokens_per_s: float | None) -> str:
    """`24,100 tokens/s`, or samples."""
    if tokens_per_s:
        return f"{format_number(tokens_per_s)} tokens/s"
    return f"{format_number(samples_per_s)} samples/s"


def amount_in_words(samples_per_s: float, tokens_per_s: float | None, gpus: int) -> str:
    """A billion tokens or a million samples: how long, and on how many GPUs together."""
    what, a_second = "1 billion tokens", (tokens_per_s or 0.0) / 1e9
    if not a_second:
        what, a_second = "1 million samples", samples_per_s / 1e6
    return f"{what} in {_took(1 / a_second, gpus)}"


def _took(time_s: float, gpus: int) -> str:
    return f"{format_long_duration(time_s)}, {format_number(time_s * gpus / 3600)} GPU-hours"


def _epoch(epoch: Epoch, gpus: int) -> str:
    if not epoch.steps:
        return f"no step: {epoch.samples:,} samples fill no batch on every rank, and are dropped"
    others = ""
    if epoch.padded_samples:
        others = f", {epoch.padded_samples:,} of them taken twice to pad"
    if epoch.dropped_samples:
        others = f", {epoch.dropped_samples:,} of them dropped"
    took = _took(epoch.time_s, gpus)
    return f"{counted(epoch.steps, 'step')}, {took}: {epoch.samples:,} samples{others}"


def learning_rate_in_words(rate: LearningRate, global_batch: int) -> str:
    """What a rate becomes for a global batch, by both rules, and its warm-up."""
    linear, root = f"x {rate.times_linear:.3g}", f"x {rate.times_square_root:.3g}"
    if rate.linear is not None and rate.square_root is not None:
        linear, root = f"{rate.linear:.3g} ({linear})", f"{rate.square_root:.3g} ({root})"
    rules = (
        f"learning rate for {global_batch:,} samples in place of {rate.base_batch:,}: {linear} by "
        f"the linear rule (Goyal et al. 2017), {root} by the square root"
    )
    if rate.warmup_steps is None:
        return f"{rules}; with warm-up"
    return f"{rules}; warm-up over {counted(rate.warmup_steps, 'step')}"


def samples_lines(plan: CapacityPlan) -> Iterator[str]:
    """What larger batches need, and what the learning rate becomes."""
    answer, first, last = plan.answer, plan.sizes[0], plan.sizes[-1]
    if plan.critical_batch is not None:
        yield from labelled(
            "samples",
            f"a global batch B needs 1 + B / {plan.critical_batch:,} times the target's "
            f"(McCandlish et al. 2018): {first.samples_factor:.3g} to {last.samples_factor:.3g} "
            "times; knee, x2 and network count that",
        )
    if plan.steps_by_batch:
        (least, _), (most, _) = plan.steps_by_batch[0], plan.steps_by_batch[-1]
        yield from labelled(
            "samples",
            f"measured for {len(plan.steps_by_batch)} global batches of {least:,} to {most:,}, and "
            f"read between them: {first.samples_factor:.3g} to {last.samples_factor:.3g} times the "
            "smallest batch's; knee, x2 and network count that",
        )
    if plan.learning_rate:
        yield from labelled(
            "advice", learning_rate_in_words(plan.learning_rate, answer.global_batch)
        )


def steps_in_words(plan: CapacityPlan) -> str:
    """`450 steps = ceil(samples / global batch)`, and what that leaves out."""
    target, tokens = plan.target, ""
    if plan.seq_len is not None:
        tokens = f"{plan.samples_per_epoch:,} samples of {plan.seq_len:,} tokens; "
    epochs = f"{target.epochs:,} x " if target.epochs > 1 else ""
    steps = f"{plan.answer.steps:,} steps = {epochs}ceil(samples / global batch)"
    if plan.critical_batch is not None or plan.steps_by_batch:
        steps += f" x {plan.answer.samples_factor:.3g}"
    left_out = "no validation, checkpoints, start-up or failures"
    if plan.counts_pauses:
        left_out = "evaluations and checkpoints after as many samples; no start-up or failures"
    if plan.answer.long_run:
        pauses = "evaluations and checkpoints" if plan.counts_pauses else "no checkpoints"
        left_out = f"{pauses}; start-up and failures"
    return f"{tokens}{steps}, as the sampler pads the last one; {left_out}"
