"""Chakra execution traces of a rank: what its collectives took, where they carry times.

A file holds protobuf messages, each behind its length, of which the first tells of the file and the
others are nodes. Source: schema/protobuf/et_def.proto and src/third_party/utils/protolib.py of
mlcommons/chakra. Converted traces of real jobs have times; generated ones may have none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple

from ddpsim.errors import ImportFailedError
from ddpsim.importers.text import foreign
from ddpsim.scenario.quantity import SourceFile

_LARGEST_NODE, _MOST_NODES = 2**24, 2_000_000  # bytes of one; a step of a large model has 100,000
_MOST_BYTES, _LONGEST_US = 10**12, 10**9  # of a collective, within reason
_VARINT, _WORD, _BYTES, _HALF = 0, 1, 2, 5  # wire types
COMPUTE, COLLECTIVE = 4, 7  # NodeType
ALL_REDUCE = 0  # CollectiveCommType
_WORLD = ("", "0")  # names of the group of all ranks
_MOST_BITS, _LONGEST_VARINT = 64, 10
_BROKEN = "is cut off, or no Chakra execution trace; copy it anew"


class ChakraTrace(NamedTuple):
    """One rank's: how many nodes, what it computes, and its all-reduces among all ranks by bytes.

    `calls`: how many; `all_reduces`: their median seconds, where they are told.
    """

    nodes: int
    compute_s: float
    calls: dict[int, int]
    all_reduces: dict[int, float]


def is_simulated(path: Path) -> bool:
    """Whether ddpsim itself wrote a file."""
    try:
        head, _ = _first_two(SourceFile(str(path), path))
        return _is_ours(head)
    except (ImportFailedError, ValueError):
        return False


def _is_ours(head: dict[int, list[Any]]) -> bool:
    return bool(_attributes(head, 2).get("simulated_by") == b"ddpsim")


def is_of_chakra(source: SourceFile) -> bool:
    """Whether its first message is of a file and its second a node."""
    try:
        head, node = _first_two(source)
    except ValueError:
        return False
    is_head = head.keys() <= {1, 2} and all(
        isinstance(v, bytes) for vs in head.values() for v in vs
    )
    is_node = node.keys() <= set(range(1, 12)) and isinstance(node.get(2, [0])[0], bytes)
    return is_head and is_node


def _first_two(source: SourceFile) -> tuple[dict[int, list[Any]], dict[int, list[Any]]]:
    with foreign(source) as file:
        messages = _messages(BytesIO(file.read(2**16)))
    try:
        return _fields(next(messages)), _fields(next(messages))
    except StopIteration:
        raise ValueError from None


def read_chakra(source: SourceFile) -> ChakraTrace:
    """Read one; raises ImportFailedError."""
    name = source.given
    with foreign(source) as file:
        try:
            messages = map(_fields, _messages(file))
            if _is_ours(next(messages, {})):
                raise ImportFailedError(name, "was simulated by ddpsim trace, not measured")
            trace = _trace(islice(messages, _MOST_NODES + 1))
        except ValueError:
            raise ImportFailedError(name, _BROKEN) from None
    if trace.nodes > _MOST_NODES:
        raise ImportFailedError(
            name, f"holds more than {_MOST_NODES:,} nodes; give the trace of fewer steps"
        )
    return trace


def _trace(nodes: Iterable[dict[int, list[Any]]]) -> ChakraTrace:
    compute_us = count = 0
    calls: dict[int, int] = defaultdict(int)
    times_us: dict[int, list[int]] = defaultdict(list)
    for count, node in enumerate(nodes, 1):  # noqa: B007 -- how many there were
        lasts_us, kind, attributes = _whole(node, 7), _whole(node, 3), _attributes(node, 10)
        is_timed = 0 < lasts_us <= _LONGEST_US
        if kind == COMPUTE and is_timed and not attributes.get("is_cpu_op"):
            compute_us += lasts_us
        if kind == COLLECTIVE and (size := _all_reduced(attributes)):
            calls[size] += 1
            if is_timed:
                times_us[size].append(lasts_us)
    all_reduces = {size: median(times_us[size]) * 1e-6 for size in sorted(times_us)}
    return ChakraTrace(count, compute_us * 1e-6, dict(sorted(calls.items())), all_reduces)


def _all_reduced(attributes: dict[str, Any]) -> int:
    """Bytes of an all-reduce among all ranks; 0 for another collective."""
    group, size = attributes.get("pg_name", b""), attributes.get("comm_size")
    if not isinstance(group, bytes) or group.decode("utf-8", "replace") not in _WORLD:
        return 0
    is_one = attributes.get("comm_type") == ALL_REDUCE and isinstance(size, int)
    return size if is_one and size is not None and 0 < size <= _MOST_BYTES else 0


def _whole(node: dict[int, list[Any]], number: int) -> int:
    """The last value of a field, 0 where it is missing."""
    value = node.get(number, [0])[-1]
    if not isinstance(value, int):
        raise ValueError
    return value


def _attributes(message: dict[int, list[Any]], number: int) -> dict[str, Any]:
    """Values of attributes by name: numbers, truths, or bytes."""
    values = {}
    for content in message.get(number, []):
        if not isinstance(content, bytes):
            raise ValueError
        attribute = _fields(content)
        name = attribute.pop(1, [b""])[-1]
        attribute.pop(2, None)  # its description
        if isinstance(name, bytes) and attribute:
            values[name.decode("utf-8", "replace")] = next(iter(attribute.values()))[-1]
    return values


def _messages(file: BinaryIO) -> Iterator[bytes]:
    """Each behind its length; raises ValueError where one is cut off or larger than 16 MiB."""
    while begin := file.read(1):
        while begin[-1] >= 0x80 and len(begin) < _LONGEST_VARINT:
            begin += file.read(1) or b"\0"
        size, _ = _varint(begin, 0)
        if size > _LARGEST_NODE:
            raise ValueError
        yield _taken(file.read(size), 0, size)


def _fields(content: bytes) -> dict[int, list[Any]]:
    """Values by the number of their field; raises ValueError where they are cut off."""
    values: dict[int, list[Any]] = defaultdict(list)
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(content, at)
            values[number].append(value)
            continue
        size = {_WORD: 8, _HALF: 4}.get(wire)
        if wire == _BYTES:
            size, at = _varint(content, at)
        if size is None:
            raise ValueError
        values[number].append(_taken(content, at, size))
        at += size
    return dict(values)


def _taken(content: bytes, at: int, size: int) -> bytes:
    if at + size > len(content):
        raise ValueError
    return content[at : at + size]


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(content) and shift < _MOST_BITS:
        byte = content[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError
