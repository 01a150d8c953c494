"""The strategy that a scenario asks for: new ones plug in here.

Each is imported when a scenario asks for it: a step of DDP needs none of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from ddpsim.cluster.transfers import ProcessGroup
from ddpsim.errors import InputError
from ddpsim.scenario.options.hooks import DdpMixedPrecision
from ddpsim.scenario.options.training_loop import InputCopy
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.all_reduces import AllReduces
from ddpsim.strategies.ddp.buckets import stated_caps
from ddpsim.strategies.ddp.costs import DdpCosts
from ddpsim.strategies.ddp.strategy import DistributedDataParallel
from ddpsim.strategies.model_work import ModelWork, with_additions
from ddpsim.strategies.single_device import SingleDevice
from ddpsim.strategies.strategy import Strategy
from ddpsim.strategies.synced_norms import SyncedNorms
from ddpsim.strategies.ticks import Launch, Ticks
from ddpsim.strategies.training_loop.around_optimizer import AroundOptimizer, NormSum
from ddpsim.strategies.training_loop.around_steps import (
    ForwardAlone,
    InputCopies,
    LossReads,
    ThroughHost,
)
from ddpsim.workload.model import BatchNorm, Model
from ddpsim.workload.optimizer import moved_bytes

if TYPE_CHECKING:
    from ddpsim.importers.profiles.cluster import Overheads
    from ddpsim.scenario.options.zero_redundancy import ZeroRedundancy as ZeroRedundancyOptions

__all__ = [
    "STRATEGIES",
    "Asked",
    "select",
    "strategy_name",
    "without_backward",
    "without_data_parallelism",
]


@dataclass(frozen=True)
class Asked:
    """What a strategy is made of.

    `overheads`: DDP's own cost where it was measured; `own_factor`: all of that takes so many times
    as long as priced; `host_factor`: so does everything that the host does.
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
    def costs(self) -> DdpCosts:
        """What DDP's work takes on the scenario's device."""
        return DdpCosts(self.scenario.cluster.device, self.scenario.ddp, self.overheads)

    @property
    def work(self) -> ModelWork:
        """The model's own work."""
        synced = self.scenario.workload.sync_batch_norm and self.scenario.cluster.world_size > 1
        return self._work(self.model.batch_norms if synced else ())

    @property
    def work_alone(self) -> ModelWork:
        """The same on one device, where no statistics are synchronised."""
        return self._work(())

    def _work(self, synced: tuple[BatchNorm, ...]) -> ModelWork:
        scenario, ticks = self.scenario, self.ticks
        cluster, steps = scenario.cluster, scenario.ddp.accumulation_steps
        norms = SyncedNorms(synced, cluster.world_size, cluster.device, ticks)
        return ModelWork.of(self._trained, ticks, self.costs, steps, self.around_optimizer, norms)

    @property
    def _trained(self) -> Model:
        """The model; gradients that stay are added to in every micro-batch, also in the first.

        A step_time was measured so.
        """
        if self.scenario.workload.set_to_none:
            return self.model
        added = self.model.backward
        if self.scenario.workload.step_time is None:
            added = tuple(with_additions(self.model, self.costs))
        return replace(self.model, backward=added, later=(1.0, 1.0))

    @property
    def around_optimizer(self) -> AroundOptimizer:
        """What the training loop does before and after the optimizer."""
        scenario = self.scenario
        device, is_wrapped = scenario.cluster.device, scenario.ddp.strategy == "zero1"
        return AroundOptimizer.of(
            scenario.workload, self.model, device, self.ticks, is_wrapped=is_wrapped
        )

    def around_shards(self, shards: Model, norm_sum: NormSum | None) -> AroundOptimizer:
        """The same on one rank's part, where the norm is that of all ranks."""
        workload, cluster = self.scenario.workload, self.scenario.cluster
        summed = norm_sum if cluster.world_size > 1 else None
        return AroundOptimizer.of(workload, shards, cluster.device, self.ticks, summed)

    @property
    def all_reduces(self) -> AllReduces:
        """Those that a training loop calls itself."""
        return AllReduces(self.model, self.costs, self.ticks)


