"""Fuzz a reader with Atheris: python tools/fuzzing/readers.py import|chakra|kineto CORPUS ARGS.

CORPUS: a folder of inputs, kept from run to run; it is seeded with those of the tests. ARGS: of
libFuzzer, such as -max_total_time=1800. Every input must end in an answer within reason or in one
error; anything else stops the fuzzer. Needs atheris, which installs on Linux alone.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import tempfile
from math import isfinite
from pathlib import Path
from typing import Any
from zlib import crc32

import atheris

with atheris.instrument_imports(include=["ddpsim.importers", "ddpsim.recorded"]):
    from ddpsim.importers.chakra import read_chakra
    from ddpsim.importers.kineto.ranks import read_rank_traces
    from ddpsim.recorded.learned import starting_point
    from ddpsim.recorded.recognise import recognise
    from ddpsim.recorded.replay import replay
from ddpsim import load_scenario
from ddpsim.errors import DdpsimError
from ddpsim.scenario.quantity import SourceFile

TESTS = Path(__file__).resolve().parents[2] / "tests"
SCRATCH = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))  # noqa: S108 -- in memory
HOSTILE = (
    *(None, True, -1, 0, 1, 1e-300, 1e300, 10**30, float("nan"), "", "nccl", [], [[]], [[-1]]),
    *([[10**12]], {}, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "gloo:all_reduce", "1"),
)
REPLAYED = 0.2  # of those that can be read


def _check(times_s: list[float]) -> None:
    if not all(isfinite(each) and 0 <= each < 1e11 for each in times_s):
        raise ValueError(times_s)


def any_file(content: bytes) -> None:
    """Import a file of any kind, and check the scenario that it starts."""
    path = SCRATCH / "file"
    path.write_bytes(content)
    try:
        learned = recognise(path)
        load_scenario(starting_point(learned).document)
    except DdpsimError:
        return
    _check([each.step_s for each in learned if each.step_s is not None])


def chakra(content: bytes) -> None:
    """Read one execution trace."""
    path = SCRATCH / "rank.et"
    path.write_bytes(content)
    try:
        found = read_chakra(SourceFile("rank.et", path))
    except DdpsimError:
        return
    _check([*found.all_reduces.values(), found.compute_s])


def kineto(content: bytes) -> None:
    """Read the trace of a rank, and simulate its steps again."""
    path = SCRATCH / "rank0.json"
    path.write_bytes(content)
    try:
        found = read_rank_traces(SourceFile("rank0.json", path))
        _check([found.step_s, found.data_wait_s, found.exposed_s, *found.compute_s.values()])
        if crc32(content) % 100 < 100 * REPLAYED:
            told = replay(path)
            _check([told.traced_s, told.simulated_s])
            json.dumps(told.to_dict(), allow_nan=False)
    except DdpsimError:
        return


def changed_json(content: bytes, most: int, seed: int) -> bytes:
    """A trace with other values, events left out, twice or in another order; at times other bytes.

    Bytes changed at random are seldom JSON, and a reader's further lines are then not reached.
    """
    chance = random.Random(seed)  # noqa: S311 -- no secret
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    events = document.get("traceEvents") if isinstance(document, dict) else None
    is_whole = isinstance(events, list) and all(isinstance(each, dict) for each in events)
    if not events or not is_whole:
        return bytes(atheris.Mutate(content, most))
    if chance.random() < 0.1:
        return bytes(atheris.Mutate(content, most))
    for _ in range(chance.randint(1, 4)):
        _change(document, events, chance)
    return json.dumps(document).encode()[:most]


def _change(document: dict[str, Any], events: list[dict[str, Any]], chance: random.Random) -> None:
    if not events:
        return
    event, how = chance.choice(events), chance.random()
    args = event.get("args")
    of: dict[str, Any] = args if isinstance(args, dict) and args and how < 0.3 else event
    if how < 0.05:
        of = document.setdefault("distributedInfo", {}) if how < 0.03 else document
        of = of if isinstance(of, dict) else document
    if how < 0.5 and of:
        key = chance.choice(sorted(of))
        if key != "traceEvents":
            of[key] = chance.choice(HOSTILE)
    elif how < 0.7 and isinstance(event.get("ts"), (int, float)):
        key = chance.choice(("ts", "dur"))
        shift = chance.choice((1, -1)) * 10 ** chance.uniform(-1, 4)
        event[key] = max(0, event[key] + shift) if isinstance(event.get(key), (int, float)) else 1
    elif how < 0.8:
        event["name"] = chance.choice(events).get("name")
    elif how < 0.88:
        events.remove(event)
    elif how < 0.94:
        events.insert(chance.randrange(len(events)), dict(event))
    elif how < 0.97:
        event["tid"] = chance.choice(events).get("tid")
    else:
        chance.shuffle(events)


def _seeds(reader: str) -> list[bytes]:
    """The inputs that the tests keep, as a fuzzer reads them."""
    if reader == "chakra":
        kept = TESTS / "data" / "fuzzed-chakra.json"
        return [bytes.fromhex(each) for each in json.loads(kept.read_text())]
    packed = TESTS / "data" / f"fuzzed-{reader}.json.gz"
    return [each.encode("latin-1") for each in json.loads(gzip.decompress(packed.read_bytes()))]


READERS = {"import": any_file, "chakra": chakra, "kineto": kineto}

if __name__ == "__main__":
    reader, corpus = sys.argv[1], Path(sys.argv[2])
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(_seeds(reader)):
        (corpus / f"seed{number}").write_bytes(seed)
    mutator = {"custom_mutator": changed_json} if reader == "kineto" else {}
    arguments = [sys.argv[0], str(corpus), "-max_len=65536", *sys.argv[3:]]
    atheris.Setup(arguments, READERS[reader], **mutator)
    atheris.Fuzz()
