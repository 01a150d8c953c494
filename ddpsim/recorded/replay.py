"""Traced steps simulated again: every rank with its own work, every collective with its own time.

What is simulated is when ranks meet, what hides what, and DDP's own work: what the trace records of
these is only compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median

from ddpsim.cluster.build import build_network
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.engine.program import Program
from ddpsim.engine.reference.recorded import RecordedRank, RecordedSteps, simulate_recorded
from ddpsim.errors import InputError, ScenarioError, blamed_on
from ddpsim.importers.kineto.measured import KernelChoice, KinetoStep, OwnOfDdp, kernel_choice
from ddpsim.importers.kineto.ranks import RankTraces, Transfer, clocks_apart_s, read_rank_traces
from ddpsim.prediction.api import simulate
from ddpsim.prediction.job import Job
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.recorded.traced_job import traced_job, with_bucket_caps
from ddpsim.result.metrics import BreakdownNs, Step, steps_of
from ddpsim.result.model import Breakdown
from ddpsim.result.replay import Replay, ReplayedCollective, ReplayedKernel, ReplayedStep
from ddpsim.result.timeline import RankTimeline
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from ddpsim.scenario.quantity import SourceFile
from ddpsim.scenario.schema import Scenario
from ddpsim.strategies.instructions import Communicate, Compute, Instruction, LoadBatch
from ddpsim.strategies.strategy import Bucket
from ddpsim.units import NS_PER_S, to_ns
from ddpsim.workload.build import known_model
from ddpsim.workload.traced import traced_model

_Copies = tuple[int, str, int]
_DDP_WORKS = ("bucket_copy", "copy_back", "buffers")


def replay(path: str | Path, settings: Sequence[str] = ()) -> Replay:
    """Simulate the steps of a trace, or of a folder with one a rank, as they were recorded.

    `settings` state as `--set` does what no trace has. Raises ImportFailedError for traces that
    are not of whole steps, and ScenarioError for settings that do not fit them.
    """
    traces = read_rank_traces(SourceFile(str(path), Path(path)))
    job = traced_job(traces)
    document = Document.from_mapping(job.document, Path()).changed(settings)
    scenario = parse(document)
    _check_micro_batches(traces, scenario, document)
    resolved = resolve(scenario, document)
    if "ddp.bucket_cap_mb" not in {setting.partition("=")[0].strip() for setting in settings}:
        ddp, caps = with_bucket_caps(resolved.model, scenario.ddp, traces.typical.typical)
        if caps:
            document = document.changed([f"ddp.bucket_cap_mb={ddp.bucket_cap_mb}"])
            scenario = parse(document)
            resolved = resolve(scenario, document)
    return _Replaying(traces, resolved).side_by_side(document, job.assumed)


def _check_micro_batches(traces: RankTraces, scenario: Scenario, document: Document) -> None:
    traced, stated = len(traces.typical.typical.micro_batches), scenario.ddp.accumulation_steps
    if stated != traced:
        error = InputError(
            "ddp.accumulation_steps",
            f"is {stated}, but a traced step has {traced} micro-batches; leave it out here, and "
            "change the scenario that replay writes",
        )
        raise ScenarioError([document.blame(error)])


@dataclass(frozen=True)
class _Replaying:
    """Traces, and the job that they are of."""

    traces: RankTraces
    job: Job

    def side_by_side(self, document: Document, assumed: tuple[str, ...]) -> Replay:
        """The recorded steps and the simulated ones."""
        lanes = self._simulated()
        steps = [_steps(lane, late_ns) for lane, late_ns in zip(lanes, self._late_ns, strict=True)]
        recorded = list(self.traces.steps.values())
        return Replay(
            source=self.traces.source,
            ranks=len(recorded),
            world_size=self.job.scenario.cluster.world_size,
            steps=tuple(_beside(recorded, steps)),
            traced=_traced_parts(recorded),
            simulated=_simulated_parts(steps),
            collectives=tuple(self._collectives(steps)),
            predicted_s=simulate(self.job.scenario).iteration_time_s.mean,
            straggler=self.traces.straggler,
            interference=self.traces.interference,
            kernels=tuple(kernels_beside(self.traces, self.job.scenario)),
            document=document.data,
            assumed=assumed,
            warnings=self.job.model.warnings,
        )

    @property
    def _late_ns(self) -> list[int]:
        """How long after the first rank each begins, by one clock."""
        apart_s = clocks_apart_s(self.traces.steps)
        begins_s = [of[0].start_s - apart_s[rank] for rank, of in self.traces.steps.items()]
        return [to_ns(begin_s - min(begins_s)) for begin_s in begins_s]

    def _simulated(self) -> list[RankTimeline]:
        programs = [self._program(rank) for rank in self.traces.steps]
        ranks = [
            RecordedRank(program, late_ns, [to_ns(each.loader_s) for each in _parts(of_rank)])
            for program, late_ns, of_rank in zip(
                programs, self._late_ns, self.traces.steps.values(), strict=True
            )
        ]
        return simulate_recorded(ranks, self.job.network.plain_cost, self._transfers_ns())

    def _program(self, rank: int) -> Program:
        """A rank's loop: each of its steps with the work that was recorded."""
        scenario, trace = self.job.scenario, self.traces.traces[rank]
        workload, device = scenario.workload, scenario.cluster.device
        with blamed_on("workload.trace"):
            model = known_model(scenario, trace)
            models = [
                traced_model(replace(trace, typical=part), model, workload, device)
                for part in _parts(self.traces.steps[rank])
            ]
            # what later micro-batches add to gradients is in their own times
            models = [replace(each, later=(1.0, 1.0)) for each in models]
        loops = [
            compile_program(scenario, each, self.job.overheads, ddp_factor=self.job.ddp_times)
            for each in models
        ]
        count = len(self.traces.steps[rank][0].micro_batches)
        steps = tuple(
            self._as_recorded(rank, i, _spliced(loops[i * count : (i + 1) * count]))
            for i in range(len(self.traces.steps[rank]))
        )
        return replace(
            loops[0], strategy=RecordedSteps(steps), warmup=0, iterations=len(steps), loader=None
        )

    def _as_recorded(
        self, rank: int, step: int, instructions: Sequence[Instruction]
    ) -> tuple[Instruction, ...]:
        """A step with what the host and the backend's threads took beside the model's work."""
        if self.traces.on_gpu:
            own_ns = to_ns(self.traces.steps[rank][step].ddp_host_s)
            return _with_own_host(instructions, own_ns)
        transfers = self._transfers_of(step)
        copies = [each.own_of_ddp for each in self.traces.steps[rank][step].micro_batches]
        buckets = self.job.program.steady_buckets
        return tuple(
            i._replace(before_ns=to_ns(each.delay_s[rank]), after_ns=to_ns(each.lag_s[rank]))
            if isinstance(i, Communicate) and (each := transfers.get(i.number))
            else i
            for i in _begun(_with_own_copies(instructions, copies, buckets), copies)
        )

    def _transfers_of(self, step: int) -> dict[int, Transfer]:
        """The recorded collectives of a step by the number of the simulated one."""
        transfers = {(t.operation, t.size_bytes, t.number): t for t in self.traces.transfers[step]}
        of_number: dict[int, Transfer] = {}
        seen = Counter[tuple[str, int]]()
        for each in self.job.program.steady_step:
            if isinstance(each, Communicate):
                what = each.operation, each.size_bytes
                if transfer := transfers.get((*what, seen[what])):
                    of_number[each.number] = transfer
                seen[what] += 1
        return of_number

    def _transfers_ns(self) -> dict[int, int]:
        """Times of the collectives that were recorded, by their number in the whole loop."""
        step = self.job.program.steady_step
        count = sum(isinstance(each, Communicate) for each in step)
        return {
            number * count + place: to_ns(each.alone_s)
            for number in range(len(self.traces.transfers))
            for place, each in self._transfers_of(number).items()
        }

    def _collectives(self, steps: Sequence[Sequence[Step]]) -> Iterator[ReplayedCollective]:
        simulated: dict[tuple[str, int], list[float]] = defaultdict(list)
        for span in (span for of_rank in steps for step in of_rank for span in step.comm):
            taken_s = (span.end_ns - span.met_ns) / NS_PER_S
            simulated[span.operation, span.wire_bytes].append(taken_s)
        traced = defaultdict(list)
        for each in (each for of_step in self.traces.transfers for each in of_step):
            traced[each.operation, each.size_bytes].append(each)
        for what, of_it in traced.items():
            transfer = simulated.get(what)
            yield ReplayedCollective(
                *what,
                count=round(len(of_it) / len(self.traces.transfers)),
                transfer_s=median(each.duration_s for each in of_it),
                wait_s=median(median(each.late_s.values()) for each in of_it),
                simulated_s=median(transfer) if transfer else None,
            )


