"""Whether torch's compiler turns a module's convolutions to channels last, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["is_turned"]


def is_turned(make: Callable[[], Any], shape: tuple[int, ...]) -> bool:
    """Ask inductor of a training graph as on a GPU: a CPU's own convolutions are switched off."""
    import torch
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        module, images = make(), torch.empty(shape)
        tensors = dict(module.named_parameters())

        def called(parameters: Any, images: Any) -> Any:
            return functional_call(module, parameters, (images,))

        graph = make_fx(called, tracing_mode="fake")(tensors, images)
    with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
        return bool(GraphLowering.decide_layout_opt(graph, is_inference=False))
