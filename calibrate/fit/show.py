"""A cluster profile as a person reads it, and how far its model is from the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from calibrate.fit.samples import Sample, has_bucket_sizes, relative_residuals
from calibrate.records.record import Record
from ddpsim.cluster.fitted.laws import AllReduceModel, collective_times_s
from ddpsim.cluster.nccl.figures import MEANINGS
from ddpsim.files import write_atomically
from ddpsim.importers.profiles.cluster import ClusterProfile, Fitted, GlooRing
from ddpsim.importers.profiles.nccl import NcclFigure, NcclHypothesis, NcclModel
from ddpsim.provenance import Z_80
from ddpsim.report.page.looks import OKABE_ITO
from ddpsim.units import format_bytes, format_bytes_per_s, format_duration

_LEAST_SHOWN = 0.01  # of a hypothesis' weight
_EXACT = 1e-4  # a smaller relative error is lost in the digits shown
_NO_LIMIT = 1e15  # bytes per second: a fit's floor of its inverse, and no machine's rate

_WHAT = (
    "measured: the mean of the middle four fifths of a size's samples; predicted: the fitted "
    "model, which `ddpsim run` takes for layouts, rates and sizes that were not measured; for the "
    "others it takes the measured times"
)


def show(profile: ClusterProfile) -> str:
    """The profile's figures with units and standard errors, where they hold, and its warnings."""
    made = profile.provenance
    sections = [
        [
            f"{profile.name}: {profile.backend} on {made.machine}",
            *([f"  {made.processor}"] if made.processor else []),
            f"  {made.software}; {made.created}",
            f"  from {', '.join(made.sources)}",
        ],
        list(_all_reduce(profile)),
        list(correlated(profile)),
        list(_valid(profile)),
        list(_interference(profile)),
        list(_overheads(profile)),
        list(_jitter(profile)),
        list(not_measured(profile)),
        ["warnings", *(f"  {line}" for line in profile.warnings)] if profile.warnings else [],
    ]
    return "\n".join(line for section in sections for line in section)


def correlated(profile: ClusterProfile) -> Iterator[str]:
    """Figures whose errors go together: each alone may be as far off as its standard error says."""
    for pair in profile.correlated:
        one, other = pair.figures
        yield f"  errors go together: {one} | {other} (correlation {pair.correlation:+.2f})"


def _all_reduce(profile: ClusterProfile) -> Iterator[str]:
    model = profile.all_reduce
    percent = f"{100 * profile.all_reduce_sigma:.1f} %"
    if isinstance(model, GlooRing):
        sizes = "from 1 MiB up" if has_bucket_sizes(profile.measured) else "of all sizes"
        error = f"fitted within {percent} (RMS {sizes})"
        yield f"all-reduce: gloo's segmented ring, {error}"
        yield from _gloo(model)
    else:
        yield f"all-reduce: NCCL's choice over calibrated links, usual error {percent}"
        yield from _nccl(model)


def _gloo(model: GlooRing) -> Iterator[str]:
    rested = model.rested_burst_bytes.value > 0
    yield from _lines(
        ("queue", model.queue_s, format_duration),
        ("segment", model.segment_s, format_duration),
        ("wire over payload", model.wire_bytes_per_byte, _number),
        ("reduce rate", model.reduce_bytes_per_s, format_bytes_per_s),
        ("reduce rate, float16", model.reduce_half_bytes_per_s, format_bytes_per_s),
        ("burst", model.burst_bytes, format_bytes),
        ("burst after a rest", model.rested_burst_bytes if rested else None, format_bytes),
        ("delay after a rest", model.rested_delay_s if rested else None, format_duration),
    )
    rate = model.line_rate_bytes_per_s
    words = "no limit seen" if model.takes_no_limit else format_bytes_per_s(rate)
    yield f"  {'line rate':<20} {words}"


def _nccl(model: NcclModel) -> Iterator[str]:
    """What was searched, how likely each answer is, and every figure before and after."""
    yield "  hypotheses"
    likely = [h for h in model.hypotheses if h.weight >= _LEAST_SHOWN]
    yield from (f"    {100 * h.weight:3.0f} %  {_hypothesis(h)}" for h in likely)
    yield "  figures, as multiples of the usual; 80 % range"
    yield f"    {'':<36} {'prior':>16} {'calibrated':>18}   samples"
    yield from (_figure(figure) for figure in model.figures if figure.samples)
    if assumed := [MEANINGS[figure.name] for figure in model.figures if not figure.samples]:
        yield f"    not measured, as in the prior: {', '.join(assumed)}"


def _hypothesis(hypothesis: NcclHypothesis) -> str:
    links = hypothesis.links
    words = [hypothesis.architecture, f"NCCL {hypothesis.version}"]
    if links.nics_per_node and links.nic_bytes_per_s:
        rate = f"{8 * links.nic_bytes_per_s / 1e9:g} Gbit/s"
        words.append(f"{links.nics_per_node} x {rate} a node over {links.transport}")
        words.append("with LL128" if hypothesis.ll128 else "without LL128")
    return ", ".join(words)


