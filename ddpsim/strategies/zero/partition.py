"""What DeepSpeed sends of a bucket: slices of the ranks that optimize them, and who gets what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from ddpsim.cluster.transfers import Operation
from ddpsim.scenario.options.deepspeed import DeepSpeed

_ALIGNED = 2  # nccl_start_alignment_factor, elements


class Slice(NamedTuple):
    """Elements of a bucket that one rank optimizes."""

    rank: int
    elements: int


class Sent(NamedTuple):
    """One collective of a bucket; `is_copied`: its slices are copied together first."""

    operation: Operation
    elements: int
    is_copied: bool


def bucketed(order: Iterable[int], elements: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Parameters of each bucket: it is sent before one that would make it larger than `most`.

    A larger parameter has one of its own.
    """
    buckets: list[list[int]] = []
    held = most
    for i in order:
        if not buckets or held + elements[i] > most:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += elements[i]
    return [tuple(members) for members in buckets]


@dataclass(frozen=True)
class Partition:
    """All parameters in a row, cut into equal parts, one a rank.

    `elements`: of each parameter, in registration order.
    """

    elements: Sequence[int]
    ranks: int

    @property
    def part(self) -> int:
        """Elements of a rank."""
        return ceil(sum(self.elements) / (_ALIGNED * self.ranks)) * _ALIGNED

    def slices(self, members: Iterable[int]) -> list[Slice]:
        """The slices of a bucket; neighbours of one rank are one."""
        ends = list(accumulate(self.elements))
        slices: list[Slice] = []
        for i in members:
            for each in self._cut(ends[i] - self.elements[i], ends[i]):
                if slices and slices[-1].rank == each.rank:
                    each = Slice(each.rank, slices.pop().elements + each.elements)  # noqa: PLW2901
                slices.append(each)
        return slices

    def _cut(self, start: int, end: int) -> Iterator[Slice]:
        while start < end:
            rank = start // self.part
            upto = min(end, (rank + 1) * self.part)
            yield Slice(rank, upto - start)
            start = upto

    def sent(self, members: Sequence[int], options: DeepSpeed) -> list[Sent]:
        """The collectives of a bucket, in order (stage_1_and_2.py, average_tensor)."""
        whole = sum(self.elements[i] for i in members)
        if not options.reduce_scatter:
            return [Sent("all_reduce", whole, is_copied=False)]
        slices = self.slices(members)
        if options.use_multi_rank_bucket_allreduce:
            return list(_together("all_reduce", slices, options.reduce_bucket_size))
        owners = dict.fromkeys(each.rank for each in slices)
        return [
            sent
            for owner in owners
            for sent in _together(
                "reduce",
                [each for each in slices if each.rank == owner],
                options.reduce_bucket_size,
            )
        ]


def _together(operation: Operation, slices: Sequence[Slice], most: int) -> Iterator[Sent]:
    """Slices up to the first that makes them more than `most`, again and again."""
    held = count = 0
    for each in slices:
        held, count = held + each.elements, count + 1
        if held > most:
            yield Sent(operation, held, is_copied=count > 1)
            held = count = 0
    if count:
        yield Sent(operation, held, is_copied=count > 1)
