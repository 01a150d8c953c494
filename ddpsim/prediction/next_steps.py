"""Changed scenarios, simulated: what to do next against the bottleneck and the interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ddpsim.cluster.link_sources import rate_is_stated
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.nccl.tuner import estimates
from ddpsim.cluster.transports import MORE_SOCKETS, SOCKET_VARIABLES
from ddpsim.cluster.wires import Wires, rate_of
from ddpsim.engine.batch import mean_steps_s, step_ranges_s
from ddpsim.errors import ScenarioError, not_here
from ddpsim.prediction.fitting import ways_to_fit
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.result.model import NextStep, Result
from ddpsim.scenario.document import load
from ddpsim.scenario.links import InterNode
from ddpsim.scenario.load import parse
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.set_aside import as_ddp
from ddpsim.scenario.workload import Workload
from ddpsim.settings import setting
from ddpsim.units import format_duration
from ddpsim.workload.model import ITEM_BYTES
from ddpsim.workload.numerics import keeps_numerics

_WORTH_TRYING = 0.01  # of the throughput, or of the step
_WORTH_CHECKING = 0.05  # of the step, where something that is not stated would add so much
_QUICK_RANKS = 256  # of more, to try caps takes longer than the prediction itself should
_SELDOM = 50  # steps from one read of the loss to the next
_CAPS_MIB = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_Range = tuple[float, float]  # the least and the most


def next_steps(job: Job, result: Result) -> tuple[NextStep, ...]:
    """Changes that make the job fit or ease its bottleneck, then what to measure or check first.

    A change is simulated without noise, and named if it raises the throughput.
    """
    unknown = sorted((*_narrowing(job, result), *_unstated(job, result)), key=lambda each: -each[0])
    try:
        easing = tuple(_easing(job, result))
    except ImportError as error:  # in a browser, of ranks that one does not stand for
        easing = (NextStep(f"to try other settings {not_here(error)}", ()),)
    return (*ways_to_fit(job), *easing, *(step for _, step in unknown[:1]))


@dataclass(frozen=True)
class _Change:
    """Settings of a scenario, and what they are in words."""

    why: str
    settings: tuple[str, ...]

    @classmethod
    def of(cls, why: str, path: str, value: Any) -> _Change:
        """Return a change of one key."""
        return cls(why, (setting(path, value),))


class _Trials:
    """Changes tried against a job's bottleneck, each simulated once.

    `before`: the job's samples per second without noise.
    """

    def __init__(self, job: Job, result: Result) -> None:
        self.job, self.result = job, result
        self.before = job.scenario.global_batch / job.step_s()
        self._ranges: dict[tuple[str, ...], _Range] = {}

    def in_order(self, changes: Iterable[_Change]) -> list[_Change]:
        """Sort changes, the one with the highest throughput first."""
        candidates = list(changes)
        ranges = sorted(self._throughputs(candidates).values(), reverse=True)
        if any(lower[1] > higher[0] for higher, lower in pairwise(ranges)):
            unsure = [key for key, (least, most) in self._ranges.items() if least < most]
            self._ranges |= self._simulate([each for each in candidates if each.settings in unsure])
        throughputs = self._throughputs(candidates)
        return sorted(candidates, key=lambda each: throughputs[each.settings], reverse=True)

    def gain(self, change: _Change) -> str | None:
        """What a change adds to the throughput, in percent; None where it is not worth trying."""
        return self._gain(self._throughputs([change])[change.settings][0])

    def _throughputs(self, changes: Sequence[_Change]) -> dict[tuple[str, ...], _Range]:
        """Ranges of throughputs, narrow enough for the gain of each change in percent."""
        new = [each for each in changes if each.settings not in self._ranges]
        self._ranges |= self._simulate(new, lambda *edges: len(set(map(self._gain, edges))) == 1)
        return {each.settings: self._ranges[each.settings] for each in changes}

    def _simulate(
        self, changes: Sequence[_Change], suffices: Callable[[float, float], bool] | None = None
    ) -> dict[tuple[str, ...], _Range]:
        """Samples per second of changes, simulated until each range `suffices`; 0: does not fit."""
        jobs = {each.settings: _changed_job(self.job, each) for each in changes}
        fit = {settings: job for settings, job in jobs.items() if job}
        samples = [job.scenario.global_batch for job in fit.values()]
        steps_s = step_ranges_s(
            [job.calm_request() for job in fit.values()],
            lambda i, *edges_s: bool(suffices and suffices(*(samples[i] / s for s in edges_s))),
        )
        each = zip(fit, samples, steps_s, strict=True)
        ranges = {
            settings: (many / most_s, many / least_s) for settings, many, (least_s, most_s) in each
        }
        return dict.fromkeys(jobs, (0.0, 0.0)) | ranges

    def _gain(self, throughput: float) -> str | None:
        gain = throughput / self.before - 1
        return f"{gain:+.0%}" if gain >= _WORTH_TRYING else None


def _easing(job: Job, result: Result) -> Iterator[NextStep]:
    """Yield the first change that helps of each group, the one that gains most first."""
    kind, noise = result.bottleneck.kind, _noise(job.scenario)
    late = kind == "communication" and 2 * result.skew_s > result.exposed_comm_s
    if noise and (late or kind == "stragglers"):
        yield NextStep("the same without this noise, to see what it costs", (noise,))
        return
    varies = job.scenario.run.jitter or job.scenario.run.stalls or job.observed_s
    beside = " without noise" if varies else ""
    trials = _Trials(job, result)
    groups = (changes(trials) for changes in _CHANGES.get(kind, (_less_compute,)))
    firsts = (next(filter(trials.gain, changes), None) for changes in groups)
    for change in trials.in_order(change for change in firsts if change):
        yield NextStep(f"{change.why}: throughput {trials.gain(change)}{beside}", change.settings)


def _noise(scenario: Scenario) -> str | None:
    """The setting that removes a scenario's noise; a jitter of zero removes a profile's too."""
    if scenario.cluster.stragglers:
        return "cluster.stragglers=null"
    if scenario.run.stalls:
        return "run.stalls=null"
    return "run.jitter={sigma: 0}" if scenario.run.jitter else None


def _other_buckets(trials: _Trials) -> Iterator[_Change]:
    """The best of some bucket caps, which leave the training as it is; `tune` tries more."""
    scenario = trials.job.scenario
    if scenario.cluster.algorithm == "data_parallel" or not scenario.ddp.is_ddp:
        return
    why, key = "other buckets (ddpsim tune tries more)", "ddp.bucket_cap_mb"
    changes = [_Change(why, (f"{key}={cap:g}",)) for cap in _CAPS_MIB]
    yield from _best(trials, changes)


def _other_algorithm(trials: _Trials) -> Iterator[_Change]:
    """The best algorithm where NCCL's tuner chooses: its estimates are not what messages cost."""
    cost = trials.job.network.plain_cost
    if not isinstance(cost, NcclCost) or cost.algorithms:
        return
    names = dict.fromkeys(row.algorithm for row in estimates(cost.graph))
    changes = [
        _Change.of(
            f"NCCL_ALGO={name}, which NCCL's own estimate does not choose (measure both)",
            "cluster.algorithm",
            name,
        )
        for name in names
    ]
    yield from _best(trials, changes)


