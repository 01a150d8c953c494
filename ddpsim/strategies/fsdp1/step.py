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

from ddpsim.cluster.transfers import ProcessGroup
from ddpsim.scenario.options.fsdp1 import Fsdp1
from ddpsim.strategies.fsdp1.flat import Flat
from ddpsim.strategies.fully_shard.held import Held
from ddpsim.strategies.fully_shard.step import Ends, LaunchedPiece, Pass
from ddpsim.strategies.fully_shard.units import ROOT, spans
from ddpsim.strategies.instructions import Await, Communicate, Compute, Instruction, Record, compute

_OF_ROOT = "the root"
_IN_FLIGHT = 2  # _FreeEventQueue: all-gathers that are not freed
_REDUCING = 3  # reductions that may not be done where the host launches another


class _Freed(NamedTuple):
    """A unit that is freed once the device comes to a record; the memory is the host's to reuse."""

    record: int
    size_bytes: int


@dataclass
class Step:
    """The units' states, which go on from step to step.

    `sends`: parameters are shared by more than one rank. `blocking`: the host waits where it
    launches a collective. `group`: the ranks that share a copy of the model; `replicas`: there are
    so many copies, whose gradients are all-reduced at `all_reduce_ns` of the host's time each.
    """

    units: Sequence[Flat]
    spec: Fsdp1
    sends: bool
    blocking: bool
    group: ProcessGroup
    replicas: int
    all_reduce_ns: int
    freed: deque[_Freed] = field(default_factory=deque)  # what all-gathers have not waited for
    held: Held = field(default_factory=Held)
    scattered: list[Flat] = field(default_factory=list)  # in the last backward, in order
    _collectives: int = 0
    _records: int = 0
    _waits_for: int = 0  # all-gathers wait for this record
    _gathering: list[int] = field(default_factory=list)  # collectives not waited for
    _copied: int = 0  # bytes that they are made from
    _prefetched: set[int] = field(default_factory=set)
    _needed: set[int] = field(default_factory=set)  # units whose forward, or backward, is to come
    _viewed: dict[int, int] = field(default_factory=dict)  # units, and in whose pre-forward
    _whole: set[int] = field(default_factory=set)  # units that are not sharded
    _forward_order: list[int] = field(default_factory=list)
    _sent: list[int] = field(default_factory=list)  # reductions not waited for
    _reducing: list[int] = field(default_factory=list)  # bytes that each holds until it is done
    _gradients: dict[int, int] = field(default_factory=dict)  # their bytes, by unit
    _accumulated: set[int] = field(default_factory=set)  # units with unreduced gradients
    _reduced: set[int] = field(default_factory=set)  # units with gradients on their shards

    def renewed(self) -> Step:
        """The same at the beginning of the next step."""
        stale = deque(_Freed(0, 0) for _ in self.freed)  # of what the device has done by then
        return Step(
            *(self.units, self.spec, self.sends, self.blocking),
            *(self.group, self.replicas, self.all_reduce_ns),
            freed=stale,
            _whole=set(self._whole),
        )

    def forward(self, work: Pass) -> Iterator[Instruction]:
        """All-gather unit by unit, each as its module is called."""
        self._waits_for = self._records
        yield from self._record()
        order = _entered(self.units, work.forward)
        self._needed, self._prefetched, self._viewed = set(order), set(), {}
        entered: list[int] = []
        for chain, launch, _ in work.forward:
            while tuple(entered) != chain[: len(entered)]:
                yield from self._post_forward(entered.pop())
            for unit in chain[len(entered) :]:
                entered.append(unit)
                yield from self._pre_forward(unit, order)
            yield compute("forward", launch)
        while entered:
            yield from self._post_forward(entered.pop())
        self._free_unlimited()

    def _pre_forward(self, unit: int, order: Sequence[int]) -> Iterator[Instruction]:
        if self.units[unit].is_empty:
            return
        self._at("forward", unit)
        if unit not in self._prefetched:
            self._viewed[unit] = unit
            yield from self._unshard(unit, "forward")
        self._needed.discard(unit)
        yield from self._await_gathers()
        following = order.index(unit) + 1
        if self.spec.forward_prefetch and following < len(order):
            self._viewed[order[following]] = unit
            yield from self._prefetch(order[following], "forward")

    def _post_forward(self, unit: int) -> Iterator[Instruction]:
        """The root's parameters stay: they would be gathered again at once."""
        flat = self.units[unit]
        if flat.is_empty:
            return
        self._forward_order.append(unit)
        self._prefetched.discard(unit)
        if not self.sends or (self.spec.frees_after_forward and unit != ROOT):
            yield from self._free(unit)
        yield Compute("forward", flat.post_forward_ns, 0)

    def backward(self, work: Pass, ends: Ends) -> Iterator[Instruction]:
        """All-gather each unit for its gradients, and reduce them once they are joined."""
        self.scattered.clear()
        self._needed = set(self._forward_order)
        *pieces, tail = work.backward
        first, last = spans(piece.chain for piece in pieces)
        joined = self._joined_after(last, len(pieces))
        for i, (chain, launch, gradient_bytes) in enumerate(pieces):
            self._at("backward", chain[-1])
            for unit in (unit for unit in chain if first[unit] == i):
                yield from self._pre_backward(unit)
            yield compute("backward", launch)
            self._hold_gradient(chain[-1], gradient_bytes)
            for unit in joined.get(i, ()):
                yield from self._post_backward(unit, ends)
        yield compute("backward", tail.launch)
        for unit in joined.get(len(pieces), ()):
            yield from self._post_backward(unit, ends)
        yield from self._end_backward(ends)

    def _joined_after(self, last: Mapping[int, int], end: int) -> Mapping[int, Sequence[int]]:
        """Units by the piece after which their gradients are joined; `end`: after the tail.

        Autograd joins them in a node that is made as the views of the flat parameter are, and runs
        it after all nodes that are younger: those of the unit's forward, and of the unit before it
        where that has prefetched it.
        """
        found: dict[int, list[int]] = {}
        for unit, viewed_in in reversed(self._viewed.items()):
            within = [last[each] for each in (unit, viewed_in) if each in last]
            if within:
                found.setdefault(end if viewed_in == ROOT else max(within), []).append(unit)
        return found

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
        if ends.reduces or self.spec.frees_after_forward or not self.sends:
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
            for collective in () if self.blocking else self._sent:
                yield Await(collective)
            self.held.add("reductions", -sum(self._reducing))
            self._sent.clear()
            self._reducing.clear()
        self._forward_order.clear()
        self._prefetched.clear()
        self._free_unlimited()

    def _at(self, phase: str, unit: int) -> None:
        self.held.place = f"the {phase} of {self.units[unit].name or _OF_ROOT}"

    def _record(self) -> Iterator[Instruction]:
        self._records += 1
        if not self.blocking:
            yield Record(self._records - 1)

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
        if self.blocking or not self.sends:
            yield Compute("unshard", host_ns, copy_ns)
            host_ns = copy_ns = 0
        if not self.sends:
            return
        self._gathering.append(self._collectives)
        yield from self._send(
            Communicate(
                self._collectives,
                host_ns,
                "all_gather",
                flat.gathered_bytes,
                cause=f"parameters of {flat.name or _OF_ROOT}, {phase}",
                waits_for=None if self.blocking else self._waits_for,
                before_ns=copy_ns,
                group=self.group,
            )
        )
        if self.blocking:
            self._free_copied()

    def _await_gathers(self) -> Iterator[Instruction]:
        """The compute stream waits for all that the all-gathers' stream has."""
        for collective in () if self.blocking else self._gathering:
            yield Await(collective)
        self._gathering.clear()
        self._free_copied()

    def _free_copied(self) -> None:
        self.held.add("parameters", -self._copied)
        self._copied = 0

    def _send(self, launched: Communicate) -> Iterator[Instruction]:
        """Launch a collective; a CPU waits for it at once."""
        self._collectives += 1
        yield launched
        if self.blocking:
            yield Await(launched.number)

    def _free(self, unit: int) -> Iterator[Instruction]:
        """Once the device has come so far: the host may take the memory when it has waited."""
        if unit not in self._whole:
            return
        self._whole.remove(unit)
        freed = _Freed(self._records, self.units[unit].gathered_bytes)
        if self.blocking or not self.sends:
            self.held.add("parameters", -freed.size_bytes)
            freed = freed._replace(size_bytes=0)
        if self.sends:
            yield from self._record()
            self.freed.append(freed)

    def _free_unlimited(self) -> None:
        """Without a limit the host launches the rest of a pass before anything is free."""
        if self.spec.limit_all_gathers:
            return
        while self.freed:
            self.held.add("parameters", -self.freed.popleft().size_bytes)

    def _hold_gradient(self, unit: int, size_bytes: int) -> None:
        self._gradients[unit] = self._gradients.get(unit, 0) + size_bytes
        self.held.add("gradients", size_bytes)

    def _reduce(self, unit: int, flat: Flat, ends: Ends) -> Iterator[Instruction]:
        """Cast, pad and divide the gradient, and launch its reduction.

        What passes over all of the gradient takes the device from compute, also on a stream of its
        own (assumed): matrix products leave it no room.
        """
        again = unit in self._reduced
        self.scattered.append(flat)
        after_ns = flat.after_ns + (ends.accumulates and self.sends) * flat.accumulate_ns
        yield compute("bucket_copy", flat.reduced)
        for launched in self._reductions(flat, after_ns):
            self._sent.append(launched.number)
            yield from self._send(launched)
        if not self.sends and self.replicas == 1:
            yield Compute("bucket_copy", 0, after_ns)
        self._hold_reduced(unit, flat, again=again)
        while len(self._reducing) > (0 if self.blocking else _REDUCING):
            self.held.add("reductions", -self._reducing.pop(0))

    def _hold_reduced(self, unit: int, flat: Flat, *, again: bool) -> None:
        """The reduced gradient, and what it was made from, until that is done.

        A gradient that every rank has whole is reduced in place, and added to where it stays.
        """
        made = flat.temporary_bytes + (flat.shard_bytes if again and self.sends else 0)
        if self.sends or not again:
            self.held.add("gradients", -flat.flat_bytes)
        self.held.add("reductions", made)
        self._reducing.append(made)
        if not again:
            self._reduced.add(unit)
            self.held.add("gradients", flat.shard_bytes)
        if self.sends:
            self._accumulated.discard(unit)
        else:
            self._accumulated.add(unit)

    def _reductions(self, flat: Flat, after_ns: int) -> Iterator[Communicate]:
        """A reduce-scatter among the ranks of a copy, and an all-reduce among copies."""
        first = Communicate(
            self._collectives,
            0,
            "reduce_scatter",
            flat.scattered_bytes,
            bucket=len(self.scattered) - 1,
            bucket_bytes=flat.scattered_bytes,
            num_params=len(flat.parameters),
            after_ns=after_ns,
            cause=f"gradients of {flat.name or _OF_ROOT}",
            group=self.group,
        )
        if self.replicas == 1:
            yield from (first,) if self.sends else ()
        elif not self.sends:
            yield first._replace(operation="all_reduce")
        else:
            yield first._replace(num_params=0, after_ns=0)
            yield first._replace(
                number=self._collectives,
                host_ns=self.all_reduce_ns,
                operation="all_reduce",
                size_bytes=flat.sent_shard_bytes,
                cause=f"{first.cause}, between nodes",
                group="across_nodes",
                follows=None if self.blocking else first.number,
            )


def _entered(units: Sequence[Flat], pieces: Sequence[LaunchedPiece]) -> list[int]:
    """Units in the order in which their forwards begin."""
    chains = (unit for piece in pieces for unit in piece.chain)
    return [unit for unit in dict.fromkeys(chains) if not units[unit].is_empty]
