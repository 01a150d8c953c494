"""The strategy of torch's `fully_shard`: ZeRO-3, or ZeRO-2 where parameters stay in the forward.

Units may cast what they hand on: MixedPrecisionPolicy's output_dtype. Source: torch 2.13
torch/distributed/fsdp/_fully_shard/_fsdp_state.py. `_post_forward` casts a unit's outputs to
output_dtype after its other hooks; `_pre_forward` casts the inputs of the next one back to
param_dtype before its own (cast_forward_inputs). The backward casts their gradients in the reverse
order. What the root's own modules take in between stays as it was cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.fully_shard.groups import Group, Groups
from ddpsim.strategies.fully_shard.muon import muon_apart
from ddpsim.strategies.fully_shard.sharded import Sharded, passes_of
from ddpsim.strategies.fully_shard.step import Step
from ddpsim.strategies.fully_shard.unit_step import DeviceMesh, Ends, LaunchedPiece, Offload, Pass
from ddpsim.strategies.fully_shard.units import ROOT, Piece, forward_pieces, plan_units
from ddpsim.strategies.ticks import Launch
from ddpsim.strategies.training_loop.around_optimizer import AroundOptimizer
from ddpsim.workload.optimizer import beside_muon, moved_bytes

_WORDS = Sharded.phases | {"all_reduce": "all-reduces of gradients between nodes"}
# where Muon's products are shared out by DTensor
_WITH_MUON = {
    "all_gather": "all-gathers of parameters and of Muon's matrices",
    "all_reduce": "all-reduces of Muon's products",
    "reduce_scatter": "reduce-scatters of gradients and of Muon's products",
}


@dataclass(frozen=True)
class FullyShard(Sharded):
    """All-gather parameters ahead of their use, reduce-scatter gradients, optimize shards.

    `stays`, `keeps_a_part`: see `Step`. `shards_between` and the like: micro-batches; see `Ends`.
    """

    groups: tuple[Group, ...]
    stays: frozenset[int]
    keeps_a_part: bool
    shards_between: bool
    waits_between: bool
    all_reduces_between: bool
    reduced: str = "reduce-scatter"
    phases: dict[str, str] = field(default_factory=lambda: _WORDS)

    @classmethod
    def of(cls, context: StrategyContext) -> FullyShard:
        """A job's step; raises InputError for units that torch refuses."""
        scenario, ddp = context.scenario, context.scenario.ddp
        spec, float8 = ddp.sharding, scenario.workload.float8
        model, matrices, muon = muon_apart(context)
        groups = Groups(
            model,
            spec,
            context.prices,
            DeviceMesh.of(context, is_hybrid=ddp.strategy == "hsdp"),
            Offload.of(context),
            precomputes_scales=float8 is not None and float8.precompute_scales,
            optimized=len(model.used) - len(matrices),
        )
        around = context.around_shards(groups.sharded_model, groups.norm_sum)
        optimizer = scenario.workload.optimizer
        moved = moved_bytes(optimizer, context.model.used)
        units = plan_units(model, spec.units)
        added = groups.accumulated if ddp.no_sync and ddp.accumulation_steps > 1 else None
        handed = handed_on(forward_pieces(model, units))
        casts = {unit: groups.cast_of_outputs(elements) for unit, elements in handed.items()}
        casts_inputs = spec.mixed_precision.param is not None
        passes = passes_of(model, units, groups.prices.ticks, groups.gradient_bytes, added)
        first = later = with_casts(passes[0], casts, casts_inputs=casts_inputs)
        if added:
            later = with_casts(passes[1], casts, casts_inputs=casts_inputs)
        return cls(
            groups=tuple(groups.each(units)),
            first=first,
            later=later,
            optimizer=groups.optimizer(beside_muon(optimizer) if muon else optimizer, moved),
            shard_bytes=groups.shard_bytes,
            stays=groups.staying(len(units)),
            keeps_a_part=groups.kept_by is not None,
            micro_batches=ddp.accumulation_steps,
            no_sync=ddp.no_sync,
            around=AroundOptimizer((*around.before, *muon), (*around.after, *groups.scales())),
            phases=_WORDS | (_WITH_MUON if muon else {}),
            shards_between=spec.reshard_after_backward,
            waits_between=not spec.set_is_last_backward,
            all_reduces_between=not spec.all_reduce_last_only,
            reduced=groups.mesh.reduced,
            mesh=groups.mesh,
            offloads=groups.offload is not None,
        )

    def begun(self) -> Step:
        """See Sharded."""
        keeps = self.keeps_a_part
        return Step(units=self.groups, mesh=self.mesh, stays=self.stays, keeps_a_part=keeps)

    def ends(self, number: int) -> Ends:
        """See Sharded."""
        is_last = number == self.micro_batches - 1
        usual = super().ends(number)
        return usual._replace(
            shards=is_last or self.shards_between,
            is_last=is_last or self.waits_between,
            all_reduces=is_last or self.all_reduces_between,
            accumulates=usual.accumulates and self.all_reduces_between,
        )


def handed_on(pieces: Sequence[Piece]) -> dict[int, float]:
    """Elements that each unit hands on, from the pieces of a forward.

    Those of its last work; of the root the most since the last unit, as a head may have two parts.
    """
    elements: dict[int, float] = {}
    for piece in pieces:
        elements.update(dict.fromkeys(piece.chain[1:], piece.outputs))
        inside = len(piece.chain) > 1
        elements[ROOT] = piece.outputs if inside else max(elements.get(ROOT, 0.0), piece.outputs)
    return elements


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
    pieces_with_casts: list[LaunchedPiece] = []
    for piece, following in zip(pieces, [*(each.chain for each in pieces[1:]), ()], strict=True):
        pieces_with_casts.append(piece)
        pieces_with_casts += _between(piece.chain, following, casts, casts_inputs=casts_inputs)
    return pieces_with_casts


def _between(
    chain: tuple[int, ...],
    following: tuple[int, ...],
    casts: Mapping[int, Launch],
    *,
    casts_inputs: bool,
) -> Iterator[LaunchedPiece]:
    """Between two pieces of work, as part of the unit that holds both."""
    alike = takewhile(lambda both: both[0] == both[1], zip(chain, following, strict=False))
    shared = tuple(unit for unit, _ in alike)
    if shared == chain:
        return
    cast = casts[chain[len(shared)]]
    enters = casts_inputs and bool(following) and shared != following
    for _ in range(1 + enters if cast.device_ns else 0):
        yield LaunchedPiece(shared or (ROOT,), cast)
