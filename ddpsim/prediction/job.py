"""One question, ready to be simulated: model, network and the program that every rank runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import TYPE_CHECKING

from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.network import Network
from ddpsim.cluster.process_groups import interfering
from ddpsim.engine.batch import mean_steps_s, run_many
from ddpsim.engine.noise import (
    KeptDeviations,
    draw_kept_deviations,
    draw_slowdowns,
    draw_stalls,
    steps_vary,
)
from ddpsim.engine.program import Program
from ddpsim.engine.request import Request
from ddpsim.prediction.one_device import bare_timeline, baselines
from ddpsim.prediction.program import (
    compile_program,
    cost_provenance,
    device_warnings,
    loop_provenance,
)
from ddpsim.provenance import Provenance, Trust
from ddpsim.result.model import OUT_OF_MEMORY, Baselines, Memory
from ddpsim.result.summary import mean_step_s
from ddpsim.scenario.options.torch_warnings import torch_warnings, unused_by_data_parallel
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Communicate
from ddpsim.units import NS_PER_S, format_bytes, format_duration
from ddpsim.workload.heterogeneous import times_provenance
from ddpsim.workload.model import Model
from ddpsim.workload.optimizer import optimizer_state_bytes

if TYPE_CHECKING:
    from ddpsim.engine.fast.work_sums import WorkSums
    from ddpsim.importers.profiles.cluster import Overheads
    from ddpsim.prediction.parts import Parts

Stretching = frozenset[tuple[str, float]]
Stretch = tuple[float, float, float]  # how many times as long compute, host and DDP's own work are

_UNCOUNTED_BYTES = 3_000_000_000  # the most that often is, assumed (docs/explanation/memory.md)
_WORK_SUMS_KEPT = 2  # of many ranks they take hundreds of megabytes
_FEW_STALLS = 20  # whose number is off by a fifth, by chance
_FEW_BURSTS = 5  # of another job's traffic, whose mean is off by a fifth by where they begin


@dataclass(frozen=True, eq=False)
class Job:
    """One question, ready to be simulated; `program` is what every rank runs.

    `ddp_times`: the ratio of DDP's own work, as measured, to what it is priced at;
    `node_times`: see `compute_times`; `ranks_measured`: the cluster profile has their jitter;
    `gpus_per_rank`: the GPUs of a replica, one of which is the rank.
    By factors: `stretched_programs` holds the same loop with stretched times, `known_steps_s` and
    `known_exposed_s` what `step_s` and `exposed_s` have returned.
    """

    scenario: Scenario
    model: Model
    network: Network
    program: Program
    overheads: Overheads | None
    knows_warmup: bool = True
    ddp_times: float = 1.0
    node_times: Mapping[int, float] = field(default_factory=dict)
    ranks_measured: bool = False
    stretched_programs: dict[Stretch, Program] = field(default_factory=dict, repr=False)
    parts: Parts | None = field(default=None, repr=False)
    gpus_per_rank: int = 1
    known_steps_s: dict[Stretching, float] = field(init=False, repr=False, default_factory=dict)
    known_exposed_s: dict[Stretching, float] = field(init=False, repr=False, default_factory=dict)

    @property
    def parts_for_another(self) -> Parts | None:
        """The parts from which a job of another question may be built."""
        return self.parts and self.parts.of_another_question()

    def step_s(self, **factors: float) -> float:
        """One steady step without jitter, with factors as `calm_request` takes them."""
        return self.steps_s([factors])[0]

    def steps_s(self, variants: Sequence[Mapping[str, float]]) -> list[float]:
        """Gives `step_s` of each variant; new ones are simulated side by side."""
        keys, known_s = [stretching(factors) for factors in variants], self.known_steps_s
        new = [each for each in dict.fromkeys(keys) if each not in known_s]
        steps_s = mean_steps_s([self.calm_request(**dict(each)) for each in new])
        known_s.update(zip(new, steps_s, strict=True))
        return [known_s[each] for each in keys]

    def exposed_s(self, **factors: float) -> float:
        """Exposed communication of the step of `step_s`, on the slowest rank."""
        key, known_s = stretching(factors), self.known_exposed_s
        if key not in known_s:
            known_s[key] = run_many([self.calm_request(**factors)])[0].exposed_s
        return known_s[key]

    def calm_request(
        self,
        *,
        compute: float = 1.0,
        host: float = 1.0,
        network: float = 1.0,
        data: float = 1.0,
        interference: float = 1.0,
        interference_exponent: float = 1.0,
        overheads: float = 1.0,
    ) -> Request:
        """Steady steps without jitter, their times and interference stretched by factors.

        A period of them, at least two to see whether they are alike; as many as the run has where
        other traffic comes and goes. `host`: all that it does; `interference_exponent`: the
        model's own; `overheads`: those of DDP that were measured.
        """
        program = self.program
        if (compute, host, overheads) != (1, 1, 1):
            programs, stretch = self.stretched_programs, (compute, host, overheads)
            if stretch not in programs:
                programs[stretch] = self._compiled(*stretch)
            program = programs[stretch]
        cost = self.network.cost.stretched(network)
        cost = interfering(cost, lambda each: each.stronger(interference, interference_exponent))
        loader, traffic, warmup = program.loader, self.network.traffic, 1
        if loader:
            usual_ns, loader = loader.batch_ns, loader.stretched(data)
            traffic = traffic.with_batches_in(loader.batch_ns, usual_ns)
        lasting, ranks = self._lasting, self.scenario.cluster.world_size

        def of_steps(steps: int) -> Request:
            calm = replace(program.steady(), warmup=warmup, iterations=steps, loader=loader)
            slowdowns = None if lasting is None else lasting.slowdowns(warmup + steps)
            return Request(calm, cost, ranks, slowdowns, traffic=traffic, sums=lasting)

        few = of_steps(max(2, program.strategy.period))
        return of_steps(program.iterations) if few.varies else few

    @cached_property
    def _lasting(self) -> WorkSums | None:
        """The lasting differences of ranks, which jobs share; None where all are equally fast."""
        if self.parts is None:
            return self._drawn_lasting()
        cluster = self.scenario.cluster
        ranks = (cluster.nodes, cluster.gpus_per_node, cluster.other_nodes, self.node_times)
        key = (cluster.stragglers, self.scenario.run.seed, *ranks)
        return self.parts.get("lasting", key, self._drawn_lasting, kept=_WORK_SUMS_KEPT)

    def _drawn_lasting(self) -> WorkSums | None:
        even = self.scenario.run.having(jitter=None)
        drawn = draw_slowdowns(self.scenario.cluster, even, 1, (), self.node_times)
        if drawn is None:
            return None
        from ddpsim.engine.fast.work_sums import WorkSums  # noqa: PLC0415 -- numpy is slow to import

        return WorkSums(drawn[:, 0])

    def _compiled(self, compute: float, host: float, overheads: float) -> Program:
        model = self.model if compute == 1 else self.model.stretched(compute)
        costs = self.overheads and self.overheads.stretched(overheads)
        return compile_program(
            self.scenario, model, costs, ddp_factor=self.ddp_times, host_factor=host
        )

    def request(self) -> Request:
        """The whole run, with noise, as the engine takes it."""
        cluster, run_options, program = self.scenario.cluster, self.scenario.run, self.program
        ranks, iterations, warmup = cluster.world_size, program.iterations, program.warmup
        stalls = draw_stalls(run_options, ranks, iterations, warmup)
        kept = self._kept_deviations(ranks, iterations, warmup)
        lasting = None if steps_vary(run_options, self.observed_s) else self._lasting
        slowdowns = (
            lasting.slowdowns(warmup + iterations)
            if lasting
            else draw_slowdowns(
                cluster, run_options, iterations, self.observed_s, self.node_times, warmup
            )
        )
        sums = None if stalls is not None else lasting
        return Request(
            program, self.network.cost, ranks, slowdowns, stalls, self.network.traffic, kept, sums
        )

    def _kept_deviations(self, ranks: int, iterations: int, warmup: int) -> KeptDeviations | None:
        """How unevenly transfers slow compute; None where steps are alike, or without a spread."""
        cost = self.network.cost
        uneven = isinstance(cost, InterferingCost) and any(point.spread for point in cost.kept)
        if not uneven or not steps_vary(self.scenario.run, self.observed_s):
            return None
        sent_bytes = sum(launched.size_bytes for launched in self.sent)
        return draw_kept_deviations(self.scenario.run.seed, ranks, iterations, sent_bytes, warmup)

    @property
    def waits_for_other_device(self) -> bool:
        """Whether a node's own device, slower than the usual one, sets the pace."""
        return max(self.node_times.values(), default=1.0) > 1

    @property
    def ranks_taken_as_equal(self) -> bool:
        """Whether there are several ranks, and no input says how they differ."""
        cluster, of_several = self.scenario.cluster, any(len(each) > 1 for each in self.observed_s)
        jitter = self.ranks_measured or of_several or self.scenario.run.jitter
        return cluster.world_size > 1 and not (jitter or cluster.stragglers)

    @property
    def batches_s(self) -> float:
        """Seconds in which a loader makes the batches of a step; 0 where there is none."""
        loader = self.program.loader
        return loader.batch_ns * self.program.micro_batches / NS_PER_S if loader else 0.0

    def compute_only_s(self, *, compute: float = 1.0, host: float = 1.0) -> float:
        """The step of one device without DDP and without a loader, its times stretched.

        Its optimizer is a rank's own: where it is sharded, that of the rank's share.
        """
        return mean_step_s(bare_timeline(self, compute, host))

    @property
    def observed_s(self) -> tuple[tuple[float, ...], ...]:
        """Measured iterations whose spread the run draws from; none where it states a jitter."""
        return () if self.scenario.run.jitter else self.model.iterations_s

    @property
    def host_share(self) -> float:
        """The host's time for a steady step over the device's."""
        works = [work for step in self.program.steady_period for work in step.works]
        device_ns = sum(work.device_ns for work in works)
        return sum(work.host_ns for work in works) / device_ns if device_ns else inf

    def baselines(self) -> Baselines:
        """The naive answers: no communication, none of it hidden, all of it hidden."""
        return baselines(self)

    @property
    def sent(self) -> list[Communicate]:
        """The collectives of gradients or parameters in a period of steady steps."""
        launched = (each for step in self.program.steady_period for each in step.sent)
        return [each for each in launched if each.bucket >= 0 or each.operation == "all_gather"]

    @property
    def bucket_names(self) -> dict[int, tuple[str, str]]:
        """Gives the names of the first and the last parameter of each bucket of a steady step."""
        strategy, parameters = self.program.strategy, self.model.parameters
        buckets = enumerate(strategy.buckets(strategy.kind(self.program.warmup)))
        ends = {index: (bucket.parameters[0], bucket.parameters[-1]) for index, bucket in buckets}
        return {i: (parameters[a].name, parameters[b].name) for i, (a, b) in ends.items()}

    def memory(self) -> Memory:
        """Bytes on one device."""
        return self._memory

    @cached_property
    def _memory(self) -> Memory:
        activations, cluster = self.model.activation_bytes, self.scenario.cluster
        others = (other.device for other in (cluster.other_nodes or {}).values())
        devices = [cluster.device, *(device for device in others if device)]
        state_bytes = optimizer_state_bytes(self.scenario.workload.optimizer, self.model.used)
        resident = self.program.strategy.resident_bytes(self.model, state_bytes)
        memory = Memory(
            **resident._replace(parameters=resident.parameters + self.model.frozen_bytes)._asdict(),
            buffers=sum(buffer.size_bytes for buffer in self.model.buffers),
            activations=None if activations is None else round(activations),
            device=round(min(device.memory_bytes for device in devices)),
        )
        if activations is None or not self._is_on_gpus:
            return memory
        return replace(memory, reserved=self._reserved_bytes(memory))

    def _reserved_bytes(self, memory: Memory) -> int:
        """What torch's caching allocator takes of the device.

        Shards' gradients and all-gathers have streams of their own (_fsdp_collectives.py), whose
        blocks activations cannot take. What reductions read comes from the blocks of activations.
        """
        walk = self.program.strategy.memory_walk()
        apart = max((held.parameters for _, held in walk), default=0) or memory.buckets
        reserved = memory.total - memory.buckets + apart + round(self.model.recast_bytes)
        return max(memory.total, reserved)

    def provenance(self) -> tuple[Provenance, ...]:
        """Tells the origin of every input."""
        costs = cost_provenance(self.scenario)
        measured = Provenance("DDP's hooks and copies", "the cluster profile", "measured")
        own_work = [measured] if self.overheads and self.overheads.is_measured else []
        if self.ddp_times != 1:
            times = f"{self.ddp_times:.2f} times as long as priced, by the step with DDP"
            key = with_ddp_key(self.scenario)
            trust: Trust = "stated" if self.scenario.workload.step_time else "measured"
            own_work.append(Provenance(key, times, trust))
        spread = Provenance(
            "jitter", f"{len(self.observed_s)} iterations of workload.profile", "measured"
        )
        jitter = (spread,) if self.observed_s else ()
        others = times_provenance(self.scenario, self.node_times)
        loaders = "" if self.program.loader else ", and no data loader is waited for"
        alike = Provenance("ranks", f"all equally fast{loaders}", "assumed")
        equal = (alike,) if self.ranks_taken_as_equal else ()
        return (
            *(*self.model.provenance, *others, *self.network.provenance),
            *(*own_work, *jitter, costs, *loop_provenance(self.scenario), *equal),
        )

    def warnings(self, step_s: float) -> tuple[str, ...]:
        """What a reader must know before trusting the answer, whose mean step takes `step_s`."""
        memory = self.memory()
        warnings = [*self.model.warnings, *self.network.warnings]
        if self.scenario.cluster.algorithm == "data_parallel":
            alone = memory.buckets + memory.optimizer
            warnings.append(
                f"DataParallel: GPU 0 alone holds the reduced gradients and the optimizer's state, "
                f"{format_bytes(alone)} more than the others, and every GPU's outputs"
            )
            warnings.extend(unused_by_data_parallel(self.scenario.ddp))
        warnings.extend(torch_warnings(self.scenario.ddp, self.scenario.cluster.device))
        if self.scenario.ddp.is_torch_1 and self.scenario.ddp.is_ddp and self.model.tied:
            shared = self.model.parameters[self.model.tied[0]].name
            waits = (
                "" if self.program.strategy.rebuilt_from else ", and no bucket before it is ready"
            )
            warnings.append(
                f"ddp.torch: torch before 1.9 reduces {shared}, which is shared, twice{waits}"
            )
        if not self.ddp_times:
            warnings.append(
                f"{with_ddp_key(self.scenario)}: launching DDP's collectives is priced longer than "
                "all that this leaves for DDP, so steps are predicted longer than was measured"
            )
        warnings.extend(device_warnings(self.scenario, self.model, step_s))
        warnings.extend(self._warnings_of_stalls())
        if not memory.fits:
            warnings.append(
                f"needs about {format_bytes(memory.total)} a GPU, but the device has "
                f"{format_bytes(memory.device)}: this would {OUT_OF_MEMORY}"
            )
        elif memory.device - memory.total < _UNCOUNTED_BYTES and self._is_on_gpus:
            left, device = memory.device - memory.total, memory.device
            warnings.append(
                f"leaves {format_bytes(left)} of {format_bytes(device)} a GPU for what is not "
                "counted (CUDA's context, NCCL's buffers, what the allocator cannot use; often 1 "
                "to 3 GB): this may run out of memory"
            )
        warnings.extend(self._warnings_of_bursts(step_s))
        return tuple(warnings)

    @property
    def _is_on_gpus(self) -> bool:
        return self.scenario.cluster.device.kind == "gpu"

    def _warnings_of_stalls(self) -> Iterator[str]:
        """Warns of a run too short to hold a usual number of stalls."""
        stalls, run_options = self.scenario.run.stalls, self.scenario.run
        if stalls is None:
            return
        a_step = stalls.probability * self.scenario.cluster.world_size
        if a_step * run_options.iterations < _FEW_STALLS:
            yield (
                f"run.stalls: {run_options.iterations} iterations are expected to hold "
                f"{a_step * run_options.iterations:.2g} stalls, too few to tell what they cost; "
                f"set run.iterations to {ceil(_FEW_STALLS / a_step):,} or more"
            )

    def _warnings_of_bursts(self, step_s: float) -> Iterator[str]:
        """Warns of a run that ends before another job's traffic has come and gone a few times."""
        background, iterations = self.scenario.cluster.background, self.scenario.run.iterations
        if background is None or background.every_s is None:
            return
        if iterations * step_s < _FEW_BURSTS * background.every_s:
            wanted = ceil(_FEW_BURSTS * background.every_s / step_s)
            yield (
                f"cluster.background comes every {format_duration(background.every_s)}, but a run "
                f"of run.iterations {iterations} lasts {format_duration(iterations * step_s)}: its "
                f"mean depends on where it stands in that; set run.iterations to {wanted:,} or more"
            )


def with_ddp_key(scenario: Scenario) -> str:
    """Names the key of the step under DDP on one device."""
    stated = scenario.workload.step_time
    return "workload.step_time.with_ddp" if stated else "workload.profile.with_ddp_s"


def stretching(factors: Mapping[str, float]) -> Stretching:
    """Factors of `Job.step_s`, but for those that change nothing."""
    return frozenset(each for each in factors.items() if each[1] != 1)
