"""Logs of training tell training's own step, or say what they lack: never another step."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs.training_logs import LOGS, bar, bars
from outcome import Outcome

from ddpsim.errors import ImportFailedError
from ddpsim.importers.training.bars import StepLines, TooLittle
from ddpsim.importers.training.step_lines import step_lines
from ddpsim.recorded.learned import starting_point
from ddpsim.recorded.recognise import recognise
from ddpsim.result.learned import Learned

Cli = Callable[..., Outcome]
GOLDEN = Path(__file__).parents[1] / "golden" / "import-training-logs.txt"
REFERENCE = os.environ.get("DDPSIM_REFERENCE_DATA")
NEAR = 1.06  # of steps that are read from a part of a log

# what launchers and loggers print before a line of rank 0, and of another one
PREFIXES = (
    *(("[rank0]: ", "[rank1]: "), ("[default0]:", "[default1]:"), ("0: ", "1: ")),
    *(("[1,0]<stdout>:", "[1,1]<stdout>:"), ("trainer-0  | ", "trainer-1  | ")),
    *(("train-job-x7f2k-0 ", "train-job-x7f2k-1 "), ("node1: ", "node2: ")),
    ("[pod/eval-0/pytorch] ", "[pod/eval-1/pytorch] "),
    ("(RayTrainWorker pid=41, ip=10.0.0.1) ", "(RayTrainWorker pid=42, ip=10.0.0.2) "),
    ("2026-03-14T09:00:10.123456789Z [rank0]: ", "2026-03-14T09:00:11.123456789Z [rank1]: "),
    ("\x1b[36m[rank 0]\x1b[0m ", "\x1b[36m[rank 1]\x1b[0m "),
)


def told_by(text: str) -> list[StepLines | TooLittle]:
    return step_lines("a.log", StringIO(text, newline=""))


def steps(text: str) -> dict[str, float]:
    """By program, what a text tells."""
    told = [each for each in told_by(text) if isinstance(each, StepLines)]
    return {each.program.partition(" (")[0]: each.step_s for each in told}


def refusal(text: str) -> str:
    """What a text lacks that tells no step."""
    (told,) = told_by(text)
    assert isinstance(told, TooLittle), told
    return told.lacks


@pytest.mark.parametrize("program", LOGS)
def test_a_log_tells_its_step(program: str) -> None:
    text, step_s, facts = LOGS[program]
    (told,) = told_by(text)
    assert isinstance(told, StepLines), told
    assert told.program.startswith(program)
    assert told.step_s == pytest.approx(step_s, rel=2e-3)
    assert set(facts) <= set(told.facts)


def test_golden(
    tmp_path: Path,
    cli: Cli,
    golden: Callable[[str, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = []
    for program, (text, *_) in LOGS.items():
        names.append(f"{re.sub('[^a-z0-9]', '', program.lower())}.log")
        Path(names[-1]).write_text(text, encoding="utf-8")
    golden(cli("import", *names).out, GOLDEN)


@pytest.mark.skipif(REFERENCE is None, reason="DDPSIM_REFERENCE_DATA names no folder of logs")
@pytest.mark.parametrize(
    ("name", "step_s", "said"),
    [
        ("train-and-eval-bars", 2.0, "left out: bars 'Evaluating' of 200"),
        ("detectron2-time-and-data-time", 0.412, "of which 21.9 ms wait for data"),
        ("mmengine-train-and-val", 0.352, "left out: 1 line of evaluation"),
        ("megatron-iterations-and-timers", 0.505, "times from 498 ms to 512 ms"),
        ("megatron-iterations-and-timers", 0.505, "the gradients' all-reduce takes 52.3 ms"),
        ("deepspeed-timers", 0.6527, "a step takes 641 ms of forward and backward"),
        ("deepspeed-timers", 0.6527, "4 micro-batches a step, which takes 653 ms"),
        ("deepspeed-timers", 0.6527, "the gradients' all-reduce takes 48.8 ms"),
        ("transformers-trainer-dicts", 0.4, "evaluation took 10.0 s of 600 s"),
        ("litgpt-iter-time", 4 * 0.2507, "a micro-batch takes 251 ms"),
        ("litgpt-iter-time", 4 * 0.2507, "4 micro-batches a step"),
    ],
)
def test_a_log_of_the_reference_tells_what_it_should(name: str, step_s: float, said: str) -> None:
    (told,) = recognise(Path(REFERENCE or "") / "logs" / f"{name}.txt")
    assert told.step_s == pytest.approx(step_s, rel=2e-3)
    assert any(said in fact for fact in told.facts), told.facts


# --- bars ----------------------------------------------------------------------------------------

TRAIN, EVALUATION = (100, 200, 300), (50, 100, 200)


def interrupted(label: str = "", evaluation: str = "") -> str:
    """A bar within which evaluation draws another, as transformers' Trainer does."""
    return "\r".join(
        [
            *bars(label, range(400, 500, 10), 1500, 2.0),
            *bars(evaluation, EVALUATION, 200, 0.05),
            *bars(label, range(501, 1000, 50), 1500, 2.0),
            *bars(evaluation, EVALUATION, 200, 0.05),
            *bars(label, (1001, 1400, 1500), 1500, 2.0),
        ]
    )


