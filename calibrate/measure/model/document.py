"""Samples of a model as the document of its profile, which another device may take over."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from calibrate.capture.capture import parameter_columns, tensor_columns
from calibrate.fit.estimates import SIGNIFICANT, adding_up, median_time
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.samples import Samples
from calibrate.measure.model.training import (
    Training,
    broadcast_buffers,
    is_compiled,
    reduced_parameters,
)
from ddpsim.scenario.catalog import are_other_devices, device_table, resolve
from ddpsim.scenario.options.model_file import LATER, MODEL_SCHEMA, read_known
from ddpsim.units import format_duration
from ddpsim.wording import counted

Document = dict[str, Any]

_TICK_S = 1e-9  # keeps the order of gradients whose medians fall on one instant


def model_document(reference: str, training: Training, samples: Samples) -> Document:
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
        there = read_known(str(path), path).document
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


def measured_part(
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
        "never_ready": [name for name in named if name not in ready_s],
        "ready_s": [ready_s.get(name) for name in named],
        "ready_quartiles_s": [
            _quartiles([s for s, _ in samples.ready_s.get(name, [])]) for name in named
        ],
        "ddp_hook_s": [samples.ddp_hook_s.get(name) for name in named],
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


def title_of(reference: str, batch: int, device: torch.device, threads: int) -> str:
    """What was measured, in words."""
    where = device_name(device)
    if device.type == "cpu":
        where += f", {counted(threads, 'thread')}"
    return f"{reference} with batch {batch} on {where}, torch {torch.__version__}, no communication"


def device_name(device: torch.device) -> str:
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


def check_scaled_from(measured_on: str | None, old: str) -> None:
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
    check_scaled_from(measured.get("device"), old)
    compute = _matmul_rate(old) / _matmul_rate(new)
    memory = _memory_rate(old) / _memory_rate(new)
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


def _matmul_rate(device: str) -> float:
    table = device_table(device)
    return float(table["peak_flops"]["fp32"] * table["matmul_efficiency"]["fp32"])


def _memory_rate(device: str) -> float:
    table = device_table(device)
    return float(table["memory_bandwidth_bytes_per_s"] * table["memory_efficiency"])
