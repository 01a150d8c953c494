"""Hold predictions against published and recorded measurements; write what comes of it.

docs/validation.md and docs/campaigns.md, from the templates beside this file; and
tests/data/campaigns/reports.tar.xz, every case of the recorded campaigns.

    DDPSIM_REFERENCE_DATA=... python tools/make_validation.py

The figures that do not need the reference data (all but the rows with a V100 log) come from
tests/data and scenarios/testbed.
"""

from __future__ import annotations

import csv
import json
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import campaigns
import nccl_sweeps
from published_hosts import preset_operator_s, published_hosts, spread, usual_s
from published_steps import (
    PublishedStep,
    error_of,
    family,
    left_out_errors,
    other_devices_errors,
    published_steps,
    rms,
)
from scipy.stats import norm
from scipy.stats import t as student

from calibrate.fit.estimates import SIGNIFICANT
from calibrate.records.rounds_file import load_runs
from calibrate.validate.inputs import model_profile
from calibrate.validate.report import Case, Figures, Sweep, Validation, figures_of, headlines
from calibrate.validate.validate import validate
from ddpsim.cluster.transfers import duration_ns
from ddpsim.engine.noise import draw_slowdowns
from ddpsim.engine.request import Request
from ddpsim.engine.run import run
from ddpsim.prediction.api import simulate
from ddpsim.prediction.ddp_overhead import on_one_rank
from ddpsim.prediction.job import Job
from ddpsim.prediction.parts import Parts
from ddpsim.prediction.program import compile_program
from ddpsim.prediction.resolve import resolve
from ddpsim.result.summary import mean_step_s
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse
from ddpsim.units import MIB, NS_PER_S
from ddpsim.workload.model import Work

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
TESTBED = ROOT / "scenarios" / "testbed"
PAGES = {
    ROOT / "docs" / f"{name}.md": ROOT / "tools" / f"{name}.md.in"
    for name in ("validation", "campaigns")
}
EPYC = campaigns.unpacked() / "testbed"
XEON = campaigns.unpacked() / "testbed-xeon"
FAST_XEON = campaigns.unpacked() / "testbed-fast-xeon"  # calls itself the same
SLOW_EPYC = campaigns.unpacked() / "testbed-slow-epyc"
CALM_EPYC = campaigns.unpacked() / "testbed-calm-epyc"  # of the same kind
# of FAST_XEON the runs that were measured as `calibrate rounds` does now, as a campaign of its own
LATER_RUNS = {0.2: (2, 3), 0.8: (2, 3), 2: (3, 4), 5: (3, 4)}  # by Gbit/s
LATER = FAST_XEON.with_name("fast-xeon-later-runs.json")
CAMPAIGNS = {  # by the machine that was the testbed
    EPYC: "AMD EPYC",
    XEON: "Intel Xeon",
    FAST_XEON: "faster Xeon",
    SLOW_EPYC: "slower EPYC, restless",
    CALM_EPYC: "slower EPYC, calm",
}
V100_LOG = "nccl/logs/abci-V-1x4.txt"

# Identical GPUs of one cluster differ: 8 % on average over five clusters (arXiv 2208.11035), read
# as the range of a box plot's whiskers, which is 5.4 standard deviations of a normal distribution
GPU_SIGMA = 0.08 / 5.4
SEEDS = range(10)

# One V100 pair of a DGX-1 shares one or two NVLinks: one is taken (NCCL topo.h: 20 GB/s on SM70)
PAIR = {"bandwidth": "20 GB/s", "latency": "5 us"}
LAYOUT = {1: (1, 1), 2: (1, 2), 4: (1, 4), 8: (1, 8), 16: (2, 8)}
LINKS = {
    1: "none",
    2: "one NVLink",
    4: "log of 4 V100",
    8: "preset v100-sxm-32gb",
    16: "preset v100-sxm-32gb",
}

# all-reduces of 2 GPUs as published beside the bucket sweep of tests/data: MB, seconds
CS336_ALL_REDUCE = ((1, 0.0001183), (10, 0.0005938), (100, 0.0052744), (1000, 0.0507776))

# nccl-tests all_reduce_perf, 32 MiB in place: sweep, device, nodes, GPUs a node, microseconds
SWEEPS = (
    ("ABCI V", "v100-sxm-16gb", 1, 4, 447.7),
    ("ABCI A", "a100-sxm-40gb", 1, 4, 279.2),
    ("ABCI A", "a100-sxm-40gb", 1, 8, 358.5),
    ("SuperBench", "a100-sxm-40gb", 1, 8, 372.8),
    ("NVIDIA dgxc-benchmarking", "h100-sxm-80gb", 1, 8, 198.9),
    ("ABCI V", "v100-sxm-16gb", 2, 4, 2969.8),
    ("ABCI V", "v100-sxm-16gb", 4, 4, 3157.7),
    ("ABCI V", "v100-sxm-16gb", 8, 4, 3318.2),
    ("ABCI A", "a100-sxm-40gb", 2, 8, 1885.6),
    ("AWS p4de, EFA", "a100-sxm-80gb", 2, 8, 1540.7),
    ("AWS p5, EFA", "h100-sxm-80gb", 2, 8, 417.7),
    ("dstack, Nebius", "h100-sxm-80gb", 2, 8, 276.45),
    ("dstack, Lambda", "b200", 2, 8, 253.88),
)


