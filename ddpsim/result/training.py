"""Arithmetic around a step: the global batch, epochs, pauses, the learning rate, tokens, MFU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Literal


@dataclass(frozen=True, slots=True)
class Pause:
    """What all ranks do, or wait for, after every so many steps, `time_s` each time.

    `batches`: those of a rank in an evaluation. `size_bytes`: what a rank writes as a checkpoint,
    which is safe `write_s` after the pause; `read_s`: what it takes to load it.
    """

    what: Literal["evaluation", "checkpoint"]
    every: int
    time_s: float
    batches: int | None = None
    size_bytes: int | None = None
    write_s: float = 0.0
    read_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over a data set, as torch's DistributedSampler and DataLoader deal it out.

    `padded_samples`: taken twice, so that all ranks have as many. `dropped_samples`: left out under
    drop_last. The last step may have fewer micro-batches, or a smaller one; `time_s` counts it
    whole, and each step's share of the pauses.
    """

    samples: int
    steps: int
    padded_samples: int
    dropped_samples: int
    time_s: float


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Advice: what a rate for `base_batch` samples becomes for the global batch, and its warm-up.

    Linear: Goyal et al. 2017 (arXiv:1706.02677), for SGD. Square root: Krizhevsky 2014
    (arXiv:1404.5997), often taken for Adam. `warmup_steps`: None where no epoch is known.
    """

    base_batch: int
    times_linear: float
    times_square_root: float
    linear: float | None
    square_root: float | None
    warmup_steps: int | None


@dataclass(frozen=True, slots=True)
class Training:
    """The step as a part of training.

    `global_batch`: samples of one step, `micro_batch` x `accumulation_steps` x ranks. `mfu`: FLOPs
    of the model's matrix products, forward and backward, without what checkpoints run again, over
    what all devices could do at their peak; None where they are not known.
    """

    global_batch: int
    micro_batch: int
    accumulation_steps: int
    tokens_per_s: float | None = None
    mfu: float | None = None
    epoch: Epoch | None = None
    learning_rate: LearningRate | None = None
    pauses: tuple[Pause, ...] = ()


def paused_s(pauses: Iterable[Pause]) -> float:
    """A step's share of pauses."""
    return sum(pause.time_s / pause.every for pause in pauses)


def epoch_of(
    samples: int,
    ranks: int,
    micro_batch: int,
    accumulation_steps: int,
    *,
    drop_last: bool = False,
    step_s: float = 0.0,
) -> Epoch:
    """Steps of an epoch; `drop_last` is that of the sampler and of the loader.

    Source: torch/utils/data/distributed.py (num_samples, total_size) and dataloader.py (__len__).
    """
    a_rank = samples // ranks if drop_last else ceil(samples / ranks)
    batches = a_rank // micro_batch if drop_last else ceil(a_rank / micro_batch)
    steps = ceil(batches / accumulation_steps)
    used = ranks * batches * micro_batch if drop_last else ranks * a_rank
    padded, dropped = max(0, used - samples), max(0, samples - used)
    return Epoch(samples, steps, padded, dropped, steps * step_s)


def learning_rate_of(
    base_batch: int, global_batch: int, rate: float | None, warmup_steps: int | None
) -> LearningRate:
    """The advice for a global batch where a rate was found with `base_batch` samples."""
    linear = global_batch / base_batch
    root = sqrt(linear)
    return LearningRate(
        base_batch,
        times_linear=linear,
        times_square_root=root,
        linear=None if rate is None else rate * linear,
        square_root=None if rate is None else rate * root,
        warmup_steps=warmup_steps,
    )
