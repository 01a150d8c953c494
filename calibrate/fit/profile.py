"""Records or logs in, a cluster profile out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from statistics import median
from typing import Any, Literal

from calibrate.fit.effects import fit_jitter, fit_overheads, overhead_warnings
from calibrate.fit.estimates import mean_time, median_time
from calibrate.fit.gloo import fit_gloo, fit_half, fit_rested, stall_warnings
from calibrate.fit.interference import fit_interference
from calibrate.fit.nccl import fit_nccl
from calibrate.fit.samples import Fit, FitError, Sample, measured, measured_sigma
from calibrate.fit.solve import ROBUST
from calibrate.records.record import COPIES_BACK, HALF, Kind, Measurement, Record
from calibrate.validate.steady_step import bare_compute_s, layer_s, times_the_least
from ddpsim.importers.all_reduce import AllReduceLog
from ddpsim.importers.measured import Operation
from ddpsim.importers.profiles.cluster import (
    MEASURED_OTHERS,
    ClusterProfile,
    GlooRing,
    Provenance,
)
from ddpsim.units import format_bytes
from ddpsim.wording import counted

NOT_STATED = "not stated in the logs"
_OTHER_PACE = 1.25  # records of one machine differed by up to 1.2; of two of one name by 1.34
_QUIET = 0.05  # of a log's two times of a size: other days differ by as much
_EACH_COUNTS = ("compute", "jitter")  # whose samples are divided by, or their logarithms taken

Backend = Literal["gloo", "nccl"]


def fit_all_reduce(
    samples: Sequence[Sample],
    backend: Backend,
    others: Mapping[Operation, Sequence[Sample]] | None = None,
    gpu: str | None = None,
) -> Fit:
    """A backend's all-reduce from measured times; raises FitError where they are too few.

    NCCL's takes reduce-scatters and all-gathers too (`others`), and the GPU's name where it is
    known. The order of the samples does not matter, and the same samples give the same fit.
    """
    if not samples:
        raise FitError("no all-reduce of two ranks or more was measured: there is nothing to fit")
    return fit_gloo(samples) if backend == "gloo" else fit_nccl(samples, others, gpu)


def fit_profile(
    records: Sequence[Record], name: str, sources: Sequence[str] = ()
) -> ClusterProfile:
    """The profile of the machine that these records were measured on; raises FitError.

    `sources` names the records, in messages and in the profile; by default they are counted.
    """
    sources = tuple(sources) or tuple(f"record {i + 1}" for i in range(len(records)))
    _check_alike(records, sources)
    for record, source in zip(records, sources, strict=True):
        _check_measurements(record, source)
    first = records[0].environment
    samples = samples_of_records(records)
    of_others = {each: samples_of_records(records, kind=each) for each in MEASURED_OTHERS}
    others: dict[str, Any] = {
        key: measured(of_others[operation]) for operation, key in MEASURED_OTHERS.items()
    }
    fit = _fitted(samples, first.backend, sources, of_others, first.device)
    law = fit.model
    if isinstance(law, GlooRing):
        burst, delay = fit_rested(records)
        figures = {
            "reduce_half_bytes_per_s": fit_half(law, samples_of_records(records, f"alone{HALF}")),
            "rested_burst_bytes": burst,
            "rested_delay_s": delay,
        }
        law = law.model_copy(update=figures)
    each = measured(samples)
    interference, interference_warnings = fit_interference(records, law, each)
    jitter, jitter_warnings = fit_jitter(records)
    return ClusterProfile(
        name=name,
        backend=first.backend,
        all_reduce=law,
        all_reduce_sigma=fit.sigma,
        correlated=fit.correlated,
        measured=each,
        **others,
        measured_sigma=measured_sigma(fit.model, samples),
        valid=fit.valid,
        interference=interference,
        overheads=fit_overheads(records),
        jitter=jitter,
        provenance=Provenance(
            created=max(record.environment.created for record in records),
            machine=first.machine,
            processor=next((p for r in records if (p := r.environment.processor)), ""),
            cores=min((n for r in records if (n := r.environment.cores)), default=None),
            software=f"torch {first.torch}, {first.backend} {first.library}",
            sources=sources,
            layer_s=layer_s(records),
        ),
        warnings=(
            *_setting_warnings(records, sources),
            *_pace_warnings(records, sources),
            *stall_warnings(records, sources),
            *fit.warnings,
            *interference_warnings,
            *overhead_warnings(records),
            *jitter_warnings,
        ),
    )


def fit_logs(
    logs: Sequence[AllReduceLog],
    name: str,
    *,
    others: Mapping[Operation, Sequence[AllReduceLog]] | None = None,
) -> ClusterProfile:
    """The profile of an NCCL cluster from logs of nccl-tests; raises FitError.

    Where a log's times in place and out of place lie further apart than the fit's residuals, they
    say how wrong the profile may be. Logs say no more of the machine than its GPUs' names, if that:
    one that all share is told, that they are of one and the same cluster is for the caller to know.
    """
    of_others = {
        key: (others or {}).get(operation, ()) for operation, key in MEASURED_OTHERS.items()
    }
    for each in (logs, *of_others.values()):
        _check_logs(each)
    both = (*logs, *chain(*of_others.values()))
    times: dict[str, Any] = {k: measured(samples_of_logs(each)) for k, each in of_others.items()}
    gpus = {gpu for log in both for gpu in log.gpus}
    samples = samples_of_logs(logs)
    sources = tuple(dict.fromkeys(log.source for log in both))
    spread = max((apart for log in logs if (apart := log.spread or 0.0) > _QUIET), default=0.0)
    gpu = next(iter(gpus)) if len(gpus) == 1 else None
    shards = {o: samples_of_logs(of_others[key]) for o, key in MEASURED_OTHERS.items()}
    fit = _fitted(samples, "nccl", sources, shards, gpu)
    # two times of one size, in place and out of place, are a measurement made twice
    twice, sigmas = {"repeated": spread} if spread else {}, measured_sigma(fit.model, samples)
    return ClusterProfile(
        name=name,
        backend="nccl",
        all_reduce=fit.model,
        all_reduce_sigma=max(fit.sigma, spread),
        correlated=fit.correlated,
        measured=measured(samples),
        **times,
        measured_sigma=tuple(each.model_copy(update=twice) for each in sigmas),
        valid=fit.valid,
        provenance=Provenance(
            created="not stated",
            machine=gpu or NOT_STATED,
            software=NOT_STATED,
            sources=sources,
        ),
        warnings=fit.warnings,
    )


def _fitted(
    samples: Sequence[Sample],
    backend: Backend,
    sources: Sequence[str],
    others: Mapping[Operation, Sequence[Sample]],
    gpu: str | None,
) -> Fit:
    """What `fit_all_reduce` finds, with the files named where it fails."""
    try:
        return fit_all_reduce(samples, backend, others, gpu)
    except FitError as error:
        raise FitError(f"{', '.join(sources)}: {error}") from None


def _check_logs(logs: Sequence[AllReduceLog]) -> None:
    for one, other in combinations(logs, 2):
        if one.gpus and other.gpus and one.gpus != other.gpus:
            raise FitError(
                f"{one.source} is of {', '.join(one.gpus)}, but {other.source} of "
                f"{', '.join(other.gpus)}: fit one profile for each cluster"
            )
        if (one.nodes, one.gpus_per_node, one.samples) == (
            other.nodes,
            other.gpus_per_node,
            other.samples,
        ):
            raise _given_twice(one.source, other.source)


def samples_of_logs(logs: Sequence[AllReduceLog]) -> list[Sample]:
    """Every row of two ranks or more."""
    return [
        Sample(log.nodes, log.gpus_per_node, size_bytes, time_s)
        for log in logs
        for size_bytes, time_s in log.samples
        if log.world_size > 1
    ]


def samples_of_records(
    records: Sequence[Record], variant: str = "alone", kind: Kind = "all_reduce"
) -> list[Sample]:
    """The mean time of every all-reduce (or another kind) of a variant, on two ranks or more.

    No median: small messages on a busy processor take one of two times, at once or with the
    scheduler's next tick, and a step with many of them takes the mean of both.
    With gloo, those inside a node are left out if there are others: they pass no link.
    """
    samples = [
        _sample(record, m)
        for record in records
        for m in record.measurements
        if (m.kind, m.variant) == (kind, variant)
        and m.nodes * m.gpus_per_node > 1
        and m.size_bytes > 0
    ]
    over_nodes = [sample for sample in samples if sample.nodes > 1]
    is_gloo = any(record.environment.backend == "gloo" for record in records)
    return over_nodes if is_gloo and over_nodes else samples


def _sample(record: Record, m: Measurement) -> Sample:
    """Its weight falls as the median's own error grows beyond what a fit calls an outlier."""
    time = median_time(m.samples_s)
    line_rate = record.layout.line_rate_bytes_per_s if m.nodes > 1 else None
    weight = 1 / (1 + ((time.stderr or 0.0) / time.value / ROBUST) ** 2)
    time_s = mean_time(m.samples_s)
    return Sample(m.nodes, m.gpus_per_node, m.size_bytes, time_s, line_rate, weight)


