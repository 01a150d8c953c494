"""A drawn step as events that can be gone through, each said in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ddpsim.result.metrics import Step
from ddpsim.result.storyboard import CapChoice, DrawnCollective
from ddpsim.units import NS_PER_S, format_bytes, format_duration
from ddpsim.wording import counted


@dataclass(frozen=True, slots=True)
class Event:
    """What happens at `at_ns`, ticks from the start of the step, on the slowest rank.

    `bucket`: -1 where it is of none.
    """

    at_ns: int
    kind: str
    words: str
    bucket: int = -1


def events(choice: CapChoice, step: Step, names: Mapping[int, tuple[str, str]]) -> list[Event]:
    """What the slowest rank goes through in a drawn step, in order of time.

    `step`: the same one with nothing joined; `names`: the first and the last parameter of a bucket.
    """
    size = choice.result.world_size
    happened = [*_of_compute(step), *_of_gradients(step, names)]
    for collective in choice.step.ranks[0].collectives:
        happened += _of_collective(collective, names, size)
    end = f"The step ends after {_length(step.length_ns)}."
    return [*sorted(happened, key=lambda event: event.at_ns), Event(step.length_ns, "end", end)]


def _of_compute(step: Step) -> Iterator[Event]:
    """Events of the compute lane that turns to something else, and of waits of host or GPU."""
    words = {
        "forward": "The forward begins.",
        "backward": "The backward begins: gradients come from the last layer to the first.",
        "optimizer": "All gradients are reduced: the optimizer updates the parameters.",
    }
    doing = ""
    for span in step.compute:
        if span.kind in words and span.kind != doing:
            doing = span.kind
            yield Event(span.start_ns - step.start_ns, span.kind, words[span.kind])
        if span.kind == "comm_wait" and span.end_ns > span.start_ns:
            length = _length(span.end_ns - span.start_ns)
            waits = f"The GPU has nothing to compute: it waits {length} for communication."
            yield Event(span.start_ns - step.start_ns, "waits", waits)
    for span in step.host:
        if span.kind == "device_wait":
            length = _length(span.end_ns - span.start_ns)
            waits = f"The host has launched all that it may and waits {length} for the GPU."
            yield Event(span.start_ns - step.start_ns, "host", waits)


def _of_gradients(step: Step, names: Mapping[int, tuple[str, str]]) -> Iterator[Event]:
    """The first gradient of each bucket: each is copied into its bucket once it is ready."""
    copies = [span for span in step.compute if span.kind == "bucket_copy"]
    buckets = sorted((span for span in step.comm if span.bucket >= 0), key=lambda b: b.ready_ns)
    if sum(bucket.num_params for bucket in buckets) != len(copies):
        return  # another strategy, or a hook's own work among the copies
    for bucket in buckets:
        first, copies = copies[0], copies[bucket.num_params :]
        name = names.get(bucket.bucket, ("a parameter",))[0]
        words = f"The gradient of {name} is ready: bucket {bucket.bucket} begins to fill."
        yield Event(first.start_ns - step.start_ns, "gradient", words, bucket.bucket)


def _of_collective(
    drawn: DrawnCollective, names: Mapping[int, tuple[str, str]], ranks: int
) -> Iterator[Event]:
    span, number = drawn.span, drawn.span.bucket
    what = f"bucket {number}" if number >= 0 else span.cause or "other data"
    name, sent = f"{span.operation} of {what}", format_bytes(span.wire_bytes or span.size_bytes)
    if number >= 0:
        first, last = names.get(number, ("", ""))
        ends = f": {first} ... {last}" if first != last else f": {first}" if first else ""
        filled = f"{format_bytes(span.size_bytes)} of {counted(span.num_params, 'gradient')}"
        waits = span.joined_ns - span.ready_ns
        queued = f" It waits {_length(waits)} behind others." if waits else ""
        full = f"Bucket {number} is full, {filled}{ends}.{queued}"
        yield Event(span.ready_ns, "full", full, number)
    if span.met_ns > span.joined_ns:
        late = f"The {name} waits {_length(span.met_ns - span.joined_ns)} for late ranks."
        yield Event(span.joined_ns, "late", late, number)
    words = f"The {name} starts: {sent} among {counted(ranks, 'rank')}."
    yield Event(span.met_ns, "starts", words, number)
    exposed_ns = sum(end - start for start, end in drawn.exposed)
    under = f"{_length(exposed_ns)} of it exposed" if exposed_ns else "all of it hidden"
    took = _length(span.end_ns - span.met_ns)
    yield Event(span.end_ns, "ends", f"The {name} ends after {took}, {under}.", number)


def _length(ns: int) -> str:
    return format_duration(ns / NS_PER_S)
