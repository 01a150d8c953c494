"""trainer_state.json of Hugging Face's Trainer (transformers trainer_callback.py, TrainerState)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from ddpsim.errors import ImportFailedError

__all__ = ["TrainerState", "trainer_state"]

_LEAST, _MOST = 1e-6, 1e9  # of rates and batches, within reason


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


def _positive(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and isfinite(value) and _LEAST <= value <= _MOST else None