@dataclass(frozen=True)
class Row:
    """One measured step (seconds) beside our prediction and the naive ones.

    `knowing_ddp_s`: ours, given the measured step under DDP on one device too.
    """

    label: str
    case: str
    measured_s: float
    predicted_s: float
    equal_gpus_s: float
    compute_only_s: float
    no_overlap_s: float
    perfect_overlap_s: float
    knowing_ddp_s: float | None = None

    def error(self, seconds: float | None = None) -> float:
        """(predicted - measured) / measured, of ours or of another prediction."""
        return (self.predicted_s if seconds is None else seconds) / self.measured_s - 1


@cache
def campaign(folder: Path) -> Validation:
    """A recorded campaign, as its report says."""
    return Validation.model_validate_json(report_of(folder).read_bytes())


def predicted(folder: Path, rounds: str = "rounds-*.json") -> Validation:
    """A recorded campaign, predicted anew from its profile, on all cores; or these rounds of it."""
    return _predicted(folder, _rounds_of(folder, rounds))


def later() -> Validation:
    """The later runs of the faster Intel's campaign alone, as their report says."""
    return Validation.model_validate_json(LATER.read_bytes())


def later_predicted() -> Validation:
    """The same, predicted anew."""
    files = [
        path
        for rate, runs in LATER_RUNS.items()
        for run in runs
        for path in sorted(FAST_XEON.glob(f"rounds-*-{rate:g}gbit-2hosts.run{run}.json"))
    ]
    return _predicted(FAST_XEON, files)


def _predicted(folder: Path, files: list[Path]) -> Validation:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return validate(files, folder / "cluster.json", pool.map)


def _rounds_of(folder: Path, rounds: str = "rounds-*.json") -> list[Path]:
    return sorted(folder.glob(rounds))


def report_of(folder: Path) -> Path:
    """Where a campaign's report is kept."""
    return folder.with_suffix(".json")


def main() -> None:
    """Write the campaigns' reports, and the pages."""
    reports = {report_of(folder).name: predicted(folder) for folder in CAMPAIGNS}
    reports[LATER.name] = later_predicted()
    with tempfile.TemporaryDirectory() as folder:
        for name, report in reports.items():
            text = report.model_dump_json(by_alias=True, indent=1)
            (Path(folder) / name).write_text(text + "\n", encoding="utf-8")
        campaigns.pack_reports(Path(folder))
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


def reference_log() -> Path | None:
    """The V100 log of the reference data, if there is any."""
    folder = os.environ.get("DDPSIM_REFERENCE_DATA")
    return Path(folder) / V100_LOG if folder else None


def job_of(scenario: dict[str, Any], parts: Parts | None = None) -> Job:
    """A scenario given as a mapping, resolved; `parts`: what was built for others."""
    document = Document.from_mapping({"schema": "ddpsim/1"} | scenario, Path())
    return resolve(parse(document), parts=parts)


def step_s(job: Job) -> float:
    """The mean steady step of a job, with its stragglers."""
    scenario = job.scenario
    steps, warmup = job.program.iterations, job.program.warmup
    slowdowns = draw_slowdowns(scenario.cluster, scenario.run, steps, warmup=warmup)
    cost, world_size = job.network.cost, scenario.cluster.world_size
    return mean_step_s(run(Request(job.program, cost, world_size, slowdowns)).timeline)


@cache
def benchmark_rows(bucket_cap_mb: int) -> tuple[Row, ...]:
    """PyTorch's DDP benchmark; without the reference data, without its 4-GPU rows."""
    text = (DATA / "pytorch-ddp-benchmark.csv").read_text("utf-8").splitlines()
    figures = list(csv.DictReader(line for line in text if not line.startswith("#")))
    alone = {f["model"]: f["seconds"] for f in figures if f["gpus"] == "0"}
    here = [f for f in figures if f["gpus"] != "0" and int(f["bucket_cap_mb"]) == bucket_cap_mb]
    one = {f["model"]: f["seconds"] for f in here if f["gpus"] == "1"}
    return tuple(
        _benchmark_row(
            f["model"],
            int(f["gpus"]),
            bucket_cap_mb,
            {"total": f"{alone[f['model']]} s"},
            {"total": f"{alone[f['model']]} s", "with_ddp": f"{one[f['model']]} s"},
            float(f["seconds"]),
        )
        for f in here
        if f["gpus"] != "4" or reference_log()
    )


@dataclass(frozen=True)
class Scaled:
    """A published step of several GPUs beside ours from the one of one GPU; seconds."""

    source: str
    device: str
    precision: str
    gpus: str
    reads_images: bool
    measured_s: float
    predicted_s: float
    interval_s: tuple[float, float]

    @property
    def longer(self) -> float:
        """How much more the measured step takes than the predicted one."""
        return self.measured_s / self.predicted_s - 1

    @property
    def covered(self) -> bool:
        """Whether the 80 % interval holds the measured step."""
        low_s, high_s = self.interval_s
        return low_s <= self.measured_s <= high_s


def scaled_rows(*, reading_images: bool) -> list[Scaled]:
    """Published throughputs of several GPUs that read images, or have synthetic ones."""
    return [row for row in _scaled_rows() if row.reads_images == reading_images]


@cache
def _scaled_rows() -> tuple[Scaled, ...]:
    """Published throughputs of several GPUs, predicted from the one of one GPU."""
    text = (DATA / "published-scaling.csv").read_text("utf-8").splitlines()
    one_gpu_s: dict[tuple[str, ...], float] = {}
    rows = []
    for figure in csv.DictReader(line for line in text if not line.startswith("#")):
        case = tuple(figure[key] for key in ("source", "precision", "batch", "device"))
        gpus = int(figure["nodes"]) * int(figure["gpus_per_node"])
        measured_s = gpus * int(figure["batch"]) / float(figure["samples_per_s"])
        if gpus == 1:
            one_gpu_s[case] = measured_s
        else:
            rows.append(_scaled(figure, one_gpu_s[case], measured_s))
    return tuple(rows)


