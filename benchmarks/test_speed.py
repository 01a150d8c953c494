"""Speed, by hand: `python -m pytest benchmarks --benchmark-json=FILE`, then `report.py FILE`.

Nothing here fails for being slow: `python benchmarks/report.py FILE --against RESULTS` does, when
a ratio to the yardstick is a quarter worse than in results that were kept.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from simpy import Environment

import ddpsim
from ddpsim.cluster.cost import LinkCost
from ddpsim.cluster.topology.paths import Link
from ddpsim.cluster.transfers import RingTransfer
from ddpsim.engine.reference.messages import RingSteps
from ddpsim.engine.reference.shared_link import SharedLink
from ddpsim.engine.run import run
from ddpsim.importers.kineto.ranks import read_trace
from ddpsim.prediction.api import _predicted as predicted
from ddpsim.prediction.next_steps import next_steps
from ddpsim.prediction.resolve import resolve
from ddpsim.result.timeline import MessageSpan
from ddpsim.scenario.quantity import SourceFile
from ddpsim.scenario.schema import Scenario

pytestmark = pytest.mark.benchmark(timer=time.process_time)  # CPU seconds, but of other processes
SCENARIO = Path(__file__).with_name("resnet50-ring.yaml")
SCENARIOS = SCENARIO.parent.parent / "scenarios"
SHARED = SCENARIO.with_name("resnet50-4-nodes.yaml")
GLOO = SCENARIO.with_name("resnet50-gloo.yaml")
EIGHT = "cluster.nodes=1"
JITTER = "run.jitter={sigma: 0.02}"
STRAGGLERS = "cluster.stragglers={distribution: lognormal, sigma: 0.03}"
Measure = Callable[..., Any]


def scenario(*settings: str) -> Scenario:
    return ddpsim.load_scenario(SCENARIO, settings)


# --- whole processes: what a user waits for -----------------------------------------------------

RUN = ("run", str(SCENARIO), "--set")
COLD = {
    "help": ("--help",),
    "8-folded": (*RUN, EIGHT),
    "1000000-folded": (*RUN, "cluster.nodes=125000"),
    "1024-jitter": (*RUN, "cluster.nodes=128", "--set", JITTER),
    "16384-jitter": (*RUN, "cluster.nodes=2048", "--set", JITTER),
    "131072-jitter": (*RUN, "cluster.nodes=16384", "--set", JITTER),
    "8-stragglers": (*RUN, EIGHT, "--set", STRAGGLERS),
    "1024-stragglers": (*RUN, "cluster.nodes=128", "--set", STRAGGLERS),
    "16384-stragglers": (*RUN, "cluster.nodes=2048", "--set", STRAGGLERS),
    "131072-stragglers": (*RUN, "cluster.nodes=16384", "--set", STRAGGLERS),
    "16384-stragglers-auto": (
        *(*RUN, "cluster.nodes=2048", "--set", STRAGGLERS, "--set", "cluster.algorithm=auto"),
    ),
}
BURSTS = "cluster.background={rate: 1 GB/s, busy: 30 ms, every: 100 ms}"
AUTO = "cluster.algorithm=auto"
TEN = ("--set", "run.iterations=10")
COLD |= {
    "1024-stragglers-auto": (*COLD["1024-stragglers"], "--set", AUTO),
    "131072-stragglers-auto": (*COLD["131072-stragglers"], "--set", AUTO),
    "131072-stragglers-tree": (*COLD["131072-stragglers"], "--set", "cluster.algorithm=tree"),
    "32-p4d-shared": (
        *("run", str(SHARED), "--set", BURSTS, "--set", STRAGGLERS, *TEN),
        *("--set", "ddp.accumulation_steps=2"),
    ),
    "32-a3-mega-shared-direct": (
        *("run", str(SHARED), "--set", BURSTS, "--set", JITTER, *TEN),
        *("--set", "cluster.machine=a3-mega", "--set", "cluster.algorithm=direct"),
        *("--set", "run.stalls={probability: 0.01, duration: 20 ms}"),
        *("--set", "ddp.accumulation_steps=16"),
    ),
    "24-gloo-stragglers": ("run", str(GLOO), "--set", STRAGGLERS, *TEN),
    "8192-hsdp-stragglers-jitter": (
        *("run", str(SCENARIO), "--set", "cluster.nodes=1024", "--set", "ddp.strategy=hsdp"),
        *("--set", AUTO, "--set", STRAGGLERS, "--set", JITTER),
    ),
}
WEEKS = "90 epochs of 1.28M samples in 24 h"
for beside, noise in (("jitter", JITTER), ("shared", BURSTS)):
    asked = (str(SHARED), "--set", noise)
    COLD |= {
        f"32-p4d-{beside}-plan": ("plan", *asked, "--target", WEEKS),
        f"32-p4d-{beside}-report": ("report", *asked, "-o", os.devnull),
        f"32-p4d-{beside}-tune": ("tune", *asked, "--global-batch", "128"),
    }
COLD["32-p4d-jitter-tune-4096"] = (
    *("tune", str(SHARED), "--set", JITTER, "--global-batch", "4096"),
)
LLAMA, RESNET = (SCENARIOS / f"{name}.yaml" for name in ("llama-70b-fully-shard", "slow-job"))
COLD |= {
    "llama-70b-fully-shard": ("run", str(LLAMA)),
    "llama-70b-fully-shard-8192": ("run", str(LLAMA), "--set", "cluster.nodes=1024"),
    "gpt2-xl-hsdp-8192-stragglers": (
        *("run", str(SCENARIOS / "gpt2-xl-hsdp.yaml"), "--set", "cluster.nodes=1024"),
        *("--set", STRAGGLERS),
    ),
    "llama-70b-compare": ("compare", str(LLAMA), "--each-strategy"),
    "llama-70b-report": ("report", str(LLAMA), "-o", os.devnull),
    "resnet50-2x8-report": (
        *("report", str(SCENARIOS / "resnet50-2x8-25gbit.yaml"), "-o", os.devnull),
    ),
    "slow-job-diagnose": ("diagnose", str(RESNET), "--measured", "916 ms"),
}
LONG = ("131072", "hsdp", "plan", "report", "tune", "compare")
ON_ONE_CORE = """import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"""


@pytest.mark.benchmark(timer=time.perf_counter)
@pytest.mark.parametrize("name", COLD)
def test_cold(name: str, measure: Measure, benchmark: Any, core_loop_s: float) -> None:
    """Start-up included, on one core; 20 steps and two of warm-up, each rank's noise its own."""
    peak_kib, user_s, cpu_s = [], [], []
    kept = "PYTHONDONTWRITEBYTECODE"  # without which a start compiles what an installation has
    environment = {key: value for key, value in os.environ.items() if key != kept}

    def start() -> None:
        command = [sys.executable, "-c", ON_ONE_CORE, "-m", "ddpsim", *COLD[name]]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        peak_kib.append(used.ru_maxrss)
        user_s.append(used.ru_utime)
        cpu_s.append(used.ru_utime + used.ru_stime)

    measure(start, rounds=5 if any(word in name for word in LONG) else 9)
    benchmark.extra_info["peak_mib"] = round(max(peak_kib) / 1024)
    benchmark.extra_info["user_cpu_s"] = round(median(user_s), 3)
    benchmark.extra_info["cpu_s"] = round(median(cpu_s), 3)
    benchmark.extra_info["loop_s"] = round(core_loop_s, 3)