def _ddp_or_post_local(asked: Asked) -> Strategy:
    scenario, ddp = asked.scenario, _ddp(asked)
    options = scenario.ddp.post_local_sgd
    if options and scenario.ddp.averages_after_hook:
        from ddpsim.strategies.ddp.post_local_sgd import PostLocalSgd

        group: ProcessGroup = "node" if scenario.sends_in_groups else "world"
        return PostLocalSgd(ddp, asked.all_reduces.averaged(), options, group)
    return ddp


def _ddp(asked: Asked) -> DistributedDataParallel:
    spec = asked.scenario.ddp
    ranks = asked.scenario.cluster.world_size
    own = asked.costs, asked.ticks, asked.own_factor, ranks
    ddp = DistributedDataParallel.of(asked.model, asked.work, spec, *own)
    ddp = replace(ddp, gradients_stay=not asked.scenario.workload.set_to_none)
    if spec.mixed_precision:
        return _mixing(ddp, asked, spec.mixed_precision)
    return _optimizing(ddp, asked) if spec.optimizer_in_backward else ddp


def _mixing(
    ddp: DistributedDataParallel, asked: Asked, types: DdpMixedPrecision
) -> DistributedDataParallel:
    """In DDP's own mixed precision."""
    from ddpsim.strategies.ddp.mixed_precision import MixedPrecision, check_modules

    check_modules(asked.model, types, static_graph=asked.scenario.ddp.static_graph)
    mixed = MixedPrecision(asked.model, types, asked.costs, asked.ticks)
    return replace(
        ddp,
        initial_buckets=mixed.reduced(ddp.initial_buckets),
        rebuilt_buckets=mixed.reduced(ddp.rebuilt_buckets),
        low=mixed.copies,
    )


def _optimizing(ddp: DistributedDataParallel, asked: Asked) -> DistributedDataParallel:
    """With the optimizer in its hook."""
    from ddpsim.strategies.ddp.optimizer_in_backward import OptimizerInHook

    optimizer = asked.scenario.workload.optimizer
    hook = OptimizerInHook(asked.model, optimizer, asked.costs, asked.ticks)
    return replace(
        ddp,
        model=replace(ddp.model, optimizer=Launch(0, 0)),
        initial_buckets=tuple(map(hook.after, ddp.initial_buckets)),
        rebuilt_buckets=tuple(map(hook.after, ddp.rebuilt_buckets)),
        drops_gradients=True,
    )


def _zero1(asked: Asked) -> Strategy:
    from ddpsim.strategies.zero.zero_redundancy import ZeroRedundancy, largest_part, partition

    parts = partition(asked.model.parameters, asked.scenario.cluster.world_size)
    options = asked.scenario.ddp.zero1
    if options and options.overlap_with_ddp:
        return _overlapping(asked, options)
    optimizer = largest_part(asked.model, parts, asked.costs)
    own = replace(asked, model=replace(asked.model, optimizer=optimizer))
    in_one = bool(options and options.parameters_as_bucket_view)
    return ZeroRedundancy.of(_ddp(own), own.model, parts, asked.ticks, in_one=in_one)


def _overlapping(asked: Asked, options: ZeroRedundancyOptions) -> Strategy:
    """Around torch's allreduce_hook, unless another hook is asked for."""
    from ddpsim.strategies.zero.overlapping import Overlapping, Updates

    spec = asked.scenario.ddp
    if spec.comm_hook == "none":
        spec = spec.model_copy(update={"comm_hook": "allreduce"})
    own = replace(asked, scenario=asked.scenario.model_copy(update={"ddp": spec}))
    ddp = _ddp(own)
    ddp = replace(ddp, model=replace(ddp.model, optimizer=Launch(0, 0)))
    updates = Updates(own.model, own.scenario.workload.optimizer, own.costs, own.ticks)
    return Overlapping.of(ddp, updates, options, own.scenario.cluster.world_size)


def _distributed_optimizer(asked: Asked) -> Strategy:
    from ddpsim.strategies.zero.distributed_optimizer import (
        DistributedOptimizer,
        bucketed,
        optimizer_of_shards,
        with_forward_parts,
    )

    ranks, options = asked.scenario.cluster.world_size, asked.scenario.ddp.shards
    buckets = bucketed(asked.model, options, ranks)
    model = with_forward_parts(asked.model, buckets)
    shards = tuple(p._replace(numel=ceil(p.numel / ranks)) for p in model.parameters)
    norm_sum = NormSum(reads=True)
    around = asked.around_shards(replace(model, parameters=shards), norm_sum)
    whole = model.optimizer
    part = optimizer_of_shards(whole, ranks, asked.costs, len(model.parameters))
    own = replace(asked, model=replace(model, optimizer=part))
    work = own.work  # gradients are added to buffers in every micro-batch, also in the first
    work = replace(work, around=around, later=work.first)
    return DistributedOptimizer.of(model, work, buckets, options, asked.costs, asked.ticks, ranks)


