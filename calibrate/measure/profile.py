"""`profile`: a model's times on one device with no communication, as ddpsim.model-profile/1.

Several ranks tell one thing more: how it fares beside all-reduces.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from calibrate.ddp_rounds import OptimizerName
from calibrate.files import FileName, rescued, unwritable
from calibrate.fit.estimates import SIGNIFICANT, median_time
from calibrate.interference_exponent import profile_keys
from calibrate.measure.beside import BesideAllReduces
from calibrate.measure.clock import Clock, Mark
from calibrate.measure.ddp_alone import HookTimes, under_ddp
from calibrate.measure.errors import MeasureError, StoppedError
from calibrate.measure.job import Job, taking_part
from calibrate.measure.launch import local
from calibrate.measure.process_group import process_group
from calibrate.measure.rank import run_rank
from calibrate.measure.training import (
    Made,
    TinyParameters,
    Training,
    batch_of,
    broadcast_buffers,
    compute_threads,
    dtype_name,
    hook_gradients,
    is_compiled,
    not_modelled,
    prepare,
    reduced_parameters,
    told_of_code,
    told_of_unused,
    uncompiled,
)
from calibrate.parts import adding_up
from ddpsim.files import write_atomically
from ddpsim.importers.profiles.model import LATER, profile_of
from ddpsim.report.lines import counted
from ddpsim.scenario.catalog import are_other_devices, device_table, resolve
from ddpsim.units import format_duration

__all__ = [
    "WARMUPS",
    "Document",
    "ProfileOptions",
    "Samples",
    "hook_cost_s",
    "iterate",
    "profile",
    "profile_alone",
    "profile_in_job",
    "profile_locally",
    "ready_times",
    "scale_ends",
    "scale_profile",
    "write_profile",
]

Document = dict[str, Any]


class ProfileOptions(BaseModel):
    """What to profile, on one device or by the ranks of a job together."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    output: FileName = Field(description="the profile, which the first rank writes")
    model: str = Field(description="MODULE:FUNCTION as for `calibrate.measure.training`")
    batch: int | None = Field(None, ge=1, description="default: the function's own")
    iterations: int = Field(30, ge=1)
    device: str = Field("auto", description="of one; ranks have their own")
    optimizer: OptimizerName = "sgd"
    fused: bool = False
    threads: int = Field(1, ge=1, description="of one CPU")
    scale: tuple[str, str] | None = Field(None, description="from one device preset to another")
    timeout_s: float = Field(120.0, gt=0, description="wait for the other ranks, each time")
    comm_first: bool = Field(
        default=False, description="gloo's threads before compute, if permitted"
    )


WARMUPS = 3
_TINY_ITERATIONS = 10
_STEPS_A_PAIR = 3  # iterations for every step of two micro-batches
_LOGGED = 10  # DDP's first iterations wait for its log's events on a GPU (torch: logger.cpp)
_LENGTHENED = 9  # rounds in which queues of all-reduces grow to last as long as a backward
_FEWEST_ROUNDS = 6
_NO_EXPONENT = (
    "how much the model suffers beside all-reduces is not in this profile (interference_exponent), "
    "so usual layers stand for it: "
)
_TICK_S = 1e-9  # keeps the order of gradients whose medians fall on one instant


@dataclass
class Samples:
    """Seconds of each iteration; `ready_s` by parameter, from the start of backward, each beside
    the length of the backward that it is from.

    `later`: forward and backward of a second micro-batch over the first one's, a pair a step;
    `with_ddp`: whole steps under DDP of one rank over those without, taken in turns; `ddp_hook_s`
    its hooks by parameter.
    """

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    hooked_backward_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    ready_s: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    later: list[tuple[float, float]] = field(default_factory=list)
    with_ddp: list[float] = field(default_factory=list)
    ddp_hook_s: Mapping[str, float] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    sparse: set[str] = field(default_factory=set)


