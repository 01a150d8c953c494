"""Sweeps: every point once, none lost, the same bytes however they were computed."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddpsim
from ddpsim.errors import ScenarioError
from ddpsim.planning import sweep as sweeping
from ddpsim.planning.executors import ExecutorError, Workers, dask_workers, local_workers
from ddpsim.planning.grid import Axis, Grid
from ddpsim.planning.journal import Journal, JournalError
from ddpsim.planning.sweep import sweep
from ddpsim.report.sweep import render_csv, render_sweep
from ddpsim.result.sweep import FLAT, GOALS, Point, Sweep
from ddpsim.settings import Setting

ROOT = Path(__file__).resolve().parent.parent.parent
SCENARIO = ROOT / "scenarios" / "resnet50-2x8-25gbit.yaml"
CAPS = "ddp.bucket_cap_mb=default,1,5,25,50"
LINKS = "cluster.inter_node.bandwidth=10 Gbit/s,25 Gbit/s,100 Gbit/s"


def swept(*settings: str, **options: Any) -> Sweep:
    return sweep(SCENARIO, Grid.of(settings), **options)


def test_a_sweep_warns_as_run_does_at_its_best_point(tmp_path: Path) -> None:
    """Its buckets lie outside the log."""
    scenario, log = ROOT / "scenarios" / "resnet50-nccl-log.yaml", tmp_path / "short.csv"
    log.write_text("size_bytes,time_us,nodes,gpus_per_node\n100000,40,1,8\n1000000,60,1,8\n")
    beyond = [f"cluster.all_reduce={log}", "run.allow_extrapolation=true"]
    found = sweep(scenario, Grid.of([CAPS, *beyond]))
    assert found.best
    settings = [*found.fixed, *map(str, found.best.settings)]
    said = ddpsim.simulate(ddpsim.load_scenario(scenario, settings)).warnings
    assert said
    assert found.warnings == found.to_dict()["warnings"] == said
    text = " ".join(render_sweep(found).split())
    assert all(f"! * {warning}" in text for warning in said)
    assert sweep(scenario, Grid.of([CAPS])).warnings == ()


def test_each_point_is_what_run_says() -> None:
    found = swept(CAPS, LINKS, "workload.batch_per_rank=32")
    assert len(found.points) == 15
    for point in (found.points[0], found.points[7], found.points[14]):
        settings = ["workload.batch_per_rank=32", *map(str, point.settings)]
        result = ddpsim.simulate(ddpsim.load_scenario(SCENARIO, settings))
        assert point.brief
        assert point.brief.iteration_time_s == result.iteration_time_s
        assert point.brief.memory_bytes_per_gpu == result.memory_bytes_per_gpu


def test_a_measured_step_says_nothing_of_another_batch_or_device() -> None:
    straggler = ROOT / "scenarios" / "straggler.yaml"
    for setting in ("workload.batch_per_rank=32,64", "cluster.device=v100-sxm-32gb,a100-sxm-40gb"):
        own, other = sweep(straggler, Grid.of([setting])).points
        assert own.brief
        said = (
            f"{setting.partition('=')[0]}: workload.step_time was measured with another, and says"
        )
        assert said in str(other.problem)
    both = Grid.of(["workload.batch_per_rank=64", "workload.step_time=300 ms"])
    assert sweep(straggler, both).points[0].brief


def test_nor_where_one_value_is_set_for_all_points() -> None:
    straggler = ROOT / "scenarios" / "straggler.yaml"
    for fixed in ("workload.batch_per_rank=64", "cluster.device=a100-sxm-40gb"):
        with pytest.raises(ScenarioError, match=r"workload\.step_time was measured with another"):
            sweep(straggler, Grid.of([fixed, "ddp.bucket_cap_mb=5,25"]))
    both = Grid.of(
        ["workload.batch_per_rank=64", "workload.step_time=300 ms", "ddp.bucket_cap_mb=5,25"]
    )
    assert all(point.brief for point in sweep(straggler, both).points)


def test_what_is_stated_of_a_link_tells_points_apart() -> None:
    """A machine has eight NICs, of which a scenario that states other figures says nothing."""
    found = sweep(
        ROOT / "scenarios" / "machines-64xh100.yaml",
        Grid.of(["cluster.inter_node.nics_per_node=1,8"]),
    )
    one, eight = (point.brief for point in found.points)
    assert one
    assert found.own.brief
    assert found.own.brief == eight
    assert one.iteration_time_s.mean > found.own.brief.iteration_time_s.mean


def test_points_come_in_the_order_of_the_grid() -> None:
    points = list(Grid.of(["b=1,2", "c=x", "a=[1,25],'p, q',{k: 1, l: 2}"]))
    assert points[0] == (("b", "1"), ("a", "[1,25]"))
    assert [str(s) for s in points[4]] == ["b=2", "a='p, q'"]
    assert [s[1].value for s in points[:3]] == ["[1,25]", "'p, q'", "{k: 1, l: 2}"]


VALUES = st.text("abc 1.", min_size=1).map(str.strip).filter(bool)


@given(st.lists(st.one_of(VALUES, st.lists(VALUES).map(lambda v: f"[{','.join(v)}]")), min_size=1))
def test_a_setting_splits_at_its_own_commas_alone(values: list[str]) -> None:
    if len(set(values)) < len(values):
        with pytest.raises(ScenarioError, match="stands there twice"):
            Axis.of_setting("key=" + ",".join(values))
        return
    assert Axis.of_setting("key=" + ", ".join(values)).values == tuple((v,) for v in values)


def test_keys_move_together(tmp_path: Path) -> None:
    file = tmp_path / "axis.csv"
    file.write_text(
        "cluster.nodes, workload.batch_per_rank\n1, 64\n\n2, 32\n", encoding="utf-8-sig"
    )
    found = sweep(SCENARIO, Grid.of(["ddp.static_graph=true,false"], [file]))
    assert [p.brief and p.brief.world_size for p in found.points] == [8, 16, 8, 16]
    assert found.points[3].settings[1:] == (
        ("cluster.nodes", "2"),
        ("workload.batch_per_rank", "32"),
    )
    assert found.own.settings[1:] == (("cluster.nodes", "2"), ("workload.batch_per_rank", "64"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["a"], "--set a: write --set key.path=1,2,3"),
        (["a=1,,2"], "--set a=1,,2: a value is missing between two commas, or at an end"),
        (["a=1,2,1"], "--set a=1,2,1: 1 stands there twice"),
        (["a=1,2", "a=3,4"], "a: two axes move this key; leave one of them out"),
        (["a=1,2", "a=3"], "a: an axis moves this key, and --set fixes it; leave one out"),
    ],
)
def test_wrong_axes(settings: list[str], said: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        Grid.of(settings)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n", ":1: wanted a row of dotted keys, such as"),
        ("a,b\n1,2\n3\n", ":3: wanted 2 cells, one for each key, got 1; a value"),
        ("a,b\n1,2\n1,2\n", ": 1, 2 stands there twice"),
        ("a;b\n1;2\n", ":1: separate the cells by commas, not by semicolons"),
    ],
)
def test_wrong_axis_files(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "axis.csv"
    file.write_text(text)
    with pytest.raises(ScenarioError) as raised:
        Axis.read(file)
    assert str(raised.value).startswith(f"{file}{said}")


def test_an_axis_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as raised:
        Axis.read(tmp_path / "no.csv")
    said = f"--axis {tmp_path / 'no.csv'}: cannot be read: No such file or directory"
    assert str(raised.value) == said


def test_the_scenario_itself_is_a_candidate() -> None:
    """Its own caps are better than those tried."""
    found = swept("ddp.bucket_cap_mb=1,25", "ddp.gradient_as_bucket_view=true")
    assert found.fixed == ("ddp.gradient_as_bucket_view=true",)
    assert found.keeps_own
    assert found.flat_regions()[0].keep == ("default",)
    with_fixed = "the scenario with --set ddp.gradient_as_bucket_view=true"
    shown = render_sweep(found)
    assert f"beside {with_fixed}" in shown.replace("\n            ", " ")
    assert f"keep        {with_fixed}: nothing here is 0.2% better" in shown
    assert not swept("ddp.comm_hook=fp16_compress,allreduce").keeps_own


def test_a_table_keeps_to_the_screen() -> None:
    found = swept(CAPS, "ddp.gradient_as_bucket_view=true,false", LINKS, "cluster.nodes=2,abc")
    assert max(map(len, render_sweep(found).splitlines())) <= 100


def test_a_failing_point_leaves_the_others() -> None:
    found = swept("cluster.nodes=2,zwei,4")
    assert [point.brief is None for point in found.points] == [False, True, False]
    assert found.points[1].problem == (
        "--set cluster.nodes=zwei  cluster.nodes: wanted a whole number, got 'zwei'"
    )
    assert "1 of 3 points cannot be simulated:\n  cluster.nodes=zwei:" in render_sweep(found)


def test_a_sweep_of_nothing_but_errors_is_one() -> None:
    with pytest.raises(ScenarioError) as raised:
        swept("ddp.bucket_cap_mb=0,-1")
    assert len(raised.value.problems) == 2
    with pytest.raises(ScenarioError) as raised:
        swept("ddp.bucket_cap=1,2")
    assert "unknown key. Did you mean 'bucket_cap_mb'?" in str(raised.value)


def test_equal_points_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def counted(scenarios: Any) -> Any:
        computed.extend(scenarios)
        return simulate(scenarios)

    simulate = sweeping.attempt_many
    monkeypatch.setattr(sweeping, "attempt_many", counted)
    found = swept("cluster.inter_node.bandwidth=25 Gbit/s,25000 Mbit/s,3.125 GB/s,10 Gbit/s")
    assert len(computed) == 2  # the scenario's own is one of them
    assert len({id(point.brief) for point in found.points}) == 2


def test_a_journal_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.journal"
    with Journal(path, resume=False) as journal:
        found = swept(CAPS, journal=journal)
    monkeypatch.setattr(sweeping, "attempt_many", None)
    with Journal(path, resume=True) as journal:
        assert swept(CAPS, journal=journal) == found
        with pytest.raises(TypeError):
            swept(CAPS, "workload.batch_per_rank=63", journal=journal)


def test_a_finished_sweep_begins_anew_or_is_reused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, resume=False) as journal:
        journal.add({"a": "why"})
        journal.finish()
    with Journal(path, resume=True) as journal:
        assert journal.known == {"a": "why"}
    with Journal(path, resume=False) as journal:
        assert journal.known == {}
        journal.add({"b": "why"})
    with pytest.raises(JournalError, match="holds 1 point of a sweep"):
        Journal(path, resume=False)


def test_a_changed_file_is_another_point(tmp_path: Path) -> None:
    log = tmp_path / "all-reduce-8xa100.csv"
    log.write_bytes((ROOT / "scenarios" / log.name).read_bytes())
    scenario = tmp_path / "scenario.yaml"
    scenario.write_bytes((ROOT / "scenarios" / "resnet50-nccl-log.yaml").read_bytes())
    grid = Grid.of(["ddp.gradient_as_bucket_view=true,false"])
    with Journal(tmp_path / "journal", resume=False) as journal:
        sweep(scenario, grid, journal=journal)
        known = len(journal.known)
        sweep(scenario, grid, journal=journal)
        assert len(journal.known) == known == 2
        log.write_text(log.read_text() + "\n")
        sweep(scenario, grid, journal=journal)
        assert len(journal.known) == 4


def test_what_is_wrong_with_every_point_is_said_by_its_place(tmp_path: Path) -> None:
    profile = Path(__file__).parents[2] / "scenarios" / "testbed" / "transformer-2gbit.json"
    path = tmp_path / "s.yaml"
    path.write_text(
        f"""schema: ddpsim/1
