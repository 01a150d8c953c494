"""One step under fully_shard: what torch's hooks do, in their order.

Source: torch 2.13's torch/distributed/fsdp/_fully_shard (_fsdp_param_group.py, _fsdp_state.py).
On a GPU all-gathers and reduce-scatters have a stream each, but one communicator, whose operations
go one after the other (_set_separate_reduce_scatter_group: "so the two can overlap"). Under HSDP
both are among the ranks of a node, and an all-reduce between nodes follows each reduce-scatter, on
a third stream and another communicator (_fsdp_collectives.py, foreach_reduce). On a CPU each is
waited for where it is launched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ddpsim.strategies.fully_shard.groups import Group
from ddpsim.strategies.fully_shard.unit_step import Ends, Pass, UnitStep
from ddpsim.strategies.fully_shard.units import ROOT, spans
from ddpsim.strategies.instructions import Await, Communicate, Compute, Instruction, compute


@dataclass(kw_only=True)
class Step(UnitStep):
    """The groups' states in one step, as torch keeps them.

    `stays`: groups whose parameters stay after the forward. `keeps_a_part`: after the forward a
    part of the ranks keeps a copy.
    """

    units: Sequence[Group]
    stays: Collection[int]
    keeps_a_part: bool
    _copied_out: int | None = None  # a record: the forward's last all-gather is held until then
    _held_output: int = 0  # bytes of that all-gather
    _pending: dict[int, int] = field(default_factory=dict)  # all-gathers by group
    _copied: dict[int, int] = field(default_factory=dict)  # bytes from the host, by group
    _kept: dict[int, int] = field(default_factory=dict)  # groups that some ranks keep, and a record
    _reducing: list[tuple[int, int]] = field(default_factory=list)  # collective, bytes of its input
    _unfinished: int | None = None  # the last reduction that no callback has waited for
    _all_reducing: dict[int, tuple[int, int]] = field(default_factory=dict)  # by group, likewise
    _left: list[int] = field(default_factory=list)  # groups that no hook of a piece reduces
    _partial: set[int] = field(default_factory=set)  # groups with sums that wait for an all-reduce

    def _pre_forward(self, unit: int) -> Iterator[Instruction]:
        self._at("forward", unit)
        yield from self._unshard(unit, "forward")
        yield from self._wait_for_unshard(unit, in_forward=True)

    def _order(self, work: Pass) -> tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]]:
        """Return units by the pieces of the backward in which they begin, and end.

        Where a unit's output is the model's, hooks run in the order of their registration: the
        root's is the last.
        """
        begun, last = spans(piece.chain for piece in work.backward)
        if not self._root_ends_model:
            begun = {i: sorted(units, key=lambda unit: unit == ROOT) for i, units in begun.items()}
        hooked = {unit for unit in last if not self.units[unit].begins_model}
        ended: dict[int, list[int]] = {}
        for unit in sorted(hooked, reverse=True):
            ended.setdefault(last[unit], []).append(unit)
        self._left = [unit for unit in range(len(self.units)) if unit not in hooked]
        return begun, ended

    @property
    def _root_ends_model(self) -> bool:
        """Whether the parameter that was registered last is the root's."""
        last = [max(group.parameters, default=-1) for group in self.units]
        return last[ROOT] == max(last)

    def _end_backward(self, ends: Ends) -> Iterator[Instruction]:
        """Reduce groups whose input needs no gradient, and wait for what is under way."""
        for unit in self._left:
            yield from self._post_backward(unit, ends)
            if self._unfinished is not None and ends.is_last:
                if not self.mesh.blocking:
                    yield Await(self._unfinished)
                self._unfinished = None
        self._forward_order.clear()
        if ends.is_last:
            self._free_inputs()
            for unit in tuple(self._all_reducing):
                self._free_all_reduced(unit)

    def _unshard(self, unit: int, phase: str) -> Iterator[Instruction]:
        """Launch the all-gather, unless that is done."""
        group = self.units[unit]
        if group.is_empty or unit in self._pending or unit in self._whole:
            return
        is_kept = unit in self._kept
        self._copied[unit] = 0 if is_kept else group.copied_bytes
        self.held.add("parameters", group.gathered_bytes + self._copied[unit])
        host_ns, copies_ns, _ = group.regather if is_kept else group.gather
        waits_for = max(self._waits_for, self._kept.get(unit, 0))
        if self.mesh.blocking or not self.mesh.sends:
            yield Compute("unshard", host_ns, copies_ns if self.mesh.sends else 0)
            host_ns = copies_ns = 0
        for _ in range(group.scales * self.mesh.sends):
            yield from self._send(self._scale(group, waits_for))
        self._pending[unit] = self._collectives
        if self.mesh.sends:
            gather = self._gathered(group, host_ns, copies_ns, waits_for, phase)
            yield from self._send(gather._replace(group="kept") if is_kept else gather)

    def _scale(self, group: Group, waits_for: int) -> Communicate:
        """The largest value of all ranks' shards of a float8 weight."""
        return Communicate(
            *(self._collectives, self.mesh.call_ns, "all_reduce", 4),
            cause=f"a scale of {group.label}",
            waits_for=None if self.mesh.blocking else waits_for,
            group=self.mesh.group,
        )

    def _await(self, collective: int) -> Iterator[Instruction]:
        """Unless it was waited for at its launch, or nothing was sent."""
        if self.mesh.sends and not self.mesh.blocking:
            yield Await(collective)

    def _wait_for_unshard(self, unit: int, *, in_forward: bool) -> Iterator[Instruction]:
        """Copy the parameters out. In the forward the output stays until the next copy-out.

        So at most two all-gathers are in flight or not copied out.
        """
        if unit not in self._pending:
            return
        group = self.units[unit]
        yield from self._await(self._pending.pop(unit))
        self.held.add("parameters", -self._copied.pop(unit))
        if self._kept.pop(unit, None) is not None:
            self.held.add("parameters", -group.kept_bytes)
        self._whole.add(unit)
        self.held.add("parameters", group.gathered_bytes)
        if in_forward:
            self._end_forward()
        yield compute("unshard", group.copy_out)
        waited_for = self._waits_for
        yield from self._record_for_gathers()
        if in_forward:
            self._copied_out, self._held_output = self._waits_for, group.gathered_bytes
            self._waits_for = waited_for
        else:
            self.held.add("parameters", -group.gathered_bytes)

    def _end_forward(self) -> None:
        """Later all-gathers wait until the forward's last one is copied out."""
        if self._copied_out is not None:
            self._waits_for, self._copied_out = self._copied_out, None
            self.held.add("parameters", -self._held_output)

    def _shard(self, unit: int) -> None:
        if unit in self._whole:
            self._whole.remove(unit)
            self.held.add("parameters", -self.units[unit].gathered_bytes)

    def _post_forward(self, unit: int) -> Iterator[Instruction]:
        if self.units[unit].is_empty:
            return
        if unit not in self.stays:
            if self.keeps_a_part:
                yield from self._keep(unit)
            self._shard(unit)
        self._forward_order.append(unit)
        yield Compute("forward", self.units[unit].forward_ns, 0)

    def _keep(self, unit: int) -> Iterator[Instruction]:
        """Copy this rank's part of what is kept, which the next all-gather waits for."""
        group, waited_for = self.units[unit], self._waits_for
        self.held.add("parameters", group.kept_bytes)
        yield Compute("unshard", 0, group.keep_ns)
        yield from self._record_for_gathers()
        self._kept[unit], self._waits_for = self._waits_for, waited_for

    def _pre_backward(self, unit: int) -> Iterator[Instruction]:
        """Copy this unit's parameters out, and gather those of the next one."""
        if self.units[unit].is_empty:
            return
        yield from self._unshard(unit, "backward")
        yield from self._wait_for_unshard(unit, in_forward=False)
        if place := max(i for i, each in enumerate(self._forward_order) if each == unit):
            yield from self._unshard(self._forward_order[place - 1], "backward, ahead")

    def _post_backward(self, unit: int, ends: Ends) -> Iterator[Instruction]:
        """Shard the parameters, and reduce the gradients once the reduction before is done."""
        group = self.units[unit]
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
            if not self.mesh.blocking:
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
        is_last = self.mesh.replicas == 1 or not ends.all_reduces
        if self.mesh.sends:
            self._unfinished = self._collectives
            then_ns = added_ns + is_last * after_ns
            sent = self._scattered(group, then_ns)._replace(before_ns=group.before_ns)
            yield from self._send(sent if is_last else sent._replace(num_params=0))
        before_ns = 0 if self.mesh.sends else group.before_ns + added_ns
        if not is_last:
            yield from self._all_reduce(unit, group, before_ns, after_ns)
        elif not self.mesh.sends:
            yield Compute("bucket_copy", 0, before_ns + after_ns)
        if ends.all_reduces and is_added:
            self._partial.remove(unit)
            self.held.add("gradients", -group.sent_shard_bytes)

    def _all_reduce(
        self, unit: int, group: Group, before_ns: int, after_ns: int
    ) -> Iterator[Instruction]:
        """A rank's shard of the gradients, with those of the other copies.

        torch keeps it to the end of the backward where it makes a new tensor of another type.
        """
        kept_bytes = group.sent_shard_bytes if group.sent_shard_bytes != group.shard_bytes else 0
        self._all_reducing[unit] = self._collectives, kept_bytes
        self.held.add("reductions", kept_bytes)
        follows = self._unfinished if self.mesh.sends else None
        self._unfinished = self._collectives
        sent = self._between_copies(group, after_ns, follows)
        yield from self._send(sent._replace(before_ns=before_ns))

    def _hold_gradient(self, unit: int, size_bytes: int) -> None:
        """Unless it is added to an earlier micro-batch's in place."""
        group = self.units[unit]
        if unit in self._accumulated and group.gradient_bytes == group.scattered_bytes:
            return
        super()._hold_gradient(unit, size_bytes)

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
