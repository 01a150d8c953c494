"""What may be wrong with a job: each cause with its odds, its change of the scenario, its signs.

Odds are assumptions: nobody publishes how often each cause occurs (docs/explanation/diagnosis.md).
"""

from __future__ import annotations

from ddpsim.diagnosis.case import Case
from ddpsim.diagnosis.hypothesis import Hypothesis, set_to
from ddpsim.diagnosis.links import BETWEEN_NODES, COLLECTIVES, IN_NODES
from ddpsim.diagnosis.option_hypotheses import DEBUGGING, OPTIONS
from ddpsim.diagnosis.own_work import COMPUTE, DATA
from ddpsim.result.diagnosis import HEALTHY

UNKNOWN, UNKNOWN_ODDS = "unknown", 4.0


def hypotheses_of(case: Case) -> list[Hypothesis]:
    """Lists the hypotheses that can apply to a case."""
    return [each for each in HYPOTHESES if each.sizes(case)]


def explained(name: str) -> list[str]:
    """Describe the cause of this name and its fix, in one line; no line where there is none."""
    key = name.strip().lower().replace(" ", "_").replace("-", "_")
    template = "{}: a cause that `diagnose` names. {}. Fix: {}"
    return [
        template.format(cause.key, cause.text.replace("{size}", "..."), cause.remedy)
        for cause in HYPOTHESES
        if cause.key == key
    ]


NOTHING = Hypothesis(
    HEALTHY,
    30.0,
    "nothing is wrong: the step is as long as predicted, within its uncertainty",
    "see ddpsim explain-step for what the step is made of",
    lambda _case: (1.0,),
    set_to(),
    graded=False,
)
HYPOTHESES: tuple[Hypothesis, ...] = (
    *(NOTHING, *IN_NODES, *BETWEEN_NODES, *COLLECTIVES),
    *(*COMPUTE, *DATA, *OPTIONS, *DEBUGGING),
)
