"""A testbed as a context: up on entry, down on exit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

from calibrate.signals import as_exceptions, postponed
from calibrate.testbed.errors import TestbedError
from calibrate.testbed.network import address, build, host_namespace, keep, remove
from calibrate.testbed.processes import HostOutput, OnLine, run_together
from calibrate.testbed.state import State, this_process

MASTER_PORT = 29500  # torch's own; the first host's ports are all free


class Testbed(ExitStack):
    """A network of `len(rates_bytes_per_s)` hosts on this machine, for as long as the context.

    `rates_bytes_per_s[i]` is the rate of host i's link, the same each way, in Ethernet frames (TCP
    carries 95.6 % of it, see `shaping`). `name` is made of this process's pid where it is None.
    `cores[i]` are the cores that host i may use; without `cores` all hosts share all.

    The network is removed, and what runs in it ended, when the context ends: by an exception,
    Ctrl-C, SIGTERM and SIGHUP too. After a SIGKILL the next testbed does it.

    Assumes: Linux, root, iproute2. Raises: TestbedError, on entry.

        with Testbed([125e6, 125e6]) as testbed:
            testbed.run([["python", "train.py"]] * 2)
    """

    __test__ = False  # pytest takes classes named Test... for tests

    def __init__(
        self,
        rates_bytes_per_s: Sequence[float],
        name: str | None = None,
        cores: Sequence[Collection[int]] | None = None,
    ) -> None:
        super().__init__()
        self.rates_bytes_per_s = tuple(rates_bytes_per_s)
        self._name = name
        self._cores = cores
        self._up: State | None = None

    def __enter__(self) -> Testbed:  # noqa: PYI034 -- typing.Self is of Python 3.11
        self._check_cores()
        with ExitStack() as stack:
            stack.enter_context(as_exceptions())
            with postponed():
                self._up = build(self._name, self.rates_bytes_per_s, this_process())
                stack.callback(self._down)
            self.push(stack.pop_all())
        return self

    def __len__(self) -> int:
        return len(self.rates_bytes_per_s)

    @property
    def name(self) -> str:
        """Its name, with which those of its namespaces begin."""
        return self._state.name

    def address(self, host: int) -> str:
        """The IPv4 address of a host's eth0."""
        return address(self._state, self._host(host))

    def host_prefix(self, host: int) -> tuple[str, ...]:
        """What to put before a command so that it runs on a host."""
        prefix = ("ip", "netns", "exec", host_namespace(self._state, self._host(host)))
        if self._cores is None:
            return prefix
        return (*prefix, "taskset", "-c", ",".join(str(core) for core in self._cores[host]))

    def rank_environment(self, host: int) -> dict[str, str]:
        """What torch.distributed with gloo needs to know on a host: one rank, one thread a host.

        A GPU is hidden: the hosts would share it. And the line rate, for `calibrate` itself.
        """
        return {
            "RANK": str(self._host(host)),
            "WORLD_SIZE": str(len(self)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "DDPSIM_LINE_RATE": f"{8e-9 * min(self.rates_bytes_per_s)!r} Gbit/s",
        }

    def run(
        self,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        on_line: OnLine | None = None,
    ) -> tuple[HostOutput, ...]:
        """Run `commands[i]` on host i, all at once, and wait; gives what each has written.

        Each runs in this process's environment, `rank_environment(i)` and `environment`, the later
        before the earlier. `on_line(host, "stdout" or "stderr", line)` is called as lines come, in
        threads. When one fails, on Ctrl-C or after `timeout_s` seconds all are ended with what
        they started: SIGTERM, 3 s later SIGKILL.

        Raises: HostFailedError for the first that fails, TestbedError for a timeout, and what
        `on_line` raises.
        """
        if len(commands) != len(self):
            raise TestbedError(
                f"{len(commands)} commands for {len(self)} hosts: give one for every host"
            )
        return run_together(
            [(*self.host_prefix(host), *command) for host, command in enumerate(commands)],
            [
                {**os.environ, **self.rank_environment(host), **(environment or {})}
                for host in range(len(self))
            ],
            timeout_s,
            on_line,
        )

    def keep(self) -> None:
        """Leave it up when the context ends, until it is taken down by its name."""
        self._up = keep(self._state)

    @property
    def _state(self) -> State:
        if self._up is None:
            raise TestbedError("this testbed is not up: use it as `with Testbed(...) as testbed:`")
        return self._up

    def _host(self, host: int) -> int:
        if not 0 <= host < len(self):
            raise TestbedError(f"there is no host {host}: choose 0 to {len(self) - 1}")
        return host

    def _down(self) -> None:
        state, self._up = self._state, None
        if state.owner is not None:
            with postponed():
                remove(state)

    def _check_cores(self) -> None:
        if self._cores is None:
            return
        if len(self._cores) != len(self):
            raise TestbedError(
                f"cores for {len(self._cores)} hosts of {len(self)}: give cores for every host"
            )
        usable = os.sched_getaffinity(0)
        for host, cores in enumerate(self._cores):
            if not cores or not usable.issuperset(cores):
                raise TestbedError(
                    f"host {host} cannot have the cores {sorted(cores)}: "
                    f"choose one or more of {sorted(usable)}"
                )
        if shutil.which("taskset") is None:
            raise TestbedError("taskset is not found: install util-linux, or choose no cores")