def _scaled(figure: dict[str, str], one_gpu_s: float, measured_s: float) -> Scaled:
    nodes = int(figure["nodes"])
    network = {"inter_node": {"bandwidth": "100 Gbit/s", "nics_per_node": 1}} if nodes > 1 else {}
    scenario = {
        "workload": {
            "model": "resnet50",
            "batch_per_rank": int(figure["batch"]),
            "precision": figure["precision"],
            "step_time": f"{one_gpu_s} s",
            "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
        },
        "ddp": {"torch": "1.4"} if figure["data"] == "images" else {},
        "cluster": {
            "nodes": nodes,
            "gpus_per_node": int(figure["gpus_per_node"]),
            "device": figure["device"],
            **network,
        },
    }
    result = simulate(parse(Document.from_mapping({"schema": "ddpsim/1"} | scenario, Path())))
    interval = result.prediction_interval_s
    return Scaled(
        figure["source"],
        figure["device"],
        figure["precision"],
        f"{nodes} x {figure['gpus_per_node']}",
        figure["data"] == "images",
        measured_s,
        result.iteration_time_s.mean,
        (interval.low, interval.high) if interval else (0.0, math.inf),
    )


def unequal_ranks() -> tuple[float, float]:
    """How much longer published steps of several GPUs take than one GPU's and communication.

    Of half of them at most, and of nine in ten.
    """
    benchmark = [row for row in benchmark_rows(25) if row.case != "1"]
    longer = [row.measured_s / row.equal_gpus_s - 1 for row in benchmark]
    return _half_and_most([*longer, *(row.longer for row in scaled_rows(reading_images=True))])


def synthetic() -> tuple[float, float]:
    """The same of published steps with synthetic images."""
    return _half_and_most([row.longer for row in scaled_rows(reading_images=False)])


def _half_and_most(longer: Sequence[float]) -> tuple[float, float]:
    tenths = quantiles(longer, n=10, method="inclusive")
    return tenths[4], tenths[8]


def _benchmark_row(
    model: str,
    gpus: int,
    cap: int,
    alone: dict[str, str],
    knowing_ddp: dict[str, str],
    measured_s: float,
) -> Row:
    equal = job_of(_benchmark_scenario(model, gpus, cap, alone))
    equal_s, naive = step_s(equal), equal.baselines()

    def drawn_s(step_time: dict[str, str]) -> float:
        parts = Parts()
        jobs = (job_of(_benchmark_scenario(model, gpus, cap, step_time, s), parts) for s in SEEDS)
        return fmean(step_s(job) for job in jobs)

    return Row(
        label=model,
        case=f"{gpus}",
        measured_s=measured_s,
        predicted_s=drawn_s(alone) if gpus > 1 else equal_s,
        equal_gpus_s=equal_s,
        compute_only_s=naive.compute_only,
        no_overlap_s=naive.no_overlap,
        perfect_overlap_s=naive.perfect_overlap,
        knowing_ddp_s=drawn_s(knowing_ddp) if gpus > 1 else None,
    )


def _benchmark_scenario(
    model: str, gpus: int, cap: int, step_time: dict[str, str], seed: int | None = None
) -> dict[str, Any]:
    """The benchmark's own settings; `seed` draws GPUs that differ as published."""
    nodes, per_node = LAYOUT[gpus]
    cluster: dict[str, Any] = {"nodes": nodes, "gpus_per_node": per_node, "device": "v100-sxm-32gb"}
    if gpus == 2:
        cluster["intra_node"] = PAIR
    if gpus == 4:
        cluster["all_reduce"] = str(reference_log())
    if seed is not None:
        cluster["stragglers"] = {"distribution": "lognormal", "sigma": GPU_SIGMA}
    optimizer = {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-4}
    return {
        "workload": {
            "model": model,
            "batch_per_rank": 32,
            "step_time": step_time,
            "optimizer": optimizer,
        },
        "ddp": {"torch": "1.4", "bucket_cap_mb": cap, "broadcast_buffers": False},
        "cluster": cluster,
        "run": {"iterations": 1, "seed": seed or 0, "allow_extrapolation": True},
    }


@cache
def testbed_rows() -> tuple[tuple[Row, Row], ...]:
    """Per rate and cap the whole iteration and its backward, real gloo DDP on 2 hosts."""
    return tuple(
        _testbed_row(rate, cap)
        for rate, caps in (("500mbit", (1, 5, 25, 100)), ("2gbit", (1, 5, 10, 25, 100)))
        for cap in caps
    )


def _testbed_row(rate: str, cap: int) -> tuple[Row, Row]:
    scenario = {
        "workload": {"profile": str(TESTBED / f"transformer-{rate}.json"), "batch_per_rank": 4},
        "ddp": {"backend": "gloo", "bucket_cap_mb": cap},
        "cluster": {
            "nodes": 2,
            "gpus_per_node": 1,
            "device": "cpu-core",
            "all_reduce": str(TESTBED / f"all-reduce-{rate}.csv"),
        },
        "run": {"iterations": 1, "allow_extrapolation": True},
    }
    job = job_of(scenario)
    predicted_s, naive = step_s(job), job.baselines()
    # no buffers here: what is neither forward nor optimizer counts as backward in the rounds
    beside_s = sum(w.device_s for w in (*job.model.forward, job.model.optimizer))
    measured = _measured(rate, cap)
    predictions = (predicted_s, naive.compute_only, naive.no_overlap, naive.perfect_overlap)
    ours, compute, serial, hidden = predictions
    step = Row(rate, f"{cap}", measured[0], ours, ours, compute, serial, hidden)
    ours, compute, serial, hidden = (seconds - beside_s for seconds in predictions)
    return step, Row(rate, f"{cap}", measured[2], ours, ours, compute, serial, hidden)


