"""The data of a page's timeline: what page.js draws and the slider moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ddpsim.report.page.looks import LOOKS, Look
from ddpsim.report.page.words import listed, spoken
from ddpsim.result.storyboard import (
    DrawnCollective,
    DrawnRank,
    DrawnStep,
    Rival,
    Storyboard,
)


def timeline(board: Storyboard) -> dict[str, Any]:
    """What page.js draws and the slider moves; ticks from the start of the step."""
    return {
        "looks": looks(),
        "choices": [
            {
                "cap": choice.cap,
                "span_ns": span_ns([choice.step, *(rival.step for rival in board.rivals)]),
                "words": choice.words,
                "spoken": spoken(choice),
                "ranks": [*drawn_ranks(choice.step), *map(_rival, board.rivals)],
            }
            for choice in board.choices
        ],
    }


def looks() -> dict[str, Any]:
    """How each kind of work is drawn, as drawing.js takes it."""
    return {kind: asdict(look) for kind, look in LOOKS.items()}


def drawn_ranks(step: DrawnStep) -> list[dict[str, Any]]:
    """The ranks of a step, as drawing.js takes them."""
    return [_rank(rank) for rank in step.ranks]


def span_ns(steps: Sequence[DrawnStep]) -> tuple[int, int]:
    """The time axis of steps that are drawn on one."""
    ends = [step.length_ns for step in steps]
    starts = [0]
    for step in steps:
        for rank in step.ranks:
            starts += [span.start_ns for span in rank.compute]
            ends += [span.end_ns for span in rank.compute]
            starts += [comm.span.joined_ns for comm in rank.collectives]
            ends += [comm.span.end_ns for comm in rank.collectives]
    margin_ns = max(ends) // 100
    return min(starts) - margin_ns, max(ends) + margin_ns


def _rank(rank: DrawnRank) -> dict[str, Any]:
    label = f"rank{'s' * (len(rank.ranks) > 1)} {listed(rank.ranks)}"
    alone = rank.is_slowest and len(rank.ranks) == 1
    return asdict(rank) | {
        "label": f"{label}, slowest" if alone else label,
        "collectives": [_collective(comm) for comm in rank.collectives],
    }


def _rival(rival: Rival) -> dict[str, Any]:
    """The slowest rank of a rival, below the ranks of the scenario."""
    slowest = _rank(rival.step.ranks[0])
    return slowest | {"label": f"{rival.setting}, {slowest['label']}"}


def _collective(comm: DrawnCollective) -> dict[str, Any]:
    """Fields of a collective, with those of its span beside them."""
    fields = asdict(comm)
    del fields["span"]
    return fields | comm.span._asdict()


def rank_options(board: Storyboard) -> list[tuple[str, str]]:
    """What the choice of ranks offers: all that any choice draws, the slowest, or one."""
    drawn = sorted({n for c in board.choices for rank in c.step.ranks for n in rank.ranks})
    single = [(str(number), f"rank {number}") for number in drawn]
    slowest = ("slowest", "the slowest, and those like it")
    return [("all", f"{listed(drawn)} (of {board.result.world_size})"), slowest, *single]


def legend(board: Storyboard) -> list[Look]:
    """The looks that are used."""
    used: set[str] = set()
    for rank in (rank for step in board.steps for rank in step.ranks):
        used |= {span.kind for span in (*rank.compute, *rank.host)}
        for comm in rank.collectives:
            used |= {"hidden"} | ({"exposed"} if comm.exposed else set())
            used |= {"queued"} if comm.span.joined_ns > comm.span.ready_ns else set()
            used |= {"late"} if comm.span.met_ns > comm.span.joined_ns else set()
            used |= {"ring_odd"} if comm.ring_steps else set()
    looks = [look for kind, look in LOOKS.items() if kind in used]
    return list({look.name: look for look in looks}.values())