def _figure(figure: NcclFigure) -> str:
    prior = _range(figure.prior, figure.prior_sigma)
    words = _range(figure.value, figure.sigma)
    return f"    {MEANINGS[figure.name]:<36} {prior:>16} {words:>18} {figure.samples:>9}"


def _range(value: float, sigma: float) -> str:
    factor = exp(Z_80 * sigma)
    return f"{value:.2f} ({value / factor:.2f}-{value * factor:.2f})"


def _valid(profile: ClusterProfile) -> Iterator[str]:
    low, high = profile.valid.size_bytes
    layouts = ", ".join(f"{nodes} x {gpus}" for nodes, gpus in profile.valid.layouts)
    rates = [format_bytes_per_s(rate) for rate in profile.valid.line_rates_bytes_per_s]
    yield f"measured: {format_bytes(low)} to {format_bytes(high)}, on {layouts} ranks"
    if rates:
        yield f"  over links of {', '.join(rates)}"
    for operation, measured in profile.measured_others.items():
        if sizes := [each.size_bytes for each in measured]:
            name = operation.replace("_", "-") + "s"
            yield f"  {name}: {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    for sigma in profile.measured_sigma:
        rate = sigma.line_rate_bytes_per_s
        over = f"over {format_bytes_per_s(rate)} " if rate else ""
        yield f"  {over}the others predict each within {100 * sigma.left_out:.1f} % (RMS)"
        if sigma.repeated is not None:
            yield f"    measured again it varies by {100 * sigma.repeated:.1f} %"


def _interference(profile: ClusterProfile) -> Iterator[str]:
    effect = profile.interference
    if effect is None:
        return
    yield "interference: times longer while both are in flight, and what is kept of the speed"
    yield from _lines(("compute", effect.compute_slowdown, _number))
    for kind, points in (("", effect.compute_kept), (" of float16", effect.half_compute_kept)):
        for point in points:
            sent = format_bytes_per_s(point.sent_bytes_per_s)
            kept = _line(f"  kept at {sent}{kind}", point.share, _number)
            uneven = f", {point.spread:.2g} more or less by rank and burst" if point.spread else ""
            yield kept + uneven
            yield from _lines(("    beside one all-reduce", point.beside_one, _number))
    squared, delay = effect.comm_slowdown_s2_per_byte2, effect.comm_delay_s
    use, crowded = effect.idle_link_use, effect.crowded_slowdown_s_per_byte
    yield from _lines(
        ("communication", effect.comm_slowdown, _number),
        ("  more a (GB/s)^2 sent", squared.times(1e18) if squared.value else None, _number),
        ("  and once", delay if delay.value else None, format_duration),
        ("  idle link used", use if use.value != 1 else None, _number),
        ("  two in flight, a GB/s", crowded.times(1e9) if crowded.value else None, _number),
    )


def _overheads(profile: ClusterProfile) -> Iterator[str]:
    overheads = profile.overheads
    lines = _lines(
        ("hook, a parameter", overheads.hook_s, format_duration),
        ("  copied back", overheads.copy_back_s, format_duration),
        ("copy", overheads.copy_bytes_per_s, format_bytes_per_s),
        *(
            (f"copy in of {format_bytes(c.gradient_bytes)}", c.bytes_per_s, format_bytes_per_s)
            for c in overheads.copy_in
        ),
        ("compress", overheads.compress_bytes_per_s, format_bytes_per_s),
        ("decompress", overheads.decompress_bytes_per_s, format_bytes_per_s),
    )
    yield from (["DDP's own cost", *lines] if lines else [])
    if overheads.sigma is not None:
        yield f"  from record to record copies vary by {100 * overheads.sigma:.1f} %"


def _jitter(profile: ClusterProfile) -> Iterator[str]:
    if profile.jitter is None:
        return
    iteration, rank = profile.jitter.iteration_sigma, profile.jitter.rank_sigma
    yield (
        f"jitter: {100 * iteration:.2f} % from iteration to iteration (autocorrelation "
        f"{profile.jitter.autocorrelation:.2f}), {100 * rank:.2f} % between ranks"
    )


def not_measured(profile: ClusterProfile) -> Iterator[str]:
    """What is not in the profile, and what `ddpsim run` takes in its place."""
    nccl = profile.backend == "nccl"
    for name, part, instead in (
        ("interference", profile.interference, "a published average" if nccl else "none"),
        ("DDP's own cost", profile.overheads.hook_s, "torch's kernels as priced"),
        ("jitter", profile.jitter, "ranks as equal, unless the scenario says more"),
    ):
        if part is None:
            yield f"not measured: {name}; `ddpsim run` takes {instead}"


