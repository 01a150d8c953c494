"""Training loops, each with its own way to share gradients, for `strategy_oracle`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from logged_calls import Calls, logged
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

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


class NaiveGroups(Loop):
    """Two flat tensors by hand: the second half of the parameters first."""

    def reduce(self) -> None:
        gradients = self.gradients()
        half = len(gradients) // 2
        for group in (gradients[half:], gradients[:half]):
            flat = _flatten_dense_tensors(group)
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for gradient, part in zip(group, _unflatten_dense_tensors(flat, group), strict=True):
                gradient.copy_(part)


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


class PerParameterBlocking(PerParameter):
    def hook(self, parameter: torch.Tensor) -> None:
        if self.reduces:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


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
        self.reduce()
        self.optimizer.step()


class DdpSynced(Ddp):
    no_sync = False


class DdpReducedInHooks(Ddp):
    """A tensor's hook, which autograd calls before DDP's, under no_sync too."""

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        super().__init__(module, make_input)
        for parameter in self.module.parameters():
            parameter.register_hook(self.reduced)

    def reduced(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls.append(("all_reduce", gradient.nbytes))
        work = dist.group.WORLD.allreduce([gradient])
        work.wait()
        return gradient.div_(dist.get_world_size())


class DdpReducedAfter(Ddp):
    """A loop over all gradients, as without DDP, and a barrier in every third step."""

    steps = 0
    reduce = Naive.reduce

    def step(self, calls: Calls, micro_batches: int) -> None:
        super().step(calls, micro_batches)
        if self.steps % EVERY == 0:
            calls.append(("all_reduce", 4))  # as NCCL's barrier has it
            dist.barrier()
        self.steps += 1


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

    reduces = True

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        Loop.__init__(self, DistributedDataParallel(module, bucket_cap_mb=0.2), make_input)
        state = PostLocalSGDState(
            None, dist.new_group([0, 1]), 2, post_local_gradient_allreduce=self.reduces
        )
        self.module.register_comm_hook(state, post_localSGD_hook)
        self.averager = PeriodicModelAverager(period=EVERY, warmup_steps=2)

    def step(self, calls: Calls, micro_batches: int) -> None:
        super().step(calls, micro_batches)
        self.averager.average_parameters(self.module.parameters())


class DdpPostLocalAlone(DdpPostLocal):
    reduces = False


class Zero1(Ddp):
    """ZeroRedundancyOptimizer, which sends what each rank has updated."""

    in_one = False

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        super().__init__(module, make_input)
        parameters = self.module.parameters()
        options = {"parameters_as_bucket_view": self.in_one, "lr": 0.01}
        self.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, **options)

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


class Zero1InOne(Zero1):
    """The same with one broadcast of a rank's parameters."""

    in_one = True
