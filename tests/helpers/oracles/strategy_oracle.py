"""Collectives that real training loops call: run as rank 0 and 1 of a gloo job, writes JSON.

python tests/helpers/oracles/strategy_oracle.py 2 STORE_FILE OUTPUT
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from cpu_synced_norm import CpuSyncBatchNorm, synced
from ddp_oracle import MODELS as PLAIN
from logged_calls import Calls, logged
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from two_ranks import run_as_rank

MODELS = PLAIN | {"synced": (synced, lambda: torch.randn(6, 64))}
EVERY = 3
STEPS = 7


class Loop:
    """A training loop of `micro_batches` a step."""

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        self.module = module
        self.make_input = make_input
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def backward(self) -> None:
        self.module(self.make_input()).sum().backward()

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def step(self, calls: Calls, micro_batches: int) -> None:
        self.optimizer.zero_grad()
        for _ in range(micro_batches):
            self.backward()
        self.reduce()
        self.optimizer.step()

    def reduce(self) -> None:
        """Nothing."""


class Naive(Loop):
    def reduce(self) -> None:
        for gradient in self.gradients():
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())


class NaiveFlat(Loop):
    def reduce(self) -> None:
        gradients = self.gradients()
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = _flatten_dense_tensors(alike)
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for gradient, reduced in zip(alike, _unflatten_dense_tensors(flat, alike), strict=True):
                gradient.copy_(reduced)


class PerParameter(Loop):
    no_sync = True

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        super().__init__(module, make_input)
        self.reduces = False
        self.launched: list[tuple[Any, torch.Tensor]] = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.hook)

    def hook(self, parameter: torch.Tensor) -> None:
        if self.reduces:
            work = dist.all_reduce(parameter.grad, async_op=True)
            self.launched.append((work, parameter.grad))

    def step(self, calls: Calls, micro_batches: int) -> None:
        self.optimizer.zero_grad()
        for number in range(micro_batches):
            self.reduces = number == micro_batches - 1 or not self.no_sync
            self.backward()
            for work, gradient in self.launched:
                work.wait()
                gradient.div_(dist.get_world_size())
            self.launched.clear()
        self.optimizer.step()


class PerParameterSynced(PerParameter):
    no_sync = False


class LocalSgd(Loop):
    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        super().__init__(module, make_input)
        self.averager = PeriodicModelAverager(period=EVERY)

    def step(self, calls: Calls, micro_batches: int) -> None:
        super().step(calls, micro_batches)
        self.averager.average_parameters(self.module.parameters())


class Server(Loop):
    """Servers hold the parameters in parts: the largest first, each to the one with the fewest."""

    servers = 1

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        super().__init__(module, make_input)
        elements = [0] * self.servers
        self.server_of: dict[nn.Parameter, int] = {}
        for parameter in sorted(module.parameters(), key=lambda each: -each.numel()):
            server = min(range(self.servers), key=lambda i: elements[i])
            self.server_of[parameter] = server
            elements[server] += parameter.numel()

    def step(self, calls: Calls, micro_batches: int) -> None:
        self.optimizer.zero_grad()
        for _ in range(micro_batches):
            self.backward()
        used = [each for each in self.module.parameters() if each.grad is not None]
        for parameter in used:
            calls.append(("reduce", parameter.grad.nbytes))
            dist.reduce(parameter.grad, self.server_of[parameter])
        own = [each for each in used if self.server_of[each] == dist.get_rank()]
        for parameter in own:
            parameter.grad.div_(dist.get_world_size())
            parameter.data.sub_(parameter.grad, alpha=0.01)
        for parameter in used:
            calls.append(("broadcast", parameter.nbytes))
            dist.broadcast(parameter.data, self.server_of[parameter])


class Servers(Server):
    servers = 2


class Ddp(Loop):
    """DDP in buckets of 0.2 MiB, whose reducer tells of each through a hook."""

    no_sync = True

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        super().__init__(DistributedDataParallel(module, bucket_cap_mb=0.2), make_input)
        self.calls: Calls = []
        self.module.register_comm_hook(None, self.hook)

    def hook(self, _, bucket):  # type: ignore[no-untyped-def] # torch refuses annotations as text
        buffer = bucket.buffer()
        self.calls.append(("all_reduce", buffer.nbytes))
        work = dist.group.WORLD.allreduce([buffer.div_(dist.get_world_size())])
        return work.get_future().then(lambda future: future.value()[0])

    def step(self, calls: Calls, micro_batches: int) -> None:
        self.calls = calls
        self.optimizer.zero_grad()
        for number in range(micro_batches):
            quiet = self.no_sync and number < micro_batches - 1
            with self.module.no_sync() if quiet else nullcontext():
                self.backward()
        self.optimizer.step()


class DdpSynced(Ddp):
    no_sync = False


class DdpJoined(Ddp):
    """Within join(), whose last steps rank 0 has no inputs for: it shadows the others."""

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        super().__init__(module, make_input)
        self.join = self.module.join()
        self.join.__enter__()
        self.steps = self.launched = 0

    def step(self, calls: Calls, micro_batches: int) -> None:
        self.steps += 1
        if dist.get_rank() == 0 and self.steps == STEPS:
            self.calls = calls
            self.join.__exit__(None, None, None)
            del calls[self.launched :]  # all have joined: the last one sends its parameters
            return
        super().step(calls, micro_batches)
        self.launched = len(calls)
        if self.steps == STEPS:
            with logged([]):
                self.join.__exit__(None, None, None)


class DdpPostLocal(Ddp):
    """torch's own hook and averager; the subgroup is both ranks, as those of a node."""

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        Loop.__init__(self, DistributedDataParallel(module, bucket_cap_mb=0.2), make_input)
        state = PostLocalSGDState(None, dist.new_group([0, 1]), start_localSGD_iter=2)
        self.module.register_comm_hook(state, post_localSGD_hook)
        self.averager = PeriodicModelAverager(period=EVERY, warmup_steps=2)

    def step(self, calls: Calls, micro_batches: int) -> None:
        super().step(calls, micro_batches)
        self.averager.average_parameters(self.module.parameters())


