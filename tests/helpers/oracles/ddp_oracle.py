"""What real DDP logs of its buckets: run as rank 0 and 1 of a gloo job, writes JSON.

python tests/helpers/oracles/ddp_oracle.py 2 STORE_FILE OUTPUT
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import run_as_rank


class Tied(nn.Module):
    """Embedding and output projection share their weight, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Mixed(nn.Module):
    """Parameters of two dtypes, interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(96, 96, dtype=torch.float64 if i % 2 else torch.float32) for i in range(7)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).relu()
        return x


class Sparse(nn.Module):
    """A sparse embedding before dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 32, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.embed(tokens))


class Unused(nn.Module):
    """A branch that never takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 256), nn.Linear(256, 32))
        self.idle = nn.Linear(64, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def dense() -> nn.Module:
    """Linear layers with batch norm."""
    return nn.Sequential(
        nn.Linear(256, 512),
        nn.BatchNorm1d(512),
        nn.Linear(512, 700),
        nn.ReLU(),
        nn.Linear(700, 300),
    )


def convolutional() -> nn.Module:
    """Convolutions with batch norm, and a classifier."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 500))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "dense": (dense, lambda: torch.randn(4, 256)),
    "convolutional": (convolutional, lambda: torch.randn(2, 3, 16, 16)),
    "tied": (Tied, lambda: torch.randint(0, 300, (2, 5))),
    "mixed": (Mixed, lambda: torch.randn(4, 96)),
    "sparse": (Sparse, lambda: torch.randint(0, 200, (4,))),
    "unused": (Unused, lambda: torch.randn(4, 64)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "cap": {"bucket_cap_mb": 0.1},
    "cap-1": {"bucket_cap_mb": 1},
    "list": {"bucket_cap_mb_list": [0.05, 0.5, 0.2]},
    "view": {"bucket_cap_mb": 0.3, "gradient_as_bucket_view": True},
    "static": {"bucket_cap_mb": 0.2, "static_graph": True},
    "find-unused": {"bucket_cap_mb": 0.2, "find_unused_parameters": True},
}


def cases() -> list[tuple[str, str]]:
    """Model and options that torch can run together."""
    pairs = [(model, options) for model in MODELS for options in OPTIONS]
    return [
        (model, options)
        for model, options in pairs
        if (model != "unused" or options == "find-unused")
        and not (model == "sparse" and options in {"view", "static"})
    ]


def observe(model_name: str, options: str) -> dict[str, Any]:
    """Train four steps and return what DDP logged after each."""
    build, make_input = MODELS[model_name]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(build(), **OPTIONS[options])
    steps = []
    for _ in range(4):
        ddp.zero_grad()
        ddp(make_input()).sum().backward()
        logged = ddp._get_ddp_logging_data()
        steps.append(
            {key: str(value) for key, value in logged.items() if "bucket" in key or "order" in key}
        )
    parameters = [
        {
            "name": name,
            "numel": parameter.numel(),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "sparse": model_name == "sparse" and name == "embed.weight",
        }
        for name, parameter in ddp.module.named_parameters()
    ]
    return {"model": model_name, "options": options, "parameters": parameters, "steps": steps}


if __name__ == "__main__":
    run_as_rank(observe, cases())
