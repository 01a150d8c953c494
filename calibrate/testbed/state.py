"""What a testbed has made, on file: so that it can be removed after whatever happens.

One JSON file a testbed in /run/ddpsim, beside /run/netns where `ip netns` keeps its own; both
belong to the machine and to root, and neither outlives a boot. A namespace is on file before it
is made, so a crash at any point leaves nothing that no file lists.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from calibrate.files import Part, save_json
from calibrate.testbed.errors import TestbedError

FOLDER = Path("/run/ddpsim")
_SUFFIX = ".testbed.json"


class Owner(Part):
    """A process, told from a later one with the same pid by its start."""

    pid: int
    start_ticks: int = Field(description="field 22 of /proc/PID/stat: since boot, in clock ticks")

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return _start_ticks(self.pid) == self.start_ticks


class State(Part):
    """One testbed: what was made for it, and for whom."""

    schema_: Literal["ddpsim.testbed/1"] = Field("ddpsim.testbed/1", alias="schema")
    name: str
    subnet: str = Field(description="the first three numbers of its addresses: '10.77.0'")
    rates_bytes_per_s: tuple[float, ...] = Field(description="of host i's link, each way")
    namespaces: tuple[str, ...] = Field((), description="made, or about to be")
    owner: Owner | None = Field(None, description="who removes it; None: it stays until `down`")

    def __len__(self) -> int:
        return len(self.rates_bytes_per_s)

    @property
    def abandoned(self) -> bool:
        """Whether the process that should have removed it is gone."""
        return self.owner is not None and not self.owner.alive


def this_process() -> Owner:
    """The owner of what this process makes."""
    return Owner(pid=os.getpid(), start_ticks=_start_ticks(os.getpid()) or 0)


def load_states() -> list[State]:
    """Every testbed of this machine, by name; raises TestbedError for a file that is none."""
    return [_load(path) for path in sorted(FOLDER.glob(f"*{_SUFFIX}"))]


def save(state: State) -> None:
    """Write a testbed's file whole; raises TestbedError where it cannot be written."""
    try:
        save_json(state, _path(state.name))
    except OSError as error:
        raise TestbedError(_unwritable(error)) from None


def forget(state: State) -> None:
    """Delete a testbed's file, if it is there."""
    _path(state.name).unlink(missing_ok=True)


@contextmanager
def locked() -> Iterator[None]:
    """Hold the machine's testbeds: one process at a time makes or removes any."""
    try:
        FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
        handle = os.open(FOLDER, os.O_RDONLY)
    except OSError as error:
        raise TestbedError(_unwritable(error)) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _load(path: Path) -> State:
    try:
        return State.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        raise TestbedError(
            f"{path} cannot be read as a testbed of this version of ddpsim: remove what it lists "
            "with `ip netns delete`, then the file"
        ) from None


def _path(name: str) -> Path:
    return FOLDER / f"{name}{_SUFFIX}"


def _unwritable(error: OSError) -> str:
    return (
        f"{FOLDER} cannot be written ({error.strerror}), and without a list of what it made the "
        "testbed could not remove it: make the folder writable"
    )


def _start_ticks(pid: int) -> int | None:
    """When a process started, or None if it does not run (a zombie does not)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in {"Z", "X"} else int(fields[19])