def _measured(rate: str, cap: int) -> list[float]:
    """Medians of iteration, forward, backward and optimizer, each on the slower rank."""
    ranks = [
        json.loads(
            (DATA / "testbed" / f"transformer-2ranks-{rate}-rank{r}.json").read_text("utf-8")
        )
        for r in (0, 1)
    ]
    rounds = [rank["iterations_s_by_bucket_cap_mb"][f"{cap}.0"] for rank in ranks]
    return [max(median(row[column] for row in rows) for rows in rounds) for column in range(4)]


@cache
def roofline() -> dict[str, tuple[int, float]]:
    """Of the roofline against published steps of one GPU: how many rows, and the error's RMS.

    As it is, as other sources and as other devices tell of a row, and of compiled models.
    """
    eager = [step for step in published_steps() if not step.compiled]
    compiled = [step for step in published_steps() if step.compiled]
    errors = {
        "as it is": [error_of(step) for step in eager],
        "by other sources": left_out_errors(eager),
        "by other devices": other_devices_errors(eager),
        "compiled": [error_of(step) for step in compiled],
    }
    return {name: (len(found), rms(found)) for name, found in errors.items()}


@cache
def preset_errors() -> tuple[float, ...]:
    """Presets over measured all-reduce times, minus 1, for every entry of SWEEPS."""
    return tuple(_preset_s(*sweep[1:4]) / (sweep[4] * 1e-6) - 1 for sweep in SWEEPS)


def _preset_s(device: str, nodes: int, gpus: int) -> float:
    cluster = {"nodes": nodes, "gpus_per_node": gpus, "device": device}
    job = job_of({"workload": {"model": "resnet50", "batch_per_rank": 1}, "cluster": cluster})
    return duration_ns(job.network.cost.transfer("all_reduce", 32 * MIB)) / NS_PER_S


def preset_sigma(*, several_nodes: bool) -> float:
    """Root mean square of the logarithmic errors, on one node or on several."""
    chosen = zip(SWEEPS, preset_errors(), strict=True)
    errors = [error for sweep, error in chosen if (sweep[2] > 1) == several_nodes]
    return math.sqrt(fmean(math.log1p(error) ** 2 for error in errors))


@cache
def cs336_rows() -> tuple[Row, ...]:
    """A published bucket sweep whose model and GPU are guessed: a known gap."""
    text = (DATA / "cs336-bucket-sweep.csv").read_text("utf-8").splitlines()
    figures = list(csv.DictReader(line for line in text if not line.startswith("#")))
    with tempfile.TemporaryDirectory() as folder:
        parameters, times = Path(folder) / "parameters.csv", Path(folder) / "all-reduce.csv"
        parameters.write_text("\n".join(_cs336_parameters()), encoding="utf-8")
        header = "size_bytes,time_us,nodes,gpus_per_node"
        lines = [f"{size * 10**6},{seconds * 1e6},1,2" for size, seconds in CS336_ALL_REDUCE]
        times.write_text("\n".join([header, *lines]), encoding="utf-8")
        alone = {
            (f["local_bs"], f["seq_len"]): float(f["iter_s"]) - float(f["wait_s"])
            for f in figures
            if f["bucket_mb"] == "none"
        }
        return tuple(
            _cs336_row(f, alone[f["local_bs"], f["seq_len"]], parameters, times)
            for f in figures
            if f["bucket_mb"] != "none"
        )


def _cs336_row(figure: dict[str, str], alone_s: float, parameters: Path, times: Path) -> Row:
    job = job_of(
        {
            "workload": {
                "parameters": str(parameters),
                "batch_per_rank": int(figure["local_bs"]),
                "step_time": f"{alone_s} s",
                "optimizer": {"name": "adamw"},
            },
            "ddp": {"bucket_cap_mb": float(figure["bucket_mb"]) * 1e6 / MIB},
            "cluster": {
                "nodes": 1,
                "gpus_per_node": 2,
                "device": "h100-sxm-80gb",
                "all_reduce": str(times),
            },
            "run": {"iterations": 1, "allow_extrapolation": True},
        }
    )
    naive, ours_s = job.baselines(), step_s(job)
    return Row(
        label=f"batch {figure['local_bs']} x {figure['seq_len']}",
        case=figure["bucket_mb"],
        measured_s=float(figure["iter_s"]),
        predicted_s=ours_s,
        equal_gpus_s=ours_s,
        compute_only_s=naive.compute_only,
        no_overlap_s=naive.no_overlap,
        perfect_overlap_s=naive.perfect_overlap,
    )


def _cs336_parameters() -> list[str]:
    """Width 1600, 48 blocks of four attention and three feed-forward matrices: 2.0 B elements."""
    block = [("attention.qkvo", "6400x1600"), ("norm1", "1600"), ("norm2", "1600")]
    block += [(f"ffn.w{i}", "6400x1600") for i in (1, 2, 3)]
    rows = [f"blocks.{i}.{name},{shape},float32" for i in range(48) for name, shape in block]
    ends = ["head.weight,10000x1600,float32"]
    return ["name,shape,dtype", "embedding.weight,10000x1600,float32", *rows, *ends]


def levels(rows: tuple[Row, ...]) -> tuple[float, float]:
    """Median and worst absolute error."""
    errors = [abs(row.error()) for row in rows]
    return median(errors), max(errors)


