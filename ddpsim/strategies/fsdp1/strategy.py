"""The strategy of torch's FullyShardedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass

from ddpsim.errors import InputError
from ddpsim.scenario.options.fsdp1 import Fsdp1
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.fsdp1.flat import Flat, Flats
from ddpsim.strategies.fsdp1.step import Step
from ddpsim.strategies.fully_shard.sharded import Sharded, passes_of
from ddpsim.strategies.fully_shard.unit_step import DeviceMesh, Offload
from ddpsim.strategies.fully_shard.units import plan_units
from ddpsim.workload.model import Model
from ddpsim.workload.optimizer import moved_bytes


@dataclass(frozen=True)
class FullyShardedDataParallel(Sharded):
    """All-gather flat parameters ahead of their use, reduce their gradients, optimize shards."""

    units: tuple[Flat, ...]
    spec: Fsdp1
    reduced: str = "reduce-scatter"

    @classmethod
    def of(cls, context: StrategyContext) -> FullyShardedDataParallel:
        """A job's step; raises InputError for units that torch refuses."""
        model, ddp, spec = context.model, context.scenario.ddp, context.scenario.ddp.flat
        _refuse_norms(model, spec)
        mesh = DeviceMesh.of(context, is_hybrid=spec.is_hybrid)
        flats = Flats(model, spec, context.prices, mesh, Offload.of(context))
        moved = moved_bytes(context.scenario.workload.optimizer, model.used)
        planned = plan_units(model, spec.units, "ddp.fsdp1.units")
        units = tuple(flats.of(unit) for unit in planned)
        first, later = passes_of(model, planned, flats.prices.ticks, flats.gradient_bytes, None)
        return cls(
            units=units,
            spec=spec,
            first=first,
            later=later,
            optimizer=flats.optimizer(moved, units),
            shard_bytes=flats.shard_bytes(planned),
            micro_batches=ddp.accumulation_steps,
            no_sync=ddp.no_sync,
            around=context.around_shards(flats.sharded_model(units), flats.norm_sum),
            reduced=mesh.reduced,
            mesh=mesh,
            offloads=flats.offload is not None,
        )

    def begun(self) -> Step:
        """See Sharded; it follows on others, of which units and limits are left."""
        step = Step(units=self.units, spec=self.spec, mesh=self.mesh)
        for _ in range(2):
            for _ in self.micro_batched(step):
                pass
            step = step.renewed()
        return step


def _refuse_norms(model: Model, spec: Fsdp1) -> None:
    """Refuse batch norms under an auto_wrap_policy and mixed precision (torch's _auto_wrap)."""
    mixed = spec.mixed_precision.param or spec.mixed_precision.reduce
    if model.batch_norms and mixed and spec.units != ():
        raise InputError(
            "ddp.fsdp1.mixed_precision",
            f"torch wraps each of this model's {len(model.batch_norms)} batch norms in a unit of "
            "its own, in float32, which is not modelled; drop it, or write units: []",
        )
