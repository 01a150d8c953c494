"""Files that last: written whole or not at all, and nothing else touched."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from ddpsim.files import write_atomically


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, "one")

    def full(_handle: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("ddpsim.files.os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, "two")
    assert path.read_text() == "one"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("one")
    link.symlink_to(real)
    write_atomically(link, "two")
    assert link.is_symlink()
    assert real.read_text() == "two"


def test_what_is_no_file_is_only_written_to(tmp_path: Path) -> None:
    """As /dev/null and /dev/stdout, which root could replace."""
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_atomically(pipe, "said")
    reader.join(timeout=30)
    assert read == ["said"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