def levels_knowing_ddp(rows: tuple[Row, ...]) -> tuple[float, float]:
    """The same of the rows that are given the step under DDP on one device, of that prediction."""
    errors = [abs(row.error(row.knowing_ddp_s)) for row in rows if row.knowing_ddp_s]
    return median(errors), max(errors)


def pages() -> dict[Path, str]:
    """The pages as Markdown: their templates with the figures."""
    figures = _figures()

    def filled(template: str) -> str:
        for key, text in figures.items():
            template = template.replace(f"@{key}@", text)
        return template

    return {path: filled(template.read_text("utf-8")) for path, template in PAGES.items()}


def _figures() -> dict[str, str]:
    """By the names that the templates have for them."""
    bucket25, bucket1 = benchmark_rows(25), benchmark_rows(1)
    equal = [abs(row.error(row.equal_gpus_s)) for row in bucket25]
    steps = tuple(step for step, _ in testbed_rows())
    backwards = tuple(backward for _, backward in testbed_rows())
    single = [row for row in bucket25 if row.case == "1"]
    return {
        "GPU_SIGMA": f"{GPU_SIGMA:.2%}",
        "ALL_LEVELS": _levels(bucket25),
        "EQUAL_LEVELS": f"median {median(equal):.1%}, worst {max(equal):.1%}",
        "SINGLE_LEVELS": _levels(tuple(single)),
        "BUCKET1_LEVELS": _levels(bucket1),
        "KNOWING_LEVELS": _in_words(*levels_knowing_ddp(bucket25)),
        "KNOWING_LEVELS1": _in_words(*levels_knowing_ddp(bucket1)),
        "BUCKET25": _table(bucket25, "GPUs"),
        "BUCKET1": _table(bucket1, "GPUs"),
        "SCALED": _scaled_table(),
        "SCALED_COVERED": _covered(reading_images=True),
        "SYNTHETIC": _synthetic_table(),
        "SYNTHETIC_COVERED": _covered(reading_images=False),
        "SYNTHETIC_HALF": f"{synthetic()[0]:.1%}",
        "SYNTHETIC_MOST": f"{synthetic()[1]:.0%}",
        "UNEQUAL_HALF": f"{unequal_ranks()[0]:.0%}",
        "UNEQUAL_MOST": f"{unequal_ranks()[1]:.0%}",
        "TESTBED": _table(steps, "cap, MiB"),
        "BACKWARD": _table(backwards, "cap, MiB"),
        "ROOFLINE": _roofline_table(),
        "HOSTS": _hosts_table(),
        "HOSTS_USUAL": f"{1e6 * usual_s(published_hosts()):.0f}",
        "HOSTS_NEW": _hosts_since(2023),
        "HOSTS_OLD": _hosts_since(2023, before=True),
        "HOSTS_SPREAD": f"{spread(published_hosts(), preset_operator_s()):.2f}",
        "BY_BATCH": _by_batch_table(),
        **{
            f"ROOFLINE_{name.replace(' ', '_').upper()}": f"{error:.2f}"
            for name, (_, error) in roofline().items()
        },
        **{
            f"ROOFLINE_{name.replace(' ', '_').upper()}_ROWS": str(count)
            for name, (count, _) in roofline().items()
        },
        **_campaign_texts("EPYC", EPYC),
        **_campaign_texts("XEON", XEON),
        **_campaign_texts("FAST_XEON", FAST_XEON),
        **_campaign_texts("SLOW_EPYC", SLOW_EPYC),
        **_campaign_texts("CALM_EPYC", CALM_EPYC),
        "XEON_A_DAY_BEFORE": _with_skill(_as_measured_before(XEON, "2026-11-22T14")),
        "XEON_HALF_A_DAY_BEFORE": _with_skill(_as_measured_before(XEON, "2026-11-23T00")),
        "XEON_HOURS_BEFORE": _with_skill(_as_measured_before(XEON, "2026-11-23T05")),
        "XEON_SKILL": _with_skill(_own_cores(XEON)),
        **_misses(),
        "GOALS": _goals_table(),
        "BY_RATE": _by_rate_table(),
        "PRESETS": _preset_table(),
        "SWEEPS": "\n".join(nccl_sweeps.table()),
        "SWEEP_LEVELS": "\n".join(f"- {k}: {v}" for k, v in nccl_sweeps.levels().items()),
        "CS336": _table(cs336_rows(), "bucket, MB"),
        "CS336_LEVELS": _levels(cs336_rows()),
        "NODE_SIGMA": f"{preset_sigma(several_nodes=False):.2f}",
        "NETWORK_SIGMA": f"{preset_sigma(several_nodes=True):.2f}",
    }


def _scaled_table() -> str:
    head = ["source", "precision", "GPUs", "measured", "predicted", "error", "80 % interval"]
    return _markdown(
        head,
        [
            (
                row.source,
                row.precision,
                row.gpus,
                f"{1e3 * row.measured_s:.1f} ms",
                f"{1e3 * row.predicted_s:.1f} ms",
                f"{row.predicted_s / row.measured_s - 1:+.1%}",
                f"{1e3 * row.interval_s[0]:.0f} to {1e3 * row.interval_s[1]:.0f} ms",
            )
            for row in scaled_rows(reading_images=True)
        ],
    )


def _covered(*, reading_images: bool) -> str:
    rows = scaled_rows(reading_images=reading_images)
    return f"{sum(row.covered for row in rows)} of {len(rows)}"


