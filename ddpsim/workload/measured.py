"""Models whose times were measured, or that are known by their parameters alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ddpsim.errors import InputError, shown
from ddpsim.importers.profiles.model import ModelProfile, ProfiledParameter
from ddpsim.provenance import Provenance
from ddpsim.scenario.catalog import are_other_devices
from ddpsim.scenario.device import Device
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.workload import Workload
from ddpsim.workload.model import BatchNorm, Buffer, Model, Parameter, Work, scale, total_s
from ddpsim.workload.optimizer import optimizer_work


def profiled_model(profile: ModelProfile, workload: Workload, device: Device) -> Model:
    """A model with measured gradient-ready times; raises InputError where it does not fit."""
    _check_batch(profile, workload)
    listed = profile.parameters if profile.in_registration_order else profile.parameters[::-1]
    parameters = _parameters(listed, workload)
    ready_order = _ready_order(listed)
    estimated = optimizer_work(workload.optimizer, [parameters[i] for i in ready_order], device)
    backward = _backward(profile, workload, [listed[i].ready_s or 0.0 for i in ready_order])
    forward_s = _forward_s(profile, workload, sum(work.device_s for work in backward))
    measured_s = profile.optimizer_s
    synced = workload.sync_batch_norm
    norms = profiled_batch_norms(profile, parameters, ready_order) if synced else ()
    return Model(
        parameters=parameters,
        ready_order=ready_order,
        buffers=tuple(Buffer(dtype, numel) for dtype, numel in profile.buffers),
        forward=forward_rows(forward_s, backward) if norms else (Work(forward_s),),
        backward=backward,
        optimizer=estimated if measured_s is None else Work(measured_s),
        launch_s=device.launch_s,
        activation_bytes=_activation_bytes(profile, workload),
        provenance=(_provenance("workload.profile", profile),),
        warnings=tuple(_warnings(profile, workload, device)),
        batch_norms=norms,
        **_of_step(profile, workload),
    )


def _of_step(profile: ModelProfile, workload: Workload) -> dict[str, Any]:
    """What was measured of the whole step, by the names that a model has for it."""
    is_scaled = profile.scaled_to is not None
    return {
        "basis": "scaled" if is_scaled else "measured",
        "iterations_s": profile.iterations_s,
        "later": _later(profile, workload),
        "sigma": None if is_scaled else profile.sigma,
        "with_ddp_s": None if is_scaled else profile.with_ddp_s,
        "interference_exponent": None if is_scaled else profile.interference_exponent,
        "is_compiled": profile.compiled,
    }


def remeasured(
    estimated: Model, profile: ModelProfile, table: dict[str, Any], scenario: Scenario
) -> Model:
    """A captured model with the times that were measured of it, where they are of this step.

    The forward's rows share the measured time as they share the estimate.
    """
    workload = scenario.workload
    if other := _other_step(profile, table, scenario):
        word = f"{profile.source}: its measured part is of a step {other}, so times are estimated"
        return replace(estimated, warnings=(*estimated.warnings, word))
    places = {parameter.name: place for place, parameter in enumerate(estimated.parameters)}
    listed = profile.parameters
    ready = _ready_order(listed)
    names = [listed[i].name for i in ready]
    owners = [name.rpartition(".")[0] for name in names]
    hooks = {parameter.name: parameter.ddp_hook_s for parameter in listed}
    forward_s = _forward_s(profile, workload, 0.0) / total_s(estimated.forward)
    same_optimizer = profile.optimizer in (None, workload.optimizer.name)
    kept = (p for p in estimated.provenance if not p.input.startswith("compute"))
    activation_bytes = _activation_bytes(profile, workload)
    return replace(
        estimated,
        parameters=tuple(p._replace(ddp_hook_s=hooks.get(p.name)) for p in estimated.parameters),
        ready_order=tuple(places[name] for name in names),
        forward=scale(estimated.forward, forward_s, 0.0),
        backward=_backward(profile, workload, [listed[i].ready_s or 0.0 for i in ready]),
        optimizer=Work(profile.optimizer_s or 0.0) if same_optimizer else estimated.optimizer,
        activation_bytes=estimated.activation_bytes
        if activation_bytes is None
        else activation_bytes,
        provenance=(*kept, _provenance("compute time", profile)),
        warnings=(*estimated.warnings, *(f"{profile.source}: {w}" for w in profile.warnings)),
        batch_norms=tuple(
            norm._replace(backward=owners.index(norm.name))
            for norm in estimated.batch_norms
            if norm.name in owners
        ),
        **_of_step(profile, workload),
    )


def _other_step(profile: ModelProfile, table: dict[str, Any], scenario: Scenario) -> str:
    """What makes the measured step another than the one asked for, in words; empty: nothing."""
    workload = scenario.workload
    of, batch = profile.scaled_to or profile.device, profile.batch_per_rank
    if are_other_devices(of, scenario.cluster.device.name):
        return f"on {of}"
    if batch != workload.batch_per_rank:
        return f"of batch {batch}"
    key = table["size"]["key"] if table["size"] else ""
    size = getattr(profile, key, None)
    if size is not None and size != (getattr(workload, key) or table["size"]["default"]):
        return f"of {key} {size}"
    if workload.precision != "fp32" or scenario.ddp.gathers_half:
        return "in the precision of its own code (fp32 here)"
    if workload.compile != profile.compiled:
        return "with torch.compile" if profile.compiled else "without torch.compile"
    keys = ("checkpointing", "float8", "attention", "memory_format", "frozen", "lora")
    return next(
        (f"without workload.{key}" for key in keys if getattr(workload, key) not in (None, ())), ""
    )


def listed_model(profile: ModelProfile, workload: Workload, device: Device) -> Model:
    """A model known by its parameters: backward time is spread by element count (assumed)."""
    parameters = _parameters(profile.parameters, workload)
    ready_order = _usual_ready_order(profile.parameters)
    elements = sum(parameter.numel for parameter in parameters)
    backward = [Work(2 * parameters[i].numel / elements) for i in ready_order]
    return Model(
        parameters=parameters,
        ready_order=ready_order,
        buffers=(),
        forward=(Work(1.0),),
        backward=(*backward, Work(0.0)),
        optimizer=optimizer_work(workload.optimizer, parameters, device),
        launch_s=device.launch_s,
        activation_bytes=None,
        provenance=(
            Provenance("workload.parameters", profile.source, "stated"),
            Provenance(
                "layer times",
                "backward time spread over the parameters by element count, forward half of it; "
                "ready order the reverse of the registration order",
                "assumed",
            ),
        ),
        basis="shape",
    )


def _warnings(profile: ModelProfile, workload: Workload, device: Device) -> Iterator[str]:
    yield from (f"{profile.source}: {warning}" for warning in profile.warnings)
    if not profile.in_registration_order:
        yield _no_registration_order(profile)
    of = profile.scaled_to or profile.device
    if are_other_devices(of, device.name):
        done = "scaled to" if profile.scaled_to else "measured on"
        yield (
            f"{profile.source} was {done} {of}, and its times are taken for {device.name}'s: "
            "measure there, or estimate them (calibrate profile --scale FROM:TO)"
        )
    if workload.compile and not profile.compiled and not workload.step_time:
        yield (
            f"workload.compile changes no time of {profile.source}, only which gradients come at "
            "once: profile the compiled model, or give step_time of it"
        )
    if workload.precision.startswith("amp-"):
        yield (
            f"workload.precision {workload.precision} changes no time of {profile.source}: "
            "autocast belongs into the model that is profiled; drop it here"
        )
    others = sorted({p.dtype for p in profile.parameters} - {"bfloat16"})
    if workload.precision == "bf16" and others and not workload.step_time:
        yield (
            "workload.precision bf16: the gradients are taken as bfloat16, but the times are those "
            f"of {profile.source}, whose parameters are {', '.join(others)}; profile the model in "
            "bfloat16, or drop it here"
        )
    if profile.optimizer and profile.optimizer != workload.optimizer.name:
        yield (
            f"the optimizer's time is that of {profile.optimizer}, with which {profile.source} was "
            f"measured, and not of {workload.optimizer.name}"
        )


def _provenance(key: str, profile: ModelProfile) -> Provenance:
    if profile.scaled_to is None:
        on = f", on {profile.device}" if profile.device and key == "compute time" else ""
        return Provenance(key, f"{profile.source}{on}", "measured")
    scaled_to = shown(profile.scaled_to)
    scaled = f"{profile.source}: measured on another device, scaled to {scaled_to}"
    return Provenance(key, scaled, "assumed")


def _check_batch(profile: ModelProfile, workload: Workload) -> None:
    measured = profile.batch_per_rank
    if measured is not None and measured != workload.batch_per_rank and not workload.step_time:
        raise InputError(
            "workload.batch_per_rank",
            f"{workload.batch_per_rank}, but {profile.source} was measured with {measured}; "
            "use that batch, measure anew, or give step_time for this one",
        )


def _activation_bytes(profile: ModelProfile, workload: Workload) -> int | None:
    """The measured activations, for the batch and the arithmetic that were measured alone."""
    recast = workload.precision == "bf16" and any(p.dtype != "bfloat16" for p in profile.parameters)
    as_measured = profile.batch_per_rank == workload.batch_per_rank and not recast
    return profile.activation_bytes if as_measured else None


def _parameters(listed: Sequence[ProfiledParameter], workload: Workload) -> tuple[Parameter, ...]:
    each = [Parameter(p.name, p.numel, p.dtype, p.sparse, p.ddp_hook_s, p.shape) for p in listed]
    if workload.precision == "bf16":  # other bytes than a hook was measured with
        return tuple(p._replace(dtype="bfloat16", ddp_hook_s=None) for p in each)
    return tuple(each)


def _ready_order(listed: Sequence[ProfiledParameter]) -> tuple[int, ...]:
    """Parameters by ready time; those of one instant in reverse registration order."""
    ready = [(p.ready_s, -i) for i, p in enumerate(listed) if p.ready_s is not None]
    return tuple(-negative for _, negative in sorted(ready))


def _backward(profile: ModelProfile, workload: Workload, ready_s: list[float]) -> tuple[Work, ...]:
    """Work before each gradient, and the tail; the origin says where the first one stands."""
    origin = profile.ready_origin or workload.ready_origin
    if origin is None:
        raise InputError(
            "workload.profile",
            f"{profile.source} does not say what ready_us counts from; "
            "give workload.ready_origin: first_gradient or backward_start",
        )
    stated_s = workload.step_time.backward_s if workload.step_time else None
    whole_s = profile.backward_s if profile.backward_s is not None else stated_s
    lead_s = 0.0
    if origin == "first_gradient" and whole_s is not None:
        lead_s = max(0.0, whole_s - ready_s[-1])
    times = [0.0, *(lead_s + ready for ready in ready_s)]
    tail_s = max(0.0, (whole_s or 0.0) - times[-1]) if origin == "backward_start" else 0.0
    return (*(Work(b - a) for a, b in pairwise(times)), Work(tail_s))


def _later(profile: ModelProfile, workload: Workload) -> tuple[float, float] | None:
    """How much longer later micro-batches take; only for the batch that was measured."""
    if profile.batch_per_rank not in (None, workload.batch_per_rank):
        return None
    if not (profile.forward_s and profile.backward_s):
        return None
    if not (profile.later_forward_s and profile.later_backward_s):
        return None
    forward = profile.later_forward_s / profile.forward_s
    return forward, profile.later_backward_s / profile.backward_s


def _forward_s(profile: ModelProfile, workload: Workload, backward_s: float) -> float:
    if profile.forward_s is not None:
        return profile.forward_s
    if workload.step_time is None:
        raise InputError(
            "workload.profile",
            f"{profile.source} holds no forward time; give workload.step_time as "
            "{forward: .., backward: ..}",
        )
    # half of the backward (assumed): scaled to step_time when the model is anchored
    return backward_s / 2


def _no_registration_order(profile: ModelProfile) -> str:
    return (
        f"{profile.source} lists no registration order: taken as the reverse of the backward "
        "order, which decides the buckets under find_unused_parameters alone"
    )


def _usual_ready_order(listed: Sequence[ProfiledParameter]) -> tuple[int, ...]:
    """Modules in reverse; in a layer with a matrix its bias comes first.

    Of a convolution, whose weights have more dimensions, it comes last (torch: derivatives.yaml).
    A module that holds more than a weight and a bias is several layers: all in reverse.
    """
    modules: dict[str, list[int]] = defaultdict(list)
    for i, parameter in enumerate(listed):
        modules[parameter.name.rpartition(".")[0]].append(i)
    order: list[int] = []
    for members in reversed(modules.values()):
        matrices = [i for i in members if listed[i].dimensions == 2]
        if len(members) > 2 or len(matrices) > 1:
            order += reversed(members)
        else:
            order += [i for i in members if i not in matrices] + matrices
    return tuple(order)


# --- batch norms of a profile, which names parameters and buffers' sizes, but no layers ----------

_FLOATS = ("float32", "float16", "bfloat16", "float64")


def profiled_batch_norms(
    profile: ModelProfile, parameters: Sequence[Parameter], ready_order: Sequence[int]
) -> tuple[BatchNorm, ...]:
    """In the order of registration, each found by its buffers and its parameters.

    A batch norm has a running mean and a running variance of C floats, then a count (nn/modules/
    batchnorm.py), and a weight and a bias of C elements. Rows are those of `forward_rows`.
    """
    ready = {index: row for row, index in enumerate(ready_order)}
    modules = iter(_with_weight_and_bias(parameters))
    norms: list[BatchNorm] = []
    for channels in _running_means(profile):
        for name, weight, bias in modules:
            if parameters[weight].numel == channels and {weight, bias} <= ready.keys():
                row = min(ready[weight], ready[bias])
                norms.append(BatchNorm(name, channels, len(ready_order) - row, row))
                break
    return tuple(norms)


def forward_rows(forward_s: float, backward: Sequence[Work]) -> tuple[Work, ...]:
    """A forward whose layers share its time as they share the backward's, in reverse (assumed)."""
    whole_s = total_s(backward)
    return tuple(Work(forward_s * work.device_s / whole_s) for work in reversed(backward))


def _running_means(profile: ModelProfile) -> Iterator[int]:
    """The channels of each run of two buffers of floats and a count."""
    buffers = profile.buffers
    for (mean, channels), (variance, others), (count, one) in zip(
        buffers, buffers[1:], buffers[2:], strict=False
    ):
        is_norm = mean in _FLOATS and variance == mean and channels == others
        if is_norm and (count, one) == ("int64", 1):
            yield channels


def _with_weight_and_bias(parameters: Sequence[Parameter]) -> Iterator[tuple[str, int, int]]:
    """Modules whose next parameters are a weight and a bias of as many elements."""
    for index, (weight, bias) in enumerate(pairwise(parameters)):
        module, _, kind = weight.name.rpartition(".")
        is_pair = kind == "weight" and bias.name == f"{module}.bias"
        if is_pair and weight.numel == bias.numel:
            yield module, index, index + 1