workload: {{profile: {profile}, batch_per_rank: 25}}
ddp: {{backend: gloo}}
cluster: {{nodes: 2, gpus_per_node: 1, device: cpu-core, inter_node: {{bandwidth: 1 Gbit/s}}}}
"""
    )
    with pytest.raises(ScenarioError) as raised:
        sweep(path, Grid.of([CAPS]))
    (problem,) = raised.value.problems
    assert (problem.where.rpartition("s.yaml")[2][:3], problem.key) == (
        ":2:",
        "workload.batch_per_rank",
    )


def test_journals_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, resume=False) as journal:
        journal.add({"a": "why"})
        with pytest.raises(JournalError) as raised:
            Journal(path, resume=True)
    assert "another sweep is writing it" in str(raised.value)
    with pytest.raises(JournalError) as raised:
        Journal(path, resume=False)
    assert str(raised.value) == (
        f"{path} holds 1 point of a sweep: add --resume to go on with them, or remove the file to "
        "start again"
    )
    path.write_bytes(path.read_bytes() + b'{"key": 3}\n')
    with pytest.raises(JournalError, match="j:3: this line is no point"):
        Journal(path, resume=True)
    path.write_text("precious\n")
    with pytest.raises(JournalError, match="this is no journal of a sweep"):
        Journal(path, resume=True)
    assert path.read_text() == "precious\n"


@pytest.mark.parametrize(
    ("figure", "spoilt"),
    [
        (r'"scaling_efficiency": [^,]+', '"scaling_efficiency": "0.9"'),
        (r'"p50": [^,]+', '"p50": NaN'),
        (r'"comm_time_s": [^,]+', '"comm_time_s": -1'),
        (r'"world_size": \d+', '"world_size": 1.5'),
        (r'"activations": \d+', '"activations": []'),
        (r'"buckets": \d+', '"buckets": true'),
        (r'"brief": .*', '"brief": ' + "[" * 100_000 + "}"),
    ],
)
def test_a_figure_that_is_none_is_no_point(tmp_path: Path, figure: str, spoilt: str) -> None:
    path = tmp_path / "j"
    with Journal(path, resume=False) as journal:
        swept(CAPS, journal=journal)
    lines = path.read_text().splitlines(keepends=True)
    lines[2], count = re.subn(figure, spoilt, lines[2])
    assert count == 1
    path.write_text("".join(lines))
    with pytest.raises(JournalError, match="j:3: this line is no point"):
        Journal(path, resume=True)


@given(st.integers(0, 10_000))
def test_a_journal_cut_anywhere_is_sound(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        with Journal(path, resume=False) as journal:
            brief = CUT.points[0].brief
            assert brief
            journal.add({"a": "why"})
            journal.add({"b": brief, "c": "not"})
            known = list(journal.known.items())
        whole = path.read_bytes()
        path.write_bytes(whole[: cut % (len(whole) + 1)])
        with Journal(path, resume=True) as journal:
            found = list(journal.known.items())
            assert found == known[: len(found)]
            journal.add(dict(known[len(found) :]))
        assert path.read_bytes() == whole


CUT = swept("ddp.bucket_cap_mb=1,25")


def test_a_full_disk_leaves_a_sound_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        if len(data) > 40:
            return write(file, data[:30])
        raise OSError(28, "No space left on device")

    write = os.write
    with Journal(tmp_path / "j", resume=False) as journal:
        journal.add({"a": "why"})
        before = journal.path.read_bytes()
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            journal.add({"b": "x" * 40})
        monkeypatch.undo()
        assert journal.path.read_bytes() == before


COMMAND = [sys.executable, "-m", "ddpsim", "sweep", str(SCENARIO)]
BIG = ["--set", "ddp.bucket_cap_mb=" + ",".join(map(str, range(1, 26)))]
BIG += ["--set", "workload.batch_per_rank=" + ",".join(map(str, range(32, 52)))]


@pytest.mark.parametrize("seed", [1])
def test_a_killed_sweep_resumes_to_the_same_bytes(tmp_path: Path, seed: int) -> None:
    """At random moments, with the workers' processes, until it ends by itself."""
    chance = random.Random(seed)
    output, journal = tmp_path / "out.csv", tmp_path / "out.csv.journal"
    command = [*COMMAND, *BIG, "-o", str(output), "--resume", "--jobs", "2"]
    kills = 0
    while not output.exists():
        run = subprocess.Popen(
            command,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        before = journal.stat().st_size if journal.exists() else 0
        until = time.monotonic() + 60
        while run.poll() is None and time.monotonic() < until:
            grown = journal.stat().st_size - before if journal.exists() else 0
            if kills < 3 and grown > chance.randrange(10_000, 90_000):
                run.kill()
                kills += 1
            time.sleep(0.01)
        assert run.wait(timeout=60) in (0, -signal.SIGKILL)
    assert kills == 3
    lines = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert lines.pop() == {"finished": True}
    keys = [line["key"] for line in lines]
    assert len(keys) == len(set(keys)) == 25 * 20 + 1  # the scenario's own is another
    assert output.read_text() == expected_csv()


_EXPECTED: list[str] = []


def expected_csv() -> str:
    if not _EXPECTED:
        _EXPECTED.append(render_csv(swept(*BIG[1::2])))
    return _EXPECTED[0]


def interruptible(before: str, output: str) -> subprocess.Popen[str]:
    """A big sweep in a session of its own, after some code, with Ctrl-C as in a terminal."""
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"{before}\n"
        "from ddpsim.cli import main; main()"
    )
    command = [sys.executable, "-c", script, *COMMAND[3:], *BIG, "-o", output]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    journal = tmp_path / "out.csv.journal"
    run = interruptible("", str(journal)[:-8])
    while not journal.exists() or journal.stat().st_size < 50_000:
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    kept = len(journal.read_text().splitlines()) - 1
    assert run.returncode == 130
    assert said == f"\nstopped; go on with --resume: {journal} has {kept} points\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of processes are POSIX's")
