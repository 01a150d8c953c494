"""The job a rank is in: who takes part, on what device, and what the ranks tell each other."""

from __future__ import annotations

import atexit
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from calibrate.measure.clock import Clock
from calibrate.measure.errors import (
    LostContactError,
    MeasureError,
    RefusedError,
    StoppedError,
    first_line,
)
from calibrate.measure.host.machine import keep_freed_memory, text_of
from calibrate.measure.model.training import problem_in_code
from calibrate.measure.ranks.launch import end_now
from calibrate.records.record import JobOptions, Layout
from ddpsim.errors import DdpsimError
from ddpsim.wording import counted

_T = TypeVar("_T")
_REMOTE = "remote process exited"  # NCCL's ncclRemoteError, in words
# gloo's errors begin with the source file that they are from, but for the one that follows on a
# timeout (gloo's transport/tcp/pair.cc and unbound_buffer.cc)
_GLOO_LOST = ("gloo/transport/", "Application timeout caused pair closure")
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LET_GO_S = 0.2
_PRIORITY = 1  # the lowest of the real-time ones
_SETTLE_S = 0.1


@dataclass(frozen=True)
class Place:
    """A rank's place in its job: torchrun's variables."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: str

    @property
    def layout(self) -> Layout:
        """Nodes and ranks a node."""
        return Layout(
            nodes=self.world_size // self.local_world_size,
            gpus_per_node=self.local_world_size,
            line_rate_bytes_per_s=None,
        )


def read_place(variables: Mapping[str, str]) -> Place:
    """Read torchrun's variables; raises MeasureError that says which is missing or wrong."""
    missing = [name for name in _NEEDED if not variables.get(name)]
    if missing:
        raise MeasureError(
            f"{', '.join(missing)} not set: start the ranks with torchrun, "
            "or measure this machine alone with --local N"
        )
    try:
        rank, world, local_rank, local_world = (int(variables[name]) for name in _NEEDED[:4])
    except ValueError as error:
        raise MeasureError(f"{', '.join(_NEEDED[:4])} must be whole numbers: {error}") from None
    if not (0 <= rank < world and 0 <= local_rank < local_world):
        raise MeasureError(
            f"RANK {rank} of WORLD_SIZE {world}, LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE "
            f"{local_world}: a rank must be below its world size"
        )
    if world % local_world:
        raise MeasureError(
            f"WORLD_SIZE {world} is no multiple of LOCAL_WORLD_SIZE {local_world}: "
            "start as many ranks on every node"
        )
    if rank % local_world != local_rank:
        raise MeasureError(
            f"RANK {rank} is LOCAL_RANK {local_rank} of {local_world}: ranks must be numbered node "
            "by node, as torchrun does (srun: --distribution=block)"
        )
    master = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    return Place(rank, world, local_rank, local_world, master)


