"""Jobs that fail: ranks that die, differ or are not reached, and what is said of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

import torch
import torch.distributed as dist
from measured.measuring import ranks

from calibrate.cli_options import is_first
from calibrate.measure.errors import LostContactError, MeasureError
from calibrate.measure.host.environment import Facts, check_same
from calibrate.measure.ranks.job import _problem_of, join, read_place
from calibrate.measure.ranks.launch import FAILED, LOST, _problem, free_port
from calibrate.records.record import load_record


@pytest.fixture
def warm(warm_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(warm_program))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_an_end_of_the_parent_ends_the_ranks(
    number: signal.Signals, tmp_path: Path, warm_program: Path
) -> None:
    """Signals of a scheduler, of short memory and of Ctrl-C, while two ranks measure."""
    path = tmp_path / "record.json"
    code = (  # a shell's background jobs ignore Ctrl-C
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.executable = {str(warm_program)!r}; from calibrate.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "measure", "--local", "2", "-o", str(path)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as parent:
        try:
            while not path.exists():
                assert parent.poll() is None
                time.sleep(0.1)
            parent.send_signal(number)
            _, said = parent.communicate(timeout=60)
        finally:
            parent.kill()
    killed = number == signal.SIGKILL
    assert parent.returncode == (-number if killed else 128 + number)
    kept = (
        f"stopped. What was measured so far is in {path}, if it is there yet; the same command "
        "with --resume goes on from it.\n"
    )
    assert said == ("" if killed else kept)
    while str(path) in _commands():  # ranks of a killed command notice soon
        assert killed
        time.sleep(0.1)
    assert load_record(path).layout.world_size == 2


def _commands() -> str:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return listed.stdout


@pytest.mark.usefixtures("warm")
def test_a_killed_rank_is_named_and_the_record_kept(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with pytest.raises(MeasureError) as raised:
        ranks(2, path, data_loader="measure_helpers:dies_on_rank_1")
    assert str(raised.value) == (
        f"rank 1 was killed by SIGKILL: was memory short? What was measured so far is in {path}, "
        "if it is there yet; the same command with --resume goes on from it."
    )
    assert load_record(path).layout.world_size == 2


@pytest.mark.usefixtures("warm")
def test_another_torch_on_a_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv("FAKE_TORCH_ON_RANK", "1")
    with pytest.raises(MeasureError) as raised:
        ranks(2, tmp_path / "record.json", data_loader="measure_helpers:batches")
    assert str(raised.value).startswith(
        f"rank 1 has torch 2.12.0, but rank 0 has {torch.__version__}: all ranks must be alike"
    )


def test_ranks_must_be_alike() -> None:
    facts = Facts("2.13", "nccl", "2.29.7", "H100", 8)
    check_same([facts, facts])
    with pytest.raises(MeasureError, match=r"rank 1 has device H200, but rank 0 has H100"):
        check_same([facts, Facts("2.13", "nccl", "2.29.7", "H200", 8)])


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, "the job of 2 ranks did not come about at 127.0.0.1:{port} within 1 s: check that"),
        (1, "rank 1 cannot reach rank 0 at 127.0.0.1:{port} within 1 s: check that rank 0 runs"),
    ],
)
def test_an_unreachable_peer(rank: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in (place | {"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(MeasureError) as raised:
        join(1.0)
    assert str(raised.value).startswith(said.format(port=port))
    seen = "that every rank takes gloo, as this one, which sees 0 CUDA devices for 2 ranks here"
    assert seen in str(raised.value)
    assert not dist.is_initialized()


def test_variables_that_are_missing_or_wrong() -> None:
    given = dict.fromkeys(("LOCAL_RANK", "RANK"), "0") | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(MeasureError, match=r"^WORLD_SIZE, LOCAL_WORLD_SIZE not set: start the r"):
        read_place(given)
    with pytest.raises(MeasureError, match="WORLD_SIZE 3 is no multiple of LOCAL_WORLD_SIZE 2"):
        read_place(given | {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"})
    cyclic = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}
    with pytest.raises(
        MeasureError, match=r"RANK 1 is LOCAL_RANK 0 of 2: .* numbered node by node"
    ):
        read_place(given | cyclic)
    with pytest.raises(MeasureError, match="must be whole numbers"):
        read_place(given | {"WORLD_SIZE": "two", "LOCAL_WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ([0, 0], ""),
        ([FAILED, -9], "rank 0 says why"),
        ([LOST, -9], "rank 1 was killed by SIGKILL: was memory short?"),
        ([-6, LOST], "NCCL ended rank 0: [rank0] Watchdog caught collective operation timeout"),
        ([LOST, -6], "rank 1 was killed by SIGABRT: was memory short?"),
        ([LOST, 1], "rank 1 ended with exit code 1: rank 1 says why."),
        ([-15, LOST], "rank 1 says why"),
    ],
)
def test_why_a_job_failed(codes: list[int], said: str, tmp_path: Path) -> None:
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    watchdog = "[rank0] Watchdog caught collective operation timeout\n" if codes[0] == -6 else ""
    logs[0].write_text(f"{watchdog}rank 0 says why\n")
    logs[1].write_text("Traceback\nrank 1 says why\n")
    problem, by_a_rank = _problem(codes, logs)
    assert problem == said
    assert by_a_rank == said.endswith(" says why")


@pytest.mark.usefixtures("warm")
def test_the_rank_that_failed_is_quoted_and_not_the_one_that_lost_it(tmp_path: Path) -> None:
    with pytest.raises(MeasureError) as raised:
        ranks(2, tmp_path / "r.json", data_loader="measure_helpers:fails_on_rank_1")
    assert str(raised.value).startswith(
        "the data loader measure_helpers:fails_on_rank_1 failed: ValueError('bad sector')"
    )


def test_a_rank_left_over_from_another_job_silences_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert is_first()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_first()
    assert is_first(local=2)


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    at = {"MASTER_PORT": str(free_port()), "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | at | {"GLOO_SOCKET_IFNAME": "nope0"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeasureError, match="GLOO_SOCKET_IFNAME names nope0, which has no address"):
        join(10.0)


def test_only_what_gloo_or_the_store_says_of_peers_is_lost_contact(alone: None) -> None:
    """Words of torch 2.13, as a rank said them whose peer was killed or silent."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(dist.DistStoreError) as silent:
        store.wait(["key"], timedelta(milliseconds=1))
    gloo = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
    for error in (
        silent.value,
        dist.DistNetworkError("Broken pipe"),
        RuntimeError(f"{gloo}pair.cc:553] Connection closed by peer [127.0.0.1]:41148."),
        RuntimeError(f"{gloo}unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation"),
        RuntimeError("Application timeout caused pair closure"),
    ):
        problem = _problem_of(error, 1, "Kept.")
        assert isinstance(problem, LostContactError)
        assert str(problem).startswith("rank 1 lost contact with another rank: did one die, or run")
    problem = _problem_of(RuntimeError("Trying to backward a second time.\nframe #0"), 1, "Kept.")
    assert type(problem) is MeasureError
    assert str(problem) == "rank 1: RuntimeError: Trying to backward a second time. Kept."
    assert _problem_of(TypeError("ours"), 1, "Kept.") is None


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--time-budget-s", "inf"], "--time-budget-s"),
        (["--line-rate", "0 Gbit/s"], "--line-rate: '0 Gbit/s' is nothing to measure with"),
        (["DDPSIM_LINE_RATE=10 Gbits"], "--line-rate: "),  # as a testbed says it
        (["--memory-budget", "0 GiB"], "--memory-budget: '0 GiB' is nothing to measure with"),
        (["--memory-budget", "4 GIBB"], "--memory-budget: "),
    ],
)
def test_options_that_cannot_be_taken_are_named(
    options: list[str], said: str, tmp_path: Path
) -> None:
    variables = dict(option.split("=", 1) for option in options if option.startswith("DDPSIM_"))
    options = [option for option in options if not option.startswith("DDPSIM_")]
    command = [sys.executable, "-m", "calibrate", "measure", "--local", "2", *options]
    output = tmp_path / "record.json"
    done = subprocess.run(
        [*command, "-o", str(output)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()