def test_ctrl_c_while_workers_start_is_as_quiet(tmp_path: Path) -> None:
    journal = tmp_path / "out.csv.journal"
    # to the whole group, as a terminal sends it, between a worker's start and its first orders
    sends = (
        "import os\n"
        "from multiprocessing import util\n"
        "start = util.spawnv_passfds\n"
        "def interrupted(path, args, passfds):\n"
        "    pid = start(path, args, passfds)\n"
        "    if not any('resource_tracker' in str(arg) for arg in args):\n"
        "        os.killpg(0, signal.SIGINT)\n"
        "    return pid\n"
        "util.spawnv_passfds = interrupted"
    )
    run = interruptible(sends, str(journal)[:-8])
    _, said = run.communicate(timeout=60)
    kept = len(journal.read_text().splitlines()) - 1
    assert run.returncode == 130
    assert said == f"\nstopped; go on with --resume: {journal} has {kept} points\n"


class InProcess(Executor):
    """Computes at once; after so many calls its workers die."""

    def __init__(self, calls: int = 10**9, error: Exception | None = None) -> None:
        self.calls, self.error = calls, error or BrokenProcessPool()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls -= 1
        if self.calls < 0:
            future.set_exception(self.error)
        else:
            future.set_result(fn(*args, **kwargs))
        return future