class Job:
    """An initialised torch.distributed job, and its ranks' talk aside from what is measured."""

    def __init__(
        self, place: Place, timeout_s: float, *, owned: bool, comm_first: bool = False
    ) -> None:
        self.place, self._comm_first, self.gloo_threads = place, comm_first, ""
        self.rank, self.world_size = place.rank, place.world_size
        self.backend = str(dist.get_backend())
        if self.backend not in ("nccl", "gloo"):
            raise MeasureError(
                f"the job that is initialised has the backend {self.backend}: wanted one, nccl or "
                'gloo, as of init_process_group("nccl")'
            )
        self.device = torch.device("cpu")
        if self.backend == "nccl":
            self.device = torch.device(f"cuda:{_gpu_of(place) or 0}")
            torch.cuda.set_device(self.device)
        self.clock = Clock(self.device)
        self.allocator = keep_freed_memory() if self.device.type == "cpu" else ""
        self._owned = owned
        # talk goes by gloo and the CPU even where NCCL is measured: it leaves the GPU alone
        self._talk = (
            dist.group.WORLD
            if self.backend == "gloo"
            else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        )
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._put_first()

    def everyone(self, value: _T) -> list[_T]:
        """What each rank says, by rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._talk)
        return values

    def from_first(self, value: _T) -> _T:
        """What rank 0 says."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self._talk)
        first: _T = values[0]
        return first

    def check(self, problem: str) -> None:
        """Raise RefusedError on every rank where rank 0 has a problem."""
        problem = self.from_first(problem)
        if problem:
            raise RefusedError(problem)

    def first_does(self, work: Callable[[], _T]) -> _T:
        """What rank 0's work gives; where that raises DdpsimError, RefusedError on every rank."""
        done, problem = list[_T](), ""
        if self.rank == 0:
            try:
                done.append(work())
            except DdpsimError as error:
                problem = str(error)
        self.check(problem)
        return self.from_first(done)[0]

    def numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Gather as many floats from each rank, by rank."""
        mine = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine, group=self._talk)
        return [list(map(float, theirs)) for theirs in rows]

    def by_round(self, rows: Sequence[Sequence[float]]) -> list[tuple[tuple[float, ...], ...]]:
        """For each column of this rank's rows: seconds [round][rank], to the nanosecond."""
        width = len(rows[0])
        ranks = self.numbers([round(value, 9) for row in rows for value in row])
        return [
            tuple(tuple(rank[i * width + column] for rank in ranks) for i in range(len(rows)))
            for column in range(width)
        ]

    def barrier(self) -> None:
        """Wait for all ranks, with nothing left to do on any stream of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self._talk)

    def open_groups(self, all_ranks: Sequence[tuple[int, ...]]) -> None:
        """Make process groups; every rank must call this with the same list."""
        for ranks in all_ranks:
            if ranks not in self._groups:
                whole = ranks == tuple(range(self.world_size))
                self._groups[ranks] = (
                    dist.group.WORLD
                    if whole
                    else dist.new_group(list(ranks), timeout=self._timeout)
                )
        self._put_first()

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of ranks that `open_groups` made."""
        group = self._groups[ranks]
        if group is None:  # pragma: no cover -- WORLD is only None before the job has begun
            raise MeasureError("the job has no process group")
        return group

    def _put_first(self) -> None:
        """gloo's threads before compute, if that was asked for; those of new groups too."""
        if self._comm_first and self.backend == "gloo":
            permitted = all(self.everyone(gloo_first()))
            self.gloo_threads = "before compute" if permitted else "not permitted before compute"

    def leave(self, *, failed: bool = False) -> None:
        """End the job, if `join` began it; with NCCL not where it failed.

        NCCL's own end waits for peers that may be gone (torch's ProcessGroupNCCL::shutdown), and so
        may the interpreter's: this process then ends without it, once all has been said.
        """
        if not self._owned or not dist.is_initialized():
            return
        if failed and self.backend == "nccl":
            atexit.register(end_now, 1)
        else:
            _end_process_groups()


def join(
    timeout_s: float, variables: Mapping[str, str] | None = None, *, comm_first: bool = False
) -> Job:
    """Join the job of torchrun's variables, or the one that is initialised already.

    NCCL if each rank has a CUDA device of its own, otherwise gloo on the CPU.
    `timeout_s` bounds the wait for the other ranks and every exchange with them; raises
    MeasureError if it runs out. `comm_first`: see `gloo_first`.
    """
    place = read_place(os.environ if variables is None else variables)
    owned = not dist.is_initialized()
    if owned:
        gpu = _gpu_of(place)
        backend = "gloo" if gpu is None or not dist.is_nccl_available() else "nccl"
        if backend == "nccl":
            torch.cuda.set_device(gpu)
        try:
            dist.init_process_group(
                backend,
                timeout=timedelta(seconds=timeout_s),
                rank=place.rank,
                world_size=place.world_size,
            )
        except (RuntimeError, ValueError) as error:  # DistStoreError and such: RuntimeErrors
            problem = _not_joined(place, timeout_s, backend, first_line(error))
            raise MeasureError(problem) from None
    try:
        return Job(place, timeout_s, owned=owned, comm_first=comm_first)
    except RuntimeError as error:
        raise MeasureError(
            f"rank {place.rank} cannot talk to the others by gloo, as ranks do beside NCCL: "
            "set GLOO_SOCKET_IFNAME to the interface that joins the nodes "
            f"(torch: {first_line(error)})"
        ) from None


