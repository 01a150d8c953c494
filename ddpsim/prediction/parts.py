"""A cache of what jobs are built from: models, programs, profiles, steps of one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from ddpsim.engine.program import Program
from ddpsim.errors import blamed_on
from ddpsim.prediction.job import Job, Stretch, with_ddp_key
from ddpsim.prediction.one_device import as_measured, times_as_priced
from ddpsim.prediction.program import compile_program
from ddpsim.result.model import Memory
from ddpsim.result.timeline import Timeline
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.ddp.compiled_graphs import compiled_model
from ddpsim.workload.build import build_model
from ddpsim.workload.heterogeneous import compute_times
from ddpsim.workload.model import Model

if TYPE_CHECKING:
    from ddpsim.importers.profiles.cluster import ClusterProfile, Overheads
    from ddpsim.scenario.ddp import Ddp

Built = TypeVar("Built")
_KEPT = 16
# keys of a workload that no model depends on
_OF_LOOP = ("data", "read_loss_every", "barrier_every")


class Parts:
    """A cache of what jobs are built from, which jobs of one question share.

    The last few of each kind stay, as sweeps change few things at a time. A file is read once, so
    the cache should live no longer than the question.
    """

    def __init__(self) -> None:
        self._kept: dict[str, deque[tuple[object, object]]] = {}

    def get(self, kind: str, key: object, build: Callable[[], Built], kept: int = _KEPT) -> Built:
        """Return what was built for an equal key, or build it; the last few are `kept`."""
        entries = self._kept.setdefault(kind, deque(maxlen=kept))
        for other, built in entries:
            if other == key:
                return cast("Built", built)
        built = build()
        entries.appendleft((key, built))
        return built

    def of_another_question(self) -> Parts:
        """Copy the cache, without the work sums that hold where the ranks of one question ended."""
        other = Parts()
        other._kept = {kind: kept for kind, kept in self._kept.items() if kind != "lasting"}
        return other

    def model(self, scenario: Scenario) -> Model:
        """A scenario's model, in graphs if it is compiled: see build_model and compiled_model."""
        ddp, device = scenario.ddp, scenario.cluster.device
        of_ddp = (scenario.may_leave_unused, ddp.backend, ddp.gathers_half, ddp.shards_model)
        work = scenario.workload.having(**dict.fromkeys(_OF_LOOP))
        model = self.get("model", (work, device, *of_ddp), lambda: build_model(scenario))
        if not model.is_compiled or ddp.shards_model:  # whose hooks break graphs
            return model
        graphs = (id(model), model, ddp.bucket_cap_mb, ddp.optimize_ddp, ddp.strategy)
        return self.get("compiled model", graphs, lambda: compiled_model(model, ddp))

    def node_times(self, scenario: Scenario) -> dict[int, float]:
        """See compute_times."""
        cluster = scenario.cluster
        key = (scenario.workload, cluster.device, cluster.other_nodes)
        return self.get("node times", key, lambda: compute_times(scenario))

    def profile(self, scenario: Scenario) -> ClusterProfile | None:
        """See cluster_profile."""
        return self.get("profile", scenario.cluster.profile, lambda: cluster_profile(scenario))

    def program(
        self, scenario: Scenario, model: Model, overheads: Overheads | None, ddp_times: float
    ) -> Program:
        """See compile_program."""
        data = scenario.workload.data
        key = (scenario.ddp, ddp_times, data, *_program_inputs(scenario, model, overheads))
        return self.get(
            "program",
            key,
            lambda: compile_program(scenario, model, overheads, ddp_factor=ddp_times),
        )

    def stretched_programs(self, program: Program) -> dict[Stretch, Program]:
        """Loops with stretched times, by their factors; all jobs with this program share them."""
        return self.get("stretched programs", (id(program), program), dict)

    def ddp_times(self, scenario: Scenario, model: Model, overheads: Overheads | None) -> float:
        """The ratio of DDP's own work in a measured step to what it is priced at.

        1 where no such step was measured, and under other strategies than DDP.
        """
        measured_s = model.with_ddp_s
        is_ddp = scenario.cluster.algorithm != "data_parallel" and scenario.ddp.is_ddp
        if measured_s is None or not is_ddp:
            return 1.0
        plain = scenario.having(ddp=as_measured(scenario.ddp))
        key = (measured_s, plain.ddp, *_program_inputs(scenario, model, overheads))
        return self.get(
            "DDP's own work",
            key,
            lambda: times_as_priced(
                lambda factor: compile_program(plain, model, overheads, ddp_factor=factor),
                compile_program(plain, model, overheads, ddp=False),
                measured_s,
                with_ddp_key(scenario),
            ),
        )

    def alone(self, job: Job, variant: object, build: Callable[[], Timeline]) -> Timeline:
        """The steps of one device without DDP; `variant`: what changes them beside the job."""
        any_caps = job.scenario.ddp.having(bucket_cap_mb=None)
        warmup, inputs = job.program.strategy.warmup, (job.scenario, job.model, job.overheads)
        return self.get("alone", (variant, warmup, any_caps, *_program_inputs(*inputs)), build)

    def memory(self, job: Job) -> Memory:
        """See Job.memory."""
        scenario = job.scenario
        ddp, others = scenario.ddp, scenario.cluster.other_nodes
        accumulates = ddp.accumulation_steps > 1
        of_ddp = (
            *(ddp.strategy, ddp.gradient_as_bucket_view, accumulates, ddp.no_sync),
            *(ddp.fully_shard, ddp.fsdp1, ddp.powers, ddp.parameter_server, _shards(scenario)),
            *(ddp.distributed_optimizer, ddp.deepspeed, ddp.options, _overlapped(ddp)),
        )
        key = (id(job.model), job.model, scenario.cluster.device, others, of_ddp)
        return self.get("memory", (*key, scenario.workload.optimizer), job.memory)


def _program_inputs(
    scenario: Scenario, model: Model, overheads: Overheads | None
) -> tuple[object, ...]:
    """All that a program depends on beside the options of DDP and the loader."""
    cluster, workload = scenario.cluster, scenario.workload
    ranks = (cluster.nodes, cluster.world_size)  # what hooks gather, and groups of nodes
    is_alone = cluster.algorithm == "data_parallel"
    of_cluster = (cluster.device, is_alone, cluster.gpus_per_node, ranks)
    of_ends = (workload.read_loss_every, workload.barrier_every, scenario.run.iterations)
    return id(model), model, overheads, of_cluster, workload.batch_per_rank, of_ends


def _shards(scenario: Scenario) -> tuple[int, ...] | None:
    """The mesh of ranks over which a model or its optimizer is sharded; None: each has all."""
    ddp, cluster = scenario.ddp, scenario.cluster
    if ddp.shards_in_nodes:
        return cluster.nodes, cluster.gpus_per_node
    of_all = ddp.scatters_gradients or ddp.strategy == "zero1"
    return (cluster.world_size,) if of_all else None


def _overlapped(ddp: Ddp) -> tuple[object, ...]:
    """What the optimizer's parts depend on where each belongs to a bucket; else nothing."""
    return (ddp.zero1, ddp.bucket_cap_mb, ddp.bucket_order) if ddp.overlaps_optimizer else ()


def cluster_profile(scenario: Scenario) -> ClusterProfile | None:
    """The profile that a scenario names, if any; raises InputError."""
    source = scenario.cluster.profile
    if source is None:
        return None
    from ddpsim.importers.profiles.cluster import read_cluster_profile  # noqa: PLC0415 -- few scenarios name one

    with blamed_on("cluster.profile"):
        return read_cluster_profile(source)
