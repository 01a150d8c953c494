"""Chakra execution traces: read by a decoder of the wire format that is written here anew."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from outcome import Outcome
from shipped_scenarios import ROOT, load

import ddpsim
from ddpsim.errors import InputError
from ddpsim.planning.chakra import write_chakra
from ddpsim.prediction.resolve import resolve

Message = dict[int, list[Any]]
Cli = Callable[..., Outcome]

# numbers of fields in et_def.proto
ID, NAME, TYPE, CTRL_DEPS, DATA_DEPS, DURATION, ATTR = 1, 2, 3, 4, 5, 7, 10
INT64, BOOL, STRING = 9, 27, 29
COMP, COMM_COLL = 4, 7


def varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def message(content: bytes) -> Message:
    """Values by the number of their field, as protobuf's guide to the encoding has it."""
    found: Message = {}
    at = 0
    while at < len(content):
        tag, at = varint(content, at)
        value: Any
        if tag & 7 == 0:
            value, at = varint(content, at)
        elif tag & 7 == 1:
            (value,), at = struct.unpack("<d", content[at : at + 8]), at + 8
        else:
            assert tag & 7 == 2
            size, at = varint(content, at)
            value, at = content[at : at + size], at + size
            assert len(value) == size
        found.setdefault(tag >> 3, []).append(value)
    return found


def messages(path: Path) -> list[Message]:
    content, at, found = path.read_bytes(), 0, []
    while at < len(content):
        size, at = varint(content, at)
        found.append(message(content[at : at + size]))
        at += size
    assert at == len(content)
    return found


def packed(content: bytes) -> Iterator[int]:
    at = 0
    while at < len(content):
        value, at = varint(content, at)
        yield value


def attributes(node: Message) -> dict[str, Any]:
    told = {}
    for each in map(message, node.get(ATTR, [])):
        (value,) = (each[kind][0] for kind in (INT64, BOOL, STRING) if kind in each)
        told[each[1][0].decode()] = value
    return told


def after(node: Message) -> list[int]:
    return [number for part in node.get(DATA_DEPS, []) for number in packed(part)]


def longest_us(nodes: list[Message]) -> int:
    """The longest path: a step whose streams do one thing after the other."""
    ends: dict[int, int] = {}
    for node in nodes:
        begins = max((ends[each] for each in after(node)), default=0)
        ends[node.get(ID, [0])[0]] = begins + node.get(DURATION, [0])[0]
    return max(ends.values())


MEASURED = {
    "schema": "ddpsim/1",
    "name": "a job",
    "workload": {"model": "resnet50", "batch_per_rank": 64, "step_time": "75 ms"},
    "ddp": {"broadcast_buffers": False},
    "cluster": {
        "device": "a100-sxm-80gb",
        "nodes": 2,
        "gpus_per_node": 2,
        "inter_node": {"bandwidth": "10 Gbit/s", "transport": "tcp"},
        "stragglers": {"factors": {3: 1.2}},
    },
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[ddpsim.Scenario, list[Path]]:
    scenario = ddpsim.load_scenario(MEASURED)
    return scenario, write_chakra(scenario, tmp_path_factory.mktemp("et"))


def test_a_file_a_rank_begins_with_the_metadata(
    written: tuple[ddpsim.Scenario, list[Path]],
) -> None:
    _, paths = written
    assert [path.name for path in paths] == [f"step.{rank}.et" for rank in range(4)]
    head, *nodes = messages(paths[0])
    assert head[1] == [b"1.0.2-chakra.0.0.4"]
    told = message(head[2][0])
    assert (told[1], told[STRING]) == ([b"job"], [b"a job"])
    assert [node.get(ID, [0])[0] for node in nodes] == list(range(len(nodes)))


def test_the_graph_is_the_simulated_step(written: tuple[ddpsim.Scenario, list[Path]]) -> None:
    """Its longest path on the slowest rank is the step; collectives are DDP's."""
    scenario, paths = written
    nodes = messages(paths[3])[1:]
    assert 1e-6 * longest_us(nodes) == pytest.approx(resolve(scenario).step_s(), rel=0.01)
    collectives = [node for node in nodes if node[TYPE] == [COMM_COLL]]
    sent = [attributes(each) for each in collectives]
    buckets = ddpsim.simulate(scenario).buckets
    assert [each["comm_size"] for each in sent] == [bucket.size_bytes for bucket in buckets]
    assert {each["comm_type"] for each in sent} == {0}
    assert not any(each["is_cpu_op"] for each in sent)
    assert all(number < node.get(ID, [0])[0] for node in nodes for number in after(node))


def test_a_slow_rank_computes_longer(written: tuple[ddpsim.Scenario, list[Path]]) -> None:
    _, paths = written
    usual_us, slow_us = (
        sum(
            node.get(DURATION, [0])[0]
            for node in messages(path)[1:]
            if node[TYPE] == [COMP] and not attributes(node)["is_cpu_op"]
        )
        for path in paths[2:]
    )
    assert slow_us == pytest.approx(1.2 * usual_us, rel=1e-3)


def test_a_folder_holds_the_last_export_alone(tmp_path: Path, cli: Cli) -> None:
    """But for files that ddpsim did not write."""
    other = tmp_path / "step.7.et"
    other.write_bytes(b"\x02\x0a\x00\x02\x08\x01")
    write_chakra(ddpsim.load_scenario(MEASURED), tmp_path)
    scenario = str(ROOT / "scenarios" / "resnet50-8xa100.yaml")
    settings = ("--set", "cluster.gpus_per_node=2")
    done = cli("trace", scenario, "-o", str(tmp_path), "--format", "chakra", *settings)
    assert f"ASTRA-sim takes it as --workload-configuration={tmp_path / 'step'}" in done.out
    left = ["step.0.et", "step.1.et", other.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_what_a_graph_cannot_hold_is_refused(tmp_path: Path, cli: Cli) -> None:
    with pytest.raises(
        InputError, match=r"a step of fully_shard sends all_gather, .*; write --format chrome"
    ):
        write_chakra(load("llama-70b-fully-shard"), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; name a folder"):
        write_chakra(ddpsim.load_scenario(MEASURED), tmp_path / "file")
    scenario = ROOT / "scenarios" / "resnet50-8xa100.yaml"
    out = str(tmp_path / "et")
    done = cli("trace", str(scenario), "-o", out, "--format", "et")
    assert (done.code, "'et' is not known; write chrome or chakra" in done.err) == (2, True)
    done = cli("trace", str(scenario), "-o", out, "--format", "chakra", "--ranks", "0,1")
    assert (done.code, done.err) == (0, "")
    assert "one steady step of 2 ranks" in done.out
    assert "ASTRA-sim needs all 8 ranks: leave out --ranks" in done.out
    assert sorted(path.name for path in Path(out).iterdir()) == ["step.0.et", "step.1.et"]
    refused = cli("trace", str(scenario), "-o", out, "--format", "chakra", "--gzip")
    assert (refused.code, "writes one steady step" in refused.err) == (2, True)
