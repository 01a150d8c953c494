"""Jobs of rounds that are refused, that fail, or that lose a rank."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from measured.rounds_jobs import VARIANTS, run_job, run_ranks

from calibrate.measure.ranks.launch import LOST
from calibrate.records.rounds import ALONE_PER_ROUND, RoundOptions, load_rounds
from calibrate.records.variant import Variant

pytest.importorskip("torch", reason="torch is not installed: nothing can be measured")

pytestmark = pytest.mark.usefixtures("warm_python")


def test_an_output_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    output = file / "rounds.json"
    options = RoundOptions(output=output, model="measure_helpers:two_layers", variants=VARIANTS)
    first = run_ranks(options)[0]
    assert first.returncode == 3
    assert f"{output} cannot be written: " in first.stderr
    assert file.read_text() == "mine"


@pytest.mark.parametrize("command", [["measure"], ["rounds", "measure_helpers:two_layers"]])
def test_what_every_rank_refuses_is_said_by_the_first(command: list[str], tmp_path: Path) -> None:
    taken = tmp_path / "taken.json"
    taken.write_text("mine")
    first, second = run_job(["calibrate", *command, "-o", str(taken)])
    assert first.returncode == second.returncode == 1
    assert f"{taken} is there already" in first.stderr
    assert str(taken) not in second.stderr + second.stdout
    assert taken.read_text() == "mine"


def test_rounds_of_a_compiled_model_are_refused(tmp_path: Path) -> None:
    """Torch would run the first variant's graph in all: seen with 2.13."""
    options = RoundOptions(
        output=tmp_path / "rounds.json",
        model="measure_helpers:compiled",
        variants=VARIANTS,
        rounds=(5, 5),
    )
    for ended in run_ranks(options):
        assert ended.returncode == 3
        assert ended.stderr.strip().splitlines()[-1] == (
            "measure_helpers:compiled is compiled, and torch would run the graph of one variant in "
            "all: each needs a process of its own, which rounds do not have; return the model "
            "uncompiled"
        )


def test_a_hook_that_gloo_lacks_is_said(tmp_path: Path) -> None:
    options = RoundOptions(
        output=tmp_path / "rounds.json",
        model="measure_helpers:two_layers",
        variants=(Variant(comm_hook="bf16_compress"),),
    )
    first = run_ranks(options)[0]
    assert first.returncode == 3
    assert (
        first.stderr.strip()
        .splitlines()[-1]
        .startswith("the hook bf16_compress cannot be measured here")
    )
    assert not options.output.exists()


def test_an_error_of_the_users_own_is_told_with_its_place(tmp_path: Path) -> None:
    options = RoundOptions(
        output=tmp_path / "rounds.json",
        model="measure_helpers:fails_later",
        variants=VARIANTS,
        rounds=(2, 3),
    )
    said = [ended.stderr.strip().splitlines()[-1] for ended in run_ranks(options)]
    assert any(
        re.fullmatch(
            r"rank [01]: measure_helpers\.py, line \d+: RuntimeError: flaky\. The rounds until .*",
            line,
        )
        for line in said
    ), said


def test_rounds_until_a_rank_dies_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written on the way: as whole as those of a job that ended by itself."""
    monkeypatch.setenv("FORWARDS_TO_LIVE", "200")
    options = RoundOptions(
        output=tmp_path / "rounds.json",
        model="measure_helpers:dies_later",
        variants=VARIANTS,
        rounds=(2, 1000),
        budget_s=600,
    )
    module = "import measured.quick_rounds, calibrate.measure.ddp.rounds as m; m.KEEP_S = 0.0; "
    run = "m.run_rank(m.measure_rounds, m.RoundOptions)"
    left, killed = run_job(["-c", module + run, options.model_dump_json()])
    assert killed.returncode == -signal.SIGKILL
    assert left.returncode == LOST
    assert "rank 0 lost contact with another rank: did one die" in left.stderr
    kept = load_rounds(options.output)
    assert len(kept.variants[0].whole_s) >= 2
    assert len(kept.alone.whole_s) == ALONE_PER_ROUND * len(kept.variants[0].whole_s)
