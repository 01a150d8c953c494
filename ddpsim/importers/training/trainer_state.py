"""What Hugging Face's Trainer says of a run: trainer_state.json, and the metrics that it prints.

Source: transformers trainer_callback.py (TrainerState), trainer_utils.py (speed_metrics) and
trainer_pt_utils.py (log_metrics).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.text import Printed, clock_s
from ddpsim.importers.training.bars import Reading, StepLines, TooLittle, apart
from ddpsim.units import format_duration

MARKS_OF_TRAINER = ("_runtime", "_steps_per_second", "epoch")

_LEAST, _MOST = 1e-6, 1e9  # of rates and batches, within reason
_MUCH = 0.05  # of a run that evaluates, from which on that time is taken out of its mean
_METRIC = re.compile(
    r"\b((?:train|eval)_(?:runtime|steps_per_second))\b['\"]?\s*[:=]\s*['\"]?"
    r"((?:\d{1,5} days?, )?(?:\d{1,4}:\d\d:)?\d{1,9}(?:\.\d{1,9})?(?:e[-+]\d\d)?)"
    r"(?=['\",}]|\s*\n)"
)
_PRINTS = re.compile(r"['\"](?:eval_)?(?:loss|grad_norm)['\"]: .{0,2000}['\"]epoch['\"]: ")


class TrainerState(NamedTuple):
    """Of a whole run: seconds of a step, samples of it on all ranks and on one; None: untold."""

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
        round(samples / steps) if samples else None,
        round(batch) if batch and batch >= 1 else None,
    )


def trainer_lines(lines: Sequence[Printed]) -> Iterator[StepLines | TooLittle]:
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
    if share >= 1:
        yield TooLittle(program, "needs one run: evaluation took longer than what it is printed in")
        return
    if share:
        of = f"{format_duration(run.evaluation_s)} of {format_duration(run.runtime_s)}"
        without = format_duration(step_s * (1 - share))
        facts = [*facts, f"evaluation took {of}: without it a step takes {without}"]
    others = [[Reading("", (0,), 1 / each.steps_per_second)] for each in runs if each is not run]
    step_s *= 1 - share if share > _MUCH else 1
    yield StepLines(program, step_s, (*facts, *apart(others, step_s)))


class _Run(NamedTuple):
    runtime_s: float
    steps_per_second: float
    evaluation_s: float


def _runs(lines: Sequence[Printed]) -> Iterator[_Run]:
    """Runs of each rank that ended: evaluation before the end of one belongs to it."""
    told: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for each in lines:
        if "_runtime" in each.text or "_steps_per_second" in each.text:
            is_cut = each.text.rfind("{") > each.text.rfind("}")  # so may its last number be
            found = _METRIC.findall(each.text + "\n" * (each.is_whole and not is_cut))
            told[each.source] += [(metric, clock_s(value)) for metric, value in found]
    for metrics in told.values():
        runtime_s = evaluation_s = 0.0
        for metric, value in metrics:
            if metric == "eval_runtime":
                evaluation_s += value
            elif metric == "train_runtime":
                runtime_s = value
            elif metric == "train_steps_per_second" and runtime_s and _positive(value):
                yield _Run(runtime_s, value, evaluation_s)
                runtime_s = evaluation_s = 0.0


def _positive(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and isfinite(value) and _LEAST <= value <= _MOST else None
