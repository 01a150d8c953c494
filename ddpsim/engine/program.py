"""One rank's training loop as data: every duration in ticks, rounded once, here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ddpsim.cluster.collectives import CollectiveCost
from ddpsim.cluster.transfers import Transfer
from ddpsim.scenario.schema import Scenario
from ddpsim.units import to_ns
from ddpsim.workload.buckets import Assignment, plan_buckets
from ddpsim.workload.ddp_costs import DdpCosts
from ddpsim.workload.model import Model, Work, scale

if TYPE_CHECKING:
    from ddpsim.importers.cluster_profile import Overheads

__all__ = ["Bucket", "Buffers", "Launch", "Program", "compile_program"]

# torch 2.13's replicate() on one core of an EPYC, without its broadcast: 12 us a tensor and GPU
# (transformers of 72 to 288 parameters, convolutions with batch norm of 60 to 450, 2 to 8 GPUs)
_REPLICATE_S = 12e-6


class Launch(NamedTuple):
    """Device work, and the host's time to launch it."""

    host_ns: int
    device_ns: int


class Bucket(NamedTuple):
    """One bucket: its parameters, what goes over the wire, and the work around it."""

    parameters: tuple[int, ...]
    size_bytes: int
    before: Launch
    wire_bytes: int
    after_ns: int
    copy_back: Launch


class Buffers(NamedTuple):
    """One coalesced buffer broadcast."""

    size_bytes: int
    flatten: Launch
    unflatten: Launch


@dataclass(frozen=True, slots=True)
class Loader:
    """A data loader: one batch every `batch_ns`, at most `capacity` waiting."""

    batch_ns: int
    capacity: int

    def stretched(self, factor: float) -> Loader:
        """The same loader, every batch `factor` times as long in the making, a tick at least."""
        return replace(self, batch_ns=max(1, round(self.batch_ns * factor)))


