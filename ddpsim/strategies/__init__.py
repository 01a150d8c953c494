"""The order of one optimizer step, and what it takes beside the model's own work.

A strategy yields the instructions of a step; the engines carry them out and know no strategy.

- `instructions`: what a rank's host may do: compute, communicate, wait, mark
- `strategy`: what every strategy is
- `ticks`: seconds to integer nanoseconds, rounded once
- `training_loop`: unscaling, clipping and a loss that is read, around the optimizer
- `synced_norms`: SyncBatchNorm's collectives in the midst of the model's work
- `model_work`: the model's forward, backward and optimizer, in ticks
- `ddp`: DistributedDataParallel: reducer, buckets, costs, graphs of torch.compile
- `fully_shard`: parameters, gradients and optimizer sharded over the ranks (FSDP2)
- `fsdp1`: the same by FullyShardedDataParallel, with flat parameters
- `data_parallel`: torch.nn.DataParallel, one process for all GPUs of a machine
- `own_loops`: loops without a wrapper: naive ones, local SGD, a parameter server, one device
- `select`: the strategy that a scenario asks for

What is imported here is what a strategy of another package needs.
"""

from ddpsim.cluster.transfers import Operation
from ddpsim.errors import InputError
from ddpsim.scenario.other_strategies import register
from ddpsim.strategies.context import StrategyContext
from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Compute,
    Instruction,
    LoadBatch,
    Mark,
    Record,
    Synchronize,
    compute,
    compute_all,
)
from ddpsim.strategies.strategy import Bucket, Strategy

__all__ = [
    "Await",
    "Bucket",
    "Communicate",
    "Compute",
    "InputError",
    "Instruction",
    "LoadBatch",
    "Mark",
    "Operation",
    "Record",
    "Strategy",
    "StrategyContext",
    "Synchronize",
    "compute",
    "compute_all",
    "register",
]
