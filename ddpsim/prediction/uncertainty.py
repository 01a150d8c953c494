"""How wrong the terms of a step may be: compute, host, network, loader, interference."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.prediction.interval import (
    COMPILED,
    COMPILED_HOST,
    COMPUTE,
    CPU_HOOKS,
    DATA,
    FLOAT8,
    GPU_HOOKS,
    HOST,
    MANY_MODELS,
    MANY_STEPS,
    MEASURED_DEVICE,
    MEASURED_HOST,
    QUEUED_MOST_S,
    QUEUED_USUAL_S,
    RECURRENT,
    ROOFLINE,
    SHORT_MESSAGE_BYTES,
    STATED_HOST,
    UNEQUAL_RANKS,
    UNKNOWN_DEVICE,
    RankVariation,
    lengthening,
    ranks_differ,
    uncalibrated_interference,
)
from ddpsim.prediction.job import Job
from ddpsim.provenance import Provenance, Uncertainty
from ddpsim.result.model import IntervalSource
from ddpsim.scenario import catalog
from ddpsim.strategies.zero.zero_redundancy import UPDATED_PARAMETER
from ddpsim.units import format_duration
from ddpsim.workload.arithmetic import arithmetic_of
from ddpsim.workload.zoo.table import is_convolutional, is_recurrent

_OF_COPIES = "how copies vary from record to record of the profile"


def uncertainties(job: Job) -> dict[str, Uncertainty]:
    """How wrong the factors of `Job.step_s` may be, by name, without those that are certain."""
    copies = job.overheads and job.overheads.sigma
    terms = {
        "compute": _of_compute(job),
        "host": _of_host(job),
        "network": job.network.uncertainty,
        "data": DATA if job.program.loader else None,
        "interference": job.network.interference,
        "interference_exponent": _of_exponent(job),
        "overheads": Uncertainty(copies, _OF_COPIES) if copies else None,
    }
    return {term: uncertainty for term, uncertainty in terms.items() if uncertainty}


def lengthenings(job: Job, mean_s: float, hidden_s: float) -> Iterator[IntervalSource]:
    """What can only lengthen a step of `mean_s`, with `hidden_s` of communication under compute."""
    if hidden_s > 0 and job.network.interference is None:
        yield uncalibrated_interference(hidden_s)
    if hidden_s > 0 and job.scenario.ddp.zero.may_hide_nothing:
        basis = "profiles of jobs before DeepSpeed 0.19 show none (NVlabs/alpamayo-recipes#24)"
        yield lengthening("DeepSpeed's overlap", hidden_s, hidden_s, basis)
    if short := _queued_short_messages(job):
        most = format_duration(QUEUED_MOST_S)
        basis = f"{short:.0f} short messages wait in a queue: up to {most} longer each"
        yield lengthening("gloo's queue", short * QUEUED_USUAL_S, short * QUEUED_MOST_S, basis)
    if variation := rank_variation(job):
        yield ranks_differ(variation, mean_s)


def _queued_short_messages(job: Job) -> float:
    """How many short messages, of updated parameters, gloo broadcasts from a queue in a step."""
    if job.scenario.ddp.backend != "gloo":
        return 0.0
    period = job.program.steady_period
    sent = [each for step in period for each in step.sent if each.cause == UPDATED_PARAMETER]
    return sum(each.size_bytes < SHORT_MESSAGE_BYTES for each in sent) / len(period)


def rank_variation(job: Job) -> RankVariation | None:
    """How far ranks taken as equal may differ: less where no images are decoded.

    A model that is not of the zoo may read images.
    """
    if not job.ranks_taken_as_equal:
        return None
    model = job.scenario.workload.model
    size = catalog.model_table(model)["size"] if model else None
    return UNEQUAL_RANKS["other" if size and size["key"] == "seq_len" else "images"]


def _of_compute(job: Job) -> Uncertainty:
    model = job.model
    if job.waits_for_other_device:
        return COMPUTE["other device"]
    if model.basis == "roofline":
        return _of_roofline(job)
    if model.sigma is None:
        return COMPUTE[model.basis]
    return Uncertainty(model.sigma, "the standard error that workload.profile states")


def _of_roofline(job: Job) -> Uncertainty:
    """Uncertainty of an estimate, by the kind of model and the steps measured on its device."""
    workload, device = job.scenario.workload, job.scenario.cluster.device
    table = catalog.model_table(workload.model) if workload.model else None
    if table and is_recurrent(table):
        return RECURRENT
    if workload.float8:
        return FLOAT8
    arithmetic, convolves = arithmetic_of(workload.precision, device), False
    rate = arithmetic.rate
    if table and is_convolutional(table):
        rate, convolves = arithmetic.convolution_rate(device), True
    if device.measured and device.efficiency_trust(rate) == "measured":
        uncertainty = Uncertainty(device.measured.sigma, MEASURED_DEVICE)
    elif rate not in device.published_steps:
        return UNKNOWN_DEVICE
    elif device.published_steps[rate] >= MANY_STEPS:
        uncertainty = MANY_MODELS
    else:
        uncertainty = ROOFLINE["convolutional" if convolves else "attention"]
    return COMPILED if job.model.is_compiled else uncertainty


def _of_host(job: Job) -> Uncertainty | None:
    """Uncertainty of launches and of long hooks, where a step may come to wait for them."""
    on_cpu = job.scenario.cluster.device.kind == "cpu"
    has_units, counts = job.scenario.ddp.shards_model, job.scenario.ddp.zero.counts_in_hooks
    if on_cpu:
        return CPU_HOOKS if has_units else None
    estimated = job.model.basis == "roofline"
    if not estimated and not counts and not has_units:
        return None
    uncertainty = HOST if counts else _of_launches(job) if estimated else GPU_HOOKS
    if has_units:
        uncertainty = max(uncertainty, GPU_HOOKS, key=lambda each: each.sigma)
    most = uncertainty.factor
    if most * job.host_share <= 1:
        return None
    slow_host_s, usual_s = job.steps_s([{"host": most}, {}])
    return uncertainty if slow_host_s > usual_s else None


def _of_launches(job: Job) -> Uncertainty:
    compiled = job.model.is_compiled
    trust = job.scenario.cluster.device.launching_trust(compiled=compiled)
    if trust in ("measured", "stated"):
        return MEASURED_HOST if trust == "measured" else STATED_HOST
    return COMPILED_HOST if compiled else HOST


_OF_HOSTS = ", the median of published hosts of such GPUs (docs/validation.md, section 3)"


def host_provenance(job: Job) -> Iterator[Provenance]:
    """The host time that is assumed, where a step may come to wait for the host."""
    device, compiled = job.scenario.cluster.device, job.model.is_compiled
    if job.model.basis != "roofline" or device.kind == "cpu" or not _of_host(job):
        return
    launch, trust = format_duration(device.launch_s), device.launching_trust(compiled=compiled)
    both = format_duration(device.launch_s + device.operator_s)
    origin = _OF_HOSTS if trust == "published" else ""
    eager = f"{both} an operator of the model{origin}, {launch} of them a launch"
    yield Provenance("host time", f"{launch} a kernel" if compiled else eager, trust)


def _of_exponent(job: Job) -> Uncertainty | None:
    exponent = job.model.interference_exponent
    if job.network.interference is None or not (exponent and exponent.value and exponent.stderr):
        return None
    sigma = min(1.0, exponent.stderr / exponent.value)
    return Uncertainty(sigma, "the standard error in workload.profile")
