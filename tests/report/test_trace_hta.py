"""Meta's HolisticTraceAnalysis as oracle: what it finds in our files is what `simulate` says.

It is no dependency (pip install '.[hta]'); `.ci/run` runs this file in an environment of its own.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from trace_reading import both, covered, read

import ddpsim
from ddpsim.planning.trace import trace, write_traces
from ddpsim.report.trace import Traced

pytest.importorskip(
    "hta", reason="HolisticTraceAnalysis is not installed: .ci/run compares with it"
)
pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parent.parent.parent
# scenario, settings, ranks, and whether the device idles during communication
# a host that never keeps the device waiting: no GradScaler either
AHEAD = ("workload.grad_scaler=false", "cluster.device={preset: a100-sxm-80gb, operator: 12 us}")
CASES = {
    "one node": ("resnet50-8xa100", (), [0, 7], False),
    "exposed": ("resnet50-2x8-25gbit", AHEAD, [0, 8, 15], False),
    "mostly exposed": ("slow-network", (), None, False),
    "several nodes": ("bert-large-4x8-ib", ("run.iterations=2",), [0, 31], False),
    "accumulation": ("accumulation", ("run.iterations=2",), [0, 3], False),
    "stragglers": ("straggler", ("run.iterations=4",), [0, 3], False),
    "shared network": ("shared-network", ("run.iterations=2",), [0, 4, 5], False),
    "DataParallel": ("data-parallel", (), [0], False),
    "slow data": ("resnet50-8xa100", ("workload.data={rate: 1500 samples/s}",), [0], True),
    "slow host": ("resnet50-8xa100", ("workload.batch_per_rank=2",), [0, 7], True),
    "stalls": (
        "resnet50-2x8-25gbit",
        ("run.stalls={probability: 0.4, duration: 10 ms}", "run.iterations=3"),
        [0, 4],
        False,
    ),
}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise HTA rounds every kernel to whole microseconds, inwards."""
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    logging.getLogger("hta").setLevel(logging.ERROR)


def analysed(traced: Traced, folder: Path, **options: Any) -> Any:
    from hta.trace_analysis import TraceAnalysis

    written = write_traces(traced, folder, **options)
    analysis = TraceAnalysis(trace_dir=written.ranks)
    assert sorted(analysis.t.traces) == list(traced.ranks), "each file is the rank that it says"
    return analysis


@pytest.mark.parametrize("case", CASES)
def test_hta_finds_what_simulate_says(case: str, tmp_path: Path) -> None:
    name, sets, ranks, idles = CASES[case]
    scenario = ddpsim.load_scenario(ROOT / "scenarios" / f"{name}.yaml", sets)
    traced = trace(scenario, ranks, "all")
    found = analysed(traced, tmp_path)
    slowest = traced.timeline.slowest_rank
    assert slowest in traced.ranks

    overlaps = found.get_comm_comp_overlap(visualize=False).set_index("rank")
    percent = overlaps["comp_comm_overlap_pctg"]
    for rank in traced.ranks:
        assert percent[rank] == round(100 * traced.overlap(rank).under_kernels, 2)
    result = ddpsim.simulate(scenario)
    fraction = round(100 * result.overlap_fraction, 2)
    assert (percent[slowest] != fraction) if idles else (percent[slowest] == fraction)

    times = found.get_temporal_breakdown(visualize=False).set_index("rank").loc[slowest]
    parts, steps = result.breakdown_s, len(traced.steps)
    idle_comm_s = traced.overlap(slowest).idle_comm_ns / steps / 1e9

    def mean_s(column: str) -> Any:
        return pytest.approx(times[column] / 1e6 / steps, abs=1e-12)

    assert parts.exposed_comm + idle_comm_s == mean_s("non_compute_time(us)")
    # from the first kernel to the end: a wait for data or the host before it is not seen
    lane = read(traced.of_rank(slowest))
    kernels_ns = min(s.start_ns for s in lane.slices if s.category == "kernel")
    first_ns = kernels_ns - min(s.start_ns for s in lane.slices)
    whole_s = result.iteration_time_s.mean - first_ns / steps / 1e9
    assert whole_s == mean_s("kernel_time(us)")
    work = parts.forward + parts.backward_compute + parts.optimizer
    idle_s = times["idle_time(us)"] / 1e6 / steps
    unseen_s = parts.data_wait + parts.other - idle_comm_s - idle_s - first_ns / steps / 1e9
    assert work + unseen_s == mean_s("compute_time(us)")
    copies = lane.ticks("bucket to gradients", "buffers to and from their broadcast")
    assert work + copies / steps / 1e9 == mean_s("compute_time(us)")


@pytest.mark.parametrize("case", ["exposed", "stragglers", "slow host"])
def test_hta_breaks_kernels_down_as_we_do(case: str, tmp_path: Path) -> None:
    name, sets, ranks, _ = CASES[case]
    scenario = ddpsim.load_scenario(ROOT / "scenarios" / f"{name}.yaml", sets)
    traced = trace(scenario, ranks, 2)
    found = analysed(traced, tmp_path, compressed=True)
    kinds, kernels = found.get_gpu_kernel_breakdown(visualize=False)
    ours = dict.fromkeys(("comm", "compute", "both", "pieces"), 0)
    for rank in traced.ranks:
        lane = read(traced.of_rank(rank))
        comm = lane.communication()
        work = [
            (s.start_ns, s.end_ns)
            for s in lane.slices
            if s.category == "kernel" and not s.name.startswith("nccl")
        ]
        ours["both"] += both(comm, work)
        ours["comm"] += covered(comm) - both(comm, work)
        ours["compute"] += covered(work) - both(comm, work)
        ours["pieces"] += 2 * (len(comm) + len(work))
        reduced = kernels[
            (kernels["rank"] == rank) & (kernels["name"] == "ncclDevKernel_AllReduce")
        ]
        assert reduced["sum (us)"].sum() == pytest.approx(
            lane.ticks("ncclDevKernel_AllReduce") / 1000, abs=1e-3
        )
    theirs = kinds.set_index("kernel_type")["sum"]
    names = {
        "comm": "COMMUNICATION",
        "compute": "COMPUTATION",
        "both": "COMPUTATION overlapping COMMUNICATION",
    }
    for key, kind in names.items():  # HTA cuts every piece between two edges to whole microseconds
        assert 0 <= ours[key] / 1000 - theirs.get(kind, 0) <= ours["pieces"]


def test_merged_file_is_not_among_the_ranks(tmp_path: Path) -> None:
    scenario = ddpsim.load_scenario(ROOT / "scenarios" / "own-model.yaml")
    traced = trace(scenario)
    analysed(traced, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"merged.json", "ranks"}
