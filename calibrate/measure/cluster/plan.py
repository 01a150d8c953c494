"""What is measured, how long, and in which order: a plan is a list of tasks. Needs no torch.

A task has one slot for each measurement that it yields; the repetitions of its slots take turns,
so that a slow drift of the machine meets them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import Field

from calibrate.files import FileName
from calibrate.records.record import (
    COPIES_BACK,
    COPIES_IN,
    HALF,
    KEY,
    NARROW_RANKS,
    RESTED,
    TOGETHER,
    WORKS,
    Group,
    JobOptions,
    Kind,
    Layout,
)
from ddpsim.units import format_bytes

KIB, MIB, GIB = 2**10, 2**20, 2**30
_USUAL_BYTES = 64 * MIB  # most buckets, and units of fully_shard
OPTIMIZERS = ("sgd foreach", "sgd fused", "adamw foreach", "adamw fused")


@dataclass(frozen=True)
class Team:
    """Ranks that take part, and what they are to the cluster."""

    group: Group
    nodes: int
    gpus_per_node: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """One measurement of a task: its kind, variant, bytes and count of parameters."""

    kind: Kind
    variant: str = "alone"
    size_bytes: int = 0
    parameters: int = 0


@dataclass(frozen=True)
class Task:
    """Something to measure: `repetitions` (least, most), and its share of the time, relative."""

    slots: tuple[Slot, ...]
    team: Team
    repetitions: tuple[int, int] = (3, 40)
    weight: float = 1.0
    memory_bytes: int = 0
    by_rank: bool = False

    @property
    def first(self) -> Slot:
        """The slot that names the task."""
        return self.slots[0]

    @property
    def series(self) -> tuple[object, ...]:
        """What tasks have in common whose rounds take the longer, the larger their size."""
        common = (self.first.kind, self.first.variant, self.team.ranks)
        # beside compute runs a queue of as many bytes, whatever the size of each message
        return (*common, self.first.size_bytes) if self.first.kind == "compute" else common

    def described(self, slot: Slot) -> dict[str, Any]:
        """What a slot's measurement tells of itself, by the names of `KEY`."""
        team = self.team
        where = {"group": team.group, "nodes": team.nodes, "gpus_per_node": team.gpus_per_node}
        return vars(slot) | where

    @property
    def keys(self) -> tuple[tuple[object, ...], ...]:
        """Keys of the measurements that it yields, as `Measurement.key` has them."""
        return tuple(tuple(self.described(slot)[name] for name in KEY) for slot in self.slots)

    def __str__(self) -> str:
        slot, team = self.first, self.team
        words = [slot.kind, "" if slot.variant == "alone" else slot.variant]
        words.append("" if team.group == "none" else team.group)
        words.append(f"{team.nodes}x{team.gpus_per_node}")
        words.append(format_bytes(slot.size_bytes) if slot.size_bytes else "")
        words.append(f"{slot.parameters} parameters" if slot.parameters else "")
        return " ".join(word for word in words if word)


def teams(layout: Layout) -> list[Team]:
    """The world, and the smaller groups that differ from it and from each other."""
    nodes, gpus = layout.nodes, layout.gpus_per_node
    first_node = tuple(range(gpus))
    first_of_each = tuple(range(0, nodes * gpus, gpus))
    named = [
        Team("world", nodes, gpus, tuple(range(nodes * gpus))),
        Team("intra_node", 1, gpus, first_node),
        Team("one_per_node", nodes, 1, first_of_each),
        *_pairs(layout),
    ]
    different: dict[tuple[int, ...], Team] = {}
    for team in named:
        if len(team.ranks) > 1:
            different.setdefault(team.ranks, team)
    return list(different.values())


def default_plan(layout: Layout, *, gpu: bool, data_loader: str | None = None) -> list[Task]:
    """Everything that can be measured on a layout, the most needed first.

    Each kind is measured in usual sizes before any collective of a larger one, which alone may
    take as long as all of that: a short budget leaves out sizes, and no kind.
    """
    everyone = Team("none", layout.nodes, layout.gpus_per_node, tuple(range(layout.world_size)))
    plan: list[Task] = []
    if data_loader:
        plan.append(Task((Slot("data_loader", data_loader),), everyone, (5, 200), weight=4))
    plan.append(Task((Slot("jitter"),), everyone, (50, 500), weight=4, by_rank=True))
    collectives = [*_all_reduces(layout, gpu=gpu), *_collectives(layout)]
    plan += (task for task in collectives if task.first.size_bytes <= _USUAL_BYTES)
    plan += _hooks_and_copies(everyone, gpu=gpu)
    for variant, size in product(OPTIMIZERS, (4 * MIB, 64 * MIB)):
        slot = Slot("optimizer", variant, size, parameters=16)
        plan.append(Task((slot,), everyone, memory_bytes=5 * size))
    for team in teams(layout)[:1]:
        plan += _interference(team, gpu=gpu)
    plan += (task for task in collectives if task.first.size_bytes > _USUAL_BYTES)
    return plan


def _pairs(layout: Layout) -> Iterator[Team]:
    if layout.gpus_per_node > 1:
        yield Team("pair", 1, 2, (0, 1))
    if layout.nodes > 1:
        yield Team("pair", 2, 1, (0, layout.gpus_per_node))


