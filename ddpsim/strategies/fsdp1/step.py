"""One step under FullyShardedDataParallel: what torch's hooks do, in their order.

Source: torch 2.13's torch/distributed/fsdp (_runtime_utils.py, _exec_order_utils.py,
_limiter_utils.py). All-gathers and reductions have streams of their own, but one communicator,
whose operations go one after the other. Unlike fully_shard, no backward waits for an earlier
reduction. Where torch's host waits until an earlier unit is freed (limit_all_gathers), the
all-gather waits for that here, and the host goes on: it is ahead of the device then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddpsim.scenario.options.fsdp1 import Fsdp1
from ddpsim.strategies.fsdp1.flat import Flat
from ddpsim.strategies.fully_shard.unit_step import Ends, Pass, UnitStep
from ddpsim.strategies.fully_shard.units import ROOT, spans
from ddpsim.strategies.instructions import Await, Communicate, Compute, Instruction, compute

_IN_FLIGHT = 2  # _FreeEventQueue: all-gathers that are not freed
_REDUCING = 3  # reductions that may not be done where the host launches another


class _Freed(NamedTuple):
    """A unit that is freed once the device comes to a record; the memory is the host's to reuse."""

    record: int
    size_bytes: int


@dataclass(kw_only=True)
class Step(UnitStep):
    """The units' states, which go on from step to step."""

    units: Sequence[Flat]
    spec: Fsdp1
    freed: deque[_Freed] = field(default_factory=deque)  # what all-gathers have not waited for
    _gathering: list[int] = field(default_factory=list)  # collectives not waited for
    _copied: int = 0  # bytes that they are made from
    _prefetched: set[int] = field(default_factory=set)
    _needed: set[int] = field(default_factory=set)  # units whose forward, or backward, is to come
    _viewed: dict[int, int] = field(default_factory=dict)  # units, and in whose pre-forward
    _starts: Sequence[int] = ()  # units as their forwards start
    _sent: list[int] = field(default_factory=list)  # reductions not waited for
    _reducing: list[int] = field(default_factory=list)  # bytes that each holds until it is done

    def renewed(self) -> Step:
        """The units at the beginning of the next step: what was whole stays so."""
        stale = deque(_Freed(0, 0) for _ in self.freed)  # of what the device has done by then
        whole = set(self._whole)
        return Step(units=self.units, spec=self.spec, mesh=self.mesh, freed=stale, _whole=whole)

    def forward(self, work: Pass) -> Iterator[Instruction]:
        """All-gather unit by unit, each as its module is called, or one ahead."""
        units = (unit for piece in work.forward for unit in piece.chain)
        self._starts = [unit for unit in dict.fromkeys(units) if not self.units[unit].is_empty]
        self._needed, self._prefetched, self._viewed = set(self._starts), set(), {}
        yield from super().forward(work)

    def _pre_forward(self, unit: int) -> Iterator[Instruction]:
        if self.units[unit].is_empty:
            return
        self._at("forward", unit)
        if unit not in self._prefetched:
            self._viewed[unit] = unit
            yield from self._unshard(unit, "forward")
        self._needed.discard(unit)
        yield from self._await_gathers()
        if self.spec.forward_prefetch and unit != self._starts[-1]:
            following = self._starts[self._starts.index(unit) + 1]
            self._viewed[following] = unit
            yield from self._prefetch(following, "forward")

    def _post_forward(self, unit: int) -> Iterator[Instruction]:
        """The root's parameters stay: they would be gathered again at once."""
        flat = self.units[unit]
        if flat.is_empty:
            return
        self._forward_order.append(unit)
        self._prefetched.discard(unit)
        if not self.mesh.sends or (self.spec.frees_after_forward and unit != ROOT):
            yield from self._free(unit)
        yield Compute("forward", flat.post_forward_ns, 0)

    def _order(self, work: Pass) -> tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]]:
        """Return units by the piece in which they begin, and after which gradients are joined."""
        self._needed = set(self._forward_order)
        *pieces, _ = work.backward
        begun, last = spans(piece.chain for piece in pieces)
        return begun, self._joined_after(last, len(pieces))

    def _hold_gradient(self, unit: int, size_bytes: int) -> None:
        if size_bytes:  # the tail makes none
            super()._hold_gradient(unit, size_bytes)

    def _joined_after(self, last: Mapping[int, int], end: int) -> Mapping[int, Sequence[int]]:
        """Units by the piece after which their gradients are joined; `end`: after the tail.

        Autograd joins them in a node that is made as the views of the flat parameter are, and runs
        it after all nodes that are younger: those of the unit's forward, and of the unit before it
        where that has prefetched it.
        """
        joined: dict[int, list[int]] = {}
        for unit, viewed_in in reversed(self._viewed.items()):
            within = [last[each] for each in (unit, viewed_in) if each in last]
            if within:
                joined.setdefault(end if viewed_in == ROOT else max(within), []).append(unit)
        return joined

    def _pre_backward(self, unit: int) -> Iterator[Instruction]:
        if self.units[unit].is_empty:
            return
        if unit not in self._prefetched:
            yield from self._unshard(unit, "backward")
        self._needed.discard(unit)
        yield from self._await_gathers()
        if self.spec.backward_prefetch == "BACKWARD_PRE":
            yield from self._prefetch_before(unit)

    def _post_backward(self, unit: int, ends: Ends) -> Iterator[Instruction]:
        """Join the gradients, shard the parameters, and reduce what was joined."""
        flat = self.units[unit]
        if unit not in self._gradients:
            return
        self._at("backward", unit)
        yield compute("bucket_copy", flat.joined)
        self.held.add("gradients", flat.flat_bytes)
        self.held.add("gradients", -self._gradients.pop(unit))
        if unit in self._accumulated:
            yield compute("bucket_copy", flat.added)
            self.held.add("gradients", -flat.flat_bytes)
        self._prefetched.discard(unit)
        if ends.reduces or self.spec.frees_after_forward or not self.mesh.sends:
            yield from self._free(unit)
        if self.spec.backward_prefetch == "BACKWARD_POST":
            yield from self._prefetch_before(unit)
        if ends.reduces:
            yield from self._reduce(unit, flat, ends)
        else:
            self._accumulated.add(unit)

    def _end_backward(self, ends: Ends) -> Iterator[Instruction]:
        """The final callback: the compute stream waits for all reductions.

        And for a unit that was gathered ahead of a backward which did not come (assumed).
        """
        yield from self._await_gathers()
        if ends.reduces:
            for collective in () if self.mesh.blocking else self._sent:
                yield Await(collective)
            self.held.add("reductions", -sum(self._reducing))
            self._sent.clear()
            self._reducing.clear()
        self._forward_order.clear()
        self._prefetched.clear()
        self._end_forward()

    def _prefetch_before(self, unit: int) -> Iterator[Instruction]:
        """The unit whose forward ended before this one's."""
        place = self._forward_order.index(unit) if unit in self._forward_order else 0
        if place:
            yield from self._prefetch(self._forward_order[place - 1], "backward")

    def _prefetch(self, unit: int, phase: str) -> Iterator[Instruction]:
        if unit in self._needed and unit not in self._prefetched:
            yield from self._unshard(unit, f"{phase}, ahead")
            self._prefetched.add(unit)

    def _unshard(self, unit: int, phase: str) -> Iterator[Instruction]:
        """Launch the all-gather, unless the unit is whole."""
        flat = self.units[unit]
        if self.spec.limit_all_gathers and len(self.freed) >= _IN_FLIGHT:
            freed = self.freed.popleft()
            self._waits_for = max(self._waits_for, freed.record)
            self.held.add("parameters", -freed.size_bytes)
        host_ns, copy_ns, _ = flat.gather if phase.startswith("forward") else flat.regather
        if unit in self._whole:
            yield Compute("unshard", host_ns if phase.startswith("forward") else flat.stays_ns, 0)
            return
        self._whole.add(unit)
        self.held.add("parameters", flat.gathered_bytes + flat.copied_bytes)
        self._copied += flat.copied_bytes
        if self.mesh.blocking or not self.mesh.sends:
            yield Compute("unshard", host_ns, copy_ns)
            host_ns = copy_ns = 0
        if not self.mesh.sends:
            return
        self._gathering.append(self._collectives)
        yield from self._send(self._gathered(flat, host_ns, copy_ns, self._waits_for, phase))
        if self.mesh.blocking:
            self._free_copied()

    def _await_gathers(self) -> Iterator[Instruction]:
        """The compute stream waits for all that the all-gathers' stream has."""
        for collective in () if self.mesh.blocking else self._gathering:
            yield Await(collective)
        self._gathering.clear()
        self._free_copied()

    def _free_copied(self) -> None:
        self.held.add("parameters", -self._copied)
        self._copied = 0

    def _free(self, unit: int) -> Iterator[Instruction]:
        """Once the device has come so far: the host may take the memory when it has waited."""
        if unit not in self._whole:
            return
        self._whole.remove(unit)
        freed = _Freed(self._records, self.units[unit].gathered_bytes)
        if self.mesh.blocking or not self.mesh.sends:
            self.held.add("parameters", -freed.size_bytes)
            freed = freed._replace(size_bytes=0)
        if self.mesh.sends:
            yield from self._record()
            self.freed.append(freed)

    def _end_forward(self) -> None:
        """Without a limit the host launches the rest of a pass before anything is free."""
        if self.spec.limit_all_gathers:
            return
        while self.freed:
            self.held.add("parameters", -self.freed.popleft().size_bytes)

    def _reduce(self, unit: int, flat: Flat, ends: Ends) -> Iterator[Instruction]:
        """Cast, pad and divide the gradient, and launch its reduction.

        What passes over all of the gradient takes the device from compute, also on a stream of its
        own (assumed): matrix products leave it no room.
        """
        again = unit in self._reduced
        self.scattered.append(flat)
        after_ns = flat.after_ns + (ends.accumulates and self.mesh.sends) * flat.accumulate_ns
        yield compute("bucket_copy", flat.reduced)
        for launched in self._reductions(flat, after_ns):
            self._sent.append(launched.number)
            yield from self._send(launched)
        if not self.mesh.sends and self.mesh.replicas == 1:
            yield Compute("bucket_copy", 0, after_ns)
        self._hold_reduced(unit, flat, again=again)
        while len(self._reducing) > (0 if self.mesh.blocking else _REDUCING):
            self.held.add("reductions", -self._reducing.pop(0))

    def _hold_reduced(self, unit: int, flat: Flat, *, again: bool) -> None:
        """The reduced gradient, and what it was made from, until that is done.

        A gradient that every rank has whole is reduced in place, and added to where it stays.
        """
        made = flat.temporary_bytes + (flat.shard_bytes if again and self.mesh.sends else 0)
        if self.mesh.sends or not again:
            self.held.add("gradients", -flat.flat_bytes)
        self.held.add("reductions", made)
        self._reducing.append(made)
        if not again:
            self._reduced.add(unit)
            self.held.add("gradients", flat.shard_bytes)
        if self.mesh.sends:
            self._accumulated.discard(unit)
        else:
            self._accumulated.add(unit)

    def _reductions(self, flat: Flat, after_ns: int) -> Iterator[Communicate]:
        """A reduce-scatter among the ranks of a copy, and an all-reduce among copies."""
        first = self._scattered(flat, after_ns)
        if self.mesh.replicas == 1:
            yield from (first,) if self.mesh.sends else ()
        elif not self.mesh.sends:
            yield first._replace(operation="all_reduce")
        else:
            yield first._replace(num_params=0, after_ns=0)
            yield self._between_copies(flat, after_ns, first.number)
