"""A validation as text: its figures, and a line for each case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from calibrate.validate.report import Case, Figures, Validation
from ddpsim.wording import counted


def summary(validation: Validation) -> str:
    """The figures and every case, as text."""
    lines = [*_machine(validation.machine), *headlines(validation)]
    for sweep in validation.sweeps:
        runs = f"  runs {sweep.runs}" if sweep.runs > 1 else ""
        noise = f" ± {sweep.regret_noise:.1%}" if sweep.regret_noise else ""
        regret = f"{_percent(sweep.regret)}{noise}"
        lines.append(f"{sweep.file}{runs}  network: {sweep.network}  regret {regret}")
        lines.append(_HEAD)
        lines += [_line(case) for case in sweep.cases]
    lines += [f"WARNING {warning}" for warning in warnings(validation)]
    lines += [f"LEFT OUT {why}" for why in validation.left_out]
    return "\n".join(lines)


def warnings(validation: Validation) -> tuple[str, ...]:
    """What the simulations warn of, each once; of how many sweeps, where not of all."""
    sayings = [warning for sweep in validation.sweeps for warning in sweep.warnings]
    count = len(validation.sweeps)
    return tuple(
        warning if times == count else f"{warning} ({times} of {count} sweeps)"
        for warning, times in Counter(sayings).items()
    )


def _machine(speeds: Mapping[str, float]) -> Iterator[str]:
    """How fast the machine was during each measurement, before all that rests on it."""
    if len(speeds) < 2:
        return
    slowest, fastest = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    times = speeds[slowest]
    if times <= _ALIKE:
        yield f"machine: equally fast in all files: bare compute within {times - 1:.0%}"
        return
    yield (
        f"machine: bare compute took {times:.2f} times as long in {slowest} as in {fastest}; what "
        "is taken from the faster one is predicted too short for the slower"
    )


def headlines(validation: Validation) -> Iterator[str]:
    """The figures, a line each; those of oversubscribed sweeps apart."""
    if validation.figures:
        yield from _lines(validation.figures)
    if validation.oversubscribed:
        yield (
            "OVERSUBSCRIBED, counted apart: ranks that share cores, fewer than two a rank. Their "
            "compute and gloo's threads take turns, which is not modelled"
        )
        yield from (f"    {line}" for line in _lines(validation.oversubscribed))


def _lines(f: Figures) -> Iterator[str]:
    where = f"{counted(f.cases, 'case')} in {counted(f.sweeps, 'sweep')}"
    yield f"{where}; bucket sizes agree in {f.buckets_agree}"
    yield (
        f"{f.distinct_cases} are distinct; noise: standard errors of {f.median_stderr:.1%} "
        f"(median), and {_percent(f.repeat_sigma)} between caps with the same buckets"
    )
    if f.run_sigma is not None:
        yield f"runs of the same are {f.run_sigma:.1%} apart (standard deviation; median of sweeps)"
    yield f"error: median {f.median_error:.1%}, worst {f.worst_error:.1%}"
    yield (
        f"bias {f.median_bias:+.1%}; within 5 % or the noise: {f.within_5_percent_or_noise:.0%}; "
        f"within the noise of both, measured and inputs: {f.within_noise:.0%}"
    )
    yield f"skill: {_percent(f.skilled)} of {f.exposed_cases} cases with exposed communication"
    if f.another_run_skilled is not None:
        yield (
            f"skill where runs were repeated: {_percent(f.repeated_skilled)}; one run as the "
            f"prediction of the others: {_percent(f.another_run_skilled)}"
        )
    sweeps = counted(f.choice_sweeps, "sweep")
    within_noise = f", within the noise: {f.unsure_choices:.1%}" if f.unsure_choices else ""
    yield f"bucket choice within 1 %: {_percent(f.good_choices)} of {sweeps}{within_noise}"
    yield (
        f"exposed communication: off by median {_percent(f.median_exposed_error)}, "
        f"worst {_percent(f.worst_exposed_error)} of the iteration"
    )
    if f.covered_p_value is not None:
        yield f"80 % interval: holds {_percent(f.covered)} (p = {f.covered_p_value:.2g})"
    if f.ranked is not None:
        yield f"faster or slower than DDP by default: right in {f.ranked:.0%} of {f.ranked_cases}"
    yield "term off: " + ", ".join(f"{term} {count}" for term, count in f.off.items())


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


_ALIKE = 1.1  # bare compute of one machine's calm files differs by less
PARTS = ("forward", "backward", "exposed", "optimizer", "all_reduce")
_HEAD = (
    f"  {'variant':24s} {'predicted':>9} {'measured':>9} ms  noise   error  best naive  "
    f"{'term off':13s}  predicted/measured ms: {', '.join(PARTS)}"
)


def _line(case: Case) -> str:
    p, m = case.predicted, case.measured
    whole = f"{milliseconds(case.predicted_s):>9} {milliseconds(case.measured_s):>9}"
    parts = "  ".join(
        f"{milliseconds(getattr(p, name))}/{milliseconds(getattr(m, name))}" for name in PARTS
    )
    return (
        f"  {case.variant:24s} {whole}    "
        f"{'± ' + format(case.noise, '.1%'):>6}  {case.error:+6.1%}  {case.baseline_error:10.1%}  "
        f"{case.off:13s}  {parts}"
    )


def milliseconds(seconds: float | None) -> str:
    """Milliseconds, of short ones the digits that tell; a dash: not measured."""
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.1f}" if seconds >= 0.01 else f"{1e3 * seconds:.3g}"
