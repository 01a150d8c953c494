"""ZeroRedundancyOptimizer of a model in DDP: after the backward, or within DDP's hooks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.errors import MeasureError
from calibrate.measure.model.training import Training
from calibrate.records.variant import Variant

__all__ = ["optimized"]


def optimized(wrapped: Training, ddp: DistributedDataParallel, variant: Variant) -> Training:
    """The training of `ddp` with that optimizer; raises MeasureError where torch refuses it."""
    if not variant.overlap_with_ddp:
        return wrapped.optimizing(_after_backward)

    def make(
        kind: type[torch.optim.Optimizer], parameters: Sequence[Tensor], **options: Any
    ) -> torch.optim.Optimizer:
        return _in_hooks(ddp, variant, kind, parameters, options)

    return wrapped.optimizing(make)


def _after_backward(
    kind: type[torch.optim.Optimizer], parameters: Sequence[Tensor], **options: Any
) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 -- slow

    return ZeroRedundancyOptimizer(parameters, kind, **options)


def _in_hooks(
    ddp: DistributedDataParallel,
    variant: Variant,
    kind: type[torch.optim.Optimizer],
    parameters: Sequence[Tensor],
    options: dict[str, Any],
) -> torch.optim.Optimizer:
    """Its step() does nothing: torch's own would only warn that it should not be called."""
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook  # noqa: PLC0415 -- slow
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415
    from torch.distributed.optim.utils import functional_optim_map  # noqa: PLC0415

    if options.get("fused"):
        raise MeasureError("overlap_with_ddp takes functional optimizers, none of which is fused")
    if variant.find_unused_parameters:
        raise MeasureError("overlap_with_ddp never updates where DDP finds unused parameters")
    taken = inspect.signature(functional_optim_map[kind]).parameters
    own = {key: options[key] for key in taken if options.get(key) is not None}
    zero = ZeroRedundancyOptimizer(parameters, kind, overlap_with_ddp=True, **own)
    name = "allreduce" if variant.comm_hook == "none" else variant.comm_hook
    reduce = getattr(default_hooks, f"{name}_hook")
    try:
        hook = getattr(ddp_zero_hook, variant.hook)(reduce, ddp, zero, variant.shard_buckets)
    except RuntimeError as error:
        raise MeasureError(f"overlap_with_ddp cannot be measured here (torch: {error})") from None
    ddp.register_comm_hook(None, hook)
    zero.step = lambda *_, **__: None  # type: ignore[assignment]
    return zero
