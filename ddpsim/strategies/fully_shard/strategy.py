"""The strategy of torch's `fully_shard`: ZeRO-3, or ZeRO-2 where parameters stay in the forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpsim.scenario.ddp import Ddp
from ddpsim.strategies.fully_shard.casts import handed_on, with_casts
from ddpsim.strategies.fully_shard.groups import Group, Groups
from ddpsim.strategies.fully_shard.sharded import Sharded, passes_of
from ddpsim.strategies.fully_shard.step import Step
from ddpsim.strategies.fully_shard.unit_step import Ends
from ddpsim.strategies.fully_shard.units import forward_pieces, plan_units
from ddpsim.strategies.instructions import Instruction
from ddpsim.strategies.ticks import Launch
from ddpsim.strategies.training_loop.around_optimizer import AroundOptimizer
from ddpsim.workload.model import Model

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
    def of(
        cls,
        model: Model,
        ddp: Ddp,
        groups: Groups,
        around: AroundOptimizer,
        optimizer: Launch,
        muon: Sequence[Instruction] = (),
    ) -> FullyShard:
        """A model's step; raises InputError for units that torch refuses.

        `around`: what the loop does around the optimizer, on shards; `optimizer`: that, on shards.
        `muon`: its step, before that of the optimizer beside it.
        """
        spec = ddp.sharding
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
            optimizer=optimizer,
            shard_bytes=groups.shard_bytes,
            stays=groups.staying(len(units)),
            keeps_a_part=groups.kept_by is not None,
            micro_batches=ddp.accumulation_steps,
            no_sync=ddp.no_sync,
            around=around._replace(before=(*around.before, *muon)),
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