class Zero1(Ddp):
    """ZeroRedundancyOptimizer, which sends what each rank has updated."""

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        super().__init__(module, make_input)
        parameters = self.module.parameters()
        self.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.01)

    def step(self, calls: Calls, micro_batches: int) -> None:
        broadcast = dist.broadcast

        def logged(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            calls.append(("broadcast", tensor.nbytes))
            return broadcast(tensor, *args, **options)

        dist.broadcast = logged
        try:
            super().step(calls, micro_batches)
        finally:
            dist.broadcast = broadcast


class DdpPowerSgd(Ddp):
    """PowerSGD's own hook, awaited within the hook as its `cuda.synchronize` makes it on a GPU."""

    rank = 1
    powers = staticmethod(powerSGD_hook)

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        Loop.__init__(self, DistributedDataParallel(module, bucket_cap_mb=0.2), make_input)
        state = PowerSGDState(None, self.rank, start_powerSGD_iter=2)
        self.module.register_comm_hook(state, self.hook)

    def hook(self, state, bucket):  # type: ignore[no-untyped-def] # see above
        future = self.powers(state, bucket)
        future.wait()
        return future


class DdpPowerSgd2(DdpPowerSgd):
    rank = 2


class DdpPowerSgdHalf(DdpPowerSgd):
    """In bfloat16, of which torch orthogonalises more than two columns by Gram-Schmidt, too."""

    rank = 3
    powers = staticmethod(bf16_compress_wrapper(powerSGD_hook))


LOOPS: dict[str, tuple[type[Loop], dict[str, Any]]] = {
    "naive": (Naive, {"strategy": "naive"}),
    "naive_flat": (NaiveFlat, {"strategy": "naive_flat"}),
    "per_parameter": (PerParameter, {"strategy": "per_parameter"}),
    "per_parameter synced": (PerParameterSynced, {"strategy": "per_parameter", "no_sync": False}),
    "server": (Server, {"strategy": "parameter_server"}),
    "servers": (Servers, {"strategy": "parameter_server", "parameter_server": {"servers": 2}}),
    "local_sgd": (LocalSgd, {"strategy": "local_sgd", "local_sgd": {"every": EVERY}}),
    "ddp": (Ddp, {"bucket_cap_mb": 0.2}),
    "ddp joined": (DdpJoined, {"bucket_cap_mb": 0.2, "join": True}),
    "ddp post_localSGD": (
        DdpPostLocal,
        {
            "bucket_cap_mb": 0.2,
            "comm_hook": "post_localSGD",
            "post_local_sgd": {"period": EVERY},
        },
    ),
    "ddp zero1": (Zero1, {"strategy": "zero1", "bucket_cap_mb": 0.2}),
    "ddp powerSGD": (DdpPowerSgd, {"bucket_cap_mb": 0.2, "comm_hook": "powerSGD"}),
    "ddp powerSGD of rank 2": (
        DdpPowerSgd2,
        {
            "bucket_cap_mb": 0.2,
            "comm_hook": "powerSGD",
            "power_sgd": {"matrix_approximation_rank": 2},
        },
    ),
    "ddp powerSGD in half": (
        DdpPowerSgdHalf,
        {
            "bucket_cap_mb": 0.2,
            "comm_hook": "powerSGD",
            "power_sgd": {"matrix_approximation_rank": 3, "wrapper": "bf16_compress"},
        },
    ),
    "ddp synced": (DdpSynced, {"bucket_cap_mb": 0.2, "no_sync": False}),
}


def ready_order(module: nn.Module, make_input: Callable[[], torch.Tensor]) -> list[int]:
    """Parameters by registration, in the order in which a backward makes their gradients."""
    found: list[int] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: found.append(i))
        for i, parameter in enumerate(module.parameters())
    ]
    module(make_input()).sum().backward()
    for hook in hooks:
        hook.remove()
    return found


