"""A scenario with everything that its files and presets say, checked against each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import TYPE_CHECKING, TypeVar, cast

from ddpsim.cluster.build import build_network, with_sent_sizes
from ddpsim.cluster.interference import InterferingCost
from ddpsim.cluster.network import NO_TRAFFIC, Network
from ddpsim.cluster.transfers import duration_ns
from ddpsim.engine.noise import (
    KeptDeviations,
    draw_kept_deviations,
    draw_slowdowns,
    draw_stalls,
    steps_vary,
)
from ddpsim.engine.program import Program
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.errors import InputError, Problem, ScenarioError, blamed_on, shown
from ddpsim.prediction.ddp_overhead import as_measured, on_one_rank, times_as_priced
from ddpsim.prediction.program import compile_program
from ddpsim.provenance import Provenance, Trust
from ddpsim.result.metrics import steps_of
from ddpsim.result.model import Baselines, Memory
from ddpsim.result.summary import mean_step_s
from ddpsim.result.timeline import Timeline
from ddpsim.scenario.document import Document
from ddpsim.scenario.schema import Device, Jitter, Scenario
from ddpsim.strategies.ddp.compiled_graphs import compiled_model
from ddpsim.strategies.instructions import Compute
from ddpsim.units import NS_PER_S, format_bytes, format_duration
from ddpsim.workload.build import build_model
from ddpsim.workload.model import Model
from ddpsim.workload.optimizer import optimizer_state_bytes
from ddpsim.workload.other_devices import compute_times, times_provenance

if TYPE_CHECKING:
    from ddpsim.importers.profiles.cluster import ClusterProfile, Overheads

__all__ = ["Job", "Parts", "cluster_profile", "resolve"]

_Built = TypeVar("_Built")
_KEPT = 16
_UNCOUNTED_BYTES = 3_000_000_000  # the most that often is, assumed (docs/model.md, "Memory")
_FEW_STALLS = 20  # whose number is off by a fifth, by chance
_FEW_BURSTS = 5  # of another job's traffic, whose mean is off by a fifth by where they begin


@dataclass(frozen=True, eq=False)
class Job:
    """One question, ready to be simulated; `program` is what every rank runs.

    `ddp_times`: DDP's own work in it takes so many times as long as priced, as was measured;
    `node_times`: as `compute_times` says; `ranks_measured`: the cluster profile has their jitter.
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
    _steps_s: dict[frozenset[tuple[str, float]], float] = field(
        init=False, repr=False, default_factory=dict
    )

    def step_s(self, **factors: float) -> float:
        """One steady step without jitter, with factors as `calm_request` takes them."""
        asked = frozenset(factors.items())
        if asked not in self._steps_s:
            self._steps_s[asked] = mean_step_s(run(self.calm_request(**factors)).timeline)
        return self._steps_s[asked]

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

        Two, the second of which tells whether they are alike; where other traffic comes and goes,
        as many as the run has. `host`: all that it does; `interference_exponent`: the model's
        own; `overheads`: those of DDP that were measured.
        """
        program = self.program
        if (compute, host, overheads) != (1, 1, 1):
            program = self._stretched_program(compute, host, overheads)
        cost = self.network.cost.stretched(network)
        if isinstance(cost, InterferingCost):
            cost = replace(
                cost,
                effect=cost.effect * interference,
                exponent=cost.exponent * interference_exponent,
            )
        loader, traffic, warmup = program.loader, self.network.traffic, 1
        if loader:
            usual_ns, loader = loader.batch_ns, loader.stretched(data)
            traffic = traffic.with_batches_in(loader.batch_ns, usual_ns)
        steps = program.iterations if traffic != NO_TRAFFIC else 2
        calm = replace(program.steady(), warmup=warmup, iterations=steps, loader=loader)
        cluster, even = self.scenario.cluster, self.scenario.run.model_copy(update={"jitter": None})
        slowdowns = draw_slowdowns(cluster, even, steps, (), self.node_times, warmup)
        return Request(calm, cost, cluster.world_size, slowdowns, traffic=traffic)

    def _stretched_program(self, compute: float, host: float, overheads: float) -> Program:
        model = self.model if compute == 1 else self.model.stretched(compute)
        costs = self.overheads and self.overheads.stretched(overheads)
        return compile_program(
            self.scenario, model, costs, ddp_factor=self.ddp_times, host_factor=host
        )

    def request(self) -> Request:
        """What to simulate."""
        cluster, run_options, program = self.scenario.cluster, self.scenario.run, self.program
        ranks, iterations, warmup = cluster.world_size, program.iterations, program.warmup
        return Request(
            program,
            self.network.cost,
            ranks,
            draw_slowdowns(
                cluster, run_options, iterations, self.observed_s, self.node_times, warmup
            ),
            draw_stalls(run_options, ranks, iterations, warmup),
            self.network.traffic,
            self._kept_deviations(ranks, iterations, warmup),
        )

    def _kept_deviations(self, ranks: int, iterations: int, warmup: int) -> KeptDeviations | None:
        """None where every step is alike, or the network is not known to be uneven."""
        cost = self.network.cost
        uneven = isinstance(cost, InterferingCost) and any(point.spread for point in cost.kept)
        if not uneven or not steps_vary(self.scenario.run, self.observed_s):
            return None
        sent_bytes = sum(bucket.wire_bytes for bucket in self.program.steady_buckets)
        return draw_kept_deviations(self.scenario.run.seed, ranks, iterations, sent_bytes, warmup)

    @property
    def waits_for_other_device(self) -> bool:
        """Whether a node's own device, slower than the usual one, sets the pace."""
        return max(self.node_times.values(), default=1.0) > 1

    @property
    def ranks_taken_as_equal(self) -> bool:
        """Whether there are several and nobody says how they differ."""
        cluster, of_several = self.scenario.cluster, any(len(each) > 1 for each in self.observed_s)
        known = self.ranks_measured or of_several or cluster.stragglers or self.scenario.run.jitter
        return cluster.world_size > 1 and not known

    @property
    def samples_per_rank(self) -> int:
        """Samples that a rank works on in one step."""
        return self.scenario.workload.batch_per_rank * self.scenario.ddp.accumulation_steps

    @property
    def batches_s(self) -> float:
        """Seconds in which a loader makes the batches of a step; 0 where there is none."""
        loader = self.program.loader
        return loader.batch_ns * self.program.micro_batches / NS_PER_S if loader else 0.0

    def compute_only_s(self) -> float:
        """The step of one device without DDP and without a loader."""
        return mean_step_s(self._bare())

    def _bare(self) -> Timeline:
        return on_one_rank(compile_program(self.scenario, self.model, self.overheads, ddp=False))

    @property
    def observed_s(self) -> tuple[tuple[float, ...], ...]:
        """Measured iterations whose spread the run draws from; none where it states a jitter."""
        return () if self.scenario.run.jitter else self.model.iterations_s

    @property
    def host_share(self) -> float:
        """The host's time for a steady step, of the device's work in it."""
        steps = [i for i in self.program.steady_step if isinstance(i, Compute)]
        device_ns = sum(step.device_ns for step in steps)
        return sum(step.host_ns for step in steps) / device_ns if device_ns else inf

    def baselines(self) -> Baselines:
        """The naive answers: no communication, none of it hidden, all of it hidden."""
        bare = self._bare()
        compute_s = mean_step_s(bare)
        backward_ns = steps_of(bare.slowest)[-1].backward_ns()
        buckets = self.program.steady_buckets
        transfers = [self.network.cost.transfer("all_reduce", b.wire_bytes) for b in buckets]
        comm_s = sum(duration_ns(transfer) for transfer in transfers) / NS_PER_S
        uncovered_s = max(0.0, comm_s - backward_ns / NS_PER_S)
        return Baselines(compute_s, compute_s + comm_s, compute_s + uncovered_s)

    def memory(self) -> Memory:
        """Bytes on one device."""
        activations = self.model.activation_bytes
        state_bytes = optimizer_state_bytes(self.scenario.workload.optimizer, self.model.used)
        resident = self.program.strategy.resident_bytes(self.model, state_bytes)
        return Memory(
            **resident._asdict(),
            buffers=sum(buffer.size_bytes for buffer in self.model.buffers),
            activations=None if activations is None else round(activations),
            device=round(min(device.memory_bytes for device in self._devices())),
        )

    def _devices(self) -> list[Device]:
        """All kinds of the cluster."""
        cluster = self.scenario.cluster
        others = [other.device for other in (cluster.other_nodes or {}).values()]
        return [cluster.device, *(device for device in others if device)]

    def provenance(self) -> tuple[Provenance, ...]:
        """Where every input came from."""
        costs = Provenance(
            "DDP's own cost",
            "torch's reducer: kernels and bytes; host time per hook measured on CPU tensors",
            "published",
        )
        measured = Provenance("DDP's hooks and copies", "the cluster profile", "measured")
        known = [measured] if self.overheads and self.overheads.is_measured else []
        if self.ddp_times != 1:
            times = f"{self.ddp_times:.2f} times as long as priced, by the step with DDP"
            key = _key(self.scenario)
            trust: Trust = "stated" if self.scenario.workload.step_time else "measured"
            known.append(Provenance(key, times, trust))
        spread = Provenance(
            "jitter", f"{len(self.observed_s)} iterations of workload.profile", "measured"
        )
        jitter = (spread,) if self.observed_s else ()
        others = times_provenance(self.scenario, self.node_times)
        return (
            *(*self.model.provenance, *others, *self.network.provenance),
            *(*known, *jitter, costs, *self._taken_as_equal()),
        )

    def _taken_as_equal(self) -> Iterator[Provenance]:
        if self.ranks_taken_as_equal:
            loaders = "" if self.program.loader else ", and no data loader is waited for"
            yield Provenance("ranks", f"all equally fast{loaders}", "assumed")

    def warnings(self, step_s: float) -> tuple[str, ...]:
        """What a reader must know before trusting the answer, whose mean step takes `step_s`."""
        memory = self.memory()
        found = [*self.model.warnings, *self.network.warnings]
        if self.scenario.cluster.algorithm == "data_parallel":
            alone = memory.buckets + memory.optimizer
            found.append(
                f"DataParallel: GPU 0 alone holds the reduced gradients and the optimizer's state, "
                f"{format_bytes(alone)} more than the others, and every GPU's outputs"
            )
        ddp = self.scenario.ddp
        if ddp.static_graph and ddp.accumulation_steps > 1:
            found.append(
                "ddp.static_graph: torch stops in a first step whose micro-batches are under "
                "no_sync (expect_autograd_hooks_, reducer.cpp); take that step without no_sync"
            )
        if not self.ddp_times:
            found.append(
                f"{_key(self.scenario)}: launching DDP's collectives is priced longer than all "
                "that this leaves for DDP, so steps are predicted longer than was measured"
            )
        found.extend(self._warnings_of_stalls())
        if not memory.fits:
            found.append(
                f"needs about {format_bytes(memory.total)} a GPU, but the device has "
                f"{format_bytes(memory.device)}: this would run out of memory"
            )
        elif memory.device - memory.total < _UNCOUNTED_BYTES and self._is_on_gpus:
            left, device = memory.device - memory.total, memory.device
            found.append(
                f"leaves {format_bytes(left)} of {format_bytes(device)} a GPU for what is not "
                "counted (CUDA's context, NCCL's buffers, what the allocator cannot use; often 1 "
                "to 3 GB): this may run out of memory"
            )
        found.extend(self._warnings_of_bursts(step_s))
        return tuple(found)

    @property
    def _is_on_gpus(self) -> bool:
        return self.scenario.cluster.device.kind == "gpu"

    def _warnings_of_stalls(self) -> Iterator[str]:
        """Where the run is too short to hold a usual number of them."""
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
        """Where the run ends before another job's traffic has come and gone a few times."""
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