def test_what_a_broken_pool_had_is_computed_by_the_next() -> None:
    pools = iter([InProcess(calls) for calls in (3, 0, 3, 0, 0)])
    workers = Workers(lambda: next(pools, InProcess()), 2)
    assert swept(CAPS, LINKS, workers=workers) == swept(CAPS, LINKS)


def test_a_pool_that_always_breaks_is_an_error() -> None:
    with pytest.raises(ExecutorError, match="keep dying; is memory short"):
        swept(CAPS, workers=Workers(lambda: InProcess(0), 2))


def test_a_point_that_kills_its_worker_is_reported(tmp_path: Path) -> None:
    class Deadly(InProcess):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            if any(scenario.workload.batch_per_rank == 48 for scenario in args[0]):
                return InProcess(0, MemoryError("not enough")).submit(fn, *args)
            return super().submit(fn, *args, **kwargs)

    axis = "workload.batch_per_rank=16,32,48,64"
    with Journal(tmp_path / "j", resume=False) as journal:
        found = swept(axis, workers=Workers(Deadly, 2), journal=journal)
        assert len(journal.known) == 3
    assert [point.problem for point in found.points] == [
        None, None, "its worker failed: MemoryError: not enough", None
    ]  # fmt: skip


def test_processes_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpsim.planning.executors._WORTH_S", 0.0)
    assert swept(CAPS, LINKS, workers=local_workers(2)) == swept(CAPS, LINKS)