def epochs(outer: str, inner: str) -> str:
    """A bar of epochs around one of steps in each."""
    return "\n".join(
        "\n".join([*bars(inner.format(i), TRAIN, 300, 2.0), bar(outer, i + 1, 10, 600.0)])
        for i in range(4)
    )


@pytest.mark.parametrize(
    ("text", "step_s"),
    [
        (interrupted(), 2.0),
        (interrupted("", "Evaluating"), 2.0),
        (epochs("Epochs", "Epoch {}"), 2.0),
        (epochs("Training", "Epoch {}"), 2.0),
        (epochs("", ""), 2.0),
        ("\n".join(bars("", (120, 130, 140), None, 2.0)), 2.0),
        ("\n".join(bars("train", TRAIN, None, 2.0) + bars("val", TRAIN, None, 0.05)), 2.0),
        (
            "\n".join(
                bars("Loading checkpoint shards", (1, 2, 4), 4, 1.2) + bars("", TRAIN, 300, 2)
            ),
            2,
        ),
        (  # a restart, which reaches fewer steps
            "\n".join(bars("Training", TRAIN, 900, 2.0) + bars("Training", (10, 50, 80), 900, 4.0)),
            2.0,
        ),
        (  # rich, as Lightning draws it
            "\n".join(
                f"Epoch 0/9  ━━━━━━╸━━━ {i}/1000 0:00:25 • 0:03:45 4.00it/s v_num: 0 loss: 2.1"
                for i in (100, 200, 300)
            ),
            0.25,
        ),
        (  # ranks on one terminal, some iterations apart
            "\n".join(bar("Training", i - (i % 3 == 0), 100, 2.0) for i in range(1, 100)),
            2.0,
        ),
        (
            "".join(bars("Training", TRAIN, 300, 2.0) + bars("Validation", EVALUATION, 200, 0.05)),
            2.0,
        ),
    ],
)
def test_bars_of_training_are_taken(text: str, step_s: float) -> None:
    (told,) = told_by(text)
    assert isinstance(told, StepLines), told
    assert told.step_s == pytest.approx(step_s)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "\n".join(bars("Evaluating", EVALUATION, 200, 0.05)),
            "needs bars of training; left out: bars",
        ),
        (bar("Training", 100, 300, 2.0), "1 bar of training; needs 2 more bars"),
        (
            "\n".join(2 * [*bars("", TRAIN, 300, 2.0), *bars("", EVALUATION, 200, 0.05)]),
            "which of these bars is of training is not clear: bars without a label of 300",
        ),
        (
            "\n".join(2 * [*bars("", TRAIN, 300, 2.0), *bars("", TRAIN, 300, 0.05)]),
            "passes of one bar differ as training and evaluation do",
        ),
        (
            "\n".join(bars("", (100, 110, 120), None, 2.0) + bars("", (20, 90, 900), None, 0.05)),
            "passes of one bar differ as training and evaluation do",
        ),
        (
            "\n".join(bars("Loading train set", TRAIN, 300, 0.01)),
            "left out: bars 'Loading train set' of 300 (10.0 ms each)",
        ),
        (
            "\n".join(bars("Epoch", (1, 2, 3), 10, 600.0)),
            "left out: bars 'Epoch' of 10 (600 s each)",
        ),
    ],
)
def test_bars_that_may_be_of_something_else_are_refused(text: str, said: str) -> None:
    assert said in refusal(text)


