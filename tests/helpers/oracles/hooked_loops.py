"""DDP under hooks of several collectives a bucket, for `strategy_oracle`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from logged_calls import Calls
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import mixed_precision_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks_of_power
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.profiler import profile
from training_loops import Ddp, Loop, Zero1

FRACTION = 0.01


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


class DdpPowerSgd3(DdpPowerSgd):
    """In float32, whose three columns take a QR."""

    rank = 3


def batched_of_matrices(state, bucket):  # type: ignore[no-untyped-def] # torch's own are untyped
    """torch's hook, whose matrices its own _orthogonalize refuses: it wants a batch of them."""
    orthogonalize = hooks_of_power._orthogonalize

    def of_one(matrix: torch.Tensor) -> None:
        orthogonalize(matrix.unsqueeze(0))

    with patch.object(hooks_of_power, "_orthogonalize", of_one):
        future = hooks_of_power.batched_powerSGD_hook(state, bucket)
        future.wait()
    return future


class DdpPowerSgdBatched(DdpPowerSgd2):
    powers = staticmethod(batched_of_matrices)


class DdpOptimizesInHook(Ddp):
    """torch's own hook, with a stream that only GPUs have; logged by a profiler."""

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.01})
        Loop.__init__(self, DistributedDataParallel(module, bucket_cap_mb=0.2), make_input)

    def step(self, calls: Calls, micro_batches: int) -> None:
        before = [parameter.detach().clone() for parameter in self.module.parameters()]
        with patch.object(torch.accelerator, "current_stream"), profile(record_shapes=True) as seen:
            self.backward()
        reduced = [event for event in seen.events() if event.name == "gloo:all_reduce"]
        for event in sorted(reduced, key=lambda event: event.time_range.start):
            calls.append(("all_reduce", 4 * math.prod(event.input_shapes[0])))
        after = list(self.module.parameters())
        assert all(parameter.grad is None for parameter in after)
        assert not any(map(torch.equal, before, after))


class NoStream:
    """In place of a GPU's stream or event: what it holds is done at once."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def record(self) -> None: ...

    def wait(self, **_: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...


class DdpMixed(Ddp):
    """torch's own hook, with streams and events that only GPUs have."""

    types = _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    no_sync = False
    static_graph = False

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        torch.Stream = torch.Event = NoStream
        own = mixed_precision_hooks._reducer_allreduce_and_upcast_hook

        def logged(state, bucket):  # type: ignore[no-untyped-def] # see above
            done = own(state, bucket)
            self.calls.append(("all_reduce", bucket.buffer().nbytes))
            return done

        with patch.object(mixed_precision_hooks, own.__name__, logged):
            ddp = DistributedDataParallel(
                module,
                bucket_cap_mb=0.2,
                static_graph=self.static_graph,
                mixed_precision=self.types,
            )
        Loop.__init__(self, ddp, make_input)

    def backward(self) -> None:
        with patch.object(torch.accelerator, "current_stream", NoStream):
            super().backward()

    def step(self, calls: Calls, micro_batches: int) -> None:
        super().step(calls, micro_batches)
        assert {p.dtype for p in self.module.parameters()} <= {torch.float32, torch.float64}
        assert all(p.grad.dtype == p.dtype for p in self.module.parameters())


class DdpMixedStatic(DdpMixed):
    """All in half precision."""

    types = _MixedPrecision(torch.bfloat16, None, torch.bfloat16)
    static_graph = True


class AsOnGpu:
    """A gloo all-gather whose future has one tensor of all ranks, as NCCL's has."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def get_future(self) -> Any:
        return self.work.get_future().then(lambda done: [torch.stack(done.value())])


class DdpQuantised(Ddp):
    """torch's own hook, which fails with gloo's futures."""

    quantise = staticmethod(quantization_pertensor_hook)

    def hook(self, _, bucket):  # type: ignore[no-untyped-def] # see above
        gather = dist.all_gather

        def as_on_gpu(*args: Any, **options: Any) -> AsOnGpu:
            return AsOnGpu(gather(*args, **options))

        with patch.object(dist, "all_gather", as_on_gpu):
            future = self.quantise(None, bucket)
            future.wait()
        return future


class DdpQuantisedChannels(DdpQuantised):
    quantise = staticmethod(quantization_perchannel_hook)


class DdpTopK(Ddp):
    """torch has no such hook: the page's own."""

    def hook(self, _, bucket):  # type: ignore[no-untyped-def] # see above
        gradient, ranks = bucket.buffer(), dist.get_world_size()
        kept = max(1, math.ceil(FRACTION * gradient.numel()))
        indices = gradient.abs().topk(kept).indices
        values = gradient[indices]
        all_values = [torch.empty_like(values) for _ in range(ranks)]
        all_indices = [torch.empty_like(indices) for _ in range(ranks)]
        first = dist.all_gather(all_values, values, async_op=True)
        second = dist.all_gather(all_indices, indices, async_op=True)

        def add_up(_: Any) -> torch.Tensor:
            first.wait()
            total = torch.zeros_like(gradient)
            for index, value in zip(all_indices, all_values, strict=True):
                total.index_add_(0, index, value)
            return total / ranks

        return second.get_future().then(add_up)


def awaited_all_reduce(state, bucket):  # type: ignore[no-untyped-def] # see above
    """As NCCL's futures, done for the host once launched: gloo's would cross in its threads."""
    future = allreduce_hook(state, bucket)
    future.wait()
    return future


class Zero1Overlapped(Zero1):
    """torch's own hook, which refuses gloo."""

    cap_mb = 0.2
    modify = staticmethod(hook_with_zero_step)
    shard_buckets = False
    static_graph = False

    def __init__(self, module: nn.Module, make_input: Callable[[], torch.Tensor]) -> None:
        ddp = DistributedDataParallel(
            module, bucket_cap_mb=self.cap_mb, static_graph=self.static_graph
        )
        Loop.__init__(self, ddp, make_input)
        self.optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.01
        )
        with patch.object(dist, "get_backend", return_value="nccl"):
            hook = self.modify(awaited_all_reduce, ddp, self.optimizer, self.shard_buckets)
        ddp.register_comm_hook(None, hook)


class Zero1Interleaved(Zero1Overlapped):
    modify = staticmethod(hook_with_zero_step_interleaved)


class Zero1InShards(Zero1Interleaved):
    """Of a static graph, whose buckets are rebuilt a step later."""

    shard_buckets = True
    static_graph = True
