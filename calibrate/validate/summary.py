"""A validation as text: its figures, and a line for each case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from calibrate.validate.report import Case, Figures, Validation
from ddpsim.wording import counted

__all__ = ["headlines", "summary", "warnings"]


def summary(validation: Validation) -> str:
    """The figures and every case, as text."""
    lines = list(headlines(validation))
    for sweep in validation.sweeps:
        runs = f"  runs {sweep.runs}" if sweep.runs > 1 else ""
        regret = _percent(sweep.regret)
        lines.append(f"{sweep.file}{runs}  network: {sweep.network}  regret {regret}")
        lines.append(_HEAD)
        lines += [_line(case) for case in sweep.cases]
    lines += [f"WARNING {warning}" for warning in warnings(validation)]
    return "\n".join(lines)


def warnings(validation: Validation) -> tuple[str, ...]:
    """What the simulations warn of, each once; of how many sweeps, where not of all."""
    said = [warning for sweep in validation.sweeps for warning in sweep.warnings]
    count = len(validation.sweeps)
    return tuple(
        warning if times == count else f"{warning} ({times} of {count} sweeps)"
        for warning, times in Counter(said).items()
    )


def headlines(validation: Validation) -> Iterator[str]:
    """The figures, a line each; those of oversubscribed sweeps apart."""
    if validation.figures:
        yield from _lines(validation.figures)
    if validation.oversubscribed:
        yield from (f"OVERSUBSCRIBED: {line}" for line in _lines(validation.oversubscribed))


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
    yield f"bias {f.median_bias:+.1%}; within 5 % or the noise: {f.within_5_percent_or_noise:.0%}"
    yield f"skill: {_percent(f.skilled)} of {f.exposed_cases} cases with exposed communication"
    if f.another_run_skilled is not None:
        yield (
            f"skill where runs were repeated: {_percent(f.repeated_skilled)}; one run as the "
            f"prediction of the others: {_percent(f.another_run_skilled)}"
        )
    sweeps = counted(f.choice_sweeps, "sweep")
    yield f"bucket choice within 1 %: {_percent(f.good_choices)} of {sweeps}"
    yield (
        f"exposed communication: off by median {f.median_exposed_error:.1%}, "
        f"worst {f.worst_exposed_error:.1%} of the iteration"
    )
    if f.covered_p_value is not None:
        yield f"80 % interval: holds {_percent(f.covered)} (p = {f.covered_p_value:.2g})"
    if f.ranked is not None:
        yield f"faster or slower than DDP by default: right in {f.ranked:.0%} of {f.ranked_cases}"
    yield "term off: " + ", ".join(f"{term} {count}" for term, count in f.off.items())


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


_PARTS = ("forward", "backward", "exposed", "optimizer", "all_reduce")
_HEAD = (
    f"  {'variant':24s} {'predicted':>9} {'measured':>9} ms  noise   error  best naive  "
    f"{'term off':13s}  predicted/measured ms: {', '.join(_PARTS)}"
)


def _line(case: Case) -> str:
    p, m = case.predicted, case.measured
    parts = "  ".join(f"{_ms(getattr(p, name))}/{_ms(getattr(m, name))}" for name in _PARTS)
    return (
        f"  {case.variant:24s} {_ms(case.predicted_s):>9} {_ms(case.measured_s):>9}    "
        f"{'± ' + format(case.noise, '.1%'):>6}  {case.error:+6.1%}  {case.baseline_error:10.1%}  "
        f"{case.off:13s}  {parts}"
    )


def _ms(seconds: float) -> str:
    """Milliseconds, of short ones the digits that tell."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.3g}"
