"""Models whose times come from a trace of PyTorch's profiler.

Some gradients may be of activations: `torch.utils.checkpoint` with `use_reentrant=True` runs a
backward of its own in each `CheckpointFunctionBackward`, whose input is a leaf there and gets an
AccumulateGrad as a parameter does. Only a model beside the trace tells them apart, by size.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import mean

from ddpsim.errors import ImportFailedError, InputError
from ddpsim.importers.kineto.measured import Gradient, KinetoStep, Piece
from ddpsim.importers.kineto.ranks import KinetoTrace, RankTraces
from ddpsim.provenance import Provenance
from ddpsim.scenario.device import Device
from ddpsim.scenario.workload import Workload
from ddpsim.units import format_duration
from ddpsim.workload.model import Buffer, Model, Parameter, Work

_FORWARD_PIECES = 200  # each launched before the device begins it: fine enough to overlap
_LONG_WAIT = 0.02  # of a step, for a batch


def bare_model(trace: KinetoTrace, device: Device) -> Model:
    """The parameters that a trace with shapes tells of, without times; raises ImportFailedError."""
    refuse_checkpoints(trace)
    gradients = trace.typical.gradients
    buffers = tuple(_buffers(trace.typical))
    parameters = tuple(_parameter(trace, i, g) for i, g in enumerate(gradients))[::-1]
    whose = "its registration order is taken as the reverse of the order of its gradients"
    return Model(
        parameters=parameters,
        ready_order=tuple(range(len(parameters)))[::-1],
        buffers=buffers,
        forward=(),
        backward=(),
        optimizer=Work(0.0),
        launch_s=device.launch_s,
        activation_bytes=None,
        provenance=(Provenance("parameters", f"shapes in {trace.source}; {whose}", "measured"),),
        basis="measured",
        warnings=(
            (
                f"{trace.source} names no parameters and no buffers: {whose}, and "
                f"{'as many bytes of buffers are' if buffers else 'no buffer is'} broadcast"
                f"{' as recorded' if buffers else ''}; workload.model or workload.parameters "
                "beside it would say them"
            ),
        ),
    )


def _buffers(step: KinetoStep) -> Iterator[Buffer]:
    """One for each broadcast, which may hold many."""
    for each in step.collectives:
        if each.operation == "broadcast" and each.elements and each.dtype:
            yield Buffer(each.dtype, each.elements)


def _parameter(trace: KinetoTrace, number: int, gradient: Gradient) -> Parameter:
    if gradient.numel is None or gradient.dtype is None:
        raise ImportFailedError(
            trace.source,
            "holds no shapes of the gradients; give workload.model (a zoo name) or "
            "workload.parameters (a CSV) beside it, or record with record_shapes=True",
        )
    return Parameter(f"gradient {number}", gradient.numel, gradient.dtype)


def traced_model(trace: KinetoTrace, model: Model, workload: Workload, device: Device) -> Model:
    """`model` with a trace's times and order; raises InputError where they do not fit."""
    if trace.on_gpu != (device.kind == "gpu"):
        of = "a GPU" if trace.on_gpu else "a CPU: no GPU kernel is in it"
        raise InputError(
            "workload.trace",
            f"{trace.source} was recorded on {of}, but cluster.device is a {device.kind.upper()}; "
            "name the device of the trace",
        )
    trace = of_parameters(trace, model)
    step = trace.typical
    ready_order = _ready_order(trace, model)
    parameters = list(model.parameters)
    for index, gradient in zip(ready_order, step.gradients, strict=True):
        if gradient.dtype:
            parameters[index] = parameters[index]._replace(dtype=gradient.dtype)
        if not trace.on_gpu:
            parameters[index] = parameters[index]._replace(ddp_hook_s=gradient.hook_s)
    _check_total(trace, parameters)
    listed = [parameters[index] for index in ready_order]
    usual = step.typical_micro_batch
    return replace(
        model,
        parameters=tuple(parameters),
        ready_order=ready_order,
        forward=tuple(_coarse(usual.forward)),
        forward_modules=(),
        forward_outputs=(),
        backward=tuple(Work(piece.device_s, 0, piece.host_s) for piece in usual.backward),
        optimizer=Work(step.optimizer.device_s, 0, step.optimizer.host_s),
        provenance=(_provenance(trace), *_kept(model.provenance)),
        basis="slowed" if step.host_s > step.device_s else "measured",
        later=(1.0, 1.0) if step.earlier else None,
        warnings=(*model.warnings, *_warnings(trace, listed, workload)),
    )