def observe(model: str, loop: str, micro_batches: int) -> dict[str, Any]:
    """Train a few steps and return what was called in each."""
    build, make_input = MODELS[model]
    torch.manual_seed(0)
    module = build()
    order = ready_order(module, make_input)
    module.zero_grad()
    training = LOOPS[loop][0](module, make_input)
    steps: list[Calls] = []
    for _ in range(STEPS):
        steps.append([])
        with logged(steps[-1]):
            training.step(steps[-1], micro_batches)
    return {
        "model": model,
        "loop": loop,
        "micro_batches": micro_batches,
        "ready_order": order,
        "parameters": [
            (
                name,
                parameter.numel(),
                str(parameter.dtype).removeprefix("torch."),
                parameter.shape[0],
            )
            for name, parameter in module.named_parameters()
        ],
        "buffers": [
            (str(buffer.dtype).removeprefix("torch."), buffer.numel())
            for buffer in module.buffers()
        ],
        "batch_norms": [
            (name, layer.num_features)
            for name, layer in module.named_modules()
            if isinstance(layer, CpuSyncBatchNorm)
        ],
        "steps": steps,
    }


def cases() -> list[tuple[str, str, int]]:
    """Model, loop and micro-batches; DDP stops at unused parameters, ZeRO-1 at two dtypes.

    PowerSGD's hook is slow on few threads: two models tell.
    """
    return [
        (model, loop, micro_batches)
        for model in ("dense", "tied", "mixed", "unused", "synced")
        for loop in LOOPS
        for micro_batches in (1, 3)
        if not (model == "unused" and loop.startswith("ddp"))
        and not (model == "mixed" and loop == "ddp zero1")
        and not (model != "tied" and loop == "ddp post_localSGD")
        and not (model != "dense" and loop == "ddp joined")  # it shadows no norm's sends
        and not (loop.startswith("server") and (model in ("dense", "synced") or micro_batches > 1))
        and not (" powerSGD " in loop and model != "tied")
        and not ("powerSGD" in loop and (model not in ("tied", "synced") or micro_batches > 1))
    ]


if __name__ == "__main__":
    run_as_rank(observe, cases())
