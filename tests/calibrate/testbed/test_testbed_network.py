"""The network itself, as root on Linux: up, down, and after a kill or a crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("a testbed needs Linux", allow_module_level=True)

from measured.testbeds import COMMAND, GBIT, ends, made_of, message, shell

from calibrate.testbed import bed, network, state
from calibrate.testbed.errors import TestbedError

CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"


def test_up_and_down_leave_the_machine_as_it_was(name: str) -> None:
    machine = Path(CONGESTION_CONTROL).read_text()
    with bed.Testbed([GBIT, GBIT / 5], name) as testbed:
        assert sorted(made_of(name)) == [
            f"{name}{part}" for part in ("-h0", "-h1", "-sw", ".testbed.json")
        ]
        for host, rate in enumerate(["1Gbit", "200Mbit"]):
            up = shell(f"tc -n {name}-h{host} qdisc show dev eth0")
            down = shell(f"tc -n {name}-sw qdisc show dev p{host}")
            assert all(f"rate {rate} " in shown and "tbf" in shown for shown in (up, down))
            sends_by = shell(f"ip netns exec {name}-h{host} cat {CONGESTION_CONTROL}")
            assert sends_by.strip() == "reno"
            cores = sorted(os.sched_getaffinity(0))
            mask = f"{1 << cores[host % len(cores)]:x}" if len(cores) > 1 else "0"
            for place, device in ((f"h{host}", "eth0"), ("sw", f"p{host}")):
                file = f"/sys/class/net/{device}/queues/rx-0/rps_cpus"
                shown = shell(f"ip netns exec {name}-{place} cat {file}").strip()
                assert shown.replace(",", "").lstrip("0") == mask.lstrip("0")
        assert testbed.host_prefix(1) == ("ip", "netns", "exec", f"{name}-h1")
    assert made_of(name) == []
    assert Path(CONGESTION_CONTROL).read_text() == machine


def test_an_exception_takes_it_down(name: str) -> None:
    with pytest.raises(ZeroDivisionError), bed.Testbed([GBIT], name):
        raise ZeroDivisionError
    assert made_of(name) == []


def test_two_at_once(permitted: None) -> None:
    with bed.Testbed([GBIT]) as one, bed.Testbed([GBIT]) as two:
        assert one.name == f"tb{os.getpid()}"
        assert two.name == f"{one.name}-2"
        assert one.address(0) != two.address(0)
    assert made_of(f"tb{os.getpid()}") == []


def test_error_name_in_use(name: str) -> None:
    with bed.Testbed([GBIT], name):
        assert message(name=name) == (
            f"there is a testbed named {name!r} already: choose another name, or remove it with "
            f"`down --name {name}`"
        )
        assert f"{name}-h0" in made_of(name)


def test_a_namespace_that_others_made_is_not_touched(name: str) -> None:
    shell(f"ip netns add {name}-h1")
    try:
        assert message(name=name) == (
            f"there is a network namespace '{name}-h1' that no testbed made: choose a name other "
            f"than {name!r}"
        )
        assert made_of(name) == [f"{name}-h1"]
    finally:
        shell(f"ip netns delete {name}-h1")


def test_a_failure_half_way_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def arguments(rate_bytes_per_s: float) -> str:
        kind = "tbf" if rate_bytes_per_s == GBIT else "nosuch"
        return f"{kind} rate 1gbit burst 131072 latency 20ms"

    monkeypatch.setattr(network, "tbf_arguments", arguments)
    assert "This kernel has no token bucket filter" in message([GBIT, 2 * GBIT], name=name)
    assert made_of(name) == []


def test_a_failure_of_the_first_command_leaves_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = network._run

    def fails(command: str) -> str:
        if command.startswith("ip netns add"):
            raise TestbedError("no")
        return real(command)

    monkeypatch.setattr(network, "_run", fails)
    assert message(name=name) == "no"
    assert made_of(name) == []


def start_run(name: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A `testbed run` in a process of its own, and the pids of what it runs on two hosts."""
    arguments = f"run --hosts 2 --rate 1Gbit/s --name {name} -- sh -c".split()
    run = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments, "echo $$; sleep 60; sleep 60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout
    lines = [run.stdout.readline() for _ in range(2)]
    assert sorted(line[:5] for line in lines) == ["[h0] ", "[h1] "]
    return run, [int(line.split()[1]) for line in lines]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_takes_it_down(name: str, number: signal.Signals, code: int) -> None:
    run, pids = start_run(name)
    run.send_signal(number)
    _, said = run.communicate(timeout=60)
    assert (run.returncode, "Traceback" in said) == (code, False)
    assert made_of(name) == []
    assert all(ends(pid) for pid in pids)


def test_after_a_kill_the_next_command_takes_it_down(name: str) -> None:
    run, pids = start_run(name)
    run.kill()
    run.wait(timeout=60)
    assert f"{name}-h0" in made_of(name)
    listed = subprocess.run(
        [sys.executable, "-c", COMMAND, "list"], capture_output=True, text=True, check=True
    )
    said = f"removed the testbed '{name}' that process {run.pid} had left behind"
    assert said in listed.stderr.splitlines()
    assert name not in listed.stdout
    assert made_of(name) == []
    assert all(ends(pid) for pid in pids)
    run.communicate()


def test_what_a_crash_half_way_left_is_removed(name: str) -> None:
    """The file lists a namespace that was not made yet."""
    shell(f"ip netns add {name}-sw")
    state.save(
        state.State(
            name=name,
            subnet="10.77.0",
            rates_bytes_per_s=(GBIT,),
            namespaces=(f"{name}-sw", f"{name}-h0"),
            owner=state.Owner(pid=os.getpid(), start_ticks=0),
        )
    )
    assert name not in [found.name for found in network.present()]
    assert made_of(name) == []
