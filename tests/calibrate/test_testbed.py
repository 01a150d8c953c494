"""The testbed: what needs no network, and, as root on Linux, the network itself."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("a testbed needs Linux", allow_module_level=True)

from calibrate import signals
from calibrate.testbed import bed, network, processes, shaping, state
from calibrate.testbed.campaign import Campaign
from calibrate.testbed.cli import app
from calibrate.testbed.errors import HostFailedError, TestbedError
from calibrate.validate.validate import validate
from ddpsim.errors import DdpsimError

GBIT = 125e6  # bytes/s
COMMAND = """
import os, pathlib, signal, sys
from calibrate.testbed import state
from calibrate.testbed.cli import app
from ddpsim.errors import DdpsimError
state.FOLDER = pathlib.Path(os.environ["TESTBED_FOLDER"])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
try:
    app()
except DdpsimError as error:
    sys.exit(str(error))
"""


def shell(command: str, check: bool = True) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout


def why_no_network() -> str | None:
    """Why this machine cannot hold a testbed, found without the code under test."""
    if os.geteuid() != 0:
        return "a testbed needs root"
    name = f"probe{os.getpid()}"
    try:
        shell(f"ip netns add {name}")
        shell(f"ip -n {name} link add name b type bridge")
        shell(f"ip -n {name} link add name v0 type veth peer name v1")
        shell(f"tc -n {name} qdisc add dev v0 root tbf rate 1mbit burst 131072 latency 20ms")
    except (OSError, RuntimeError) as error:
        return f"this machine does not permit a testbed: {error}"
    finally:
        with contextlib.suppress(OSError):
            shell(f"ip netns delete {name}", check=False)
    return None


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Files of their own: tests at once on one machine would tidy up after each other."""
    folder = tmp_path / "run"
    monkeypatch.setattr(state, "FOLDER", folder)
    monkeypatch.setenv("TESTBED_FOLDER", str(folder))
    return folder


@pytest.fixture(scope="session")
def permitted() -> None:
    reason = why_no_network()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def name(permitted: None) -> Iterator[str]:
    """A testbed's name; whatever has it is gone after the test, and the machine is as before."""
    name = f"test{os.getpid()}"
    links, routes = shell("ip -o link"), shell("ip route show table all")
    yield name
    left = made_of(name)
    for namespace in left:
        shell(f"ip netns delete {namespace}", check=False)
    assert left == []
    assert (shell("ip -o link"), shell("ip route show table all")) == (links, routes)


def made_of(name: str) -> list[str]:
    """Namespaces and files of a testbed."""
    namespaces = [line.split()[0] for line in shell("ip netns list").splitlines()]
    files = [path.name for path in state.FOLDER.glob("*")]
    return [made for made in namespaces + files if made.startswith(name)]


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked after root and the tools: as if both were there."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/sbin/{tool}")


def message(rates: object = (GBIT, GBIT), **options: object) -> str:
    """What Testbed raises on entry."""
    with pytest.raises(TestbedError) as raised, bed.Testbed(rates, **options):  # type: ignore[arg-type]
        pass
    return str(raised.value)


# --- without a network ---


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


def test_a_set_of_one_core_as_the_kernel_reads_it() -> None:
    assert network._core_mask(0) == "00000001"
    assert network._core_mask(31) == "80000000"
    assert network._core_mask(33) == "00000002,00000000"


def test_burst() -> None:
    with_fine_timer, with_ticks = 1e9, 250.0
    assert shaping.burst_bytes(GBIT, with_fine_timer) == 131_072
    assert shaping.burst_bytes(10 * GBIT, with_fine_timer) == 131_072
    assert shaping.burst_bytes(40 * GBIT, with_fine_timer) == 500_000
    assert shaping.burst_bytes(2 * GBIT, with_ticks) == 1_000_000  # rate / HZ
    assert shaping.burst_bytes(1e3, with_ticks) == 131_072