def _synthetic_table() -> str:
    """A machine a row, the error at each of its numbers of GPUs."""
    counts = ("1 x 2", "1 x 4", "1 x 8")
    found: dict[tuple[str, str, str], dict[str, Scaled]] = {}
    for row in scaled_rows(reading_images=False):
        found.setdefault((row.source, row.device, row.precision), {})[row.gpus] = row
    rows = []
    for machine, by_gpus in found.items():
        errors = (
            f"{row.predicted_s / row.measured_s - 1:+.1%}" if row else ""
            for row in map(by_gpus.get, counts)
        )
        rows.append((*machine, f"{1e3 * by_gpus['1 x 2'].measured_s:.0f} ms", *errors))
    return _markdown(["machine", "device", "precision", "step of 2", *counts], rows)


def _goals_table() -> str:
    """What is asked of a campaign, a row each, and what each campaign comes to."""
    columns = [_goals(_own_cores(folder)) for folder in CAMPAIGNS] + [_goals(later().sweeps)]
    rows = ((*asked, *answers) for asked, *answers in zip(_ASKED, *columns, strict=True))
    return _markdown(["", "asked", *CAMPAIGNS.values(), "faster Xeon, later runs alone"], rows)


_ASKED = (
    ("error, median", "2 %"),
    ("error, worst", "5 %, or the noise"),
    ("cases beyond that", "0"),
    ("skill", "everywhere"),
    ("skill where runs were repeated", ""),
    ("that of one run as the prediction of the others", ""),
    ("the truth itself would miss skill in", ""),
    ("within a third of compute only's error", ""),
    ("within a third of perfect overlap's", ""),
    ("within a third of no overlap's", ""),
    ("bucket choice within 1 %", "90 % of the sweeps"),
    ("worst choice costs", ""),
    ("exposed communication, worst", "3 % of the iteration"),
    ("cases beyond that", "0"),
    ("80 % interval holds", "70 to 90 %"),
    ("binomial test of that against 80 %", ""),
)


def _goals(sweeps: Sequence[Sweep]) -> list[str]:
    """A campaign's answers, in the order of `_ASKED`."""
    figures, cases = _figures_of(sweeps), [case for sweep in sweeps for case in sweep.cases]

    def thirds(naive: str) -> str:
        return _share(
            fmean(
                case.is_within_a_third_of(abs(getattr(case, naive) / case.measured_s - 1))
                for case in cases
                if case.exposed
            )
        )

    return [
        f"{figures.median_error:.1%}",
        f"{figures.worst_error:.1%}",
        f"{round((1 - figures.within_5_percent_or_noise) * figures.cases)} of {figures.cases}",
        _share(figures.skilled),
        _share(figures.repeated_skilled),
        _share(figures.another_run_skilled),
        _missed_by_truth(sweeps),
        thirds("compute_only_s"),
        thirds("perfect_overlap_s"),
        thirds("no_overlap_s"),
        _share(figures.good_choices),
        f"{max(sweep.regret or 0.0 for sweep in sweeps):.1%}",
        f"{figures.worst_exposed_error:.1%}",
        f"{sum(case.exposed_error > _EXPOSED_ASKED for case in cases)} of {figures.cases}",
        _share(figures.covered),
        f"p = {figures.covered_p_value:.2g}",
    ]


_EXPOSED_ASKED = 0.03


def _by_rate_table() -> str:
    """Errors, skill and intervals at each rate, a row a campaign and a rate."""
    head = ["campaign", "Gbit/s", "error, median", "worst", "bias", "skill"]
    head += ["a third of the best naive error", "80 % interval holds"]
    rows = []
    for folder, name in CAMPAIGNS.items():
        for rate, sweeps in _by_rate(_own_cores(folder)).items():
            figures = _figures_of(sweeps)
            exposed = [case for sweep in sweeps for case in sweep.cases if case.exposed]
            third = median(case.baseline_error for case in exposed) / 3
            cells = [name, f"{rate * 8 / 1e9:g}", f"{figures.median_error:.1%}"]
            cells += [f"{figures.worst_error:.1%}", f"{figures.median_bias:+.1%}"]
            cells += [_share(figures.skilled), f"{third:.1%}", _share(figures.covered)]
            rows.append(cells)
    return _markdown(head, rows)


def _by_rate(sweeps: Sequence[Sweep]) -> dict[float, list[Sweep]]:
    found: dict[float, list[Sweep]] = {}
    for sweep in sorted(sweeps, key=lambda sweep: sweep.line_rate_bytes_per_s or 0.0):
        found.setdefault(sweep.line_rate_bytes_per_s or math.nan, []).append(sweep)
    return found


def _figures_of(sweeps: Sequence[Sweep]) -> Figures:
    figures = figures_of(sweeps)
    if figures is None:
        raise ValueError("no sweep")
    return figures


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _campaign_texts(name: str, folder: Path) -> dict[str, str]:
    """Figures and table of a campaign, by the names that the template has for them."""
    return {
        name: "\n".join(f"- {line}" for line in headlines(campaign(folder))),
        f"{name}_PLAIN": _in_short(_by_plain_medians(folder)),
        f"{name}_TABLE": _campaign_table(_own_cores(folder)),
    }


