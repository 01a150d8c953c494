"""The record as a file: whole after each measurement, and never written over another one."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="measuring needs torch")

from measured.measuring import small_plan

from calibrate.measure.cluster.plan import Options
from calibrate.measure.cluster.session import measure
from calibrate.measure.errors import MeasureError
from calibrate.measure.ranks.launch import Reporter
from calibrate.records.record import load_record


def test_a_full_disk_leaves_the_record_whole(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "record.json", []

    def full(handle: int) -> None:
        written.append(handle)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ddpsim.files.os.fsync", full)
    with pytest.raises(MeasureError) as raised:
        measure(Options(output=path), small_plan())
    assert str(raised.value) == (
        f"{path} cannot be written: the disk is full. Its last whole version is as it was; "
        "make room and go on with --resume"
    )
    assert [m.size_bytes for m in load_record(path).measurements] == [4096]
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_ctrl_c_keeps_the_record(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plan = tmp_path / "record.json", small_plan()

    def stop(self: Reporter, title: str) -> None:
        if "8.00 KiB" in title:
            raise KeyboardInterrupt

    monkeypatch.setattr(Reporter, "begin", stop)
    with pytest.raises(MeasureError) as raised:
        measure(Options(output=path), plan)
    assert str(raised.value) == (
        f"stopped. What was measured so far is in {path}, if it is there yet; "
        "the same command with --resume goes on from it."
    )
    monkeypatch.undo()
    assert [m.size_bytes for m in load_record(path).measurements] == [4096]


def test_a_record_that_is_there_is_not_overwritten(tmp_path: Path, alone: None) -> None:
    path = tmp_path / "record.json"
    measure(Options(output=path), small_plan())
    there = path.read_bytes()
    with pytest.raises(MeasureError, match=r"is there already: go on from it with --resume, or"):
        measure(Options(output=path))
    assert path.read_bytes() == there


@pytest.mark.parametrize("resume", [False, True])
def test_what_is_there_and_no_record_is_named(tmp_path: Path, alone: None, resume: bool) -> None:
    path, pipe = tmp_path / "mine.py", tmp_path / "pipe"
    path.write_text("precious")
    os.mkfifo(pipe)
    other = "is no ddpsim.record/1 record" if resume else "is there already, and not of the kind"
    for output, said in (
        (path, other),
        (tmp_path, "is a folder: name a file in it"),
        (pipe, "is a device or a pipe, which keeps no record: name a file"),
        (path / "record.json", "cannot be written: File exists: name another file"),
        (tmp_path / ("x" * 300), "cannot be written: File name too long: name another file"),
    ):
        with pytest.raises(MeasureError, match=re.escape(str(output))) as raised:
            measure(Options(output=output, resume=resume))
        assert said in str(raised.value)
    assert path.read_text() == "precious"


def test_an_empty_file_is_filled(tmp_path: Path, alone: None) -> None:
    """As `mktemp` makes them."""
    path = tmp_path / "record.json"
    path.touch()
    assert len(measure(Options(output=path), small_plan()).measurements) == 3


@pytest.mark.parametrize(
    ("number", "is_there", "said"),
    [
        (errno.ENOSPC, False, "the disk is full: make room, or name another file"),
        (errno.EACCES, False, "Permission denied: name another file"),
        (
            errno.EACCES,
            True,
            (
                "Permission denied. Its last whole version is as it was; mend that and go on with "
                "--resume"
            ),
        ),
    ],
)
def test_what_is_said_of_a_record_that_cannot_be_written(
    number: int,
    is_there: bool,
    said: str,
    tmp_path: Path,
    alone: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "record.json"
    if is_there:
        measure(Options(output=path), small_plan())

    def fails(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ddpsim.files.os.fsync", fails)
    with pytest.raises(MeasureError) as raised:
        measure(Options(output=path, resume=is_there), small_plan())
    assert str(raised.value) == f"{path} cannot be written: {said}"
