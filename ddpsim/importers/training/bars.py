"""Runs in what a training program printed, and step times in progress bars: tqdm's and rich's.

Programs draw bars of much else: of evaluation, of loading, of epochs. One bar is of training: its
label says so, or it is the only one, or the others are drawn within it. Where several may be, none
is taken. Sources: tqdm's format_meter; Lightning's RichProgressBar; transformers' Trainer, whose
bars have no labels.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from ddpsim.importers.text import Printed, clock_s
from ddpsim.units import format_duration
from ddpsim.wording import counted

LONGEST_S = 3.6e6
MAY_ACCUMULATE = (
    "an iteration is a step; if gradients accumulate, it is a micro-batch (ddp.accumulation_steps)"
)
_WIDE = 1.02  # of times, above which both ends are shown
_FEW = 3  # times, of which the first counts where it is no slower
_SLOWER = 1.1  # assumed: of the first steps, which compile and fill caches
MARKS_OF_BARS = ("/s", "s/")
_TIME = r"\d{1,5}(?::\d\d){1,2}"
_RATE = r"(?P<rate>\d{1,12}(?:\.\d{1,9})?) ?(?P<unit>[a-zA-Z]{1,12}/s|s/[a-zA-Z]{1,12})"
_BARS = (
    re.compile(
        r"(?P<step>\d{1,12})(?:/(?P<total>\d{1,12})| ?[a-zA-Z]{1,12}) "
        rf"\[(?P<elapsed>{_TIME})(?:<[\d:?]{{1,12}})?, +{_RATE}(?=[],](?P<rest>[^]\n]{{0,80}}))"
    ),
    re.compile(
        rf"(?P<step>\d{{1,12}})/(?P<total>\d{{1,12}}) +(?P<elapsed>{_TIME}) • [\d:-]{{1,12}} +"
        rf"{_RATE}(?=\s(?P<rest>[^\n]{{0,80}}))"
    ),
)
_BEFORE_BAR = re.compile(r"\d{1,3}%\||[━╸╺]")
_FIGURE = re.compile(r"\d{1,12}(?:\.\d+)*")
_REST = re.compile(r"^(?:\]|, [^]]*\])")  # of the bar before it
_CUT_OFF = re.compile(r"[|}]|\[[\d:]+(?:<[\d:?]*)?(?:, *[\d.]*)?")  # another bar before a label
_ITERATION = re.compile(r"(?:it|iter|iteration|batch|step|update)(?:e?s)?")
_WORD = r"(?<![a-z])(?:{})(?![a-z])"
_TRAIN = re.compile(_WORD.format(r"(?:pre)?train(?:ing)?|fit(?:ting)?|fine-?tun\w*"), re.IGNORECASE)
_EVALUATION = re.compile(
    _WORD.format(
        r"val|tests?|testing|dev|sanity|(?:eval|valid|predict|infer|generat|sampl|scor)\w*"
    ),
    re.IGNORECASE,
)
_OTHER = re.compile(
    _WORD.format(
        r"map|epochs?(?!\W{0,2}#)|(?:(?:down|up)?load|filter|tokeni|fetch|shard|sav|extract|process|"
        r"prepar|cach|convert|read|build|split|group|pack|captur)\w*"
    ),
    re.IGNORECASE,
)
_MOST_LOOPS = 500
_ENOUGH = 3  # bars, below which they may be of anything
_FALLS = 2  # times: of ranks that share a terminal, one may be some iterations behind
_APART, _ALIKE = 1.2, 1.1  # assumed: passes of one loop are nearer; loops so near are as good
_OFF, _FEW_OFF, _EARLY = 1.5, 0.2, 5  # so far off are fewer states, behind the first steps
_WHOLE = 0.8  # of the time of an inner bar, which an iteration of the outer one takes


class Reading(NamedTuple):
    """A time that a program printed. `at`: epoch and step, which rise as long as a run lasts.

    `step_s`: with the wait for data `data_s` and the optimizer `optimizer_s`, None where they are
    not told. `micro_batches`: of a step. `source`: the rank or the pod that printed it.
    """

    source: str
    at: tuple[int, ...]
    step_s: float
    data_s: float | None = None
    optimizer_s: float | None = None
    micro_batches: int | None = None


class StepLines(NamedTuple):
    """A step that a program printed, in seconds, and what else its lines say.

    `facts` are sentences; `micro_batches`: of a step; `assumed`: what the lines do not tell.
    `global_batch`: samples of a step on all ranks; None: not told.
    """

    program: str
    step_s: float
    facts: tuple[str, ...]
    micro_batches: int = 1
    assumed: tuple[str, ...] = ()
    global_batch: int | None = None


class TooLittle(NamedTuple):
    """What was recognised, and what it lacks to tell a step."""

    program: str
    lacks: str


def steady(readings: Sequence[Reading]) -> list[Reading]:
    """Readings without the first half: first steps are slower, and bars average.

    Of few readings those count that are no slower than the later half.
    """
    later = readings[len(readings) // 2 :]
    if len(readings) > _FEW:
        return [*later]
    most = _SLOWER * median(each.step_s for each in later)
    return [each for each in readings if each.step_s <= most]


def middle(readings: Sequence[Reading]) -> float:
    """The median of the steady steps."""
    return median(each.step_s for each in steady(readings))


def span(times_s: Sequence[float]) -> list[str]:
    """The shortest and the longest of times, where they differ."""
    least, most = min(times_s), max(times_s)
    if most < _WIDE * least:
        return []
    return [f"times from {format_duration(least)} to {format_duration(most)}"]


def longest(readings: Iterable[Reading]) -> tuple[list[Reading], list[str]]:
    """The run with the most steps, and what to say of the others.

    Each source has runs of its own. A count that falls begins a run.
    """
    runs: dict[str, list[list[Reading]]] = defaultdict(list)
    for each in readings:
        of_source = runs[each.source]
        if not of_source or each.at < of_source[-1][-1].at:
            of_source.append([])
        of_source[-1].append(each)
    every = [run for of_source in runs.values() for run in of_source]
    taken = max(reversed(every), key=_steps)
    return taken, apart([run for run in every if run is not taken], middle(taken))


def _steps(run: Sequence[Reading]) -> tuple[object, ...]:
    first, last = run[0].at, run[-1].at
    risen = tuple(b - a for a, b in zip(first, last, strict=True))
    return risen, len(run), last


def apart(others: Sequence[Sequence[Reading]], step_s: float) -> list[str]:
    """What is said of runs that are left out: how many, and the steps that differ."""
    if not others:
        return []
    times = [middle(run) for run in others]
    differ = [time_s for time_s in times if not 1 / _SLOWER < time_s / step_s < _SLOWER]
    note = f"left out: {counted(len(others), 'other run')}"
    if not differ:
        return [f"{note} with the same step"]
    ends = dict.fromkeys(format_duration(time_s) for time_s in (min(differ), max(differ)))
    return [f"{note}, {len(differ)} with another step ({' to '.join(ends)})"]


class _Bar(NamedTuple):
    """One state of a bar, by its place among all. `epoch`: the first number in its label."""

    place: int
    step: int
    at_s: float
    step_s: float
    epoch: int


class _Loop:
    """All states of bars with one label and one total, in passes from the first iteration on."""

    def __init__(self, source: str, label: str, total: str | None, unit: str) -> None:
        self.source, self.label, self.total = source, label, int(total) if total else None
        self.passes: list[list[_Bar]] = []
        is_train, is_evaluation = _TRAIN.search(label), _EVALUATION.search(label)
        self.trains = bool(is_train and not is_evaluation)
        self.evaluates = bool(is_evaluation and not is_train)
        is_iteration = _ITERATION.fullmatch(unit.removeprefix("s/").removesuffix("/s"))
        is_other = _OTHER.search(label) and not _TRAIN.match(label)
        self.is_other = bool(is_other or not is_iteration)

    def add(self, bar: _Bar) -> None:
        """Put a state where it belongs: after the last step, or where one falls, a pass begins."""
        last = self.passes[-1][-1] if self.passes else None
        has_ended = last and last.step == self.total and last.at_s != bar.at_s
        if not last or has_ended or _FALLS * bar.step < last.step or _FALLS * bar.at_s < last.at_s:
            self.passes.append([])
        self.passes[-1].append(bar)

    @property
    def bars(self) -> list[_Bar]:
        return [bar for each in self.passes for bar in each]

    @cached_property
    def runs(self) -> list[list[list[_Bar]]]:
        """Passes of each run: after one that did not end, a pass of no later epoch is a restart."""
        runs = [[self.passes[0]]]
        for before, each in pairwise(self.passes):
            has_ended = self.total is None or before[-1].step == self.total
            later = each[0].epoch - before[0].epoch
            if later < 0 or not (has_ended or later):
                runs.append([])
            runs[-1].append(each)
        return runs

    @cached_property
    def taken(self) -> list[list[_Bar]]:
        """The run with the most iterations; of equal ones the last."""
        return max(reversed(self.runs), key=_iterations)

    @property
    def step_s(self) -> float:
        return middle(_readings(self.taken))

    @property
    def disagrees(self) -> bool:
        """Whether passes, or many states, differ as training and evaluation do."""
        whole = [p for p in self.passes if len(p) >= _ENOUGH or p[-1].step == self.total]
        step_s, late = self.step_s, [bar for bar in self.bars if bar.step > _EARLY]
        off = sum(not 1 / _OFF < bar.step_s / step_s < _OFF for bar in late)
        return off > _FEW_OFF * len(late) or _differ([middle(_readings([each])) for each in whole])

    def __str__(self) -> str:
        name = f"'{self.label}'" if self.label else "without a label"
        of = f" of {self.total:,}" if self.total else ""
        return f"bars {name}{of} ({format_duration(self.step_s)} each)"


def bars(lines: Iterable[Printed]) -> Iterator[StepLines | TooLittle]:
    """The step that a text's bars tell; nothing, where no bar may be of training."""
    loops, program = _loops(lines)
    if len(loops) > _MOST_LOOPS:
        yield TooLittle(program, f"draws {len(loops):,} different bars; keep those of training")
        return
    _label_by_total(loops)
    may_train = [each for each in loops if not (each.evaluates or each.is_other)]
    left_out = [f"left out: {each}" for each in loops if each not in may_train]
    if not may_train:
        if loops:
            yield TooLittle(program, f"needs bars of training; {'; '.join(left_out)}")
        return
    loop, unclear = _of_training(may_train)
    if unclear:
        named = "; ".join(dict.fromkeys(map(str, may_train)))
        yield TooLittle(program, f"{unclear}: {named}; keep those of training, or label them")
        return
    run = _readings(loop.taken)
    if len(run) < _ENOUGH:
        more = counted(_ENOUGH - len(run), "more bar")
        yield TooLittle(program, f"{counted(len(run), 'bar')} of training; needs {more}")
        return
    step_s = middle(run)
    facts = [f"a step takes {format_duration(step_s)}, the median of {counted(len(run), 'line')}"]
    facts += span([each.step_s for each in steady(run)])
    others = [_readings(each) for each in loop.runs if each is not loop.taken]
    # other ranks or pods print the same loop
    twins = [
        each
        for each in may_train
        if each is not loop and (each.label, each.total) == (loop.label, loop.total)
    ]
    facts += apart([*others, *(_readings(each.taken) for each in twins)], step_s)
    facts += [f"left out: {each}" for each in may_train if each is not loop and each not in twins]
    label = () if loop.trains or loop.label else ("its bars are of training: they have no label",)
    yield StepLines(program, step_s, (*facts, *left_out), assumed=(*label, MAY_ACCUMULATE))


