"""Write what the commands answer to every scenario, to compare two states of the code.

    python tools/answers.py before          # at one commit
    python tools/answers.py after           # at another; names of scenarios may follow
    diff -r before after                    # nothing: the answers are the same bytes

Commands run in this process, so that imports are paid once. Needs no network and no GPU.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

from ddpsim.cli import main

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
COMMANDS = {
    "run": ("run", "{}", "--json"),
    "run-text": ("run", "{}"),
    "run-reference": ("run", "{}", "--json", "--engine", "reference", "--set", "run.iterations=2"),
    "sweep": ("sweep", "{}", "--json", "--jobs", "1", "--set", "ddp.bucket_cap_mb=default,1,25"),
    "compare": ("compare", "{}", "--json", "--each-flag"),
    "tune": ("tune", "{}", "--json"),
    "plan": ("plan", "{}", "--json", "--target", "1M samples in 1 h", "--max-gpus", "64"),
    "explain-step": ("explain-step", "{}"),
    "explain-cluster": ("explain", "cluster", "{}"),
    "measured": ("run", "{}", "--measured", "900 ms"),
    "check": ("check", "{}"),
}
SLOW = {("run-reference", "machines-64xh100"), ("run-reference", "shared-network")}
ONCE = {
    "schema": ("schema",),
    "init": ("init",),
    "explain": ("explain",),
    "collective": ("collective", "--machine", "dgx-h100", "--json"),
}


def answer(*arguments: str) -> str:
    """What a command prints and how it exits."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["ddpsim", *arguments]
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return f"{out.getvalue()}--- errors\n{err.getvalue()}--- exit {code}\n"


def write_answers(folder: Path, only: list[str]) -> None:
    """One file for each command and scenario; `only`: of these scenarios, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, arguments in ONCE.items():
        (folder / f"{name}.txt").write_text(answer(*arguments), encoding="utf-8")
    for scenario in sorted(SCENARIOS.glob("*.yaml")):
        if only and scenario.stem not in only:
            continue
        for name, arguments in COMMANDS.items():
            if (name, scenario.stem) in SLOW:
                continue
            filled = [scenario.name if a == "{}" else a for a in arguments]
            (folder / f"{scenario.stem}.{name}.txt").write_text(answer(*filled), encoding="utf-8")
            print(scenario.stem, name, flush=True)


if __name__ == "__main__":
    target, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    os.chdir(SCENARIOS)
    write_answers(target, names)
