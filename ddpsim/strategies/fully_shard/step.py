"""One step under fully_shard: what torch's hooks do, in their order.

Source: torch 2.13's torch/distributed/fsdp/_fully_shard (_fsdp_param_group.py, _fsdp_state.py).
On a GPU all-gathers and reduce-scatters have a stream each, but one communicator, whose operations
go one after the other (_set_separate_reduce_scatter_group: "so the two can overlap"). Under HSDP
both are among the ranks of a node, and an all-reduce between nodes follows each reduce-scatter, on
a third stream and another communicator (_fsdp_collectives.py, foreach_reduce). On a CPU each is
waited for where it is launched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddpsim.cluster.transfers import ProcessGroup
from ddpsim.strategies.fully_shard.groups import Group
from ddpsim.strategies.fully_shard.held import Held
from ddpsim.strategies.fully_shard.units import ROOT, spans
from ddpsim.strategies.instructions import Await, Communicate, Compute, Instruction, Record, compute
from ddpsim.strategies.ticks import Launch

_OF_ROOT = "the root"


class LaunchedPiece(NamedTuple):
    """Work of the innermost of some units, in ticks; see `units.Piece`.

    `gradient_bytes`: of the gradient that it makes, as the parameter is gathered.
    """

    chain: tuple[int, ...]
    launch: Launch
    gradient_bytes: int = 0


class Pass(NamedTuple):
    """Forward and backward of one micro-batch."""

    forward: Sequence[LaunchedPiece]
    backward: Sequence[LaunchedPiece]


class Ends(NamedTuple):
    """What a micro-batch's backward does at its end.

    `reduces`: not under set_requires_gradient_sync(False). `all_reduces`: not under
    set_requires_all_reduce(False). `accumulates`: there are gradients of earlier micro-batches on
    the shards. `shards`: not under set_reshard_after_backward(False). `is_last`: not under
    set_is_last_backward(False).
    """

    reduces: bool
    all_reduces: bool
    accumulates: bool
    shards: bool
    is_last: bool


@dataclass
class Step:
    """The groups' states in one step, as torch keeps them.

    `stays`: groups whose parameters stay after the forward. `sends`: a group shards over more than
    one rank. `blocking`: the host waits where it launches a
    collective. `group`: the ranks that share a copy of the model; `replicas`: there are so many
    copies, whose gradients are all-reduced at `all_reduce_ns` of the host's time each.
    `keeps_a_part`: after the forward a part of the ranks keeps a copy. `scale_ns`: the host's time
    to reduce a weight's largest value.
    """

    groups: Sequence[Group]
    stays: Collection[int]
    sends: bool
    blocking: bool
    group: ProcessGroup = "world"
    replicas: int = 1
    all_reduce_ns: int = 0
    keeps_a_part: bool = False
    scale_ns: int = 0
    held: Held = field(default_factory=Held)
    scattered: list[Group] = field(default_factory=list)  # in the last backward, in order
    _collectives: int = 0
    _records: int = 0
    _waits_for: int = 0  # all-gathers wait for this record
    _copied_out: int | None = None  # a record: the forward's last all-gather is held until then
    _held_output: int = 0  # bytes of that all-gather
    _pending: dict[int, int] = field(default_factory=dict)  # all-gathers by group
    _whole: set[int] = field(default_factory=set)  # groups that are not sharded
    _copied: dict[int, int] = field(default_factory=dict)  # bytes from the host, by group
    _kept: dict[int, int] = field(default_factory=dict)  # groups that some ranks keep, and a record
    _forward_order: list[int] = field(default_factory=list)
    _reducing: list[tuple[int, int]] = field(default_factory=list)  # collective, bytes of its input
    _unfinished: int | None = None  # the last reduction that no callback has waited for
    _all_reducing: dict[int, tuple[int, int]] = field(default_factory=dict)  # by group, likewise
    _gradients: dict[int, int] = field(default_factory=dict)  # their bytes, by group
    _accumulated: set[int] = field(default_factory=set)  # groups with unreduced gradients
    _reduced: set[int] = field(default_factory=set)  # groups with gradients on their shards
    _partial: set[int] = field(default_factory=set)  # groups with sums that wait for an all-reduce

    def forward(self, work: Pass) -> Iterator[Instruction]:
        """All-gather unit by unit, each as its module is called."""
        yield from self._record()
        entered: list[int] = []
        for chain, launch, _ in work.forward:
            while tuple(entered) != chain[: len(entered)]:
                yield from self._post_forward(entered.pop())
            for unit in chain[len(entered) :]:
                entered.append(unit)
                self._at("forward", unit)
                yield from self._unshard(unit, "forward")
                yield from self._wait_for_unshard(unit, in_forward=True)
            yield compute("forward", launch)
        while entered:
            yield from self._post_forward(entered.pop())
        self._free_output()

    def backward(self, work: Pass, ends: Ends) -> Iterator[Instruction]:
        """All-gather each unit ahead of its gradients, and reduce them once all are there."""
        self.scattered.clear()
        first, last = spans(piece.chain for piece in work.backward)
        ended: set[int] = set()
        for i, (chain, launch, gradient_bytes) in enumerate(work.backward):
            self._at("backward", chain[-1])
            begun = [unit for unit in chain if first[unit] == i]
            if begun[:1] == [ROOT] and not self._root_ends_model:
                # a unit's output is the model's: its hooks run in the order of their registration
                begun = [*begun[1:], ROOT]
            for unit in begun:
                yield from self._pre_backward(unit)
            yield compute("backward", launch)
            self._hold_gradient(chain[-1], gradient_bytes)
            for unit in reversed([unit for unit in chain if last[unit] == i]):
                if not self.groups[unit].begins_model:
                    ended.add(unit)
                    yield from self._post_backward(unit, ends)
        yield from self._end_backward(ended, ends)

    @property
    def _root_ends_model(self) -> bool:
        """Whether the parameter that was registered last is the root's."""
        last = [max(group.parameters, default=-1) for group in self.groups]
        return last[ROOT] == max(last)

    def _end_backward(self, ended: set[int], ends: Ends) -> Iterator[Instruction]:
        """The final callback: groups whose input needs no gradient, and what is under way."""
        for unit in range(len(self.groups)):
            if unit not in ended:
                yield from self._post_backward(unit, ends)
            if self._unfinished is not None and ends.is_last:
                if not self.blocking:
                    yield Await(self._unfinished)
                self._unfinished = None
        self._forward_order.clear()
        if ends.is_last:
            self._free_inputs()
            for unit in tuple(self._all_reducing):
                self._free_all_reduced(unit)

    def _at(self, phase: str, unit: int) -> None:
        self.held.place = f"the {phase} of {self.groups[unit].name or _OF_ROOT}"

    def _record(self) -> Iterator[Instruction]:
        """What all-gathers launched from now on wait for."""
        self._waits_for = self._records
        self._records += 1
        if not self.blocking:
            yield Record(self._waits_for)

    def _unshard(self, unit: int, phase: str) -> Iterator[Instruction]:
        """Launch the all-gather, unless that is done."""
        group = self.groups[unit]
        if group.is_empty or unit in self._pending or unit in self._whole:
            return
        is_kept = unit in self._kept
        self._copied[unit] = 0 if is_kept else group.copied_bytes
        self.held.add("parameters", group.gathered_bytes + self._copied[unit])
        host_ns, copies_ns, _ = group.regather if is_kept else group.gather
        waits_for = max(self._waits_for, self._kept.get(unit, 0))
        if self.blocking or not self.sends:
            yield Compute("unshard", host_ns, copies_ns if self.sends else 0)
            host_ns = copies_ns = 0
        for _ in range(group.scales * self.sends):
            yield from self._send(self._scale(group, waits_for))
        self._pending[unit] = self._collectives
        gather = Communicate(
            self._collectives,
            host_ns,
            "all_gather",
            group.gathered_bytes,
            cause=f"parameters of {group.name or _OF_ROOT}, {phase}",
            waits_for=None if self.blocking else waits_for,
            before_ns=copies_ns,
            group="kept" if is_kept else self.group,
        )
        if self.sends:
            yield from self._send(gather)

    def _scale(self, group: Group, waits_for: int) -> Communicate:
        """The largest value of all ranks' shards of a float8 weight."""
        return Communicate(
            *(self._collectives, self.scale_ns, "all_reduce", 4),
            cause=f"a scale of {group.name or _OF_ROOT}",
            waits_for=None if self.blocking else waits_for,
            group=self.group,
        )

    def _send(self, launched: Communicate) -> Iterator[Instruction]:
        """Launch a collective; a CPU waits for it at once."""
        self._collectives += 1
        yield launched
        if self.blocking:
            yield Await(launched.number)

    def _await(self, collective: int) -> Iterator[Instruction]:
        """Unless it was waited for at its launch, or nothing was sent."""
        if self.sends and not self.blocking:
            yield Await(collective)

    def _wait_for_unshard(self, unit: int, *, in_forward: bool) -> Iterator[Instruction]:
        """Copy the parameters out. In the forward the output stays until the next copy-out.

        So at most two all-gathers are in flight or not copied out.
        """
        if unit not in self._pending:
            return
        group = self.groups[unit]
        yield from self._await(self._pending.pop(unit))
        self.held.add("parameters", -self._copied.pop(unit))
        if self._kept.pop(unit, None) is not None:
            self.held.add("parameters", -group.kept_bytes)
        self._whole.add(unit)
        self.held.add("parameters", group.gathered_bytes)
        if in_forward:
            self._free_output()
        yield compute("unshard", group.copy_out)
        waited_for = self._waits_for
        yield from self._record()
        if in_forward:
            self._copied_out, self._held_output = self._waits_for, group.gathered_bytes
            self._waits_for = waited_for
        else:
            self.held.add("parameters", -group.gathered_bytes)

    def _free_output(self) -> None:
        """Later all-gathers wait until the forward's last one is copied out."""
        if self._copied_out is not None:
            self._waits_for, self._copied_out = self._copied_out, None
            self.held.add("parameters", -self._held_output)

    def _shard(self, unit: int) -> None:
        if unit in self._whole:
            self._whole.remove(unit)
            self.held.add("parameters", -self.groups[unit].gathered_bytes)

    def _post_forward(self, unit: int) -> Iterator[Instruction]:
        if self.groups[unit].is_empty:
            return
        if unit not in self.stays:
            if self.keeps_a_part:
                yield from self._keep(unit)
            self._shard(unit)
        self._forward_order.append(unit)
        yield Compute("forward", self.groups[unit].forward_ns, 0)

    def _keep(self, unit: int) -> Iterator[Instruction]:
        """Copy this rank's part of what is kept, which the next all-gather waits for."""
        group, waited_for = self.groups[unit], self._waits_for
        self.held.add("parameters", group.kept_bytes)
        yield Compute("unshard", 0, group.keep_ns)
        yield from self._record()
        self._kept[unit], self._waits_for = self._waits_for, waited_for

    def _pre_backward(self, unit: int) -> Iterator[Instruction]:
        """Copy this unit's parameters out, and gather those of the next one."""
        if self.groups[unit].is_empty:
            return
        yield from self._unshard(unit, "backward")
        yield from self._wait_for_unshard(unit, in_forward=False)
        if place := max(i for i, each in enumerate(self._forward_order) if each == unit):
            yield from self._unshard(self._forward_order[place - 1], "backward, ahead")

    def _post_backward(self, unit: int, ends: Ends) -> Iterator[Instruction]:
        """Shard the parameters, and reduce the gradients once the reduction before is done."""
        group = self.groups[unit]
        if group.is_empty:
            return
        self._at("backward", unit)
        yield Compute("backward", group.backward_ns, 0)
        yield from self._accumulate(unit, group, ends)
        if ends.shards:
            self._shard(unit)
        if not ends.reduces:
            return
        while self._reducing:
            yield from self._await(self._reducing[0][0])
            self._free_inputs()
        if group.scattered_bytes:
            yield from self._reduce(unit, group, ends)

    def _reduce(self, unit: int, group: Group, ends: Ends) -> Iterator[Instruction]:
        """Copy the gradients together, and launch their reduce-scatter."""
        if unit in self._all_reducing:  # of an earlier micro-batch
            if not self.blocking:
                yield Await(self._all_reducing[unit][0])
            self._free_all_reduced(unit)
        self.held.add("reductions", group.scattered_bytes)
        yield compute("bucket_copy", group.copy_in)
        self.held.add("gradients", -self._gradients.pop(unit, 0))
        self._accumulated.discard(unit)
        is_added = unit in self._partial
        self._hold_reduced(unit, group, ends)
        leaving_bytes = group.shard_bytes if group.offloads else 0
        self._reducing.append((self._collectives, group.scattered_bytes + leaving_bytes))
        self.scattered.append(group)
        added_ns = is_added * group.add_partial_ns
        after_ns = ends.all_reduces * group.after_ns + ends.accumulates * group.accumulate_ns
        is_last = self.replicas == 1 or not ends.all_reduces
        if self.sends:
            self._unfinished = self._collectives
            then_ns = added_ns + is_last * after_ns
            yield from self._send(self._scatter(group, then_ns, is_last=is_last))
        before_ns = 0 if self.sends else group.before_ns + added_ns
        if not is_last:
            yield from self._all_reduce(unit, group, before_ns, after_ns)
        elif not self.sends:
            yield Compute("bucket_copy", 0, before_ns + after_ns)
        if ends.all_reduces and is_added:
            self._partial.remove(unit)
            self.held.add("gradients", -group.sent_shard_bytes)

    def _scatter(self, group: Group, after_ns: int, *, is_last: bool) -> Communicate:
        """Among the ranks of a copy; `is_last`: no all-reduce follows."""
        return Communicate(
            self._collectives,
            0,
            "reduce_scatter",
            group.scattered_bytes,
            bucket=len(self.scattered) - 1,
            bucket_bytes=group.scattered_bytes,
            num_params=len(group.parameters) if is_last else 0,
            before_ns=group.before_ns,
            after_ns=after_ns,
            cause=f"gradients of {group.name or _OF_ROOT}",
            group=self.group,
        )

    def _all_reduce(
        self, unit: int, group: Group, before_ns: int, after_ns: int
    ) -> Iterator[Instruction]:
        """A rank's shard of the gradients, with those of the other copies.

        torch keeps it to the end of the backward where it makes a new tensor of another type.
        """
        kept_bytes = group.sent_shard_bytes if group.sent_shard_bytes != group.shard_bytes else 0
        self._all_reducing[unit] = self._collectives, kept_bytes
        self.held.add("reductions", kept_bytes)
        follows = self._unfinished if self.sends else None
        self._unfinished = self._collectives
        yield from self._send(
            Communicate(
                self._collectives,
                self.all_reduce_ns,
                "all_reduce",
                group.sent_shard_bytes,
                bucket=len(self.scattered) - 1,
                bucket_bytes=group.scattered_bytes,
                num_params=len(group.parameters),
                before_ns=before_ns,
                after_ns=after_ns,
                cause=f"gradients of {group.name or _OF_ROOT}, between nodes",
                group="across_nodes",
                follows=None if self.blocking else follows,
            )
        )

    def _hold_gradient(self, unit: int, size_bytes: int) -> None:
        """Unless it is added to an earlier micro-batch's in place."""
        group = self.groups[unit]
        if unit in self._accumulated and group.gradient_bytes == group.scattered_bytes:
            return
        self._gradients[unit] = self._gradients.get(unit, 0) + size_bytes
        self.held.add("gradients", size_bytes)

    def _free_all_reduced(self, unit: int) -> None:
        self.held.add("reductions", -self._all_reducing.pop(unit)[1])

    def _accumulate(self, unit: int, group: Group, ends: Ends) -> Iterator[Instruction]:
        """Gradients that are not reduced stay, as the type in which they will be."""
        quiet = unit in self._accumulated
        if (not ends.reduces or quiet) and group.scattered_bytes:
            added = group.add_in if quiet else group.cast_in
            if added.device_ns:
                yield compute("bucket_copy", added)
            self.held.add("gradients", group.scattered_bytes - self._gradients.get(unit, 0))
            self._gradients[unit] = group.scattered_bytes
            self._accumulated.add(unit)

    def _hold_reduced(self, unit: int, group: Group, ends: Ends) -> None:
        """On the device, or until they are copied to the host; a sum as the type that is sent."""
        if not ends.all_reduces:
            self.held.add("gradients", group.sent_shard_bytes)
            if unit in self._partial:  # added in place
                self.held.add("gradients", -group.sent_shard_bytes)
            self._partial.add(unit)
        elif group.offloads:
            self.held.add("reductions", group.shard_bytes)
        elif unit not in self._reduced:
            self._reduced.add(unit)
            self.held.add("gradients", group.shard_bytes)

    def _free_inputs(self) -> None:
        while self._reducing:
            self.held.add("reductions", -self._reducing.pop(0)[1])
