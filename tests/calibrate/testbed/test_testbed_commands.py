"""Commands in a testbed, as root on Linux: ranks, rates, the command line, a live round of DDP."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("a testbed needs Linux", allow_module_level=True)

from measure_campaign import Campaign
from measured.testbeds import GBIT, made_of, shell

from calibrate.testbed import bed, network, shaping
from calibrate.testbed.cli import app
from calibrate.testbed.errors import HostFailedError, TestbedError
from calibrate.validate.validate import validate
from ddpsim.errors import DdpsimError


def test_commands_know_their_rank_and_cores(name: str) -> None:
    core = min(os.sched_getaffinity(0))
    script = (
        "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT "
        "$GLOO_SOCKET_IFNAME $OMP_NUM_THREADS $EXTRA; taskset -pc $$ | sed 's/.*: //'; "
        "exec ip -br -4 addr show eth0"
    )
    lines: list[tuple[int, str, str]] = []
    with bed.Testbed([GBIT, GBIT], name, cores=[{core}, {core}]) as testbed:
        outputs = testbed.run(
            [["sh", "-c", script]] * 2,
            {"EXTRA": "x", "OMP_NUM_THREADS": "2"},
            on_line=lambda *line: lines.append(line),
        )
        first = testbed.address(0)
        for host, output in enumerate(outputs):
            shown = output.stdout.splitlines()
            assert shown[:2] == [f"{host} 2 0 1 {first} 29500 eth0 2 x", str(core)]
            assert f"{testbed.address(host)}/24" in shown[2]
            assert [line for of, _, line in lines if of == host] == [f"{s}\n" for s in shown]
        with pytest.raises(TestbedError, match=r"^1 commands for 2 hosts: give one"):
            testbed.run([["true"]])
        with pytest.raises(TestbedError, match=r"^there is no host 2: choose 0 to 1$"):
            testbed.host_prefix(2)


def test_a_failing_host_is_named(name: str) -> None:
    with bed.Testbed([GBIT, GBIT], name) as testbed:
        with pytest.raises(HostFailedError, match=r"^host 1 ended with exit code 1, .*\nexec of"):
            testbed.run([["sleep", "60"], ["no-such-command"]])
        assert shell(f"ip netns pids {name}-h0") == ""


SENT = 400_000
SEND = f"""
import os, socket, time
for attempt in range(200):
    try:
        link = socket.create_connection((os.environ["TO"], 5001), timeout=30)
        break
    except OSError:
        time.sleep(0.05)
link.sendall(bytes({SENT}))
link.close()
"""


RECEIVE = """
import socket, time
server = socket.create_server(("", 5001))
server.settimeout(30)
start, received = time.monotonic(), 0
link, _ = server.accept()
link.settimeout(30)
while piece := link.recv(1 << 16):
    received += len(piece)
print(received, time.monotonic() - start)
"""


@pytest.mark.parametrize("sender", [0, 1])
def test_no_link_is_faster_than_its_rate(name: str, sender: int) -> None:
    """A bound that holds on any machine: a bucket lets out its burst and its rate, no more."""
    slow, fast = 1.25e6, GBIT
    with bed.Testbed([fast, slow], name) as testbed:
        programs = {sender: SEND, 1 - sender: RECEIVE}
        outputs = testbed.run(
            [[sys.executable, "-c", programs[host]] for host in (0, 1)],
            {"TO": testbed.address(1 - sender)},
            timeout_s=60,
        )
    received, seconds = (float(word) for word in outputs[1 - sender].stdout.split())
    assert received == SENT
    assert received <= shaping.SMALLEST_BURST_BYTES + slow * seconds


def invoke(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["testbed", *arguments])
    with contextlib.suppress(SystemExit):
        app()
    return capsys.readouterr().out


def test_up_stays_until_down(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--hosts", "2", "--rate", "1Gbit/s", "--rate-of", "1=200 Mbit/s", "--name", name)
    shown = invoke(monkeypatch, capsys, "up", *options).splitlines()
    assert shown[0].startswith("h0  10.")
    assert shown[1].endswith(f"   25.0 MB/s  ip netns exec {name}-h1 COMMAND")
    listed = invoke(monkeypatch, capsys, "list")
    assert f"{name}: 2 hosts, 125 MB/s and 25.0 MB/s, up\n" in listed
    inside = subprocess.Popen(
        ["ip", "netns", "exec", f"{name}-h0", "sh", "-c", "echo; exec sleep 60"],
        stdout=subprocess.PIPE,
    )
    with inside:
        assert inside.stdout
        inside.stdout.readline()
        with pytest.raises(DdpsimError) as raised:
            invoke(monkeypatch, capsys, "down", "--name", name)
        assert str(raised.value) == (
            f"in the testbed {name!r} still run the processes {inside.pid}: "
            "end them first, or use --kill"
        )
        out = invoke(monkeypatch, capsys, "down", "--name", name, "--kill")
        assert out == f"removed {name}\n"
    assert made_of(name) == []
    with pytest.raises(DdpsimError, match=f"^there is no testbed named {name!r}: "):
        invoke(monkeypatch, capsys, "down", "--name", name)


def test_down_leaves_a_running_one_alone(name: str) -> None:
    with bed.Testbed([GBIT], name):
        with pytest.raises(TestbedError) as raised:
            network.take_down(name, kill=True)
        assert str(raised.value) == (
            f"the testbed {name!r} belongs to process {os.getpid()}, which removes it: "
            "end that process"
        )


def test_run_prints_each_host_and_fails_with_one(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--hosts", "2", "--rate", "1Gbit/s", "--name", name]
    out = invoke(monkeypatch, capsys, "run", *options, "sh", "-c", "echo rank $RANK")
    assert sorted(out.splitlines()) == ["[h0] rank 0", "[h1] rank 1"]
    with pytest.raises(HostFailedError, match=r"^host 1 ended with exit code 1,"):
        invoke(monkeypatch, capsys, "run", *options, "--", "sh", "-c", "exit $RANK")


@pytest.mark.slow
def test_a_live_round_is_measured_and_predicted(permitted: None, tmp_path: Path) -> None:
    """Real DDP of two hosts, from measurement to validation: the machinery, not the accuracy."""
    pytest.importorskip("torch", reason="torch is not installed: no DDP can run")
    folder = tmp_path / "campaign"
    campaign = Campaign(
        folder,
        rates=(2.0,),
        models=("measure_helpers:of_equal_layers",),
        caps=(None, 1.0),
        rounds=(3, 3),
        budget_s=1.0,
    )
    said: list[str] = []
    assert campaign.run(said.append) == 0, said
    (rounds,) = folder.iterdir()
    (sweep,) = validate([rounds]).sweeps
    assert [case.variant for case in sweep.cases] == ["default", "1"]
    assert sweep.line_rate_bytes_per_s == 2 * GBIT
    for case in sweep.cases:
        assert case.buckets_agree
        assert case.measured_s > case.measured.forward > 0
        assert case.predicted_s > case.predicted.forward > 0
