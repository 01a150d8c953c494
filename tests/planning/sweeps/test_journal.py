"""A journal keeps what a sweep has computed, and is sound wherever it ends."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
        assert journal.known == {"a": "why"}
    with Journal(path, resume=False) as journal:
        assert journal.known == {}
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