def _gpus_seen() -> int:
    """CUDA devices that this rank may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def on_the_cpu(job: Job) -> str:
    """What to do where gloo is measured though this rank sees GPUs; empty where that is not so."""
    seen = _gpus_seen()
    if job.backend != "gloo" or not seen:
        return ""
    ranks = counted(job.place.local_world_size, "rank")
    return (
        f"{counted(seen, 'CUDA device')} for {ranks} here: gloo on the CPU is measured; for NCCL "
        "start no more ranks than devices"
    )


def _gpu_of(place: Place) -> int | None:
    """The rank's own CUDA device; None: there is none for each.

    A launcher such as `srun --gpus-per-task 1` shows each rank its own alone.
    """
    seen = _gpus_seen()
    if seen >= place.local_world_size:
        return place.local_rank
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return 0 if seen == len(shown) == 1 else None


@contextmanager
def taking_part(options: JobOptions) -> Iterator[Job]:
    """Join a job, see `join`, and leave it at the end, however that comes.

    What torch or Ctrl-C ends it with comes out as a MeasureError, with what is kept of the work.
    """
    job = join(options.timeout_s, comm_first=options.comm_first)
    try:
        yield job
    except BaseException as error:
        job.leave(failed=not isinstance(error, RefusedError))  # which every rank raises
        problem = _problem_of(error, job.rank, options.kept)
        if problem is None:
            raise
        raise problem from error
    job.leave()


def _problem_of(error: BaseException, rank: int, kept: str) -> MeasureError | None:
    """What to tell of an error that is torch's, or Ctrl-C; None of others."""
    is_of_a_peer = False
    match error:
        case KeyboardInterrupt():
            return StoppedError(f"stopped. {kept}")
        case torch.AcceleratorError():
            return MeasureError(f"the GPU of rank {rank} failed: {first_line(error)}. {kept}")
        case dist.DistBackendError():
            if _REMOTE in str(error):
                return LostContactError(f"rank {rank}: {first_line(error)}. {kept}")
            return MeasureError(f"NCCL of rank {rank} failed: {first_line(error)}. {kept}")
        case dist.DistStoreError() | dist.DistNetworkError():
            is_of_a_peer = True
        case Exception():
            is_gloo = any(words in str(error) for words in _GLOO_LOST)
            is_of_a_peer = isinstance(error, RuntimeError) and is_gloo
    if is_of_a_peer:
        return LostContactError(
            f"rank {rank} lost contact with another rank: did one die, or run out of memory? "
            f"{kept} (torch: {first_line(error)})"
        )
    problem = problem_in_code(error) if isinstance(error, Exception) else None
    return MeasureError(f"rank {rank}: {str(problem).rstrip('.')}. {kept}") if problem else None


def _not_joined(place: Place, timeout_s: float, backend: str, first: str) -> str:
    """What to do where a job did not come about; torch's own words at the end."""
    if named := re.search(r"Unable to find address for: (\S+)", first):  # gloo's device.cc
        return (
            f"GLOO_SOCKET_IFNAME names {named[1]}, which has no address on this host or is not "
            "there: name one that joins the nodes, or unset it (ip addr lists them)"
        )
    devices = counted(_gpus_seen(), "CUDA device")
    ranks = counted(place.local_world_size, "rank")
    took = f"that every rank takes {backend}, as this one, which sees {devices} for {ranks} here"
    if place.rank:
        advice = (
            f"rank {place.rank} cannot reach rank 0 at {place.master} within {timeout_s:g} s: "
            "check that rank 0 runs, that MASTER_ADDR and MASTER_PORT are those of its node, "
            f"{took}, and that no firewall is between"
        )
    else:
        advice = (
            f"the job of {place.world_size} ranks did not come about at {place.master} within "
            f"{timeout_s:g} s: check that every rank was started, with this MASTER_ADDR and "
            f"MASTER_PORT, {took}, and that the port is free"
        )
    return f"{advice} (torch: {first})"


@contextmanager
def process_group(backend: str) -> Iterator[None]:
    """A process group of this process, where it is in none yet."""
    if dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        _end_process_groups()


def _end_process_groups() -> None:
    """End all groups of this process, once gloo's threads have let go of what they sent.

    Seen with torch 2.13 on a busy machine: such a thread waits for Python's lock to drop its last
    tensor, and ~ProcessGroupGloo, which DDP's reducer may call later, for that thread, with the
    lock. Nothing tells when they are done; asleep, this one leaves them the lock.
    """
    time.sleep(_LET_GO_S)
    dist.destroy_process_group()


def gloo_first() -> bool:
    """Give gloo's threads of this rank a real-time priority; every rank calls this together.

    For hosts that have one core for compute and gloo. Its threads wait for each other by trying
    again: its loop polls on while another thread holds a connection's lock, and a buffer that is
    done yields until the loop has let go of it. With a core to spare that takes microseconds. Where
    all threads of a rank share one core, the one that tries keeps the other from running until the
    scheduler's next tick: seen by tracing, 4 ms at HZ=250, in every second all-reduce of 64 KiB.
    Threads of one real-time priority do not interrupt each other, and so never wait for one that
    they have interrupted.

    Returns whether that is permitted: it needs root, and a share of real time for its cgroup.
    """
    dist.barrier()
    time.sleep(_SETTLE_S)  # until the barrier's own threads have come to rest
    try:
        for thread in Path("/proc/self/task").iterdir():
            if "gloo" in text_of(thread / "comm"):
                # of equals by turns: should one wait for another, it is interrupted after 100 ms
                os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(_PRIORITY))
    except PermissionError:
        return False
    time.sleep(_SETTLE_S)  # until all ranks have done so
    return True