def _deepspeed(asked: Asked) -> Strategy:
    from ddpsim.strategies.zero.deepspeed import DeepSpeed, with_counting
    from ddpsim.strategies.zero.distributed_optimizer import optimizer_of_shards, same_dtype

    ranks, options = asked.scenario.cluster.world_size, asked.scenario.ddp.zero
    same_dtype(asked.model, "deepspeed")
    shards = optimizer_of_shards(asked.model.optimizer, ranks, asked.costs, 1)
    sent = options.params
    typed = tuple(p._replace(dtype=sent) if sent else p for p in asked.model.parameters)
    model = replace(asked.model, parameters=typed, optimizer=shards)
    work = replace(asked, model=with_counting(model, options)).work
    if options.stage == 2:  # gradients are taken from each micro-batch
        work = replace(work, later=work.first)
    return DeepSpeed.of(asked.model, work, options, asked.costs, asked.ticks, ranks)


def _data_parallel(asked: Asked) -> Strategy:
    from ddpsim.strategies.data_parallel import DataParallel

    gpus, batch = asked.scenario.cluster.gpus_per_node, asked.scenario.workload.batch_per_rank
    launch_s = asked.costs.launch_collective_s
    return DataParallel(asked.model, asked.ticks, gpus, batch, launch_s, asked.around_optimizer)


def _naive(asked: Asked) -> Strategy:
    from ddpsim.strategies.after_backward import AfterBackward

    return AfterBackward(asked.work, asked.all_reduces.each())


def _naive_flat(asked: Asked) -> Strategy:
    from ddpsim.strategies.after_backward import FlatAfterBackward

    return FlatAfterBackward(asked.work, asked.all_reduces.flat(stated_caps(asked.scenario.ddp)))


def _per_parameter(asked: Asked) -> Strategy:
    from ddpsim.strategies.per_parameter import PerParameter

    no_sync = asked.scenario.ddp.no_sync
    return PerParameter(asked.work, asked.all_reduces.as_ready(), no_sync=no_sync)


def _local_sgd(asked: Asked) -> Strategy:
    from ddpsim.strategies.local_sgd import LocalSgd

    local = asked.scenario.ddp.local_sgd
    every = local.every if local else 1
    return LocalSgd(asked.work, asked.all_reduces.averaged(), every)


def _parameter_server(asked: Asked) -> Strategy:
    from ddpsim.strategies.parameter_server import ParameterServer
    from ddpsim.strategies.zero.zero_redundancy import largest_part, spread

    spec = asked.scenario.ddp.parameter_server
    parts = spread(asked.model.parameters, spec.servers if spec else 1)
    optimizer = largest_part(asked.model, parts, asked.costs)
    own = replace(asked, model=replace(asked.model, optimizer=optimizer))
    return ParameterServer.of(asked.model, own.work, parts, asked.costs, asked.ticks)


def _fully_shard(asked: Asked) -> Strategy:
    from ddpsim.strategies.fully_shard.groups import Groups
    from ddpsim.strategies.fully_shard.offload import Offload
    from ddpsim.strategies.fully_shard.strategy import FullyShard

    scenario, ranks = asked.scenario, asked.scenario.sharding_ranks
    spec = scenario.ddp.sharding
    policy = scenario.ddp.host_copies
    offload = Offload.of(policy, scenario.cluster.device) if policy else None
    replicas = scenario.cluster.world_size // ranks
    groups = Groups(asked.model, spec, asked.costs, asked.ticks, ranks, offload, replicas)
    norm_sum = groups.norm_sum("node" if scenario.ddp.strategy == "hsdp" else "world")
    around = asked.around_shards(groups.sharded_model, norm_sum)
    moved = moved_bytes(scenario.workload.optimizer, asked.model.used)
    return FullyShard.of(asked.model, scenario.ddp, groups, around, moved)


