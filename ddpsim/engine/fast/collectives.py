"""A collective of many ranks and trials, and the waits for it, in arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ddpsim.cluster.algorithms.max_plus import Ticks, by_steps, ring_ends_ns
from ddpsim.cluster.cost import CollectiveCost
from ddpsim.cluster.network import NO_TRAFFIC, Traffic
from ddpsim.cluster.process_groups import GroupedCost
from ddpsim.cluster.transfers import (
    ProcessGroup,
    RingTransfer,
    ScheduledTransfer,
    Transfer,
    duration_ns,
)
from ddpsim.engine.fast.flows import Flows, whole
from ddpsim.engine.fast.lane import Met, closed_form
from ddpsim.engine.fast.trials import TrialSent, column

_FEW_ROWS = 8  # that are sorted by comparing each two, quicker than by numpy's sort
_QUICK_STEPS, _QUICK_LANES = 16, 1000  # about so many steps of fewer lanes take as one ring does
_MOST_REMEMBERED = 2**25  # figures, 256 MiB


@dataclass(frozen=True, slots=True)
class Collective:
    """What it is in each trial (or in all), its last arrival and its ends, [trials, ranks].

    Or [trials, 1], where all ranks share them.
    """

    transfers: Sequence[Transfer]
    met_ns: Ticks
    ends_ns: Ticks

    def seen_by(self, ranks: Sequence[int] | None) -> Collective:
        """What these ranks see, or all (None), in no more room than it takes."""
        both_ns = (self.met_ns, self.ends_ns)
        alike = (ns.shape[1] == 1 or not ns.strides[1] for ns in both_ns)
        met_ns, ends_ns = (
            ns[:, :1].copy() if is_alike else ns if ranks is None else ns[:, ranks]
            for ns, is_alike in zip(both_ns, alike, strict=True)
        )
        return Collective(self.transfers, met_ns, ends_ns)

    @property
    def figures(self) -> int:
        """How many it holds."""
        return self.met_ns.size + self.ends_ns.size

    def later(self, by_ns: Ticks) -> Collective:
        """Return the collective so many ticks later."""
        met_ns, ends_ns = (_later(ns, by_ns) for ns in (self.met_ns, self.ends_ns))
        return Collective(self.transfers, met_ns, ends_ns)

    def of(self, trial: int, place: int) -> Met:
        """One rank's view of it."""
        slowdown = self.transfers[trial % len(self.transfers)].interference.compute
        met_ns, end_ns = (
            int(ns[trial, place if ns.shape[1] > 1 else 0]) for ns in (self.met_ns, self.ends_ns)
        )
        return Met(met_ns, end_ns, slowdown)


def _later(moments_ns: Ticks, by_ns: Ticks) -> Ticks:
    """[trials, ranks] so much later, [trials, 1]; where all ranks share one, they still do."""
    if moments_ns.strides[1]:
        return moments_ns + by_ns
    return np.broadcast_to(moments_ns[:, :1] + by_ns, moments_ns.shape)


class Seen(Protocol):
    """A collective, of which some ranks are remembered, or all (None)."""

    @property
    def figures(self) -> int:
        """How many numbers it holds."""
        ...

    def seen_by(self, ranks: Sequence[int] | None) -> Seen:
        """What remains of it, for these ranks."""
        ...

    def of(self, trial: int, place: int) -> Met:
        """How one rank met it in one trial."""
        ...


class Remembered:
    """Collectives as some ranks saw them, or as all did (None) while there is room for it.

    `is_whole`: there was. `remembers`: anything at all.
    """

    def __init__(self, ranks: Sequence[int] | None) -> None:
        self._ranks = ranks
        self._seen: list[Seen] = []
        self._figures = 0
        self.is_whole, self.remembers = True, ranks is None or len(ranks) > 0

    def add(self, collective: Seen) -> None:
        """One more."""
        if not (self.is_whole and self.remembers):
            return
        self._seen.append(collective.seen_by(self._ranks))
        self._figures += self._seen[-1].figures
        if self._ranks is None and self._figures > _MOST_REMEMBERED:
            self.is_whole = False
            self._seen.clear()

    def of(self, trial: int, rank: int) -> Iterator[Met]:
        """The collectives of one rank, in order."""
        place = rank if self._ranks is None else self._ranks.index(rank)
        return (collective.of(trial, place) for collective in self._seen)


