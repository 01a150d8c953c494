"""One training step of a model, recorded: operators row by row, the order of ready gradients.

A model has blocks, each of which keeps something for the backward. A checkpoint keeps a block's
inputs alone, and runs its forward again in the backward up to the last tensor that autograd saves
(torch/utils/checkpoint.py: _StopRecomputationError).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from calibrate.capture.cuda_operators import cuda_operators
from calibrate.capture.describe import describe
from calibrate.capture.shapes import (
    NoValuesError,
    Shapes,
    drop_memory,
    operands,
    tensors,
    without_values,
)
from ddpsim.strategies.fully_shard.blocks import block_names
from ddpsim.workload.operators import Operator

_CHECKPOINT = "_checkpoint_without_reentrant_generator"  # of torch 2.1 and later

Recorded = Literal["fp32", "amp", "half"]
Row = list[Operator]


@dataclass
class Recording:
    """One step at one batch and size.

    `forward`: a row for each call of a module that owns parameters, in `modules`; `backward`: a row
    that ends with the gradient of each parameter of `ready` (places among `trained_parameters`),
    and one more after the last. `saved_bytes`: one figure, what autograd keeps at the end of the
    forward; `own_bytes` and `others_bytes`: by `blocks`, the latter with one more of the forward's
    end. `sparse`: places of parameters with sparse gradients.
    """

    modules: list[str] = field(default_factory=list)
    forward: list[Row] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    backward: list[Row] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    own_bytes: list[int] = field(default_factory=list)
    others_bytes: list[int] = field(default_factory=list)
    sparse: set[int] = field(default_factory=set)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter as DDP sees them: registration order, tied weights once."""
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


class _Recorder(Shapes):  # type: ignore[no-untyped-call, unused-ignore]
    """Runs operators on shapes, and notes each in the row that is open."""

    def __init__(self) -> None:
        super().__init__()
        self.row: Row = []
        self.module = ""

    def on_shapes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = super().on_shapes(func, args, kwargs)
        self.row += describe(func, args, kwargs, out)
        return out

    def cut(self) -> Row:
        """End the open row."""
        done, self.row = self.row, []
        return done


def record(model: nn.Module, loss: Callable[[], Tensor], precision: Recorded) -> Recording:
    """Run one training step on shapes; `loss()` runs the forward and the loss.

    `precision`: "fp32" as the code says; "amp" under autocast to bfloat16; "half" as the code says,
    with parameters and buffers in bfloat16, which `loss` takes as inputs then. The model's
    parameters lose their memory. What torch.compile wraps is recorded as it would run without.
    """
    drop_memory(model)
    eager = torch.compiler.set_stance("force_eager")
    with _in_half(model) if precision == "half" else nullcontext(), eager, cuda_operators():
        step = _Step(model)
        try:
            with without_values(), step.hooked(), step.recorder:
                is_amp = precision == "amp"
                with (
                    torch.autograd.graph.saved_tensors_hooks(step.save, lambda tensor: tensor),
                    torch.autocast("cuda", torch.bfloat16) if is_amp else nullcontext(),
                ):
                    result = loss()
                step.end_forward()
                torch.autograd.backward(result)
                step.recording.backward.append(step.recorder.cut())
        except NoValuesError as error:
            reason = NoValuesError(f"in or after module {step.recorder.module!r}: {error}")
            raise reason.with_traceback(error.__traceback__) from None
        model.zero_grad(set_to_none=True)
        return step.done()


