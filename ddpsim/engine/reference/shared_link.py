"""Work whose rate may change while it is under way, and a link that several transfers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from simpy import Environment, Event

from ddpsim.engine.sharing import FULL, fair_share


class Progress:
    """One piece of work; `then` is called at the first tick at which `work_ns` at rate 1 are done.

    Progress is piecewise linear and exact: what is left is a fraction, and only the end is
    rounded to a tick, upwards.
    """

    __slots__ = ("_alarm", "_env", "_left", "_rate", "_since_ns", "_then", "done")

    def __init__(
        self, env: Environment, work_ns: int, then: Callable[[], None], rate: Fraction = FULL
    ) -> None:
        self._env = env
        self._left: int | Fraction = work_ns
        self._rate = rate
        self._since_ns = int(env.now)
        self._then = then
        self._alarm = 0
        self.done = False
        self._schedule()

    def set_rate(self, rate: Fraction) -> None:
        """From now on do `rate` ticks of work a tick (above 0); without effect once done."""
        if rate == self._rate or self.done:
            return
        now = int(self._env.now)
        self._left -= (now - self._since_ns) * self._rate
        self._since_ns, self._rate = now, rate
        self._schedule()

    def _schedule(self) -> None:
        self._alarm += 1
        alarm = self._alarm
        left_ns = self._left if self._rate is FULL else self._left / self._rate
        timeout = self._env.timeout(max(0, ceil(left_ns)))
        timeout.callbacks.append(lambda _: self._end(alarm))

    def _end(self, alarm: int) -> None:
        if alarm == self._alarm:  # otherwise the rate has changed since
            self.done = True
            self._then()


class _Flow(NamedTuple):
    """What a transfer takes of the network, and how many times longer it takes when.

    It stands for so many `alike`; a collective's shares the slowest hop with other collectives'.
    """

    share: Fraction
    is_collective: bool
    slowdown: Fraction = FULL
    crowded: Fraction = FULL
    alike: Fraction = FULL


class SharedLink:
    """A node's network, and the slowest hop of the collectives over it: two things to share.

    A collective's transfer that is alone takes up `share` of the network, and the whole hop, which
    all that are in flight share equally. The network they share max-min fairly with what else goes
    over it. While a rank computes, and beside another transfer, each is slowed down by its own
    factor.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._flows: dict[Progress, _Flow] = {}
        self._other = Fraction(0)
        self._computing = False
        self._rests_since_ns = 0
        self._rested_ns = 0

    def transfer(
        self,
        work_ns: int,
        share: Fraction = FULL,
        slowdown: Fraction = FULL,
        crowded: Fraction = FULL,
    ) -> Event:
        """Begin a collective's transfer, `work_ns` alone; the event fires at its end.

        Without a `share` it waits, and takes up neither network nor hop.
        """
        return self._begin(work_ns, _Flow(share, bool(share), slowdown, crowded))

    def read(self, work_ns: int, share: Fraction, alike: Fraction) -> Event:
        """Begin to read samples over the network, `work_ns` alone, for so many loaders `alike`.

        Each takes up `share`. The event fires at the end.
        """
        return self._begin(work_ns, _Flow(share, is_collective=False, alike=alike))

    def burst(self, most_ns: int, work_ns: int) -> int:
        """Ticks of a transfer's `work_ns` that pass at once: as many as the link has rested.

        At most `most_ns`, and none twice: a shaper's bucket fills in silence, at the line rate.
        """
        self._rest()
        self._rested_ns = min(self._rested_ns, most_ns)
        at_once_ns = min(self._rested_ns, work_ns)
        self._rested_ns -= at_once_ns
        return at_once_ns

    def set_computing(self, computing: bool) -> None:  # noqa: FBT001 -- a state, not an option
        """Say whether any rank computes now."""
        self._computing = computing
        self._share_out()

    def set_other(self, share: Fraction) -> None:
        """Say what part of the link another job's traffic wants now."""
        self._rest()
        self._other = share
        self._share_out()

    def _begin(self, work_ns: int, flow: _Flow) -> Event:
        self._rest()
        done = self._env.event()
        progress = Progress(self._env, work_ns, lambda: self._leave(progress, done))
        self._flows[progress] = flow
        self._share_out()
        return done

    def _leave(self, flow: Progress, done: Event) -> None:
        self._rest()
        del self._flows[flow]
        done.succeed()
        self._share_out()

    def _rest(self) -> None:
        """Count how long nothing was in flight, up to now."""
        now = int(self._env.now)
        if not (self._flows or self._other):
            self._rested_ns += now - self._rests_since_ns
        self._rests_since_ns = now

    def _share_out(self) -> None:
        """Each gets what it needs, or an equal part of what the less demanding leave."""
        if not self._flows:
            return
        flows = [flow for flow in self._flows.values() if flow.share]
        is_crowded = len(flows) > 1
        of_hop = Fraction(1, max(1, sum(flow.is_collective for flow in flows)))
        alone = not is_crowded and not self._other
        fair = FULL if alone else self._fair(flows, of_hop)
        for progress, flow in tuple(self._flows.items()):
            rate = of_hop if flow.is_collective else FULL
            if flow.share:
                rate = min(rate, fair / flow.share)
            if self._computing:
                rate /= flow.slowdown
            if is_crowded and flow.share:
                rate /= flow.crowded
            progress.set_rate(rate)

    def _fair(self, flows: Sequence[_Flow], of_hop: Fraction) -> Fraction:
        """The most of the network that any gets, where collectives are no faster than their hop."""
        demands = [
            (flow.share * of_hop if flow.is_collective else flow.share, flow.alike)
            for flow in flows
        ]
        return fair_share([*demands, (self._other, FULL)])
