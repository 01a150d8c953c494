"""`calibrate device`: the plan on one device, round after round, inside a time budget."""

from __future__ import annotations

import gc
import gzip
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from calibrate.files import check_writable
from calibrate.measure.clock import Clock
from calibrate.measure.cluster.record_file import is_free, write_record
from calibrate.measure.device.cases import RUNNERS, Bench, OwnTime, supported_rates, trace
from calibrate.measure.device.plan import device_plan
from calibrate.measure.errors import MeasureError, StoppedError, first_line
from calibrate.measure.host.environment import check_same_environment, device_environment
from calibrate.measure.host.machine import free_memory_bytes
from calibrate.measure.model.profile import device_of
from calibrate.measure.model.training import compute_threads
from calibrate.measure.ranks.launch import Reporter
from calibrate.records.device_record import (
    SCHEMA,
    Case,
    DeviceMeasurement,
    DeviceRecord,
    Kind,
    load_device_record,
)
from calibrate.signals import as_exceptions
from ddpsim.files import write_atomically
from ddpsim.scenario.catalog import model_table
from ddpsim.scenario.workload import Precision
from ddpsim.units import format_bytes, format_duration
from ddpsim.workload.zoo.step import Step, step_of

_MEMORY_SHARE = 0.25  # of a CPU's free memory; of a GPU's, which nobody shares:
_MEMORY_SHARE_GPU = 0.9
_COMPILE_S = 60.0  # of a model, on a GPU and on a CPU; as seen: 20 to 50 s
_ONCE: tuple[Kind, ...] = ("compile", "ddp", "sync_batch_norm", "grad_scaler")
_BEFORE_TRACE: tuple[Kind, ...] = (
    *("launch", "product", "convolution", "memory", "optimizer", "step"),
)
_TRACE_S = 15.0
_LONGEST_REASON = 200  # characters of what torch said
# of the products' best rate, what steps reach at least, as seen; and passes that a case makes
_REACHED, _PASSES_OF_CASE = 0.4, 6

_USUAL_BYTES = 4 * 2**30  # assumed of a CPU that does not tell


@dataclass(frozen=True)
class DeviceOptions:
    """The options of a device's measurement: where it goes, how long it takes, on what."""

    output: Path
    time_budget_s: float = 480.0
    device: str = "auto"
    resume: bool = False
    rounds: int = 3
    trace: bool = True
    plan: Sequence[Case] | None = None

    @property
    def kept(self) -> str:
        """What a user is told where the work ends early."""
        return f"What was measured is in {self.output}; the same command with --resume goes on"


def measure_device(options: DeviceOptions) -> DeviceRecord:
    """Measure what is not in the record yet, and keep it whole after every case.

    Raises MeasureError where the record cannot be written or resumed, or the device fails.
    """
    check_writable(options.output)
    device = device_of(options.device)
    with compute_threads(1), as_exceptions():
        record = _first_record(options, device)
        try:
            bench = Bench(device, OwnTime(device), Clock(device))
            return _Session(options, bench, record).run()
        except KeyboardInterrupt:
            raise StoppedError(f"stopped. {options.kept}") from None


