"""How much of a job must be simulated: which ranks stand for all, and whether events are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, TypeVar

from ddpsim.cluster.cost import CollectiveCost
from ddpsim.cluster.network import NO_TRAFFIC, Traffic
from ddpsim.cluster.process_groups import GroupedCost
from ddpsim.cluster.transfers import RingTransfer, Transfer
from ddpsim.engine.noise import KeptDeviations, Slowdowns, Stalls, vary
from ddpsim.engine.program import Program

if TYPE_CHECKING:
    from ddpsim.engine.fast.work_sums import WorkSums

__all__ = ["Plan", "Request"]

_Drawn = TypeVar("_Drawn", Slowdowns, Stalls)


@dataclass(frozen=True)
class Plan:
    """How many ranks to simulate, whether events are needed for it, and whether steps repeat.

    `period`: so many ranks stand for all, as rank r does what rank r % period does. `repeats`: all
    steady steps are the same. `on_hosts`: gloo's threads send, of every rank, and transfers slow
    each other alone.
    """

    period: int
    needs_no_events: bool
    repeats: bool
    on_hosts: bool = False


@dataclass(frozen=True)
class Request:
    """A program on `world_size` ranks.

    `slowdowns` and `stalls` are [rank, iteration], `kept_deviations` [rank, iteration, burst]
    (`ddpsim.engine.noise`); `traffic`: what else the nodes' network carries. `sums`: of the work
    of these ranks, where nothing but their lasting slowdowns makes it differ.
    """

    program: Program
    cost: CollectiveCost
    world_size: int
    slowdowns: Slowdowns | None = None
    stalls: Stalls | None = None
    traffic: Traffic = NO_TRAFFIC
    kept_deviations: KeptDeviations | None = None
    sums: WorkSums | None = None

    @cached_property
    def plan(self) -> Plan:
        """How to simulate it.

        Ranks are folded unless noise is drawn for each. No events are needed where hosts run
        ahead, collectives come one at a time, and nothing slows these but another job's traffic;
        slowdowns of compute must be in thousandths for it (`ddpsim.engine.fast.slow_periods`), and
        where groups of ranks send at once, as large under one collective as under two, and begin as
        launched. A host that computes itself begins a step when all is idle, where there is no
        noise, traffic or loader.
        """
        program, transfers = self.program, self.program.transfers(self.cost)
        slowed = any(transfer.interference.slows_transfer for transfer in transfers)
        several = program.comm_workers > 1 or slowed
        thousandths = (1000 * transfer.interference.compute for transfer in transfers)
        needs_no_events = (
            not several
            and not self.traffic.loader_share
            and self.kept_deviations is None
            and not program.blocking
            and program.comm_spins
            and all(factor.denominator == 1 for factor in thousandths)
            and (not program.is_grouped or _slow_alike(transfers))
            and not program.overtakes
        )
        period = self.world_size
        if self.is_calm:
            rings = program.transfers(self.cost, "world")  # links in other groups are alike
            whole = several or self.traffic != NO_TRAFFIC
            period = (
                1 if whole else self._whole_groups(_period(rings), needs_no_events=needs_no_events)
            )
        return Plan(
            period,
            needs_no_events,
            repeats=self.is_calm
            and program.blocking
            and program.is_uniform
            and program.loader is None
            and self.traffic == NO_TRAFFIC,
            on_hosts=(program.blocking or (program.comm_workers > 1 and program.sends_in_line))
            and not program.is_grouped
            and not self.is_calm
            and not self.traffic.loader_share
            and self.kept_deviations is None
            and not slowed
            and not any(transfer.interference.slows_compute for transfer in transfers)
            and not any(getattr(transfer, "burst_ns", 0) for transfer in transfers),
        )

    def _whole_groups(self, period: int, *, needs_no_events: bool) -> int:
        """The least multiple of a period of the ring that groups of neighbours come again in."""
        groups = {group for group, *_ in self.program.sent()} - {"world"}
        if period == 1 or not groups or not isinstance(self.cost, GroupedCost):
            return period
        if "across_nodes" in groups or not needs_no_events:
            return self.world_size
        ranks = lcm(period, *(self.cost.mesh.size(group) for group in groups))
        return self.world_size if self.world_size % ranks else ranks

    @property
    def is_calm(self) -> bool:
        """Whether no rank has noise of its own."""
        return self.slowdowns is None and self.stalls is None and self.kept_deviations is None

    @cached_property
    def varies(self) -> bool:
        """Whether noise or traffic makes one step unlike another.

        What ranks differ by for good does not.
        """
        noise = self.kept_deviations is not None or vary(self.slowdowns, self.stalls)
        return noise or self.traffic != NO_TRAFFIC

    def without_variation(self) -> Request:
        """The same job with all of its steps as calm as those of the warm-up, without traffic."""
        if not self.varies:
            return self
        drawn = self.slowdowns
        lasting = None if drawn is None or (drawn[:, 0] == 1).all() else 0 * drawn + drawn[:, :1]
        calm = replace(self, stalls=None, traffic=NO_TRAFFIC, kept_deviations=None)
        return replace(calm, slowdowns=lasting, sums=None if lasting is None else self.sums)

    def longer(self, warmup: int) -> Request:
        """The same job with so many steps of warm-up, no fewer than now, like the first."""
        more = warmup - self.program.warmup
        if not more:
            return self

        def later(drawn: _Drawn) -> _Drawn:
            return drawn[:, [0] * more + list(range(drawn.shape[1]))]

        return replace(
            self,
            program=replace(self.program, warmup=warmup),
            slowdowns=None if self.slowdowns is None else later(self.slowdowns),
            stalls=None if self.stalls is None else later(self.stalls),
            kept_deviations=None if self.kept_deviations is None else later(self.kept_deviations),
        )


def _slow_alike(transfers: Sequence[Transfer]) -> bool:
    """Whether compute is as slow under any of them as under several, which are in flight at once.

    Those of different groups are.
    """
    slowings = (transfer.interference for transfer in transfers)
    return len({max(each.compute, each.crowded_compute) for each in slowings}) <= 1 and all(
        transfer.interference.crowded_compute <= transfer.interference.compute
        for transfer in transfers
    )


def _period(transfers: Sequence[Transfer]) -> int:
    """After how many neighbouring ranks the links of the rings come again, as those of nodes do.

    Where all ranks leave every transfer together, they are alike.
    """
    steps_of_rank = _steps_of_rank(transfers)
    ranks = max(1, len(steps_of_rank))
    divisors = (period for period in range(1, ranks + 1) if ranks % period == 0)
    return next(p for p in divisors if steps_of_rank[:p] * (ranks // p) == steps_of_rank)


def _steps_of_rank(transfers: Sequence[Transfer]) -> list[tuple[int, ...]]:
    """What the link to each rank takes for each transfer, busy and latency."""
    rings = [
        times_ns
        for transfer in transfers
        if isinstance(transfer, RingTransfer)
        for times_ns in (transfer.busy_ns, transfer.latency_ns)
    ]
    return list(zip(*rings, strict=True))