def _loops(lines: Iterable[Printed]) -> tuple[list[_Loop], str]:
    loops: dict[tuple[str, str, str | None], _Loop] = {}
    program, place = "tqdm (accelerate, transformers' Trainer)", 0
    for line, label, bar in _drawn(lines):
        step_s = _seconds(bar["rate"], bar["unit"])
        if not 0 < step_s < LONGEST_S:
            continue
        if "v_num" in bar["rest"]:
            program = "Lightning"
        key = line.source, _FIGURE.sub("#", label), bar["total"]
        loop = loops.setdefault(key, _Loop(*key, bar["unit"]))
        number, place = re.search(r"\d{1,12}", label), place + 1
        epoch = int(number[0]) if number else 0
        loop.add(_Bar(place, int(bar["step"]), clock_s(bar["elapsed"]), step_s, epoch))
    return [*loops.values()], program


def _drawn(lines: Iterable[Printed]) -> Iterator[tuple[Printed, str, re.Match[str]]]:
    """Each bar, and what stands before it in its line and belongs to it."""
    for line in lines:
        if not any(mark in line.text for mark in MARKS_OF_BARS):
            continue
        end = line.start
        for bar in (bar for wanted in _BARS for bar in wanted.finditer(line.text, end)):
            before = _REST.sub("", line.text[end : bar.start()])
            starts = [*_BEFORE_BAR.finditer(before)]
            label = before[: starts[-1].start()] if starts else before
            yield line, _CUT_OFF.split(label)[-1].strip(" :\t")[-40:], bar
            end = bar.end()