class _Session:
    def __init__(self, options: DeviceOptions, bench: Bench, record: DeviceRecord) -> None:
        self._options, self._bench, self._record = options, bench, record
        self._ends = time.monotonic() + options.time_budget_s
        self._traced = not options.trace

    def run(self) -> DeviceRecord:
        """All rounds that the time budget has room for."""
        bench, held = self._bench, self._record.measurements
        plan = self._options.plan
        if plan is None:
            plan = list(device_plan(supported_rates(bench.device), gpu=bench.on_gpu))
        with Reporter(len(plan) * self._options.rounds, speaks=True) as reporter:
            reporter.say(f"measuring {self._record.environment.machine}, one thread")
            if held:
                reporter.say(f"{self._options.output} holds {len(held)} measurements already")
            for number in range(self._options.rounds):
                self._round(number, plan, reporter)
            reporter.say(f"{len(self._record.measurements)} measurements in {self._options.output}")
        return self._record

    def _round(self, number: int, plan: Sequence[Case], reporter: Reporter) -> None:
        for case in plan:
            if case.kind not in _BEFORE_TRACE:
                self._trace(reporter)
            held = self._record.find(case)
            is_done = held and (held.rounds > number or case.kind in _ONCE)
            if is_done or (number and str(case) in self._record.skipped):
                reporter.done()
            else:
                self._one(case, held, reporter)

    def _one(self, case: Case, held: DeviceMeasurement | None, reporter: Reporter) -> None:
        reporter.begin(str(case))
        problem = self._unfit(case, held)
        if not problem:
            began = time.monotonic()
            try:
                measured = RUNNERS[case.kind](case, self._bench)
            except torch.AcceleratorError as error:
                raise MeasureError(
                    f"the GPU failed at {case}: {first_line(error)}. {self._options.kept}"
                ) from None
            except Exception as error:  # noqa: BLE001 -- memory, a type, a compiler: all are told
                problem = first_line(error)[:_LONGEST_REASON]
            else:
                took = {"took_s": time.monotonic() - began}
                parts = {part: format_duration(min(s)) for part, s in measured.samples_s.items()}
                times = ", ".join(f"{part} {text}" for part, text in parts.items())
                record = self._record.with_measurement(measured.model_copy(update=took))
                self._keep(record, f"measured  {case}: {times}", reporter)
            if self._bench.on_gpu:
                gc.collect()  # a compiled model is in a cycle with its code
                torch.cuda.empty_cache()
        if problem and not held:
            skipped = {"skipped": self._record.skipped | {str(case): problem}}
            self._keep(
                self._record.model_copy(update=skipped), f"skipped   {case}: {problem}", reporter
            )

    def _keep(self, record: DeviceRecord, line: str, reporter: Reporter) -> None:
        self._record = record
        write_record(record, self._options.output)
        reporter.done(line)

    def _unfit(self, case: Case, held: DeviceMeasurement | None) -> str:
        """Why a case is not measured now; empty if it is."""
        left_s = self._ends - time.monotonic()
        if left_s <= 0:
            return "the time budget is spent"
        needed_s = held.took_s if held else self._expected_s(case)
        if needed_s > left_s:
            return (
                f"would take {format_duration(needed_s)}, and {format_duration(left_s)} of the "
                "time budget are left"
            )
        needed = _memory_bytes(case)
        if needed > (has := self._memory_bytes()):
            return f"needs {format_bytes(needed)} or more, and {format_bytes(has)} may be used"
        return ""

    def _expected_s(self, case: Case) -> float:
        """Seconds of a model by its FLOPs and the best product so far; 0 of what is not known."""
        if not case.model:
            return 0.0
        best = max((m.flops / m.best_s() for m in self._record.of("product")), default=0.0)
        compile_s = _COMPILE_S if case.kind == "compile" else 0.0
        if not best:
            return compile_s
        return compile_s + _PASSES_OF_CASE * _flops(case) / (_REACHED * best)

    def _memory_bytes(self) -> int:
        if self._bench.on_gpu:
            return int(_MEMORY_SHARE_GPU * torch.cuda.mem_get_info(self._bench.device)[0])
        return int(_MEMORY_SHARE * (free_memory_bytes() or self._record.memory_bytes))

    def _trace(self, reporter: Reporter) -> None:
        """Beside the record, once, if there is time for it."""
        path = self._options.output.with_suffix(".trace.json.gz")
        left_s = self._ends - time.monotonic()
        if self._traced or path.exists() or left_s < _TRACE_S:
            return
        self._traced = True
        batch, size = (32, 224) if self._bench.on_gpu else (1, 96)
        case = Case(kind="step", model="resnet50", batch=batch, size=size)
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "trace.json"
            try:
                trace(case, self._bench, str(made))
            except Exception as error:  # noqa: BLE001 -- a profiler that fails takes nothing else
                reporter.say(f"skipped   the profiler's trace: {first_line(error)}")
                return
            write_atomically(path, gzip.compress(made.read_bytes()))
        reporter.say(f"{path}: a step of resnet50 by torch's profiler")


def _flops(case: Case) -> float:
    """FLOPs of a step's products and convolutions."""
    step = _step(case)
    return float(sum(one.flops for row in step.rows for one in row))


def _step(case: Case) -> Step:
    table = model_table(case.model)
    x = case.size**2 if table["size"]["variable"] == "pixels" else case.size
    precision = cast("Precision", {"fp16": "amp-fp16"}.get(case.precision, case.precision))
    return step_of(table, precision, case.batch, x)


def _memory_bytes(case: Case) -> float:
    """At least: weights, gradients, and what autograd keeps; 0 of kernels."""
    if not case.model:
        return 0.0
    parameters = int(model_table(case.model)["parameter_count"])
    copies = 4 if case.kind in ("ddp", "sync_batch_norm", "grad_scaler") else 2
    return 4.0 * copies * parameters + _step(case).saved_bytes


def _first_record(options: DeviceOptions, device: torch.device) -> DeviceRecord:
    """An empty record, or the one to resume, written; raises MeasureError."""
    path, here = options.output, device_environment(device)
    memory = free_memory_bytes() or _USUAL_BYTES
    capability = None
    if device.type == "cuda":
        memory = int(torch.cuda.get_device_properties(device).total_memory)
        capability = None if torch.version.hip else torch.cuda.get_device_capability(device)
    record = DeviceRecord(environment=here, memory_bytes=memory, capability=capability)
    if not is_free(path, SCHEMA, resume=options.resume):
        old = load_device_record(path)
        check_same_environment(old.environment, here, path, here="this machine")
        record = old.model_copy(update={"skipped": {}})
    write_record(record, path)
    return record
