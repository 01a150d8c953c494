"""Models that cannot be profiled, profiles that cannot be written, and what is said of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

import torch
import typer
from measured.measuring import profiled

from calibrate.cli import profile as command
from calibrate.files import check_writable
from calibrate.measure.errors import MeasureError
from calibrate.measure.model.profile import ProfileOptions, profile, profile_alone, write_profile
from calibrate.measure.model.training import Training
from ddpsim.errors import DdpsimError

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.mark.parametrize(
    ("code", "options", "says"),
    [
        (
            "import sys\ndef make(batch=8): sys.exit(0)",
            ["--local", "2"],
            "own:make (own.py, line 2): SystemExit: 0",
        ),
        (
            "import argparse\nargparse.ArgumentParser().parse_args()",
            [],
            "own ended the program while it was imported (exit code 2): put what only a script",
        ),
        (
            "raise AssertionError('not to be called')",
            ["--scale", "a100-sxm-80gb:h100-sxm-80gb"],
            "--scale is from a100-sxm-80gb, but this is measured on cpu: name that one",
        ),
    ],
)
def test_a_profile_is_never_another_ones(
    code: str,
    options: list[str],
    says: str,
    tmp_path: Path,
) -> None:
    """A function that ends the program measured nothing: no file that lies there is its profile."""
    (tmp_path / "own.py").write_text(code)
    old = tmp_path / "old.json"
    other = json.dumps({"schema": "ddpsim.model/3", "name": "another model"})
    old.write_text(other)
    command = [sys.executable, "-m", "calibrate", "profile", "own:make", *options]
    done = subprocess.run(
        [*command, "-o", str(old)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert says in " ".join(done.stderr.split())
    assert "use it as" not in done.stdout
    assert old.read_text() == other


def test_what_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(DdpsimError, match=r"x\.json cannot be written: "):
        check_writable(taken / "x.json")
    check_writable(tmp_path / "new" / "x.json")
    check_writable(Path("/dev/null"))
    with pytest.raises(DdpsimError, match="cannot be written"):
        profile_alone(ProfileOptions(model="no_such:function", output=taken / "x.json"))


def test_a_profile_that_cannot_be_written_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    taken = tmp_path / "file"
    taken.write_text("")
    document = profiled("two_layers")
    with pytest.raises(MeasureError) as told:
        write_profile(document, taken / "x.json")
    (where,) = re.findall(r"It is whole in (\S+): move it", str(told.value))
    assert json.loads(Path(where).read_text()) == document


def test_warnings_of_a_profile_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "profile.json"
    command("measure_helpers:branched", output, batch=8, iterations=3, device="cpu")
    assert output.exists()
    assert capsys.readouterr().err.startswith("warning   DDP's own work is not in this profile")


def test_a_batch_that_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(_training: Training) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Training, "forward", out_of_memory)
    said = "batch 9 of measure_helpers:two_layers does not fit into the memory of cpu: give a small"
    with pytest.raises(MeasureError, match=said):
        profiled("two_layers", batch=9)


def test_a_gpu_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(MeasureError, match="cuda:2: this machine has 2 CUDA devices, counted"):
        profiled("two_layers", device="cuda:2")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("branched", {}, "measure_helpers:branched has no default batch: give --batch"),
        ("two_layers", {"device": "abacus"}, "'abacus' is no device: wanted auto, cpu or cuda:N"),
        ("missing", {}, "measure_helpers has no function 'missing'"),
        (
            "without_batch",
            {},
            (
                "measure_helpers:without_batch takes no argument batch: "
                "write def without_batch(batch: int)"
            ),
        ),
        (
            "half_a_model",
            {},
            "measure_helpers:half_a_model must return (model, inputs, loss), not a tuple of 2",
        ),
        (
            "not_a_model",
            {},
            (
                "measure_helpers:not_a_model must return (model, inputs, loss): "
                "a torch.nn.Module, a tensor, tuple or dict, and a function; "
                "got str, Tensor, builtin_function_or_method"
            ),
        ),
        (
            "constant_loss",
            {},
            "no parameter ever gets a gradient: does the loss depend on the model?",
        ),
        (
            "evaluating",
            {},
            (
                "the model of measure_helpers:evaluating is in evaluation mode, and training is "
                "measured: call model.train() before it is returned"
            ),
        ),
        (
            "without_a_number",
            {},
            (
                "the loss of measure_helpers:without_a_number is nan: arithmetic on such numbers "
                "may take another time than training does; give inputs and weights that train"
            ),
        ),
        (
            "dropping",
            {},
            (
                "layers.1.weight got a gradient in 3 of 4 iterations, and a profile is of steps "
                "that are alike: let the same layers take part in each (none dropped at random or "
                "by turns), or profile each path of the model on its own"
            ),
        ),
        (
            "by_turns",
            {},
            (
                "layers.0.weight got a gradient in 3 of 4 iterations, and a profile is of steps "
                "that are alike: let the same layers take part in each (none dropped at random or "
                "by turns), or profile each path of the model on its own"
            ),
        ),
        (
            "complex_weights",
            {},
            "weight is complex64: complex parameters, which DDP takes, are not modelled here",
        ),
        (
            "in_ddp",
            {},
            (
                "the model of measure_helpers:in_ddp is wrapped in DistributedDataParallel, and is "
                "wrapped here again: return the bare module"
            ),
        ),
        (
            "of_sparse_gradients",
            {"optimizer": "adam"},
            (
                "--optimizer adam cannot step the parameters of measure_helpers:of_sparse_gradients"
                " (RuntimeError: Adam does not support sparse gradients, please consider "
                "SparseAdam instead): give another"
            ),
        ),
    ],
)
def test_a_function_that_cannot_be_profiled(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(MeasureError) as raised:
        profiled(name, **options)
    assert str(raised.value) == said


def test_modules_that_cannot_be_imported() -> None:
    with pytest.raises(MeasureError, match=r"^nowhere cannot be imported: ModuleNotFoundError: "):
        profile(ProfileOptions(model="nowhere:model", output=Path("x.json"), batch=1))
    with pytest.raises(MeasureError, match=r"^'model' names no function: write MODULE:FUNCTION$"):
        profile(ProfileOptions(model="model", output=Path("x.json"), batch=1))


def test_a_model_that_fails_later_is_told_with_its_place() -> None:
    with pytest.raises(MeasureError, match=r"^measure_helpers\.py, line \d+: RuntimeError: flaky$"):
        profiled("fails_later", iterations=20)


def test_ctrl_c_in_a_profile_of_one_device_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_given: object, **_options: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("calibrate.measure.model.samples.iterate", stop)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(typer.Exit) as ended:
        command("measure_helpers:two_layers", tmp_path / "model.json")
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "stopped. Nothing was kept\n"
    assert list(tmp_path.iterdir()) == []


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(MeasureError, match="--threads 4096: this machine has"):
        profiled("two_layers", threads=4096)
