"""Chakra's messages in protobuf's wire format: each behind its length, the metadata first.

Sources: schema/protobuf/et_def.proto (the numbers of the fields) and src/third_party/utils/
protolib.py (the lengths) of mlcommons/chakra; protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["SCHEMA", "Node", "encoded"]

SCHEMA = "1.0.2-chakra.0.0.4"
_VARINT, _BYTES = 0, 2  # wire types


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
    told = {"job": job, "simulated_by": "ddpsim"}
    head = _text(1, SCHEMA)
    head += b"".join(_field(2, _text(1, name) + _text(29, value)) for name, value in told.items())
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
    """Nothing for 0, which is a missing field's value."""
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
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