# --- other lines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "kept", "said"),
    [
        (
            "DeepSpeed",
            "RunningAvg",
            "needs a line with fwd, bwd and step, which wall_clock_breakdown",
        ),
        ("DeepSpeed", "fwd_microstep", "needs a line with fwd, bwd and step"),
        ("Megatron", "time (ms)", "needs a line with 'elapsed time per iteration (ms)'"),
        ("transformers' Trainer", "'loss'", "needs train_runtime and train_steps_per_second"),
        ("mmengine", "val", "0 lines of training; needs 1 more line"),
        ("nanoGPT", "iter 3", "1 line of training; needs 2 more lines"),
        ("Lightning's profiler", "_epoch ", "needs the row run_training_batch"),
    ],
)
def test_what_tells_too_little_says_what_it_needs(
    tmp_path: Path, cli: Cli, program: str, kept: str, said: str
) -> None:
    lines = [line for line in LOGS[program][0].splitlines(keepends=True) if kept in line]
    (tmp_path / "short.log").write_text("".join(lines), encoding="utf-8")
    done = cli("import", str(tmp_path / "short.log"))
    assert done.code == 1
    assert f"short.log: tells too little: step lines of {program}" in done.err
    assert said in " ".join(done.err.split())


def test_the_run_with_most_steps_is_taken_and_others_are_named() -> None:
    slow = LOGS["Megatron"][0].replace(": 43", ": 86")
    first = "".join(slow.splitlines(keepends=True)[:4])
    (told,) = told_by(first + LOGS["Megatron"][0])
    assert isinstance(told, StepLines)
    assert told.step_s == pytest.approx(0.431, rel=1e-3)
    assert "left out: 1 other run, 1 with another step (860 ms)" in told.facts


def test_much_evaluation_is_taken_out_of_a_mean() -> None:
    text = LOGS["transformers' Trainer"][0].replace("'eval_runtime': 6.0", "'eval_runtime': 300.0")
    assert steps(text) == {"transformers' Trainer": 0.4}


def test_metrics_in_a_json_file_are_read(tmp_path: Path) -> None:
    """all_results.json of transformers' examples, and a line of ms-swift's logging.jsonl."""
    path = tmp_path / "all_results.json"
    path.write_text('{\n "train_runtime": 600.0,\n "train_steps_per_second": 2.5\n}\n')
    assert recognise(path)[0].step_s == 0.4
    path.write_text('{"loss": 1.2, "train_speed(s/it)": 2.85, "global_step/max_steps": "5/10"}\n')
    assert recognise(path)[0].step_s == 2.85


