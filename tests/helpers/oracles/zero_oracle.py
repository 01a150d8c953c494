"""Megatron's and DeepSpeed's sharded optimizers, made again over two gloo ranks, writes JSON.

python tests/helpers/oracles/zero_oracle.py 2 STORE_FILE OUTPUT

Neither is installed. Each loop here is written from the facts of its source, with torch's autograd,
hooks and collectives. It tells the order in which gradients come and collectives are called, and
that a step ends with the parameters of plain data parallelism. It does not tell that the source
does the same.

Megatron: NVIDIA/Megatron-LM at d98e8a64ddf3, megatron/core/distributed (param_and_grad_buffer.py,
distributed_data_parallel.py). DeepSpeed: deepspeedai/DeepSpeed at edaa7221267c,
deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from sharded_models import built, parameters_of, ready_order
from torch import nn
from two_ranks import run_as_rank

RATE = 0.1
Said = list[tuple[str, int]]


class Loop:
    """A model whose parameters lie in one tensor, and what was done in a step."""

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self.module, self.options, self.said = module, options, Said()
        self.parameters = list(module.parameters())
        self.is_last = True
        for i, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda p, i=i: self.ready(i, p))

    def ready(self, i: int, parameter: nn.Parameter) -> None:
        self.said.append(("gradient", i))

    def train(self, x: torch.Tensor, micro_batches: int) -> None:
        for number in range(micro_batches):
            self.is_last = number == micro_batches - 1
            self.module(x + dist.get_rank() if x.is_floating_point() else x).sum().backward()
            self.end_backward()
        self.step()

    def end_backward(self) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError


class Megatron(Loop):
    """Buckets of a buffer, in reverse order of registration, from a least size."""

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        super().__init__(module, options)
        self.of: dict[int, int] = {}
        self.buckets: list[dict[str, Any]] = []
        self.start_bucket()
        for i in reversed(range(len(self.parameters))):
            bucket = self.buckets[-1]
            start = ceil(bucket["end"] / 64) * 64
            bucket["places"][i] = start
            bucket["end"] = start + self.parameters[i].numel()
            self.of[i] = len(self.buckets) - 1
            overlaps = options.get("overlap_grad_reduce")
            if overlaps and bucket["end"] >= options["bucket_size"] and i:
                self.start_bucket()
        for bucket in self.buckets:
            size = ceil(bucket["end"] / 128) * 128
            bucket["gradients"], bucket["parameters"] = torch.zeros(size), torch.zeros(size)
            for i, start in bucket["places"].items():
                parameter = self.parameters[i]
                view = bucket["parameters"][start : start + parameter.numel()]
                view.copy_(parameter.detach().flatten())
                parameter.data = view.view_as(parameter)
        if options.get("overlap_param_gather"):
            for child in module.modules():
                child.register_forward_pre_hook(self.enter)

    def start_bucket(self) -> None:
        self.buckets.append({"places": {}, "end": 0, "waiting": set(), "gather": None})

    def enter(self, module: nn.Module, _: Any) -> None:
        names = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        for parameter in module.parameters(recurse=False):
            bucket = self.buckets[self.of[names[id(parameter)]]]
            if bucket["gather"] is None:
                self.gather(bucket)
            if bucket["gather"] != "done":
                bucket["gather"].wait()
                bucket["gather"] = "done"
                ahead = self.of[names[id(parameter)]] - 1
                if ahead >= 0 and self.buckets[ahead]["gather"] is None:
                    self.gather(self.buckets[ahead])

    def ready(self, i: int, parameter: nn.Parameter) -> None:
        super().ready(i, parameter)
        bucket = self.buckets[self.of[i]]
        start = bucket["places"][i]
        bucket["gradients"][start : start + parameter.numel()] += parameter.grad.flatten()
        parameter.grad = None
        if self.is_last and self.options.get("overlap_grad_reduce"):
            bucket["waiting"].discard(i)
            if not bucket["waiting"]:
                self.reduce(bucket)

    def train(self, x: torch.Tensor, micro_batches: int) -> None:
        for bucket in self.buckets:
            bucket["gradients"].zero_()
        super().train(x, micro_batches)

    def end_backward(self) -> None:
        if self.is_last and not self.options.get("overlap_grad_reduce"):
            for bucket in self.buckets:
                self.reduce(bucket)

    def reduce(self, bucket: dict[str, Any]) -> None:
        whole = bucket["gradients"]
        self.said.append(("reduce_scatter", whole.numel()))
        whole /= dist.get_world_size()
        bucket["part"] = torch.empty(whole.numel() // dist.get_world_size())
        bucket["reduced"] = dist.reduce_scatter_tensor(bucket["part"], whole, async_op=True)

    def gather(self, bucket: dict[str, Any]) -> None:
        self.said.append(("all_gather", bucket["parameters"].numel()))
        own = bucket["parameters"].chunk(dist.get_world_size())[dist.get_rank()].clone()
        bucket["gather"] = dist.all_gather_into_tensor(bucket["parameters"], own, async_op=True)

    def step(self) -> None:
        for bucket in self.buckets:
            bucket["reduced"].wait()
            own = bucket["parameters"].chunk(dist.get_world_size())[dist.get_rank()]
            own -= RATE * bucket["part"]
            bucket["waiting"], bucket["gather"] = set(bucket["places"]), None
        if not self.options.get("overlap_param_gather"):
            for bucket in self.buckets:
                self.gather(bucket)
                bucket["gather"].wait()


class DeepSpeed(Loop):
    """Buckets up to a size, in the order of gradients or of registration; equal parts of a row."""

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        super().__init__(module, options)
        ranks = dist.get_world_size()
        numels = [parameter.numel() for parameter in self.parameters]
        self.part = ceil(sum(numels) / (2 * ranks)) * 2
        self.row, self.starts = torch.zeros(self.part * ranks), [0]
        for parameter in self.parameters:
            start = self.starts[-1]
            self.starts.append(start + parameter.numel())
            self.row[start : self.starts[-1]] = parameter.detach().flatten()
            parameter.data = self.row[start : self.starts[-1]].view_as(parameter)
        self.bucket: list[int] = []
        self.summed = torch.zeros(self.part * ranks)

    @property
    def hooks(self) -> bool:
        return self.options["stage"] == 2 or (self.is_last and self.options["overlap_comm"])

    def ready(self, i: int, parameter: nn.Parameter) -> None:
        super().ready(i, parameter)
        if self.hooks:
            self.take(i)

    def take(self, i: int) -> None:
        held = sum(self.parameters[each].numel() for each in self.bucket)
        if held + self.parameters[i].numel() > self.options["reduce_bucket_size"]:
            self.reduce()
        self.bucket.append(i)

    def end_backward(self) -> None:
        if self.is_last and not self.hooks:
            for i in range(len(self.parameters)):
                self.take(i)
        self.reduce()

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Of each gradient in the bucket: an owner, and from where to where in the row."""
        for i in self.bucket:
            start, end = self.starts[i : i + 2]
            for owner in range(dist.get_world_size()):
                low, high = max(start, owner * self.part), min(end, (owner + 1) * self.part)
                if low < high:
                    yield owner, low, high

    def reduce(self) -> None:
        if not self.bucket:
            return
        gradients = torch.zeros_like(self.row)
        for i in self.bucket:
            gradients[self.starts[i] : self.starts[i + 1]] = self.parameters[i].grad.flatten()
            self.parameters[i].grad = None
        gradients /= dist.get_world_size()
        pieces, one_by_one = list(self.pieces()), self.options["reduce_scatter"]
        if self.options["use_multi_rank_bucket_allreduce"] or not one_by_one:
            self.send(gradients, pieces, None)
        else:
            for owner in dict.fromkeys(owner for owner, *_ in pieces):
                self.send(gradients, [piece for piece in pieces if piece[0] == owner], owner)
        self.bucket.clear()

    def send(self, gradients: torch.Tensor, pieces: list[Any], owner: int | None) -> None:
        """A parameter larger than a bucket is sent in as many pieces as have owners."""
        together: list[Any] = []
        for place, piece in enumerate(pieces):
            together.append(piece)
            size = sum(high - low for _, low, high in together)
            is_large = self.options["reduce_scatter"] and size > self.options["reduce_bucket_size"]
            follows = pieces[place + 1 :]
            if (is_large and not (follows and follows[0][0] == piece[0])) or not follows:
                flat = torch.cat([gradients[low:high] for _, low, high in together])
                self.said.append(("all_reduce" if owner is None else "reduce", flat.numel()))
                dist.all_reduce(flat) if owner is None else dist.reduce(flat, owner)
                parts = flat.split([high - low for _, low, high in together])
                for (_, low, high), part in zip(together, parts, strict=True):
                    self.summed[low:high] += part
                together = []

    def step(self) -> None:
        own = slice(dist.get_rank() * self.part, (dist.get_rank() + 1) * self.part)
        self.said.append(("all_reduce", 1))
        dist.all_reduce(self.summed[own].norm())
        self.row[own] -= RATE * self.summed[own]
        self.summed.zero_()
        self.said.append(("all_gather", self.row.numel()))
        dist.all_gather_into_tensor(self.row, self.row[own].clone())


