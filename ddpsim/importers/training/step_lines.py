"""Step times in the lines that training programs print, by a pattern for each program.

Sources of the lines: pytorch/examples imagenet/main.py (ProgressMeter);
nanoGPT train.py; torchtitan components/metrics.py and tools/logging.py;
detectron2 utils/events.py; mmengine runner/log_processor.py and mmcv's text logger; Megatron-LM
training/training.py and core/timers.py; DeepSpeed utils/timer.py; ms-swift's progress callback;
litgpt pretrain.py; Lightning's profilers/simple.py. Hugging Face's Trainer prints metrics, and
writes trainer_state.json: transformers trainer_callback.py (TrainerState), trainer_utils.py
(speed_metrics) and trainer_pt_utils.py (log_metrics).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from math import isfinite, nan
from statistics import median
from typing import Any, NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.text import Printed, clock_s, in_memory, printed
from ddpsim.importers.training.bars import (
    LONGEST_S,
    MARKS_OF_BARS,
    MAY_ACCUMULATE,
    Reading,
    StepLines,
    TooLittle,
    apart,
    bars,
    longest,
    span,
    steady,
)
from ddpsim.units import format_duration
from ddpsim.wording import counted

MARKS_OF_TRAINER = ("_runtime", "_steps_per_second", "epoch")
_LEAST, _MOST = 1e-6, 1e9  # of rates and batches, within reason
_MUCH = 0.05  # of a run that evaluates, from which on that time is taken out of its mean
_METRIC = re.compile(
    r"\b((?:train|eval)_(?:runtime|(?:samples|steps)_per_second))\b['\"]?\s*[:=]\s*['\"]?"
    r"((?:\d{1,5} days?, )?(?:\d{1,4}:\d\d:)?\d{1,9}(?:\.\d{1,9})?(?:e[-+]\d\d)?)"
    r"(?=['\",}]|\s*\n)"
)
_PRINTS = re.compile(r"['\"](?:eval_)?(?:loss|grad_norm)['\"]: .{0,2000}['\"]epoch['\"]: ")
_NUMBER = r"\d{1,12}(?:\.\d{1,9})?"


class TrainerState(NamedTuple):
    """What a run told: seconds of a step, samples of it on all ranks and on one; None: untold."""

    step_s: float
    global_batch: int | None
    batch_per_rank: int | None


def trainer_state(name: str, document: Mapping[str, Any]) -> TrainerState:
    """Read one; raises ImportFailedError where it tells no time."""
    history = document.get("log_history")
    whole = [
        row
        for row in (history if isinstance(history, list) else ())
        if isinstance(row, dict) and "train_steps_per_second" in row
    ]
    if not whole:
        raise ImportFailedError(
            name,
            "is a trainer_state.json of a run that has not ended: only its last entry tells "
            "train_steps_per_second; wait for the end, or import the log with the progress bar",
        )
    steps, samples = (
        _positive(whole[-1].get(f"train_{what}_per_second")) for what in ("steps", "samples")
    )
    if steps is None:
        raise ImportFailedError(name, "its train_steps_per_second is no number from 1e-6 to 1e9")
    batch = _positive(document.get("train_batch_size"))
    return TrainerState(
        1 / steps,
        _global_batch(samples, steps),
        round(batch) if batch and batch >= 1 else None,
    )


def _trainer_lines(lines: Sequence[Printed]) -> Iterator[StepLines | TooLittle]:
    """The mean step of the longest run in printed metrics, and the evaluation that it holds."""
    program, runs = "transformers' Trainer", list(_runs(lines))
    if not runs:
        texts = [each.text for each in lines if "epoch" in each.text]
        if any(_PRINTS.search(each) and "train_speed(" not in each for each in texts):
            yield TooLittle(program, "needs train_runtime and train_steps_per_second of its end")
        return
    run = max(runs, key=lambda each: each.runtime_s * each.steps_per_second)
    step_s, share = 1 / run.steps_per_second, run.evaluation_s / run.runtime_s
    facts = [f"a step takes {format_duration(step_s)}, the mean of its run"]
    facts += [f"{run.global_batch} samples a step on all ranks"] if run.global_batch else []
    if share >= 1:
        yield TooLittle(program, "needs one run: evaluation took longer than what it is printed in")
        return
    if share:
        of = f"{format_duration(run.evaluation_s)} of {format_duration(run.runtime_s)}"
        without = format_duration(step_s * (1 - share))
        facts = [*facts, f"evaluation took {of}: without it a step takes {without}"]
    others = [[Reading("", (0,), 1 / each.steps_per_second)] for each in runs if each is not run]
    step_s *= 1 - share if share > _MUCH else 1
    yield StepLines(
        *(program, step_s, (*facts, *apart(others, step_s))), global_batch=run.global_batch
    )


class _Run(NamedTuple):
    runtime_s: float
    steps_per_second: float
    evaluation_s: float
    global_batch: int | None


def _runs(lines: Sequence[Printed]) -> Iterator[_Run]:
    """Runs of each rank that ended: evaluation before the end of one belongs to it."""
    by_source: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for each in lines:
        if "_runtime" in each.text or "_steps_per_second" in each.text:
            is_cut = each.text.rfind("{") > each.text.rfind("}")  # so may its last number be
            pairs = _METRIC.findall(each.text + "\n" * (each.is_whole and not is_cut))
            by_source[each.source] += [(metric, clock_s(value)) for metric, value in pairs]
    for metrics in by_source.values():
        runtime_s = evaluation_s = samples = 0.0
        for metric, value in metrics:
            if metric == "eval_runtime":
                evaluation_s += value
            elif metric == "train_runtime":
                runtime_s = value
            elif metric == "train_samples_per_second":
                samples = value
            elif metric == "train_steps_per_second" and runtime_s and _positive(value):
                yield _Run(runtime_s, value, evaluation_s, _global_batch(samples, value))
                runtime_s = evaluation_s = samples = 0.0


def _global_batch(samples: float | None, steps: float) -> int | None:
    """Samples of a step, by the samples and the steps of a second; None: not told."""
    return round(samples / steps) or None if samples and _positive(samples / steps) else None


def _positive(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and isfinite(value) and _LEAST <= value <= _MOST else None


class _Format(NamedTuple):
    """How a program prints steps: in lines with one of the `marks`. # stands for a number.

    What follows a number belongs to its pattern: a line may be cut off, or run into another. Groups
    of `line`, and of `before`, a line above it: `count` of iterations, in `epoch`, and of `steps`;
    the time as `s`, `ms`, `per_s`, `fwd` and `bwd`, or a `stamp`; `data_s`; `optimizer_ms`.
    `once`: groups that stand elsewhere. `evaluation`: lines to name and leave out. `least`: lines
    that tell a step. `lacking`: a program's lines that tell none; it `needs` others.
    `of_micro_batch`: the time is of one, or it `may_be`. `of_run`: it is a mean. `adds_data`: it
    has no wait for data.
    """

    program: str
    marks: tuple[str, ...]
    line: str
    least: int = 1
    before: str = ""
    once: Sequence[str] = ()
    evaluation: str = ""
    lacking: str = ""
    needs: str = ""
    of_micro_batch: bool = False
    may_be: bool = False
    of_run: bool = False
    adds_data: bool = False


_FORMATS = (
    _Format(
        "nanoGPT",
        (", time ",),
        r"\biter (?P<count>\d{1,12}): loss [^,]{1,30}, time (?P<ms>#)ms",
        least=3,
    ),
    _Format(
        "torchtitan",
        ("INFO - step:",),
        r"(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - \w+ - INFO - "
        r"step: *(?P<count>\d{1,12}) +\w",
        least=3,
    ),
    _Format(
        "detectron2",
        ("data_time: ", "Inference done "),
        r"\biter: (?P<count>\d{1,12}) [^][{}]{0,900}?\btime: (?P<s>#) [^][{}]{0,40}?\bdata_time: "
        r"(?P<data_s>#) ",
        evaluation=r"\bInference done \d+/\d+",
    ),
    _Format(
        "mmengine",
        ("data_time: ", "(val)", "(test)"),
        r"\b(?:Epoch|Iter)(?:\(train\))? *(?:\[(?P<epoch>\d{1,9})\])?"
        r"\[ *(?P<count>\d{1,12})/ *\d+\]\s[^][{}]{0,300}?\btime: (?P<s>#),? +"
        r"data_time: (?P<data_s>#),? +\w",
        evaluation=r"\b(?:Epoch|Iter)\((?:val|test)\)",
        may_be=True,
    ),
    _Format(
        "PyTorch's ImageNet example",
        ("\tTime ", "Test: ["),
        r"\bEpoch: \[(?P<epoch>\d{1,9})\]\[ *(?P<count>\d{1,12})/\d{1,12}\]\s+"
        r"Time +(?P<s>#) +\( *#\)\s+Data +(?P<data_s>#) +\( *#\)",
        least=3,
        evaluation=r"\bTest: \[ *\d{1,12}/\d{1,12}\]\s+Time ",
    ),
    _Format(
        "Megatron",
        ("elapsed time per iteration", "time (ms) |", "grads-"),
        r"\biteration +(?P<count>\d{1,12})/ *\d+ \|[^][{}]{0,300}?"
        r"elapsed time per iteration \(ms\): (?P<ms>#) \|",
        once=(
            r"\bbackward-params-all-reduce: (?P<all_reduce_ms>#) \|",
            r"\b(?:all-grads-sync|grads-all-reduce)[ .]*: \(#, (?P<all_reduce_ms>#)\)",
        ),
        lacking=r"time \(ms\) \| forward-compute: ",
        needs="a line with 'elapsed time per iteration (ms)'; timers leave work out",
    ),
    _Format(
        "DeepSpeed",
        ("time (ms) |", "SamplesPerSec="),
        r"time \(ms\) \| (?:fwd|forward): (?P<fwd>#) \| (?:bwd|backward): (?P<bwd>#) \|"
        r"[^][{}]{0,120}?\bstep: (?P<optimizer_ms>#)\s*(?:\||$)",
        before=r"\bmicro_step=(?P<count>\d{1,12})/global_step=(?P<steps>\d{1,12}),",
        once=(r"\b(?:bwd|backward)_allreduce: (?P<all_reduce_ms>#) \|",),
        lacking=r"\bRunningAvgSamplesPerSec=|time \(ms\) \| (?:fwd|forward|bwd|step)(?:_\w+)?: ",
        needs="a line with fwd, bwd and step, which wall_clock_breakdown of its config adds",
    ),
    _Format(
        "ms-swift",
        ("train_speed(", "global_step/max_steps"),
        r"^(?!.*eval_loss)(?=.*global_step/max_steps\W{1,6}(?P<count>\d{1,12})/)"
        r".*train_speed\((?:iter/s\)\W{1,5}(?P<per_s>#)|s/it\)\W{1,5}(?P<s>#))\W{0,2}[,}]",
        evaluation=r"\beval_loss\b.*train_speed\(",
        lacking=r"train_speed\(|global_step/max_steps",
        needs="a whole line with train_speed and global_step/max_steps",
        of_run=True,
    ),
    _Format(
        "litgpt",
        ("iter time: ", "val time: "),
        r"\biter (?P<count>\d{1,12}) step (?:(?=.*ms \(step\))(?P<steps>\d{1,12})|\d+)\b"
        r"[^][{}]{0,200}?\biter time: (?P<ms>#) ?ms\b",
        evaluation=r"\bval time: ",
        of_micro_batch=True,
        may_be=True,
    ),
    _Format(
        "Lightning's profiler",
        (
            "run_training",
            "_train_batch",
            "_dataloader_next",
            ".train_next",
            "optimizer_step",
            "evaluation",
            "validation_",
        ),
        r"\brun_training_batch\s*\|\s*(?P<s>#)\s*\|\s*(?:(?P<count>\d{1,12})\s*\|\s*)?#\s*\|",
        once=(
            r"(?:\bget_train_batch|train_dataloader_next|\.train_next)\s*\|\s*(?P<data_s>#)\s*\|",
            r"\boptimizer_step(?:_\w+)?\s*\|\s*#\s*\|\s*(?P<steps>\d{1,12})\s*\|\s*#\s*\|",
        ),
        evaluation=r"\b(?:run_evaluation|evaluation_step_and_end|validation_step)\s*\|",
        lacking=r"\brun_training_epoch\s*\||Profile stats for: run_training",
        needs="the row run_training_batch of the simple profiler",
        of_micro_batch=True,
        may_be=True,
        of_run=True,
        adds_data=True,
    ),
)


_EVERY_MARK = {*MARKS_OF_BARS, *MARKS_OF_TRAINER, *(mark for f in _FORMATS for mark in f.marks)}


_MARKS = re.compile("|".join(map(re.escape, sorted(_EVERY_MARK))))


def has_marks(text: str) -> bool:
    """Whether something stands in a text by which lines of some program are found."""
    return _MARKS.search(text) is not None


def step_lines(name: str, log: Iterable[str]) -> list[StepLines | TooLittle]:
    """What each program tells whose lines stand in a log called `name`; lines have their ends.

    Raises ImportFailedError where they are too many.
    """
    lines = in_memory(name, printed(log, _MARKS))
    of_formats = [each for form in _FORMATS if (each := _of_format(form, lines))]
    return [*of_formats, *_trainer_lines(lines), *bars(lines)]


def _of_format(form: _Format, every: Sequence[Printed]) -> StepLines | TooLittle | None:
    lines = [each for each in every if any(mark in each.text for mark in form.marks)]
    readings = [each for each in _readings(form, lines) if 0 < each.step_s < LONGEST_S]
    if not readings and not _count((form.lacking, form.evaluation, form.line), lines):
        return None
    run, notes = longest(readings) if readings else ([], [])
    if len(run) < form.least:
        more = counted(form.least - len(run), "more line")
        if form.needs and not run:
            return TooLittle(form.program, f"needs {form.needs}")
        return TooLittle(form.program, f"{counted(len(run), 'line')} of training; needs {more}")
    return _step(form, run, lines, notes)


def _step(
    form: _Format, run: Sequence[Reading], lines: Sequence[Printed], notes: Sequence[str]
) -> StepLines:
    used, once = steady(run), _once(form, lines)
    data_s = _median(each.data_s for each in used) or once.get("data_s")
    optimizer_s = _median(each.optimizer_s for each in used)
    time_s = median(each.step_s for each in used) + ((data_s or 0.0) if form.adds_data else 0.0)
    counts = [each.micro_batches for each in run if each.micro_batches]
    micro = counts[-1] if counts else _micro_batches(run[-1].at[-1], once.get("steps"))
    takes = format_duration(time_s - (optimizer_s or 0.0))
    takes += " of forward and backward" if optimizer_s else ""
    lines_read = counted(len(run), "line")
    how = f"the median of {lines_read}" if len(run) > 1 else f"by {lines_read} alone"
    how = "the mean of its run" if form.of_run else how
    whole = "an iteration" if form.may_be else "a step"
    facts = [f"{'a micro-batch' if form.of_micro_batch and micro else whole} takes {takes}, {how}"]
    facts += span([each.step_s for each in used])
    if data_s:
        facts.append(f"of which {format_duration(data_s)} wait for data")
    if optimizer_s:
        facts.append(f"the optimizer takes {format_duration(optimizer_s)} more")
    step_s = time_s * (micro or 1) if form.of_micro_batch else time_s
    if micro and micro > 1:
        facts.append(f"{micro} micro-batches a step, which takes {format_duration(step_s)}")
    if all_reduce_ms := once.get("all_reduce_ms"):
        facts.append(f"the gradients' all-reduce takes {format_duration(all_reduce_ms * 1e-3)}")
    if form.evaluation and (left_out := _count((form.evaluation,), lines)):
        notes = [*notes, f"left out: {counted(left_out, 'line')} of evaluation"]
    assumed = (MAY_ACCUMULATE,) if form.may_be and not micro else ()
    return StepLines(form.program, step_s, (*facts, *notes), micro or 1, assumed)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text.replace("#", _NUMBER))


def _count(patterns: Iterable[str], lines: Iterable[Printed]) -> int:
    """How many lines match one of the patterns."""
    wanted = _pattern("|".join(filter(None, patterns)))
    return sum(wanted.search(each.text) is not None for each in lines)


def _once(form: _Format, lines: Sequence[Printed]) -> dict[str, float]:
    """The median of each figure that stands apart from the steps."""
    figures: dict[str, list[float]] = defaultdict(list)
    for wanted in map(_pattern, form.once):
        for each in lines:
            if match := wanted.search(each.text):
                for name, value in match.groupdict().items():
                    figures[name].append(float(value))
    return {name: median(values) for name, values in figures.items()}


def _readings(form: _Format, lines: Iterable[Printed]) -> Iterator[Reading]:
    wanted = _pattern(form.line)
    before = _pattern(form.before) if form.before else None
    above: dict[str, str | None] = {}
    last: dict[str, tuple[float, int]] = {}
    for each in lines:
        if before and (match := before.search(each.text)):
            above = match.groupdict()
        if not (match := wanted.search(each.text)):
            continue
        figures = {name: value for name, value in (above | match.groupdict()).items() if value}
        if stamp := figures.pop("stamp", None):  # of rates of tokens: stamps tell the steps
            moment_s, step = _moment_s(stamp), int(figures["count"])
            before_s, first = last.get(each.source, (moment_s, step))
            last[each.source] = moment_s, step
            if step <= first:
                continue
            figures["s"] = str((moment_s - before_s) / (step - first))
        yield _reading(each.source, figures)


def _reading(source: str, figures: Mapping[str, str]) -> Reading:
    value = {name: float(text) for name, text in figures.items()}
    step_s = value.get("s", 0.0) + 1e-3 * sum(
        value.get(part, 0.0) for part in ("ms", "fwd", "bwd", "optimizer_ms")
    )
    if rate := value.get("per_s"):
        step_s = 1 / rate
    count = value.get("count", 0.0)
    return Reading(
        source,
        (int(value.get("epoch", 0)), int(count)),
        step_s,
        value.get("data_s"),
        value["optimizer_ms"] * 1e-3 if "optimizer_ms" in value else None,
        _micro_batches(count, value.get("steps")),
    )


def _micro_batches(iterations: float, steps: float | None) -> int | None:
    """Micro-batches of a step; None: not told, or iterations are no whole number of steps."""
    is_whole = steps and iterations >= steps and not iterations % steps
    return int(iterations / steps) if steps and is_whole else None


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [each for each in values if each is not None]
    return median(numbers) if numbers else None


def _moment_s(stamp: str) -> float:
    """Seconds since some moment; differences alone count. Not a number for no moment."""
    try:
        return datetime.fromisoformat(f"{stamp.replace(',', '.')}+00:00").timestamp()
    except ValueError:
        return nan
