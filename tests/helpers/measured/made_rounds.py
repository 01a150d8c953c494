"""Rounds of real DDP that are made up, so that every figure is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calibrate.records.record import Environment, Layout
from calibrate.records.rounds import (
    AllReduceSamples,
    Alone,
    Beside,
    Logged,
    Parameter,
    Rounds,
    Runs,
    VariantSamples,
    save_rounds,
)
from calibrate.records.variant import Variant

ROUNDS = 9
MIB = 2**20
FORWARD, BACKWARD, OPTIMIZER = 0.1, 0.2, 0.01
NOISE = (-2, 1, 0, -1, 2, 0, 1, -1, 0)  # in thousandths


def series(seconds: float, *, second_rank: float = 1.0) -> tuple[tuple[float, float], ...]:
    """Rounds of both ranks about a median."""
    times = [seconds * (1 + n / 1000) for n in NOISE]
    return tuple((time, time * second_rank) for time in times)


@dataclass(frozen=True)
class Measured:
    """One variant as measured, seconds."""

    variant: Variant
    backward: float  # without its waiting
    exposed: float
    bucket_bytes: tuple[int, ...]


def made_up(cases: Sequence[Measured], second_rank: float = 1.0) -> Rounds:
    """Two parameters of 4 MiB, ready at half and at the end of backward; 100 MB/s."""
    return Rounds(
        environment=Environment(
            created="2026-01-01T00:00:00+00:00",
            machine="m",
            device="cpu",
            torch="2.13.0",
            backend="gloo",
            library="2.13.0",
            variables={},
            details={},
        ),
        layout=Layout(nodes=2, gpus_per_node=1, line_rate_bytes_per_s=125e6),
        model="made:up",
        batch_per_rank=4,
        parameters=(
            Parameter(name="first", numel=MIB, dtype="float32", ready_s=(BACKWARD, BACKWARD)),
            Parameter(name="last", numel=MIB, dtype="float32", ready_s=(BACKWARD / 2,) * 2),
        ),
        buffers=(),
        alone=Alone(
            whole_s=series(FORWARD + BACKWARD + OPTIMIZER, second_rank=second_rank),
            forward_s=series(FORWARD),
            backward_s=series(BACKWARD),
            optimizer_s=series(OPTIMIZER),
            hooked_backward_s=series(BACKWARD),
            hook_s=(0.0, 0.0),
        ),
        variants=tuple(variant_samples(case) for case in cases),
        all_reduce=tuple(
            AllReduceSamples(size_bytes=size, samples_s=series(size / 100e6))
            for size in (64 * 1024, MIB, 4 * MIB, 8 * MIB)
        ),
        elapsed_s=1.0,
    )


def variant_samples(case: Measured) -> VariantSamples:
    whole = FORWARD + case.backward + case.exposed + OPTIMIZER
    return VariantSamples(
        whole_s=series(whole),
        forward_s=series(FORWARD),
        backward_s=series(case.backward + case.exposed),
        optimizer_s=series(OPTIMIZER),
        variant=case.variant,
        bucket_bytes=case.bucket_bytes,
        warmup_s=series(whole),
        logged=Logged(
            forward_s=series(FORWARD),
            backward_compute_s=series(case.backward),
            comm_s=series(case.exposed + 0.05),
            overlap_s=series(0.05),
        ),
    )


BIG, SMALL = 8 * MIB / 100e6, 4 * MIB / 100e6  # all-reduces of both tensors, and of one
TWO = Measured(Variant(bucket_cap_mb=1), BACKWARD + 0.003, SMALL, (4 * MIB, 4 * MIB))
ONE = Measured(Variant(bucket_cap_mb=100), BACKWARD + 0.003, BIG, (8 * MIB,))


def write_rounds(folder: Path, *cases: Measured, name: str = "rounds.json") -> Path:
    save_rounds(made_up(cases), folder / name)
    return folder / name


def paced(case: Measured, paces: Sequence[float], micro_batches: int = 1) -> VariantSamples:
    """Iterations on a machine that is slower now and then; the network is not."""
    variant = variant_samples(case)
    return variant.model_copy(
        update={
            "variant": case.variant.model_copy(update={"accumulation_steps": micro_batches}),
            "forward_s": tuple((FORWARD * pace * micro_batches, 0.05) for pace in paces),
            "whole_s": tuple((0.1, 0.6 * pace**0.5) for pace in paces),
        }
    )


def run_of(*seconds: float, pace: float = 1.0) -> Rounds:
    """A run in which each variant, of buckets of its own, takes so long without noise."""
    rounds = made_up([TWO, ONE])
    variants = tuple(
        variant.model_copy(
            update={
                "whole_s": ((whole, whole),) * ROUNDS,
                "forward_s": ((pace * FORWARD, pace * FORWARD),) * ROUNDS,
            }
        )
        for variant, whole in zip(rounds.variants, seconds, strict=True)
    )
    return rounds.model_copy(update={"variants": variants})


def runs_together(*runs: Rounds) -> Rounds:
    """As one."""
    return Runs({Path(f"{i}"): run for i, run in enumerate(runs)}).pooled


def beside_all_reduces(layers: float, model: float) -> Beside:
    """Layers of 1 ms and a backward of 100, and so many times as long beside all-reduces."""
    return Beside(
        layers_s=series(1e-3),
        layers_beside_s=series(layers * 1e-3),
        backward_s=series(0.1),
        backward_beside_s=series(model * 0.1),
    )
