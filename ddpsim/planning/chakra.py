"""A steady step as Chakra execution traces, one file a rank, which ASTRA-sim and others replay.

A trace is a graph: what a rank computes, what it sends, and what each waits for. When collectives
run and how long they take is for the reader to simulate. Sources: mlcommons/chakra,
schema/protobuf/et_def.proto (the numbers of the fields) and src/third_party/utils/protolib.py (the
lengths before messages, the metadata first); protobuf.dev/programming-guides/encoding; ASTRA-sim's
astra-sim/workload/Workload.cc for the attributes that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ddpsim.cluster.process_groups import cost_of
from ddpsim.cluster.transfers import duration_ns
from ddpsim.engine.noise import rank_factors
from ddpsim.errors import InputError
from ddpsim.files import write_atomically
from ddpsim.importers.chakra import ALL_REDUCE, COLLECTIVE, COMPUTE, is_simulated
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Await, Communicate, Compute, Record, Synchronize

_OPERATIONS = {
    "all_reduce": ALL_REDUCE,
    "broadcast": 5,
}  # CollectiveCommType, as far as ASTRA-sim has it
_STEM = "step"  # ASTRA-sim takes the files STEM.0.et, STEM.1.et, ...
SCHEMA = "1.0.2-chakra.0.0.4"
_VARINT, _BYTES = 0, 2  # wire types


def write_chakra(
    scenario: Scenario, folder: Path, ranks: Sequence[int] | None = None
) -> list[Path]:
    """Write `step.N.et` for each rank, None: all; the files in order.

    Those that ddpsim wrote there before are deleted: a reader takes all files of a folder for one
    job's.
    Raises ScenarioError as `simulate`, and InputError for a step with other collectives than those
    of DDP among all ranks, or if `folder` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError("--output", f"{folder} is a file; name a folder")
    job = resolve(scenario)
    _check(job)
    factors = rank_factors(scenario.cluster, scenario.run.seed, job.node_times)

    @cache
    def content(factor: float) -> bytes:
        return encoded(scenario.name, _Graph(job, factor).nodes())

    for earlier in folder.glob(f"{_STEM}.*.et"):
        if is_simulated(earlier):
            earlier.unlink()
    paths = []
    for rank in range(scenario.cluster.world_size) if ranks is None else ranks:
        paths.append(folder / f"{_STEM}.{rank}.et")
        write_atomically(paths[-1], content(factors.get(rank, 1.0)))
    return paths


def _check(job: Job) -> None:
    for each in job.program.steady_step:
        if isinstance(each, Communicate) and each.operation not in _OPERATIONS:
            raise InputError(
                "--format",
                f"chakra: a step of {job.scenario.ddp.strategy} sends {each.operation}, and only "
                "all-reduces and broadcasts are written, as those of ddp.strategy: ddp; write "
                "--format chrome",
            )
        if isinstance(each, Communicate) and each.group != "world":
            raise InputError(
                "--format",
                "chakra holds collectives among all ranks alone, and this step has some of fewer "
                "ranks; write --format chrome",
            )


class _Micros:
    """Rounds the works of a stream to microseconds, so that their sum stays exact."""

    def __init__(self) -> None:
        self._total_ns = 0

    def of(self, work_ns: int) -> int:
        before_us = round(self._total_ns / 1000)
        self._total_ns += work_ns
        return round(self._total_ns / 1000) - before_us


