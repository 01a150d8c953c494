"""Memory and time of `import`, by hand: DDPSIM_IMPORT_MIB=1024 pytest benchmarks/test_import.py -s.

Each kind of file is read at half the size and at the whole, honest ones and hostile ones. Memory
must stay below three times the size, or below 2 GB; time at twice the size is shown as a ratio.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = int(os.environ.get("DDPSIM_IMPORT_MIB", "32"))
LARGEST_MB = 2000
READ = """
import resource, sys
from pathlib import Path
from ddpsim.errors import DdpsimError
from ddpsim.recorded.recognise import recognise
try:
    said = recognise(Path(sys.argv[1]))[0].kind
except DdpsimError as error:
    said = error.reason.partition(": ")[2][:60]
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_maxrss / 1024, used.ru_utime + used.ru_stime, said, sep="\\t")
"""
HEAD = b'{"schemaVersion": 1, "traceEvents": ['
# what a file begins with, what it repeats, what it ends with
KINDS: dict[str, tuple[bytes, bytes, bytes]] = {
    "lists.json": (HEAD, b"[],", b"{}]}"),
    "small-events.json": (HEAD, b'{"ph":"X","cat":"kernel","ts":1,"dur":1},', b"{}]}"),
    "one-value.json": (HEAD, b"[", b"]"),
    "document.json": (b'{"version": "1", "entries": [', b"[],", b"1]}"),
    "chakra.et": (b"\x00", b"\x04\x12\x02ab", b""),
    "dump.pkl": (b"\x80\x04", b"]\x94", b"."),
    "debug.log": (b"", b"h:1:1 NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/IPC\n", b""),
    "table.log": (b"", b"1024 256 float sum -1 10.0 1.0 1.0 0 10.0 1.0 1.0 0\n", b""),
    "bars.log": (b"", b"1/2 [00:01<00:01, 1.00s/it]\r", b""),
    "lines.log": (b"", b"iter 1: loss 2.0, time 100.00ms\n", b""),
    "words.log": (b"", b"INFO: epoch 1 begins, and says nothing of its steps\n", b""),
    "empty-lines.log": (b"x", b"\n", b""),
    "spaces.log": (b"x", b" ", b""),
    "bucket-sizes.log": (b"{", b"'bucket_sizes'", b""),
    "wide.log": ("━".encode(), b"x", b""),
}


def events(step: int) -> Iterator[bytes]:
    """One step of a GPU as torch 2 records it."""
    at, launch = 20_000 * step, 400 * step

    def event(category: str, name: str, thread: int, start: int, lasts: int, **args: object) -> str:
        shared = {"External id": launch, "Ev Idx": launch}
        return json.dumps(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": thread,
                "ts": at + start,
                "dur": lasts,
                "args": shared | args,
            }
        )

    def work(thread: int, start: int, name: str) -> Iterator[str]:
        nonlocal launch
        launch += 1
        yield event("cpu_op", name, thread, start, 30, **{"Input Dims": [[64, 64], [64, 64]]})
        yield event("cuda_runtime", "cudaLaunchKernel", thread, start + 5, 5, correlation=launch)
        sizes = {"grid": [8, 16, 1], "block": [128, 1, 1], "device": 0, "stream": 7}
        yield event("kernel", "sgemm", 7, start + 20, 30, correlation=launch, **sizes)

    every = [each for i in range(100) for each in work(1, 60 * i, "aten::mm")]
    every += [each for i in range(100) for each in work(2, 6_100 + 60 * i, "aten::mm")]
    every += [
        event("cpu_op", "torch::autograd::AccumulateGrad", 2, 6_095 + 60 * i, 3) for i in range(100)
    ]
    every.append(event("user_annotation", "Optimizer.step#SGD.step", 1, 13_000, 100))
    every += work(1, 13_010, "aten::add_")
    every.append(event("user_annotation", f"ProfilerStep#{step}", 1, 0, 14_000))
    yield (",\n".join(every) + ",\n").encode()


def written(path: Path, mib: int) -> Path:
    begin, unit, end = KINDS.get(path.name, (HEAD, b"", b"{}]}"))
    with path.open("wb") as file:
        file.write(begin)
        step, part = 1, unit * (2**20 // len(unit)) if unit else b"".join(events(1))
        while file.tell() + len(part) + len(end) <= mib << 20:
            file.write(part)
            step += 1
            part = part if unit else b"".join(events(step))
        file.write(end)
    return path


def read(path: Path) -> tuple[float, float, str]:
    """MB of memory, seconds of CPU, and what it was taken for."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    memory_mb, cpu_s, said = done.stdout.rstrip("\n").split("\t")
    return float(memory_mb), float(cpu_s), said


@pytest.mark.parametrize("name", ["trace.json", *KINDS])
def test_import(tmp_path: Path, name: str) -> None:
    _, half_s, _ = read(written(tmp_path / name, MIB // 2))
    memory_mb, whole_s, said = read(written(tmp_path / name, MIB))
    ratio = whole_s / half_s
    print(f"\n{name:18} {MIB} MiB {memory_mb:6.0f} MB {whole_s:6.1f} s {ratio:4.1f} x  {said}")
    assert memory_mb < max(3 * MIB * 1.048576, LARGEST_MB)