def test_steps_that_differ_are_left_to_the_reader(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.log").write_text(LOGS["detectron2"][0] + LOGS["mmengine"][0])
    done = cli("import", "two.log", "-o", "job.yaml")
    assert "steps differ (310 ms, 452 ms): choose the job's own" in done.out
    assert "ddpsim diagnose job.yaml --measured 'STEP TIME'" in done.out


# --- cut, mixed and prefixed ---------------------------------------------------------------------


def prefixed(text: str, prefixes: Sequence[str]) -> str:
    """Each line as several ranks print it."""
    lines = text.split("\n")
    return "\n".join(f"{prefix}{line}" for line in lines if line for prefix in prefixes)


@pytest.mark.parametrize("program", LOGS)
def test_prefixes_change_nothing(program: str) -> None:
    text, step_s, _ = LOGS[program]
    for some in (some for prefixes in PREFIXES for some in (prefixes[:1], prefixes)):
        told = steps(prefixed(text, some) + "\n")
        assert told == {program.partition(" (")[0]: pytest.approx(step_s, rel=2e-3)}, some


@settings(max_examples=150)
@given(st.data())
def test_a_part_of_a_log_tells_the_same_step_or_none(data: st.DataObject) -> None:
    """Cut anywhere, with lines missing, its ends of lines another system's."""
    program = data.draw(st.sampled_from(sorted(LOGS)))
    text, step_s, _ = LOGS[program]
    end = data.draw(st.sampled_from(("\n", "\r\n")))
    missing = data.draw(st.sets(st.integers(0, text.count("\n")), max_size=4))
    kept = [line for i, line in enumerate(text.split("\n")) if i not in missing]
    text = end.join(kept)
    start, stop = sorted(
        (data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text))))
    )
    usual = step_s
    for told in told_by(text[start:stop]):
        if not isinstance(told, StepLines):
            continue
        # without their count of steps, a micro-batch's time is said to be that of an iteration
        if told.assumed and program in ("litgpt", "Lightning's profiler"):
            usual = step_s / 4
        slow = program in ("Megatron", "torchtitan", "ms-swift", "tqdm")
        assert told.step_s / usual < (99 if slow else NEAR), told
        assert told.step_s / usual > 1 / NEAR, told


LABELS = (
    ("Training", "Evaluating"),
    ("train", "val"),
    ("Epoch 1", "Validation DataLoader 0"),
    ("", ""),
)


@settings(max_examples=200)
@given(st.data())
def test_mixtures_of_bars_tell_trainings_step_or_none(data: st.DataObject) -> None:
    """Bars of training, of evaluation, of epochs and of loading, in any order, some cut away."""
    step_s = data.draw(st.sampled_from((0.05, 0.4, 2.0, 7.0)))
    evaluation_s = step_s * data.draw(st.sampled_from((0.02, 0.3, 0.85, 1.15, 3.0)))
    train, evaluates = data.draw(st.sampled_from(LABELS))
    total = data.draw(st.sampled_from((300, 1500, None)))
    others = total if data.draw(st.booleans()) else 40
    steps_of = [int((total or 300) * share) for share in (0.2, 0.4, 0.6, 0.8, 1.0)]
    states: list[str] = []
    if data.draw(st.booleans()):
        states += bars("Loading checkpoint shards", (1, 2, 3, 4), 4, 1.2)
    for epoch in range(data.draw(st.integers(1, 3))):
        cut = data.draw(st.integers(0, 5))
        inner = bars(
            evaluates, [int((others or 40) * s) for s in (0.3, 0.6, 1)], others, evaluation_s
        )
        states += bars(train, steps_of[:cut], total, step_s)
        states += inner if data.draw(st.booleans()) else []
        states += bars(train, steps_of[cut:], total, step_s)
        if data.draw(st.booleans()):
            states.append(bar("Epochs", epoch + 1, 3, 500 * step_s))
    kept = [each for each in states if data.draw(st.integers(0, 9))]
    text = data.draw(st.sampled_from(("\n", "\r", ""))).join(kept)
    text = text[data.draw(st.integers(0, 40)) : len(text) - data.draw(st.integers(0, 40))]
    trains = any(each in text for each in bars(train, steps_of, total, step_s))
    for told in told_by(text):
        if isinstance(told, StepLines):
            is_near = 1 / 1.25 < told.step_s / step_s < 1.25
            # nothing tells what the only bars of a text are of, if they have no label
            said = "its bars are of training: they have no label" in told.assumed
            assert is_near or (said and not trains), (told, text)