def _parts(steps: Sequence[KinetoStep]) -> Iterator[KinetoStep]:
    """The micro-batches of all steps."""
    for step in steps:
        yield from step.micro_batches


def _spliced(loops: Sequence[Program]) -> list[Instruction]:
    """A step with the first micro-batch of the first loop, the second of the second, ..."""
    step: list[Instruction] = []
    for number, loop in enumerate(loops):
        begins = [i for i, each in enumerate(loop.steady_step) if isinstance(each, LoadBatch)]
        step += loop.steady_step[slice(*[*begins, None][number : number + 2])]
    return step


def _begun(step: Iterable[Instruction], micro_batches: Sequence[OwnOfDdp]) -> Iterator[Instruction]:
    """A CPU's step whose forward begins with what came before the first buffers."""
    batches, left_ns = iter(micro_batches), 0
    for i in step:
        if isinstance(i, LoadBatch):
            left_ns = to_ns(next(batches).before)
            yield i
            yield Compute("forward", 0, left_ns)
        elif isinstance(i, Compute) and i.kind == "forward":
            taken_ns = min(left_ns, i.device_ns)
            left_ns -= taken_ns
            yield i._replace(device_ns=i.device_ns - taken_ns)
        else:
            yield i


def _with_own_copies(
    step: Sequence[Instruction], micro_batches: Sequence[OwnOfDdp], buckets: Sequence[Bucket]
) -> Iterator[Instruction]:
    """A CPU's step in which DDP's copies take as long as recorded, where all of them were."""
    recorded_s: dict[_Copies, float] = {}
    for number, batch in enumerate(micro_batches):
        recorded_s |= {(number, "buffers", place): each for place, each in enumerate(batch.buffers)}
        sizes = [len(bucket.parameters) for bucket in buckets]
        if len(batch.copy_back) == sum(sizes):
            copied = iter(batch.copy_back)
            for place, size in enumerate(sizes):
                recorded_s[number, "copy_back", place] = sum(islice(copied, size))
    priced_ns = Counter[_Copies]()
    for copies, i in _copies(step):
        priced_ns[copies] += i.host_ns + i.device_ns if isinstance(i, Compute) else 0
    for copies, i in _copies(step):
        if isinstance(i, Compute) and copies in recorded_s and priced_ns[copies]:
            times = to_ns(recorded_s[copies]) / priced_ns[copies]
            host_ns, device_ns = round(times * i.host_ns), round(times * i.device_ns)
            yield i._replace(host_ns=host_ns, device_ns=device_ns)
        else:
            yield i


