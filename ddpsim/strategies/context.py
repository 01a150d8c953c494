"""What a strategy is built from: the scenario, its model, and prices of the work around it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.all_reduces import AllReduces
from ddpsim.strategies.ddp.costs import Prices
from ddpsim.strategies.model_work import ModelWork, with_additions
from ddpsim.strategies.synced_norms import SyncedNorms
from ddpsim.strategies.ticks import Ticks
from ddpsim.strategies.training_loop.around_optimizer import AroundOptimizer, Loop, NormSum
from ddpsim.workload.model import BatchNorm, Model

if TYPE_CHECKING:
    from ddpsim.importers.profiles.cluster import Overheads


@dataclass(frozen=True)
class StrategyContext:
    """What a strategy is built from.

    `work` is the model's forward, backward and optimizer; `all_reduces` makes the collectives that
    a loop calls itself. `overheads`: DDP's own cost where it was measured; `own_factor`: all of
    that takes so many times as long as priced; `host_factor`: so does everything that the host
    does.
    """

    scenario: Scenario
    model: Model
    overheads: Overheads | None = None
    own_factor: float = 1.0
    host_factor: float = 1.0

    @property
    def ticks(self) -> Ticks:
        """The clock of the model's launches."""
        return Ticks(self.model.launch_s, self.host_factor)

    @property
    def prices(self) -> Prices:
        """What DDP's work takes on the scenario's device."""
        device = self.scenario.cluster.device
        return Prices(device, self.scenario.ddp, self.overheads, ticks=self.ticks)

    @property
    def work(self) -> ModelWork:
        """The model's own work."""
        synced = self.scenario.workload.sync_batch_norm and self.scenario.cluster.world_size > 1
        return self._work(self.model.batch_norms if synced else ())

    @property
    def work_alone(self) -> ModelWork:
        """The model's own work on one device, where no statistics are synchronised."""
        return self._work(())

    def _work(self, synced: tuple[BatchNorm, ...]) -> ModelWork:
        scenario, prices = self.scenario, self.prices
        steps = scenario.ddp.accumulation_steps
        norms = SyncedNorms(synced, scenario.cluster.world_size, prices)
        return ModelWork.of(self._trained, prices, steps, self.around_optimizer, norms)

    @property
    def _trained(self) -> Model:
        """The model; gradients that stay are added to in every micro-batch, also in the first.

        A step_time was measured so.
        """
        if self.scenario.workload.set_to_none:
            return self.model
        added = self.model.backward
        if self.scenario.workload.step_time is None:
            added = tuple(with_additions(self.model, self.prices))
        return replace(self.model, backward=added, later=(1.0, 1.0))

    @property
    def around_optimizer(self) -> AroundOptimizer:
        """What the training loop does before and after the optimizer."""
        workload, is_wrapped = self.scenario.workload, self.scenario.ddp.strategy == "zero1"
        return Loop(workload, self.model, self.prices, None, is_wrapped).around_optimizer()

    def around_shards(self, shards: Model, norm_sum: NormSum | None) -> AroundOptimizer:
        """What the loop does around the optimizer of one rank's part; the norm is of all ranks."""
        summed = norm_sum if self.scenario.cluster.world_size > 1 else None
        return Loop(self.scenario.workload, shards, self.prices, summed).around_optimizer()

    @property
    def all_reduces(self) -> AllReduces:
        """All-reduces that a training loop calls itself."""
        return AllReduces(self.model, self.prices)
