"""Functions that tests name as MODULE:FUNCTION; those of ranks that go wrong on purpose."""

from __future__ import annotations

import os
import signal
import threading
from collections import namedtuple
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if os.environ.get("FAKE_TORCH_ON_RANK") == os.environ.get("RANK", "0"):
    torch.__version__ = "2.12.0"  # type: ignore[assignment]


def batches() -> Iterable[torch.Tensor]:
    return [torch.zeros(4) for _ in range(3)]


def no_batches() -> Iterable[torch.Tensor]:
    return []


def dies_on_rank_1() -> Iterable[torch.Tensor]:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return [torch.zeros(1)]


def fails_on_rank_1() -> Iterable[torch.Tensor]:
    if os.environ["RANK"] == "1":
        raise ValueError("bad sector")
    return [torch.zeros(1)]


class Branched(nn.Module):
    """One branch never takes part; an embedding has sparse gradients; batch norm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32, sparse=True)
        self.norm = nn.BatchNorm1d(32)
        self.used = nn.Linear(32, 8)
        self.idle = nn.Linear(32, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.frozen(self.used(self.norm(self.embed(tokens)))) * scale


def branched(batch: int) -> Any:
    inputs = {"tokens": torch.randint(0, 50, (batch,)), "scale": 2.0}
    return Branched(), inputs, lambda output: output.square().mean()


class HalfUsed(nn.Module):
    """One of its layers is not called, and DDP ignores another and a buffer; it takes no copy.

    A parameter and a buffer have no element. One layer's weight is none of its parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.used = nn.Linear(64, 64), nn.Linear(64, 10)
        self.idle_and_ignored = nn.Linear(64, 64)
        nn.utils.weight_norm(self.used)
        self.lock, self.last = threading.Lock(), torch.empty(0)
        self.none = nn.Parameter(torch.empty(0))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("ignored", torch.zeros(9))
        ignored = [name for name in self.state_dict() if "ignored" in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ignored)

    def forward(self, inputs: torch.Tensor) -> Any:
        self.last = self.used(inputs) + self.none.sum()
        return self.last


def half_used(batch: int = 8) -> Any:
    return HalfUsed(), torch.randn(batch, 64), lambda output: output.sum()


class OfBuffers(nn.Module):
    """Buffers of rare types, and a buffer and a parameter of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.none = nn.Linear(8, 8), nn.Parameter(torch.empty(0))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("rotation", torch.zeros(4, 2, dtype=torch.complex64))
        self.register_buffer("scales", torch.zeros(3, dtype=torch.float8_e4m3fn))
        self.register_buffer("ids", torch.zeros(5, dtype=torch.uint16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + self.none.sum()


def of_buffers(batch: int = 4) -> Any:
    return OfBuffers(), torch.randn(batch, 8), lambda output: output.sum()


class ByTurns(nn.Module):
    """Every second forward takes the other layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.forwards = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.layers[self.forwards % 2](inputs)


def by_turns(batch: int = 4) -> Any:
    return ByTurns(), torch.randn(batch, 8), lambda output: output.sum()


class Dropping(ByTurns):
    """Of the hooked forwards, the second one skips the second layer."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        hidden = self.layers[0](inputs)
        return hidden if self.forwards == 8 else self.layers[1](hidden)


def dropping(batch: int = 4) -> Any:
    return Dropping(), torch.randn(batch, 8), lambda output: output.sum()


def complex_weights(batch: int = 4) -> Any:
    model = nn.Linear(8, 8, dtype=torch.complex64)
    inputs = torch.randn(batch, 8, dtype=torch.complex64)
    return model, inputs, lambda output: output.abs().sum()


def of_sparse_gradients(batch: int = 4) -> Any:
    model = nn.Embedding(50, 8, sparse=True)
    return model, torch.randint(0, 50, (batch,)), lambda output: output.sum()


def two_layers(batch: int = 16) -> Any:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.randn(batch, 64), lambda output: output.sum()


def of_equal_layers(batch: int = 64) -> Any:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    return model, torch.randn(batch, 512), lambda output: output.sum()


def compiled(batch: int = 64) -> Any:
    model, inputs, loss = of_equal_layers(batch)
    return torch.compile(model, backend="aot_eager"), inputs, loss


def compiled_in_place(batch: int = 64) -> Any:
    model, inputs, loss = of_equal_layers(batch)
    model.compile(backend="aot_eager")
    return model, inputs, loss


class Uncopyable(nn.Module):
    """It has a lock and keeps its last output; the loss needs its head, which forward does not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 1)
        self.lock, self.last = threading.Lock(), torch.empty(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.last = self.body(inputs)
        return self.last


def uncopyable(batch: int = 4) -> Any:
    model = Uncopyable()
    return model, torch.randn(batch, 8), lambda output: model.head(output).sum()


def lazy(batch: int = 4) -> Any:
    return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1)), torch.randn(batch, 8), torch.sum