def _copies(step: Iterable[Instruction]) -> Iterator[tuple[_Copies, Instruction]]:
    """Instructions by micro-batch, kind, and the broadcasts or copies back before them."""
    micro_batch, sent, copied = -1, 0, 0
    for i in step:
        kind = i.kind if isinstance(i, Compute) else ""
        if isinstance(i, LoadBatch):
            micro_batch, sent, copied = micro_batch + 1, 0, 0
        elif isinstance(i, Communicate) and i.operation == "broadcast":
            sent += 1
        yield (micro_batch, kind, copied if kind == "copy_back" else sent), i
        copied += kind == "copy_back"


def _with_own_host(step: Sequence[Instruction], recorded_ns: int) -> tuple[Instruction, ...]:
    """A step in which DDP itself takes the host as long as was recorded, launches under way.

    The profiler slows it as it slows all that the host does.
    """
    works = [i for i in step if isinstance(i, Compute) and i.kind in _DDP_WORKS]
    priced_ns = sum(each.host_ns for each in works)
    if not (priced_ns and recorded_ns):
        return tuple(step)
    times = recorded_ns / priced_ns
    return tuple(
        i._replace(host_ns=round(times * i.host_ns))
        if isinstance(i, Compute) and i.kind in _DDP_WORKS
        else i
        for i in step
    )


def _steps(lane: RankTimeline, late_ns: int) -> list[Step]:
    """A rank's steps, without its wait before the first."""
    first, *others = steps_of(lane)
    return [replace(first, start_ns=late_ns), *others]


def _beside(
    recorded: Sequence[Sequence[KinetoStep]], steps: Sequence[Sequence[Step]]
) -> Iterator[ReplayedStep]:
    for number, of_it in enumerate(zip(*recorded, strict=True)):
        traced_s = [step.lasts_s for step in of_it]
        simulated_s = [of_rank[number].length_ns / NS_PER_S for of_rank in steps]
        count = len(of_it)
        yield ReplayedStep(of_it[0].name, sum(traced_s) / count, sum(simulated_s) / count)


def _traced_parts(recorded: Sequence[Sequence[KinetoStep]]) -> Breakdown:
    every = [step.parts for of_rank in recorded for step in of_rank]
    return Breakdown(*(sum(part) / len(every) for part in zip(*every, strict=True)))


def _simulated_parts(steps: Sequence[Sequence[Step]]) -> Breakdown:
    every = [step.breakdown() for of_rank in steps for step in of_rank]
    return sum(every, BreakdownNs()).seconds(len(every))


def kernels_beside(traces: RankTraces, scenario: Scenario) -> Iterator[ReplayedKernel]:
    """Traced kernels and the tuner's choices by size; none where either is missing."""
    seen = _seen(traces)
    tuner = _tuner(scenario) if seen else None
    if tuner is None:
        return
    for size, ran in sorted(seen.items()):
        chosen = tuner.choice(size)
        channels, _ = tuner.graph.channels
        yield ReplayedKernel(size, *ran, chosen.algorithm, chosen.protocol, channels)


def _seen(traces: RankTraces) -> dict[int, KernelChoice]:
    """Kernels of all-reduces by size, where a trace has both; the last one of each size."""
    seen = {}
    for step in (step for of_rank in traces.steps.values() for step in of_rank):
        for each in step.collectives:
            choice = kernel_choice(each.kernel, each.blocks, each.threads)
            if choice and each.size_bytes:
                seen[each.size_bytes] = choice
    return seen


def _tuner(scenario: Scenario) -> NcclCost | None:
    """NCCL's tuner on the links of the scenario, whatever was measured."""
    try:
        cost = build_network(scenario.having("cluster", all_reduce=None, profile=None)).plain_cost
    except InputError:
        return None
    return cost if isinstance(cost, NcclCost) else None
