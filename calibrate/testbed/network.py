"""Namespaces joined by a bridge, each link shaped both ways; made and removed with iproute2.

    NAME-h0 [eth0 10.77.0.1] --tbf-> <-tbf-- [p0]
                                                   NAME-sw: bridge
    NAME-h1 [eth0 10.77.0.2] --tbf-> <-tbf-- [p1]

The bridge has a namespace of its own: no interface, address or route appears on the machine itself,
and neither its firewall nor its network manager touches the hosts' packets.

Hosts send by TCP Reno, whatever the machine's default is: every kernel has it, and at a LAN's round
trips Linux's own default, CUBIC, does the same (RFC 9438, section 4.3). BBR, which some clouds set,
would stop for 200 ms every 10 s (PROBE_RTT) and drop packets as it probes: seen at 200 Mbit/s,
60 MiB took 1.050 to 1.128 of the link's time with it, and 1.045 to 1.046 with Reno.

A host's packets are received on one core, the switch's side of its link too (RPS, by turns over the
cores). A virtual device has no queue of its own: else packets of one connection are received by
whichever core sent them or ran the shaper's timer, and overtake each other where one is delayed.
TCP takes that for loss: seen at 3 Gbit/s, 50 to 14,000 of 700,000 packets out of order, and where
there were many, all-reduces of 4 MiB 1.5 times their bytes' time and not 1.07; with RPS none.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from calibrate.testbed.errors import TestbedError
from calibrate.testbed.shaping import check_rate, tbf_arguments
from calibrate.testbed.state import Owner, State, forget, load_states, locked, save

MOST_HOSTS = 250  # their addresses are one /24
_CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
_RECEIVING_CORES = "/sys/class/net/{device}/queues/rx-0/rps_cpus"
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")
_log = logging.getLogger(__name__)


def build(name: str | None, rates_bytes_per_s: Sequence[float], owner: Owner | None) -> State:
    """Make a testbed with a host for every rate, in bytes/s each way; removed where it fails.

    Without a `name` it is called after this process. Removes abandoned testbeds first. With an
    `owner` it counts as abandoned once that process is gone. Raises TestbedError.
    """
    _check(name, rates_bytes_per_s)
    with locked():
        others = _without_abandoned()
        state = State(
            name=name or _new_name(others),
            subnet=_free_subnet(others),
            rates_bytes_per_s=tuple(rates_bytes_per_s),
            owner=owner,
        )
        wanted = [_switch(state), *(host_namespace(state, i) for i in range(len(state)))]
        _check_unused(state, wanted, others)
        try:
            for namespace in wanted:
                state = _add_namespace(state, namespace)
            _run(f"ip -n {_switch(state)} link add name bridge type bridge")
            _run(f"ip -n {_switch(state)} link set bridge up")
            for host in range(len(state)):
                _connect(state, host)
        except BaseException:
            _remove(state)
            raise
    return state


def remove(state: State) -> None:
    """Remove what was made for a testbed, and end what runs in it; raises TestbedError.

    What is gone already is passed over, so it may be called again.
    """
    with locked():
        _remove(state)


def keep(state: State) -> State:
    """The testbed without an owner: it stays until `take_down`."""
    kept = state.model_copy(update={"owner": None})
    with locked():
        save(kept)
    return kept


def take_down(name: str, *, kill: bool = False) -> None:
    """Remove a testbed that was kept, by name; raises TestbedError.

    What still runs in it is ended with `kill`, and an error without.
    """
    _check_machine()
    with locked():
        states = {state.name: state for state in _without_abandoned()}
        if name not in states:
            names = f"there are {', '.join(states)}" if states else "none is up"
            raise TestbedError(f"there is no testbed named {name!r}: {names}")
        state = states[name]
        if state.owner is not None:
            raise TestbedError(
                f"the testbed {name!r} belongs to process {state.owner.pid}, which removes it: "
                "end that process"
            )
        pids = _processes(state)
        if pids and not kill:
            raise TestbedError(
                f"in the testbed {name!r} still run the processes {', '.join(map(str, pids))}: "
                "end them first, or use --kill"
            )
        _remove(state)


def present() -> list[State]:
    """The machine's testbeds by name, after the abandoned ones are removed; raises TestbedError."""
    _check_machine()
    with locked():
        return _without_abandoned()


