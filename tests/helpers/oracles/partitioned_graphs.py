"""What torch's partitioner keeps for the backward of a module, under a budget, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["kept_bytes"]


def kept_bytes(make: Callable[[], Any], shapes: list[tuple[int, ...]], budget: float) -> int:
    """Bytes of all that a forward keeps besides its inputs and parameters.

    `shapes`: of inputs, the first of which wants a gradient.
    """
    import torch
    import torch._inductor.lowering
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: list[int] = []

    def storage_of(node: Any) -> Any:
        value = node.meta.get("val")
        return value.untyped_storage() if isinstance(value, torch.Tensor) else None

    def partition(joint: Any, given: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(
            joint, given, num_fwd_outputs=num_fwd_outputs, **options
        )
        nodes = list(forward.graph.nodes)
        saved = nodes[-1].args[0][num_fwd_outputs:]
        own = {s._cdata for n in nodes if n.op == "placeholder" and (s := storage_of(n))}
        storages = [storage_of(n) for n in saved if isinstance(n, torch.fx.Node)]
        sizes = {s._cdata: s.nbytes() for s in storages if s is not None}
        kept.append(sum(size for data, size in sizes.items() if data not in own))
        return forward, backward

    fake = FakeTensorMode()
    with fake:
        module = make()
        inputs = [torch.randn(shape) for shape in shapes]
        inputs[0].requires_grad_()

    def called(parameters: Any, buffers: Any, given: Any) -> Any:
        return torch.func.functional_call(module, {**parameters, **buffers}, tuple(given))

    tensors = dict(module.named_parameters()), dict(module.named_buffers())
    same = lambda graph, _: graph  # noqa: E731 -- what would compile it
    with config.patch(activation_memory_budget=budget), fake:
        aot_function(
            called, same, same, partition_fn=partition, decompositions=select_decomp_table()
        )(*tensors, inputs)
    return kept[0]