# --- the plain model: an event a message --------------------------------------------------------


@pytest.mark.parametrize("ranks", [64, 256, 1024])
def test_plain_ring(ranks: int, measure: Measure, benchmark: Any) -> None:
    """One all-reduce, every message an event and seen: 2 N (N-1) messages."""
    cost = LinkCost((Link(5e-6, 10e9), *(Link(2e-6, 200e9),) * 7), ranks)
    ring = cost.transfer("all_reduce", 25 * 2**20)
    assert isinstance(ring, RingTransfer)

    def all_reduce() -> None:
        env, seen, ended = Environment(), list[MessageSpan](), list[int]()
        steps = RingSteps(env, ring, ended.append, seen.append)
        for rank in range(ranks):
            steps.join(rank)
        env.run()
        assert (len(ended), len(seen)) == (ranks, ranks * ring.steps)

    measure(all_reduce, rounds=3 if ranks > 500 else 7)
    messages = ranks * ring.steps
    benchmark.extra_info["messages_per_s"] = round(messages / benchmark.stats["median"])


def test_plain_shared_link(measure: Measure, benchmark: Any) -> None:
    """Transfers of which four at a time share a link: every end changes the others' rate."""
    transfers = 20_000

    def share() -> None:
        env = Environment()
        link = SharedLink(env)

        def send(lane: int) -> Any:
            for i in range(transfers // 4):
                yield link.transfer(1000 + (i * 7 + lane) % 13)

        for lane in range(4):
            env.process(send(lane))
        env.run()

    measure(share, rounds=5)
    benchmark.extra_info["transfers_per_s"] = round(transfers / benchmark.stats["median"])


def test_plain_step_of_16_ranks(measure: Measure) -> None:
    """A whole job by `--engine reference`: three steps with jitter."""
    request = resolve(scenario("cluster.nodes=2", "run.iterations=1", JITTER)).request()
    measure(lambda: run(request, "reference"), rounds=5)


# --- the same ticks without events --------------------------------------------------------------


def test_folded_step(measure: Measure) -> None:
    """One rank that stands for all, its 20 steps and two of warm-up."""
    request = resolve(scenario(EIGHT)).request()
    measure(lambda: run(request))


def test_simulate_folded(measure: Measure) -> None:
    """The whole answer, with its interval and what to try."""
    asked = scenario(EIGHT)
    measure(lambda: ddpsim.simulate(asked))


@pytest.mark.parametrize("ranks", [1024, 16_384, 131_072])
def test_around_the_step(ranks: int, measure: Measure, benchmark: Any) -> None:
    """Interval, stragglers and suggestions of a ring; `simulated_s`: its steps themselves."""
    asked = scenario(f"cluster.nodes={ranks // 8}", STRAGGLERS)
    simulated_s: list[float] = []

    def answer() -> float:
        job = resolve(asked)
        begun = time.process_time()
        simulated = run(job.request())
        ended = time.process_time()
        simulated_s.append(ended - begun)
        result = predicted(job, simulated, "auto")
        next_steps(job, result)
        return time.process_time() - ended

    around_s: list[float] = []
    measure(lambda: around_s.append(answer()), rounds=5)
    benchmark.extra_info["simulated_s"] = round(median(simulated_s), 4)
    benchmark.extra_info["around_s"] = round(median(around_s), 4)


@pytest.mark.parametrize("ranks", [1024, 4096, 16_384, 65_536, 131_072])
def test_jittering_ranks(ranks: int, measure: Measure, benchmark: Any) -> None:
    """Five steps of every rank, links of two classes: the time of one."""
    settings = (f"cluster.nodes={ranks // 8}", "run.iterations=3", JITTER)
    request = resolve(scenario(*settings)).request()
    found = measure(lambda: run(request), rounds=3)
    assert found.ranks_simulated == ranks
    benchmark.extra_info["step_s"] = round(benchmark.stats["median"] / 5, 5)


# --- many scenarios -----------------------------------------------------------------------------


def test_thousand_bandwidths(measure: Measure, benchmark: Any) -> None:
    """Folded scenarios that differ in a number."""
    base = scenario("cluster.nodes=2")
    assert base.cluster.inter_node is not None
    asked = [
        _changed(
            base,
            "cluster",
            inter_node=base.cluster.inter_node.model_copy(
                update={"bandwidth_bytes_per_s": 1e9 + i * 1e7}
            ),
        )
        for i in range(1000)
    ]
    measure(lambda: ddpsim.simulate_many(asked), rounds=5)
    benchmark.extra_info["each_ms"] = round(benchmark.stats["median"], 4)


def test_thousand_seeds_of_64_stragglers(measure: Measure) -> None:
    """Monte Carlo: stragglers drawn anew for each seed."""
    base = scenario("cluster.nodes=8", "cluster.stragglers={distribution: lognormal, sigma: 0.03}")
    asked = [_changed(base, "run", seed=seed) for seed in range(1000)]
    measure(lambda: ddpsim.simulate_many(asked), rounds=3)


@pytest.mark.benchmark(timer=time.perf_counter)
def test_sweep_of_10000_points(measure: Measure, tmp_path: Path) -> None:
    """A whole process and its workers, on all cores: 100 caps by 100 bandwidths, all kept."""
    caps = ",".join(map(str, range(1, 101)))
    links = ",".join(f"{gigabits} Gbit/s" for gigabits in range(1, 101))
    axes = ("--set", f"ddp.bucket_cap_mb={caps}", "--set", f"cluster.inter_node.bandwidth={links}")
    command = [sys.executable, "-m", "ddpsim", "sweep", str(SCENARIO), *axes]

    def start() -> None:
        output = tmp_path / "out.csv"
        output.with_name("out.csv.journal").unlink(missing_ok=True)
        subprocess.run([*command, "-o", str(output)], check=True, capture_output=True)

    measure(start, rounds=3)


# --- files --------------------------------------------------------------------------------------


def test_trace_import(measure: Measure, benchmark: Any, tmp_path: Path) -> None:
    """A profiler's trace of about 100,000 events, as the benchmark writes it: ten steps."""
    events = _profiled(steps=10, layers=1100)
    path = tmp_path / "trace.json.gz"
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}]}
    text = json.dumps({**head, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode(), 1))
    found = measure(lambda: read_trace(SourceFile(path.name, path)), rounds=5)
    assert (len(found.steps), len(found.typical.gradients)) == (9, 1100)
    benchmark.extra_info["events"] = len(events)
    benchmark.extra_info["events_per_s"] = round(len(events) / benchmark.stats["median"])


