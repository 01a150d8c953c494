"""`profile`: a model's times on one device with no communication, as part of its file.

Several ranks tell one thing more: how it fares beside all-reduces.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from calibrate.capture.capture import parameter_columns, render, tensor_columns
from calibrate.files import FileName, check_writable, rescued
from calibrate.fit.estimates import SIGNIFICANT, adding_up, median_time, profile_keys
from calibrate.measure.cluster.rounds import BesideAllReduces
from calibrate.measure.errors import MeasureError, StoppedError
from calibrate.measure.host.machine import keep_freed_memory
from calibrate.measure.model.samples import (
    WARMUPS,
    HookTimes,
    Samples,
    check_the_same_take_part,
    hook_cost_s,
    later_ratios,
    measure_iterations,
    step_s,
    under_ddp,
)
from calibrate.measure.model.training import (
    Training,
    batch_of,
    broadcast_buffers,
    compute_threads,
    is_compiled,
    not_modelled,
    prepare,
    problem_in_code,
    reduced_parameters,
    sizes_of,
    unused_in_words,
)
from calibrate.measure.ranks.job import Job, process_group, taking_part
from calibrate.measure.ranks.launch import run_rank
from calibrate.records.rounds import ModelOptions
from ddpsim.files import write_atomically
from ddpsim.importers.profiles.model import profile_of
from ddpsim.scenario.catalog import are_other_devices, device_table, resolve
from ddpsim.scenario.options.model_file import LATER, MODEL_SCHEMA, read_model_file
from ddpsim.units import format_duration
from ddpsim.wording import counted

_STEPS_A_PAIR = 3  # iterations for every step of two micro-batches
_LOGGED = 10  # DDP's first iterations wait for its log's events on a GPU (torch: logger.cpp)
_LENGTHENED = 9  # rounds in which queues of all-reduces grow to last as long as a backward
_FEWEST_ROUNDS = 6
_NO_EXPONENT = (
    "how much the model suffers beside all-reduces is not in this profile (interference_exponent), "
    "so usual layers stand for it: "
)
Document = dict[str, Any]
_TICK_S = 1e-9  # keeps the order of gradients whose medians fall on one instant


class ProfileOptions(ModelOptions):
    """What to profile, on one device or by the ranks of a job together."""

    output: FileName = Field(description="the profile, which the first rank writes")
    iterations: int = Field(30, ge=1)
    device: str = Field("auto", description="auto, cpu or cuda:N; ranks have their own")
    threads: int = Field(1, ge=1, description="of one CPU")
    scale: tuple[str, str] | None = Field(None, description="from one device preset to another")

    @property
    def kept(self) -> str:
        """What of the profile is in its file."""
        return f"All but how it fares beside all-reduces is in {self.output}, if it is there yet."


def profile(
    options: ProfileOptions, job: Job | None = None, keep: Callable[[Document], None] | None = None
) -> Document:
    """Measure the model that MODULE:FUNCTION makes, and return its profile, ready for JSON.

    Iterations with gradient hooks and without take turns: times of the parts come from those
    without; a ready time is a fraction of its own backward, less the hooks' cost, which is measured
    on a model of tiny parameters. Then steps of two micro-batches tell what the second one takes,
    and steps under DDP of one rank what DDP's own work takes; `warnings` says why where it cannot
    be measured. All ranks of a `job` measure at once, each on its own device, and then, once `keep`
    has what is known until then, how the backward fares beside their all-reduces.
    Raises MeasureError where the function or what it returns cannot be used.
    """
    reference, iterations = options.model, options.iterations
    where = job.device if job else device_of(options.device)
    threads = options.threads
    if threads > (cores := os.cpu_count() or threads):
        raise MeasureError(f"--threads {threads}: this machine has {counted(cores, 'core')}")
    with compute_threads(threads):
        size = batch_of(reference, options.batch)
        try:
            training = prepare(reference, size, where, options.optimizer, fused=options.fused)
            samples = measure_iterations(training, iterations)
        except torch.cuda.OutOfMemoryError:
            raise MeasureError(
                f"batch {size} of {reference} does not fit into the memory of {where}: "
                "give a smaller --batch"
            ) from None
        except Exception as error:
            if problem := problem_in_code(error):
                raise problem from error
            raise
        check_the_same_take_part(training, samples)
        memory = peak_memory(training, where)  # of usual steps: two micro-batches may take more
        samples.later = later_ratios(training, max(1, iterations // _STEPS_A_PAIR))
        warnings = [*not_modelled(training.model), *_try_ddp(training, samples, iterations)]
        name = _device_name(where)
        on = name if where.type == "cuda" else f"{name}, {counted(threads, 'thread')}"
        torchs = f"torch {torch.__version__}, no communication"
        title = f"{reference} with batch {size} on {on}, {torchs}"
        measured_with = {"device": name, "optimizer": options.optimizer}
        hook_s = hook_cost_s(where, samples)
        measured = _measured_part(training, samples, size, title, hook_s) | memory | measured_with
        measured |= sizes_of(reference) | {"warnings": warnings}
        document = _model_document(reference, training, samples) | {"measured": measured}
        if job is None or keep is None:
            return document
        keep(document)
        exponent, missing = _exponent(training, job, iterations)
        warnings += [_NO_EXPONENT + missing] if missing else []
        return document | {"measured": measured | exponent}


def profile_alone(options: ProfileOptions) -> Document:
    """Profile on one device and write the file; raises MeasureError as `profile` does."""
    try:
        keep_freed_memory()  # as a job's ranks do
        return _written(options, None)
    except KeyboardInterrupt:
        raise StoppedError("stopped. Nothing was kept") from None


def profile_in_job(options: ProfileOptions) -> Document:
    """Profile in the job of torchrun's variables: every rank calls this, rank 0 writes the file.

    Raises MeasureError as `profile` does, and where a peer is lost.
    """
    with taking_part(options) as job:
        return _written(options, job)


def _written(options: ProfileOptions, job: Job | None) -> Document:
    """Profile and write; what would be refused after the work is refused before it."""

    def scaled(document: Document) -> Document:
        return scale_profile(document, *options.scale) if options.scale else document

    def first_does(work: Callable[[], None]) -> None:
        job.first_does(work) if job else work()

    def keep(document: Document) -> None:
        first_does(lambda: write_profile(scaled(document), options.output))

    first_does(lambda: check_writable(options.output))
    if options.scale:
        device = job.device if job else device_of(options.device)
        _check_scaled_from(_device_name(device), options.scale[0])
    document = profile(options, job, keep)
    keep(document)
    return scaled(document)


def write_profile(document: Document, path: Path) -> None:
    """Write a profile whole that `run` reads, or leave the old one as it was.

    What was captured of the model stays in the file. Raises MeasureError where it cannot be
    written, ImportFailedError where it could not be read.
    """
    text = render(document) + "\n"
    profile_of(str(path), text)
    try:
        write_atomically(path, render(with_other_part(document, path)) + "\n")
    except (OSError, MeasureError) as error:
        wrong = (
            f"{path} cannot be written: {error.strerror}" if isinstance(error, OSError) else error
        )
        raise MeasureError(f"{wrong}. {rescued('model.json', text)}") from None


def device_of(name: str) -> torch.device:
    """The device of auto, cpu or cuda:N; raises MeasureError."""
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


def _try_ddp(training: Training, samples: Samples, steps: int) -> list[str]:
    """Measure steps under DDP; or say why there are none, which is no reason to lose the rest."""
    missing = "DDP's own work is not in this profile (with_ddp_s, ddp_hook_s)"
    if training.unused:
        idle = f"{unused_in_words(training)} got no gradient"
        return [f"{missing}: {idle}, which DDP takes with find_unused_parameters=True alone"]
    try:
        _measure_ddp(training, samples, steps)
    except Exception as error:  # noqa: BLE001 -- the user's function, DDP, or memory: all are told
        return [f"{missing}: {problem_in_code(error) or error}"]
    finally:
        training.optimizer.zero_grad()
    return []


def _measure_ddp(training: Training, samples: Samples, steps: int) -> None:
    """Steps under DDP of this process alone over bare ones; on a CPU its hooks too."""
    is_gpu = next(training.model.parameters()).is_cuda
    unsettled = WARMUPS + (_LOGGED if is_gpu else 0)
    with process_group("nccl" if is_gpu else "gloo"):
        wrapped = under_ddp(training)
        ratios = [step_s(wrapped) / step_s(training) for _ in range(unsettled + steps)]
        samples.with_ddp = ratios[unsettled:]
        if not is_gpu:
            hooks = HookTimes(training)
            for i in range(WARMUPS + steps):
                hooks.step(warm=i < WARMUPS)
            samples.ddp_hook_s = hooks.medians_s()


def _exponent(training: Training, job: Job, iterations: int) -> tuple[Document, str]:
    """The exponent of interference, from all ranks; or why it is not known, with what to do."""
    beside, lacking = _try_beside(training, job)
    if beside is None:
        return {}, lacking
    for i in range(_LENGTHENED + max(_FEWEST_ROUNDS, iterations)):
        beside.step(warm=i < _LENGTHENED)
    measured = beside.measured()
    if measured is None:
        outlasts = "its backward outlasts the longest queue of them; give a smaller --batch"
        return {}, outlasts if job.world_size > 1 else ""  # one rank has nobody to reduce with
    keys = profile_keys([measured])
    unknown = "it is not known to 0.1; give more --iterations, or ranks cores of their own"
    return keys, "" if keys else unknown


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


def _model_document(reference: str, training: Training, samples: Samples) -> Document:
    """The document of a model (schema `ddpsim.model/3`) without what was measured of it."""
    named = _measured(training)
    sparse = [place for place, name in enumerate(named) if name in samples.sparse]
    kept = set(map(id, broadcast_buffers(training.model)))
    buffers = {n: b for n, b in training.model.named_buffers() if id(b) in kept and b.numel()}
    return {
        "schema": MODEL_SCHEMA,
        "name": reference.rpartition(":")[2],
        "title": reference,
        "family": "own",
        "parameters": parameter_columns(training.model, named) | {"sparse": sparse},
        "buffers": tensor_columns(buffers),
    }


def with_other_part(document: Document, path: Path) -> Document:
    """Keep what a model's file has already: a capture for a measurement, or the other way round.

    Raises MeasureError where that is of another model.
    """
    try:
        there = read_model_file(str(path), path).document
    except ValueError:
        return document
    other = {part: there.get(part) for part in ("captured", "measured") if part not in document}
    if not any(other.values()):
        return document
    of_both = [[one["parameters"][key] for key in ("name", "shape")] for one in (document, there)]
    if of_both[0] != of_both[1]:
        raise MeasureError(
            f"{path} is of other parameters, and would lose what was {next(iter(other))}: name "
            "another file"
        )
    captured, measured = (there, document) if "captured" in other else (document, there)
    return captured | {"measured": measured["measured"]}


def _measured(training: Training) -> dict[str, nn.Parameter]:
    """Parameters that DDP reduces, of some elements each."""
    return {n: p for n, p in reduced_parameters(training.model).items() if p.numel()}


def _measured_part(
    training: Training, samples: Samples, batch: int, title: str, hook_s: float
) -> Document:
    """What was measured of a model: the "measured" of its document."""
    if not samples.order:
        raise MeasureError("no parameter ever gets a gradient: does the loss depend on the model?")
    columns = samples.forward_s, samples.backward_s, samples.optimizer_s
    iterations_s = [sum(parts) for parts in zip(*columns, strict=True)]
    forward_s, backward_s, optimizer_s = adding_up(map(median, columns), median(iterations_s))
    ready_s = ready_times(samples, hook_s, backward_s)
    named = _measured(training)
    as_compiled = {"compiled": True} if is_compiled(training.model) else {}
    until_ready = ", which are those of the uncompiled model, in proportion" if as_compiled else ""
    return {
        "source": f"{title}; medians of {len(samples.backward_s)} iterations; cost of the gradient "
        f"hooks, {format_duration(hook_s)} each, taken off the ready times{until_ready}",
        **as_compiled,
        "batch_per_rank": batch,
        "forward_s": forward_s,
        "backward_s": backward_s,
        **{  # nothing where two micro-batches do not fit
            key: seconds * median(ratios)
            for key, seconds, ratios in zip(
                LATER, (forward_s, backward_s), zip(*samples.later, strict=True), strict=False
            )
        },
        "optimizer_s": optimizer_s,
        "iterations_s": [[iteration_s] for iteration_s in iterations_s],
        **_with_ddp(samples, median(iterations_s)),
        "ready_origin": "backward_start",
        "spread": {
            name: _quartiles(getattr(samples, name))
            for name in ("forward_s", "backward_s", "hooked_backward_s", "optimizer_s")
        },
        "hook_s": hook_s,
        "never_ready": [name for name in named if name not in ready_s],
        "ready_s": [ready_s.get(name) for name in named],
        "ready_quartiles_s": [
            _quartiles([s for s, _ in samples.ready_s.get(name, [])]) for name in named
        ],
        "ddp_hook_s": [samples.ddp_hook_s.get(name) for name in named],
    }


def _with_ddp(samples: Samples, iteration_s: float) -> Document:
    """Keys of what DDP adds to a step; none where that cannot be told from noise."""
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
    return np.quantile(values, (0.25, 0.75)).tolist() if values else []


def peak_memory(training: Training, device: torch.device) -> Document:
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


def _device_name(device: torch.device) -> str:
    """The GPU's name, or cpu."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


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
    """Raise MeasureError where a profile was measured on another device than it is scaled from."""
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
    measured = document["measured"]
    _check_scaled_from(measured.get("device"), old)
    tables = device_table(old), device_table(new)
    rates = [(t["peak_flops"]["fp32"], t["matmul_efficiency"]["fp32"]) for t in tables]
    speeds = [(t["memory_bandwidth_bytes_per_s"], t["memory_efficiency"]) for t in tables]
    compute, memory = (math.prod(was) / math.prod(now) for was, now in (rates, speeds))
    by_memory = f" (by memory it would be {memory:.3g})"
    source = (
        f"ESTIMATE, not measured: {measured['source']}; scaled from {old} to {new}, forward and "
        f"backward x {compute:.3g}{by_memory}, optimizer x {memory:.3g}"
    )
    scaled = {
        "source": source,
        "scaled_to": new,
        "forward_s": measured["forward_s"] * compute,
        "backward_s": measured["backward_s"] * compute,
        "optimizer_s": measured["optimizer_s"] * memory,
        **{key: measured[key] * compute for key in LATER if key in measured},
        "with_ddp_s": None,  # copies scale by other rates than compute
        "interference_exponent": None,
        "ready_s": [ready_s and ready_s * compute for ready_s in measured["ready_s"]],
        "ddp_hook_s": None,
    }
    return document | {"measured": measured | scaled}


if __name__ == "__main__":
    run_rank(profile_in_job, ProfileOptions)