def _misses() -> dict[str, str]:
    """The figures in what is said of why predictions miss."""

    def cases(folder: Path, rate: float, model: str = "") -> list[Case]:
        found = [s for s in _by_rate(_own_cores(folder))[rate * 1e9 / 8] if model in s.model]
        return [case for sweep in found for case in sweep.cases]

    def percents(errors: Iterable[float]) -> str:
        sizes = [100 * abs(error) for error in errors]
        return f"{min(sizes):.1f} to {max(sizes):.1f}"

    def middle_ms(found: list[Case]) -> float:
        return 1e3 * median(case.predicted_s - case.measured_s for case in found)

    noises = {folder: _figures_of(_own_cores(folder)).median_stderr for folder in CAMPAIGNS}
    restless = [noises.pop(folder) for folder in (SLOW_EPYC, CALM_EPYC)]
    slow = [case for model in ("cnn", "mixer") for case in cases(SLOW_EPYC, 2, model)]
    calm = [case for rate in (2, 5) for case in cases(CALM_EPYC, rate, "deep_mlp")]
    beyond = _goals(_own_cores(CALM_EPYC))[2].partition(" ")[0]
    xeon = cases(XEON, 0.2)
    exposed_ms = 1e3 * median(case.predicted.exposed - case.measured.exposed for case in xeon)
    epyc = [-middle_ms(cases(EPYC, rate)) for rate in (0.8, 1.5, 2, 3.5, 5)]
    shared = [campaign(folder).oversubscribed for folder in CAMPAIGNS]
    lows = [-100 * figures.median_bias for figures in shared if figures]
    regrets = [s.regret or 0.0 for f in CAMPAIGNS for s in campaign(f).sweeps if s.oversubscribed]
    return {
        "SLOW_EPYC_LONG": percents(case.error for case in slow if case.variant in ("1", "5")),
        "SLOW_EPYC_NOISE": f"{min(restless) / max(noises.values()):.1f} to "
        f"{max(restless) / min(noises.values()):.1f}",
        "CALM_EPYC_SHORT": percents(case.error for case in calm),
        "CALM_EPYC_BEYOND": beyond,
        "XEON_EXPOSED": f"{exposed_ms:.1f}",
        "XEON_LONG": f"{middle_ms(xeon):.1f}",
        "XEON_5_LONG": f"{100 * median(case.error for case in cases(XEON, 5)):.1f}",
        "XEON_5_WORST": f"{100 * max(case.error for case in cases(XEON, 5, 'wide_mlp')):.1f}",
        "EPYC_SHORT": f"{-middle_ms(cases(EPYC, 0.2)):.1f}",
        "EPYC_SHORT_ELSEWHERE": f"{min(epyc):.1f} to {max(epyc):.1f}",
        "SHARED_LOW": f"{min(lows):.0f} to {max(lows):.0f}",
        "SHARED_WORST": f"{100 * max(figures.worst_error for figures in shared if figures):.0f}",
        "SHARED_REGRET": f"{100 * max(regrets):.0f}",
    }


def _campaign_table(sweeps: Sequence[Sweep]) -> str:
    """A row a sweep, a column a variant."""
    variants = list(dict.fromkeys(case.variant for sweep in sweeps for case in sweep.cases))
    rows = []
    for sweep in sweeps:
        errors = {case.variant: f"{case.error:+.1%}" for case in sweep.cases}
        rate = (sweep.line_rate_bytes_per_s or math.nan) * 8 / 1e9
        cells = [sweep.model.rpartition(":")[2], f"{rate:g}"]
        cells += [errors.get(variant, "") for variant in variants]
        cells.append(f"{median(case.noise for case in sweep.cases):.1%}")
        cells.append("-" if sweep.regret is None else f"{sweep.regret:.1%}")
        rows.append(cells)
    return _markdown(["model", "Gbit/s", *variants, "noise", "regret"], rows)


def _own_cores(folder: Path) -> list[Sweep]:
    """The sweeps whose ranks have cores of their own."""
    return [sweep for sweep in campaign(folder).sweeps if not sweep.oversubscribed]


def _by_plain_medians(folder: Path) -> list[Sweep]:
    """The same sweeps, without what brings rounds to the machine's usual pace."""
    return [
        sweep.model_copy(
            update={
                "cases": tuple(
                    case.model_copy(update={"measured_s": case.plain_s}) for case in sweep.cases
                )
            }
        )
        for sweep in _own_cores(folder)
    ]


def _as_measured_before(folder: Path, began: str) -> list[Sweep]:
    """The same sweeps, with what an earlier campaign measured in the place of the prediction.

    Each brought to the bare model's forward and backward as they were this time.
    """
    text = (folder / "earlier.csv").read_text("utf-8").splitlines()
    rows = csv.DictReader(line for line in text if not line.startswith("#"))
    known = {(row["file"], row["variant"]): row for row in rows if row["began"] == began}

    def predicted(sweep: Sweep, case: Case) -> Case:
        before = known[sweep.file, case.variant]
        slower_s = _bare_s(folder)[sweep.file] - float(before["bare_s"])
        return case.model_copy(update={"predicted_s": float(before["measured_s"]) + slower_s})

    return [
        sweep.model_copy(update={"cases": tuple(predicted(sweep, c) for c in sweep.cases)})
        for sweep in _own_cores(folder)
    ]


@cache
def _bare_s(folder: Path) -> dict[str, float]:
    """Of each sweep, by its file, the seconds of the bare model's forward and backward."""
    profiles = {
        runs.first_file: model_profile(*runs.each) for runs in load_runs(_rounds_of(folder))
    }
    return {file: p["forward_s"] + p["backward_s"] for file, p in profiles.items()}


def _missed_by_truth(sweeps: Sequence[Sweep]) -> str:
    """The share of exposed cases in which a prediction without any error would fail the skill rule.

    Measured medians scatter about the truth by their standard errors: as if these were known, and
    as if only a sweep's own few runs, or a run's rounds, told them (Student's t).
    """
    cases = [(sweep, case) for sweep in sweeps for case in sweep.cases if case.exposed]
    limits = [max(c.baseline_error / 3, SIGNIFICANT * c.noise) / c.noise for _, c in cases]
    freedom = [s.runs - 1 if s.runs > 1 else case.rounds - 1 for s, case in cases]
    known = fmean(2 * norm.sf(limit) for limit in limits)
    told = fmean(2 * student.sf(limit, n) for limit, n in zip(limits, freedom, strict=True))
    return f"{100 * known:.0f} to {100 * told:.0f} %"