def _check_alike(records: Sequence[Record], sources: Sequence[str]) -> None:
    if not records:
        raise FitError("no record was given: there is nothing to fit")
    for (a, one), (b, another) in combinations(zip(sources, records, strict=True), 2):
        first, other = one.environment, another.environment
        if first.machine != other.machine:
            raise FitError(
                f"{a} was measured on {first.machine!r}, but {b} on {other.machine!r}: fit one "
                "profile for each machine"
            )
        if first.processor and other.processor and first.processor != other.processor:
            raise FitError(
                f"{a} and {b} were measured on machines that call themselves {first.machine!r}, "
                f"but one is {first.processor} and the other {other.processor}: fit one profile "
                "for each"
            )
        if first.backend != other.backend:
            raise FitError(
                f"{a} was measured with {first.backend} on {first.machine!r}, but {b} with "
                f"{other.backend} on {other.machine!r}: fit one profile for each backend"
            )
        if _hold_the_same(one, another):
            raise _given_twice(a, b)


def _check_measurements(record: Record, source: str) -> None:
    """Raise FitError where one of them is there twice, or took no time at all."""
    held = set()
    for m in record.measurements:
        if m.key in held:
            raise FitError(
                f"{source} holds {_named(m)} twice, which would count as measured twice: remove one"
            )
        held.add(m.key)
        if _took_no_time(m):
            raise FitError(
                f"{source}: {_named(m)} took 0 s, which nothing does: remove it from the record, "
                "and measure it again with --resume"
            )