def data_loaders(records: Sequence[Record]) -> Iterator[str]:
    """What records tell of data loaders, which is a workload's and not in the profile."""
    for m in (m for record in records for m in record.measurements if m.kind == "data_loader"):
        batch = f"data loader {m.variant}: a batch in {format_duration(median(m.samples_s))}"
        yield f"{batch} (median); its samples over that are workload.data.rate"


def _lines(*rows: tuple[str, Fitted | None, Callable[[float], str]]) -> list[str]:
    """A line of each figure that there is: its name, and how it is written."""
    return [_line(name, figure, written) for name, figure, written in rows if figure is not None]


def _line(name: str, figure: Fitted, written: Callable[[float], str]) -> str:
    if figure.value >= _NO_LIMIT:
        return f"  {name:<20} no limit seen"
    value = f"  {name:<20} {written(figure.value)}"
    if figure.stderr is None or figure.stderr < _EXACT * abs(figure.value):
        return value
    return f"{value} +- {written(figure.stderr)}"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 0.1 else f"{value:.3f}"


def residual_table(model: AllReduceModel, samples: Sequence[Sample]) -> str:
    """Measured and predicted time of each sample, by layout and size; the errors at the end.

    An error is (predicted - measured) / measured.
    """
    samples = _in_order(samples)
    errors = np.expm1(relative_residuals(model, samples))
    lines = [f"{'ranks':>9} {'line rate':>11} {'size':>9} {'measured':>9} {'predicted':>9}   error"]
    for sample, error in zip(samples, errors.tolist(), strict=True):
        rate = "" if sample.line_rate is None else format_bytes_per_s(sample.line_rate)
        predicted_s = sample.time_s * (1 + error)
        lines.append(
            f"{_layout(sample):>9} {rate:>11} {format_bytes(sample.size_bytes):>9} "
            f"{format_duration(sample.time_s):>9} {format_duration(predicted_s):>9} "
            f"{100 * error:+6.1f} %"
        )
    middle, tenth = np.quantile(np.abs(errors), (0.5, 0.9))
    lines.append(
        f"{len(samples)} samples: median error {100 * middle:.1f} %, nine in ten within "
        f"{100 * tenth:.1f} %, largest {100 * np.abs(errors).max():.1f} %"
    )
    lines.append(_WHAT)
    return "\n".join(lines)


def write_residual_figure(model: AllReduceModel, samples: Sequence[Sample], path: Path) -> None:
    """Samples, the model and its errors over size, as HTML that needs no network; see OSError.

    What belongs to a layout and a line rate has one colour.
    """
    from ddpsim.report.page.charts import Chart, axis, figure, points  # noqa: PLC0415 -- slow
    from ddpsim.report.page.shell import answer_page  # noqa: PLC0415

    by_label: dict[str, list[Sample]] = {}
    for sample in _in_order(samples):
        by_label.setdefault(_label(sample), []).append(sample)
    times, errors = list[dict[str, Any]](), list[dict[str, Any]]()
    for (label, here), colour in zip(by_label.items(), cycle(OKABE_ITO.values()), strict=False):
        sizes, look = [s.size_bytes for s in here], {"color": colour}
        measured_s = [s.time_s for s in here]
        predicted_s = list(collective_times_s("all_reduce", model, [s.point for s in here]))
        percent = (100 * np.expm1(relative_residuals(model, here))).tolist()
        marks, says = {"mode": "markers", "marker": look}, "%{x} B: %{y:.4~g} s"
        times.append(points(f"{label} measured", sizes, measured_s, says, **marks))
        times.append(points(f"{label} fitted", sizes, predicted_s, says, mode="lines", line=look))
        says = "%{x} B: %{y:+.2~f} %"
        errors.append(points(label, sizes, percent, says, line=look, marker=look))
    decades = {"type": "log", "dtick": 1, "exponentformat": "power"}
    x, y = (axis(title, **decades) for title in ("message (bytes)", "all-reduce (s)"))
    drawn = figure(times, 480, x, y), figure(errors, 320, x, axis("error (%)"))
    words = "Marks are measured, lines fitted.", "Predicted over measured, minus one."
    charts = [
        Chart("times", "Times by size", words[0], drawn[0]),
        Chart("errors", "Errors of the fitted model", words[1], drawn[1]),
    ]
    table = residual_table(model, samples)
    write_atomically(path, answer_page("All-reduces: measured and fitted", charts, table))


def _in_order(samples: Sequence[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda s: (s.nodes, s.gpus_per_node, s.line_rate or 0, s.size_bytes))


def _layout(sample: Sample) -> str:
    return f"{sample.nodes} x {sample.gpus_per_node}"


def _label(sample: Sample) -> str:
    rate = "" if sample.line_rate is None else f", {format_bytes_per_s(sample.line_rate)}"
    return f"{_layout(sample)} ranks{rate}"
