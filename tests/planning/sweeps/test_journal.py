"""A journal keeps what a sweep has computed, and is sound wherever it ends."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcome import Outcome
from sweep_of_caps import swept

from ddpsim.planning.sweeps import computation
from ddpsim.planning.sweeps.journal import Journal, JournalError

CAPS = "ddp.bucket_cap_mb=default,1,5,25,50"


def test_a_journal_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.journal"
    with Journal(path, resume=False) as journal:
        found = swept(CAPS, journal=journal)
    monkeypatch.setattr(computation, "attempt_many", None)
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
        assert journal.outcomes == {"a": "why"}
    with Journal(path, resume=False) as journal:
        assert journal.outcomes == {}
        journal.add({"b": "why"})
    with pytest.raises(JournalError, match="holds 1 point of a sweep"):
        Journal(path, resume=False)


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
            outcomes = list(journal.outcomes.items())
        whole = path.read_bytes()
        path.write_bytes(whole[: cut % (len(whole) + 1)])
        with Journal(path, resume=True) as journal:
            left = list(journal.outcomes.items())
            assert left == outcomes[: len(left)]
            journal.add(dict(outcomes[len(left) :]))
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
        with pytest.raises(JournalError, match=r"j: No space left.* 1 points: .*--resume"):
            journal.add({"b": "x" * 40})
        monkeypatch.undo()
        assert journal.path.read_bytes() == before


def test_a_pipe_is_no_journal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "j")
    with pytest.raises(JournalError, match="j: is no regular file; choose another -o"):
        Journal(tmp_path / "j", resume=False)


def test_an_output_that_cannot_be_written_says_how_to_go_on(
    tmp_path: Path, cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path, _content: object) -> None:
        raise OSError(28, "No space left on device", "out.csv")

    monkeypatch.setattr("ddpsim.files.write_atomically", full)
    scenario = Path(__file__).resolve().parents[3] / "scenarios" / "resnet50-2x8-25gbit.yaml"
    axis = ("--set", "ddp.bucket_cap_mb=1,25", "--jobs", "1")
    done = cli("sweep", str(scenario), *axis, "-o", str(tmp_path / "out.csv"))
    assert (done.code, done.out) == (1, "")
    assert "out.csv: No space left on device; its journal holds every point" in done.err
    assert "--resume" in done.err