def _took_no_time(m: Measurement) -> bool:
    """What DDP logs as copies back is a difference of two times, and may be none."""
    if m.variant == COPIES_BACK:
        return False
    middle = min if m.kind in _EACH_COUNTS else median
    return any(middle(times) <= 0 for times in (m.samples_s, *m.samples_by_rank_s) if times)


def _named(m: Measurement) -> str:
    """Kind, variant and what else tells it from others of the same record."""
    size = f" of {format_bytes(m.size_bytes)}" if m.size_bytes else ""
    parameters = f" of {counted(m.parameters, 'parameter')}" if m.parameters else ""
    return f"{m.kind} {m.variant}{size}{parameters} on {m.nodes} x {m.gpus_per_node} ranks"


def _given_twice(one: str, other: str) -> FitError:
    return FitError(
        f"{one} and {other} hold the same measurements, which would count as measured twice; give "
        "them once"
    )


def _hold_the_same(one: Record, other: Record) -> bool:
    """Whether one is a copy of the other, or of a part of it, as it was before `--resume`."""
    first, second = ({(m.key, tuple(m.samples_s)) for m in r.measurements} for r in (one, other))
    return first <= second or second <= first


def _setting_warnings(records: Sequence[Record], sources: Sequence[str]) -> list[str]:
    """Warn of records with other software, or with variables that change what is measured."""
    warnings = []
    settings_of = [
        {"torch": here.torch, here.backend: here.library, **here.variables}
        for here in (record.environment for record in records)
    ]
    for source, settings in zip(sources, settings_of, strict=True):
        for what in sorted({*settings, *settings_of[0]}):
            first, here = settings_of[0].get(what, "none"), settings.get(what, "none")
            if first != here:
                warnings.append(
                    f"{sources[0]} was measured with {what} {first}, but {source} with {here}"
                )
    return warnings


def _pace_warnings(records: Sequence[Record], sources: Sequence[str]) -> list[str]:
    """Warn of records in which the same compute, with nothing beside it, took much longer."""
    bare_s = {s: bare_compute_s(record) for s, record in zip(sources, records, strict=True)}
    return [
        f"{source}: compute with nothing beside it took {times:.2f} times as long as in the "
        "fastest record, so others used the machine, or it is another of the same name: measure "
        "it again, or fit it apart"
        for source, times in times_the_least(bare_s).items()
        if times > _OTHER_PACE
    ]
