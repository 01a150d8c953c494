"""Scenario to Model: from the zoo or from files, anchored to the stated time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpsim.errors import InputError, blamed_on
from ddpsim.provenance import Provenance
from ddpsim.scenario import catalog
from ddpsim.scenario.options.model_file import read_model_file
from ddpsim.scenario.quantity import SourceFile
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.workload import StepTime, Workload
from ddpsim.units import format_duration
from ddpsim.wording import counted
from ddpsim.workload.model import Model, scale, total_s
from ddpsim.workload.roofline import zoo_model

if TYPE_CHECKING:
    from ddpsim.importers.kineto.ranks import KinetoTrace

_FAR = 5.0  # times the estimate: no published step is so far, with errors of at most 75 %


def build_model(scenario: Scenario) -> Model:
    """The model of a scenario, with its times, of any buckets; raises InputError.

    A compiled one's gradients are as if it were not (`ddpsim.strategies.ddp.compiled_graphs`).
    """
    source = _source_model(scenario)
    model = _anchored(source, scenario.workload.step_time)
    if model.unused and not scenario.may_leave_unused:
        raise InputError(
            "ddp.find_unused_parameters",
            f"{counted(len(model.unused), 'parameter')} without a gradient "
            f"(first: {model.parameters[model.unused[0]].name}): DDP would stop in its second "
            f"iteration; {_remedies(scenario)}",
        )
    if not scenario.workload.trace or scenario.workload.step_time:  # a trace says what it took
        model = _within_host_reach(model)
    model = replace(model, is_compiled=model.is_compiled or bool(scenario.workload.compile))
    if scenario.workload.sync_batch_norm:
        _check_batch_norms(scenario.workload, model)
    warnings = tuple(_warnings(source, model, scenario))
    return replace(model.named(), warnings=(*model.warnings, *warnings))


def _remedies(scenario: Scenario) -> str:
    """What to write where some parameters never get a gradient."""
    finds = "set find_unused_parameters: true"
    if scenario.ddp.mixed_precision:  # its hook casts a gradient of each
        remedies = [f"drop ddp.mixed_precision and {finds}"]
    else:
        remedies = [finds, "static_graph: true if no iteration differs"]
    if scenario.workload.model is not None and not scenario.workload.trace:
        remedies.append("workload.frozen: [their modules] if they are not trained")
    return ", or ".join(remedies)


def _check_batch_norms(workload: Workload, model: Model) -> None:
    """Raise InputError where there are none, or where they would split a compiled graph."""
    if model.is_compiled:
        reason = "is not modelled for a compiled model; drop one of the two"
    elif model.batch_norms:
        return
    elif workload.parameters:
        reason = "a parameter list tells no batch norms; give a zoo model, or a profile"
    elif workload.profile:
        reason = (
            "the profile's buffers hold no batch norm (two of C floats, then an int64 count; a "
            "weight and a bias of C elements); drop it, or profile the model with its batch norms"
        )
    else:
        reason = f"{workload.model} has no batch norm; drop it"
    raise InputError("workload.sync_batch_norm", reason)


def _casts_outputs(scenario: Scenario) -> bool:
    ddp = scenario.ddp
    return ddp.is_fully_sharded and ddp.sharding.mixed_precision.output is not None


def _warnings(source: Model, model: Model, scenario: Scenario) -> Iterator[str]:
    """What is far from its estimate or priced as something else; a table alone tells of outputs.

    Source on sparse gradients: torch ProcessGroupNCCL.cpp (allreduce_sparse raises) and
    ProcessGroupGloo.cpp (AsyncSparseAllreduceWork gathers every rank's indices and values).
    """
    if scenario.workload.step_time and scenario.cluster.device.kind == "gpu":
        yield from _far_from_estimate(source, model)
    if _casts_outputs(scenario) and not model.forward_outputs:
        yield (
            "the casts of fully_shard's mixed_precision.output are not priced: how large outputs "
            "are is known of the zoo's models alone"
        )
    real = {
        "nccl": "torch refuses sparse tensors there (use sparse=False)",
        "gloo": "torch gathers all ranks' indices and values instead",
    }
    if sparse := [parameter.name for parameter in model.parameters if parameter.sparse]:
        backend = scenario.ddp.backend
        yield (
            f"sparse gradients ({len(sparse)}; first: {sparse[0]}) are priced as a dense "
            f"all-reduce of the whole parameter; with {backend} {real[backend]}"
        )


def _source_model(scenario: Scenario) -> Model:
    workload, device = scenario.workload, scenario.cluster.device
    if workload.trace:
        return _traced(scenario, workload.trace)
    if workload.model is not None:
        table, ddp = catalog.model_table(workload.model), scenario.ddp
        estimated = zoo_model(
            *(table, workload, device),
            half_weights=ddp.gathers_half,
            knows_outputs=_casts_outputs(scenario),
            gathers_frozen=ddp.shards_model,
        )
        if workload.model.endswith(".json"):
            return _with_measured(scenario, estimated, table)
        return estimated
    from ddpsim.importers.profiles.model import read_parameters, read_profile  # noqa: PLC0415 -- the zoo does without
    from ddpsim.workload.measured import listed_model, profiled_model  # noqa: PLC0415

    if workload.profile:
        with blamed_on("workload.profile"):
            return profiled_model(read_profile(workload.profile), workload, device)
    if workload.parameters:
        with blamed_on("workload.parameters"):
            return listed_model(read_parameters(workload.parameters), workload, device)
    raise ValueError("this workload names no model")


def _with_measured(scenario: Scenario, estimated: Model, table: dict[str, Any]) -> Model:
    """A captured model with the times that were measured of it, if its file has some."""
    path = Path(scenario.workload.model or "")
    document = read_model_file(str(path), path)
    if document.measured is None:
        return estimated
    from ddpsim.importers.profiles.model import measured_profile  # noqa: PLC0415 -- few are measured
    from ddpsim.workload.measured import remeasured  # noqa: PLC0415

    return remeasured(estimated, measured_profile(path.name, document), table, scenario)


def _traced(scenario: Scenario, trace: SourceFile) -> Model:
    """The times of a trace; sizes and names are those of the model or list beside it, if any."""
    from ddpsim.importers.kineto.ranks import read_rank_traces  # noqa: PLC0415 -- few name one
    from ddpsim.workload.traced import of_ranks, traced_model  # noqa: PLC0415

    workload, device = scenario.workload, scenario.cluster.device
    with blamed_on("workload.trace"):
        ranks = read_rank_traces(trace)
        model = known_model(scenario, ranks.typical)
        return of_ranks(ranks, traced_model(ranks.typical, model, workload, device))


def known_model(scenario: Scenario, trace: KinetoTrace) -> Model:
    """What is known of a traced model without its times; raises InputError, ImportFailedError."""
    from ddpsim.workload.traced import bare_model  # noqa: PLC0415 -- few scenarios name a trace

    if scenario.workload.model or scenario.workload.parameters:
        return _source_model(scenario.having("workload", trace=None))
    return bare_model(trace, scenario.cluster.device)


def _anchored(model: Model, stated: StepTime | None) -> Model:
    """The model with its times scaled to what was stated, part by part or as a whole."""
    if stated is None:
        return model
    forward_s, backward_s, optimizer_s = _targets(model, stated)
    scaled = stated.total_s is not None
    how = "its split by the estimated ratio" if scaled else "with its split"
    source = Provenance("workload.step_time", f"stated in the scenario, {how}", "stated")
    # estimated operators would tell whether the host or the device set a measured step's pace
    host = 0.0 if model.basis in ("roofline", "shape") else 1.0
    return replace(
        model,
        forward=scale(model.forward, forward_s / total_s(model.forward), host),
        backward=scale(model.backward, backward_s / total_s(model.backward), host),
        optimizer=scale((model.optimizer,), 1, host)[0]._replace(device_s=optimizer_s),
        provenance=(*(p for p in model.provenance if not p.input.startswith("compute")), source),
        basis="measured",
        sigma=None,
        with_ddp_s=stated.with_ddp_s,
    )


def _far_from_estimate(source: Model, anchored: Model) -> Iterator[str]:
    """Warn of a stated step of another order: mostly one of other units, batches or GPUs."""
    if source.basis != "roofline":
        return
    device_s, stated_s = _device_s(source), _device_s(anchored)
    longest_s = max(device_s, source.host_s)
    if stated_s < device_s / _FAR:
        times = f"{device_s / stated_s:.3g} times"
        words = f"{times} as fast as the estimate, {format_duration(device_s)}"
    elif stated_s > _FAR * longest_s:
        words = f"{stated_s / longest_s:.3g} times the estimate, {format_duration(longest_s)}"
    else:
        return
    yield (
        f"workload.step_time is {words}: is it one micro-batch of batch_per_rank samples on one "
        "such device, in this precision, without DDP?"
    )


def _device_s(model: Model) -> float:
    return total_s((*model.forward, *model.backward, model.optimizer))


def _targets(model: Model, stated: StepTime) -> tuple[float, float, float]:
    """Seconds that forward, backward and optimizer shall take."""
    forward_s, backward_s = total_s(model.forward), total_s(model.backward)
    optimizer_s = model.optimizer.device_s
    if stated.forward_s is not None and stated.backward_s is not None:
        given_s = stated.optimizer_s
        return stated.forward_s, stated.backward_s, optimizer_s if given_s is None else given_s
    whole_s = float(stated.total_s or 0)
    if stated.optimizer_s is not None:
        optimizer_s = stated.optimizer_s
    elif model.basis != "shape":
        optimizer_s *= whole_s / (forward_s + backward_s + optimizer_s)
    rest_s = whole_s - optimizer_s
    if rest_s <= 0:
        raise InputError(
            "workload.step_time",
            f"{whole_s:g} s leaves nothing beside the optimizer's {optimizer_s:g} s",
        )
    share = rest_s / (forward_s + backward_s)
    return forward_s * share, backward_s * share, optimizer_s


def _within_host_reach(model: Model) -> Model:
    """A step that was measured was also launched in that time: launches cannot take longer."""
    works = (*model.forward, *model.backward, model.optimizer)
    launched_s = model.host_s
    if model.basis != "measured" or launched_s <= total_s(works):
        return model
    return model.launched(total_s(works) / launched_s)
