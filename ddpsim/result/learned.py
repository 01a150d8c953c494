"""What a file tells of a job: facts in words, a measured step, and keys of a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Learned:
    """One thing that a file turned out to be.

    `keys`: of a scenario, by section; `step_s`: a step that was measured; `option`: one of
    `ddpsim diagnose` that takes the file. `global_batch`: samples of a step on all ranks.
    `tells_nothing`: the facts say what it lacks.
    """

    file: str
    kind: str
    facts: tuple[str, ...]
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    step_s: float | None = None
    option: str | None = None
    assumed: tuple[str, ...] = ()
    tells_nothing: bool = False
    global_batch: int | None = None