def _sizes(first: int, last: int, factor: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= factor


def _collectives(layout: Layout) -> Iterator[Task]:
    """All but all-reduces."""
    for team in teams(layout)[:1]:
        for size in _sizes(4 * KIB, _USUAL_BYTES, 4):  # from a bias to a unit of fully_shard
            yield _collective(Slot("broadcast", "alone", size), team, size)
            yield _collective(Slot("reduce_scatter", "alone", size), team, 2 * size)
            yield _collective(Slot("all_gather", "alone", size), team, 2 * size)
    for pair in _pairs(layout):
        for size in _sizes(64 * KIB, 64 * MIB, 16):
            yield _collective(Slot("point_to_point", "alone", size), pair, size)


def _all_reduces(layout: Layout, *, gpu: bool) -> Iterator[Task]:
    """Yield all-reduces, those of the world first: nothing is needed as much.

    What float16 takes, and a rested link lets through, is gloo's and a shaper's alone.
    """
    for team in teams(layout):
        for size in _sizes(4 * KIB, GIB, 2 if team.group == "world" else 4):
            yield _collective(Slot("all_reduce", "alone", size), team, size)
    for team in () if gpu else teams(layout)[:1]:
        for size in _sizes(MIB, 64 * MIB, 4):
            yield _collective(Slot("all_reduce", f"alone{HALF}", size), team, size)
        for size in (MIB, 4 * MIB):
            yield Task((Slot("all_reduce", RESTED, size),), team, (5, 40), memory_bytes=size)


def _collective(slot: Slot, team: Team, memory_bytes: int) -> Task:
    small = slot.size_bytes < MIB
    weight = 4.0 if slot.size_bytes >= 64 * MIB else 1.0
    return Task((slot,), team, (3, 100 if small else 40), weight, memory_bytes)


def _hooks_and_copies(everyone: Team, *, gpu: bool) -> Iterator[Task]:
    # on a GPU copies are kernels like any other
    back = () if gpu else (COPIES_BACK,)
    for count in (250, 1000):
        variants = ("with ddp", "without", *back)
        slots = tuple(Slot("ddp_hook", variant, 0, count) for variant in variants)
        yield Task(slots, everyone, (10, 60))
    # weights of 1 to 64 MiB: what fits a core's caches is copied sooner
    for count in () if gpu else (128, 32, 8, 2):
        slot = Slot("ddp_hook", COPIES_IN, 64 * MIB, count)
        yield Task((slot,), everyone, (10, 60), memory_bytes=4 * slot.size_bytes)
    for rank in () if gpu else NARROW_RANKS:
        slot = Slot("narrow_products", f"rank {rank}", 16 * MIB)
        yield Task((slot,), everyone, memory_bytes=slot.size_bytes)
    for size in (MIB, 64 * MIB):
        for variant in ("alone", TOGETHER):
            yield Task((Slot("device_copy", variant, size),), everyone, memory_bytes=2 * size)
        for variant in ("compress", "decompress"):
            for how in (variant, f"{variant} {TOGETHER}"):
                yield Task((Slot("device_cast", how, size),), everyone, memory_bytes=2 * size)


def _interference(world: Team, *, gpu: bool) -> Iterator[Task]:
    """Compute alone, all-reduces one by one, a queue of them, then queue and compute at once.

    gloo has two of a queue in flight; compute keeps more beside one. On a slow link the time goes
    as far as layers, with float16 too, and what is interpolated for others is not missed.
    """
    sizes, needed = ((64 * MIB,), 2 * GIB) if gpu else ((MIB, 4 * MIB, 16 * MIB), 160 * MIB)
    messages = [(size, "") for size in sizes] + ([] if gpu else [(sizes[-1], HALF)])
    for work, (size, half) in product(WORKS, messages):
        slots = (
            Slot("compute", f"{work} alone{half}", size),
            Slot("all_reduce", f"in turn with {work}{half}", size),
            Slot("all_reduce", f"beside {work}{half}", size),
            Slot("compute", f"{work} with all_reduce{half}", size),
            Slot("all_reduce", f"with {work}{half}", size),
            *(() if gpu else (Slot("compute", f"{work} with one all_reduce{half}", size),)),
        )
        yield Task(slots, world, (5, 40), 6.0, needed, by_rank=True)


class Options(JobOptions):
    """What to measure, and how long."""

    output: FileName = Field(description="the record, JSON")
    time_budget_s: float = Field(600.0, gt=0, description="for the whole plan")
    memory_budget_bytes: int | None = Field(
        None, gt=0, description="of one rank; default: a quarter of what is free, shared by ranks"
    )
    resume: bool = Field(default=False, description="keep what the record already holds")
    most_repetitions: int | None = Field(None, ge=1, description="of each measurement")
    only: tuple[Kind, ...] = Field((), description="kinds to measure; none: all")
    data_loader: str | None = Field(None, description="MODULE:FUNCTION returning an iterable")
    line_rate_bytes_per_s: float | None = Field(None, gt=0, description="of a node's link")

    @property
    def kept(self) -> str:
        """Say where the measurements are, and how to go on."""
        return (
            f"What was measured so far is in {self.output}, if it is there yet; the same command "
            "with --resume goes on from it."
        )