@pytest.fixture
def dask(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two workers, as processes."""
    pytest.importorskip("distributed", reason="needs the extra dask")
    address = tmp_path / "scheduler.json"
    module = [sys.executable, "-W", "ignore", "-m", "distributed.cli"]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    port = ["--port", "0", "--host", "127.0.0.1", "--scheduler-file", str(address)]
    file = ["--scheduler-file", str(address)]
    limits = ["--nthreads", "1", "--no-nanny", "--no-dashboard"]
    started = [
        subprocess.Popen(
            [f"{module[0]}", "-m", "distributed.cli.dask_scheduler", *port, "--no-dashboard"],
            **quiet,
        )
    ]
    try:
        started += [
            subprocess.Popen(
                [f"{module[0]}", "-m", "distributed.cli.dask_worker", *file, *limits],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                **quiet,
            )
            for _ in range(2)
        ]
        while not address.exists() or not address.read_text().strip():
            time.sleep(0.05)
        where = json.loads(address.read_text())["address"]
        _wait_for_workers(where, 2)
        yield where, started
    finally:
        for process in started:
            process.kill()
            process.wait()


def _wait_for_workers(address: str, count: int) -> None:
    from distributed import Client

    with Client(address, set_as_default=False) as client:
        client.wait_for_workers(count, timeout=60)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_dask_loses_nothing_with_a_worker(
    dask: tuple[str, list[subprocess.Popen[bytes]]],
) -> None:
    address, started = dask
    killed: list[int] = []

    def kill_one(ended: int, total: int) -> None:
        if ended > 100 and not killed:
            started[1].kill()
            killed.append(ended)

    with dask_workers(address) as workers:
        assert workers.count == 2
        found = swept(*BIG[1::2], workers=workers, progress=kill_one)
    assert killed
    assert killed[0] < 500
    assert render_csv(found) == expected_csv()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_no_scheduler() -> None:
    pytest.importorskip("distributed", reason="needs the extra dask")
    with (
        pytest.raises(ExecutorError, match="no scheduler answers there"),
        dask_workers("tcp://127.0.0.1:9", timeout_s=1),
    ):
        pass


def made(*values: tuple[float, int, bool]) -> Sweep:
    """Points of one axis with a throughput, a world size, and whether they fit."""
    from dataclasses import replace

    brief = CUT.points[0].brief
    assert brief
    memory = brief.memory_bytes_per_gpu
    small = replace(memory, device=1)
    points = tuple(
        Point(
            (Setting("a", str(i)),),
            replace(
                brief,
                throughput_samples_per_s=rate,
                world_size=gpus,
                memory_bytes_per_gpu=memory if fits else small,
            ),
        )
        for i, (rate, gpus, fits) in enumerate(values)
    )
    axes = ((("a",), tuple((str(i),) for i in range(len(values)))),)
    own = Point((Setting("a", "1"),), points[1].brief)
    return Sweep("made", (), axes, ("throughput", "gpus"), own, points)


def test_what_is_flat() -> None:
    (region,) = made(
        (99.9, 1, True), (99.81, 1, True), (100, 1, True), (99.7, 1, True)
    ).flat_regions()
    assert region.values == (("0",), ("1",), ("2",))
    assert region.keep == ("1",)  # the scenario's own
    (region,) = made((100, 1, True), (50, 1, True), (99.9, 1, False)).flat_regions()
    assert region.values == (("0",),)
    assert region.keep == ("0",)


@given(
    st.lists(
        st.tuples(st.integers(1, 6).map(float), st.integers(1, 6), st.booleans()),
        min_size=2,
        max_size=12,
    )
)
def test_best_front_and_flat_by_definition(values: list[tuple[float, int, bool]]) -> None:
    found = made(*values)
    usable = [point for point in found.points if point.usable]
    goals = [GOALS[name] for name in found.goals]

    def figures(point: Point) -> tuple[float, float]:
        assert point.brief
        return goals[0].of(point.brief), -goals[1].of(point.brief)

    def beaten(point: Point) -> bool:
        mine = figures(point)
        return any(
            figures(other) != mine
            and all(o >= m for o, m in zip(figures(other), mine, strict=True))
            for other in usable
        )

    best = found.best
    assert (best is None) == (not usable)
    if best is None:
        assert not found.flat_regions()
        assert "none: no point fits into the memory of its GPUs" in render_sweep(found)
        return
    most = figures(best)[0]
    assert most == max(figures(point)[0] for point in usable)
    assert {figures(p) for p in found.front} == {figures(p) for p in usable if not beaten(p)}
    assert len({figures(p) for p in found.front}) == len(found.front)
    (region,) = found.flat_regions()
    flat = {p.settings[0].value for p in usable if figures(p)[0] >= (1 - FLAT) * most}
    assert {value for (value,) in region.values} == flat


def test_csv_json_and_parquet_say_the_same(tmp_path: Path) -> None:
    found = swept(CAPS, "cluster.nodes=2,zwei")
    (tmp_path / "out.csv").write_text(render_csv(found))
    rows = list(csv.DictReader(io.StringIO(render_csv(found))))
    points = json.loads(json.dumps(found.to_dict()))["points"]
    assert len(rows) == len(points) == 10
    for row, point in zip(rows, points, strict=True):
        assert row == {k: "" if v is None else str(v) for k, v in point.items()}
    polars = pytest.importorskip("polars", reason="needs the extra parquet")
    from ddpsim.report.sweep import render_parquet

    (tmp_path / "out.parquet").write_bytes(render_parquet(found))
    assert polars.read_parquet(tmp_path / "out.parquet").to_dicts() == points


@pytest.mark.parametrize(
    "goals",
    [["speed"], (), "throughput", ["step", "gpus", "memory"], ["step", "step"]],
)
def test_goals_are_checked_before_any_point(goals: Any) -> None:
    with pytest.raises(ValueError, match=r"^goals is .*; wanted a list of one or two of through"):
        sweep("nowhere.yaml", Grid.of([]), goals)