def _fsdp1(asked: Asked) -> Strategy:
    from ddpsim.strategies.fsdp1.flat import Flats
    from ddpsim.strategies.fsdp1.strategy import FullyShardedDataParallel
    from ddpsim.strategies.fully_shard.offload import Offload

    scenario, ranks = asked.scenario, asked.scenario.sharding_ranks
    policy = scenario.ddp.host_copies
    flats = Flats(
        asked.model,
        scenario.ddp.flat,
        asked.costs,
        asked.ticks,
        ranks,
        replicas=scenario.cluster.world_size // ranks,
        offload=Offload.of(policy, scenario.cluster.device) if policy else None,
    )
    moved = moved_bytes(scenario.workload.optimizer, asked.model.used)
    around = asked.around_shards
    return FullyShardedDataParallel.of(asked.model, scenario.ddp, flats, around, moved)


STRATEGIES: dict[str, Callable[[Asked], Strategy]] = {
    "ddp": _ddp_or_post_local,
    "zero1": _zero1,
    "distributed_optimizer": _distributed_optimizer,
    "deepspeed": _deepspeed,
    "naive": _naive,
    "naive_flat": _naive_flat,
    "per_parameter": _per_parameter,
    "local_sgd": _local_sgd,
    "parameter_server": _parameter_server,
    "fully_shard": _fully_shard,
    "hsdp": _fully_shard,
    "fsdp1": _fsdp1,
    "data_parallel": _data_parallel,
}


def select(asked: Asked) -> Strategy:
    """The strategy of a scenario."""
    name, gpus = strategy_name(asked.scenario), asked.scenario.cluster.gpus_per_node
    strategy, cluster = STRATEGIES[name](asked), asked.scenario.cluster
    if asked.scenario.copies_through_host:
        strategy = ThroughHost(strategy, cluster.world_size, cluster.device, asked.ticks)
    return _in_loop(strategy, asked, gpus if name == "data_parallel" else 1)


def without_backward(asked: Asked) -> Strategy:
    """Batches of an evaluation: the forwards of its steps.

    Statistics are not those of all ranks, and of DDP's forwards without gradients the first alone
    broadcasts buffers, in place of the training's next one (distributed.py: _post_forward).
    """
    workload = asked.scenario.workload.model_copy(update={"sync_batch_norm": False})
    ddp = asked.scenario.ddp.model_copy(update={"broadcast_buffers": False, "join": None})
    scenario = asked.scenario.model_copy(update={"workload": workload, "ddp": ddp})
    return ForwardAlone(select(replace(asked, scenario=scenario)))


def _in_loop(strategy: Strategy, asked: Asked, batches: int = 1) -> Strategy:
    """With what the training loop does beside it in a step, whose process loads so many batches."""
    workload, device = asked.scenario.workload, asked.scenario.cluster.device
    if copied := workload.input_copy:
        size_bytes = batches * _input_bytes(copied, asked)
        strategy = InputCopies(strategy, copied, size_bytes, device, asked.ticks)
    if debug := workload.debug:
        from ddpsim.strategies.training_loop.debug_settings import Debugged

        ranks = asked.scenario.cluster.world_size
        strategy = Debugged(strategy, debug, ranks, device, asked.ticks)
    if workload.read_loss_every:
        strategy = LossReads(strategy, workload.read_loss_every, device, asked.ticks)
    return strategy


def _input_bytes(copied: InputCopy, asked: Asked) -> int:
    """Of a micro-batch of one device; raises InputError."""
    sample_bytes = copied.sample_bytes or asked.model.sample_bytes
    if sample_bytes is None:
        raise InputError(
            "workload.input_copy", "needs sample_size: nobody knows how large an input is"
        )
    return round(asked.scenario.workload.batch_per_rank * sample_bytes)


def strategy_name(scenario: Scenario) -> str:
    """What STRATEGIES has the scenario's strategy as."""
    is_alone = scenario.cluster.algorithm == "data_parallel"
    return "data_parallel" if is_alone else scenario.ddp.strategy


def without_data_parallelism(asked: Asked) -> Strategy:
    """The same steps of the bare module on one device."""
    return _in_loop(SingleDevice(asked.work_alone, select(asked).warmup), asked)
