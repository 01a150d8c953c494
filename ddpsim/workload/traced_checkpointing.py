"""Traces of reentrant activation checkpointing: some gradients are of activations.

`torch.utils.checkpoint` with `use_reentrant=True` runs a backward of its own in each
`CheckpointFunctionBackward`, whose input is a leaf there and gets an AccumulateGrad as a parameter
does. Only a model beside the trace tells them apart, by size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import replace

from ddpsim.errors import ImportFailedError
from ddpsim.importers.kineto.measured import KinetoStep, Piece
from ddpsim.importers.kineto.ranks import KinetoTrace
from ddpsim.workload.model import Model

_WHAT = (
    "holds reentrant activation checkpointing (CheckpointFunctionBackward), which makes gradients "
    "of activations too"
)


def refuse_checkpoints(trace: KinetoTrace) -> None:
    """Without a model a gradient is taken for a parameter: raises ImportFailedError."""
    if _made_in_checkpoints(trace.typical):
        raise ImportFailedError(
            trace.source,
            f"{_WHAT}, and nothing here tells them from those of parameters; record with "
            "use_reentrant=False, or give workload.model (a zoo name) or workload.parameters (a "
            "CSV) beside a trace with shapes (record_shapes=True)",
        )


def of_parameters(trace: KinetoTrace, known: Model) -> KinetoTrace:
    """The trace with the gradients of parameters alone; raises ImportFailedError if in doubt."""
    step = trace.typical
    inside = _made_in_checkpoints(step)
    if not inside:
        return trace
    surplus = _surplus_sizes(step, known)
    dropped = {i for i in inside if step.gradients[i].numel in surplus}
    are_sized = all(gradient.numel is not None for gradient in step.gradients)
    if not are_sized or len(step.gradients) - len(dropped) != len(known.parameters):
        raise ImportFailedError(
            trace.source,
            f"{_WHAT}: of {len(step.gradients)} gradients a step makes {len(inside)} in "
            f"checkpoints, and sizes do not tell which are those of the {len(known.parameters)} "
            "parameters beside it; record with use_reentrant=False, or with record_shapes=True if "
            "shapes are missing",
        )
    return replace(trace, typical=_without(step, dropped))


def _made_in_checkpoints(step: KinetoStep) -> list[int]:
    return [i for i, gradient in enumerate(step.gradients) if gradient.in_checkpoint]


def _surplus_sizes(step: KinetoStep, known: Model) -> set[int]:
    """Sizes of which there are too many gradients, by just as many as checkpoints make."""
    made = Counter(gradient.numel for gradient in step.gradients)
    inside = Counter(gradient.numel for gradient in step.gradients if gradient.in_checkpoint)
    wanted = Counter(parameter.numel for parameter in known.parameters)
    return {
        size
        for size, count in inside.items()
        if size is not None and made[size] - wanted[size] == count
    }


def _without(step: KinetoStep, dropped: Container[int]) -> KinetoStep:
    """The work before a gradient that is dropped is the next one's."""
    return replace(
        step,
        backward=tuple(_joined(step, dropped)),
        gradients=tuple(g for i, g in enumerate(step.gradients) if i not in dropped),
    )


def _joined(step: KinetoStep, dropped: Container[int]) -> Iterator[Piece]:
    device_s = host_s = 0.0
    for number, piece in enumerate(step.backward):
        device_s, host_s = device_s + piece.device_s, host_s + piece.host_s
        if number not in dropped:
            yield Piece(device_s, host_s)
            device_s = host_s = 0.0
