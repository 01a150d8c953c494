"""How much of a job must be simulated: which ranks stand for all, and whether events are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        """How to simulate it."""
        program, transfers = self.program, self.program.transfers(self.cost)
        needs_no_events = not any(self._not_in_launch_order(transfers))
        return Plan(
            self._period(transfers, needs_no_events=needs_no_events),
            needs_no_events,
            repeats=self._is_calm_on_hosts and program.is_uniform and program.loader is None,
            on_hosts=not any(self._not_on_hosts(transfers)),
        )

    def _not_in_launch_order(self, transfers: Sequence[Transfer]) -> Iterator[bool]:
        """What makes events needed: instructions cannot be carried out in the order of launch.

        Where hosts compute themselves, several collectives are in flight, or something else than
        another job's traffic slows them. Arrays slow compute by thousandths
        (`ddpsim.engine.fast.slow_periods`), and by as many under one collective as under two, where
        groups of ranks send at once; these begin as launched.
        """
        program = self.program
        yield from self._varies_as_sent
        yield program.blocking or not program.comm_spins or _several(program, transfers)
        yield any((1000 * each.interference.compute).denominator != 1 for each in transfers)
        yield program.is_grouped and not _slow_alike(transfers)
        yield program.overtakes

    def _not_on_hosts(self, transfers: Sequence[Transfer]) -> Iterator[bool]:
        """What makes events needed of gloo's threads, whose transfers slow each other alone."""
        program = self.program
        yield from self._varies_as_sent
        yield self.is_calm or program.is_grouped
        yield not (program.blocking or (program.comm_workers > 1 and program.sends_in_line))
        for each in transfers:
            slowing = each.interference
            yield slowing.slows_transfer or slowing.slows_compute
            yield bool(getattr(each, "burst_ns", 0))

    @property
    def _varies_as_sent(self) -> tuple[bool, bool]:
        """Whether a loader's batches share the network, or ranks fare unevenly beside transfers."""
        return bool(self.traffic.loader_share), self.kept_deviations is not None

    @property
    def _is_calm_on_hosts(self) -> bool:
        """A host that computes itself begins a step when all is idle."""
        return self.is_calm and self.program.blocking and self.traffic == NO_TRAFFIC

    def _period(self, transfers: Sequence[Transfer], *, needs_no_events: bool) -> int:
        """Ranks are folded unless noise is drawn for each."""
        if not self.is_calm:
            return self.world_size
        if _several(self.program, transfers) or self.traffic != NO_TRAFFIC:
            return 1
        rings = self.program.transfers(self.cost, "world")  # links in other groups are alike
        return self._whole_groups(_period(rings), needs_no_events=needs_no_events)

    def _whole_groups(self, period: int, *, needs_no_events: bool) -> int:
        """The least multiple of a period of the ring that groups of neighbours come again in."""
        groups = {group for group, *_ in self.program.sent} - {"world"}
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
        return noise or self._traffic_varies

    @cached_property
    def _traffic_varies(self) -> bool:
        """Steady traffic does not, but where a shaper's bucket fills in silence."""
        if self.traffic == NO_TRAFFIC or self.traffic.changes:
            return self.traffic.changes
        return any(getattr(each, "burst_ns", 0) for each in self.program.transfers(self.cost))

    def without_variation(self) -> Request:
        """Return the job with steps as calm as the warm-up's, beside steady traffic alone."""
        if not self.varies:
            return self
        drawn = self.slowdowns
        lasting = None if drawn is None or (drawn[:, 0] == 1).all() else 0 * drawn + drawn[:, :1]
        traffic = NO_TRAFFIC if self._traffic_varies else self.traffic
        calm = replace(self, stalls=None, traffic=traffic, kept_deviations=None)
        return replace(calm, slowdowns=lasting, sums=None if lasting is None else self.sums)

    def longer(self, warmup: int) -> Request:
        """The job with so many steps of warm-up, no fewer than now, like the first."""
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


def _several(program: Program, transfers: Sequence[Transfer]) -> bool:
    """Whether collectives may slow each other, or be slowed by compute."""
    return program.comm_workers > 1 or any(each.interference.slows_transfer for each in transfers)


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