def _more_sockets(trials: _Trials) -> Iterator[_Change]:
    """NCCL's helper threads, where its sockets carry less than the line does."""
    cluster, cost = trials.job.scenario.cluster, trials.job.network.plain_cost
    if not isinstance(cost, NcclCost):
        return
    wires = Wires.of(cluster)
    if wires.environment.threads is None and wires.sockets_rate < rate_of(wires.inter):
        variables = SOCKET_VARIABLES.items()
        settings = tuple(setting(f"cluster.nccl_env.{name}", number) for name, number in variables)
        yield _Change(f"{MORE_SOCKETS}: threads that copy what the sockets carry", settings)


def _best(trials: _Trials, changes: Sequence[_Change]) -> Iterator[_Change]:
    """Yields the best of changes that leave the training alone, unless trying them takes long."""
    if trials.result.engine.ranks_simulated <= _QUICK_RANKS:
        yield trials.in_order(changes)[0]


def _less_communication(trials: _Trials) -> Iterator[_Change]:
    """Changes that keep the global batch, those that help most first; then larger batches."""
    job = trials.job
    if job.scenario.cluster.algorithm == "data_parallel":
        yield _Change.of("DDP in place of DataParallel", "cluster.algorithm", "auto")
        return
    if local := job.scenario.ddp.local_sgd:
        every = min(2 * local.every, 1000)
        why = f"parameters averaged every {every} steps (another training)"
        yield _Change.of(why, "ddp.local_sgd.every", every)
        return
    if not job.scenario.ddp.is_ddp:
        why = "DDP: buckets of gradients, sent during the backward"
        change = _Change(why, as_ddp(job.scenario.ddp))
        other = _changed_job(job, change)
        if other and keeps_numerics(job.scenario, other.scenario, job.model):
            yield change
    yield from trials.in_order([*_newer_torch(job), *_two_bytes(job), *_own_buffers(job)])
    micro_batches = 4 * job.scenario.ddp.accumulation_steps
    why = f"communication once in {micro_batches} micro-batches (a larger global batch)"
    yield _Change.of(why, "ddp.accumulation_steps", micro_batches)