def _profiled(steps: int, layers: int) -> list[dict[str, Any]]:
    """Of every layer an operator, a launch and a kernel forward; twice that and a gradient back."""
    events: list[dict[str, Any]] = []
    now, device_us, numbers = 0.0, 0.0, count(1)

    def add(cat: str, name: str, start: float, dur: float, tid: int, **args: Any) -> None:
        where = {"pid": 1, "tid": tid, "ts": start, "dur": dur, "args": args}
        events.append({"ph": "X", "cat": cat, "name": name, **where})

    def operator(name: str, tid: int) -> None:
        nonlocal now, device_us
        number = next(numbers)
        add("cpu_op", name, now, 8.0, tid, **{"External id": number})
        add("cuda_runtime", "cudaLaunchKernel", now + 2, 4.0, tid, correlation=number)
        device_us = max(device_us, now + 6)
        place = {"device": 0, "stream": 7, "grid": [64, 1, 1], "block": [256, 1, 1]}
        add("kernel", "sgemm", device_us, 20.0, 7, correlation=number, **place)
        device_us += 20
        now += 10

    def step(number: int) -> None:
        nonlocal now
        began = now
        for _ in range(layers):
            operator("aten::mm", 1)
        for _ in range(layers):
            for _ in range(2):
                operator("autograd::engine::evaluate_function: MmBackward0", 2)
            add("cpu_op", "torch::autograd::AccumulateGrad", now, 1.0, 2)
            now += 2
        add("user_annotation", "Optimizer.step#SGD.step", now, 1.0, 1)
        now += 2
        add("user_annotation", f"ProfilerStep#{number}", began, now - began, 1)

    for number in range(steps):
        step(number)
    return events


def _changed(base: Scenario, section: str, **values: Any) -> Scenario:
    changed = getattr(base, section).model_copy(update=values)
    return base.model_copy(update={section: changed})