def test_a_number_that_a_cut_dictionary_ends_with_is_not_read() -> None:
    """Found at random: 2.5 steps a second, cut after the 2."""
    whole = "{'train_runtime': 600.0, 'train_steps_per_second': 2.5, 'epoch': 1.0}\n"
    assert steps(whole) == {"transformers' Trainer": 0.4}
    assert steps(whole[: whole.index(".5")] + "\n") == {}


def test_samples_of_a_step_tell_the_batch_of_a_rank(tmp_path: Path) -> None:
    """Samples and steps of a second, as Trainer prints them, on the ranks that files tell."""
    path = tmp_path / "trainer.log"
    path.write_text(
        "{'train_runtime': 512.3, 'train_samples_per_second': 125.0, "
        "'train_steps_per_second': 0.976, 'train_loss': 2.05, 'epoch': 1.0}\n"
    )
    learned = list(recognise(path))
    assert "128 samples a step on all ranks" in learned[0].facts
    alone = starting_point(learned)
    assert alone.document["workload"]["batch_per_rank"] == 128
    assert any("1 rank for its 128 samples a step" in each for each in alone.assumed)
    of_eight = Learned("job", "", (), {"cluster": {"nodes": 2, "gpus_per_node": 4}})
    assert starting_point([*learned, of_eight]).document["workload"]["batch_per_rank"] == 16
    of_three = Learned("job", "", (), {"cluster": {"nodes": 1, "gpus_per_node": 3}})
    assert starting_point([*learned, of_three]).document["workload"]["batch_per_rank"] == 32


@settings(max_examples=60)
@given(st.lists(st.sampled_from(sorted(LOGS)), min_size=2, max_size=4, unique=True), st.data())
def test_logs_in_one_file_each_tell_their_own(programs: list[str], data: st.DataObject) -> None:
    prefix = data.draw(st.sampled_from(("", *(pair[0] for pair in PREFIXES))))
    text = "".join(prefixed(LOGS[program][0], [prefix]) + "\n" for program in programs)
    told = steps(text)
    assert told == {program: pytest.approx(LOGS[program][1], rel=2e-3) for program in programs}


OF_REFERENCE = {
    "tqdm": (2.0,),
    "detectron2": (0.412,),
    "mmengine": (0.352,),
    "Megatron": (0.505,),
    "DeepSpeed": (0.6527,),
    "transformers' Trainer": (0.4,),
    "litgpt": (1.0028, 0.2507),
}


@pytest.mark.skipif(REFERENCE is None, reason="DDPSIM_REFERENCE_DATA names no folder of logs")
@settings(max_examples=150)
@given(st.data())
def test_logs_of_the_reference_cut_mixed_and_prefixed(data: st.DataObject) -> None:
    paths = sorted((Path(REFERENCE or "") / "logs").glob("*.txt"))
    text = ""
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3)):
        prefixes = data.draw(st.sampled_from((("",), *PREFIXES)))
        part = prefixed(path.read_text("utf-8"), prefixes[: data.draw(st.integers(1, 2))])
        ends = data.draw(st.lists(st.integers(0, len(part)), min_size=2, max_size=2))
        text += part[min(ends) : max(ends)] if data.draw(st.booleans()) else part
        text += data.draw(st.sampled_from(("\n", "\r\n")))
    for program, step_s in steps(text).items():
        near = [1 / NEAR < step_s / each < NEAR for each in OF_REFERENCE[program]]
        assert any(near), (program, step_s, text)


def test_what_tells_too_little_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bars.log").write_text("\n".join(bars("Evaluating", EVALUATION, 200, 0.05)))
    with pytest.raises(ImportFailedError, match="tells too little: step lines of tqdm"):
        recognise(tmp_path / "bars.log")
