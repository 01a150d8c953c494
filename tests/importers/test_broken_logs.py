"""Logs whose rows are cut off, prefixed or mixed with others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs.measured_files import PROFILE, Write
from logs.nccl_log_writer import nccl_log

from ddpsim.errors import DdpsimError, ImportFailedError
from ddpsim.importers.all_reduce import read_all_reduce
from ddpsim.importers.profiles.model import read_parameters, read_profile
from ddpsim.scenario.quantity import SourceFile

_LOG = nccl_log(root=True)


@given(
    st.integers(0, len(_LOG)),
    st.integers(0, 40),
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from([_LOG, json.dumps(PROFILE), "name,shape,dtype\nw,5x5,float32\n"]),
)
def test_a_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int, junk: str, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.txt"
    start %= len(text)
    path.write_text(text[:start] + junk + text[start + length :], encoding="utf-8")
    for read in (read_all_reduce, read_profile, read_parameters):
        message = _refusal(read, SourceFile("damaged.txt", path))
        assert message is None or message.startswith("damaged.txt:")
        assert message is None or len(message) < 500


def _refusal(read: Callable[[SourceFile], object], source: SourceFile) -> str | None:
    try:
        read(source)
    except DdpsimError as error:
        return str(error)
    return None


_PREFIXES = {
    "srun --label": " 0: ",
    "mpirun --tag-output": "[1,0]<stdout>:",
    "mpirun 5": "[prterun-node0-1234@1,0]<stdout>: ",
    "skypilot": "(head, rank=0, pid=3808) [1,0]<stdout>:",
    "kubectl --timestamps": "2024-11-05T10:11:12.123456789Z ",
    "quoted": "> ",
    "cat -n": "    12\t",
    "grep -n": "12:",
    "indented": "    ",
    "coloured": "\x1b[1;36m",
}


@pytest.mark.parametrize("root", [False, True], ids=["older layout", "layout with root"])
@pytest.mark.parametrize("prefix", _PREFIXES.values(), ids=_PREFIXES)
def test_nccl_tests_behind_a_prefix(write: Write, prefix: str, *, root: bool) -> None:
    lines = nccl_log(root=root).splitlines()
    plain = read_all_reduce(write("\n".join(lines)))
    assert read_all_reduce(write("\n".join(prefix + line for line in lines))) == plain


def test_a_prefix_before_rows_alone(write: Write) -> None:
    text = nccl_log(root=True)
    labelled = re.sub(r"^ +(?=\d+ )", "[STAT]:", text, flags=re.MULTILINE)
    assert labelled.count("[STAT]:1048576 ") == 1
    assert read_all_reduce(write(labelled)) == read_all_reduce(write(text))


def test_a_row_that_is_a_comment_is_not_read(write: Write) -> None:
    text = nccl_log(root=True).replace("  1048576  ", "[0] #  1048576  ")
    assert 1_048_576 not in dict(read_all_reduce(write(text)).samples)


def _broken(at: int, by: str, *, root: bool = True, host: str = "node0") -> str:
    """A log whose row of 1 MiB is broken before a cell."""
    lines = nccl_log(root=root).replace("node0", host).splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("  1048576"))
    cells = lines[row].split()
    lines[row] = f"  {'  '.join(cells[:at])}{by}"
    lines.insert(row + 2, f"   {'  '.join(cells[at:])}")
    return "\n".join(lines)


_INFO = ":1000:1001 [0] NCCL INFO Channel 04/0 : 7[3] -> 0[0] [receive] via NET/IB/2"


@pytest.mark.parametrize("root", [False, True], ids=["older layout", "layout with root"])
@pytest.mark.parametrize("half", [0, 4])
@pytest.mark.parametrize(
    ("by", "host"),
    [
        (f"node0{_INFO}", "node0"),
        (f"2e3f9a{_INFO}", "2e3f9a"),
        (f"[0] far-away{_INFO}", "node0"),
        (f"\nnode0{_INFO}", "node0"),
        (
            "[2025-01-02 03:04:05] node0:1:1 [0] transport/net.cc:12 NCCL WARN slow",
            "node0",
        ),
    ],
    ids=["stuck to it", "host of digits", "label", "new line", "warning"],
)
def test_rows_that_nccl_broke_are_mended(
    write: Write, half: int, by: str, host: str, *, root: bool
) -> None:
    plain = nccl_log(root=root).replace("node0", host)
    log = read_all_reduce(write(_broken((5 if root else 4) + half, by, root=root, host=host)))
    assert log == read_all_reduce(write(plain))


def test_a_row_that_cannot_be_mended_is_left_out(write: Write) -> None:
    """The break goes through a number, or text sticks to the root."""
    text = _broken(6, f" 74node0{_INFO}")
    for broken in (text, _broken(5, f"[1,0]<stdout>:node0{_INFO}")):
        log = read_all_reduce(write(broken))
        assert [size for size, _ in log.samples] == [1024, 67_108_864]
        assert log.warnings == ("file.txt: 1 row is left out, broken or cut off: line 11",)
    several = "\n".join([text] * 10)
    (said,) = read_all_reduce(write(several)).warnings
    assert said.startswith("file.txt: 10 rows are left out, broken or cut off: lines 11, ")
    assert said.endswith(", ...")


@pytest.mark.parametrize("cells", [3, 5, 9, 12])
def test_a_last_row_that_was_cut_off_is_left_out(write: Write, cells: int) -> None:
    lines = nccl_log(root=True).splitlines()
    last = next(i for i, line in enumerate(lines) if line.startswith("  67108864"))
    cut = "  ".join(lines[last].split()[:cells])
    log = read_all_reduce(write("\n".join([*lines[:last], cut])))
    assert [size for size, _ in log.samples] == [1024, 1_048_576]
    assert log.warnings == (f"file.txt: 1 row is left out, broken or cut off: line {last + 1}",)
    head = next(i for i, line in enumerate(lines) if line.startswith("  1024"))
    with pytest.raises(ImportFailedError, match=r"holds no whole result row; wanted nccl-tests'"):
        read_all_reduce(write("\n".join([*lines[:head], cut])))


def test_a_damaged_row_in_the_middle_is_refused(write: Write) -> None:
    lines = nccl_log(root=True).splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("  1048576"))
    cells = lines[row].split()
    for cut, said in (
        (cells[:9], "this row has 9 of 13 columns: it is damaged; remove the row"),
        ([*cells[:4], "-1oops", *cells[5:]], "this row has '-1oops' as its root, which is no"),
    ):
        lines[row] = "  ".join(cut)
        with pytest.raises(ImportFailedError, match=re.escape(f"file.txt:{row + 1}: {said}")):
            read_all_reduce(write("\n".join(lines)))


@pytest.mark.parametrize("root", [False, True], ids=["older layout", "layout with root"])
def test_nccl_tests_without_their_header(write: Write, *, root: bool) -> None:
    text = nccl_log(root=root)
    headless = "\n".join(line for line in text.splitlines() if "redop" not in line)
    assert read_all_reduce(write(headless)) == read_all_reduce(write(text))


def test_a_root_tells_a_cut_off_row_without_a_header_from_a_whole_one(write: Write) -> None:
    """12 of 13 cells are as many as a table without roots has: no figure is read a cell early."""
    lines = [line for line in nccl_log(root=True).splitlines() if "redop" not in line]
    last = next(i for i, line in enumerate(lines) if line.startswith("  67108864"))
    log = read_all_reduce(write("\n".join([*lines[:last], lines[last].rpartition(" ")[0]])))
    assert [size for size, _ in log.samples] == [1024, 1_048_576]
    assert log.warnings == (f"file.txt: 1 row is left out, broken or cut off: line {last + 1}",)