SHARED = nn.Linear(8, 8)


def of_one_model(batch: int = 4) -> Any:
    return SHARED, torch.randn(batch, 8), torch.sum


def growing(batch: int = 4) -> Any:
    growing.width += 1
    return nn.Linear(8, growing.width), torch.randn(batch, 8), torch.sum


growing.width = 8


def stepping_in_backward(batch: int = 16) -> Any:
    """No gradient is left after the backward."""
    made = two_layers(batch)

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=1e-4)
        parameter.grad = None

    for parameter in made[0].parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return made


def in_ddp(batch: int = 4) -> Any:
    from calibrate.measure.ranks.job import process_group

    with process_group("gloo"):
        model = DistributedDataParallel(nn.Linear(8, 8))
    return model, torch.randn(batch, 8), torch.sum


def synchronised(batch: int = 4) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model, torch.randn(batch, 8), lambda output: output.square().sum()


Pair = namedtuple("Pair", "first second")  # noqa: PYI024 -- as a user writes it


class OfPairs(nn.Linear):
    def forward(self, pair: Pair) -> torch.Tensor:
        return super().forward(pair.first)


def of_pairs(batch: int = 4) -> Any:
    return OfPairs(8, 8), (Pair(torch.randn(batch, 8), torch.zeros(batch)),), torch.sum


def large_and_small(batch: int = 4) -> Any:
    """Weights of 8 MB and of 4 kB."""
    model = nn.Sequential(nn.Linear(2048, 1024, bias=False), nn.Linear(1024, 1, bias=False))
    return model, torch.randn(batch, 2048), lambda output: output.sum()


def constant_loss(batch: int = 4) -> Any:
    model = nn.Linear(2, 2)
    return model, torch.randn(batch, 2), lambda _: torch.zeros(1, requires_grad=True).sum()


def without_batch() -> Any:
    return two_layers()


def not_a_model(batch: int = 4) -> Any:
    return "model", torch.zeros(batch), print


def half_a_model(batch: int = 4) -> Any:
    return nn.Linear(2, 2), torch.zeros(batch)


class Flaky(nn.Linear):
    """Fails in its tenth forward, of whichever copy."""

    forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        Flaky.forwards += 1
        if Flaky.forwards == 10:
            raise RuntimeError("flaky")
        return super().forward(inputs)


def fails_later(batch: int = 4) -> Any:
    return Flaky(2, 2), torch.randn(batch, 2), lambda output: output.sum()


def evaluating(batch: int = 4) -> Any:
    return nn.Linear(2, 2).eval(), torch.randn(batch, 2), lambda output: output.sum()


def without_a_number(batch: int = 4) -> Any:
    return nn.Linear(2, 2), torch.randn(batch, 2), lambda output: output.sum() / 0 * 0


class Mortal(nn.Linear):
    """Kills rank 1 after so many forwards, of all copies together."""

    forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        Mortal.forwards += 1
        if os.environ["RANK"] == "1" and Mortal.forwards > int(os.environ["FORWARDS_TO_LIVE"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs)


def dies_later(batch: int = 4) -> Any:
    return Mortal(2, 2), torch.randn(batch, 2), lambda output: output.sum()
