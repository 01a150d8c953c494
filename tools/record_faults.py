"""Record real gloo DDP with known faults, on a testbed of two hosts: python tools/record_faults.py.

Writes tests/data/faults: `steps.json`, for each fault the median step in seconds and that of the
bare model on the same two cores just before; and a trace of each rank, without what nobody reads.
Needs Linux, root, iproute2 and torch. Arguments: the faults to record anew.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from calibrate.testbed.bed import Testbed

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "tests" / "data" / "faults"
PROGRAM = ROOT / "tests" / "helpers" / "jobs" / "faulty_ranks.py"
FAULTS = (
    *("healthy", "slow_link", "competing", "slow_loader", "unused_parameters", "every_micro_batch"),
    *("accumulating", "stale_buckets"),
)
ROUNDS = 2
RATE = 125e6  # bytes per second of each host's link
_KINDS = ("cpu_op", "user_annotation")


def record(faults: Sequence[str]) -> None:
    """Each a few times, and the fastest kept: what else the machine does only lengthens steps."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    known = OUTPUT / "steps.json"
    steps: dict[str, dict[str, float]] = json.loads(known.read_text()) if known.exists() else {}
    steps = {fault: each for fault, each in steps.items() if fault not in faults}
    for fault in [fault for _ in range(ROUNDS) for fault in faults]:
        with tempfile.TemporaryDirectory() as scratch:
            found = _run(fault, Path(scratch))
            if fault not in steps or found["step_s"] < steps[fault]["step_s"]:
                steps[fault] = found
                for trace in Path(scratch).glob(f"{fault}-rank*.json"):
                    _keep(trace, OUTPUT / fault)
        known.write_text(json.dumps(steps, indent=2) + "\n")


def _run(fault: str, scratch: Path) -> dict[str, float]:
    """The median step of the fault, and of the model alone."""
    rates = [RATE, RATE / 5 if fault == "slow_link" else RATE]
    command = [sys.executable, str(PROGRAM), fault, str(scratch)]
    with Testbed(rates, cores=[{0}, {1}]) as bed:
        bed.run([command] * 2, timeout_s=300, on_line=lambda *_: None)
    found: dict[str, float] = json.loads((scratch / "steps.json").read_text())
    return found


def _keep(trace: Path, folder: Path) -> None:
    """Events of the host, without the stacks and counters of others."""
    folder.mkdir(exist_ok=True)
    document = json.loads(trace.read_text())
    kept = [
        {key: event[key] for key in ("ph", "cat", "name", "tid", "ts", "dur")}
        | {"args": {k: v for k, v in event.get("args", {}).items() if k.startswith("Input ")}}
        for event in document["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _KINDS
    ]
    head = {key: document[key] for key in ("schemaVersion", "distributedInfo") if key in document}
    content = json.dumps({**head, "traceEvents": kept}, separators=(",", ":"))
    name = trace.name.removeprefix(f"{folder.name}-")
    (folder / f"{name}.gz").write_bytes(gzip.compress(content.encode(), mtime=0))


if __name__ == "__main__":
    record(sys.argv[1:] or FAULTS)