@pytest.mark.parametrize(
    ("text", "burst"),
    [
        ("000003e8 00000040 000f4240 3b9aca00", 131_072),  # high-resolution timers
        ("000003e8 00000040 000f4240 000000fa", 1_000_000),  # HZ=250
        ("000003e8", 2_500_000),  # unknown: HZ=100
        (None, 2_500_000),
    ],
)
def test_tbf_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, burst: int
) -> None:
    path = tmp_path / "psched"
    if text:
        path.write_text(text)
    monkeypatch.setattr(shaping, "_PSCHED", path)
    assert shaping.tbf_arguments(2 * GBIT) == f"tbf rate 2000000000bit burst {burst} latency 20ms"


def test_an_owner_is_alive_until_it_ends() -> None:
    assert state.this_process().alive
    child = subprocess.Popen(["sleep", "60"])
    owner = state.Owner(pid=child.pid, start_ticks=state._start_ticks(child.pid) or 0)
    assert owner.alive
    assert not owner.model_copy(update={"start_ticks": owner.start_ticks - 1}).alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not owner.alive  # a zombie
    child.wait()
    assert not owner.alive


def test_a_state_survives_its_file() -> None:
    saved = state.State(
        name="lab", subnet="10.77.0", rates_bytes_per_s=(1e6,), owner=state.this_process()
    )
    state.save(saved)
    assert state.load_states() == [saved]
    state.forget(saved)
    state.forget(saved)
    assert state.load_states() == []


def test_a_subnet_that_nothing_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = '[{"dst":"default"},{"dst":"10.0.0.0/8"},{"dst":"10.77.0.0/17"},{"dst":"10.77.128.9"}]'
    monkeypatch.setattr(network, "_run", lambda _: routes)
    other = state.State(name="lab", subnet="10.77.129", rates_bytes_per_s=(1e6,))
    assert network._free_subnet([other]) == "10.77.130"
    monkeypatch.setattr(network, "_run", lambda _: "")
    assert network._free_subnet([]) == "10.77.0"