def profile(
    reference: str,
    *,
    batch: int | None = None,
    iterations: int = 30,
    device: str = "auto",
    optimizer: OptimizerName = "sgd",
    fused: bool = False,
    threads: int = 1,
    job: Job | None = None,
    keep: Callable[[Document], None] = lambda _: None,
) -> Document:
    """Measure the model that MODULE:FUNCTION makes, and return its profile, ready for JSON.

    `batch` is passed on (default: the function's own default); `device` is auto, cpu or cuda:N;
    `threads` are those of the CPU, 1 as a rank under torchrun has. Iterations with gradient hooks
    and without take turns: times of the parts come from those without; a ready time is a fraction
    of its own backward, less the hooks' cost, which is measured on a model of tiny parameters.
    Then steps of two micro-batches tell what the second one takes, and steps under DDP of one rank
    what DDP's own work takes; `warnings` says why where it cannot be measured. All ranks of a `job`
    measure at once, each on its own device, and then, once `keep` has what is known until then, how
    the backward fares beside their all-reduces.
    Raises MeasureError where the function or what it returns cannot be used.
    """
    if iterations < 1:
        raise MeasureError(f"{iterations} iterations measure nothing: wanted 1 or more")
    where = job.device if job else _device(device)
    if threads > (cores := os.cpu_count() or threads):
        raise MeasureError(f"--threads {threads}: this machine has {counted(cores, 'core')}")
    with compute_threads(threads):
        size = batch_of(reference, batch)
        try:
            training = prepare(reference, size, where, optimizer, fused=fused)
            samples = _measure(training, iterations)
        except torch.cuda.OutOfMemoryError:
            raise MeasureError(
                f"batch {size} of {reference} does not fit into the memory of {where}: "
                "give a smaller --batch"
            ) from None
        except Exception as error:
            if told := told_of_code(error):
                raise told from error
            raise
        _check_the_same_take_part(training, samples)
        memory = _memory(training, where)  # of usual steps: two micro-batches may take more
        samples.later = _later_ratios(training, max(1, iterations // _STEPS_A_PAIR))
        warnings = [*not_modelled(training.model), *_try_ddp(training, samples, iterations)]
        title = _title(reference, size, where, threads)
        measured_with = {"device": _device_name(where), "optimizer": optimizer}
        hook_s = hook_cost_s(where, samples)
        document = _document(training, samples, size, title, hook_s) | memory | measured_with
        document |= {"warnings": warnings} if warnings else {}
        if job is None:
            return document
        keep(document)
        exponent, missing = _exponent(training, job, iterations)
        warnings += [_NO_EXPONENT + missing] if missing else []
        return document | exponent | ({"warnings": warnings} if warnings else {})


def profile_alone(options: ProfileOptions) -> Document:
    """Profile on one device and write the file; raises MeasureError as `profile` does."""
    try:
        return _written(options, None)
    except KeyboardInterrupt:
        raise StoppedError("stopped. Nothing was kept") from None


def profile_in_job(options: ProfileOptions) -> Document:
    """Profile in the job of torchrun's variables: every rank calls this, rank 0 writes the file.

    Raises MeasureError as `profile` does, and where a peer is lost.
    """
    with taking_part(options.timeout_s, _kept(options), comm_first=options.comm_first) as job:
        return _written(options, job)


def _kept(options: ProfileOptions) -> str:
    return f"All but how it fares beside all-reduces is in {options.output}, if it is there yet."


def _written(options: ProfileOptions, job: Job | None) -> Document:
    _check_before(options, job)

    def scaled(document: Document) -> Document:
        return scale_profile(document, *options.scale) if options.scale else document

    def keep(document: Document) -> None:
        if job is None:
            write_profile(scaled(document), options.output)
            return
        problem = ""
        if job.rank == 0:
            try:
                write_profile(scaled(document), options.output)
            except MeasureError as error:
                problem = str(error)
        job.check(problem)

    document = profile(
        options.model,
        batch=options.batch,
        iterations=options.iterations,
        device=options.device,
        optimizer=options.optimizer,
        fused=options.fused,
        threads=options.threads,
        job=job,
        keep=keep,
    )
    keep(document)
    return scaled(document)


def _check_before(options: ProfileOptions, job: Job | None) -> None:
    """What would be refused after the work."""
    problem = unwritable(options.output) if job is None or job.rank == 0 else ""
    if job is not None:
        job.check(problem)
    elif problem:
        raise MeasureError(problem)
    if options.scale:
        device = _device(options.device) if job is None else job.device
        _check_scaled_from(_device_name(device), options.scale[0])


def profile_locally(ranks: int, options: ProfileOptions) -> Document:
    """The same in a job of ranks that are started here; see `calibrate.measure.launch.local`."""
    job = options.model_dump_json()
    local(ranks, "calibrate.measure.profile", job, kept=_kept(options))
    document: Document = json.loads(options.output.read_text("utf-8"))
    return document


def write_profile(document: Document, path: Path) -> None:
    """Write a profile whole that `run` reads, or leave the old one as it was.

    Raises MeasureError where it cannot be written, ImportFailedError where it could not be read.
    """
    text = json.dumps(document, indent=1) + "\n"
    profile_of(str(path), text)
    try:
        write_atomically(path, text)
    except OSError as error:
        kept = rescued("model.json", text)
        raise MeasureError(f"{path} cannot be written: {error.strerror}. {kept}") from None


def scale_ends(text: str) -> tuple[str, str]:
    """The device presets of FROM:TO; raises MeasureError for what is none."""
    names = text.split(":")
    if len(names) != 2:
        raise MeasureError(f"--scale {text!r}: wanted FROM:TO, two device presets")
    try:
        old, new = (resolve("device", name) for name in names)
    except ValueError as error:
        raise MeasureError(f"--scale {text!r}: {error}") from None
    return old, new


def _check_scaled_from(measured_on: str | None, old: str) -> None:
    if are_other_devices(measured_on, old):
        raise MeasureError(
            f"--scale is from {old}, but this is measured on {measured_on}: name that one"
        )


def scale_profile(document: Document, old: str, new: str) -> Document:
    """A profile for another device preset: an estimate, as its `source` and `scaled_to` say.

    Forward, backward and ready times are scaled by the presets' fp32 matmul rates times their
    assumed efficiency, the optimizer by their memory bandwidth likewise. Raises MeasureError where
    it was measured on another than `old`.
    """
    _check_scaled_from(document.get("device"), old)
    compute = _matmul_rate(old) / _matmul_rate(new)
    memory = _memory_rate(old) / _memory_rate(new)
    by_memory = f" (by memory it would be {memory:.3g})"
    source = (
        f"ESTIMATE, not measured: {document['source']}; scaled from {old} to {new}, forward and "
        f"backward x {compute:.3g}{by_memory}, optimizer x {memory:.3g}"
    )
    return document | {
        "source": source,
        "scaled_to": new,
        "forward_s": document["forward_s"] * compute,
        "backward_s": document["backward_s"] * compute,
        "optimizer_s": document["optimizer_s"] * memory,
        **{key: document[key] * compute for key in LATER if key in document},
        "with_ddp_s": None,  # copies scale by other rates than compute
        "interference_exponent": None,
        "parameters": [
            p | {"ready_s": p["ready_s"] and p["ready_s"] * compute, "ddp_hook_s": None}
            for p in document["parameters"]
        ],
    }


def _matmul_rate(device: str) -> float:
    table = device_table(device)
    return float(table["peak_flops"]["fp32"] * table["matmul_efficiency"]["fp32"])


def _memory_rate(device: str) -> float:
    table = device_table(device)
    return float(table["memory_bandwidth_bytes_per_s"] * table["memory_efficiency"])


# --- getting ready -----------------------------------------------------------------------------


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MeasureError(f"{name!r} is no device: wanted auto, cpu or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MeasureError(f"{name}: this torch ({torch.__version__}) sees no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise MeasureError(f"{name!r} is not measured here: wanted auto, cpu or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", device.index or 0)
        if device.index >= count:
            raise MeasureError(f"{name}: this machine has {count} CUDA devices, counted from 0")
        torch.cuda.set_device(device)  # events are recorded on the current one
    return device


# --- measuring ---------------------------------------------------------------------------------


def _measure(training: Training, iterations: int) -> Samples:
    samples = Samples()
    if is_compiled(training.model):  # which runs uncompiled below
        for _ in range(WARMUPS):
            iterate(training, Samples(), hooked=False)
    for _ in range(WARMUPS):
        iterate(training, Samples(), hooked=True)
    for _ in range(iterations):
        iterate(training, samples, hooked=False)
        iterate(training, samples, hooked=True)
    return samples


def _check_the_same_take_part(training: Training, samples: Samples) -> None:
    """Raise MeasureError where a parameter got a gradient in some steps and in others none.

    The step that was tried before the timed ones counts too.
    """
    steps = 1 + len(samples.hooked_backward_s)
    for name in reduced_parameters(training.model):
        got = len(samples.ready_s.get(name, ())) + (name not in training.unused)
        if 0 < got < steps:
            raise MeasureError(
                f"{name} got a gradient in {got} of {steps} iterations, and a profile is of steps "
                "that are alike: let the same layers take part in each (none dropped at random or "
                "by turns), or profile each path of the model on its own"
            )


def iterate(training: Training, samples: Samples, *, hooked: bool) -> None:
    """One step; with hooks it adds ready times, without them the times of the parts.

    With hooks a compiled model runs as it would without: all of its gradients come at the end, and
    where in the backward they are made tells which of them DDP has earlier.
    """
    with uncompiled(training.model) if hooked else nullcontext():
        _iterate(training, samples, hooked=hooked)


def _iterate(training: Training, samples: Samples, *, hooked: bool) -> None:
    clock, marked = training.clock, dict[str, Mark]()
    handles = _hooks(training, marked, samples.sparse) if hooked else []
    marks = [clock.mark()]
    loss = training.forward()
    marks.append(clock.mark())
    loss.backward()  # type: ignore[no-untyped-call]
    marks.append(clock.mark())
    training.optimizer.step()
    marks.append(clock.mark())
    training.optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    forward_s, backward_s, optimizer_s = (clock.seconds(a, b) for a, b in pairwise(marks))
    if not hooked:
        samples.forward_s.append(forward_s)
        samples.backward_s.append(backward_s)
        samples.optimizer_s.append(optimizer_s)
        return
    samples.hooked_backward_s.append(backward_s)
    samples.order = list(marked)
    for name, mark in marked.items():
        ready = clock.seconds(marks[1], mark), backward_s
        samples.ready_s.setdefault(name, []).append(ready)


def _later_ratios(training: Training, steps: int) -> list[tuple[float, float]]:
    """A second micro-batch over the first; nothing where gradients and a forward do not fit."""
    clock, ratios = training.clock, []
    try:
        for _ in range(1 + steps):
            marks = [clock.mark()]
            for _ in range(2):
                loss = training.forward()
                marks.append(clock.mark())
                loss.backward()  # type: ignore[no-untyped-call]
                marks.append(clock.mark())
            training.optimizer.step()
            training.optimizer.zero_grad()
            forward, backward, later_forward, later_backward = (
                clock.seconds(a, b) for a, b in pairwise(marks)
            )
            ratios.append((later_forward / forward, later_backward / backward))
    except RuntimeError:  # a GPU's memory, or the CPU's, which torch tells no better
        training.optimizer.zero_grad()
        return []
    return ratios[1:]  # the first step warms up


def _try_ddp(training: Training, samples: Samples, steps: int) -> list[str]:
    """Measure steps under DDP; or say why there are none, which is no reason to lose the rest."""
    missing = "DDP's own work is not in this profile (with_ddp_s, ddp_hook_s)"
    if training.unused:
        idle = f"{told_of_unused(training)} got no gradient"
        return [f"{missing}: {idle}, which DDP takes with find_unused_parameters=True alone"]
    try:
        _measure_ddp(training, samples, steps)
    except Exception as error:  # noqa: BLE001 -- the user's function, DDP, or memory: all are told
        return [f"{missing}: {told_of_code(error) or error}"]
    finally:
        training.optimizer.zero_grad()
    return []


def _measure_ddp(training: Training, samples: Samples, steps: int) -> None:
    """Steps under DDP of this process alone over bare ones; on a CPU its hooks too."""
    is_gpu = next(training.model.parameters()).is_cuda
    unsettled = WARMUPS + (_LOGGED if is_gpu else 0)
    with process_group("nccl" if is_gpu else "gloo"):
        wrapped = under_ddp(training)
        ratios = [_step_s(wrapped) / _step_s(training) for _ in range(unsettled + steps)]
        hooks_s = {} if is_gpu else _ddp_hooks_s(training, steps)
    samples.with_ddp, samples.ddp_hook_s = ratios[unsettled:], hooks_s


def _ddp_hooks_s(training: Training, steps: int) -> Mapping[str, float]:
    hooks = HookTimes(training)
    for i in range(WARMUPS + steps):
        hooks.step(warm=i < WARMUPS)
    return hooks.medians_s()


def _exponent(training: Training, job: Job, iterations: int) -> tuple[Document, str]:
    """Of interference, from all ranks; or why it is not known, with what to do."""
    beside, lacking = _try_beside(training, job)
    if beside is None:
        return {}, lacking
    for i in range(_LENGTHENED + max(_FEWEST_ROUNDS, iterations)):
        beside.step(warm=i < _LENGTHENED)
    measured = beside.measured()
    if measured is None:
        outlasts = "its backward outlasts the longest queue of them; give a smaller --batch"
        return {}, outlasts if job.world_size > 1 else ""  # one rank has nobody to reduce with
    known = profile_keys([measured])
    unknown = "it is not known to 0.1; give more --iterations, or ranks cores of their own"
    return known, "" if known else unknown


def _try_beside(training: Training, job: Job) -> tuple[BesideAllReduces | None, str]:
    """Ready to step, where all ranks have the memory; otherwise what the first lacks."""
    beside, lacking = None, ""
    try:
        if job.device.type == "cuda":
            torch.cuda.empty_cache()  # NCCL takes memory of its own, from what torch does not hold
        beside = BesideAllReduces(training, job)
        training.forward().backward()  # type: ignore[no-untyped-call]
    except torch.cuda.OutOfMemoryError:
        lacking = f"rank {job.rank} has no memory for it; give a smaller --batch"
    training.optimizer.zero_grad()
    first = next(filter(None, job.everyone(lacking)), "")
    return (None if first else beside), first


def _step_s(training: Training) -> float:
    samples = Samples()
    iterate(training, samples, hooked=False)
    return samples.forward_s[0] + samples.backward_s[0] + samples.optimizer_s[0]


def _hooks(training: Training, ready: dict[str, Mark], sparse: set[str]) -> list[Any]:
    """Hooks that mark when each gradient is there; the last time counts, as in DDP."""

    def hook(name: str) -> Callable[[Tensor], None]:
        def mark(parameter: Tensor) -> None:
            ready.pop(name, None)
            ready[name] = training.clock.mark()
            if parameter.grad is not None and parameter.grad.is_sparse:
                sparse.add(name)

        return mark

    return hook_gradients(training.model, hook)


def hook_cost_s(device: torch.device, measured: Samples) -> float:
    """Seconds that one gradient hook adds to backward: tiny parameters, with hooks and without.

    On a GPU no more than it added to the backward measured: one that is behind its host hides it.
    """

    def make() -> Made:
        return Made(TinyParameters().to(device), torch.ones(1, device=device), torch.sum)

    made = make()
    optimizer = torch.optim.SGD(made.model.parameters(), lr=1e-4)
    training = Training(*made, optimizer, Clock(device), make)
    tiny_s = _longer_s(_measure(training, _TINY_ITERATIONS))
    return min(tiny_s, _longer_s(measured)) if device.type == "cuda" else tiny_s


def _longer_s(samples: Samples) -> float:
    """By how much a hook lengthens the backward, of which it is one of many."""
    more_s = median(samples.hooked_backward_s) - median(samples.backward_s)
    return max(0.0, more_s / max(1, len(samples.order)))


# --- telling -----------------------------------------------------------------------------------


def _document(
    training: Training, samples: Samples, batch: int, title: str, hook_s: float
) -> Document:
    if not samples.order:
        raise MeasureError("no parameter ever gets a gradient: does the loss depend on the model?")
    columns = samples.forward_s, samples.backward_s, samples.optimizer_s
    iterations_s = [sum(parts) for parts in zip(*columns, strict=True)]
    forward_s, backward_s, optimizer_s = adding_up(map(median, columns), median(iterations_s))
    ready_s = ready_times(samples, hook_s, backward_s)
    named = [(n, p) for n, p in reduced_parameters(training.model).items() if p.numel()]
    as_compiled = {"compiled": True} if is_compiled(training.model) else {}
    until_ready = ", which are those of the uncompiled model, in proportion" if as_compiled else ""
    return {
        "schema": "ddpsim.model-profile/1",
        "source": f"{title}; medians of {len(samples.backward_s)} iterations; cost of the gradient "
        f"hooks, {format_duration(hook_s)} each, taken off the ready times{until_ready}",
        **as_compiled,
        "batch_per_rank": batch,
        "forward_s": forward_s,
        "backward_s": backward_s,
        **_later(samples, forward_s, backward_s),
        "optimizer_s": optimizer_s,
        "iterations_s": [[iteration_s] for iteration_s in iterations_s],
        **_with_ddp(samples, median(iterations_s)),
        "ready_origin": "backward_start",
        "spread": {
            name: _quartiles(getattr(samples, name))
            for name in ("forward_s", "backward_s", "hooked_backward_s", "optimizer_s")
        },
        "hook_s": hook_s,
        "never_ready": [name for name, _ in named if name not in ready_s],
        "parameters": [
            {
                "name": name,
                "numel": parameter.numel(),
                "dtype": dtype_name(name, parameter),
                "ready_s": ready_s.get(name),
                "ready_quartiles_s": _quartiles([s for s, _ in samples.ready_s.get(name, [])]),
                "ddp_hook_s": samples.ddp_hook_s.get(name),
                "sparse": name in samples.sparse,
            }
            for name, parameter in named
        ],
        "buffers": [
            {"dtype": str(buffer.dtype).removeprefix("torch."), "numel": buffer.numel()}
            for buffer in broadcast_buffers(training.model)
            if buffer.numel()
        ],
    }


def _later(samples: Samples, forward_s: float, backward_s: float) -> Document:
    if not samples.later:
        return {}
    forward, backward = (median(ratios) for ratios in zip(*samples.later, strict=True))
    return dict(zip(LATER, (forward_s * forward, backward_s * backward), strict=True))


def _with_ddp(samples: Samples, iteration_s: float) -> Document:
    """Where DDP's own work can be told from noise."""
    if len(samples.with_ddp) < 2:
        return {}
    ratio = median_time(samples.with_ddp)
    if ratio.value - 1 <= SIGNIFICANT * (ratio.stderr or 0.0):
        return {}
    return {"with_ddp_s": ratio.value * iteration_s}


def ready_times(samples: Samples, hook_s: float, backward_s: float) -> dict[str, float]:
    """Ready times: median fractions of their own backward, without the hooks, times `backward_s`.

    Medians taken one by one may swap two gradients of one instant, and their order decides the
    buckets: they stand in the order of the last iteration, each at least a tick after the other.
    """
    ready, latest = {}, 0.0
    hooks_s = len(samples.order) * hook_s
    for before, name in enumerate(samples.order):
        fraction = median(
            (ready_s - before * hook_s) / max(whole_s - hooks_s, _TICK_S)
            for ready_s, whole_s in samples.ready_s[name]
        )
        latest = ready[name] = max(min(fraction, 1.0) * backward_s, latest + _TICK_S)
    return ready


def _quartiles(values: Sequence[float]) -> list[float]:
    """First and third quartile of samples; nothing of none."""
    if not values:
        return []
    tensor = torch.tensor(values, dtype=torch.float64)
    return [float(torch.quantile(tensor, q)) for q in (0.25, 0.75)]


def _memory(training: Training, device: torch.device) -> Document:
    """The most so far, and on a GPU what of it is neither reduced, nor state, nor a buffer."""
    if device.type != "cuda":
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of either system
        of = "the whole process, largest resident set so far"
        return {"peak_memory": {"bytes": largest * unit, "of": of}}
    peak = torch.cuda.max_memory_allocated(device)
    reduced = list(reduced_parameters(training.model).values())
    states = [
        value
        for parameter in reduced
        for value in training.optimizer.state[parameter].values()
        if isinstance(value, Tensor) and value.dim()  # step counts are on the CPU
    ]
    gradients = reduced
    kept = [*reduced, *gradients, *states, *broadcast_buffers(training.model)]
    rest = peak - sum(tensor.nbytes for tensor in kept)
    return {
        "peak_memory": {"bytes": peak, "of": "tensors on the device"},
        "activation_bytes": max(0, rest),
    }


def _title(reference: str, batch: int, device: torch.device, threads: int) -> str:
    where = _device_name(device)
    if device.type == "cpu":
        where += f", {counted(threads, 'thread')}"
    return f"{reference} with batch {batch} on {where}, torch {torch.__version__}, no communication"


def _device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    run_rank(lambda options: profile_in_job(ProfileOptions.model_validate_json(options)))