def of_ranks(ranks: RankTraces, model: Model) -> Model:
    """The model of the rank in the middle, with how all that were recorded differ from it."""
    if len(ranks.traces) == 1:
        return model
    # what is drawn is relative to the ranks' medians: to their mean, or each to its own
    own_s = ranks.compute_s[ranks.typical_rank]
    usual_s = mean(ranks.compute_s.values()) if ranks.is_whole else own_s
    model = model.stretched(usual_s / ranks.typical.typical.usual_s)
    source = f"{len(ranks.traces)} of {ranks.world_size} ranks recorded: their times of each step"
    return replace(
        model,
        iterations_s=ranks.busy_s,
        provenance=(*model.provenance, Provenance("ranks and jitter", source, "measured")),
        warnings=(*model.warnings, *_warnings_of_ranks(ranks)),
    )


def _warnings_of_ranks(ranks: RankTraces) -> Iterator[str]:
    if ranks.straggler:
        rank, times = ranks.straggler
        where = ranks.traces[rank].source
        yield f"rank {rank} computes {times:.2f} x as long as the others ({where})"


def _ready_order(trace: KinetoTrace, model: Model) -> tuple[int, ...]:
    """The parameter of each gradient: by size where it is known, otherwise in the usual order."""
    gradients, usual = trace.typical.gradients, model.ready_order
    if len(gradients) != len(usual):
        raise ImportFailedError(
            trace.source,
            f"a step makes {len(gradients)} gradients (AccumulateGrad), but the model beside it "
            f"has {len(usual)} parameters; give the model that was traced, and a trace with one "
            "backward a step",
        )
    if any(gradient.numel is None for gradient in gradients):
        return usual
    waiting: dict[int, deque[int]] = defaultdict(deque)
    for index in usual:
        waiting[model.parameters[index].numel].append(index)
    return tuple(_taken(trace, gradient, waiting) for gradient in gradients)


def _taken(trace: KinetoTrace, gradient: Gradient, waiting: dict[int, deque[int]]) -> int:
    of_size = waiting[gradient.numel or 0]
    if not of_size:
        raise ImportFailedError(
            trace.source,
            f"makes a gradient of {gradient.numel} elements {gradient.shape} for which the model "
            "beside it has no parameter left; give the model that was traced",
        )
    return of_size.popleft()


def _check_total(trace: KinetoTrace, parameters: Sequence[Parameter]) -> None:
    """All gradients are reduced, and nothing else is by their hooks."""
    reduced = sum(trace.typical.bucket_elements or ())
    elements = sum(parameter.numel for parameter in parameters)
    if reduced and reduced != elements:
        raise ImportFailedError(
            trace.source,
            f"the all-reduces of its backward take {reduced} elements a step, but the gradients "
            f"have {elements}; give the model that was traced, or, if the loop reduces something "
            "else during the backward, record steps without it",
        )


def _coarse(pieces: Sequence[Piece]) -> Iterator[Work]:
    """The pieces in order, the shortest ones joined."""
    least_s = sum(max(piece) for piece in pieces) / _FORWARD_PIECES
    device_s = host_s = 0.0
    for piece in pieces:
        device_s, host_s = device_s + piece.device_s, host_s + piece.host_s
        if max(device_s, host_s) >= least_s:
            yield Work(device_s, 0, host_s)
            device_s = host_s = 0.0
    if device_s or host_s:
        yield Work(device_s, 0, host_s)


def _provenance(trace: KinetoTrace) -> Provenance:
    step, count = trace.typical, len(trace.steps)
    where = f" on {trace.device}" if trace.device else ""
    which = f"the median of {count} steps" if count > 1 else "its only step"
    first = ", the first left out" if trace.left_out else ""
    return Provenance(
        "workload.trace", f"{trace.source}: {step.name}, {which}{first}{where}", "measured"
    )


def _kept(provenance: Sequence[Provenance]) -> tuple[Provenance, ...]:
    """The provenance of what the trace does not replace."""
    replaced = ("compute", "layer times")
    return tuple(p for p in provenance if not p.input.startswith(replaced))


