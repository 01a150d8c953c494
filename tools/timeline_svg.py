"""Draw one step of a scenario: what the README and the pages show of the report's timeline.

python tools/timeline_svg.py        writes docs/images/timeline.svg
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import ddpsim
from ddpsim.result.timeline import CommSpan, RankTimeline, Span

ROOT = Path(__file__).resolve().parent.parent
SCENARIO = ROOT / "scenarios" / "resnet50-2x8-25gbit.yaml"
IMAGE = ROOT / "docs" / "images" / "timeline.svg"

_WIDTH, _LEFT, _HEIGHT, _BAR = 760, 108, 160, 34
_LANES = {"GPU computes": 12, "GPU sends": 60}  # name and top of each
_LOOKS = {  # the report's colours, in its light and dark look, and a name for each
    "forward": ("#56b4e9", "#56b4e9", "forward"),
    "backward": ("#0072b2", "#3a8fc9", "backward"),
    "optimizer": ("#e69f00", "#e69f00", "optimizer"),
    "hidden": ("#009e73", "#2bb58a", "hidden communication"),
    "exposed": ("#d55e00", "#d55e00", "exposed: the GPU waits"),
    "wait": ("url(#waits)", "url(#waits)", ""),
}
_KINDS = {  # of spans: what they are drawn as
    "forward": "forward",
    "backward": "backward",
    "bucket_copy": "backward",
    "comm_wait": "wait",
    "optimizer": "optimizer",
}


class _Bar(NamedTuple):
    """A bar from `start` to `end`, in nanoseconds from the step's start."""

    lane: str
    look: str
    start: int
    end: int
    label: str = ""


def timeline_svg() -> str:
    """The last steady step of the scenario on rank 0."""
    scenario = ddpsim.load_scenario(SCENARIO)
    lanes = ddpsim.observe(scenario, [0]).ranks[0]
    start, end = lanes.step_ends_ns[-2:]
    bars = [*_computing(lanes.compute, start), *_sending(lanes, start)]
    scale = (_WIDTH - _LEFT - 12) / (end - start)
    return _drawn(scenario.name, bars, scale, (end - start) / 1e6)


def _computing(spans: Sequence[Span], start: int) -> Iterator[_Bar]:
    """Bars of the compute stream; what follows on its like is one bar."""
    last: _Bar | None = None
    for span in spans:
        if span.start_ns < start or span.kind not in _KINDS:
            continue
        look, begin = _KINDS[span.kind], span.start_ns - start
        if last and last.look == look:
            last = last._replace(end=span.end_ns - start)
            continue
        if last:
            yield last
        last = _Bar("GPU computes", look, begin, span.end_ns - start)
    if last:
        yield last


def _sending(lanes: RankTimeline, start: int) -> Iterator[_Bar]:
    """Bars of the buckets, cut where the backward ends."""
    spans = [span for span in lanes.compute if _KINDS.get(span.kind) == "backward"]
    computed = max(span.end_ns for span in spans) - start
    for each in lanes.comm:
        if each.joined_ns >= start and each.bucket >= 0:
            yield from _cut(each, start, computed)


def _cut(each: CommSpan, start: int, computed: int) -> Iterator[_Bar]:
    """The parts of a collective under compute and after it, the longer one with its number."""
    begin, end = each.joined_ns - start, each.end_ns - start
    middle = min(max(begin, computed), end)
    labels = [str(each.bucket), ""]
    if middle - begin < end - middle:
        labels.reverse()
    if begin < middle:
        yield _Bar("GPU sends", "hidden", begin, middle, labels[0])
    if middle < end:
        yield _Bar("GPU sends", "exposed", middle, end, labels[1])


_FRAME = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="%s">
<style>%s</style>
<rect class="ground" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>
<pattern id="waits" width="6" height="6" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern>
%s
</svg>
"""


def _drawn(name: str, bars: Sequence[_Bar], scale: float, step_ms: float) -> str:
    lines = [
        *(f'<text x="10" y="{top + 22}">{lane}</text>' for lane, top in _LANES.items()),
        *(_bar(bar, scale) for bar in bars),
        *_axis(scale, step_ms),
        *_legend(),
    ]
    return _FRAME % (f"One step of {name}, {step_ms:.1f} ms", _style(), "\n".join(lines))


def _style() -> str:
    light = "".join(f".{name}{{fill:{look[0]}}}" for name, look in _LOOKS.items())
    dark = "".join(f".{name}{{fill:{look[1]}}}" for name, look in _LOOKS.items())
    return (
        "text{font:12px system-ui,sans-serif;fill:#1b1f24}.on{fill:#fff;text-anchor:middle}"
        ".at{text-anchor:middle;fill:#59636e}.hatch,.tick{stroke:#8a939c;stroke-width:2}"
        f".tick{{stroke-width:1}}rect{{stroke:#fff}}.ground{{fill:#fff}}{light}"
        "@media(prefers-color-scheme:dark){text{fill:#e8eaed}.at{fill:#a3adb8}.on{fill:#000}"
        "rect{stroke:#14171b}.ground{fill:#14171b}"
        f"{dark}}}"
    )


def _bar(bar: _Bar, scale: float) -> str:
    left, width, top = _LEFT + bar.start * scale, (bar.end - bar.start) * scale, _LANES[bar.lane]
    drawn = (
        f'<rect class="{bar.look}" x="{left:.1f}" y="{top}" width="{max(width, 0.5):.1f}" '
        f'height="{_BAR}"/>'
    )
    if not bar.label or width < 12:
        return drawn
    return f'{drawn}<text class="on" x="{left + width / 2:.1f}" y="{top + 22}">{bar.label}</text>'


def _axis(scale: float, step_ms: float) -> Iterator[str]:
    for ms in range(0, int(step_ms) + 1, 10):
        x = _LEFT + ms * 1e6 * scale
        yield f'<path class="tick" d="M{x:.1f} 98v5"/>'
        yield f'<text class="at" x="{x:.1f}" y="116">{ms}{" ms" if ms == 0 else ""}</text>'


def _legend() -> Iterator[str]:
    x = float(_LEFT)
    for name, (_, _, title) in _LOOKS.items():
        if title:
            yield f'<rect class="{name}" x="{x:.0f}" y="134" width="12" height="12"/>'
            yield f'<text x="{x + 17:.0f}" y="144">{title}</text>'
            x += 34 + 6.8 * len(title)


def main() -> None:
    """Write the image."""
    IMAGE.parent.mkdir(exist_ok=True)
    IMAGE.write_text(timeline_svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
