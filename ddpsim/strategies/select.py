"""The strategy that a scenario asks for: new ones plug in here.

Each is imported when a scenario asks for it: a step of DDP needs none of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import signature
from math import ceil
from typing import TYPE_CHECKING

from ddpsim.cluster.transfers import ProcessGroup
from ddpsim.errors import InputError
from ddpsim.scenario.options.hooks import DdpMixedPrecision
from ddpsim.scenario.options.training_loop import InputCopy
from ddpsim.scenario.other_strategies import factory_of
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.ddp.buckets import stated_caps
from ddpsim.strategies.ddp.strategy import DistributedDataParallel
from ddpsim.strategies.instructions import Instruction
from ddpsim.strategies.single_device import SingleDevice
from ddpsim.strategies.strategy import Strategy
from ddpsim.strategies.ticks import Launch
from ddpsim.strategies.training_loop.around_optimizer import NormSum, read_value
from ddpsim.strategies.training_loop.around_steps import (
    EndsOfSteps,
    ForwardAlone,
    InputCopies,
    ThroughHost,
    barrier,
)
from ddpsim.workload.model import Model, Parameter
from ddpsim.workload.optimizer import beside_muon, moved_bytes, optimizer_work, parted

if TYPE_CHECKING:
    from ddpsim.scenario.options.zero_redundancy import ZeroRedundancy as ZeroRedundancyOptions
    from ddpsim.strategies.fully_shard.unit_step import DeviceMesh


def _ddp_or_post_local(context: StrategyContext) -> Strategy:
    scenario, ddp = context.scenario, _ddp(context)
    options = scenario.ddp.post_local_sgd
    if options and scenario.ddp.averages_after_hook:
        from ddpsim.strategies.ddp.post_local_sgd import PostLocalSgd

        group: ProcessGroup = "node" if scenario.sends_in_groups else "world"
        return PostLocalSgd(ddp, context.all_reduces.averaged(), options, group)
    return ddp


def _ddp(context: StrategyContext) -> DistributedDataParallel:
    spec = context.scenario.ddp
    ranks = context.scenario.cluster.world_size
    own = context.prices, context.own_factor, ranks
    work = context.work
    if spec.reduced_again:
        again = [each.again() for each in context.all_reduces.as_ready()]
        work = work.reduced_again(again, spec.reduced_again)
    ddp = DistributedDataParallel.of(context.model, work, spec, *own)
    ddp = replace(ddp, gradients_stay=not context.scenario.workload.set_to_none)
    if spec.mixed_precision:
        return _mixing(ddp, context, spec.mixed_precision)
    return _optimizing(ddp, context) if spec.optimizer_in_backward else ddp


def _mixing(
    ddp: DistributedDataParallel, context: StrategyContext, types: DdpMixedPrecision
) -> DistributedDataParallel:
    """In DDP's own mixed precision."""
    from ddpsim.strategies.ddp.mixed_precision import MixedPrecision, check_modules

    check_modules(context.model, types, static_graph=context.scenario.ddp.static_graph)
    mixed = MixedPrecision(context.model, types, context.prices)
    return replace(
        ddp,
        initial_buckets=mixed.reduced(ddp.initial_buckets),
        rebuilt_buckets=mixed.reduced(ddp.rebuilt_buckets),
        low=mixed.copies,
    )


def _optimizing(ddp: DistributedDataParallel, context: StrategyContext) -> DistributedDataParallel:
    """With the optimizer in its hook."""
    from ddpsim.strategies.ddp.optimizer_in_backward import OptimizerInHook

    optimizer = context.scenario.workload.optimizer
    hook = OptimizerInHook(context.model, optimizer, context.prices)
    return replace(
        ddp,
        model=replace(ddp.model, optimizer=Launch(0, 0)),
        initial_buckets=tuple(map(hook.after, ddp.initial_buckets)),
        rebuilt_buckets=tuple(map(hook.after, ddp.rebuilt_buckets)),
        drops_gradients=True,
    )


