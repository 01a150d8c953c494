"""In which type torch adds up the gradients of micro-batches under DDP and fully_shard."""

from __future__ import annotations

import itertools
from typing import Any

from two_ranks import run_as_rank

WIDTHS = (64, 96, 32)  # of layers, each a unit of its own
CASES = [("ddp", None), *(("fully_shard", reduce) for reduce in (None, "bfloat16", "float32"))]


def observe(strategy: str, reduce: str | None) -> dict[str, Any]:
    """Bytes of each type after two micro-batches that reduce nothing, and after one that does."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(WIDTHS)]
    module: Any = torch.nn.Sequential(*layers)
    seen = _under_ddp(module) if strategy == "ddp" else _sharded(module, reduce)
    elements = sum(a * b for a, b in itertools.pairwise(WIDTHS))
    return {"strategy": strategy, "reduce": reduce, "elements": elements} | seen


def _sizes(tensors: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for one in tensors:
        name = str(one.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + one.numel() * one.element_size()
    return sizes


def _under_ddp(module: Any) -> dict[str, Any]:
    """Accumulate with a module in bfloat16; a hook sees its buckets."""
    import torch

    ddp = torch.nn.parallel.DistributedDataParallel(module.to(torch.bfloat16))
    sent: list[Any] = []

    def seen(_, bucket):  # type: ignore[no-untyped-def] # torch wants its own annotation, or none
        sent.append(bucket.buffer().clone())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, seen)
    batch = torch.randn(4, WIDTHS[0], dtype=torch.bfloat16)
    with ddp.no_sync():
        for _ in range(2):
            ddp(batch).sum().backward()
    held = _sizes(p.grad for p in module.parameters())
    ddp(batch).sum().backward()
    return {"held": held, "sent": _sizes(sent)}


def _sharded(module: Any, reduce: str | None) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    types = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce and getattr(torch, reduce)}
    for layer in (*module, module):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(**types))
    batch = torch.randn(4, WIDTHS[0])
    module.set_requires_gradient_sync(False)
    for _ in range(2):
        module(batch).sum().backward()
    held = _sizes(_unsharded(module))
    module.set_requires_gradient_sync(True)
    module(batch).sum().backward()
    sharded = _sizes(p.grad.to_local() for p in module.parameters())
    return {"held": held, "sharded": sharded}


def _unsharded(module: Any) -> Any:
    for layer in module:
        for parameter in layer._get_fsdp_state()._fsdp_param_group.fsdp_params:
            grads = (parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad)
            yield from (one for one in grads if one is not None)


if __name__ == "__main__":
    run_as_rank(observe, CASES)
