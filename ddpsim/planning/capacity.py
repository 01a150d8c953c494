"""How many GPUs: time to train, cost and efficiency over world sizes, and the size that answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from ddpsim.errors import InputError, Problem, ScenarioError, shown
from ddpsim.planning.many import simulate_many
from ddpsim.planning.next_doubling import next_doubling
from ddpsim.planning.target import parse_budget, parse_price, parse_target
from ddpsim.prediction.api import simulate
from ddpsim.prediction.resolve import resolve
from ddpsim.result.capacity import (
    KNEE_EFFICIENCY,
    Capacity,
    CapacityPlan,
    LeftOut,
    Money,
    NextDoubling,
    Target,
    usable,
)
from ddpsim.result.model import IntervalSource, NextStep, Result
from ddpsim.scenario.catalog import model_table
from ddpsim.scenario.links import InterNode
from ddpsim.scenario.schema import Scenario

__all__ = ["knee", "marginal_efficiencies", "plan_capacity"]

_MOST_GPUS = 1024
_MOST_RANKS = 2_000_000
_EVERY = 32  # so many numbers of nodes between two are all simulated
_S_PER_HOUR = 3600
_OUT_OF_MEMORY = "run out of memory"  # a plan says it with what to do


_LOG = (
    "a log is of one world size, and says nothing of others; leave it out (--set "
    "cluster.all_reduce=null) and state the links, or fit logs of several sizes into a profile "
    "(ddpsim calibrate import nccl-tests) for cluster.profile"
)


def plan_capacity(
    scenario: Scenario,
    target: Target | str,
    *,
    price: Money | str | None = None,
    budget: Money | str | None = None,
    global_batch: int | None = None,
    max_gpus: int = _MOST_GPUS,
) -> CapacityPlan:
    """World sizes for a piece of work: the fewest nodes in time, or the fastest in a budget.

    Nodes of the scenario's kind are added, or of one node GPUs; batch_per_rank stays (weak
    scaling), or with `global_batch` that does (strong). `price` is of a GPU-hour. Raises
    ValueError for text that cannot be read, TypeError for money that is neither text nor Money,
    InputError for what does not fit the scenario (`key` is the argument), ScenarioError where its
    all-reduce times are a log's of one world size.
    """
    asked = _Question(
        scenario,
        parse_target(target) if isinstance(target, str) else target,
        _money("price", price, parse_price),
        _money("budget", budget, parse_budget),
        global_batch,
        max_gpus,
    )
    if scenario.cluster.all_reduce:
        raise ScenarioError([Problem("scenario", "cluster.all_reduce", _LOG)])
    asked.check()
    return _Plan(asked).made()


def _money(name: str, given: Money | str | None, parse: Callable[[str], Money]) -> Money | None:
    if isinstance(given, str):
        return parse(given)
    if given is not None and not isinstance(given, Money):
        raise TypeError(
            f"{name} is {shown(given)}; wanted text with a currency, such as '2.50 USD'"
        )
    return given


def marginal_efficiencies(throughputs: Mapping[int, float]) -> dict[int, float]:
    """Of each number of GPUs whose half is there: throughput over twice the half's."""
    return {
        gpus: rate / (2 * throughputs[gpus // 2])
        for gpus, rate in throughputs.items()
        if gpus % 2 == 0 and gpus // 2 in throughputs
    }


def knee(throughputs: Mapping[int, float]) -> int | None:
    """The GPUs whose doubling is the first to give less than 80 % of twice the throughput."""
    found = marginal_efficiencies(throughputs)
    late = [gpus for gpus, efficiency in found.items() if efficiency < KNEE_EFFICIENCY]
    return min(late) // 2 if late else None


@dataclass(frozen=True)
class _Question:
    """What was asked, and the scenario of each world size."""

    scenario: Scenario
    target: Target
    price: Money | None
    budget: Money | None
    global_batch: int | None
    max_gpus: int

    def check(self) -> None:
        """Raise InputError for what does not fit together."""
        whole_node = self.scenario.cluster.gpus_per_node
        least = 1 if self.scenario.cluster.nodes == 1 else whole_node
        if not least <= self.max_gpus <= _MOST_RANKS:
            which = "one node's GPUs" if least > 1 else "one GPU"
            wanted = f"wanted {least} ({which}) to {_MOST_RANKS}"
            raise InputError("max_gpus", f"{self.max_gpus} is out of range: {wanted}")
        if self.budget and self.budget.currency != "GPU-hours":
            _check_currency(self.budget, self.price)
        if self.global_batch is not None:
            self._check_global_batch(self.global_batch)
        _ = self.samples

    def _check_global_batch(self, wanted: int) -> None:
        if not 1 <= wanted <= 10**9:
            raise InputError("global_batch", f"{wanted} is out of range: wanted 1 to 10^9 samples")
        if resolve(self.scenario).model.basis != "roofline":
            workload = self.scenario.workload
            raise InputError(
                "global_batch",
                f"workload.{workload.measured_by} was measured with {workload.batch_per_rank} "
                "samples a rank, and says nothing of other batches; drop --global-batch "
                "(batch_per_rank then stays), or plan with a zoo model's estimate, without it",
            )

    @property
    def seq_len(self) -> int | None:
        """Tokens in a sample; None where the model has no such thing."""
        workload = self.scenario.workload
        if workload.model is None:
            return None
        size = model_table(workload.model)["size"]
        return (workload.seq_len or int(size["default"])) if size["key"] == "seq_len" else None

    @property
    def samples(self) -> int:
        """In one epoch; raises InputError."""
        if self.target.unit == "samples":
            return self.target.amount
        if self.seq_len is None:
            raise InputError(
                "target",
                "this workload has no seq_len, so its tokens cannot be counted; write a number "
                "of samples",
            )
        return ceil(self.target.amount / self.seq_len)

    @property
    def accumulated(self) -> int:
        """Micro-batches in a step."""
        return self.scenario.ddp.accumulation_steps

    def has(self, gpus: int) -> bool:
        """Whether the global batch divides."""
        return self.global_batch is None or self.global_batch % (gpus * self.accumulated) == 0

    def at(self, nodes: int, gpus_per_node: int) -> Scenario:
        """The scenario on another world size; raises InputError where it cannot have it."""
        cluster = self.scenario.cluster.resized(nodes, gpus_per_node)
        workload, gpus = self.scenario.workload, nodes * gpus_per_node
        if self.global_batch is not None:
            batch, rest = divmod(self.global_batch, gpus * self.accumulated)
            if rest:
                each = f" x {self.accumulated} micro-batches" if self.accumulated > 1 else ""
                raise InputError(
                    "global_batch", f"{self.global_batch} samples do not divide by the GPUs{each}"
                )
            workload = workload.model_copy(update={"batch_per_rank": batch})
        sized = self.scenario.model_copy(update={"cluster": cluster, "workload": workload})
        return sized if self.global_batch is None else _split_to_fit(sized) or sized

    def time_s(self, scenario: Scenario, step_s: float) -> float:
        """Of all steps."""
        return self.steps(scenario) * step_s

    def steps(self, scenario: Scenario) -> int:
        """Of all epochs: as torch's DistributedSampler pads each, its last step is a whole one."""
        return self.target.epochs * ceil(self.samples / _global_batch(scenario))

    def cost(self, gpus: int, time_s: float) -> float | None:
        """At the price, None without one."""
        return None if self.price is None else self.price.amount * (gpus * time_s / _S_PER_HOUR)

    def in_time(self, time_s: float) -> bool:
        """Whether the target is met."""
        return self.target.within_s is None or time_s <= self.target.within_s

    def affordable(self, gpus: int, time_s: float) -> bool:
        """Whether the budget is kept."""
        if self.budget is None:
            return True
        hours = gpus * time_s / _S_PER_HOUR
        spent = hours if self.budget.currency == "GPU-hours" else self.cost(gpus, time_s)
        return spent is not None and spent <= self.budget.amount


def _check_currency(budget: Money, price: Money | None) -> None:
    if price is None:
        raise InputError(
            "budget",
            "needs --price, of a GPU-hour (no price is assumed here); or write GPU-hours",
        )
    if price.currency != budget.currency:
        raise InputError(
            "budget",
            f"is in {budget.currency}, the price in {price.currency}; write both in one currency",
        )


def _global_batch(scenario: Scenario) -> int:
    per_rank = scenario.workload.batch_per_rank * scenario.ddp.accumulation_steps
    return per_rank * scenario.cluster.world_size


@dataclass
class _Plan:
    """World sizes as they are simulated, one after the other."""

    asked: _Question
    sizes: dict[int, Capacity] = field(default_factory=dict)  # by GPUs
    results: dict[int, Result] = field(default_factory=dict)
    left_out: dict[str, LeftOut] = field(default_factory=dict)  # by the key at fault
    searched: str = ""

    def made(self) -> CapacityPlan:
        """Try the sizes, choose, and look at the next doubling."""
        asked = self.asked
        for nodes, gpus_per_node in _ladder(asked):
            self._try(nodes, gpus_per_node)
        if not self.sizes:
            reasons = "; ".join(out.reason for out in self.left_out.values())
            key = "global_batch" if asked.global_batch is not None else "cluster"
            raise InputError(key, f"no world size can be had: {reasons}")
        answer, met, within_budget = self._chosen()
        if answer.fits is False and met is not None:
            met, within_budget = False, None
        rates = {gpus: size.throughput_samples_per_s for gpus, size in self.sizes.items()}
        usable = [size.gpus for size in self._usable()]
        marginal = marginal_efficiencies(rates)
        shown = {
            gpus: replace(self.sizes[gpus], marginal_efficiency=marginal.get(gpus))
            for gpus in sorted(self.sizes)
        }
        interval = self.results[answer.gpus].prediction_interval_s
        return CapacityPlan(
            name=asked.scenario.name,
            target=asked.target,
            samples_per_epoch=asked.samples,
            seq_len=asked.seq_len if asked.target.unit == "tokens" else None,
            price=asked.price,
            budget=asked.budget,
            scaling="weak" if asked.global_batch is None else "strong",
            sizes=tuple(shown.values()),
            answer=shown[answer.gpus],
            met=met,
            within_budget=shown[within_budget.gpus] if within_budget else None,
            sure=self._sure(shown[gpus] for gpus in usable),
            knee_gpus=knee({gpus: rates[gpus] for gpus in usable}),
            next_doubling=self._next_doubling(answer),
            make_it_fit=_make_it_fit(asked) if answer.fits is False else None,
            searched=self._how_searched(),
            left_out=tuple(self.left_out.values()),
            most_gpus=asked.max_gpus,
            interval_level=interval.level if interval else None,
            widest=_widest(interval.sources if interval else ()),
        )

    def _try(self, nodes: int, gpus_per_node: int) -> Capacity | None:
        """Simulate a size with its interval; None, and the reason, where it cannot be had."""
        try:
            scenario = self.asked.at(nodes, gpus_per_node)
            result = simulate(scenario)
        except InputError as error:
            self._leave_out(nodes, gpus_per_node, error.key, error.message)
            return None
        except ScenarioError as error:
            problem = error.problems[0]
            self._leave_out(nodes, gpus_per_node, problem.key, problem.message)
            return None
        gpus = result.world_size
        self.sizes[gpus], self.results[gpus] = _capacity(self.asked, scenario, result), result
        return self.sizes[gpus]

    def _leave_out(self, nodes: int, gpus_per_node: int, key: str, message: str) -> None:
        size = f"{nodes} x {gpus_per_node}"
        known = self.left_out.get(key)
        self.left_out[key] = (
            replace(known, sizes=tuple(dict.fromkeys((*known.sizes, size))))
            if known
            else LeftOut((size,), message if key == "global_batch" else f"{key}: {message}")
        )

    def _usable(self) -> list[Capacity]:
        """By GPUs."""
        return usable(self.sizes[gpus] for gpus in sorted(self.sizes))

    def _chosen(self) -> tuple[Capacity, bool | None, Capacity | None]:
        """The answer, whether it keeps to all limits, and the fastest in the budget if another."""
        asked, usable = self.asked, self._usable()
        cheapest = self._fastest_affordable(usable) if asked.budget else None
        if asked.target.within_s is not None:
            fewest = self._fewest_in_time(usable)
            if fewest:
                kept = asked.affordable(fewest.gpus, fewest.time_s)
                return fewest, kept, None if kept else cheapest
            return cheapest or min(usable, key=lambda size: size.time_s), False, None
        if asked.budget:
            if cheapest:
                return cheapest, True, None
            return min(usable, key=lambda size: size.gpu_hours), False, None
        bend = knee({size.gpus: size.throughput_samples_per_s for size in usable})
        return self.sizes[bend or usable[-1].gpus], None, None

    def _fewest_in_time(self, usable: Sequence[Capacity]) -> Capacity | None:
        """The first that is tried, or the fewest nodes between it and the last that is late."""
        asked = self.asked
        first = next((size for size in usable if asked.in_time(size.time_s)), None)
        if first is None or asked.global_batch is not None:
            return first
        late = max((size.nodes for size in usable if size.gpus < first.gpus), default=first.nodes)
        for nodes, time_s in self._between(late, first.nodes, lambda _, t: not asked.in_time(t)):
            if asked.in_time(time_s):
                return self._try(nodes, first.gpus_per_node)
        return first

    def _fastest_affordable(self, usable: Sequence[Capacity]) -> Capacity | None:
        """The fastest that is tried, or that lies between it and the next."""
        asked, whole = self.asked, self.asked.scenario.cluster.gpus_per_node
        kept = [size for size in usable if asked.affordable(size.gpus, size.time_s)]
        if not kept:
            return None
        best = min(kept, key=lambda size: size.time_s)
        above = [size.nodes for size in usable if size.gpus > best.gpus]
        if asked.global_batch is not None or not above:
            return best

        def is_better(nodes: int, time_s: float) -> bool:
            return time_s < best.time_s and asked.affordable(nodes * whole, time_s)

        between = self._between(best.nodes, above[0], is_better)
        better = [(time_s, nodes) for nodes, time_s in between if is_better(nodes, time_s)]
        return self._try(min(better)[1], whole) if better else best

    def _between(
        self, low: int, high: int, is_low: Callable[[int, float], bool]
    ) -> list[tuple[int, float]]:
        """Numbers of nodes with their times: all from `low` to `high`, halved to few enough."""
        ends = low, high
        while high - low - 1 > _EVERY:
            for middle, time_s in self._times([(low + high) // 2]):
                low, high = (middle, high) if is_low(middle, time_s) else (low, middle)
        if high - low < 2:
            return []
        halved = f", by halves from {ends[0]} to {ends[1]}" if ends != (low, high) else ""
        self.searched = f"{halved}, then every number from {low} to {high}"
        return self._times(range(low, high + 1))

    def _times(self, numbers: Iterable[int]) -> list[tuple[int, float]]:
        """Seconds of the whole work on so many nodes."""
        whole = self.asked.scenario.cluster.gpus_per_node
        scenarios = [self.asked.at(nodes, whole) for nodes in numbers]
        return [
            (
                scenario.cluster.nodes,
                self.asked.time_s(scenario, brief.iteration_time_s.mean),
            )
            for scenario, brief in zip(scenarios, simulate_many(scenarios), strict=True)
        ]

    def _how_searched(self) -> str:
        most = self.asked.max_gpus // self.asked.scenario.cluster.gpus_per_node
        if self.asked.global_batch is not None:
            return f"every number of nodes to {most} whose GPUs divide the global batch"
        return f"nodes in powers of two, to {most}{self.searched}"

    def _sure(self, sizes: Iterable[Capacity]) -> Capacity | None:
        """The smallest that is in time even at the slow edge of its interval."""
        within_s = self.asked.target.within_s
        if within_s is None:
            return None
        return next(
            (
                size
                for size in sizes
                if size.time_interval_s and size.time_interval_s[1] <= within_s
            ),
            None,
        )

    def _next_doubling(self, answer: Capacity) -> NextDoubling | None:
        """None where twice the GPUs cannot be had."""
        nodes, gpus_per_node = answer.nodes, 2 * answer.gpus_per_node
        if gpus_per_node > self.asked.scenario.cluster.gpus_per_node:
            nodes, gpus_per_node = 2 * answer.nodes, answer.gpus_per_node
        try:
            doubled = self.asked.at(nodes, gpus_per_node)
            return next_doubling(self.asked.at(answer.nodes, answer.gpus_per_node), doubled)
        except InputError as error:
            self._leave_out(nodes, gpus_per_node, error.key, error.message)
        except ScenarioError as error:
            problem = error.problems[0]
            self._leave_out(nodes, gpus_per_node, problem.key, problem.message)
        return None


def _ladder(asked: _Question) -> list[tuple[int, int]]:
    """Sizes to try, as nodes and GPUs of each: parts of a node only where the scenario has one."""
    cluster, whole = asked.scenario.cluster, asked.scenario.cluster.gpus_per_node
    most = asked.max_gpus // whole
    parts = _powers_of_two(min(whole - 1, asked.max_gpus)) if cluster.nodes == 1 else []
    if asked.global_batch is None:
        network = cluster.link("inter_node")
        leaf = network.nodes_per_leaf if isinstance(network, InterNode) else None
        under_one_leaf = [leaf] if leaf and leaf <= most else []
        numbers = sorted({*_powers_of_two(most), *under_one_leaf, *([most] if most else [])})
    else:
        powers = set(_powers_of_two(most))  # those that do not divide are named
        numbers = [n for n in range(1, most + 1) if n in powers or asked.has(n * whole)]
    return [*((1, gpus) for gpus in parts), *((nodes, whole) for nodes in numbers)]


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _capacity(asked: _Question, scenario: Scenario, result: Result) -> Capacity:
    step_s, gpus = result.iteration_time_s.mean, result.world_size
    interval, memory = result.prediction_interval_s, result.memory_bytes_per_gpu
    time_s = asked.time_s(scenario, step_s)
    edges = (interval.low, interval.high) if interval else None
    fits: bool | None = memory.fits
    return Capacity(
        gpus=gpus,
        nodes=result.nodes,
        gpus_per_node=result.gpus_per_node,
        batch_per_rank=scenario.workload.batch_per_rank,
        accumulation_steps=scenario.ddp.accumulation_steps,
        global_batch=_global_batch(scenario),
        step_s=step_s,
        throughput_samples_per_s=result.throughput_samples_per_s,
        scaling_efficiency=result.scaling_efficiency,
        marginal_efficiency=None,
        steps=asked.steps(scenario),
        time_s=time_s,
        time_interval_s=edges
        and (asked.time_s(scenario, edges[0]), asked.time_s(scenario, edges[1])),
        gpu_hours=gpus * time_s / _S_PER_HOUR,
        cost=asked.cost(gpus, time_s),
        memory_bytes=memory.total,
        fits=None if fits and memory.activations is None else fits,
        bottleneck=f"{result.bottleneck.kind}: {result.bottleneck.text}",
        warnings=tuple(said for said in result.warnings if fits or _OUT_OF_MEMORY not in said),
    )


def _widest(sources: Sequence[IntervalSource]) -> IntervalSource | None:
    return max(sources, key=lambda source: source.low_s + source.high_s, default=None)


def _make_it_fit(asked: _Question) -> NextStep | None:
    """Smaller micro-batches of the same global batch that fit; None where none is known to."""
    if asked.global_batch is not None or resolve(asked.scenario).model.basis != "roofline":
        return None
    fitting = _split_to_fit(asked.scenario)
    if fitting is None:
        return None
    settings = (
        f"workload.batch_per_rank={fitting.workload.batch_per_rank}",
        f"ddp.accumulation_steps={fitting.ddp.accumulation_steps}",
    )
    return NextStep("the same global batch in smaller micro-batches fits", settings)


def _split_to_fit(scenario: Scenario) -> Scenario | None:
    """The fewest micro-batches of the same global batch that fit into memory; None: none do."""
    if scenario.cluster.algorithm == "data_parallel":  # it has no no_sync
        return None
    batch, steps = scenario.workload.batch_per_rank, scenario.ddp.accumulation_steps
    for parts in (parts for parts in range(1, batch + 1) if batch % parts == 0):
        workload = scenario.workload.model_copy(update={"batch_per_rank": batch // parts})
        ddp = scenario.ddp.model_copy(update={"accumulation_steps": parts * steps})
        split = scenario.model_copy(update={"workload": workload, "ddp": ddp})
        if resolve(split).memory().fits:
            return split
    return None
