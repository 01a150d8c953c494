"""The command line as a user meets it: every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from logs.nccl_log_writer import nccl_log
from outcome import Outcome

from ddpsim.glossary import TERMS
from ddpsim.scenario.starters import preset_text, presets

GOOD = str(Path(__file__).parent.parent / "invalid" / "files" / "good.yaml")
SCENARIOS = sorted((Path(__file__).parent.parent.parent / "scenarios").glob("*.yaml"))
OWN_MODEL = next(path for path in SCENARIOS if path.stem == "own-model")
Cli = Callable[..., Outcome]


def _finite(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


def test_calibrate_arrives_through_its_entry_point(cli: Cli) -> None:
    done = cli("calibrate", "fit", "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage: ddpsim calibrate fit [OPTIONS]")


@pytest.mark.parametrize("group", [[], ["testbed"], ["import"]], ids=str)
def test_calibrates_commands_are_told_in_full(cli: Cli, group: list[str]) -> None:
    listed = cli("calibrate", *group, "--help").out.split("Commands:\n", 1)[1]
    assert all(line.endswith(".") and "..." not in line for line in listed.splitlines())


@pytest.mark.parametrize(
    ("missing", "asked"),
    [("torch", ["profile", "nowhere:nothing"])],
)
def test_a_library_that_calibrate_lacks_is_named(
    tmp_path: Path, missing: str, asked: list[str]
) -> None:
    """As after a plain `pip install ddpsim`: one line, and no traceback."""
    rows = [f"{2**k},{2**k / 1e3 + 20},2,4" for k in range(10, 24)]
    (tmp_path / "log.csv").write_text("\n".join(["size_bytes,time_us,nodes,gpus_per_node", *rows]))
    code = f"import sys; sys.modules[{missing!r}] = None; from ddpsim.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "calibrate", *asked, "-o", "out.json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"ddpsim: {missing} is not installed, and calibrate needs it: pip install {missing}, or "
        "pip install 'ddpsim[calibrate]' for all that it needs\n"
    )
    assert not (tmp_path / "out.json").exists()


def test_a_library_that_the_report_lacks_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.modules['jinja2'] = None; from ddpsim.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", GOOD, "-o", str(tmp_path / "step.html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "ddpsim: jinja2 is not installed, and report needs it: pip install jinja2, or "
        "pip install 'ddpsim[report]' for all that it needs\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log, output = tmp_path / "log.csv", tmp_path / "file" / "cluster.json"
    rows = [f"{2**k},{2**k / 1e3 + 20},2,4" for k in range(10, 24)]
    log.write_text("\n".join(["size_bytes,time_us,nodes,gpus_per_node", *rows]))
    done = cli("calibrate", "import", "nccl-tests", str(log), "-o", str(output))
    assert (done.code, done.out) == (1, "")
    assert done.err == f"ddpsim: {tmp_path / 'file'}: File exists\n"


def test_a_row_that_an_import_leaves_out_is_told(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    text = nccl_log(root=True, nodes=2, gpus=4, times={2**k: 2**k / 1e3 + 20 for k in range(24)})
    log.write_text(text[: text.index(f"  {2**23} ") + 40])
    output = str(tmp_path / "cluster.json")
    done = cli("calibrate", "import", "nccl-tests", str(log), "-o", output)
    assert done.code == 0
    assert "WARNING log.txt: 1 row is left out, broken or cut off: line 59\n" in done.out


def test_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"ddpsim {version('ddpsim')}\n", "")


@pytest.fixture(scope="module")
def schema() -> str:
    """What `ddpsim schema` prints."""
    return _process("schema", stdout=subprocess.PIPE).stdout


def test_schema(cli: Cli, schema: str) -> None:
    assert cli("schema").out == schema
    schema = _finite(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == "urn:ddpsim:scenario:1"
    assert set(schema["properties"]) == {
        *("schema", "name", "workload", "ddp", "cluster", "run", "reliability")
    }
    assert set(schema["required"]) == {"schema", "workload", "cluster"}
    assert schema["additionalProperties"] is False
    for name, model in schema["$defs"].items():
        for key, field in model.get("properties", {}).items():
            assert field.get("description"), f"{name}.{key}"


def test_init_lists_every_scenario(cli: Cli) -> None:
    lines = cli("init").out.splitlines()
    assert [line.split()[0] for line in lines] == [path.stem for path in SCENARIOS]
    assert all(len(line.split()) > 4 for line in lines)
    assert {line.split()[0] for line in lines if line.split()[1] == "+"} == {
        "four-layers",
        "gloo-cpu",
        "measured-device",
        "own-model",
        "resnet50-nccl-log",
    }


@pytest.mark.parametrize("name", presets())
def test_a_preset_stands_alone(
    cli: Cli, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written = cli("init", name, "--into", "folder")
    assert (written.code, written.err) == (0, "made the folder folder\n")
    assert all(Path(line).is_file() for line in written.out.splitlines())
    scenario = Path("folder") / f"{name}.yaml"
    outcome = cli("check", str(scenario))
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"{scenario}: ok, ")
    printed = cli("init", name)
    for_editors, _, rest = scenario.read_text("utf-8").partition("\n")
    assert for_editors == "# yaml-language-server: $schema=ddpsim.schema.json"
    assert (scenario.parent / "ddpsim.schema.json").read_text("utf-8") == schema
    assert printed.out == rest
    needs_files = len(written.out.splitlines()) > 2
    assert (printed.code, f"init {name} --into FOLDER" in printed.err) == (0, needs_files)


def test_init_overwrites_nothing(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "gloo-cpu.yaml").write_text("mine", encoding="utf-8")
    outcome = cli("init", "gloo-cpu", "--into", str(tmp_path))
    assert (outcome.code, outcome.out) == (2, "")
    assert "gloo-cpu.yaml exists already; nothing was written" in outcome.err
    assert len(list(tmp_path.iterdir())) == 1
    assert (tmp_path / "gloo-cpu.yaml").read_text("utf-8") == "mine"


def test_init_of_an_unknown_preset(cli: Cli) -> None:
    outcome = cli("init", "resnet50-2x8")
    assert (outcome.code, outcome.out) == (2, "")
    assert "resnet50-2x8-25gbit" in outcome.err


def test_explain_lists_every_term_and_explains_it(cli: Cli) -> None:
    listed = cli("explain").out
    assert " ".join(listed.split()) == ", ".join(sorted(TERMS))
    assert max(map(len, listed.splitlines())) <= 100
    several = [term for term in TERMS if " " in term]
    for term in ("bucket", *several[:5]):
        assert cli("explain", *term.split()) == (0, TERMS[term] + "\n", "")


def test_explain_of_an_unknown_term(cli: Cli) -> None:
    outcome = cli("explain", "bussbw")
    assert (outcome.code, outcome.out) == (2, "")
    assert "Did you mean 'busbw'?" in outcome.err


@pytest.mark.parametrize(("columns", "widest"), [(60, 80), (90, 90), (200, 100)])
@pytest.mark.parametrize("command", ["run", "run --measured 95ms", "sweep --set cluster.nodes=1,2"])
def test_an_answer_is_as_wide_as_the_screen(
    cli: Cli, command: str, columns: int, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    name, *options = command.split()
    monkeypatch.chdir(SCENARIOS[0].parent)  # the next command names the file as it was given
    lines = cli(name, "resnet50-2x8-25gbit.yaml", *options).out.splitlines()
    assert widest - 20 < max(len(line) for line in lines if "--set" not in line) <= widest


def test_run_prints_text(cli: Cli) -> None:
    outcome = cli("run", GOOD)
    assert (outcome.code, outcome.err) == (0, "")
    assert "16 ranks (2 x 8)" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= max(100, len(GOOD) + 50)


def test_names_are_cut_and_cannot_move_the_cursor(cli: Cli) -> None:
    first = cli("run", GOOD, "--set", f"name={'x' * 200}").out.splitlines()[0]
    assert first == f"{'x' * 66} ...   16 ranks (2 x 8)"
    first = cli("run", GOOD, "--set", 'name="a\\e[31m b\\nc"').out.splitlines()[0]
    assert first.split(", ")[0] == "a\\x1b[31m b c   16 ranks (2 x 8)"


def test_one_rank_is_singular(cli: Cli) -> None:
    alone = ("--set", "cluster.nodes=1", "--set", "cluster.gpus_per_node=1")
    assert cli("check", GOOD, *alone).out == f"{GOOD}: ok, 1 rank (1 x 1)\n"
    assert cli("run", GOOD, *alone).out.splitlines()[0].split(", ")[0].endswith("   1 rank (1 x 1)")


def test_lines_stay_within_100_columns_with_late_peers(cli: Cli) -> None:
    lines = cli("run", GOOD, "--set", "run.jitter={sigma: 0.0234}").out.splitlines()
    assert any("waiting for late peers" in line for line in lines)
    assert max(len(line) for line in lines if GOOD not in line) <= 100


def _process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddpsim", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


def test_output_in_an_encoding_that_lacks_characters() -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = _process("run", GOOD, "--set", "name=µ", stdout=subprocess.PIPE, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("\\xb5   16 ranks")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [("check", GOOD), ("schema",)], ids=["short", "long"])
def test_output_that_cannot_be_written(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = _process(*arguments, stdout=full)
    says = "ddpsim: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, says)


def test_a_reader_that_has_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = _process("check", GOOD, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_run_prints_json(cli: Cli) -> None:
    outcome = cli("run", GOOD, "--json", "--set", "cluster.nodes=1")
    result = _finite(outcome.out)
    assert (outcome.code, outcome.err) == (0, "")
    assert result["schema"] == "ddpsim.result/1"
    assert result["world_size"] == 8
    assert result["iteration_time_s"]["mean"] > 0
    assert "verdict" not in result


def test_both_engines_agree(cli: Cli) -> None:
    auto, reference = (
        _finite(cli("run", GOOD, "--json", "--engine", engine).out)
        for engine in ("auto", "reference")
    )
    assert auto["iteration_time_s"] == reference["iteration_time_s"]


@pytest.mark.parametrize(("factor", "normal"), [(1.0, True), (3.0, False), (0.3, False)])
def test_measured_prints_a_verdict(cli: Cli, *, factor: float, normal: bool) -> None:
    one_node = (GOOD, "--set", "cluster.nodes=1")
    predicted_s = _finite(cli("run", *one_node, "--json").out)["iteration_time_s"]["mean"]
    measured = f"{factor * predicted_s!r} s"
    verdict = _finite(cli("run", *one_node, "--json", "--measured", measured).out)["verdict"]
    assert verdict["normal"] is normal
    assert verdict["difference"] == pytest.approx(factor - 1, abs=1e-9)
    assert bool(verdict["explanations"]) is not normal
    shown = cli("run", *one_node, "--measured", measured).out
    line = next(line for line in shown.splitlines() if line.startswith("measured"))
    assert ("not normal" in line) is not normal


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--measured", "520"], "520 has no unit"),
        (["--measured", "0 s"], "a step takes longer than 0 s"),
        (["--measured", "-1 ms"], "is negative"),
        (["--engine", "fast"], "neither auto nor reference"),
        (["--jsn"], "--jsn"),
    ],
)
def test_wrong_options(cli: Cli, arguments: list[str], says: str) -> None:
    outcome = cli("run", GOOD, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert says in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "gradient_as_bucket_veiw"], "Did you mean 'gradient_as_bucket_view'?"),
        (["explain", "zero", "1"], "Did you mean 'zero1'?"),
        (["collective", "scenario.yaml"], "write --cluster scenario.yaml"),
        (["collective", "dgx-h100"], "write --machine dgx-h100"),
        (["trace", GOOD, "-o", "new/step.html"], "a trace is a folder of several; name a folder"),
        (["list", "strategies"], "ddpsim explain strategies tells of it"),
        (["list", "comm_hook"], "ddpsim explain comm_hook tells of it"),
    ],
)
def test_a_near_miss_is_told_what_to_write(cli: Cli, arguments: list[str], says: str) -> None:
    outcome = cli(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert says in outcome.err
    assert not Path("new").exists()


@pytest.mark.parametrize("command", ["run", "check", "tune"])
def test_a_measured_step_is_not_taken_for_another_batch(cli: Cli, command: str) -> None:
    file = str(OWN_MODEL)
    done = cli(command, file, "--set", "workload.batch_per_rank=512")
    assert done.code == 2
    assert "workload.batch_per_rank: workload.step_time was measured with another" in done.err
    both = ("--set", "workload.batch_per_rank=512", "--set", "workload.step_time=20 ms")
    assert cli("run", file, *both).code == 0


def test_a_profile_is_not_taken_for_another_optimizer_or_precision(
    cli: Callable[..., Outcome],
) -> None:
    """As sweep and compare say of it."""
    for setting in ("workload.optimizer.name=adam", "workload.precision=bf16"):
        done = cli("run", "scenarios/gloo-cpu.yaml", "--set", setting)
        assert done.code == 2
        assert "workload.profile was measured with another" in done.err


def test_a_scenario_may_come_from_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "resnet50-2x8-25gbit"
    by_file = cli("run", str(next(path for path in SCENARIOS if path.stem == name)), "--json")

    def piped(text: str, *arguments: str) -> Outcome:
        given = TextIOWrapper(BytesIO(text.encode("utf-8")))
        monkeypatch.setattr(sys, "stdin", given)
        return cli(*arguments)

    assert piped(preset_text(name), "run", "-", "--json") == by_file
    wrong = piped("schema: ddpsim/1\nworkload: {modl: resnet50}\n", "run", "-")
    assert wrong.code == 2
    assert "-:2:12  workload.modl: unknown key. Did you mean 'model'?" in wrong.err
    assert piped("", "check", "-").err.startswith("-: the file is empty")
