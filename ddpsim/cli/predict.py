"""What `ddpsim run` does once its options are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ddpsim.cli.waiting import waiting
from ddpsim.engine.run import EngineMode
from ddpsim.prediction.api import load_and_simulate
from ddpsim.report.text import render
from ddpsim.result.requirements import Requirement


def predict(
    file: Path,
    settings: Sequence[str],
    measured_s: float | None = None,
    engine: EngineMode = "auto",
    *,
    as_json: bool,
    verbose: bool,
    required: Sequence[Requirement] = (),
) -> None:
    """Print the prediction of a scenario, and whether a measured step is normal.

    Ends with exit code 1 where the job does not fit, or not keep to what is `required`.
    """
    with waiting():
        scenario, result = load_and_simulate(file, settings, engine)
    verdict = None
    if measured_s:
        from ddpsim.diagnosis.diagnose import judge

        verdict = judge(scenario, result, measured_s)
    if as_json:
        shown = result.to_dict() | ({"verdict": asdict(verdict)} if verdict else {})
        print(json.dumps(shown, indent=2))
    else:
        print(render(result, str(file), verdict, settings, verbose=verbose))
    wanted = dict.fromkeys((Requirement("fits"), *required))
    if failures := [failure for each in wanted if (failure := each.failure(result))]:
        print(f"ddpsim: {'; '.join(failures)}", file=sys.stderr)
        sys.exit(1)
