"""A step recorded on shapes is the step that torch runs on numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="a capture runs torch")

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from calibrate.capture.record import Recording, record, trained_parameters
from calibrate.capture.shapes import Shapes, building, without_memory
from ddpsim.workload.operators import MULTIPLYING, Operator

BATCH = 2


class Tied(nn.Module):
    """An embedding that is also the head, and frozen positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.positions = nn.Parameter(torch.zeros(6, 16), requires_grad=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class UNet(nn.Module):
    """Down, up by a transposed convolution, and across; grouped and depthwise in between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(7, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.depthwise(self.grouped(self.down(x)))))
        return self.out(torch.cat([self.up(y), x], 1))


class Recurrent(nn.Module):
    """A GRU, a module that is called twice, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.twice = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.gru(self.twice(x))
        return y, self.twice(y)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.LazyLinear(5),
    )  # fmt: skip


def tokens() -> Tensor:
    return torch.randint(0, 50, (BATCH, 6))


def images() -> Tensor:
    return torch.randn(BATCH, 3, 8, 8)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "tied": (Tied, tokens),
    "unet": (UNet, images),
    "recurrent": (Recurrent, lambda: torch.randn(BATCH, 5, 8)),
    "convolutional": (convolutional, images),
}


def total(said: Any) -> Tensor:
    """A loss of one output or two."""
    parts = said if isinstance(said, tuple) else (said,)
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def recorded(name: str, precision: Any = "fp32") -> tuple[nn.Module, Recording]:
    build, inputs = MODELS[name]
    with building():
        model, given = build(), inputs()
    given = without_memory(given)
    if name == "convolutional":
        with Shapes():
            model(given)  # makes what is lazy
    return model, record(model, lambda: total(model(given)), precision)


def operators(step: Recording) -> list[Operator]:
    return [one for row in (*step.forward, *step.backward) for one in row]


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def step(name: str) -> Recording:
    return recorded(name)[1]


class Real:
    """One step with numbers: FLOPs, bytes that autograd keeps, the order of ready gradients."""

    def __init__(self, name: str) -> None:
        build, inputs = MODELS[name]
        torch.manual_seed(0)
        model, given = build(), inputs()
        if name == "convolutional":
            model(given)
        self.ready: list[int] = []
        for place, tensor in enumerate(trained_parameters(model).values()):
            tensor.register_post_accumulate_grad_hook(
                lambda _, place=place: self.ready.append(place)
            )
        owned = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        kept: dict[int, Any] = {}

        def save(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in owned:
                kept[storage._cdata] = storage
            return tensor

        counter = FlopCounterMode(display=False)
        with counter:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                loss = total(model(given))
            loss.backward()
        self.flops = counter.get_total_flops()
        self.kept_bytes = sum(storage.nbytes() for storage in kept.values())


@pytest.fixture(scope="module")
def real(name: str) -> Real:
    return Real(name)


def test_flops_are_those_of_flop_counter(name: str, step: Recording, real: Real) -> None:
    """But of groups, whose weights' gradients it counts for all pairs of channels.

    And but of attention, as it does not know a CPU's fused kernel.
    """
    flops = sum(one.flops for one in operators(step) if "attention" not in one.kind)
    surplus = sum(
        (one.count - 1) * one.flops
        for one in operators(step)
        if one.kind == "convolution_weight_gradient"
    )
    assert flops + surplus == real.flops


def test_gradients_are_ready_in_the_real_order(step: Recording, real: Real) -> None:
    assert step.ready == real.ready
    assert len(step.backward) == len(real.ready) + 1


def test_autograd_keeps_as_many_bytes(name: str, step: Recording, real: Real) -> None:
    """Attention apart: a CPU's fused kernel keeps 64-bit sums where CUDA's keeps a random state."""
    allowed = 0.02 if name == "tied" else 0
    assert step.saved_bytes == pytest.approx([real.kept_bytes], rel=allowed)


def test_flops_of_a_product_are_two_for_each_multiply_add(step: Recording) -> None:
    """Strided and transposed convolutions apart, whose implicit product holds holes."""
    for one in operators(step):
        if one.kind in MULTIPLYING and one.stride == 1:
            passes = {"attention": 2, "attention_backward": 5}.get(one.kind, 1)
            assert one.flops == passes * 2 * one.count * one.m * one.n * one.k