def expected(module: nn.Module, x: torch.Tensor, micro_batches: int) -> list[torch.Tensor]:
    """Parameters after two steps of plain data parallelism."""
    for _ in range(2):
        for _ in range(micro_batches):
            module(x + dist.get_rank() if x.is_floating_point() else x).sum().backward()
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= RATE * parameter.grad / dist.get_world_size()
            parameter.grad = None
    return [parameter.detach() for parameter in module.parameters()]


def observe(
    strategy: str, model: str, seed: int, micro_batches: int, options: dict[str, Any]
) -> dict[str, Any]:
    """What a second step does, and whether it ends as it should."""
    module, x = built(model, seed)
    listed, order = parameters_of(module), ready_order(module, x)
    trained = expected(built(model, seed)[0], x, micro_batches)
    loop = (Megatron if strategy == "distributed_optimizer" else DeepSpeed)(module, options)
    if isinstance(loop, Megatron):
        for bucket in loop.buckets:
            bucket["waiting"], bucket["gather"] = set(bucket["places"]), "done"
    loop.train(x, micro_batches)
    loop.said.clear()
    loop.train(x, micro_batches)
    if isinstance(loop, Megatron) and options.get("overlap_param_gather"):
        told = list(loop.said)
        module(x)  # which gathers the last of the second step
        loop.said = told
    pairs = zip(module.parameters(), trained, strict=True)
    return {
        "parameters": listed,
        "ready_order": order,
        "options": {"strategy": strategy, "accumulation_steps": micro_batches, strategy: options},
        "trained": all(torch.allclose(own, whole, atol=1e-5) for own, whole in pairs),
        "said": loop.said,
    }


def cases() -> Iterator[tuple[Any, ...]]:
    by_bucket = {"overlap_grad_reduce": True, "bucket_size": 150}
    for model, seed, micro_batches in (("decoder", 4, 1), ("dense", 9, 2), ("decoder", 21, 2)):
        for options in ({}, by_bucket, by_bucket | {"overlap_param_gather": True}):
            yield "distributed_optimizer", model, seed, micro_batches, options
        for stage, overlaps, scatters, at_once in (
            (1, False, True, True),
            (1, True, True, False),
            (2, False, False, True),
            (2, True, True, True),
        ):
            yield (
                *("deepspeed", model, seed, micro_batches),
                {
                    "stage": stage,
                    "overlap_comm": overlaps,
                    "reduce_scatter": scatters,
                    "use_multi_rank_bucket_allreduce": at_once,
                    "reduce_bucket_size": 110,
                },
            )


if __name__ == "__main__":
    run_as_rank(observe, list(cases()))