def _newer_torch(job: Job) -> Iterator[_Change]:
    if job.scenario.ddp.is_torch_1 and job.model.tied:
        why = "torch 1.9 or newer, which reduces a shared weight once"
        yield _Change(why, ("ddp.torch='2.11'",))


def _two_bytes(job: Job) -> Iterator[_Change]:
    ddp = job.scenario.ddp
    if not ddp.is_ddp:
        return
    widest = max(ITEM_BYTES[parameter.dtype] for parameter in job.model.parameters)
    if not ddp.is_torch_1 and ddp.comm_hook in ("none", "allreduce") and widest > 2:
        hook = job.scenario.cluster.device.two_byte_hooks[0]
        yield _Change.of("gradients in two bytes on the wire", "ddp.comm_hook", hook)


def _own_buffers(job: Job) -> Iterator[_Change]:
    if job.model.buffers and job.scenario.ddp.broadcast_buffers and job.scenario.ddp.is_ddp:
        why = "each rank keeps its own buffers (batch norm's statistics then differ between ranks)"
        yield _Change.of(why, "ddp.broadcast_buffers", value=False)


def _faster_copies(trials: _Trials) -> Iterator[_Change]:
    copied = trials.job.scenario.workload.input_copy
    if copied and not copied.pinned:
        yield _Change.of("inputs in pinned memory", "workload.input_copy.pinned", value=True)
    if copied and not copied.non_blocking:
        why = "copies that the host does not wait for"
        yield _Change.of(why, "workload.input_copy.non_blocking", value=True)


def _faster_data(trials: _Trials) -> Iterator[_Change]:
    result = trials.result
    if trials.job.scenario.workload.data is None:
        return
    busy_s = result.iteration_time_s.mean - result.breakdown_s.data_wait
    samples = result.throughput_per_gpu * result.iteration_time_s.mean
    rate = float(f"{1.05 * samples / busy_s:.2e}")
    setting = f"workload.data.rate={rate:g} samples/s"
    yield _Change("a loader that keeps up with the rest of the step", (setting,))


def _less_compute(trials: _Trials) -> Iterator[_Change]:
    job = trials.job
    workload, cluster = job.scenario.workload, job.scenario.cluster
    rates = cluster.device.peak_flops_per_s
    lower = next((rate for rate in ("bf16", "fp16") if rate in rates), None)
    if job.model.basis == "roofline" and lower and workload.precision in ("fp32", "tf32"):
        yield _Change.of("mixed precision", "workload.precision", f"amp-{lower}")
    yield from _faster_layers(workload)
    yield from _less_overhead(trials)
    if cluster.algorithm != "data_parallel":
        yield _Change.of("twice the machines", "cluster.nodes", 2 * cluster.nodes)


def _faster_layers(workload: Workload) -> Iterator[_Change]:
    """Yields faster layers of a zoo model; one without such layers refuses the change."""
    if workload.model and workload.memory_format != "channels_last":
        why = "convolutions in channels_last"
        yield _Change.of(why, "workload.memory_format", "channels_last")
    if workload.attention == "eager":
        yield _Change.of("fused attention", "workload.attention", "sdpa")


def _fewer_operators(trials: _Trials) -> Iterator[_Change]:
    if trials.job.model.basis == "roofline":
        yield _Change.of("torch.compile", "workload.compile", value=True)


def _less_overhead(trials: _Trials) -> Iterator[_Change]:
    job = trials.job
    ddp, workload = job.scenario.ddp, job.scenario.workload
    if workload.debug:
        yield _Change.of("debug settings off", "workload.debug", None)
    if ddp.zero.counts_in_hooks:
        why = "a DeepSpeed whose hooks do not count all parameters"
        yield _Change(why, ("ddp.deepspeed.version='0.19'",))
    if job.model.basis == "roofline":  # a measured step belongs to its batch
        yield _Change.of("a larger batch", "workload.batch_per_rank", 2 * workload.batch_per_rank)
    if workload.read_loss_every and workload.read_loss_every < _SELDOM:
        why = f"the loss read every {_SELDOM} steps"
        yield _Change.of(why, "workload.read_loss_every", _SELDOM)
    if workload.barrier_every:
        yield _Change.of("no barrier", "workload.barrier_every", None)
    if workload.optimizer.may_fuse and job.scenario.cluster.device.kind == "gpu":
        yield _Change.of("a fused optimizer", "workload.optimizer.fused", value=True)
    if ddp.find_unused_parameters and not job.model.unused:
        yield _Change.of("no parameter is unused", "ddp.find_unused_parameters", value=False)
    if ddp.is_ddp and not ddp.gradient_as_bucket_view and ddp.torch != "1.4":
        yield _Change.of("no copies back", "ddp.gradient_as_bucket_view", value=True)


