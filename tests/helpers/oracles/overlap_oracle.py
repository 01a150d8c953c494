"""Collectives of ZeroRedundancyOptimizer within DDP's hooks, over random models: four ranks.

python tests/helpers/oracles/overlap_oracle.py 4 STORE_FILE OUTPUT
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from hooked_loops import Zero1Interleaved, Zero1Overlapped
from logged_calls import Calls, logged
from strategy_oracle import ready_order
from torch import nn
from two_ranks import run_as_rank

STEPS = 5
CASES = 14


def observe(seed: int) -> dict[str, Any]:
    """Train a few steps of a random model; what was called in each, or that torch stops."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    widths = [drawn.randint(1, 300) for _ in range(drawn.randint(2, 7))]
    layers = (nn.Linear(*ends, bias=drawn.random() < 0.7) for ends in pairwise(widths))
    module = nn.Sequential(*layers)
    options = {
        "hook": drawn.choice(["hook_with_zero_step", "hook_with_zero_step_interleaved"]),
        "shard_buckets": drawn.random() < 0.6,
        "static_graph": drawn.random() < 0.3,
        "cap_mb": drawn.choice([0.01, 0.05, 0.2, 25]),
    }

    def make_input() -> torch.Tensor:
        return torch.ones(2, widths[0])

    parameters = [(name, p.numel(), "float32") for name, p in module.named_parameters()]
    return {
        "options": options,
        "parameters": parameters,
        "ready_order": ready_order(module, make_input),
        **_trained(module, make_input, options),
    }


def _trained(
    module: nn.Module, make_input: Callable[[], torch.Tensor], options: dict[str, Any]
) -> dict[str, Any]:
    """Also after which steps parameters have changed, and the optimizer's elements by rank."""
    module.zero_grad()
    is_interleaved = options["hook"].endswith("interleaved")
    base = Zero1Interleaved if is_interleaved else Zero1Overlapped
    names = ("shard_buckets", "static_graph", "cap_mb")
    loop = type("Asked", (base,), {name: options[name] for name in names})(module, make_input)
    steps: list[Calls] = []
    updated: list[bool] = []
    for _ in range(STEPS):
        before = [parameter.detach().clone() for parameter in module.parameters()]
        steps.append([])
        try:
            with logged(steps[-1]):
                loop.step(steps[-1], 1)
        except AssertionError as error:
            return {"stops": str(error)}
        updated.append(not all(map(torch.equal, before, module.parameters())))
    of_ranks = loop.optimizer._bucket_assignments_per_rank
    held = [sum(piece.tensor.numel() for piece in own.values()) for own in of_ranks]
    return {"steps": steps, "updated": updated, "held": held}


if __name__ == "__main__":
    run_as_rank(observe, [(seed,) for seed in range(CASES)])
