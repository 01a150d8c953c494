"""Simulate scenarios drawn at random: python tools/fuzzing/scenarios.py COUNT [SEED].

Each is a shipped scenario with some keys changed to values that its schema takes, or to hostile
ones. It must end in an answer within reason or in one error. Prints a table of what came of them,
and each scenario that ended in something else or took more than 5 s of CPU. After 60 s of CPU it is
stopped.
"""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import ddpsim
from ddpsim.errors import DdpsimError
from ddpsim.scenario.schema import Scenario

SCENARIOS = sorted((Path(__file__).resolve().parents[2] / "scenarios").glob("*.yaml"))
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 16, 64, 100, 0.01, 0.3, 0.9, 1.5)
HOSTILE = ("null", "[]", "{}", "-1", "1e300", ".nan", "'x'", "10**30", "1e-300", "9999999999999")
UNITS = {
    "ms": ("0.1 ms", "5 ms", "2 s"),
    "GiB": ("1 KiB", "25 MB", "40 GiB"),
    "Gbit/s": ("1 Gbit/s", "25 GB/s", "400 Gbit/s"),
    "TFLOP/s": ("1 TFLOP/s", "312 TFLOP/s"),
    "samples/s": ("10 samples/s", "5000 samples/s"),
}
TRIES = 12  # changes a scenario
LONGEST_CPU_S = 5.0
STOPPED_AFTER_CPU_S = 60.0
MEMORY_BYTES = 8 << 30


class TooLong(BaseException):
    """Raised in a call that took STOPPED_AFTER_CPU_S; no handler of ddpsim's takes it."""


def too_long(*_: object) -> None:
    """Handle SIGVTALRM."""
    raise TooLong


def keys(schema: dict[str, Any], node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths of the format with their part of its schema."""
    for each in (node, *node.get("anyOf", ()), *node.get("oneOf", ())):
        at = schema["$defs"][each["$ref"].rpartition("/")[2]] if "$ref" in each else each
        for name, inner in at.get("properties", {}).items():
            own = f"{path}.{name}".lstrip(".")
            yield own, inner
            if own.count(".") < 3:
                yield from keys(schema, inner, own)


def value(schema: dict[str, Any], node: dict[str, Any], chance: random.Random) -> str:
    """A value as `--set` takes it."""
    if chance.random() < 0.05:
        return chance.choice(HOSTILE)
    at = chance.choice([node, *node.get("anyOf", ()), *node.get("oneOf", ())])
    if "$ref" in at:
        at = schema["$defs"][at["$ref"].rpartition("/")[2]]
    if "const" in at or "enum" in at:
        return json.dumps(chance.choice(at.get("enum", [at.get("const")])))
    if at.get("type") == "boolean":
        return chance.choice(("true", "false"))
    if examples := at.get("examples"):
        alike = [v for unit, v in UNITS.items() if re.search(rf"{unit}$", str(examples[0]))]
        return chance.choice(alike[0] if alike else examples)
    if at.get("type") in ("integer", "number"):
        return str(chance.choice(NUMBERS))
    return json.dumps(at["default"]) if "default" in at else chance.choice(HOSTILE)


def drawn(
    path: Path, known: list[tuple[str, Any]], schema: dict[str, Any], chance: random.Random
) -> tuple[list[str], Counter[str]]:
    """Changes that a scenario takes together, and what came of those that were tried."""
    settings: list[str] = []
    tried: Counter[str] = Counter()
    for key, node in chance.sample(known, TRIES):
        setting = f"{key}={value(schema, node, chance)}"
        said = outcome(lambda: ddpsim.load_scenario(path, [*settings, setting]))  # noqa: B023
        tried[f"a change {said}"] += 1
        if said == "answered":
            settings.append(setting)
        elif "FAULT" in said:
            print(said, path.name, *settings, setting, flush=True)
    return settings, tried


def simulated(path: Path, settings: list[str]) -> str:
    """What comes of a scenario."""
    return outcome(lambda: ddpsim.simulate(ddpsim.load_scenario(path, settings)))


def outcome(call: Callable[[], Any]) -> str:
    """What comes of a call, and whether it took long."""
    begun_s = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, STOPPED_AFTER_CPU_S)
    try:
        made = call()
        step_s = made.iteration_time_s.mean if isinstance(made, ddpsim.Result) else 1.0
        said = "answered" if isfinite(step_s) and 0 < step_s < 1e9 else f"FAULT: {step_s} s"
    except DdpsimError as error:
        said = f"refused: {type(error).__name__}"
    except TooLong:
        said = "FAULT: stopped"
    except Exception as error:  # noqa: BLE001 -- what this looks for
        traceback.print_exc()
        said = f"FAULT: {type(error).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    took_s = time.process_time() - begun_s
    return f"{said}, over {LONGEST_CPU_S:g} s of CPU" if took_s > LONGEST_CPU_S else said


def main(count: int, seed: int) -> None:
    """Print the table."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGVTALRM, too_long)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    chance = random.Random(seed)  # noqa: S311 -- no secret
    schema = Scenario.model_json_schema(by_alias=True)
    known = [each for each in keys(schema, schema) if each[0] not in ("schema", "name")]
    found: Counter[str] = Counter()
    try:
        for _ in range(count):
            path = chance.choice(SCENARIOS)
            settings, tried = drawn(path, known, schema, chance)
            said = simulated(path, settings)
            found += tried + Counter([said])
            if "FAULT" in said or "over" in said:
                print(said, path.name, *(f"--set '{each}'" for each in settings), flush=True)
    except KeyboardInterrupt:
        print("stopped")
    for said, times in found.most_common():
        print(f"{times:8,}  {said}")
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{peak_mb:8,.0f}  MB at most")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
