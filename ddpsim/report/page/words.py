"""What a page says of its drawings, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ddpsim.result.model import Result
from ddpsim.result.storyboard import CapChoice, DrawnCollective, Storyboard
from ddpsim.units import NS_PER_S, format_bytes, format_duration, format_percent
from ddpsim.wording import ranks


def notes(board: Storyboard) -> Iterator[str]:
    """What the drawing simplifies."""
    steps = board.steps
    drawn = [rank for step in steps for rank in step.ranks]
    times = board.result.iteration_time_s
    for rival in board.rivals:
        longer_s = rival.result.iteration_time_s.mean - times.mean
        more = "longer" if longer_s > 0 else "shorter"
        yield (
            f"The rows of {rival.setting} are the slowest rank of that step, which takes "
            f"{format_duration(rival.result.iteration_time_s.mean)}: "
            f"{format_duration(abs(longer_s))} {more}. The slider does not move them."
        )
    if times.p90 > times.p10:
        yield (
            "Steps vary: the one of median length on the slowest rank is drawn, and the figures "
            "are the mean over all."
        )
    if board.result.world_size > len({n for rank in steps[0].ranks for n in rank.ranks}):
        yield (
            f"Of {board.result.world_size} ranks a few are drawn: the slowest, rank 0, the first "
            "of the second node, the last, and those that are slowed down on purpose. Ranks that "
            "are exactly alike share their rows."
        )
    if shortest_ns := max(rank.shortest_ns for rank in drawn):
        yield (
            f"Work below {format_duration(shortest_ns / NS_PER_S)}, such as most copies of one "
            "gradient into its bucket, is drawn as part of what it follows."
        )
    if left_out := max(rank.left_out for rank in drawn):
        yield (f"Up to {left_out} collectives, the shortest, are not drawn; the figures count all.")
    if any(comm.ring_steps for rank in drawn for comm in rank.collectives):
        yield (
            "Ring steps are drawn as equal parts of their transfer, from when the last rank "
            "joined: so they are where all ranks join together and links are equal; with late "
            "peers or unequal links single steps lie a little elsewhere."
        )


def caption(choice: CapChoice) -> Iterator[str]:
    """The drawing in words."""
    backward_s = choice.step.backward_start_ns / NS_PER_S
    length_s = choice.step.length_ns / NS_PER_S
    yield (
        f"With {choice.words} this step takes {format_duration(length_s)}; its backward "
        f"starts at {format_duration(backward_s)}."
    )
    for rank in choice.step.ranks:
        ends = [span.end_ns for span in rank.compute if span.kind == "backward"]
        buckets = _ends_ns(rank.collectives)
        late = sum(end_ns > max(ends, default=0) for end_ns in buckets.values())
        end = f" The backward ends at {format_duration(max(ends) / NS_PER_S)};" if ends else ""
        yield (
            f"Rank{'s' * (len(rank.ranks) > 1)} {listed(rank.ranks)}:{end} "
            f"{late} of {len(buckets)} {sent_in(choice)}s"
            f"{' that are drawn' if rank.left_out else ''} "
            f"{'ends' if late == 1 else 'end'} after it. "
            f"Communication is hidden for {format_duration(rank.hidden_ns / NS_PER_S)} "
            f"and exposed for {format_duration(rank.exposed_ns / NS_PER_S)}."
        )


def sent_in(choice: CapChoice) -> str:
    """What gradients are sent in: buckets of DDP, or units of shards."""
    return "unit" if choice.held else "bucket"


def _ends_ns(collectives: Iterable[DrawnCollective]) -> dict[int, int]:
    """When each bucket is done: some hooks take several collectives for one."""
    ends: dict[int, int] = {}
    for comm in collectives:
        if comm.span.bucket >= 0:
            ends[comm.span.bucket] = max(comm.span.end_ns, ends.get(comm.span.bucket, 0))
    return ends


def spoken(choice: CapChoice) -> str:
    """What a screen reader says of the slider's place."""
    result = choice.result
    step, exposed = (
        format_duration(s) for s in (result.iteration_time_s.mean, result.exposed_comm_s)
    )
    return f"{choice.words}: step {step}, {exposed} of communication exposed"


def against(choice: CapChoice, baseline: Result) -> str:
    """A choice's step beside the scenario's own."""
    mean_s, base_s = choice.result.iteration_time_s.mean, baseline.iteration_time_s.mean
    if format_duration(mean_s) == format_duration(base_s):
        return "The step is as long as the scenario's own."
    longer = "longer" if mean_s > base_s else "shorter"
    by = f"{format_duration(abs(mean_s - base_s))} ({abs(mean_s / base_s - 1):.1%})"
    return f"The step is {by} {longer} than the scenario's own."


def new_warnings(result: Result, baseline: Result) -> str:
    """Warnings of a choice that the scenario, at the head of the page, does not have."""
    return "; ".join(warning for warning in result.warnings if warning not in baseline.warnings)


def sweep_words(board: Storyboard) -> str:
    """Which value of the dial is best and which is worst."""
    means = {choice: choice.result.iteration_time_s.mean for choice in board.choices}
    best, worst = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    if means[worst] <= means[best] * 1.001:
        name = board.dial.name.lower()
        return f"The {name} makes no difference here: all steps are within 0.1 %."
    return (
        f"Of these, {best.words} gives the shortest step, {format_duration(means[best])}, "
        f"and {worst.words} the longest, {format_duration(means[worst])} "
        f"({means[worst] / means[best] - 1:+.1%})."
    )


def memory_words(board: Storyboard) -> str:
    """Says at which point of a step a rank holds most, and what that is."""
    peak = board.result.memory_peak
    if peak is None and not board.choices[board.current].held:
        return ""
    if peak is None:
        return "Apart from activations a rank holds the same all the time."
    held = peak.parameters + peak.gradients + peak.reductions
    return (
        f"Apart from shards and activations a rank holds most in {peak.at}: {format_bytes(held)}, "
        f"of which {format_bytes(peak.parameters)} are whole parameters, "
        f"{format_bytes(peak.gradients)} gradients and {format_bytes(peak.reductions)} inputs of "
        "their reductions."
    )


def scaling_words(board: Storyboard) -> str:
    """How scaling changes from the fewest nodes to the most."""
    first, last = board.scaling[0], board.scaling[-1]
    if len(board.scaling) == 1:
        return f"Only {ranks(first.nodes, first.gpus_per_node)} can be simulated; see Not shown."
    return (
        f"From {ranks(first.nodes, first.gpus_per_node)} to "
        f"{ranks(last.nodes, last.gpus_per_node)} scaling falls from "
        f"{format_percent(first.scaling_efficiency)} to "
        f"{format_percent(last.scaling_efficiency)} of one device without "
        "DDP."
        if last.scaling_efficiency < first.scaling_efficiency
        else f"Scaling does not fall: {format_percent(last.scaling_efficiency)} on "
        f"{ranks(last.nodes, last.gpus_per_node)}."
    )


def listed(numbers: Sequence[int]) -> str:
    """Numbers with commas between: `0, 8, 15`."""
    return ", ".join(map(str, numbers))
