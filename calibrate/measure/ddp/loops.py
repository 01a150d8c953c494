"""Training loops over several ranks, one for each strategy, and one step of each, timed by parts.

They are as short as scripts write them. What each sends, and when:
docs/explanation/strategies.md and sharding.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from calibrate.measure.clock import Mark
from calibrate.measure.errors import MeasureError
from calibrate.measure.host.machine import stolen_s
from calibrate.measure.model.training import Training, hook_gradients, reduced_parameters
from calibrate.records.record import Layout
from calibrate.records.rounds import Logged, Steps
from calibrate.records.variant import DDP, SHARDED, StrategyName, Variant
from ddpsim.strategies.fully_shard.units import named_units

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

_POWER_SGD_ITER = 2  # backwards of plain all-reduces, the fewest; as scenarios have it
PARTS = tuple(Steps.model_fields)  # in the order in which `step` returns them
Row = tuple[float, ...]


@dataclass(frozen=True)
class Loop:
    """A model and an optimizer ready to train with others.

    `no_sync` is entered in micro-batches that reduce nothing; `reduce` follows each other backward.
    `sent_bytes`: of gradients that are reduced together, as the loop knows them; `units`: modules
    that are sharded on their own. `untimed_steps` go before each step that is timed.
    """

    training: Training
    no_sync: Callable[[], Any] = nullcontext
    reduce: Callable[[], object] = lambda: None
    ddp: DistributedDataParallel | None = None
    sent_bytes: tuple[int, ...] = ()
    units: tuple[str, ...] = ()
    untimed_steps: int = 0


def loop_of(
    bare: Training,
    variant: Variant,
    layout: Layout,
    group: dist.ProcessGroup | None = None,
) -> Loop:
    """The loop of a variant over a model of its own; raises MeasureError where torch refuses it.

    Over all ranks, or, with DDP, those of `group`.
    """
    training = bare.again()
    if variant.strategy in DDP:
        return _ddp(training, variant, group)
    if variant.strategy in SHARDED:
        return _sharded(training, variant, layout)
    return _LOOPS[variant.strategy](training)


def _ddp(training: Training, variant: Variant, group: dist.ProcessGroup | None) -> Loop:
    # every rank makes the same weights: init_sync would only send them once more
    ddp = DistributedDataParallel(
        training.model,
        process_group=group,
        bucket_cap_mb=variant.bucket_cap_mb,
        init_sync=False,
        find_unused_parameters=variant.find_unused_parameters,
        gradient_as_bucket_view=variant.gradient_as_bucket_view,
    )
    if variant.comm_hook == "powerSGD":
        check_power_sgd(training, variant)
        rank = variant.matrix_approximation_rank
        state = PowerSGDState(None, rank, start_powerSGD_iter=_POWER_SGD_ITER)
        ddp.register_comm_hook(state, powerSGD_hook)
    elif variant.comm_hook != "none" and not variant.overlap_with_ddp:
        try:
            ddp.register_comm_hook(None, getattr(default_hooks, f"{variant.comm_hook}_hook"))
        except TypeError as error:  # torch takes no bf16_compress but with NCCL
            problem = f"the hook {variant.comm_hook} cannot be measured here (torch: {error})"
            raise MeasureError(problem) from None
    wrapped = replace(training, model=ddp)
    if variant.strategy == "zero1":
        wrapped = optimized(wrapped, ddp, variant)
    return Loop(wrapped, ddp.no_sync, ddp=ddp)


def check_power_sgd(training: Training, variant: Variant) -> None:
    """Raises MeasureError for several buckets with gloo.

    The hook's callbacks launch collectives from gloo's two threads, and wait in them. Those of
    several buckets cross: seen with torch 2.13, where gloo then got messages of another collective
    and ended the process.
    """
    size_mib = sum(p.nbytes for p in reduced_parameters(training.model).values()) / 2**20
    if dist.get_backend() == "gloo" and size_mib > (variant.bucket_cap_mb or 1):
        raise MeasureError(
            "powerSGD may hang or crash with gloo where gradients are in several buckets: their "
            f"collectives cross; put all in one, with bucket_cap_mb={ceil(size_mib)}"
        )


def _naive(training: Training) -> Loop:
    def reduce() -> None:
        for gradient in _gradients(training.model):
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())

    return Loop(training, reduce=reduce, sent_bytes=tuple(p.nbytes for p in _used(training)))


def _naive_flat(training: Training) -> Loop:
    def reduce() -> None:
        for alike in _by_dtype(_gradients(training.model)):
            flat = _flatten_dense_tensors(alike)  # type: ignore[no-untyped-call]
            dist.all_reduce(flat)
            flat.div_(dist.get_world_size())
            parts = _unflatten_dense_tensors(flat, alike)  # type: ignore[no-untyped-call]
            for gradient, whole in zip(alike, parts, strict=True):
                gradient.copy_(whole)

    sent = (sum(t.nbytes for t in alike) for alike in _by_dtype(_used(training)))
    return Loop(training, reduce=reduce, sent_bytes=tuple(sent))


def _per_parameter(training: Training) -> Loop:
    launched: list[tuple[dist.Work, Tensor]] = []
    reduces = True

    def launch(parameter: Tensor) -> None:
        if reduces and parameter.grad is not None:
            launched.append((dist.all_reduce(parameter.grad, async_op=True), parameter.grad))

    @contextmanager
    def no_sync() -> Iterator[None]:
        nonlocal reduces
        reduces = False
        yield
        reduces = True

    def reduce() -> None:
        for work, gradient in launched:
            work.wait()
            gradient.div_(dist.get_world_size())
        launched.clear()

    hook_gradients(training.model, lambda _: launch)
    return Loop(training, no_sync, reduce, sent_bytes=tuple(p.nbytes for p in _used(training)))


def _sharded(training: Training, variant: Variant, layout: Layout) -> Loop:
    """Shards over all ranks; hsdp over those of a node, with a copy in each."""
    sizes = [(name, parameter.numel()) for name, parameter in training.model.named_parameters()]
    units = named_units(sizes, variant.units, "units")
    # gloo gathers into memory that it allocates anew. After the other variants of a round, each of
    # its pages costs the kernel 11 us in place of 4 (measured: 18,473 faults in both cases)
    settled = int(dist.get_backend() == "gloo")
    if variant.strategy == "fsdp1":
        wrapped = _flattened(training.model, variant, units)
        no_sync = wrapped.no_sync
        training = replace(training, model=wrapped)
    else:
        if isinstance(training.optimizer, torch.optim.SGD) and training.optimizer.defaults["fused"]:
            raise MeasureError("torch has no fused SGD of sharded parameters: drop --fused")
        mesh = mesh_of(next(training.model.parameters()).device.type, variant, layout)
        _shard_fully(training.model, mesh, variant, units)
        no_sync = partial(_unreduced, training.model)
    return Loop(training.optimizing(), no_sync, units=units, untimed_steps=settled)


def _shard_fully(
    model: nn.Module, mesh: DeviceMesh, variant: Variant, units: Sequence[str]
) -> None:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 -- a second to import

    inner_first = sorted(units, key=lambda unit: -unit.count("."))
    for unit in (*inner_first, ""):
        fully_shard(
            model.get_submodule(unit),
            mesh=mesh,
            reshard_after_forward=variant.reshard_after_forward,
        )


def _flattened(
    model: nn.Module, variant: Variant, units: Sequence[str]
) -> FullyShardedDataParallel:
    from torch.distributed.fsdp import (  # noqa: PLC0415 -- a second to import
        FullyShardedDataParallel,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import CustomPolicy  # noqa: PLC0415

    chosen = {model.get_submodule(unit) for unit in units}
    try:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[variant.sharding_strategy],
            auto_wrap_policy=CustomPolicy(lambda module: module in chosen),
            device_id=next(model.parameters()).device,
        )
    except ValueError as error:  # frozen and trained parameters in a unit
        raise MeasureError(f"fsdp1 cannot be measured here (torch: {error})") from None


def mesh_of(device: str, variant: Variant, layout: Layout) -> DeviceMesh:
    """The ranks that share a copy of the model; raises MeasureError where hsdp makes no sense."""
    if variant.strategy != "hsdp":
        return init_device_mesh(device, (layout.world_size,))
    shape = (layout.nodes, layout.gpus_per_node)
    if min(shape) == 1:
        raise MeasureError(
            f"hsdp shards inside a node and copies between nodes, and {shape[0]} x {shape[1]} "
            "ranks leave one of the two out: start several ranks on each of several nodes, or "
            "measure fully_shard"
        )
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


@contextmanager
def _unreduced(model: nn.Module) -> Iterator[None]:
    sharded = cast("FSDPModule", model)  # fully_shard gives the module this class
    sharded.set_requires_gradient_sync(False)
    yield
    sharded.set_requires_gradient_sync(True)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in reduced_parameters(model).values() if p.grad is not None]


def _used(bare: Training) -> list[Tensor]:
    """Parameters that get a gradient."""
    return [p for name, p in reduced_parameters(bare.model).items() if name not in bare.unused]


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[tensor for tensor in tensors if tensor.dtype == dtype] for dtype in dtypes]


_LOOPS: dict[StrategyName, Callable[[Training], Loop]] = {
    "naive": _naive,
    "naive_flat": _naive_flat,
    "per_parameter": _per_parameter,
}


def optimized(wrapped: Training, ddp: DistributedDataParallel, variant: Variant) -> Training:
    """The training of `ddp` with that optimizer; raises MeasureError where torch refuses it.

    In DDP's hooks its step() does nothing: torch's own would only warn against calling it.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook  # noqa: PLC0415 -- slow
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415
    from torch.distributed.optim.utils import functional_optim_map  # noqa: PLC0415

    def make(
        kind: type[torch.optim.Optimizer], parameters: Sequence[Tensor], **options: Any
    ) -> torch.optim.Optimizer:
        if not variant.overlap_with_ddp:
            return ZeroRedundancyOptimizer(parameters, kind, **options)
        if options.get("fused"):
            raise MeasureError(
                "overlap_with_ddp takes functional optimizers, none of which is fused"
            )
        if variant.find_unused_parameters:
            raise MeasureError("overlap_with_ddp never updates where DDP finds unused parameters")
        taken = inspect.signature(functional_optim_map[kind]).parameters
        chosen_options = {key: options[key] for key in taken if options.get(key) is not None}
        zero = ZeroRedundancyOptimizer(parameters, kind, overlap_with_ddp=True, **chosen_options)
        name = "allreduce" if variant.comm_hook == "none" else variant.comm_hook
        reduce = getattr(default_hooks, f"{name}_hook")
        try:
            hook = getattr(ddp_zero_hook, variant.hook)(reduce, ddp, zero, variant.shard_buckets)
        except RuntimeError as error:
            problem = f"overlap_with_ddp cannot be measured here (torch: {error})"
            raise MeasureError(problem) from None
        ddp.register_comm_hook(None, hook)
        zero.step = lambda *_, **__: None  # type: ignore[assignment]
        return zero

    return wrapped.optimizing(make)


