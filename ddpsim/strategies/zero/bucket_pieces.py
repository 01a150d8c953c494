"""Which rank updates what of DDP's buckets under ZeroRedundancyOptimizer with overlap_with_ddp.

Source: torch 2.13's torch/distributed/optim/zero_redundancy_optimizer.py (_get_assigned_rank,
_bucket_assignments_per_rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ddpsim.errors import InputError


class Piece(NamedTuple):
    """What one rank updates of a bucket: parameters from `begin` to before `end`, in its order."""

    rank: int
    begin: int
    end: int


Assignment = tuple[tuple[Piece, ...], ...]


def assigned(
    buckets: Sequence[Sequence[int]], ranks: int, *, shard_buckets: bool = False
) -> Assignment:
    """The pieces of each bucket by rank; `buckets`: elements of each parameter, in their order.

    Raises InputError where torch stops: a bucket would have more pieces than there are ranks.
    """
    if not shard_buckets:
        return tuple((Piece(i % ranks, 0, len(bucket)),) for i, bucket in enumerate(buckets))
    most = sum(map(sum, buckets)) / ranks
    loads = [(0, rank) for rank in range(ranks)]  # a heap; of equal ranks the lowest comes first
    found: list[tuple[Piece, ...]] = [()] * len(buckets)
    for i in sorted(range(len(buckets)), key=lambda i: sum(buckets[i])):
        cuts = _cuts(buckets[i], most)
        if len(cuts) > ranks:
            raise InputError(
                "ddp.zero1.shard_buckets",
                f"parts a bucket in {len(cuts)} among {ranks} ranks, which take one each: torch "
                "stops in 'All indices are disallowed'; choose a smaller ddp.bucket_cap_mb",
            )
        taken = [heappop(loads) for _ in cuts]
        pieces = []
        for (begin, end), (load, rank) in zip(cuts, taken, strict=True):
            heappush(loads, (load + sum(buckets[i][begin:end]), rank))
            pieces.append(Piece(rank, begin, end))
        found[i] = tuple(sorted(pieces))
    return tuple(found)


def _cuts(bucket: Sequence[int], most: float) -> list[tuple[int, int]]:
    """Runs of a bucket's parameters with fewer elements than `most`, or of one parameter."""
    begins, size = [0], 0
    for i, numel in enumerate(bucket):
        if size + numel >= most and i > begins[-1]:
            begins.append(i)
            size = 0
        size += numel
    return list(zip(begins, [*begins[1:], len(bucket)], strict=True))