@dataclass(frozen=True, slots=True)
class Program:
    """A training loop of `warmup` + `iterations` steps, as every rank runs it.

    `backward[i]` ends with the gradient of `ready_order[i]`; one more is the tail. `later_forward`
    and `later_backward` are those of a later micro-batch, whose gradients are added to those there;
    empty where there is none. `blocking`: the host computes itself (a CPU) and blocks in waits;
    `comm_workers` collectives may be in flight at once (NCCL's stream: 1; gloo's threads: 2);
    `comm_spins`: they occupy the device while they wait for peers. `ddp` False is the bare module.
    """

    warmup: int
    iterations: int
    micro_batches: int
    loader: Loader | None
    buffers: tuple[Buffers, ...]
    forward: tuple[Launch, ...]
    forward_hook_ns: int
    backward: tuple[Launch, ...]
    later_forward: tuple[Launch, ...]
    later_backward: tuple[Launch, ...]
    ready_order: tuple[int, ...]
    unused: tuple[int, ...]
    hook_ns: int
    copy_in: tuple[Launch, ...]
    initial_buckets: tuple[Bucket, ...]
    rebuilt_buckets: tuple[Bucket, ...]
    rebuilt_at: int | None
    launch_collective_ns: int
    used_map_bytes: int
    optimizer: Launch
    blocking: bool
    comm_workers: int
    comm_spins: bool
    ddp: bool = True

    def steady(self) -> Program:
        """The same loop with its steady buckets from the first iteration on."""
        if self.rebuilt_at is None:
            return self
        return replace(self, initial_buckets=self.rebuilt_buckets)

    def on_host(self, times: float) -> Program:
        """The same loop where all that the host does takes so many times as long."""

        def slower(launch: Launch) -> Launch:
            return launch._replace(host_ns=round(times * launch.host_ns))

        def all_slower(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
            return tuple(map(slower, launches))

        def of_buckets(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
            return tuple(
                b._replace(before=slower(b.before), copy_back=slower(b.copy_back)) for b in buckets
            )

        return replace(
            self,
            buffers=tuple(
                b._replace(flatten=slower(b.flatten), unflatten=slower(b.unflatten))
                for b in self.buffers
            ),
            forward=all_slower(self.forward),
            forward_hook_ns=round(times * self.forward_hook_ns),
            backward=all_slower(self.backward),
            later_forward=all_slower(self.later_forward),
            later_backward=all_slower(self.later_backward),
            hook_ns=round(times * self.hook_ns),
            copy_in=all_slower(self.copy_in),
            initial_buckets=of_buckets(self.initial_buckets),
            rebuilt_buckets=of_buckets(self.rebuilt_buckets),
            launch_collective_ns=round(times * self.launch_collective_ns),
            optimizer=slower(self.optimizer),
        )

    def with_ddp_work(self, times: float) -> Program:
        """The same loop with DDP's hooks and copies so many times as long, but no compression."""

        def longer(launch: Launch) -> Launch:
            return Launch(round(times * launch.host_ns), round(times * launch.device_ns))

        def of_buckets(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
            return tuple(
                bucket._replace(
                    before=bucket.before
                    if bucket.wire_bytes != bucket.size_bytes
                    else longer(bucket.before),
                    copy_back=longer(bucket.copy_back),
                )
                for bucket in buckets
            )

        return replace(
            self,
            buffers=tuple(
                b._replace(flatten=longer(b.flatten), unflatten=longer(b.unflatten))
                for b in self.buffers
            ),
            forward_hook_ns=round(times * self.forward_hook_ns),
            hook_ns=round(times * self.hook_ns),
            copy_in=tuple(longer(copy) for copy in self.copy_in),
            initial_buckets=of_buckets(self.initial_buckets),
            rebuilt_buckets=of_buckets(self.rebuilt_buckets),
        )

    @property
    def all_reduce_bytes(self) -> frozenset[int]:
        """The sizes of every all-reduce that the loop sends."""
        sizes = {b.wire_bytes for b in (*self.initial_buckets, *self.rebuilt_buckets)}
        return frozenset(sizes | ({self.used_map_bytes} if self.used_map_bytes else set()))

    def transfers(self, cost: CollectiveCost) -> list[Transfer]:
        """Every collective that the loop launches, at a cost; raises InputError."""
        sent = [cost.transfer("all_reduce", size) for size in sorted(self.all_reduce_bytes)]
        return sent + [cost.transfer("broadcast", b.size_bytes) for b in self.buffers]

    def is_rebuilt(self, iteration: int) -> bool:
        """Whether an iteration, counted from 0, uses the rebuilt buckets."""
        return self.rebuilt_at is not None and iteration >= self.rebuilt_at


def compile_program(
    scenario: Scenario,
    model: Model,
    overheads: Overheads | None = None,
    *,
    ddp: bool = True,
    ddp_times: float = 1.0,
) -> Program:
    """The loop that a scenario's ranks run; with `ddp` False, the same module without DDP.

    `overheads`: DDP's own cost where it was measured; `ddp_times`: all of it so many times as long.
    """
    spec, run = scenario.ddp, scenario.run
    costs = DdpCosts(scenario.cluster.device, spec, overheads)
    plan = plan_buckets(model.parameters, model.ready_order, spec)
    launch = _Launches(model.launch_s)
    unused = frozenset(model.unused)
    compress = _Compressor(model, unused, costs, launch)
    accumulates = spec.accumulation_steps > 1
    later_forward, later_backward = _later(model, costs) if accumulates else ((), ())
    program = Program(
        warmup=2 if plan.rebuilt_at is None else plan.rebuilt_at + 1,
        iterations=run.iterations,
        micro_batches=spec.accumulation_steps,
        loader=_loader(scenario),
        buffers=tuple(
            Buffers(b.size_bytes, launch(b.flatten), launch(b.unflatten))
            for b in costs.broadcasts(model.buffers)
        ),
        forward=launch.all(model.forward),
        forward_hook_ns=to_ns(costs.forward_hook_s * len(model.parameters)),
        backward=launch.all(model.backward),
        later_forward=launch.all(later_forward),
        later_backward=launch.all(later_backward),
        ready_order=model.ready_order,
        unused=tuple(sorted(unused)),
        hook_ns=to_ns(costs.parameter_hook_s),
        copy_in=launch.all(
            costs.zeroed(parameter) if i in unused else costs.copy_in(parameter)
            for i, parameter in enumerate(model.parameters)
        ),
        initial_buckets=compress(plan.initial),
        rebuilt_buckets=compress(plan.rebuilt),
        rebuilt_at=plan.rebuilt_at,
        launch_collective_ns=to_ns(costs.launch_collective_s),
        used_map_bytes=4 * len(model.parameters) if spec.finds_unused else 0,
        optimizer=launch(model.optimizer),
        blocking=scenario.cluster.device.kind == "cpu",
        comm_workers=2 if spec.backend == "gloo" else 1,
        comm_spins=spec.backend == "nccl",
        ddp=ddp,
    )
    if ddp and scenario.cluster.algorithm == "data_parallel":
        batch = scenario.workload.batch_per_rank
        return _data_parallel(program, model, scenario.cluster.gpus_per_node, batch)
    return program if ddp_times == 1 else program.with_ddp_work(ddp_times)


def _later(model: Model, costs: DdpCosts) -> tuple[Iterable[Work], Iterable[Work]]:
    """Forward and backward of a later micro-batch: as measured, or with the additions priced."""
    if model.later is None:
        return model.forward, _with_additions(model, costs)
    forward, backward = model.later
    return scale(model.forward, forward), scale(model.backward, backward)


def _with_additions(model: Model, costs: DdpCosts) -> Iterator[Work]:
    *works, tail = model.backward
    for parameter, work in zip(model.ready_order, works, strict=True):
        added = costs.accumulated(model.parameters[parameter])
        yield Work(work.device_s + added.device_s, work.kernels + added.kernels, work.host_s)
    yield tail


def _data_parallel(program: Program, model: Model, gpus: int, batch: int) -> Program:
    """The loop of torch.nn.DataParallel: one process that drives all GPUs (torch/nn/parallel).

    Before each forward it scatters the inputs, which the usual loop has put on GPU 0, builds a
    module for each GPU in Python and sends all parameters and buffers there from GPU 0; one thread
    a GPU launches the forward, and they take turns (the interpreter's lock); when the whole
    backward has ended, all gradients are reduced to GPU 0. No buckets, no hooks, no copies. The
    outputs, which are gathered there too, are not known and not sent.
    """
    nothing = Launch(0, 0)
    sent = sum(parameter.size_bytes for parameter in model.parameters)
    everything = Bucket(tuple(model.ready_order), sent, nothing, sent, 0, nothing)
    state = sent + sum(buffer.size_bytes for buffer in model.buffers)
    tensors = len(model.parameters) + len(model.buffers)
    inputs = (gpus - 1) * batch * (model.sample_bytes or 0)
    scatter = (Buffers(inputs, nothing, nothing),) if inputs else ()
    replicate = Launch(to_ns(_REPLICATE_S * tensors * gpus), 0)
    return replace(
        program,
        buffers=(*scatter, Buffers(state, replicate, nothing)),
        forward=tuple(work._replace(host_ns=gpus * work.host_ns) for work in program.forward),
        forward_hook_ns=0,
        hook_ns=0,
        copy_in=(nothing,) * len(program.copy_in),
        initial_buckets=(everything,),
        rebuilt_buckets=(everything,),
        rebuilt_at=None,
        warmup=2,
        used_map_bytes=0,
        unused=(),
    )


@dataclass(frozen=True)
class _Launches:
    launch_s: float

    def __call__(self, work: Work) -> Launch:
        return Launch(to_ns(work.kernels * self.launch_s + work.host_s), to_ns(work.device_s))

    def all(self, works: Iterable[Work]) -> tuple[Launch, ...]:
        return tuple(self(work) for work in works)


@dataclass(frozen=True)
class _Compressor:
    """Bucket assignments to buckets with their costs."""

    model: Model
    unused: frozenset[int]
    costs: DdpCosts
    launch: _Launches

    def __call__(self, assignment: Assignment) -> tuple[Bucket, ...]:
        return tuple(self._bucket(members) for members in assignment)

    def _bucket(self, members: tuple[int, ...]) -> Bucket:
        parameters = [self.model.parameters[i] for i in members]
        size_bytes = sum(parameter.size_bytes for parameter in parameters)
        hook = self.costs.hook(size_bytes, parameters[0].dtype)
        used = [self.model.parameters[i] for i in members if i not in self.unused]
        return Bucket(
            members,
            size_bytes,
            self.launch(hook.before),
            hook.size_bytes,
            to_ns(hook.after.device_s),
            self.launch(self.costs.copy_back(used)),
        )


def _loader(scenario: Scenario) -> Loader | None:
    data = scenario.workload.data
    if data is None:
        return None
    batch_s = scenario.workload.batch_per_rank / data.rate_samples_per_s
    return Loader(to_ns(batch_s), data.workers * data.prefetch)