@contextmanager
def _in_half(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers without memory, those of float32 in bfloat16."""
    both = (*model.parameters(), *model.buffers())
    wide = [tensor for tensor in both if tensor.dtype == torch.float32]
    for tensor in wide:
        tensor.data = tensor.data.bfloat16()
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        for tensor in wide:
            tensor.data = tensor.data.float()


class _Step:
    """What the hooks of one step note."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.recording, self.recorder = Recording(), _Recorder()
        tensors = (*model.parameters(), *model.buffers())
        # addresses of the storages behind its tensors
        self._kept = Kept({tensor.untyped_storage()._cdata for tensor in tensors})  # noqa: SLF001
        self._is_forward = True

    def save(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd keeps."""
        if tensor.is_meta and self._is_forward:
            row = len(self.recording.modules) - 1
            self._kept.save(tensor, row, len(self.recorder.row))
        return tensor

    def end_forward(self) -> None:
        """Close the forward's last row; a checkpoint's reruns are the backward's."""
        self._is_forward = False
        self.recording.forward.append(self.recorder.cut())

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """The model with hooks on modules, blocks and gradients."""
        handles = [*self._on_blocks(), *self._on_modules(), *self._on_gradients()]
        try:
            with patch.object(
                checkpoint, _CHECKPOINT, self._noting(getattr(checkpoint, _CHECKPOINT))
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpoint keeps its inputs, past the hooks on saved tensors."""

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            for tensor in operands(args, kwargs):
                self.save(tensor)
            return run(*args, **kwargs)

        return checkpointed

    def _on_modules(self) -> Iterator[Any]:
        """A row begins where a module that owns parameters is called."""
        for name, module in self._model.named_modules():

            def begin(*_: Any, name: str = name) -> None:
                if not self._is_forward:
                    return
                if self.recording.modules:
                    self.recording.forward.append(self.recorder.cut())
                self.recording.modules.append(name)
                self.recorder.module = name

            if any(True for _ in module.parameters(recurse=False)):
                yield module.register_forward_pre_hook(begin)

    def _on_blocks(self) -> Iterator[Any]:
        for name in block_names([(n, p.numel()) for n, p in self._model.named_parameters()]):
            block = self._model.get_submodule(name)

            def enter(_: nn.Module, *arguments: Any, name: str = name) -> None:
                if self._is_forward:
                    self._kept.enter(name, arguments)

            def leave(*_: Any) -> None:
                if self._is_forward:
                    self._kept.leave()

            yield block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
            yield block.register_forward_hook(leave)

    def _on_gradients(self) -> Iterator[Any]:
        """A row ends where the gradient of a parameter is ready."""
        for place, parameter in enumerate(trained_parameters(self._model).values()):

            def end(tensor: Tensor, place: int = place) -> None:
                self.recording.ready.append(place)
                self.recording.backward.append(self.recorder.cut())
                if tensor.grad is not None and tensor.grad.is_sparse:
                    self.recording.sparse.add(place)

            yield parameter.register_post_accumulate_grad_hook(end)  # type: ignore[no-untyped-call]

    def done(self) -> Recording:
        """The step with what its blocks keep, without rows that launch nothing.

        Those are of containers that only hold a parameter.
        """
        step, kept = self.recording, self._kept
        step.saved_bytes, step.blocks = [kept.nbytes()], kept.blocks
        step.own_bytes, step.others_bytes = kept.own_bytes(), list(kept.others_bytes())
        places = [row for row, operators in enumerate(step.forward) if operators]
        for block in step.blocks:
            block.row = places.index(block.row) if block.row in places else len(places)
        step.modules = [step.modules[row] for row in places]
        step.forward = [step.forward[row] for row in places]
        return step


@dataclass
class Block:
    """One call of a block: its inputs, and its last row up to the last tensor that it saves.

    `row`: the row of the forward that was open at that tensor; `operators`: how many of it had run.
    """

    name: str
    inputs: list[int]
    row: int = 0
    operators: int = 0


@dataclass
class Kept:
    """Memory of the forward by the blocks that save it (None: outside), in order of the first.

    `owned`: that of the model itself, which does not count. Each is known by the address of its
    storage, and held so that no other takes the address.
    """

    owned: set[int]
    sizes: dict[int, int] = field(default_factory=dict)
    places: dict[int, set[int | None]] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    current: int | None = None
    ended: int = 0
    held: list[Any] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)

    def save(self, tensor: Tensor, row: int, operators: int) -> None:
        """Note a tensor that autograd keeps, and how far the open row of the forward is."""
        storage = self._note(tensor)
        if storage not in self.owned:
            self.saved.add(storage)
        if self.current is not None:
            block = self.blocks[self.current]
            block.row, block.operators = row, operators

    def enter(self, name: str, arguments: Any) -> None:
        """Begin a block, whose checkpoint would keep its arguments."""
        inputs = [self._note(tensor) for tensor in tensors(arguments)]
        self.blocks.append(Block(name, inputs))
        self.current = len(self.blocks) - 1

    def leave(self) -> None:
        """End the block that is open."""
        self.current = None
        self.ended += 1

    def _note(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key: int = storage._cdata  # noqa: SLF001 - of the storage behind the object
        if key in self.owned:
            return key
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.held.append(storage)
            self.since[key] = self.ended
        self.places.setdefault(key, set()).add(self.current)
        return key

    def nbytes(self) -> int:
        """Bytes of all that autograd keeps."""
        return sum(self.sizes[key] for key in self.saved)

    def own_bytes(self) -> list[int]:
        """Bytes that each block alone keeps for the backward, and its checkpoint would not."""
        owners = self._owners()
        blocks = range(len(self.blocks))
        return [sum(self.sizes[key] for key, at in owners.items() if at == i) for i in blocks]

    def others_bytes(self) -> Iterator[int]:
        """All else that is kept when each block ends, and at last when the forward does."""
        owners = self._owners()
        others = [(since, key) for key, since in self.since.items() if owners[key] is None]
        for number in range(len(self.blocks) + 1):
            yield sum(self.sizes[key] for since, key in others if since <= number)

    def _owners(self) -> dict[int, int | None]:
        inputs = {key for block in self.blocks for key in block.inputs}
        return {
            key: next(iter(places)) if len(places) == 1 and key not in inputs else None
            for key, places in self.places.items()
        }
