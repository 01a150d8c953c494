"""What a user may name instead of a file, and streams that the shell has closed."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from outcome import Outcome

from ddpsim.files import json_of, read_given
from ddpsim.importers import text
from ddpsim.importers.kineto.events import JsonStream
from ddpsim.scenario.starters import preset_text

Cli = Callable[..., Outcome]
SCENARIO = preset_text("resnet50-8xa100")
SAVE = "it is a pipe; save what it gives to a file and name that"


@pytest.mark.parametrize("command", ["import", "run", "check"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, cli: Cli, command: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = cli(command, str(pipe))
    assert done.code > 0
    assert SAVE in done.err


def test_a_folder_that_holds_a_pipe_is_refused(tmp_path: Path, cli: Cli) -> None:
    os.mkfifo(tmp_path / "rank0.json")
    done = cli("import", str(tmp_path))
    assert (done.code, done.err.endswith(f"rank0.json: cannot be read: {SAVE}\n")) == (1, True)


@pytest.mark.parametrize("command", ["import", "run"])
def test_a_device_has_no_end_and_is_not_read(cli: Cli, command: str) -> None:
    assert "/dev/zero" in (done := cli(command, "/dev/zero")).err
    assert "it is no regular file" in done.err


def test_files_that_scenarios_and_grids_name_are_opened_alike(tmp_path: Path, cli: Cli) -> None:
    os.mkfifo(tmp_path / "axis.csv")
    (tmp_path / "a.yaml").write_text(SCENARIO)
    done = cli("sweep", str(tmp_path / "a.yaml"), "--axis", str(tmp_path / "axis.csv"))
    assert SAVE in done.err
    done = cli("check", str(tmp_path / "a.yaml"), "--set", "cluster.all_reduce=/dev/zero")
    assert "'/dev/zero' is a pipe or a device; name a file" in done.err


def test_deep_json_is_one_error_wherever_it_is_named(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "a.yaml").write_text(SCENARIO)
    for key in ("cluster.device", "workload.profile", "cluster.profile", "workload.trace"):
        done = cli("run", str(tmp_path / "a.yaml"), "--set", f"{key}={tmp_path}/deep.json")
        assert done.code == 2, key
        assert "deep.json" in done.err


@pytest.mark.parametrize(("depth", "is_read"), [(100, True), (101, False)])
def test_how_deep_json_may_be_does_not_depend_on_python(*, depth: int, is_read: bool) -> None:
    text = "[" * depth + "1" + "]" * depth
    if is_read:
        assert str(json_of(text)) == text
        return
    with pytest.raises(ValueError, match="nested too deeply"):
        json_of(text)


def shell(tmp_path: Path, line: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "a.yaml").write_text(SCENARIO)
    ddpsim = f"{sys.executable} -m ddpsim"
    return subprocess.run(
        ["bash", "-c", line.format(ddpsim=ddpsim)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_closed_streams_are_no_tracebacks(tmp_path: Path) -> None:
    done = shell(tmp_path, "{ddpsim} run a.yaml >&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = shell(tmp_path, "{ddpsim} run - <&-")
    assert done.returncode == 2
    assert "the standard input is closed; name a file" in done.stderr


def test_what_the_shell_pipes_is_a_scenario(tmp_path: Path) -> None:
    done = shell(tmp_path, "{ddpsim} run <(cat a.yaml)")
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_read_beyond_its_bound(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 100)
    with pytest.raises(OSError, match="it is larger than 0 MiB"):
        read_given(tmp_path / "large", 99)
    assert len(read_given(tmp_path / "large", 100)) == 100


def test_a_document_with_too_many_objects_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpsim.files._MOST_CONTAINERS", 10)
    assert len(json_of(f"[{','.join(['{}'] * 9)}]")) == 9
    with pytest.raises(ValueError, match="more than 10 lists and objects"):
        json_of("[" * 11)


def test_what_is_kept_of_a_log_is_bounded(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text.in_memory, "__defaults__", (10_000,))
    (tmp_path / "a.log").write_text("\r".join(f"{i}/9 [00:01<00:01, 1.00s/it]" for i in range(99)))
    assert "GB of memory can hold; give fewer steps" in cli("import", str(tmp_path / "a.log")).err


def test_tables_have_so_many_rows(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_MOST_ROWS", 9)
    monkeypatch.setattr("ddpsim.planning.sweeps.grid.MOST_POINTS", 9)
    (tmp_path / "a.csv").write_text("size_bytes,time_us,nodes,gpus_per_node\n" + 10 * "1,1,1,2\n")
    (tmp_path / "a.yaml").write_text(SCENARIO)
    assert "holds more than 9 rows" in cli("import", str(tmp_path / "a.csv")).err
    sweep = cli("sweep", str(tmp_path / "a.yaml"), "--axis", str(tmp_path / "a.csv"))
    assert "a.csv: holds more than 9 rows" in sweep.err


@pytest.mark.parametrize("unit", [b"{},", b"[],"])
def test_a_packed_trace_of_nothing_is_read_and_forgotten(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, unit: bytes
) -> None:
    monkeypatch.setattr("ddpsim.importers.kineto.events._MOST_ITEMS", 1000)
    head = b'{"schemaVersion": 1, "traceEvents": ['
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(head + 2000 * unit + b"{}]}"))
    done = cli("import", str(tmp_path / "a.json.gz"))
    assert "a list holds more than 1,000 items; record fewer steps" in done.err


def test_a_stream_holds_one_chunk_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [' + ", ".join(f'{{"b": [{i}, {i}.5]}}' for i in range(100_000)) + "]}")
    with path.open() as file:
        stream, longest, total = JsonStream(file, 2**30), 0, 0
        assert next(stream.members()) == "a"
        for item in stream.items():
            longest, total = max(longest, len(stream._held)), total + item["b"][0]
    assert total == sum(range(100_000))
    assert longest < 2**20 + 100 < path.stat().st_size


def test_a_pickle_makes_no_room_for_what_it_does_not_hold(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "a.pkl").write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")
    assert "is a pickle, but no dump" in cli("import", str(tmp_path / "a.pkl")).err
