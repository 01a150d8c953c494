"""Files that last: written whole or not at all, and nothing else touched."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from outcome import Outcome
from pydantic import ValidationError

from calibrate.files import HTML, check_outputs, name_as_text
from calibrate.records.rounds import RoundOptions
from ddpsim.errors import DdpsimError
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


def test_a_file_keeps_its_permissions(tmp_path: Path) -> None:
    private, new = tmp_path / "private", tmp_path / "new"
    private.write_text("one")
    private.chmod(0o600)
    for path in (private, new):
        write_atomically(path, "two")
    mask = os.umask(0)
    os.umask(mask)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (private, new)]
    assert modes == [0o600, 0o666 & ~mask]


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


def test_what_cannot_be_written_is_named_and_not_the_file_in_the_making(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    with pytest.raises(OSError, match="too long") as raised:
        write_atomically(path, "one")
    assert raised.value.filename == str(path)


@pytest.mark.parametrize(
    ("there", "kind", "said"),
    [
        ('{"schema": "ddpsim.profile/1"}', "ddpsim.profile/1", None),
        ('{\n "schema":"ddpsim.profile/0"}', "ddpsim.profile/1", None),
        ("", "ddpsim.profile/1", None),
        ('{"schema": "ddpsim.record/1"}', "ddpsim.profile/1", "is there already, and not of"),
        ('{"schema": "ddpsim.model-profile/1"}', "ddpsim.profile/1", "is there already"),
        ("import torch", "ddpsim.model-profile/1", "is there already"),
        ("<!DOCTYPE html>", HTML, None),
        ("notes", HTML, "is there already"),
    ],
)
def test_nothing_of_another_kind_is_written_over(
    tmp_path: Path, there: str, kind: str, said: str | None
) -> None:
    path = tmp_path / "there"
    path.write_text(there)
    if said is None:
        check_outputs([(path, kind)], [tmp_path / "input"])
        return
    with pytest.raises(DdpsimError, match=said):
        check_outputs([(path, kind)])


def test_neither_an_input_nor_another_output_is_written_over(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text('{"schema": "ddpsim.profile/1"}')
    with pytest.raises(DdpsimError, match="one is read, and would be written over"):
        check_outputs([(tmp_path / "." / "one", "ddpsim.profile/1")], [two, one])
    with pytest.raises(DdpsimError, match="two cannot hold two outputs"):
        check_outputs([(two, "ddpsim.profile/1"), (two, HTML)])
    check_outputs([(Path(os.devnull), "ddpsim.profile/1")])


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(DdpsimError, match="is a folder: name a file in it"):
        check_outputs([(tmp_path, "ddpsim.profile/1")])


@pytest.mark.parametrize("name", [b"plain.json", "ö 100%.json".encode(), b"caf\xe9.json"])
def test_a_name_of_any_bytes_goes_through_json(name: bytes) -> None:
    path = Path("folder") / os.fsdecode(name)
    options = RoundOptions(output=path, model="m:f")
    assert RoundOptions.model_validate_json(options.model_dump_json()).output == path
    assert RoundOptions.model_validate(options.model_dump()) == options
    assert name_as_text(path) == name.decode("utf-8", errors="backslashreplace")


def test_what_is_no_name_of_a_file_is_refused() -> None:
    with pytest.raises(ValidationError, match="wanted the name of a file"):
        RoundOptions.model_validate_json('{"output": 1, "model": "m:f"}')


def test_explain_knows_every_key(cli: Callable[..., Outcome]) -> None:
    assert cli("explain", "static_graph").out.startswith("ddp.static_graph: ")
    assert cli("explain", "ddp.torch").out.startswith("ddp.torch: ")
    cause = " ".join(cli("explain", "anomaly mode").out.split())
    assert cause.startswith("anomaly_mode: a cause that `diagnose` names. autograd's anomaly mode")
    assert "Fix: drop torch.autograd.set_detect_anomaly" in cause
    lines = [line for line in cli("explain", "every").out.splitlines() if line[0] != " "]
    assert len(lines) > 2
    assert all(line.partition(":")[0].endswith(".every") for line in lines)