class Stepper:
    """One variant over a model of its own, and its rows of seconds by iteration.

    Over all ranks, or, with DDP, those of `group`. DDP may be told to find unused parameters.
    """

    def __init__(
        self,
        bare: Training,
        variant: Variant,
        layout: Layout,
        *,
        find_unused_parameters: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.variant = variant
        if find_unused_parameters and variant.strategy in DDP:
            variant = variant.model_copy(update={"find_unused_parameters": True})
        self._loop = loop_of(bare, variant, layout, group)
        if self._loop.ddp:
            start_log(self._loop.ddp)
        self.warmups: list[Row] = []
        self.rows: list[Row] = []  # the parts, then the logged times of DDP

    def step(self, begin: Callable[[], None], *, warm: bool) -> None:
        """One iteration, as `step` takes it; those before it that are not timed are lost."""
        loop, variant = self._loop, self.variant
        no_sync = loop.no_sync if variant.no_sync else None
        for _ in range(loop.untimed_steps + 1):
            row = step(
                loop.training, variant.accumulation_steps, no_sync, begin, reduce=loop.reduce
            )
        if loop.ddp:
            log = logged(loop.ddp)
            row = (*row, *(getattr(log, name) for name in Logged.model_fields))
        (self.warmups if warm else self.rows).append(row)

    def backwards_s(self) -> list[float]:
        """Seconds of each backward without what DDP does at its end: it waits, and copies back."""
        backward = PARTS.index("backward_s")
        return [row[backward] - (comm_s - overlap_s) for *row, comm_s, overlap_s in self.rows]

    def bucket_bytes(self) -> tuple[int, ...]:
        """Sizes of what is reduced together, in the order in which it is; none of fully_shard."""
        return logged(self._loop.ddp).bucket_bytes if self._loop.ddp else self._loop.sent_bytes

    @property
    def units(self) -> tuple[str, ...]:
        """Modules that fully_shard shards on their own."""
        return self._loop.units


def step(
    training: Training,
    micro_batches: int,
    no_sync: Callable[[], Any] | None,
    begin: Callable[[], None],
    before_optimizer: Callable[[Training], None] | None = None,
    reduce: Callable[[], object] = lambda: None,
) -> Row:
    """Seconds of one iteration: whole, forward, backward, optimizer; and what was stolen of it.

    All ranks `begin` at once. All micro-batches but the last are within `no_sync`, if there is one;
    `reduce` belongs to the backward of the others. What comes before the optimizer does not count.
    """
    clock, parts = training.clock, list[tuple[Mark, Mark, Mark]]()
    stolen_before_s = stolen_s()  # which takes milliseconds on a machine of many cores
    begin()
    start = clock.mark()
    for i in range(micro_batches):
        if no_sync is None or i == micro_batches - 1:
            parts.append(training.passes(reduce))
            continue
        with no_sync():
            parts.append(training.passes())
    computed = resumed = clock.mark()
    if before_optimizer:
        stolen_before_s -= stolen_s()
        before_optimizer(training)
        stolen_before_s += stolen_s()
        resumed = clock.mark()
    training.update()
    end = clock.mark()
    # read at the end: on a GPU each reading waits, and a step does not
    forward_s = sum(clock.seconds(first, second) for first, second, _ in parts)
    backward_s = sum(clock.seconds(second, third) for _, second, third in parts)
    optimizer_s = clock.seconds(resumed, end)
    whole_s = clock.seconds(start, computed) + optimizer_s
    return whole_s, forward_s, backward_s, optimizer_s, stolen_s() - stolen_before_s


class ReducedAsByDdp:
    """What an optimizer finds behind it under DDP: the ranks met, and the gradients copied back.

    Its core's memory is slower to it after the wait, and its caches hold what was copied last.
    """

    def __init__(self, bare: Training, wait: Callable[[], object]) -> None:
        self._wait = wait
        self._buckets = [
            torch.zeros_like(parameter) for parameter in reduced_parameters(bare.model).values()
        ]

    @torch.no_grad()
    def __call__(self, training: Training) -> None:
        """Copy the dense gradients into buckets, wait for the other ranks, and copy them back."""
        parameters = reduced_parameters(training.model).values()
        dense = [
            (parameter.grad, bucket)
            for parameter, bucket in zip(parameters, self._buckets, strict=True)
            if parameter.grad is not None and not parameter.grad.is_sparse
        ]
        dense.reverse()  # as the last layers' are reduced first
        for gradient, bucket in dense:
            bucket.copy_(gradient)
        self._wait()
        for gradient, bucket in dense:
            gradient.copy_(bucket)


class Log(NamedTuple):
    """The last iteration, as `calibrate.records.rounds.Logged` has it, and the buckets in use.

    `bucket_bytes` are in the order in which buckets are reduced.
    """

    forward_s: float
    backward_compute_s: float
    comm_s: float
    overlap_s: float
    bucket_bytes: tuple[int, ...]


class _LaterLogger:
    """DDP's logger, which sums up an iteration when `logged` asks for it and not before.

    DDP does so as the next forward begins, for one iteration in a hundred. Were it done for each,
    every forward would take longer, by 0.2 to 0.3 us a parameter.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        """What DDP calls in each forward."""

    def sum_up(self) -> None:
        self._logger.set_runtime_stats_and_log()


def start_log(ddp: DistributedDataParallel) -> None:
    """Have DDP log every iteration, at no cost to its forward; one in a hundred is its default."""
    ddp._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]  # noqa: SLF001
    ddp.logger = _LaterLogger(ddp.logger)


def logged(ddp: DistributedDataParallel) -> Log:
    """The last iteration of one whose log was started; 0 s and no buckets if DDP says nothing."""
    ddp.logger.sum_up()  # type: ignore[union-attr]
    log: Mapping[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # noqa: SLF001

    def seconds(key: str) -> float:
        return float(log.get(key, 0)) * 1e-9

    sizes = str(log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes", ""))
    return Log(
        forward_s=seconds("forward_compute_time"),
        backward_compute_s=seconds("backward_compute_time"),
        comm_s=seconds("backward_comm_time"),
        overlap_s=seconds("backward_compute_comm_overlap_time"),
        bucket_bytes=tuple(int(size) for size in sizes.split(",") if size.strip()),
    )