def _seconds(rate: str, unit: str) -> float:
    value = float(rate)
    return value if unit.startswith("s/") else 1 / value if value else 0.0


def _iterations(run: Sequence[Sequence[_Bar]]) -> tuple[int, int]:
    counted_up = sum(each[-1].step - (each[0].step if len(each) > 1 else 0) for each in run)
    return counted_up, sum(map(len, run))


def _readings(run: Iterable[Iterable[_Bar]]) -> list[Reading]:
    return [Reading("", (bar.step,), bar.step_s) for each in run for bar in each]


def _differ(times_s: Sequence[float], by: float = _APART) -> bool:
    return bool(times_s) and max(times_s) > by * min(times_s)


def _label_by_total(loops: Sequence[_Loop]) -> None:
    """A bar whose label is cut off or missing is of evaluation if its total and its rate are."""
    for each in loops:
        alike = [o for o in loops if o.total == each.total is not None and o is not each]
        if each.trains or each.evaluates or any(other.trains for other in alike):
            continue
        each.evaluates = any(o.evaluates and not _differ([o.step_s, each.step_s]) for o in alike)


def _of_training(loops: Sequence[_Loop]) -> tuple[_Loop, str]:
    """The loop whose iterations are steps, or why it is not clear which one is."""
    outer = {  # those of which nearly every iteration holds a pass of another
        a
        for a in loops
        for b in loops
        if _lasts_passes(a, b)
        and len(b.passes) >= _WHOLE * max(1, a.bars[-1].step - a.bars[0].step)
    }
    inner = [each for each in loops if each not in outer]
    if any(a.bars[-1].step - a.bars[0].step < _FALLS for a in outer):
        return loops[0], "which of these bars is of epochs is not clear"
    named = [each for each in inner if each.trains]
    may = named or inner
    taken = max(may, key=lambda each: _iterations(each.taken))
    if named:
        return taken, ""
    if any(each.disagrees for each in may):
        return taken, "passes of one bar differ as training and evaluation do"
    if _differ([each.step_s for each in may], _ALIKE):
        within = [a for a in may if all(a is b or _is_drawn_within(b, a) for b in may)]
        if len(within) != 1:
            return taken, "which of these bars is of training is not clear"
        taken = within[0]
    return taken, ""


def _lasts_passes(outer: _Loop, inner: _Loop) -> bool:
    """Whether an iteration of one lasts as long as a pass of the other."""
    if outer is inner or outer.source != inner.source:
        return False
    count = inner.total or max(bar.step for bar in inner.bars)
    return outer.step_s >= _WHOLE * count * inner.step_s


def _is_drawn_within(inner: _Loop, outer: _Loop) -> bool:
    """Whether passes of one, such as Trainer's evaluation, interrupt a pass of the other.

    A pass must last longer than a step, and be rarer: else steps may be what is drawn within.
    """
    if _lasts_passes(outer, inner) or outer.source != inner.source:
        return False
    begins, ends = ([p[end].place for p in inner.passes] for end in (0, -1))
    for each in outer.passes:
        first, last = each[0], each[-1]
        held = inner.passes[bisect_right(begins, first.place) : bisect_left(ends, last.place)]
        within_s = sum(p[-1].at_s for p in held)
        # its own time goes on meanwhile, if both are of one run
        goes_on = last.at_s - first.at_s >= _WHOLE * within_s
        if held and goes_on and last.step - first.step > _FALLS * len(held):
            return all(p[0].place > first.place for p in inner.passes)
    return False
