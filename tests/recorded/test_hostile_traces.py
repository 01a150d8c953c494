"""Traces that are not what the profiler wrote: never a crash, a hang, or a nonsensical answer."""

from __future__ import annotations

import gzip
import json
from copy import deepcopy
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs.kineto_scenarios import ON_CPU
from logs.kineto_writer import ACCUMULATE, Step, Writer

from ddpsim.errors import DdpsimError
from ddpsim.importers.kineto.ranks import read_rank_traces
from ddpsim.recorded.replay import replay
from ddpsim.scenario.quantity import SourceFile

STEP = Step(
    forward=[300.0],
    backward=[[200.0], [100.0]],
    optimizer=[50.0],
    reduced={0: 10, 1: 20},
    shapes=[(10,), (20,)],
    loader_us=20.0,
    waits=True,
)
HOSTILE = st.sampled_from(
    (None, True, -1, 0, 1e300, 10**30, float("nan"), "", "nccl", [], [[]], [[-1]], [[10**12]], {})
)


def written(on_gpu: bool, rank: int) -> dict[str, Any]:
    writer = Writer(world_size=2, rank=rank)
    for _ in range(3):
        if on_gpu:
            writer.step(STEP)
        else:
            writer.cpu_step(replace(ON_CPU, gloo_us=30.0))
    for event in writer.events:
        if event["name"] in ("gloo:all_reduce", ACCUMULATE) and not on_gpu:
            event["args"] = {"Input Dims": [[10]], "Input type": ["float"]}
    return writer.document()


WRITTEN = {on_gpu: [written(on_gpu, rank) for rank in (0, 1)] for on_gpu in (True, False)}


def answered(documents: list[Any], folder: Path) -> None:
    """It is an answer, or one error."""
    for rank, document in enumerate(documents):
        (folder / f"rank{rank}.json").write_text(json.dumps(document))
    try:
        found = replay(folder)
    except DdpsimError:
        return
    for seconds in (found.traced_s, found.simulated_s, found.predicted_s):
        assert isfinite(seconds)
        assert 0 <= seconds < 1e7
    json.dumps(found.to_dict(), allow_nan=False)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_changed_traces_end_in_an_answer_or_one_error(tmp_path: Path, data: st.DataObject) -> None:
    documents = deepcopy(WRITTEN[data.draw(st.booleans())])
    events = documents[0]["traceEvents"]
    for _ in range(data.draw(st.integers(1, 4))):
        event = events[data.draw(st.integers(0, len(events) - 1))]
        args = event.get("args")
        of = args if args and isinstance(args, dict) and data.draw(st.booleans()) else event
        of[data.draw(st.sampled_from(sorted(of)))] = data.draw(HOSTILE)
    if data.draw(st.booleans()):
        del events[data.draw(st.integers(0, len(events) - 1)) :]
    if data.draw(st.booleans()):
        events.reverse()
    answered(documents, tmp_path)


def test_what_a_fuzzer_kept_ends_in_an_answer_or_one_error(tmp_path: Path) -> None:
    """tools/fuzzing/readers.py: Atheris, 30 minutes; one made a wait that was less than nothing."""
    packed = Path(__file__).parents[1] / "data" / "fuzzed-kineto.json.gz"
    kept = json.loads(gzip.decompress(packed.read_bytes()))
    assert len(kept) > 40
    for each in kept:
        (tmp_path / "rank0.json").write_bytes(each.encode("latin-1"))
        try:
            found = read_rank_traces(SourceFile("rank0.json", tmp_path / "rank0.json"))
        except DdpsimError:
            continue
        times_s = (found.step_s, found.data_wait_s, found.exposed_s, *found.compute_s.values())
        assert all(isfinite(seconds) and seconds >= 0 for seconds in times_s)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_as_they_were_written_they_are_answered(tmp_path: Path, *, on_gpu: bool) -> None:
    for rank, document in enumerate(WRITTEN[on_gpu]):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(document))
    assert len(replay(tmp_path).steps) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"distributedInfo": {"world_size": 10**30, "rank": 0, "backend": "nccl"}},
        {"distributedInfo": {"world_size": -2, "rank": 0}},
        {"distributedInfo": {"world_size": 2, "rank": "one"}},
        {"distributedInfo": {"world_size": 2, "nccl_version": "2.99999999999999999999"}},
        {"distributedInfo": [1]},
        {"deviceProperties": [{"id": 0, "name": "A" * 10**5}]},
        {"deviceProperties": {"id": 0}},
    ],
    ids=str,
)
def test_a_head_may_say_anything(tmp_path: Path, change: dict[str, Any]) -> None:
    answered([WRITTEN[True][0] | change], tmp_path)