@dataclass
class _Graph:
    """One rank's step, whose device takes `factor` times as long as the usual one.

    By stream, `last` is the node that what comes next waits for.
    """

    job: Job
    factor: float
    last: dict[str, int] = field(default_factory=dict)
    waits: set[int] = field(default_factory=set)  # of the next work of the device
    ends: dict[int, int] = field(default_factory=dict)  # of collectives by their number
    records: dict[int, int | None] = field(default_factory=dict)
    count: int = 0
    micros: dict[str, _Micros] = field(default_factory=dict)

    def nodes(self) -> Iterator[Node]:
        """Yields nodes in an order in which each waits for earlier ones alone."""
        for each in self.job.program.steady_step:
            match each:
                case Compute(kind, host_ns, device_ns):
                    yield from self._host(f"launch {kind}", host_ns)
                    yield from self._device(kind, int(device_ns * self.factor))
                case Communicate():
                    yield from self._host(f"launch {each.operation}", each.host_ns)
                    yield from self._collective(each)
                case Await(number):
                    self.waits.add(self.ends[number])
                case Record(number):
                    self.records[number] = self.last.get("device")
                case Synchronize() if "device" in self.last:
                    self.last["host"] = self.last["device"]
                case _:  # marks; a loader's waits are not of the graph
                    pass

    def _host(self, name: str, work_ns: int) -> Iterator[Node]:
        if work_ns:
            yield self._work(name, "host", work_ns, self._after("host"), on_cpu=True)

    def _device(self, name: str, work_ns: int) -> Iterator[Node]:
        if work_ns:
            after = self.waits | self._after("device") | self._after("host")
            self.waits = set()
            yield self._work(name, "device", work_ns, after)

    def _collective(self, each: Communicate) -> Iterator[Node]:
        after = self._after("comm") | self._after("host") | self._started_by(each)
        if each.before_ns:
            yield self._work(f"before {each.operation}", "comm", each.before_ns, after)
            after = self._after("comm")
        cost = cost_of(self.job.network.cost, each.group)
        lasts_ns = duration_ns(cost.transfer(each.operation, each.size_bytes))
        name = f"bucket {each.bucket}" if each.bucket >= 0 else each.cause or "collective"
        yield self._node(
            *(f"{each.operation} {name}", "comm", COLLECTIVE, round(lasts_ns / 1000), after),
            attributes={
                "is_cpu_op": False,
                "comm_type": _OPERATIONS[each.operation],
                "comm_size": each.size_bytes,
            },
        )
        if each.after_ns:
            yield self._work(f"after {each.operation}", "comm", each.after_ns, self._after("comm"))
        self.ends[each.number] = self.last["comm"]

    def _started_by(self, each: Communicate) -> set[int]:
        """What of the device, or which other collective, it waits for."""
        if each.follows is not None:
            return {self.ends[each.follows]}
        if each.waits_for is None:
            return self._after("device")
        recorded = self.records[each.waits_for]
        return set() if recorded is None else {recorded}

    def _after(self, stream: str) -> set[int]:
        return {self.last[stream]} if stream in self.last else set()

    def _work(
        self, name: str, stream: str, work_ns: int, after: set[int], *, on_cpu: bool = False
    ) -> Node:
        lasts_us = self.micros.setdefault(stream, _Micros()).of(work_ns)
        return self._node(name, stream, COMPUTE, lasts_us, after, {"is_cpu_op": on_cpu})

    def _node(
        self,
        name: str,
        stream: str,
        kind: int,
        lasts_us: int,
        after: set[int],
        attributes: dict[str, bool | int],
    ) -> Node:
        node = Node(self.count, name, kind, lasts_us, tuple(sorted(after)), attributes)
        self.last[stream] = self.count
        self.count += 1
        return node


class Node(NamedTuple):
    """A piece of work or a collective: it lasts so many microseconds `after` other nodes' ends."""

    number: int
    name: str
    kind: int
    lasts_us: int
    after: tuple[int, ...]
    attributes: Mapping[str, bool | int]


def encoded(job: str, nodes: Iterable[Node]) -> bytes:
    """A file of a job's nodes."""
    labels = {"job": job, "simulated_by": "ddpsim"}
    head = _text(1, SCHEMA)
    head += b"".join(_field(2, _text(1, name) + _text(29, text)) for name, text in labels.items())
    return b"".join(map(_behind_length, (head, *map(_node, nodes))))


def _node(node: Node) -> bytes:
    parts = [_whole(1, node.number), _text(2, node.name), _whole(3, node.kind)]
    if node.after:
        parts.append(_field(5, b"".join(map(_varint, node.after))))  # data_deps, packed
    parts.append(_whole(7, node.lasts_us))
    parts += [_field(10, _attribute(*each)) for each in node.attributes.items()]
    return b"".join(parts)


def _attribute(name: str, value: bool | int) -> bytes:  # noqa: FBT001 -- of a type of its own
    number = 27 if isinstance(value, bool) else 9  # bool_val, int64_val
    return _text(1, name) + _tag(number, _VARINT) + _varint(int(value))


def _whole(number: int, value: int) -> bytes:
    """A field with a whole number; no bytes for 0, which a missing field means."""
    return _tag(number, _VARINT) + _varint(value) if value else b""


def _text(number: int, value: str) -> bytes:
    return _field(number, value.encode())


def _field(number: int, content: bytes) -> bytes:
    return _tag(number, _BYTES) + _behind_length(content)


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _behind_length(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)