def _zero1(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.zero.zero_redundancy import ZeroRedundancy, largest_part, partition

    parts = partition(context.model.parameters, context.scenario.cluster.world_size)
    options = context.scenario.ddp.zero1
    if options and options.overlap_with_ddp:
        return _overlapping(context, options)
    optimizer = largest_part(context.model, parts, context.prices)
    own = replace(context, model=replace(context.model, optimizer=optimizer))
    in_one = bool(options and options.parameters_as_bucket_view)
    return ZeroRedundancy(_ddp(own), own.model, parts, context.prices.call_ns, in_one=in_one)


def _overlapping(context: StrategyContext, options: ZeroRedundancyOptions) -> Strategy:
    """Around torch's allreduce_hook, unless another hook is context for."""
    from ddpsim.strategies.zero.overlapping import Overlapping, Updates

    spec = context.scenario.ddp
    if spec.comm_hook == "none":
        spec = spec.model_copy(update={"comm_hook": "allreduce"})
    own = replace(context, scenario=context.scenario.model_copy(update={"ddp": spec}))
    ddp = _ddp(own)
    ddp = replace(ddp, model=replace(ddp.model, optimizer=Launch(0, 0)))
    updates = Updates(own.model, own.scenario.workload.optimizer, own.prices)
    return Overlapping(ddp, updates, options, own.scenario.cluster.world_size)


def _distributed_optimizer(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.zero.distributed_optimizer import (
        DistributedOptimizer,
        bucketed,
        optimizer_of_shards,
        with_forward_parts,
    )

    ranks, options = context.scenario.cluster.world_size, context.scenario.ddp.shards
    buckets = bucketed(context.model, options, ranks)
    model = with_forward_parts(context.model, buckets)
    shards = tuple(p._replace(numel=ceil(p.numel / ranks)) for p in model.parameters)
    norm_sum = NormSum(reads=True)
    around = context.around_shards(replace(model, parameters=shards), norm_sum)
    whole = model.optimizer
    part = optimizer_of_shards(whole, ranks, context.prices, len(model.parameters))
    own = replace(context, model=replace(model, optimizer=part))
    work = own.work  # gradients are added to buffers in every micro-batch, also in the first
    work = replace(work, around=around, later=work.first)
    return DistributedOptimizer.of(model, work, buckets, options, context.prices, ranks)


def _deepspeed(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.zero.deepspeed import DeepSpeed, with_counting
    from ddpsim.strategies.zero.distributed_optimizer import optimizer_of_shards, same_dtype

    ranks, options = context.scenario.cluster.world_size, context.scenario.ddp.zero
    same_dtype(context.model, "deepspeed")
    shards = optimizer_of_shards(context.model.optimizer, ranks, context.prices, 1)
    sent = options.params
    typed = tuple(p._replace(dtype=sent) if sent else p for p in context.model.parameters)
    model = replace(context.model, parameters=typed, optimizer=shards)
    work = replace(context, model=with_counting(model, options)).work
    if options.stage == 2:  # gradients are taken from each micro-batch
        work = replace(work, later=work.first)
    return DeepSpeed.of(context.model, work, options, context.prices, ranks)


def _data_parallel(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.data_parallel import DataParallel

    gpus, batch = context.scenario.cluster.gpus_per_node, context.scenario.workload.batch_per_rank
    launch_s = context.prices.launch_collective_s
    return DataParallel(
        context.model, context.ticks, gpus, batch, launch_s, context.around_optimizer
    )


def _naive(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.after_backward import AfterBackward

    return AfterBackward(context.work, context.all_reduces.each())


def _naive_flat(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.after_backward import FlatAfterBackward

    ddp, all_reduces = context.scenario.ddp, context.all_reduces
    groups = ddp.bucket_groups
    flat = all_reduces.grouped(groups) if groups else all_reduces.flat(stated_caps(ddp))
    return FlatAfterBackward(context.work, flat)


def _per_parameter(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.per_parameter import PerParameter

    ddp = context.scenario.ddp
    async_op = ddp.per_parameter is None or ddp.per_parameter.async_op
    reduced = context.all_reduces.as_ready()
    return PerParameter(context.work, reduced, no_sync=ddp.no_sync, async_op=async_op)


def _local_sgd(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.local_sgd import LocalSgd

    local = context.scenario.ddp.local_sgd
    every = local.every if local else 1
    return LocalSgd(context.work, context.all_reduces.averaged(), every)


def _parameter_server(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.parameter_server import ParameterServer
    from ddpsim.strategies.zero.zero_redundancy import largest_part, spread

    spec = context.scenario.ddp.parameter_server
    parts = spread(context.model.parameters, spec.servers if spec else 1)
    optimizer = largest_part(context.model, parts, context.prices)
    own = replace(context, model=replace(context.model, optimizer=optimizer))
    return ParameterServer.of(context.model, own.work, parts, context.prices)


def _mesh(context: StrategyContext, *, is_hybrid: bool) -> DeviceMesh:
    from ddpsim.strategies.fully_shard.unit_step import DeviceMesh

    cluster, ranks = context.scenario.cluster, context.scenario.sharding_ranks
    replicas, blocking = cluster.world_size // ranks, cluster.device.kind == "cpu"
    group: ProcessGroup = "node" if is_hybrid else "world"
    return DeviceMesh(ranks, group, replicas, context.prices.call_ns, blocking)


def _fully_shard(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.fully_shard.groups import Groups
    from ddpsim.strategies.fully_shard.offload import Offload
    from ddpsim.strategies.fully_shard.strategy import FullyShard

    scenario = context.scenario
    spec = scenario.ddp.sharding
    policy = scenario.ddp.host_copies
    offload = Offload.of(policy, scenario.cluster.device) if policy else None
    mesh = _mesh(context, is_hybrid=scenario.ddp.strategy == "hsdp")
    float8 = scenario.workload.float8
    precomputes = float8 is not None and float8.precompute_scales
    model, matrices, muon = _beside_muon(context)
    others = len(model.used) - len(matrices)
    groups = Groups(model, spec, context.prices, mesh, offload, precomputes, others)
    around = context.around_shards(groups.sharded_model, groups.norm_sum)
    around = around._replace(after=(*around.after, *groups.scales()))
    chosen = scenario.workload.optimizer
    moved = moved_bytes(chosen, context.model.used)
    optimizer = groups.optimizer(beside_muon(chosen) if chosen.name == "muon" else chosen, moved)
    return FullyShard.of(model, scenario.ddp, groups, around, optimizer, muon)


def _beside_muon(
    context: StrategyContext,
) -> tuple[Model, Sequence[Parameter], tuple[Instruction, ...]]:
    """The model with the AdamW beside Muon, Muon's matrices, and its instructions on shards.

    Without Muon: the model as it is, and none. A measured optimizer is shared as estimated.
    """
    scenario, model = context.scenario, context.model
    optimizer, cluster = scenario.workload.optimizer, scenario.cluster
    if optimizer.name != "muon":
        return model, (), ()
    from ddpsim.strategies.fully_shard.muon import MuonOnShards
    from ddpsim.strategies.fully_shard.newton_schulz import Mesh

    device = cluster.device
    matrices, others = parted(optimizer, model.used)
    whole = optimizer_work(optimizer, model.used, device)
    beside = optimizer_work(beside_muon(optimizer), others, device)
    stretch = model.optimizer.device_s / whole.device_s if whole.device_s else 1.0
    mesh = Mesh(cluster.world_size, cluster.gpus_per_node)
    on_shards = MuonOnShards(optimizer, device, context.ticks, mesh, stretch)
    own = replace(model, optimizer=beside._replace(device_s=stretch * beside.device_s))
    return own, matrices, tuple(on_shards.instructions(matrices))


def _fsdp1(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.fsdp1.flat import Flats
    from ddpsim.strategies.fsdp1.strategy import FullyShardedDataParallel
    from ddpsim.strategies.fully_shard.offload import Offload

    scenario = context.scenario
    policy, spec = scenario.ddp.host_copies, scenario.ddp.flat
    offload = Offload.of(policy, scenario.cluster.device) if policy else None
    mesh = _mesh(context, is_hybrid=spec.is_hybrid)
    flats = Flats(context.model, spec, context.prices, mesh, offload)
    moved = moved_bytes(scenario.workload.optimizer, context.model.used)
    around = context.around_shards
    return FullyShardedDataParallel.of(context.model, scenario.ddp, flats, around, moved)


STRATEGIES: dict[str, Callable[[StrategyContext], Strategy]] = {
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


def select(context: StrategyContext) -> Strategy:
    """The strategy of a scenario."""
    name, gpus = strategy_name(context.scenario), context.scenario.cluster.gpus_per_node
    strategy, cluster = _built(name, context), context.scenario.cluster
    if context.scenario.copies_through_host:
        strategy = ThroughHost(strategy, cluster.world_size, cluster.device, context.ticks)
    every = context.scenario.workload.barrier_every
    if every and cluster.world_size > 1:
        launch_ns = context.prices.call_ns
        strategy = EndsOfSteps(strategy, every, barrier(launch_ns))
    return _in_loop(strategy, context, gpus if name == "data_parallel" else 1)


def _built(name: str, context: StrategyContext) -> Strategy:
    """A strategy of ours, or of another package; raises InputError for options it does not take."""
    if name in STRATEGIES:
        return STRATEGIES[name](context)
    factory, stated = factory_of(name), context.scenario.ddp.options
    options = stated.model_extra or {} if stated else {}
    try:
        signature(factory).bind(context, **options)
    except TypeError as error:
        raise InputError("ddp.options", f"strategy {name}: {error}") from None
    made = factory(context, **options)
    if not isinstance(made, Strategy):
        raise InputError("ddp.strategy", f"{name} makes {type(made).__name__}, and no Strategy")
    return made


def without_backward(context: StrategyContext) -> Strategy:
    """Batches of an evaluation: the forwards of its steps.

    Statistics are not those of all ranks, and of DDP's forwards without gradients the first alone
    broadcasts buffers, in place of the training's next one (distributed.py: _post_forward).
    """
    workload = context.scenario.workload.model_copy(update={"sync_batch_norm": False})
    ddp = context.scenario.ddp.model_copy(update={"broadcast_buffers": False, "join": None})
    scenario = context.scenario.model_copy(update={"workload": workload, "ddp": ddp})
    return ForwardAlone(select(replace(context, scenario=scenario)))


def _in_loop(strategy: Strategy, context: StrategyContext, batches: int = 1) -> Strategy:
    """With what the training loop does beside it in a step, whose process loads so many batches."""
    workload, device = context.scenario.workload, context.scenario.cluster.device
    if copied := workload.input_copy:
        size_bytes = batches * _input_bytes(copied, context)
        strategy = InputCopies(strategy, copied, size_bytes, device, context.ticks)
    if debug := workload.debug:
        from ddpsim.strategies.training_loop.debug_settings import Debugged

        ranks = context.scenario.cluster.world_size
        strategy = Debugged(strategy, debug, ranks, device, context.ticks)
    if workload.read_loss_every:
        read = read_value(device, context.ticks)
        strategy = EndsOfSteps(strategy, workload.read_loss_every, read)
    return strategy


def _input_bytes(copied: InputCopy, context: StrategyContext) -> int:
    """Of a micro-batch of one device; raises InputError."""
    sample_bytes = copied.sample_bytes or context.model.sample_bytes
    if sample_bytes is None:
        raise InputError(
            "workload.input_copy", "needs sample_size: nobody knows how large an input is"
        )
    return round(context.scenario.workload.batch_per_rank * sample_bytes)


def strategy_name(scenario: Scenario) -> str:
    """What STRATEGIES has the scenario's strategy as."""
    is_alone = scenario.cluster.algorithm == "data_parallel"
    return "data_parallel" if is_alone else scenario.ddp.strategy


def without_data_parallelism(context: StrategyContext, warmup: int | None = None) -> Strategy:
    """Return a job's steps as the bare module's on one device, after so many of warm-up.

    None: as many as the strategy has.
    """
    warmup = select(context).warmup if warmup is None else warmup
    return _in_loop(SingleDevice(context.work_alone, warmup), context)
