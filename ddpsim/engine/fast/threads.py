"""Gloo's threads, which send first in, first out, on every rank alike.

All ranks leave a collective together, so that their arrivals follow from their own work and the
ends before. Several may be in flight: when one ends is asked for when a later one needs its thread,
or a stream waits for it. All that begins before that end was launched before, by then: what is
launched later waits for that stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks
from ddpsim.cluster.network import Traffic
from ddpsim.engine.fast.collectives import united_ns
from ddpsim.engine.fast.flows import Flow, Flows, whole
from ddpsim.engine.fast.lane import Met
from ddpsim.engine.fast.trials import TrialSent
from ddpsim.engine.program import Program
from ddpsim.engine.sharing import FULL


@dataclass(frozen=True, eq=False, slots=True)
class _Sent:
    """A collective to which the last rank comes at `met_ns`; then its thread does its own work."""

    met_ns: int
    after_ns: int
    flow: Flow
    flows: Flows

    @property
    def ends_ns(self) -> int:
        """When all ranks leave it."""
        return self.flows.end_ns(self.flow)

    @property
    def figures(self) -> int:
        """See Collective."""
        return 0

    def seen_by(self, ranks: Sequence[int] | None) -> _Sent:  # noqa: ARG002 -- all see the same
        """See Collective."""
        return self

    def of(self, trial: int, place: int) -> Met:  # noqa: ARG002 -- all see the same
        """See Collective."""
        return Met(self.met_ns, self.ends_ns, FULL)


class Threads:
    """The lanes of one job's ranks, [1, ranks], as `InFlight` is elsewhere."""

    def __init__(self, program: Program, traffic: Traffic) -> None:
        self._flows, self._traffic = Flows(traffic), traffic
        self._count, self._blocks = program.comm_workers, program.blocking
        self._busy: list[_Sent] = []
        self._free_ns = 0
        self._launched: list[tuple[Ticks, _Sent]] = []  # in this step, as joined
        # of these: when the first rank joins, when each does, and the last
        self._awaited: deque[tuple[float, Ticks, int]] = deque()
        self.paths = {"whole:shared" if self._count > 1 else "whole"}

    def begin(self) -> None:
        """See InFlight."""
        self._launched.clear()
        self._awaited.clear()

    def join(self, launched: TrialSent, ready_ns: Ticks) -> tuple[Ticks, _Sent]:
        """See InFlight."""
        joined_ns = np.maximum(ready_ns, self._next_free_ns())
        met_ns = int(joined_ns.max())
        transfer, path = whole(launched.transfers[0], self._traffic)
        self.paths |= {path} - {"whole"}
        flow = self._flows.begin(met_ns, transfer)
        sent = _Sent(met_ns, int(launched.after_ns), flow, self._flows)
        self._busy.append(sent)
        self._launched.append((joined_ns, sent))
        self._awaited.append((float(joined_ns.min()), joined_ns, met_ns))
        return joined_ns, sent

    @property
    def comm_ns(self) -> Ticks | float:
        """See InFlight."""
        return sum((sent.ends_ns - joined_ns for joined_ns, sent in self._launched), start=0.0)

    def within(self, start_ns: Ticks, end_ns: Ticks) -> tuple[float, Ticks | float]:
        """See InFlight, but that nothing tells yet in how much of a wait one is in flight."""
        awaited = self._awaited
        while awaited and (awaited[0][-1] <= start_ns).all():
            awaited.popleft()
        last_ns, end_ns = float(np.max(end_ns)), end_ns + 0 * start_ns
        seen = [each[1:] for each in awaited if each[0] < last_ns]
        starts_ns = [np.maximum(joined_ns, start_ns) for joined_ns, _ in seen]
        ends_ns = [np.minimum(met_ns, end_ns) for _, met_ns in seen]
        return 0.0, united_ns(starts_ns, ends_ns, in_order=False)

    def _next_free_ns(self) -> int:
        """A thread is held by its collective, and on a CPU by a hook's work after it."""
        if len(self._busy) == self._count:
            first = self._first_free()
            self._busy.remove(first)
            self._free_ns = self._thread_free_ns(first)
        return self._free_ns

    def _first_free(self) -> _Sent:
        """A hook's work may hold the thread of the first to end for longer than the other's."""
        self._flows.first_ended([sent.flow for sent in self._busy])
        ended = [sent for sent in self._busy if sent.flow.end_ns is not None]
        limit_ns = min(map(self._thread_free_ns, ended))
        ended += [
            sent
            for sent in self._busy
            if sent not in ended and self._flows.ends_by(sent.flow, limit_ns)
        ]
        return min(ended, key=self._thread_free_ns)

    def _thread_free_ns(self, sent: _Sent) -> int:
        return sent.ends_ns + (sent.after_ns if self._blocks else 0)