def _with_skill(sweeps: Sequence[Sweep]) -> str:
    figures = _figures_of(sweeps)
    return (
        f"median {figures.median_error:.1%}, worst {figures.worst_error:.1%}, skill "
        f"{_share(figures.skilled)}"
    )


def _in_short(sweeps: Sequence[Sweep]) -> str:
    figures = _figures_of(sweeps)
    return (
        f"error median {figures.median_error:.1%}, worst {figures.worst_error:.1%}, bucket choice "
        f"within 1 % in {figures.good_choices:.0%} of {figures.choice_sweeps} sweeps"
    )


def _levels(rows: tuple[Row, ...]) -> str:
    return _in_words(*levels(rows))


def _in_words(middle: float, worst: float) -> str:
    return f"median {middle:.1%}, worst {worst:.1%}"


def _table(rows: tuple[Row, ...], case: str) -> str:
    published = any(row.knowing_ddp_s for row in rows)
    head = ["", case, *(["network"] if published else []), "measured", "predicted", "error"]
    head += ["knowing DDP", "equal GPUs"] if published else []
    head += ["compute only", "no overlap", "perfect overlap"]
    lines = []
    for row in rows:
        cells = [row.label, row.case, *([LINKS[int(row.case)]] if published else [])]
        cells += [f"{row.measured_s * 1e3:.0f} ms", f"{row.predicted_s * 1e3:.1f} ms"]
        naive = (row.compute_only_s, row.no_overlap_s, row.perfect_overlap_s)
        others = (row.knowing_ddp_s, row.equal_gpus_s, *naive) if published else naive
        errors = ("" if other is None else f"{row.error(other):+.1%}" for other in others)
        cells += [f"**{row.error():+.1%}**", *errors]
        lines.append(cells)
    return _markdown(head, lines)


def _roofline_table() -> str:
    head = ["device", "precision", "models", "steps", "RMS", "from", "to", "sources"]
    groups: dict[tuple[str, str, str], list[PublishedStep]] = {}
    for step in published_steps():
        kind = f"{family(step)}s{', compiled' if step.compiled else ''}"
        groups.setdefault((step.device, step.precision, kind), []).append(step)
    rows = []
    for group, steps in sorted(groups.items()):
        errors = [error_of(step) for step in steps]
        sources = ", ".join(sorted({step.source for step in steps}))
        lowest, highest = min(errors), max(errors)
        told = (f"{len(steps)}", f"{rms(errors):.2f}", f"{lowest:+.0%}", f"{highest:+.0%}", sources)
        rows.append((*group, *told))
    return _markdown(head, rows)


def _hosts_table() -> str:
    head = ["host", "year", "us an operator", "of"]
    rows = (
        (host.name, f"{host.year}", f"{1e6 * host.operator_s:.0f}", ", ".join(host.ran))
        for host in published_hosts()
    )
    return _markdown(head, rows)


def _hosts_since(year: int, *, before: bool = False) -> str:
    hosts = [host for host in published_hosts() if (host.year < year) == before]
    return f"{1e6 * usual_s(hosts):.0f}"


# milliseconds of three steps by batch (pytorch/benchmark, pull request 706)
TORCHBENCH = {1: 89.033, 2: 92.854, 4: 93.676, 8: 105.099, 16: 167.292, 32: 297.315, 64: 561.262}


@cache
def torchbench_rows() -> tuple[tuple[int, float, float, float], ...]:
    """ResNet-50's step on a V100 by batch: published, as estimated, and with its Adam; seconds."""
    return tuple(
        (batch, three_ms / 3e3, *_on_v100(batch)) for batch, three_ms in TORCHBENCH.items()
    )


def _on_v100(batch: int) -> tuple[float, float]:
    workload = {"model": "resnet50", "batch_per_rank": batch, "optimizer": {"name": "adam"}}
    cluster = {"nodes": 1, "gpus_per_node": 1, "device": "v100-sxm-32gb"}
    job = job_of({"workload": workload | {"precision": "fp32"}, "cluster": cluster})
    device, model = job.scenario.cluster.device, job.model
    kernels = 9 * len(model.parameters)  # eight operators each, and its gradient set to zero
    device_s = max(model.optimizer.device_s, kernels * device.kernel_floor_s)
    optimizer = Work(device_s, kernels, 18e-6 * len(model.parameters))
    estimated, single = (
        compile_program(job.scenario, variant, ddp=False)
        for variant in (model, replace(model, optimizer=optimizer))
    )
    return mean_step_s(on_one_rank(estimated)), mean_step_s(on_one_rank(single))


def _by_batch_table() -> str:
    head = ["batch", "published", "estimated", "with its Adam", "error"]
    rows = (
        (
            f"{batch}",
            *(f"{1e3 * step_s:.1f} ms" for step_s in (published_s, estimated_s, single_s)),
            f"**{single_s / published_s - 1:+.0%}**",
        )
        for batch, published_s, estimated_s, single_s in torchbench_rows()
    )
    return _markdown(head, rows)


def _preset_table() -> str:
    rows = (
        (name, device, f"{nodes} x {gpus}", f"{time_us:.0f} us", f"{error:+.0%}")
        for (name, device, nodes, gpus, time_us), error in zip(SWEEPS, preset_errors(), strict=True)
    )
    return _markdown(["sweep", "device", "nodes x GPUs", "measured", "error"], rows)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


if __name__ == "__main__":
    main()
