"""Published throughput of GPT-style models under FSDP, and the operators of their steps.

tests/data/published-language-steps.csv: widths and depths from 125 M to 70 B parameters. Their
steps are made here, as no library has the models as they were run: a pre-norm transformer in half,
without biases, with fused attention and a head that is the embedding.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ddpsim.scenario.device import Device
from ddpsim.scenario.workload import Workload
from ddpsim.workload.arithmetic import Arithmetic, arithmetic_of
from ddpsim.workload.operators import Kind, Operator
from ddpsim.workload.zoo.gpu_time import GpuTime
from held_out.rows import OnDevice, Row, preset

__all__ = [
    "MODELS",
    "LanguageRow",
    "LanguageStep",
    "language_models",
    "language_rows",
    "language_steps",
]

_DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
FILE, MODELS = _DATA / "published-language-steps.csv", _DATA / "mpt-models.json.gz"
_WORDS = 50368  # GPT-NeoX's, padded
_HALF, _FULL = 2, 4  # bytes
_ADAM_BYTES = 80  # of a parameter in a step of AdamW, tensor by tensor


class LanguageStep(NamedTuple):
    """A row: the model, the job and its tokens a second on each GPU."""

    width: int
    layers: int
    heads: int
    seq_len: int
    gpus: int
    device: str
    micro_batch: int
    accumulation: int
    checkpointing: bool
    tokens_per_s: float

    @property
    def parameters(self) -> int:
        """Of blocks and embedding."""
        return self.layers * 12 * self.width**2 + _WORDS * self.width


@dataclass(frozen=True)
class LanguageRow(Row):
    """A micro-batch with its part of the optimizer's step; communication is taken as hidden."""

    step: LanguageStep

    @property
    def usual(self) -> Device:  # noqa: D102 -- as of any row
        return preset(self.device)

    @property
    def arithmetic(self) -> Arithmetic:  # noqa: D102
        return arithmetic_of("bf16", self.usual)

    @property
    def job(self) -> tuple[dict[str, Any], Workload]:
        """Its model is in no table."""
        raise NotImplementedError

    @property
    def operators(self) -> tuple[tuple[Operator, int], ...]:
        """Of a micro-batch, with their numbers."""
        return _operators_of(self.step)

    def device_s(self, device: Device) -> float:  # noqa: D102
        step, pricing = self.step, GpuTime(device, "bf16", "bf16", channels_last=True, casts=False)
        of_operators_s = sum(number * pricing.seconds(one) for one, number in self.operators)
        moved = _ADAM_BYTES * step.parameters / step.gpus / step.accumulation
        return of_operators_s + moved / device.optimizer_bytes_per_s

    def on(self, device: Device) -> OnDevice:  # noqa: D102
        device_s = self.device_s(device)
        return OnDevice(lambda compute=1.0: compute * device_s, {"compute": self.uncertainty}, 0.0)


@cache
def language_rows() -> tuple[LanguageRow, ...]:
    """All rows."""
    return tuple(map(_row, language_steps()))


def language_steps() -> list[LanguageStep]:
    """What was published."""
    lines = [line for line in FILE.read_text("utf-8").splitlines() if not line.startswith("#")]
    return list(map(_step, csv.DictReader(lines)))


@cache
def language_models() -> dict[int, dict[str, Any]]:
    """The models by width, as `held_out.mpt` captured them."""
    tables = json.loads(gzip.decompress(MODELS.read_bytes()))
    return {int(width): table for width, table in tables.items()}


def _step(values: dict[str, str]) -> LanguageStep:
    return LanguageStep(
        *(int(values[key]) for key in ("width", "layers", "heads", "seq_len", "gpus")),
        values["device"],
        int(values["micro_batch"]),
        int(values["accumulation"]),
        values["checkpointing"] == "yes",
        float(values["tokens_per_s"]),
    )


def _row(step: LanguageStep) -> LanguageRow:
    seconds = step.micro_batch * step.seq_len / step.tokens_per_s
    name = f"mpt {step.parameters / 1e9:.1f}B {step.seq_len}"
    told = ("llm-foundry", name, step.device, "bf16", step.micro_batch, "language model", "")
    return LanguageRow(*told, seconds, step)


def _operators_of(step: LanguageStep) -> tuple[tuple[Operator, int], ...]:
    """Operators of a micro-batch with their numbers; blocks are run again if checkpointed."""
    forwards = step.layers * (2 if step.checkpointing else 1)
    tokens = step.micro_batch * step.seq_len
    return (
        *((one, forwards) for one in _block_forward(step)),
        *((one, step.layers) for one in _block_backward(step)),
        *((one, 1) for one in _head(tokens, step.width)),
    )


def _product(m: int, n: int, k: int) -> Operator:
    read, written = _HALF * (m * k + k * n), _HALF * m * n
    return Operator("product", 1, m, n, k, 1, 1, 2 * m * n * k, read, written, _HALF)


def _moving(kind: Kind, read: int, written: int) -> Operator:
    return Operator(kind, bytes_read=read, bytes_written=written, item_bytes=_HALF)


def _layers(width: int) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of a block's products."""
    return (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)


def _block_forward(step: LanguageStep) -> Iterator[Operator]:
    tokens, width = step.micro_batch * step.seq_len, step.width
    moved = _HALF * tokens * width
    for given, made in _layers(width):
        yield _product(tokens, made, given)
    yield _attention(step, backward=False)
    for _ in range(2):
        yield _moving("normalization", moved, moved)
        yield _moving("pointwise", 2 * moved, moved)  # the residual
    yield _moving("pointwise", 4 * moved, 4 * moved)  # GELU


def _block_backward(step: LanguageStep) -> Iterator[Operator]:
    tokens, width = step.micro_batch * step.seq_len, step.width
    moved = _HALF * tokens * width
    for given, made in _layers(width):
        yield _product(tokens, given, made)
        yield _product(made, given, tokens)
    yield _attention(step, backward=True)
    for _ in range(2):
        yield _moving("normalization_backward", 2 * moved, moved)
        yield _moving("pointwise", 2 * moved, moved)
    yield _moving("pointwise", 8 * moved, 4 * moved)


def _attention(step: LanguageStep, *, backward: bool) -> Operator:
    """FLOPs as torch counts them, which a causal mask does not halve."""
    count, width = step.micro_batch * step.heads, step.width // step.heads
    moved = _HALF * step.micro_batch * step.seq_len * step.width
    flops = (10 if backward else 4) * count * step.seq_len**2 * width
    shape = (count, step.seq_len, step.seq_len, width)
    kind: Kind = "attention_backward" if backward else "attention"
    moves = (5 * moved, 3 * moved) if backward else (3 * moved, moved)
    return Operator(kind, *shape, 1, 1, flops, *moves, _HALF)


def _head(tokens: int, width: int) -> Iterator[Operator]:
    """The words' scores and their loss in float32, and back."""
    yield _product(tokens, _WORDS, width)
    yield _product(tokens, width, _WORDS)
    yield _product(_WORDS, width, tokens)
    half, full = _HALF * tokens * _WORDS, _FULL * tokens * _WORDS
    yield _moving("copy", half, full)
    yield _moving("softmax", full, full)
    yield _moving("softmax", 2 * full, full)
    yield _moving("copy", full, half)
