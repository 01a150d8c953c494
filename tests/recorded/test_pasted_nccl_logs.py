"""Logs of NCCL and nccl-tests as people paste them: of old versions, short, without a header."""

from __future__ import annotations

from pathlib import Path

import pytest
from logs.nccl_log_writer import nccl_log

import ddpsim
from ddpsim.errors import ImportFailedError
from ddpsim.recorded.learned import starting_point
from ddpsim.recorded.recognise import recognise
from ddpsim.result.learned import Learned

# SYNTHETIC, in the form that nccl issue 226 shows of NCCL 2.4
NCCL_2_4 = """node-a:41:97 [0] NCCL INFO Ring 00 :    0   1
node-a:41:97 [0] NCCL INFO Ring 00 : 1 -> 0 [receive] via NET/Socket/0
node-a:41:97 [0] NCCL INFO Ring 00 : 0 -> 1 [send] via NET/Socket/0
node-a:41:97 [0] NCCL INFO comm 0x7f00 rank 0 nranks 2 cudaDev 0 nvmlDev 0 - Init COMPLETE
node-b:42:98 [0] NCCL INFO comm 0x7e00 rank 1 nranks 2 cudaDev 0 nvmlDev 0 - Init COMPLETE
NCCL version 2.4.8+cuda10.0
"""
SHARED = """box:41:97 [0] NCCL INFO Ring 00 : 0[0] -> 1[1] via direct shared memory
box:41:97 [0] NCCL INFO comm 0x7f00 rank 0 nranks 2 cudaDev 0 nvmlDev 0 - Init COMPLETE
box:41:98 [1] NCCL INFO comm 0x7e00 rank 1 nranks 2 cudaDev 1 nvmlDev 1 - Init COMPLETE
"""
# SYNTHETIC, in the form of nccl-tests before 2019
IN_MS = """# Using devices
#   Rank  0 on       box device  0 [0x04] GeForce GTX 1080 Ti
#   Rank  1 on       box device  1 [0x05] GeForce GTX 1080 Ti
#                                       out-of-place                    in-place
#   bytes         N   type   op     time  algbw  busbw    res     time  algbw  busbw    res
        8         2  float  sum    0.037   0.00   0.00  0e+00    0.034   0.00   0.00  0e+00
 33554432   8388608  float  sum    5.000   6.71   6.71  1e-06    5.001   6.71   6.71  0e+00
"""
TIMES = {2**20: 100.0, 2**22: 300.0, 2**24: 900.0}


def learned(tmp_path: Path, text: str) -> Learned:
    (tmp_path / "pasted.log").write_text(text)
    (found,) = recognise(tmp_path / "pasted.log")
    return found


def rows(times: dict[int, float]) -> str:
    """The rows alone of 8 ranks."""
    text = nccl_log(root=False, nodes=1, gpus=8, times=times)
    return "\n".join(line for line in text.splitlines() if " float " in line)


@pytest.mark.parametrize("prefix", ["", "[1,0]<stdout>:", "2026-03-14T09:00:10.123Z ", "0: "])
@pytest.mark.parametrize(
    ("text", "layout", "ways"),
    [(NCCL_2_4, (2, 1), "2 connections: NET/Socket"), (SHARED, (1, 2), "1 connection: SHM")],
)
def test_nccl_2_4_is_read(
    tmp_path: Path, prefix: str, text: str, layout: tuple[int, int], ways: str
) -> None:
    found = learned(tmp_path, "".join(f"{prefix}{line}\n" for line in text.splitlines()))
    assert (found.keys["cluster"]["nodes"], found.keys["cluster"]["gpus_per_node"]) == layout
    assert ways in found.facts


def test_a_log_without_connections_says_what_it_needs(tmp_path: Path) -> None:
    found = learned(tmp_path, "\n".join(NCCL_2_4.splitlines()[3:]) + "\n")
    assert found.keys["cluster"] == {"nccl": "2.4.8", "nodes": 2, "gpus_per_node": 1}
    assert any("needs the log from its beginning" in fact for fact in found.facts)
    with pytest.raises(ImportFailedError, match="tells too little: log of NCCL_DEBUG=INFO"):
        learned(tmp_path, "node-a:41:97 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n")


def test_rows_without_header_and_devices_tell_their_ranks(tmp_path: Path) -> None:
    found = learned(tmp_path, rows(TIMES))
    assert found.facts[:2] == (
        "8 ranks (1 x 8) (not listed)",
        "all-reduces of 1.00 MiB in 100 us to 16.0 MiB in 900 us",
    )
    assert "1 x 8 ranks: the file tells their number alone" in found.assumed[-1]
    document = starting_point([found]).document
    assert ddpsim.load_scenario(document).cluster.world_size == 8


def test_few_rows_say_how_many_more_they_need(tmp_path: Path) -> None:
    found = learned(tmp_path, rows({2**20: 100.0}))
    assert "1 size from 1 MiB up: needs 2 more sizes to tell a bandwidth" in found.facts
    with pytest.raises(ImportFailedError, match="does not list its devices"):
        learned(tmp_path, rows({8: 20.0, 16: 20.1}))


def test_milliseconds_are_told_by_the_bandwidths(tmp_path: Path) -> None:
    found = learned(tmp_path, IN_MS)
    assert "all-reduces of 8 B in 34.0 us to 32.0 MiB in 5.00 ms" in found.facts
    small = "\n".join(IN_MS.splitlines()[:-1])
    with pytest.raises(ImportFailedError, match="times are below 1 us, perhaps of milliseconds"):
        learned(tmp_path, small)