class Parts:
    """What jobs are built from, kept for other jobs that ask for the same.

    It keeps the last few of each kind, as sweeps change few things at a time, and reads a file
    once: it should live as long as one question.
    """

    def __init__(self) -> None:
        self._kept: dict[str, deque[tuple[object, object]]] = {}

    def get(self, kind: str, asked: object, build: Callable[[], _Built]) -> _Built:
        """What was built for an equal question, or is built now."""
        kept = self._kept.setdefault(kind, deque(maxlen=_KEPT))
        for known, built in kept:
            if known == asked:
                return cast("_Built", built)
        built = build()
        kept.appendleft((asked, built))
        return built

    def model(self, scenario: Scenario) -> Model:
        """See build_model, and compiled_model of one that is."""
        ddp, device = scenario.ddp, scenario.cluster.device
        asked = (scenario.workload, device, scenario.may_leave_unused, ddp.backend)
        model = self.get("model", asked, lambda: build_model(scenario))
        if not model.is_compiled:
            return model
        graphs = (id(model), model, ddp.bucket_cap_mb, ddp.optimize_ddp)
        return self.get("compiled model", graphs, lambda: compiled_model(model, ddp))

    def node_times(self, scenario: Scenario) -> dict[int, float]:
        """See compute_times."""
        cluster = scenario.cluster
        asked = (scenario.workload, cluster.device, cluster.other_nodes)
        return self.get("node times", asked, lambda: compute_times(scenario))

    def profile(self, scenario: Scenario) -> ClusterProfile | None:
        """See cluster_profile."""
        asked = scenario.cluster.profile
        return self.get("profile", asked, lambda: cluster_profile(scenario))

    def program(
        self, scenario: Scenario, model: Model, overheads: Overheads | None, ddp_times: float
    ) -> Program:
        """See compile_program."""
        asked = (scenario.ddp, ddp_times, *_program_inputs(scenario, model, overheads))
        return self.get(
            "program",
            asked,
            lambda: compile_program(scenario, model, overheads, ddp_factor=ddp_times),
        )

    def ddp_times(self, scenario: Scenario, model: Model, overheads: Overheads | None) -> float:
        """How many times as long as priced DDP's own work took in a measured step, if there is one.

        DataParallel has none of it.
        """
        measured_s = model.with_ddp_s
        if measured_s is None or scenario.cluster.algorithm == "data_parallel":
            return 1.0
        plain = scenario.model_copy(update={"ddp": as_measured(scenario.ddp)})
        asked = (measured_s, plain.ddp, *_program_inputs(scenario, model, overheads))
        return self.get(
            "DDP's own work",
            asked,
            lambda: times_as_priced(
                lambda factor: compile_program(plain, model, overheads, ddp_factor=factor),
                compile_program(plain, model, overheads, ddp=False),
                measured_s,
                _key(scenario),
            ),
        )

    def compute_only_s(self, job: Job) -> float:
        """See Job.compute_only_s."""
        any_caps = job.scenario.ddp.model_copy(update={"bucket_cap_mb": None})
        asked = (any_caps, *_program_inputs(job.scenario, job.model, job.overheads))
        return self.get("compute", asked, job.compute_only_s)

    def memory(self, job: Job) -> Memory:
        """See Job.memory."""
        scenario = job.scenario
        ddp, others = scenario.ddp, scenario.cluster.other_nodes
        accumulates = ddp.accumulation_steps > 1
        of_ddp = (ddp.gradient_as_bucket_view, accumulates)
        asked = (id(job.model), job.model, scenario.cluster.device, others, of_ddp)
        return self.get("memory", (*asked, scenario.workload.optimizer), job.memory)


