"""Chakra execution traces of real jobs: SYNTHETIC files in protobuf's wire format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shipped_scenarios import load

import ddpsim
from ddpsim.errors import ImportFailedError
from ddpsim.importers.chakra import read_chakra
from ddpsim.planning.chakra import write_chakra
from ddpsim.recorded.recognise import recognise
from ddpsim.scenario.quantity import SourceFile


def varint(value: int) -> bytes:
    low, high = value & 127, value >> 7
    return bytes([low | 128]) + varint(high) if high else bytes([low])


def text(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def whole(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def node(number: int, kind: int, lasts_us: int, **attributes: int | bytes) -> bytes:
    told = b""
    for name, value in attributes.items():
        known = text(29, value) if isinstance(value, bytes) else whole(9, value)
        told += text(10, text(1, name.encode()) + known)
    start = whole(6, 10 * number)
    return (
        whole(1, number) + text(2, b"a node") + whole(3, kind) + start + whole(7, lasts_us) + told
    )


def reduced(number: int, size: int, lasts_us: int, **attributes: int | bytes) -> bytes:
    return node(number, 7, lasts_us, comm_type=0, comm_size=size, **attributes)


MESSAGES = (
    text(1, b"0.0.4"),
    node(1, 4, 500, is_cpu_op=0),
    node(2, 4, 900, is_cpu_op=1),
    reduced(3, 4 * 2**20, 300),
    reduced(4, 4 * 2**20, 500, pg_name=b"0"),
    reduced(5, 2**20, 0),
    reduced(6, 2**24, 800, pg_name=b"3"),  # of some ranks alone
    node(7, 7, 60, comm_type=2, comm_size=2**20),  # an all-gather
)
FILE = b"".join(varint(len(each)) + each for each in MESSAGES)


@pytest.fixture
def source(tmp_path: Path) -> SourceFile:
    path = tmp_path / "rank.0.et"
    path.write_bytes(FILE)
    return SourceFile(str(path), path)


def test_times_of_all_reduces_are_read(source: SourceFile) -> None:
    found = read_chakra(source)
    assert found.compute_s == pytest.approx(500e-6)
    assert found.calls == {2**20: 1, 4 * 2**20: 2}
    assert found.all_reduces == {4 * 2**20: pytest.approx(400e-6)}
    (learned,) = recognise(source.path)
    assert learned.facts[0] == "7 nodes, 500 us of compute"
    assert "2 x all-reduce of 4.00 MiB, 400 us each" in learned.facts


def test_a_cluster_takes_them(source: SourceFile) -> None:
    cluster = {"device": "a100-sxm-80gb", "nodes": 1, "gpus_per_node": 4}
    scenario = ddpsim.load_scenario(
        {
            "schema": "ddpsim/1",
            "workload": {"model": "resnet50", "batch_per_rank": 8},
            "cluster": {**cluster, "all_reduce": source.given},
            "run": {"allow_extrapolation": True},
        }
    )
    warnings = ddpsim.simulate(scenario).warnings
    assert any("its all-reduces hold the waits for the others" in each for each in warnings)


def test_what_ddpsim_wrote_is_no_measurement(tmp_path: Path) -> None:
    scenario = load("resnet50-8xa100")
    (path,) = write_chakra(scenario, tmp_path, [0])
    with pytest.raises(ImportFailedError, match="was simulated by ddpsim trace, not measured"):
        recognise(path)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(FILE)), st.integers(0, 8), st.binary(max_size=12))
def test_damaged_files_end_in_an_answer_or_one_error(
    tmp_path: Path, at: int, cut: int, junk: bytes
) -> None:
    answered(FILE[:at] + junk + FILE[at + cut :], tmp_path)


def answered(content: bytes, folder: Path) -> None:
    """It is an answer, or one error."""
    path = folder / "damaged.et"
    path.write_bytes(content)
    try:
        found = read_chakra(SourceFile("damaged.et", path))
    except ImportFailedError:
        return
    assert all(0 < seconds <= 1e3 for seconds in found.all_reduces.values())


def test_what_a_fuzzer_kept_ends_in_an_answer_or_one_error(tmp_path: Path) -> None:
    """Each input reached a line that none before it did: Atheris, 30 minutes."""
    kept = json.loads((Path(__file__).parents[1] / "data" / "fuzzed-chakra.json").read_text())
    assert len(kept) > 50
    for each in kept:
        answered(bytes.fromhex(each), tmp_path)
