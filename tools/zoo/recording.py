"""One training step, recorded: operators by module, saved activations, the order of gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.blocks import Block, SavedByBlock, block_names
from zoo.operator_costs import COSTS, Cost, aten, cost_of, storage_of


class Recorder(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """Adds up the work of every operator until `cut` starts the next segment."""

    def __init__(self) -> None:
        """Start with an empty segment."""
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.segment = Cost()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and record it."""
        out = func(*args, **(kwargs or {}))
        self.segment.add(cost_of(func, args, kwargs or {}, out))
        return out

    def cut(self) -> Cost:
        """End the current segment and return its work."""
        done, self.segment = self.segment, Cost()
        return done


class Saved:
    """Distinct storages that autograd keeps for backward, parameters and buffers left out."""

    def __init__(self, model: nn.Module, recorder: Recorder, step: Step) -> None:
        """Remember the storages of the model, which do not count."""
        owned = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.model, self.recorder, self.step = owned, recorder, step
        self.sizes: dict[Any, int] = {}
        self.by_block = SavedByBlock(owned)

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a saved tensor of any shape."""
        storage = storage_of(tensor)
        if storage not in self.model:
            self.sizes[storage] = tensor.untyped_storage().nbytes()
        self.by_block.save(tensor, self.recorder.segment, len(self.step.modules))
        return tensor

    def nbytes(self) -> int:
        """Bytes of all storages noted, at the dtypes of the run."""
        return sum(self.sizes.values())


@dataclass
class Step:
    """One measured training step: segments in execution order and bytes saved for backward."""

    modules: list[str] = field(default_factory=list)
    forward: list[Cost] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    backward: list[Cost] = field(default_factory=list)
    saved_bytes: int = 0
    blocks: list[Block] = field(default_factory=list)
    own_bytes: list[int] = field(default_factory=list)
    others_bytes: list[int] = field(default_factory=list)

    def structure(self) -> tuple[Any, ...]:
        """What must not depend on the batch or the size."""
        segments = (*self.forward, *self.backward)
        blocks = [(block.name, block.rerun.kernels) for block in self.blocks]
        return self.modules, self.ready, [segment.kernels for segment in segments], blocks

    def values(self) -> dict[str, list[int]]:
        """Column name -> one number per segment; "saved_bytes" has one row."""
        columns = {"saved_bytes": [self.saved_bytes]}
        columns |= {"own_bytes": self.own_bytes, "others_bytes": self.others_bytes}
        rerun = [block.rerun for block in self.blocks]
        phases = ("forward", self.forward), ("backward", self.backward), ("rerun", rerun)
        for phase, segments in phases:
            for cost in COSTS:
                columns[f"{phase}.{cost}"] = [getattr(segment, cost) for segment in segments]
        return columns


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any
) -> Tensor:
    """Flash attention in place of scaled_dot_product_attention; (batch, heads, seq, dim)."""
    names = ("attn_mask", "dropout_p", "is_causal")
    settings = dict(zip(names, options, strict=False)) | named
    if settings.get("attn_mask") is not None:
        raise ValueError("flash attention takes no mask")
    dropout, causal = settings.get("dropout_p", 0.0), settings.get("is_causal", False)
    fused = aten._scaled_dot_product_flash_attention  # noqa: SLF001 - it has no public name
    out: Tensor = fused(query, key, value, dropout, causal, scale=settings.get("scale"))[0]
    return out


def fused_dropout(values: Tensor, p: float = 0.5, *flags: bool, **named: bool) -> Tensor:
    """One-kernel dropout in place of torch.nn.functional.dropout, any shape."""
    settings = dict(zip(("training", "inplace"), flags, strict=False)) | named
    if p == 0 or not settings.get("training", True):
        return values
    return torch.native_dropout(values, p, train=True)[0]


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Make the composite operators take the fused path that they take on a CUDA device.

    On the meta device scaled_dot_product_attention decomposes into matrix products and a softmax,
    and dropout into bernoulli_, div_ and mul.
    """
    fused = patch.multiple(
        functional, scaled_dot_product_attention=fused_attention, dropout=fused_dropout
    )
    with ExitStack() as stack:
        stack.enter_context(fused)
        if "transformers" in sys.modules:
            # It looks at the values of position_ids, which a meta tensor does not have.
            probe = "transformers.masking_utils.find_packed_sequence_indices"
            stack.enter_context(patch(probe, lambda _: None))
        yield


def add_forward_hooks(model: nn.Module, step: Step, recorder: Recorder) -> list[Any]:
    """Start a forward segment whenever a module that owns parameters is called."""

    def hook(name: str) -> Callable[..., None]:
        def start(*_: Any) -> None:
            if step.modules:
                step.forward.append(recorder.cut())
            step.modules.append(name)

        return start

    return [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]


def add_ready_hooks(model: nn.Module, step: Step, recorder: Recorder) -> list[Any]:
    """End a backward segment whenever the gradient of a parameter is ready."""

    def hook(index: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            step.ready.append(index)
            step.backward.append(recorder.cut())

        return ready

    handles = []
    for index, tensor in enumerate(trained_parameters(model).values()):
        handle = tensor.register_post_accumulate_grad_hook(hook(index))  # type: ignore[no-untyped-call]
        handles.append(handle)
    return handles


def add_block_hooks(model: nn.Module, saved: SavedByBlock) -> list[Any]:
    """Tell of the beginning and the end of every block."""
    handles = []
    for name in block_names(model):
        block = model.get_submodule(name)

        def enter(_: nn.Module, *arguments: Any, name: str = name) -> None:
            saved.enter(name, arguments)

        def leave(*_: Any) -> None:
            saved.leave()

        handles.append(block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(block.register_forward_hook(leave))
    return handles


def check_blocks(step: Step) -> None:
    """Raise ValueError where the last tensor of a block is not saved in its last row."""
    for block in step.blocks:
        rows = [i for i, name in enumerate(step.modules, 1) if name.startswith(f"{block.name}.")]
        if block.rows != rows[-1]:
            raise ValueError(f"{block.name}: its last row saves nothing")


def drop_idle(step: Step) -> None:
    """Drop forward segments without kernels: containers that only hold a parameter."""
    pairs = zip(step.modules, step.forward, strict=True)
    kept = [(name, cost) for name, cost in pairs if cost.kernels]
    step.modules = [name for name, _ in kept]
    step.forward = [cost for _, cost in kept]


def measure(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """Run one training step of `model`; `loss()` runs the forward pass and the loss."""
    step, recorder = Step(), Recorder()
    saved = Saved(model, recorder, step)
    handles = add_block_hooks(model, saved.by_block)
    handles += add_forward_hooks(model, step, recorder) + add_ready_hooks(model, step, recorder)
    with torch.device("meta"), cuda_kernels(), recorder:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            result = loss()
        step.forward.append(recorder.cut())
        torch.autograd.backward(result)
        step.backward.append(recorder.cut())
    for handle in handles:
        handle.remove()
    model.zero_grad(set_to_none=True)
    by_block = saved.by_block
    step.saved_bytes, step.blocks = saved.nbytes(), by_block.blocks
    step.own_bytes, step.others_bytes = by_block.own_bytes(), list(by_block.others_bytes())
    check_blocks(step)
    drop_idle(step)
    return step


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter as DDP sees them: registration order, tied weights once."""
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
