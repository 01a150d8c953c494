"""Casts of what units hand on: MixedPrecisionPolicy's output_dtype.

Source: torch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_state.py. `_post_forward` casts a
unit's outputs to output_dtype after its other hooks; `_pre_forward` casts the inputs of the next
one back to param_dtype before its own (cast_forward_inputs). The backward casts their gradients in
the reverse order. What the root's own modules take in between stays as it was cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from ddpsim.strategies.fully_shard.unit_step import LaunchedPiece, Pass
from ddpsim.strategies.fully_shard.units import ROOT, Piece
from ddpsim.strategies.ticks import Launch

Chain = tuple[int, ...]


def handed_on(pieces: Sequence[Piece]) -> dict[int, float]:
    """Elements that each unit hands on, from the pieces of a forward.

    Those of its last work; of the root the most since the last unit, as a head may have two parts.
    """
    found: dict[int, float] = {}
    for piece in pieces:
        found.update(dict.fromkeys(piece.chain[1:], piece.outputs))
        inside = len(piece.chain) > 1
        found[ROOT] = piece.outputs if inside else max(found.get(ROOT, 0.0), piece.outputs)
    return found


def with_casts(work: Pass, casts: Mapping[int, Launch], *, casts_inputs: bool) -> Pass:
    """A pass with casts by unit: out of each unit, and into one that follows it.

    `casts_inputs`: there is a type of parameters to which inputs are cast.
    """

    def cast(pieces: Sequence[LaunchedPiece]) -> list[LaunchedPiece]:
        return _cast(pieces, casts, casts_inputs=casts_inputs)

    return Pass(cast(work.forward), cast(work.backward[::-1])[::-1])


def _cast(
    pieces: Sequence[LaunchedPiece], casts: Mapping[int, Launch], *, casts_inputs: bool
) -> list[LaunchedPiece]:
    """In the order of a forward."""
    found: list[LaunchedPiece] = []
    for piece, following in zip(pieces, [*(each.chain for each in pieces[1:]), ()], strict=True):
        found.append(piece)
        found += _between(piece.chain, following, casts, casts_inputs=casts_inputs)
    return found


def _between(
    chain: Chain, following: Chain, casts: Mapping[int, Launch], *, casts_inputs: bool
) -> Iterator[LaunchedPiece]:
    """Between two pieces of work, as part of the unit that holds both."""
    alike = takewhile(lambda both: both[0] == both[1], zip(chain, following, strict=False))
    shared: Chain = tuple(unit for unit, _ in alike)
    if shared == chain:
        return
    cast = casts[chain[len(shared)]]
    enters = casts_inputs and bool(following) and shared != following
    for _ in range(1 + enters if cast.device_ns else 0):
        yield LaunchedPiece(shared or (ROOT,), cast)
