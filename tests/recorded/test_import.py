"""Files of a job are recognised, tell what stands in them, and make a scenario to start from."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs.nccl_log_writer import nccl_log
from outcome import Outcome

import ddpsim
from ddpsim.errors import DdpsimError, ImportFailedError
from ddpsim.recorded.learned import starting_point
from ddpsim.recorded.recognise import recognise

Cli = Callable[..., Outcome]
FAULTS = Path(__file__).parents[1] / "data" / "faults"

NANOGPT = "\n".join(
    f"iter {i}: loss 3.{i:04}, time {ms:.2f}ms, mfu 17.50%"
    for i, ms in enumerate((900.0, 250.0, 245.0, 246.0))
)
TITAN = "\n".join(
    f"[titan] 2025-02-01 10:00:{10 * i:02},500 - root - INFO - \x1b[31mstep: {10 * i + 1:2}  "
    f"\x1b[32mloss:  7.1234  \x1b[33mmemory: 26.06GiB(27.43%)  \x1b[34mtps: 5,820"
    for i in range(5)
)
LIGHTNING = "\r".join(
    f"Epoch 0:  {i}%|#    | {i}/1000 [00:{i:02}<04:17,  4.00it/s, v_num=0, loss=2.3]"
    for i in range(10, 20)
)
TQDM = "\r".join(f" {i}%|████▌     | {i}/100 [01:{i:02}<06:43,  1.25s/it]" for i in range(30, 40))
TRAINER = {
    "global_step": 100,
    "train_batch_size": 16,
    "log_history": [
        {"loss": 1.2, "step": 50},
        {"step": 100, "train_steps_per_second": 0.5, "train_samples_per_second": 64.0},
    ],
}
# as torch 2.13 returned it for a Linear(512, 512) on gloo, shortened
DDP = {
    "backend_name": "gloo",
    "bucket_sizes": "1050624",
    "rebuilt_bucket_sizes": "2048, 1048576",
    "world_size": 4,
    "bucket_cap_bytes": 1048576,
    "find_unused_parameters": 1,
    "gradient_as_bucket_view": 0,
    "broadcast_buffers": 1,
    "num_parameter_tensors": 2,
    "total_parameter_size_bytes": 1050624,
    "avg_forward_compute_time": 300368,
    "avg_backward_compute_time": 3872280,
    "avg_backward_comm_time": 3634611,
}
# as torch 2.13 dumped it, shortened
DUMP = {
    "version": "2.10",
    "pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1]"}},
    "comm_lib_version": "2.21.5",
    "entries": [
        {
            "profiling_name": name,
            "input_sizes": [[262656]],
            "input_dtypes": ["Float"],
            "state": "completed",
            "duration_ms": 1.5,
        }
        for name in ("nccl:all_reduce", "nccl:all_reduce", "nccl:broadcast")
    ],
}
DEBUG = """node-a:41:97 [0] NCCL INFO NCCL version 2.19.3+cuda12.3
node-a:41:97 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1 - Init START
node-b:42:98 [0] NCCL INFO comm 0x2 rank 1 nranks 2 cudaDev 0 busId 1 - Init START
node-a:41:97 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
node-b:42:98 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
"""
SAMPLES: dict[str, bytes] = {
    "nanogpt.log": NANOGPT.encode(),
    "titan.log": TITAN.encode(),
    "lightning.log": LIGHTNING.encode(),
    "tqdm.log": TQDM.encode(),
    "trainer_state.json": json.dumps(TRAINER).encode(),
    "ddp.json": json.dumps(DDP).encode(),
    "ddp.txt": f"rank 0 said {DDP}\n".encode(),
    "fr.pkl": pickle.dumps(DUMP),
    "fr.json": json.dumps(DUMP).encode(),
    "nccl.log": DEBUG.encode(),
    "all_reduce.txt": nccl_log(root=True, gpus=8, times={2**20: 100.0, 2**22: 300.0}).encode(),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, content in SAMPLES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "step_s"),
    [
        ("nanogpt.log", "step lines of nanoGPT", 0.2455),
        ("titan.log", "step lines of torchtitan", 1.0),
        ("lightning.log", "step lines of Lightning", 0.25),
        ("tqdm.log", "step lines of tqdm (accelerate, transformers' Trainer)", 1.25),
        ("trainer_state.json", "trainer_state.json of transformers", 2.0),
        ("ddp.json", "DDP's logging data", None),
        ("ddp.txt", "DDP's logging data", None),
        ("fr.pkl", "dump of PyTorch's flight recorder", None),
        ("fr.json", "dump of PyTorch's flight recorder", None),
        ("nccl.log", "log of NCCL_DEBUG=INFO", None),
        ("all_reduce.txt", "nccl-tests log", None),
    ],
)
def test_a_file_is_recognised(files: Path, name: str, kind: str, step_s: float | None) -> None:
    (found,) = recognise(files / name)
    assert found.kind == kind
    assert found.step_s == (None if step_s is None else pytest.approx(step_s))
    assert found.facts


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_each_file_alone_makes_a_scenario(files: Path, name: str) -> None:
    start = starting_point(recognise(files / name))
    scenario = ddpsim.load_scenario(start.document)
    assert scenario.cluster.world_size >= 1
    assert start.assumed


def test_what_files_tell_is_in_the_scenario(files: Path) -> None:
    def told(*names: str) -> dict[str, Any]:
        return starting_point([e for name in names for e in recognise(files / name)]).document

    assert told("ddp.json")["ddp"] == {
        "backend": "gloo",
        "bucket_cap_mb": 1.0,
        "find_unused_parameters": True,
    }
    assert told("fr.pkl")["cluster"]["nccl"] == "2.21.5"
    assert told("fr.pkl")["cluster"]["gpus_per_node"] == 2
    assert told("trainer_state.json")["workload"]["batch_per_rank"] == 16
    assert told("nanogpt.log", "nccl.log") == {
        "schema": "ddpsim/1",
        "workload": {"model": "gpt2", "batch_per_rank": 32, "optimizer": {"name": "adamw"}},
        "cluster": {
            "nccl": "2.19.3",
            "nodes": 2,
            "gpus_per_node": 1,
            "nccl_env": {"NCCL_IB_DISABLE": "1"},
            "device": "a100-sxm-80gb",
        },
    }


def test_a_zipped_log_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(NANOGPT.encode()))
    assert recognise(tmp_path / "a.log.gz")[0].kind == "step lines of nanoGPT"


def test_a_log_of_two_kinds_tells_both(files: Path) -> None:
    (files / "train.log").write_text(DEBUG + NANOGPT)
    kinds = [each.kind for each in recognise(files / "train.log")]
    assert kinds == ["log of NCCL_DEBUG=INFO", "step lines of nanoGPT"]


def test_a_log_of_one_rank_tells_how_many_there_are(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    lines = ("comm 0x1 rank 0 nranks 16 cudaDev 0", "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM")
    log.write_text("\n".join(f"node:41:97 [0] NCCL INFO {line}" for line in lines))
    start = starting_point(recognise(log))
    assert (start.document["cluster"]["nodes"], start.document["cluster"]["gpus_per_node"]) == (
        2,
        8,
    )
    assert "2 x 8 ranks: not all ranks' lines are there" in start.assumed[0]


def test_the_command_writes_a_scenario(
    files: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    asked = ("import", "nanogpt.log", "nccl.log", "-o", "job/scenario.yaml")
    assert "there is no folder job" in cli(*asked).err
    Path("job").mkdir()
    done = cli(*asked)
    assert (done.code, done.err) == (0, "")
    diagnose = "ddpsim diagnose job/scenario.yaml --measured '245 ms' --nccl-log nccl.log"
    assert diagnose in " ".join(done.out.split())
    assert ddpsim.load_scenario("job/scenario.yaml").cluster.nodes == 2
    written = Path("job/scenario.yaml").read_text()
    assert "# assumed: the device" in written
    assert "# assumed: the optimizer: adamw stands for yours" in written
    again = cli(*asked)
    assert again.code == 2
    assert "job/scenario.yaml exists already; name another file" in again.err
    assert "ddpsim import fr.pkl -o scenario.yaml" in cli("import", "fr.pkl").out
    alone = cli("import", "nccl.log", "-o", "alone.yaml").out
    assert "ddpsim diagnose alone.yaml --measured 'STEP TIME' --nccl-log nccl.log" in alone


def test_what_is_not_known_is_one_clear_error(files: Path, cli: Cli) -> None:
    (files / "notes.txt").write_text("step 3 took a while\n")
    done = cli("import", str(files / "notes.txt"))
    assert done.code == 1
    assert "notes.txt: is none of what can be imported: a log of NCCL_DEBUG=INFO" in done.err
    (files / "begun.txt").write_text("# nThread 1 nGpus 1 minBytes 8 maxBytes 1024\n#\n")
    done = cli("import", str(files / "begun.txt"))
    assert "begun.txt: holds no result row; wanted nccl-tests' table" in done.err


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_a_log_of_shards_names_its_own_key(tmp_path: Path, operation: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text(nccl_log(root=True, operation=operation))
    start = starting_point(recognise(path))
    cluster = ddpsim.load_scenario(start.document).cluster
    assert getattr(cluster, operation).path == path
    assert cluster.all_reduce is None


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


def test_a_pickle_runs_no_code(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "fr.pkl").write_bytes(pickle.dumps({"version": "2", "entries": [Evil()]}))
    with pytest.raises(ImportFailedError, match="plain data alone is read"):
        recognise(files / "fr.pkl")
    assert capsys.readouterr().out == ""


_REPLACED = (b"1e999", b"-1", b"99999999999999999999", b"null", b"[]", b"nan", b"\x00", b"")


# inputs of which each ended in an answer or an error of its own: Atheris, from the samples above
KEPT = [
    each.encode("latin-1")
    for each in json.loads(
        gzip.decompress((Path(__file__).parents[1] / "data" / "fuzzed-import.json.gz").read_bytes())
    )
]


def answered(content: bytes, folder: Path) -> None:
    """It is an answer within reason, or one error."""
    (folder / "file").write_bytes(content)
    try:
        learned = recognise(folder / "file")
        ddpsim.load_scenario(starting_point(learned).document)
    except DdpsimError:
        return
    assert all(each.step_s is None or 0 < each.step_s < 3.6e6 for each in learned)


def test_what_a_fuzzer_kept_ends_in_an_answer_or_one_error(tmp_path: Path) -> None:
    assert len(KEPT) > 100
    for each in KEPT:
        answered(each, tmp_path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_broken_files_end_in_an_answer_or_one_error(tmp_path: Path, data: st.DataObject) -> None:
    """Cut off, with parts swapped, or with a piece in place of another."""
    content = data.draw(st.sampled_from(KEPT))
    at, to = sorted(data.draw(st.lists(st.integers(0, len(content)), min_size=2, max_size=2)))
    middle = data.draw(st.sampled_from((content[at:to][::-1], *_REPLACED)))
    rest = content[to:] if data.draw(st.booleans()) else b""
    answered(content[:at] + middle + rest, tmp_path)


# what a coverage-guided fuzzer found in half an hour
FOUND: dict[str, bytes] = {
    "a step of 1e300 s": b'{"log_history": [{"train_steps_per_second": 1e-300}]}',
    "a size in iB": b"|payload|busbw|algbw|\n|-|-|-|\n|1 iB| 1.0GBps|  1.0GBps|\n",
}


@pytest.mark.parametrize("name", FOUND)
def test_what_fuzzing_found_ends_in_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "found").write_bytes(FOUND[name])
    with pytest.raises(DdpsimError):
        recognise(tmp_path / "found")
