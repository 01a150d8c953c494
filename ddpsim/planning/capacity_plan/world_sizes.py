"""The world sizes of a capacity plan: which ones are tried, and their simulated capacity."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from ddpsim.errors import InputError, ScenarioError
from ddpsim.planning.capacity_plan.question import Question, energy_of, gpu_hours
from ddpsim.planning.many import simulate_many
from ddpsim.prediction.api import predict
from ddpsim.progress import stage
from ddpsim.result.capacity import Capacity, SizesLeftOut, usable
from ddpsim.result.model import OUT_OF_MEMORY, Result
from ddpsim.scenario.links import InterNode
from ddpsim.scenario.schema import Scenario
from ddpsim.units import format_duration, format_long_duration
from ddpsim.wording import counted

_EVERY = 32  # so many numbers of nodes between two are all simulated
_LOG = SizesLeftOut(
    ("all others",),
    "a log is of one world size; to plan others leave it out (--set cluster.all_reduce=null) and "
    "state the links, or fit logs of several sizes (ddpsim calibrate import nccl-tests) for "
    "cluster.profile",
)


@dataclass
class WorldSizes:
    """World sizes as they are simulated, one after the other.

    `sizes` and `results` are by number of GPUs, `left_out` by the key at fault; `searched` says
    in words which numbers of nodes were tried beyond the powers of two.
    """

    question: Question
    sizes: dict[int, Capacity] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)
    left_out: dict[str, SizesLeftOut] = field(default_factory=dict)
    searched: str = ""

    def try_ladder(self) -> None:
        """Simulate the sizes to begin with; raises InputError where none can be had."""
        sizes = _ladder(self.question)
        if self.question.of_a_log:
            self.left_out["all_reduce"] = _LOG
        with stage("world sizes", len(sizes)) as progress:
            for size in sizes:
                capacity = self.simulated(*size)
                progress.findings += [_in_words(capacity)] if capacity else []
                progress.advance()
        if not self.sizes:
            reasons = "; ".join(out.reason for out in self.left_out.values() if out is not _LOG)
            key = "global_batch" if self.question.global_batch is not None else "cluster"
            raise InputError(key, f"no world size can be had: {reasons}")

    def simulated(self, nodes: int, gpus_per_node: int) -> Capacity | None:
        """Simulate a size with its interval; None, and the reason, where it cannot be had."""
        try:
            scenario = self.question.at(nodes, gpus_per_node)
            result = predict(scenario)
            capacity = _capacity(self.question, scenario, result)
        except (InputError, ScenarioError) as error:
            self.leave_out(nodes, gpus_per_node, error)
            return None
        self.sizes[capacity.gpus], self.results[capacity.gpus] = capacity, result
        return capacity

    def leave_out(self, nodes: int, gpus_per_node: int, error: InputError | ScenarioError) -> None:
        """Note that a size cannot be had, together with others for the same key."""
        fault = error if isinstance(error, InputError) else error.problems[0]
        size, key, message = f"{nodes} x {gpus_per_node}", fault.key, fault.message
        earlier = self.left_out.get(key)
        self.left_out[key] = (
            replace(earlier, sizes=tuple(dict.fromkeys((*earlier.sizes, size))))
            if earlier
            else SizesLeftOut((size,), message if key == "global_batch" else f"{key}: {message}")
        )

    def usable(self) -> list[Capacity]:
        """Sizes that fit into memory as far as is known, by number of GPUs."""
        return usable(self.sizes[gpus] for gpus in sorted(self.sizes))

    def between(
        self, low: int, high: int, is_low: Callable[[int, float], bool]
    ) -> list[tuple[int, float]]:
        """Node counts with the time of the whole work, from `low` to `high`.

        Halves the range until at most 32 counts are left between its ends, then simulates all.
        Of a strategy that keeps copies on so many ranks, it takes the counts that these divide.
        """
        numbers = [nodes for nodes in range(low, high + 1) if self._reshards(nodes)]
        while len(numbers) - 2 > _EVERY:
            half = (len(numbers) - 1) // 2
            for middle, time_s in self._times([numbers[half]]):
                numbers = numbers[half:] if is_low(middle, time_s) else numbers[: half + 1]
        if len(numbers) < 3:
            return []
        ends = numbers[0], numbers[-1]
        halved = f", by halves from {low} to {high}" if ends != (low, high) else ""
        self.searched = f"{halved}, then every number from {ends[0]} to {ends[1]}"
        return self._times(numbers)

    def halve(self, low: int, high: int, is_high: Callable[[Capacity], bool]) -> None:
        """Simulate numbers of nodes until no other lies between the last low and the first high."""
        numbers = [nodes for nodes in range(low, high + 1) if self._reshards(nodes)]
        while len(numbers) > 2:
            half = len(numbers) // 2
            capacity = self.simulated(numbers[half], self.question.scenario.cluster.gpus_per_node)
            if capacity is None:
                return
            numbers = numbers[: half + 1] if is_high(capacity) else numbers[half:]

    def _reshards(self, nodes: int) -> bool:
        """Whether the ranks that keep a copy divide those of so many nodes."""
        scenario = self.question.scenario
        if scenario.ddp.reshards_among(1):
            return True
        cluster = scenario.cluster.resized(nodes, scenario.cluster.gpus_per_node)
        sized = scenario.having(cluster=cluster)
        return sized.ddp.reshards_among(sized.sharding_ranks)

    def _times(self, numbers: Iterable[int]) -> list[tuple[int, float]]:
        """Node counts with the seconds of the whole work."""
        whole = self.question.scenario.cluster.gpus_per_node
        scenarios = [self.question.at(nodes, whole) for nodes in numbers]
        with stage("more world sizes", len(scenarios)) as progress:
            briefs = simulate_many(scenarios, progress.advance)
        return [
            (scenario.cluster.nodes, self._expected_s(scenario, brief.iteration_time_s.mean))
            for scenario, brief in zip(scenarios, briefs, strict=True)
        ]

    def _expected_s(self, scenario: Scenario, step_s: float) -> float:
        """The time of the whole work; its steps are as sure as those of the largest size."""
        if scenario.reliability is None:
            return self.question.time_s(scenario, step_s)
        last = self.results[max(self.results)]
        edges_s, share = last.edges_s, step_s / last.iteration_time_s.mean
        if edges_s:
            edges_s = (share * edges_s[0], share * edges_s[1])
        try:
            return self.question.campaign(scenario, step_s, edges_s).certain_s()
        except InputError:  # it makes no progress
            return inf

    def how_searched(self) -> str:
        """Which numbers of nodes were tried, in words."""
        most = self.question.max_gpus // self.question.scenario.cluster.gpus_per_node
        if self.question.of_a_log:
            return "the scenario's own ranks, on which its log was measured"
        if self.question.global_batch is not None:
            return f"every number of nodes to {most} whose GPUs divide the global batch"
        return f"nodes in powers of two, to {most}{self.searched}"


def _in_words(size: Capacity) -> str:
    step, whole = format_duration(size.step_s), format_long_duration(size.time_s)
    return f"{counted(size.gpus, 'GPU')}: {step} a step, {whole} for the target"


def _ladder(question: Question) -> list[tuple[int, int]]:
    """Sizes to try, as nodes and GPUs of each: parts of a node only where the scenario has one."""
    cluster, whole = question.scenario.cluster, question.scenario.cluster.gpus_per_node
    if question.of_a_log:
        return [(cluster.nodes, whole)]
    most = question.max_gpus // whole
    parts = _powers_of_two(min(whole - 1, question.max_gpus)) if cluster.nodes == 1 else []
    if question.global_batch is None:
        network = cluster.link("inter_node")
        leaf = network.nodes_per_leaf if isinstance(network, InterNode) else None
        under_one_leaf = [leaf] if leaf and leaf <= most else []
        numbers = sorted({*_powers_of_two(most), *under_one_leaf, *([most] if most else [])})
    else:
        powers = set(_powers_of_two(most))  # those that do not divide are named
        numbers = [n for n in range(1, most + 1) if n in powers or question.has(n * whole)]
    return [*((1, gpus) for gpus in parts), *((nodes, whole) for nodes in numbers)]


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _capacity(question: Question, scenario: Scenario, result: Result) -> Capacity:
    step_s, cluster = result.iteration_time_s.mean, scenario.cluster
    gpus = cluster.gpus
    edges, memory = result.edges_s, result.memory_bytes_per_gpu
    time_s = question.time_s(scenario, step_s)
    fits: bool | None = memory.fits
    run = question.campaign(scenario, step_s, edges).long_run() if scenario.reliability else None
    paid, device, site = run.paid_gpus if run else gpus, cluster.device, question.site
    return Capacity(
        gpus=gpus,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        batch_per_rank=scenario.workload.batch_per_rank,
        accumulation_steps=scenario.ddp.accumulation_steps,
        global_batch=scenario.global_batch,
        step_s=step_s,
        throughput_samples_per_s=result.throughput_samples_per_s,
        scaling_efficiency=result.scaling_efficiency,
        marginal_efficiency=None,
        steps=question.steps(scenario),
        time_s=time_s,
        time_interval_s=edges
        and (question.time_s(scenario, edges[0]), question.time_s(scenario, edges[1])),
        gpu_hours=gpu_hours(gpus, time_s),
        cost=question.cost(gpus, time_s),
        memory_bytes=memory.total,
        fits=None if fits and memory.activations is None else fits,
        bottleneck=f"{result.bottleneck.kind}: {result.bottleneck.text}",
        warnings=tuple(text for text in result.warnings if fits or OUT_OF_MEMORY not in text),
        samples_factor=question.growth(scenario),
        tokens_per_s=result.training.tokens_per_s if result.training else None,
        mfu=result.training.mfu if result.training else None,
        long_run=run,
        energy=energy_of(site, device, result, paid, run or time_s) if site else None,
    )