def _warnings(trace: KinetoTrace, listed: Sequence[Parameter], workload: Workload) -> Iterator[str]:
    step, source = trace.typical, trace.source
    if len(trace.steps) == 1 and not trace.left_out:
        yield f"{source} holds one step: whether it is a steady one cannot be told"
    if trace.lost.kernels:
        count, time_s, share = trace.lost
        yield (
            f"{source}: kernels whose launch is not recorded are left out: {count}, which take "
            f"{format_duration(time_s)} ({100 * share:.1f} % of the kernels' time)"
        )
    others = sorted({g.dtype for g in step.gradients if g.dtype} - {"bfloat16"})
    if workload.precision == "bf16" and others:
        yield (
            f"workload.precision bf16 changes nothing of {source}, whose gradients are "
            f"{', '.join(others)} as recorded; record the model in bfloat16, or drop it here"
        )
    if step.host_s > step.device_s and workload.step_time is None:
        yield (
            f"{source}: the host took {format_duration(step.host_s)} to launch what the device "
            f"does in {format_duration(step.device_s)}: the step is bound by the host, as "
            "recorded; the profiler slows launches, so give workload.step_time as measured "
            "without it"
        )
    if step.beside_comm_s > 0:
        alone = "GPU" if trace.on_gpu else "process"
        yield (
            f"{source}: {format_duration(step.beside_comm_s)} of the device's work was done "
            "beside communication and is taken as it was, slowed already; a trace of one "
            f"{alone} has none"
        )
    if not any(s.collectives for s in trace.steps) and trace.world_size != 1:
        yield f"{source} holds no communication, so no all-reduce in it confirms the gradients"
    if step.loader_s > _LONG_WAIT * step.length_s:
        yield (
            f"{source}: {format_duration(step.loader_s)} a step of waiting for a batch are left "
            "out; workload.data adds a loader"
        )
    yield from _order_warnings(trace, listed)


def _order_warnings(trace: KinetoTrace, listed: Sequence[Parameter]) -> Iterator[str]:
    """Warn of all-reduces that end where no gradient does: the order of gradients is wrong then."""
    buckets = trace.typical.bucket_elements or ()
    ends = set(accumulate(parameter.numel for parameter in listed))
    if not ends.issuperset(accumulate(buckets)):
        sizes = ", ".join(str(size) for size in buckets[:5])
        yield (
            f"{trace.source}: its all-reduces ({sizes}{', ...' if len(buckets) > 5 else ''} "
            "elements) do not end where gradients do: the order of the gradients is not the "
            "trace's; record with record_shapes=True"
        )
    reduced = {c.dtype for c in trace.typical.collectives if c.of_gradients and c.dtype}
    wanted = {parameter.dtype for parameter in listed}
    if reduced and not reduced & wanted:
        yield (
            f"{trace.source} reduces {', '.join(sorted(reduced))}, but the gradients here are "
            f"{', '.join(sorted(wanted))}; see workload.precision and ddp.comm_hook"
        )


# --- reentrant activation checkpointing ---------------------------------------------------------

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


def of_parameters(trace: KinetoTrace, model: Model) -> KinetoTrace:
    """The trace with the gradients of parameters alone; raises ImportFailedError if in doubt."""
    step = trace.typical
    inside = _made_in_checkpoints(step)
    if not inside:
        return trace
    surplus = _surplus_sizes(step, model)
    dropped = {i for i in inside if step.gradients[i].numel in surplus}
    are_sized = all(gradient.numel is not None for gradient in step.gradients)
    if not are_sized or len(step.gradients) - len(dropped) != len(model.parameters):
        raise ImportFailedError(
            trace.source,
            f"{_WHAT}: of {len(step.gradients)} gradients a step makes {len(inside)} in "
            f"checkpoints, and sizes do not tell which are those of the {len(model.parameters)} "
            "parameters beside it; record with use_reentrant=False, or with record_shapes=True if "
            "shapes are missing",
        )
    return replace(trace, typical=_without(step, dropped))


def _made_in_checkpoints(step: KinetoStep) -> list[int]:
    return [i for i, gradient in enumerate(step.gradients) if gradient.in_checkpoint]


def _surplus_sizes(step: KinetoStep, model: Model) -> set[int]:
    """Sizes of which there are too many gradients, by just as many as checkpoints make."""
    made = Counter(gradient.numel for gradient in step.gradients)
    inside = Counter(gradient.numel for gradient in step.gradients if gradient.in_checkpoint)
    wanted = Counter(parameter.numel for parameter in model.parameters)
    return {
        size
        for size, count in inside.items()
        if size is not None and made[size] - wanted[size] == count
    }


def _without(step: KinetoStep, dropped: Container[int]) -> KinetoStep:
    """Drop gradients from a step; the work before each becomes the next one's."""
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
