"""How a step is evaluated: each instruction once, in the order of launch, without events.

Let `host` be when a rank's host last waited, and `stream` when its device has done all that was
launched so far. The host launches an instruction `offset` ticks after it waited
(`ddpsim.engine.compiled`), and what the instruction does follows from the moments before it:

    launched       = host + offset
    work           : stream  = max(stream, launched) + its time, more while collectives slow it down
    collective     : ready   = max(there, launched) + its own work before it
                     joined  = max(ready, when its communication lane is free)
                     ends    = longest path through its messages, from when all ranks have joined
    wait for it    : stream  = max(stream, launched, ends + its own work after it)
    host waits     : host    = max(stream, launched), or when a batch comes

where `there` is when the data is: the stream, as a Record noted it, or the end of another
collective. A host that computes itself (a CPU's) waits in all that it computes or awaits.

All ranks of all variants of a job at once are arrays of moments (`ddpsim.engine.fast.lanes`); one
rank whose spans are wanted, or that stands for all, has integers (`ddpsim.engine.fast.lane`). Both
give the ticks of SimPy's events (`ddpsim.engine.reference.rank`, the plain model). That holds where
a lane's collectives begin as they are launched, as all that happens before a rank joins one is then
known. `ddpsim.engine.request` says where it does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from ddpsim.strategies.instructions import (
    Await,
    Communicate,
    Compute,
    LoadBatch,
    Mark,
    Record,
    Synchronize,
)


class Evaluator(ABC):
    """Carries out a step's instructions; moments are integers, or arrays of them.

    `blocks`: hosts compute themselves.
    """

    latest: Callable[[Any, Any], Any] = staticmethod(max)

    def __init__(self, *, blocks: bool) -> None:
        self._blocks = blocks
        self._host_ns: Any = 0
        self._stream_ns: Any = 0
        self._sent: list[Any] = []  # the step's collectives
        self._recorded_ns: dict[int, Any] = {}

    def _evaluate(self, parts: Iterable[Any], last_ns: Any) -> None:
        """A step, which the host leaves so long after its last wait."""
        self._sent = []
        for part in parts:
            self._carry_out(part)
        self._host_ns = self._host_ns + last_ns

    def _carry_out(self, part: Any) -> None:
        launched_ns = self._host_ns + part.offset_ns
        match part.first:
            case Compute():
                self._work(part)
            case Communicate():
                self._sent.append(self._join(part, launched_ns))
            case Await(number):
                self._await(number, launched_ns)
            case LoadBatch():
                self._host_ns = self._loaded_ns(launched_ns)
            case Synchronize():
                self._host_ns = self.latest(launched_ns, self._stream_ns)
                self._saw_device_wait(launched_ns)
            case Record(number):
                self._recorded_ns[number] = self._stream_ns
            case Mark(place):
                self._launch(launched_ns)
                self._saw_mark(place)

    def _ready_ns(self, launched: Any, launched_ns: Any) -> Any:
        """When the data of a collective is there."""
        if launched.follows is not None:
            there_ns = self._done_ns(launched.follows)
        elif launched.waits_for is not None:
            there_ns = self._recorded_ns[launched.waits_for]
        else:
            self._launch(launched_ns)
            return self._stream_ns + launched.before_ns
        self._note_wait(there_ns < launched_ns)
        return self.latest(there_ns, launched_ns) + launched.before_ns

    def _await(self, number: int, launched_ns: Any) -> None:
        self._launch(launched_ns)
        done_ns = self._done_ns(number)
        self._saw_comm_wait(done_ns)
        self._come_to(self.latest(self._stream_ns, done_ns))
        if self._blocks:
            self._host_ns = self._stream_ns

    @abstractmethod
    def _work(self, part: Any) -> None:
        """The stream does works that follow each other."""

    @abstractmethod
    def _join(self, part: Any, launched_ns: Any) -> Any:
        """Ranks come to a collective; what is kept of it tells when it is done."""

    @abstractmethod
    def _done_ns(self, number: int) -> Any:
        """When one of the step's collectives is, and its own work after it."""

    @abstractmethod
    def _loaded_ns(self, asked_ns: Any) -> Any:
        """When the batch comes that the host asks for."""

    @abstractmethod
    def _launch(self, launched_ns: Any) -> None:
        """The stream comes to a launch: it may have to wait for it."""

    @abstractmethod
    def _come_to(self, now_ns: Any) -> None:
        """The stream is so far."""

    @abstractmethod
    def _note_wait(self, is_late: Any) -> None:
        """Whether a device, or a collective, has waited for a launch."""

    @abstractmethod
    def _saw_mark(self, place: str) -> None:
        """The stream has come to a place."""

    @abstractmethod
    def _saw_comm_wait(self, done_ns: Any) -> None:
        """The stream waits for a collective until then, if it is not there yet."""

    def _saw_device_wait(self, asked_ns: Any) -> None:  # noqa: B027 -- of many lanes nobody asks
        """The host has waited for its device since then, if at all."""