def _key(scenario: Scenario) -> str:
    """Where the step under DDP on one device is."""
    stated = scenario.workload.step_time
    return "workload.step_time.with_ddp" if stated else "workload.profile.with_ddp_s"


def _program_inputs(
    scenario: Scenario, model: Model, overheads: Overheads | None
) -> tuple[object, ...]:
    """All that a program depends on beside the options of DDP."""
    cluster, workload = scenario.cluster, scenario.workload
    of_cluster = (cluster.device, cluster.algorithm, cluster.gpus_per_node)
    of_workload = (workload.batch_per_rank, workload.data, scenario.run.iterations)
    return id(model), model, overheads, of_cluster, of_workload


def resolve(
    scenario: Scenario, document: Document | None = None, parts: Parts | None = None
) -> Job:
    """Read a scenario's files and check that all fits; raises ScenarioError with every problem.

    `parts`: what was built for others. TypeError for what is no scenario yet.
    """
    if not isinstance(scenario, Scenario):
        raise TypeError(f"{shown(scenario)} is no Scenario: give what load_scenario returns for it")
    problems: list[Problem] = []
    parts = parts or Parts()

    def attempt(build: Callable[[], _Built]) -> _Built | None:
        try:
            return build()
        except InputError as error:
            problems.append(_located(error, document))
            return None

    model = attempt(lambda: parts.model(scenario))
    node_times = None if model is None else attempt(lambda: parts.node_times(scenario))
    profile = attempt(lambda: parts.profile(scenario))
    if model is None or not model.iterations_s:
        scenario = _with_jitter(scenario, profile)
    network = attempt(lambda: build_network(scenario, profile))
    if model is None or network is None or node_times is None or problems:
        raise ScenarioError(problems)
    overheads = profile.overheads if profile else None
    ddp_times = attempt(lambda: parts.ddp_times(scenario, model, overheads))
    if ddp_times is None:
        raise ScenarioError(problems)
    program = parts.program(scenario, model, overheads, ddp_times)
    steady, knows_warmup = parts.get("steady", (id(program), program), program.steady), True
    try:  # everything that will be sent has a price, so that no error waits for the run
        program.transfers(network.cost)
    except InputError:
        cost = network.cost
        attempt(lambda: steady.transfers(cost))
        program, knows_warmup = steady, False  # the first iteration's one bucket is outside a log
    if problems:
        raise ScenarioError(problems)
    network = with_sent_sizes(
        _felt(network, model),
        frozenset(steady.sent_bytes("all_reduce")),
        steady.sent_bytes("broadcast"),
    )
    ranks_measured = profile is not None and profile.jitter is not None
    return Job(
        *(scenario, model, network, program, overheads, knows_warmup, ddp_times, node_times),
        ranks_measured=ranks_measured,
    )


