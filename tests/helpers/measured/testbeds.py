"""What tests of the testbed share: commands of the shell, errors, and processes that must end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

import pytest

from calibrate.testbed import bed, state
from calibrate.testbed.errors import TestbedError

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


def made_of(name: str) -> list[str]:
    """Namespaces and files of a testbed."""
    namespaces = [line.split()[0] for line in shell("ip netns list").splitlines()]
    files = [path.name for path in state.FOLDER.glob("*")]
    return [made for made in namespaces + files if made.startswith(name)]


def message(rates: object = (GBIT, GBIT), **options: object) -> str:
    """What Testbed raises on entry."""
    with pytest.raises(TestbedError) as raised, bed.Testbed(rates, **options):  # type: ignore[arg-type]
        pass
    return str(raised.value)


def ends(pid: int) -> bool:
    """Whether a process is gone, or soon is: the kernel takes its time."""
    for _ in range(1000):
        if state._start_ticks(pid) is None:
            return True
        time.sleep(0.01)
    return False