class InFlight:
    """The collectives of an iteration, one after the other in each group of ranks.

    Of [trials, ranks], where ranks are all of a mesh or one that stands for them. `traffics`:
    another job's beside each trial, or beside none. `counts`: how long ranks wait is asked;
    `tells`: or when they meet. `paths`: how collectives were found.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        cost: CollectiveCost,
        traffics: Sequence[Traffic],
        *,
        counts: bool,
        tells: bool,
    ) -> None:
        self._shape = shape
        self._counts, self._tells = counts, tells
        self._traffics = traffics if any(each != NO_TRAFFIC for each in traffics) else ()
        self._networks = [Flows(traffic) for traffic in self._traffics]
        self.paths: set[str] = set()
        self.comm_ns: Ticks | float = 0.0  # in which ranks are in collectives, in this iteration
        self._mesh = cost.mesh if isinstance(cost, GroupedCost) else None
        self._free_ns: dict[ProcessGroup, Ticks | float] = {}  # when a group's lane is
        self._launched: dict[ProcessGroup, deque[tuple[Ticks, Collective]]] = {}  # as joined

    def begin(self) -> None:
        """An iteration."""
        self._launched.clear()
        self.comm_ns = 0.0

    def join(self, launched: TrialSent, ready_ns: Ticks) -> tuple[Ticks, Collective]:
        """When ranks come to a collective that is ready, and what becomes of it."""
        group = launched.group
        joined_ns = np.maximum(ready_ns, self._free_ns.get(group, 0.0))
        ends_ns = self._ends_ns(group, launched.transfers, joined_ns)
        self._free_ns[group] = ends_ns
        met_ns = self._met(group, joined_ns) if self._tells else ends_ns
        collective = Collective(launched.transfers, met_ns, ends_ns)
        if self._counts:
            self.comm_ns = self.comm_ns + (ends_ns - joined_ns)
            self._launched.setdefault(group, deque()).append((joined_ns, collective))
        return joined_ns, collective

    @property
    def tells_by_layers(self) -> bool:
        """Whether collectives take as long whenever they begin."""
        return not self._traffics

    def standing(self, groups: Iterable[ProcessGroup], now_ns: Ticks) -> list[Ticks]:
        """When these groups' lanes are free, and what ranks that are at `now_ns` may wait for."""
        moments_ns = [np.asarray(self._free_ns[group]) for group in sorted(groups)]
        for launched in self._launched.values():
            for joined_ns, each in launched:
                if (each.ends_ns > now_ns).any():
                    seen_ns = (joined_ns, each.met_ns, each.ends_ns)
                    moments_ns += [np.maximum(ns, now_ns) for ns in seen_ns]
        return moments_ns

    def put_off(self, groups: Iterable[ProcessGroup], by_ns: Ticks) -> None:
        """All that these groups do comes so much later."""
        self._free_ns.update({group: self._free_ns[group] + by_ns for group in groups})
        for launched in self._launched.values():
            later = [(joined_ns + by_ns, each.later(by_ns)) for joined_ns, each in launched]
            launched.clear()
            launched.extend(later)

    def _met(self, group: ProcessGroup, joined_ns: Ticks) -> Ticks:
        """When the last rank of each group has come."""
        met_ns: Ticks = self._by_group(group, joined_ns).max(axis=-1, keepdims=True)
        if met_ns.ndim == joined_ns.ndim:
            return met_ns
        members = self._shape[1] // met_ns.shape[1]
        return self._by_rank(group, np.repeat(met_ns, members, axis=-1))

    def _ends_ns(
        self, group: ProcessGroup, transfers: Sequence[Transfer], joined_ns: Ticks
    ) -> Ticks:
        """When each rank ends a collective that it joins, [trials, ranks]."""
        if self._traffics:
            return self._ends_beside_traffic(group, transfers, joined_ns)
        grouped_ns = self._by_group(group, joined_ns)
        if len(transfers) == 1:
            ends, path = collective_ends_ns(transfers[0], grouped_ns)
            self.paths.add(path)
            return self._by_rank(group, ends)
        if self._shape[1] == 1:
            self.paths |= {closed_form(transfer) for transfer in transfers}
            return joined_ns + column([duration_ns(transfer) for transfer in transfers])
        if (ends_ns := _rings_end_ns(transfers, grouped_ns)) is not None:
            return self._by_rank(group, ends_ns)
        ends_ns = np.empty(grouped_ns.shape)
        for transfer, rows in _alike(transfers):
            ends_ns[rows], path = collective_ends_ns(transfer, grouped_ns[rows])
            self.paths.add(path)
        return self._by_rank(group, ends_ns)

    def _ends_beside_traffic(
        self, group: ProcessGroup, transfers: Sequence[Transfer], joined_ns: Ticks
    ) -> Ticks:
        """All ranks leave together; the links of groups carry no traffic."""
        met_ns = np.broadcast_to(self._met(group, joined_ns), joined_ns.shape)
        ends_ns = np.empty_like(joined_ns)
        for i, (network, traffic) in enumerate(zip(self._networks, self._traffics, strict=True)):
            transfer, path = whole(transfers[i % len(transfers)], traffic)
            self.paths |= {"whole", path}
            if group == "world":
                ends_ns[i] = network.end_alone_ns(int(met_ns[i, 0]), transfer)
            else:
                ends_ns[i] = met_ns[i] + duration_ns(transfer)
        return ends_ns

    def within(self, start_ns: Ticks, end_ns: Ticks) -> tuple[Ticks | float, Ticks | float]:
        """Ticks of a wait in which one is in flight, and in which one waits for late peers.

        Waits come one after the other.
        """
        seen: list[tuple[Ticks, Ticks, Ticks]] = []
        for launched in self._launched.values():
            while launched and (launched[0][1].ends_ns <= start_ns).all():
                launched.popleft()
            seen += _seen(launched, start_ns, end_ns)
        joined_ns, in_order = [joined for joined, *_ in seen], len(self._launched) == 1
        return (
            united_ns(joined_ns, [ended for _, ended, _ in seen], in_order=in_order),
            united_ns(joined_ns, [met for *_, met in seen], in_order=in_order),
        )

    def _by_group(self, group: ProcessGroup, of_ranks: Ticks) -> Ticks:
        """[trials, ranks] to [trials, groups, members], unless all ranks are one group."""
        if group == "world" or self._shape[1] == 1 or self._mesh is None:
            return of_ranks
        if group == "across_nodes":
            nodes = self._mesh.size(group)
            return of_ranks.reshape(-1, nodes, self._mesh.gpus_per_node).swapaxes(1, 2)
        members = self._mesh.size(group)
        return of_ranks.reshape(-1, self._shape[1] // members, members)

    def _by_rank(self, group: ProcessGroup, of_groups: Ticks) -> Ticks:
        """The reverse."""
        if of_groups.ndim == len(self._shape):
            return of_groups
        meshed = of_groups.swapaxes(1, 2) if group == "across_nodes" else of_groups
        return meshed.reshape(-1, self._shape[1])


def _alike(transfers: Sequence[Transfer]) -> list[tuple[Transfer, list[int]]]:
    """Each transfer, and the trials that have it."""
    by_transfer: dict[int, list[int]] = {}
    for i, transfer in enumerate(transfers):
        by_transfer.setdefault(id(transfer), []).append(i)
    return [(transfers[rows[0]], rows) for rows in by_transfer.values()]


def _rings_end_ns(transfers: Sequence[Transfer], joined_ns: Ticks) -> Ticks | None:
    """When each trial's ring ends, step by step; None where that takes longer than one by one."""
    rings = [transfer for transfer in transfers if isinstance(transfer, RingTransfer)]
    kinds, ranks = {(ring.steps, len(ring.busy_ns)) for ring in rings}, joined_ns.shape[-1]
    if len(rings) < len(transfers) or len(kinds) > 1:
        return None
    ((steps, period),) = kinds
    if steps * (1 + joined_ns.size / _QUICK_LANES) > _QUICK_STEPS * len(rings):
        return None
    each = (len(rings), *[1] * (joined_ns.ndim - 2), -1)
    links_ns = np.array([(ring.busy_ns, ring.latency_ns) for ring in rings], dtype=np.float64)
    links_ns = np.tile(links_ns, max(1, ranks // period))[..., :ranks]
    busy_ns, latency_ns = (links_ns[:, i].reshape(each) for i in range(2))
    begun_ns = joined_ns + np.array([ring.start_ns for ring in rings]).reshape(each)
    return by_steps(busy_ns, latency_ns, steps, begun_ns)


def _seen(
    lane: Iterable[tuple[Ticks, Collective]], start_ns: Ticks, end_ns: Ticks
) -> list[tuple[Ticks, Ticks, Ticks]]:
    """Within a wait, of a lane's collectives: from when, to their ends, to the last arrivals.

    In order; a part that ends before it begins is empty.
    """
    parts = []
    for joined_ns, collective in lane:
        from_ns = np.maximum(start_ns, joined_ns)
        if (from_ns >= end_ns).all():
            break
        ends_ns, met_ns = (np.minimum(end_ns, ns) for ns in (collective.ends_ns, collective.met_ns))
        parts.append((from_ns, ends_ns, met_ns))
    return parts


def united_ns(
    starts_ns: Sequence[Ticks], ends_ns: Sequence[Ticks], *, in_order: bool
) -> Ticks | float:
    """Ticks in at least one of some periods, each [trials, ranks]; one may end before it begins.

    `in_order`: none begins before the one before it has ended.
    """
    if in_order or len(starts_ns) < 2:
        each = zip(starts_ns, ends_ns, strict=True)
        return sum((np.maximum(0, end - start) for start, end in each), start=0.0)
    # as many have begun and not ended whichever begin and end belong together
    ends = _in_order([np.maximum(*each) for each in zip(starts_ns, ends_ns, strict=True)])
    starts = _in_order(starts_ns)
    overlaps = (np.maximum(0, end - start) for end, start in zip(ends, starts[1:], strict=False))
    return sum((end - start for end, start in zip(ends, starts, strict=True)), -sum(overlaps))


def _in_order(rows: Sequence[Ticks]) -> list[Ticks]:
    """Each column sorted."""
    if len(rows) > _FEW_ROWS:
        return list(np.sort(np.stack(rows), axis=0))
    ordered: list[Ticks] = []
    for row in rows:
        later = row
        for i, other in enumerate(ordered):
            ordered[i], later = np.minimum(other, later), np.maximum(other, later)
        ordered.append(later)
    return ordered


def collective_ends_ns(transfer: Transfer, joined_ns: Ticks) -> tuple[Ticks, str]:
    """When each rank ends a collective that it joins, [..., ranks], and how that was found."""
    if isinstance(transfer, RingTransfer):
        begun_ns = joined_ns + transfer.start_ns
        ends, way = ring_ends_ns(transfer.busy_ns, transfer.latency_ns, transfer.steps, begun_ns)
        return ends, f"ring:{way}"
    last = joined_ns.max(axis=-1, keepdims=True)
    if isinstance(transfer, ScheduledTransfer) and (joined_ns != last).any():
        ends, way = transfer.ends_ns(joined_ns), f"{transfer.algorithm}:recurrence"
    else:
        ends, way = last + duration_ns(transfer), closed_form(transfer)
    return np.broadcast_to(ends, joined_ns.shape), way