def host_namespace(state: State, host: int) -> str:
    """The namespace of a host, for `ip netns exec`."""
    return f"{state.name}-h{host}"


def address(state: State, host: int) -> str:
    """The IPv4 address of a host."""
    return f"{state.subnet}.{host + 1}"


def _check(name: str | None, rates_bytes_per_s: Sequence[float]) -> None:
    _check_machine()
    if not 1 <= len(rates_bytes_per_s) <= MOST_HOSTS:
        raise TestbedError(
            f"a testbed of {len(rates_bytes_per_s)} hosts cannot be built: choose 1 to {MOST_HOSTS}"
        )
    for rate in rates_bytes_per_s:
        check_rate(rate)
    if name is not None and not _NAME.fullmatch(name):
        raise TestbedError(
            f"{name!r} is no name for a testbed: write a lower-case letter, "
            "then up to 30 of a-z, 0-9, - and _"
        )


def _check_machine() -> None:
    if platform.system() != "Linux":
        raise TestbedError("a testbed is made of Linux's network namespaces: run it on Linux")
    if os.geteuid() != 0:
        raise TestbedError(
            "a testbed makes network namespaces: run it as root, for example by sudo"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise TestbedError(
                f"{tool} is not found: install iproute2, or add /usr/sbin to PATH if it is there"
            )


def _check_unused(state: State, wanted: Sequence[str], others: Sequence[State]) -> None:
    if any(other.name == state.name for other in others):
        raise TestbedError(
            f"there is a testbed named {state.name!r} already: choose another name, or remove it "
            f"with `down --name {state.name}`"
        )
    for taken in sorted(_namespaces().intersection(wanted)):
        raise TestbedError(
            f"there is a network namespace {taken!r} that no testbed made: "
            f"choose a name other than {state.name!r}"
        )


def _without_abandoned() -> list[State]:
    states = load_states()
    for state in states:
        if state.abandoned and state.owner:
            _remove(state)
            _log.warning(
                "removed the testbed %r that process %d had left behind",
                state.name,
                state.owner.pid,
            )
    return [state for state in states if not state.abandoned]


def _new_name(others: Sequence[State]) -> str:
    first = f"tb{os.getpid()}"
    used = {other.name for other in others}
    names = [first, *(f"{first}-{i}" for i in range(2, len(others) + 2))]
    return next(name for name in names if name not in used)


def _free_subnet(others: Sequence[State]) -> str:
    """A /24 of 10/8 that neither a testbed nor a route of the machine overlaps.

    A route to all of 10/8 or more cannot be avoided and does no harm: no host is reached from it.
    """
    routes = json.loads(_run("ip -4 -json route show table all") or "[]")
    texts = [route["dst"] for route in routes if route["dst"] != "default"]
    subnets = [ipaddress.IPv4Network(text, strict=False) for text in texts]
    avoided = [network for network in subnets if network.prefixlen > 8]
    avoided += [ipaddress.IPv4Network(f"{other.subnet}.0/24") for other in others]
    for number in range(256 * 256):
        # from 10.77 on, where few networks are, and round
        subnet = f"10.{(77 + number // 256) % 256}.{number % 256}"
        network = ipaddress.IPv4Network(f"{subnet}.0/24")
        if not any(network.overlaps(other) for other in avoided):
            return subnet
    raise TestbedError("no subnet of 10.0.0.0/8 is free: remove testbeds (`list`, `down`)")


def _add_namespace(state: State, namespace: str) -> State:
    """On file first, then made: after a crash between the two nothing unlisted is left."""
    with_it = state.model_copy(update={"namespaces": (*state.namespaces, namespace)})
    save(with_it)
    try:
        _run(f"ip netns add {namespace}")
    except TestbedError:
        save(state)
        raise
    return with_it


def _connect(state: State, host: int) -> None:
    switch, namespace, port = _switch(state), host_namespace(state, host), f"p{host}"
    _run(f"ip -n {switch} link add name {port} type veth peer name eth0 netns {namespace}")
    _run(f"ip -n {switch} link set {port} master bridge up")
    _run(f"ip -n {namespace} addr add {address(state, host)}/24 dev eth0")
    _run(f"ip -n {namespace} link set eth0 up")
    _run(f"ip -n {namespace} link set lo up")
    _run(f"ip netns exec {namespace} tee {_CONGESTION_CONTROL}", text="reno")
    _receive_on_one_core(namespace, "eth0", host)
    _receive_on_one_core(switch, port, host)
    tbf = tbf_arguments(state.rates_bytes_per_s[host])
    _run(f"tc -n {switch} qdisc add dev {port} root {tbf}")
    _run(f"tc -n {namespace} qdisc add dev eth0 root {tbf}")


def _receive_on_one_core(namespace: str, device: str, host: int) -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) > 1:  # kernels for one core have no RPS
        mask = _core_mask(usable[host % len(usable)])
        file = _RECEIVING_CORES.format(device=device)
        _run(f"ip netns exec {namespace} tee {file}", text=mask)