def test_postponed_signals_come_after_the_block() -> None:
    done = []

    def interrupted() -> None:
        with signals.postponed():
            signal.raise_signal(signal.SIGINT)
            done.append("all of the block")

    # a shell's background jobs ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert done
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_a_process_become_exceptions(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, signals.as_exceptions():
            signal.raise_signal(number)
        assert ended.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_signals_outside_the_main_thread_are_left_alone() -> None:
    seen: list[object] = []

    def enter() -> None:
        with signals.as_exceptions(), signals.postponed():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def together(*scripts: str, timeout_s: float | None = 30) -> tuple[processes.HostOutput, ...]:
    """Shell scripts as the commands of hosts, on this machine's own network."""
    commands = [["sh", "-c", script] for script in scripts]
    return processes.run_together(commands, [os.environ] * len(scripts), timeout_s, None)


def test_outputs_by_host() -> None:
    assert together("echo a; echo b >&2", r"printf 'c\377'") == (
        processes.HostOutput(0, "a\n", "b\n"),
        processes.HostOutput(1, "c\ufffd", ""),
    )


def test_no_wait_is_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C in the instant before a wait was seen only when the wait ended (4 of 1,500)."""

    class Watched:
        def __init__(self) -> None:
            self._queue: queue.SimpleQueue[int | Exception] = real()
            self.put = self._queue.put

        def get(self, timeout: float) -> int | Exception:
            waits_s.append(timeout)
            return self._queue.get(timeout=timeout)

    real = queue.SimpleQueue
    waits_s: list[float] = []
    monkeypatch.setattr(queue, "SimpleQueue", Watched)
    together("sleep 0.5", "true", timeout_s=None)
    assert len(waits_s) > 2
    assert max(waits_s) == processes.LOOK_S


def test_a_failing_host_stops_the_others(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.touch()
    with pytest.raises(HostFailedError) as raised:
        together(
            f"sleep 60 & echo $! >> {pids}; trap '' TERM; echo $$ >> {pids}; wait; sleep 60",
            f"until [ $(wc -l < {pids}) -ge 2 ]; do sleep 0.05; done; echo no >&2; exit 3",
        )
    assert str(raised.value) == (
        "host 1 ended with exit code 3, the other hosts were stopped; its stderr:\nno"
    )
    assert (raised.value.host, raised.value.code, raised.value.stderr) == (1, 3, "no\n")
    gone = [int(pid) for pid in pids.read_text().split()]
    assert len(gone) == 2
    assert all(ends(pid) for pid in gone)


def ends(pid: int) -> bool:
    """Whether a process is gone, or soon is: the kernel takes its time."""
    for _ in range(1000):
        if state._start_ticks(pid) is None:
            return True
        time.sleep(0.01)
    return False


def test_what_a_command_leaves_running_is_ended(tmp_path: Path) -> None:
    together(f"sleep 60 >/dev/null 2>&1 & echo $! > {tmp_path}/pid")
    assert ends(int((tmp_path / "pid").read_text()))


def test_an_error_in_on_line_ends_the_run() -> None:
    def broken(host: int, stream: str, line: str) -> None:
        raise BrokenPipeError(line)

    with pytest.raises(BrokenPipeError, match="out"):
        processes.run_together([["sh", "-c", "echo out; sleep 60"]], [os.environ], 30, broken)


def test_error_of_a_killed_host() -> None:
    with pytest.raises(HostFailedError) as raised:
        together("kill -9 $$")
    assert str(raised.value) == (
        "host 0 was killed by SIGKILL, the other hosts were stopped; it wrote nothing to stderr"
    )
    assert str(HostFailedError(0, -40, "")).startswith("host 0 was killed by signal 40,")


def test_error_shows_the_end_of_a_long_stderr() -> None:
    text = "".join(f"line {i}\n" for i in range(30))
    shown = str(HostFailedError(2, 1, text))
    assert shown.splitlines()[0] == (
        "host 2 ended with exit code 1, the other hosts were stopped; "
        "its stderr, last 20 of 30 lines:"
    )
    assert shown.splitlines()[1:] == [f"line {i}" for i in range(10, 30)]


def test_error_of_a_timeout() -> None:
    with pytest.raises(TestbedError) as raised:
        together("sleep 60", "true", "sleep 60", timeout_s=0.5)
    assert str(raised.value) == (
        "after 0.5 s hosts 0, 2 still ran, and all were stopped: allow more time, or less work"
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


# --- with a network ---


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
    assert shown[1].endswith(f"   25.00 MB/s  ip netns exec {name}-h1 COMMAND")
    listed = invoke(monkeypatch, capsys, "list")
    assert f"{name}: 2 hosts, 125.0 MB/s and 25.00 MB/s, up\n" in listed
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


def test_a_live_round_is_measured_and_predicted(permitted: None, tmp_path: Path) -> None:
    """Real DDP of two hosts, from measurement to validation: the machinery, not the accuracy."""
    pytest.importorskip("torch", reason="torch is not installed: no DDP can run")
    folder = tmp_path / "campaign"
    campaign = Campaign(
        folder,
        rates=(2.0,),
        models=("deep_mlp",),
        caps=(None, 1.0, 25.0),
        rounds=(3, 3),
        budget_s=1.0,
    )
    said: list[str] = []
    assert campaign.run(said.append) == 0, said
    (rounds,) = folder.iterdir()
    (sweep,) = validate([rounds]).sweeps
    assert [case.variant for case in sweep.cases] == ["default", "1", "25"]
    assert sweep.line_rate_bytes_per_s == 2 * GBIT
    for case in sweep.cases:
        assert case.buckets_agree
        assert case.measured_s > case.measured.forward > 0
        assert case.predicted_s > case.predicted.forward > 0
