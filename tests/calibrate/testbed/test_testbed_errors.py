"""What keeps a testbed from being built, and what is said of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("a testbed needs Linux", allow_module_level=True)

from measured.testbeds import GBIT, message

from calibrate.testbed import bed, network, state
from calibrate.testbed.cli import app
from calibrate.testbed.errors import TestbedError


def test_error_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert message() == ("a testbed makes network namespaces: run it as root, for example by sudo")


def test_error_no_iproute2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = "{} is not found: install iproute2, or add /usr/sbin to PATH if it is there"
    assert message() == wanted.format("ip")
    (tmp_path / "ip").write_text("#!/bin/sh\n")
    (tmp_path / "ip").chmod(0o755)
    assert message() == wanted.format("tc")


def test_error_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.platform, "system", lambda: "Darwin")
    assert message() == "a testbed is made of Linux's network namespaces: run it on Linux"


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(0.0, "0"), (999.0, "7992"), (1e12, "8e+12"), (float("nan"), "nan"), (float("inf"), "inf")],
)
def test_error_rate(as_root: None, rate: float, shown: str) -> None:
    assert message([GBIT, rate]) == (
        f"a link of {shown} bit/s cannot be shaped: choose a rate from 8 kbit/s to 1600 Gbit/s"
    )


def test_error_hosts(as_root: None) -> None:
    assert message([]) == "a testbed of 0 hosts cannot be built: choose 1 to 250"
    assert message([GBIT] * 251) == "a testbed of 251 hosts cannot be built: choose 1 to 250"


@pytest.mark.parametrize("name", ["", "Lab", "a b", "../x", "1st", "a" * 32, "a\n"])
def test_error_name(as_root: None, name: str) -> None:
    assert message(name=name) == (
        f"{name!r} is no name for a testbed: write a lower-case letter, "
        "then up to 30 of a-z, 0-9, - and _"
    )


def test_error_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert message(cores=[{0}]) == "cores for 1 hosts of 2: give cores for every host"
    wanted = "host 1 cannot have the cores {}: choose one or more of [0, 1]"
    assert message(cores=[{0}, {7}]) == wanted.format("[7]")
    assert message(cores=[{0}, ()]) == wanted.format("[]")
    monkeypatch.setattr(bed.shutil, "which", lambda _: None)
    assert message(cores=[{0}, {1}]) == (
        "taskset is not found: install util-linux, or choose no cores"
    )


def test_error_kernel() -> None:
    said = 'Unknown qdisc "tbf", hence option "rate" is unparsable'
    assert network._explained("tc qdisc add", said) == (
        f"`tc qdisc add` failed: {said}\nThis kernel has no token bucket filter: load it with "
        "`modprobe sch_tbf`, or use a kernel with CONFIG_NET_SCH_TBF"
    )
    said = "Error: Specified qdisc kind is unknown."
    assert "no token bucket filter" in network._explained("tc qdisc add", said)
    said = "RTNETLINK answers: Operation not supported"
    assert "`modprobe -a veth bridge`" in network._explained("ip link add", said)
    said = "mount --make-shared /run/netns failed: Operation not permitted"
    assert "a container with --privileged" in network._explained("ip netns add x", said)
    assert network._explained("ip x", "") == "`ip x` failed: it gave no reason"


def test_error_before_it_is_up() -> None:
    with pytest.raises(TestbedError) as raised:
        bed.Testbed([GBIT]).address(0)
    assert str(raised.value) == (
        "this testbed is not up: use it as `with Testbed(...) as testbed:`"
    )


def test_error_folder(as_root: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(state, "FOLDER", tmp_path / "file" / "ddpsim")
    assert message() == (
        f"{tmp_path}/file/ddpsim cannot be written (Not a directory), and without a list of what "
        "it made the testbed could not remove it: make the folder writable"
    )


def test_error_file(as_root: None, folder: Path) -> None:
    folder.mkdir()
    path = folder / "lab.testbed.json"
    path.write_text('{"schema": "ddpsim.testbed/2"}')
    assert message() == (
        f"{path} cannot be read as a testbed of this version of ddpsim: remove what it lists with "
        "`ip netns delete`, then the file"
    )


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--rate", "1Gb"], "Invalid value for --rate: '1Gb' is ambiguous"),
        (
            ["--rate", "1Gbit/s", "--rate-of", "2=1Gbit/s"],
            "--rate-of: '2=1Gbit/s': there is no host 2, choose 0 to 1",
        ),
        (
            ["--rate", "1Gbit/s", "--rate-of", "1Gbit/s"],
            "--rate-of: '1Gbit/s' is not HOST=RATE, such as 1=200Mbit/s",
        ),
        (
            ["--rate", "1Gbit/s", "--cores", "0;a"],
            "--cores: '0;a' is no list of cores by host: separate hosts by ; and cores by , as in",
        ),
    ],
)
def test_error_options(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    wanted: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["testbed", "run", "--hosts", "2", *arguments, "true"])
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 2
    assert wanted in " ".join(capsys.readouterr().err.split())