def _core_mask(core: int) -> str:
    """A set of one core as the kernel reads it: hexadecimal, 32 cores between commas."""
    words = [0] * (core // 32) + [1 << core % 32]
    return ",".join(f"{word:08x}" for word in reversed(words))


def _remove(state: State) -> None:
    namespaces = _namespaces()
    for namespace in reversed(state.namespaces):
        if namespace in namespaces:
            _end_processes(namespace)
            _run(f"ip netns delete {namespace}")
    forget(state)


def _end_processes(namespace: str) -> None:
    """Kill what runs in a namespace; a few times, as what is killed may be about to fork."""
    for _ in range(10):
        pids = _pids(namespace)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.05)


def _processes(state: State) -> list[int]:
    namespaces = _namespaces()
    return sorted(pid for name in state.namespaces if name in namespaces for pid in _pids(name))


def _switch(state: State) -> str:
    return f"{state.name}-sw"


def _namespaces() -> set[str]:
    # a line is "NAME" or "NAME (id: 3)"
    return {line.split()[0] for line in _run("ip netns list").splitlines() if line.strip()}


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _run(f"ip netns pids {namespace}").split()]


def _run(command: str, text: str = "") -> str:
    """What a command prints that is given a text to read; its words hold no space.

    Ctrl-C does not reach it.
    """
    done = subprocess.run(  # noqa: S603 -- ip and tc, no shell
        command.split(),
        input=text,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        # libc's messages are recognised in English
        env={**os.environ, "LC_ALL": "C"},
    )
    if done.returncode:
        raise TestbedError(_explained(command, done.stderr.strip()))
    return done.stdout


def _explained(command: str, message: str) -> str:
    what = f"`{command}` failed: {message or 'it gave no reason'}"
    if "not permitted" in message or "Permission denied" in message:
        return (
            f"{what}\nThis machine does not permit network namespaces: run as root with "
            "CAP_SYS_ADMIN and CAP_NET_ADMIN, a container with --privileged"
        )
    missing = ("nknown qdisc", "kind is unknown", "No such file or directory")
    if command.startswith("tc ") and any(words in message for words in missing):
        return (
            f"{what}\nThis kernel has no token bucket filter: load it with `modprobe sch_tbf`, "
            "or use a kernel with CONFIG_NET_SCH_TBF"
        )
    if "nknown device type" in message or "not supported" in message:
        return (
            f"{what}\nThis kernel lacks a kind of network device: load them with "
            "`modprobe -a veth bridge`"
        )
    return what
