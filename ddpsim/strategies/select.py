"""The strategy that a scenario asks for: new ones plug in here.

Each is imported when a scenario asks for it: a step of DDP needs none of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from inspect import signature
from operator import attrgetter
from typing import cast

from ddpsim.errors import InputError
from ddpsim.scenario.options.training_loop import InputCopy
from ddpsim.scenario.other_strategies import factory_of
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.ddp.strategy import DistributedDataParallel
from ddpsim.strategies.own_loops import SingleDevice
from ddpsim.strategies.strategy import Strategy
from ddpsim.strategies.training_loop.around_optimizer import read_value
from ddpsim.strategies.training_loop.around_steps import (
    Debugged,
    EndsOfSteps,
    ForwardAlone,
    InputCopies,
    ThroughHost,
    barrier,
)


def _ddp(context: StrategyContext) -> Strategy:
    ddp, spec = DistributedDataParallel.of(context), context.scenario.ddp
    if spec.post_local_sgd and spec.averages_after_hook:
        from ddpsim.strategies.ddp.post_local_sgd import PostLocalSgd

        return PostLocalSgd(ddp, spec.post_local_sgd, context)
    return ddp


def _zero1(context: StrategyContext) -> Strategy:
    from ddpsim.strategies.zero.zero_redundancy import ZeroRedundancy, partition

    options, ranks = context.scenario.ddp.zero1, context.scenario.cluster.world_size
    if options and options.overlap_with_ddp:
        from ddpsim.strategies.zero.overlapping import Overlapping

        partition(context.model.parameters, ranks)
        return Overlapping(context, options)
    return ZeroRedundancy(context)


def _later(module: str, name: str) -> Callable[[StrategyContext], Strategy]:
    """Make a strategy by what a module has by name, which is imported then."""

    def made(context: StrategyContext) -> Strategy:
        factory = attrgetter(name)(import_module(f"ddpsim.strategies.{module}"))
        return cast("Strategy", factory(context))

    return made


STRATEGIES: dict[str, Callable[[StrategyContext], Strategy]] = {
    "ddp": _ddp,
    "zero1": _zero1,
    "distributed_optimizer": _later("zero.distributed_optimizer", "DistributedOptimizer.of"),
    "deepspeed": _later("zero.deepspeed", "DeepSpeed.of"),
    "naive": _later("own_loops", "AfterBackward"),
    "naive_flat": _later("own_loops", "FlatAfterBackward"),
    "per_parameter": _later("own_loops", "PerParameter"),
    "local_sgd": _later("own_loops", "LocalSgd"),
    "parameter_server": _later("own_loops", "ParameterServer"),
    "fully_shard": _later("fully_shard.strategy", "FullyShard.of"),
    "hsdp": _later("fully_shard.strategy", "FullyShard.of"),
    "fsdp1": _later("fsdp1.strategy", "FullyShardedDataParallel.of"),
    "data_parallel": _later("data_parallel", "DataParallel"),
}


def select(context: StrategyContext) -> Strategy:
    """The strategy of a scenario."""
    name, gpus = strategy_name(context.scenario), context.scenario.cluster.gpus_per_node
    strategy, cluster = _built(name, context), context.scenario.cluster
    if context.scenario.copies_through_host:
        strategy = ThroughHost(strategy, cluster.world_size, context.prices)
    every = context.scenario.workload.barrier_every
    if every and cluster.world_size > 1:
        strategy = EndsOfSteps(strategy, every, barrier(context.prices.call_ns))
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
    workload = context.scenario.workload
    if copied := workload.input_copy:
        size_bytes = batches * _input_bytes(copied, context)
        strategy = InputCopies(strategy, copied, size_bytes, context.prices)
    if debug := workload.debug:
        ranks = context.scenario.cluster.world_size
        strategy = Debugged(strategy, debug, ranks, context.prices)
    if workload.read_loss_every:
        read = read_value(context.prices)
        strategy = EndsOfSteps(strategy, workload.read_loss_every, read)
    return strategy


def _input_bytes(copied: InputCopy, context: StrategyContext) -> int:
    """Bytes of the inputs of one device's micro-batch; raises InputError."""
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
    return _in_loop(SingleDevice(context, warmup), context)