def cluster_profile(scenario: Scenario) -> ClusterProfile | None:
    """The profile that a scenario names, if any; raises InputError."""
    source = scenario.cluster.profile
    if source is None:
        return None
    from ddpsim.importers.profiles.cluster import read_cluster_profile  # noqa: PLC0415 -- few scenarios name one

    with blamed_on("cluster.profile"):
        return read_cluster_profile(source)


def _felt(network: Network, model: Model) -> Network:
    """The network's interference as this model feels it, where that was measured."""
    known = model.interference_exponent
    if known is None or not isinstance(network.cost, InterferingCost):
        return network
    power = f"compute slows down by what usual layers do, to the power {known.value:.2f}"
    entry = Provenance("interference with this model", f"{power}; workload.profile", "measured")
    return replace(
        network,
        cost=replace(network.cost, exponent=known.value),
        provenance=(*network.provenance, entry),
    )


def _with_jitter(scenario: Scenario, profile: ClusterProfile | None) -> Scenario:
    """The profile's jitter where the scenario states none."""
    if profile is None or profile.jitter is None or scenario.run.jitter is not None:
        return scenario
    jitter = Jitter(sigma=profile.jitter.iteration_sigma)
    run_options = scenario.run.model_copy(update={"jitter": jitter})
    return scenario.model_copy(update={"run": run_options})


def _located(error: InputError, document: Document | None) -> Problem:
    if document is None:
        return Problem("scenario", error.key, error.message)
    return document.blame(error)