_CHANGES: dict[str, tuple[Callable[[_Trials], Iterator[_Change]], ...]] = {
    "communication": (_other_buckets, _other_algorithm, _more_sockets, _less_communication),
    "data": (_faster_data, _faster_copies),
    "host": (_fewer_operators, _less_overhead),
}


def _changed_job(job: Job, change: _Change) -> Job | None:
    """Job with a change; None where that is refused, or needs too much memory."""
    try:
        changed = resolve(parse(load(job.scenario, change.settings)), parts=job.parts)
    except ScenarioError:
        return None
    memory = changed.memory()
    fits = memory.total <= max(memory.device, job.memory().total)
    return changed if fits else None


def _narrowing(job: Job, result: Result) -> Iterator[tuple[float, NextStep]]:
    """The measurement in place of the widest source of the interval that can be measured."""
    interval = result.prediction_interval_s
    log = "NCCL-TESTS-LOG.txt" if job.scenario.ddp.backend == "nccl" else "ALL-REDUCE.csv"
    measurable = {
        "compute time": (
            job.model.basis == "roofline" and not job.waits_for_other_device,
            "measure one micro-batch without DDP",
            "workload.step_time=MEASURED ms",
        ),
        "host time": (
            not job.waits_for_other_device,
            "measure one micro-batch without DDP",
            "workload.step_time=MEASURED ms",
        ),
        "network model": (
            not job.scenario.cluster.is_measured,
            "measure your all-reduce",
            f"cluster.all_reduce={log}",
        ),
    }
    wide = [
        (source.width_s, max(source.low_s, source.high_s), source.input)
        for source in (interval.sources if interval else ())
        if measurable.get(source.input, (False,))[0]
    ]
    _, width_s, widest = max(wide, default=(0.0, 0.0, ""))
    if width_s >= _WORTH_TRYING * result.iteration_time_s.mean:
        _, measure, setting = measurable[widest]
        why = f"the {widest} adds up to {format_duration(width_s)} to the interval: {measure}"
        yield width_s, NextStep(why, (setting,))


def _unstated(job: Job, result: Result) -> Iterator[tuple[float, NextStep]]:
    """What may make the network slower unseen, and which line of NCCL's log shows it.

    The interval does not count it. All-reduces of two published sites, without GPUDirect or with
    half of the NICs (Baskerville, BM.GPU4.8), are 40 to 70 % slower.
    """
    cluster, link = job.scenario.cluster, job.scenario.cluster.link("inter_node")
    is_priced = isinstance(job.network.plain_cost, NcclCost) and not cluster.is_measured
    if cluster.nodes == 1 or not is_priced or result.engine.ranks_simulated > _QUICK_RANKS:
        return
    if not isinstance(link, InterNode) or link.transport != "rdma":
        return
    stated, before_s = cluster.inter_node or InterNode(), job.step_s()
    slower: list[_Change] = []
    is_open = "transport" not in stated.model_fields_set and cluster.machine is None
    if is_open and rate_is_stated(cluster, "inter_node"):
        why = "RDMA is taken, and TCP would add {}: with it {} prints NET/Socket"
        slower.append(_Change.of(why, "cluster.inter_node.transport", "tcp"))
    if link.gpu_direct is None:
        why = "no GPUDirect would add {}: with it {} prints GDRDMA"
        slower.append(_Change.of(why, "cluster.inter_node.gpu_direct", value=False))
    if link.nics_per_node > 1 and "nics_per_node" not in stated.model_fields_set:
        why = "half of the NICs would add {}: {} prints those in use after NET/IB"
        half = link.nics_per_node // 2
        slower.append(_Change.of(why, "cluster.inter_node.nics_per_node", half))
    tried = [(changed, each) for each in slower if (changed := _changed_job(job, each))]
    steps_s = mean_steps_s([changed.calm_request() for changed, _ in tried])
    for (_, each), step_s in zip(tried, steps_s, strict=True):
        if (added_s := step_s - before_s) >= _WORTH_CHECKING * before_s:
            why = each.why.format(format_duration(added_s), "NCCL_DEBUG=INFO")
            yield added_s, NextStep(why, each.settings)
