"""Record real gloo DDP with known faults, on a testbed of two hosts: python tools/record_faults.py.

Writes tests/data/faults: `steps.json`, the medians of steps in seconds, and a trace of each rank in
each fault, without what nobody reads. Needs Linux, root, iproute2 and torch. Arguments: the faults
to record anew.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from calibrate.testbed.bed import Testbed

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "tests" / "data" / "faults"
PROGRAM = ROOT / "tests" / "helpers" / "oracles" / "faulty_ranks.py"
FAULTS = (
    *("healthy", "slow_link", "competing", "slow_loader", "unused_parameters", "every_micro_batch"),
    "accumulating",
)
RATE = 125e6  # bytes per second of each host's link
_KINDS = ("cpu_op", "user_annotation")
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}


def record(faults: Sequence[str]) -> None:
    """One after the other, and the model alone."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    known = OUTPUT / "steps.json"
    steps: dict[str, float] = json.loads(known.read_text()) if known.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for fault in faults:
            command = [sys.executable, str(PROGRAM), fault, name]
            if fault == "alone":
                subprocess.run(command, check=True, env={**os.environ, **_ALONE})  # noqa: S603 -- our own
            else:
                rates = [RATE, RATE / 5 if fault == "slow_link" else RATE]
                with Testbed(rates, cores=[{0}, {1}]) as bed:
                    bed.run([command] * 2, timeout_s=300, on_line=lambda *_: None)
                for rank in (0, 1):
                    _keep(scratch / f"{fault}-rank{rank}.json", OUTPUT / fault)
            steps[fault] = json.loads((scratch / f"{fault}.json").read_text())
    known.write_text(json.dumps(steps, indent=2) + "\n")


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
    record(sys.argv[1:] or ("alone", *FAULTS))
