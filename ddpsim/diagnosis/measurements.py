"""What was measured, from text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ddpsim.errors import InputError, shown
from ddpsim.result.diagnosis import Measurement, Quantity
from ddpsim.scenario.cluster import Cluster
from ddpsim.units import format_duration, parse_bytes, parse_duration

_LONGEST = 500
_LONGEST_S = 3.6e6
_LONGER_ALONE = 1.2  # times a step: what a step without sync may take by chance
_RANKS = re.compile(r"(?P<count>\d{1,7}) ?(?:gpus?|ranks?)?", re.IGNORECASE)
_LAYOUT = re.compile(r"(?P<nodes>\d{1,7}) ?[x×] ?(?P<gpus>\d{1,4})")  # noqa: RUF001 -- people write it
_AT = re.compile(r"(accumulation|batch)(?:_steps|_per_rank)?[ =]{1,3}(\d{1,7})", re.IGNORECASE)
_STEPS = (
    'write "916 ms", or for several "1 GPU: 192 ms, 2x4: 1.2 s", "accumulation 4: 2 s" or '
    '"batch 16: 1 s"'
)
_SIZES = 'write the row of nccl-tests as "64 MiB: 12 ms"'
_Reader = Callable[[str, Cluster], list[Measurement]]


def measurements_in(cluster: Cluster, texts: Mapping[str, str | None]) -> list[Measurement]:
    """All that was measured, from texts by their names.

    `measured` are steps; the others have the name of a `Measurement`'s quantity. Raises InputError,
    with the name of the text as its key.
    """
    measurements: list[Measurement] = []
    for name, text in texts.items():
        if text is None:
            continue
        try:
            measurements += _READERS[name](text, cluster)
        except ValueError as error:
            raise InputError(name, str(error)) from None
    _check_waits(measurements, cluster)
    return measurements


def _check_waits(measurements: Sequence[Measurement], cluster: Cluster) -> None:
    """Raise InputError for a wait that is longer than the step that holds it."""
    here = [each for each in measurements if each.setting == (*_own_layout(cluster), None, None)]
    step_s = next((each.seconds for each in here if each.quantity == "step"), None)
    advice = {
        "exposed": (1.0, "give what one step waits"),
        "data_wait": (1.0, "give what one step waits"),
        "without_sync": (_LONGER_ALONE, "a step that sends nothing takes less; give both anew"),
    }
    for each in here:
        times, what_to_do = advice.get(each.quantity, (0.0, ""))
        if times and step_s and each.seconds > times * step_s:
            raise InputError(
                each.quantity,
                f"{format_duration(each.seconds)} is longer than the step, which takes "
                f"{format_duration(step_s)}; {what_to_do}",
            )


def _own_layout(cluster: Cluster) -> tuple[int, int]:
    return cluster.nodes, cluster.gpus_per_node


def _steps(text: str, cluster: Cluster) -> list[Measurement]:
    """Steps in `"916 ms"`, in `"1 GPU: 192 ms, 2x4: 1.2 s"`, or in `"accumulation 4: 2 s"`.

    A number of GPUs is filled node by node; a time alone is of the scenario's own ranks.
    """
    by_setting: dict[tuple[int | None, ...], Measurement] = {}
    for label, seconds in _entries(text, _STEPS):
        at = {name.lower(): int(count) for name, count in _AT.findall(label or "")}
        if 0 in at.values():
            raise ValueError(f"{shown(label or '')} has no sample; {_STEPS}")
        ranks = " ".join(_AT.sub("", label or "").split())
        layout = _layout(ranks, cluster) if ranks else _own_layout(cluster)
        step = Measurement("step", seconds, *layout, **at)
        if step.setting in by_setting:
            raise ValueError(f"{shown(text)} has two times for {layout[0]} x {layout[1]}; keep one")
        by_setting[step.setting] = step
    return list(by_setting.values())


def _all_reduces(text: str, cluster: Cluster) -> list[Measurement]:
    """All-reduces on the scenario's own ranks in `"25 MiB: 3 ms, 64 MiB: 8 ms"`."""
    if cluster.world_size == 1:
        raise ValueError("one rank has no all-reduce; leave it out")
    by_size: dict[int, Measurement] = {}
    for label, seconds in _entries(text, _SIZES):
        if label is None:
            raise ValueError(f"{shown(text)} lacks the size of the all-reduce; {_SIZES}")
        size = round(parse_bytes(label))
        if size < 4:
            raise ValueError(f"{shown(label)} is too small; {_SIZES}")
        if size in by_size:
            raise ValueError(f"{shown(text)} has two times for {label}; keep one")
        by_size[size] = Measurement(
            "all_reduce", seconds, cluster.nodes, cluster.gpus_per_node, size_bytes=size
        )
    return list(by_size.values())


def _data_waits(text: str, cluster: Cluster) -> list[Measurement]:
    """A time, or `synthetic`: data that is made on the device, for which nothing waits."""
    is_made = text.strip().lower() == "synthetic"
    return _time_reader("data_wait", may_be_none=True)("0 s" if is_made else text, cluster)


def _time_reader(quantity: Quantity, *, may_be_none: bool) -> _Reader:
    """A reader of one time on the scenario's own ranks; that of a wait may be 0."""

    def read(text: str, cluster: Cluster) -> list[Measurement]:
        seconds = _seconds(text, may_be_none=may_be_none)
        return [Measurement(quantity, seconds, cluster.nodes, cluster.gpus_per_node)]

    return read


def _entries(text: str, grammar: str) -> Iterator[tuple[str | None, float]]:
    """What stands before each colon, if there is one, and the seconds after it."""
    if len(text) > _LONGEST:
        raise ValueError(f"{shown(text)} is too long; {grammar}")
    for part in text.split(","):
        label, colon, duration = part.rpartition(":")
        if not part.strip() or (colon and not label.strip()):
            raise ValueError(f"{shown(text)} has an entry without a time; {grammar}")
        yield " ".join(label.split()) if colon else None, _seconds(duration)


def _seconds(text: str, *, may_be_none: bool = False) -> float:
    seconds = parse_duration(text.strip())
    if seconds == 0 and not may_be_none:
        raise ValueError("a step takes longer than 0 s")
    if not seconds <= _LONGEST_S:
        raise ValueError(f"{text.strip()} is out of range: wanted at most 1000 h")
    return seconds


def _layout(label: str, cluster: Cluster) -> tuple[int, int]:
    """Nodes and GPUs of each, in "8 GPUs" or "2x4"."""
    if both := _LAYOUT.fullmatch(label):
        layout = int(both["nodes"]), int(both["gpus"])
    elif ranks := _RANKS.fullmatch(label):
        layout = _filled(int(ranks["count"]), cluster)
    else:
        raise ValueError(f"{shown(label)} is no number of GPUs; {_STEPS}")
    if 0 in layout:
        raise ValueError(f"{shown(label)} has no GPU; {_STEPS}")
    return layout


def _filled(count: int, cluster: Cluster) -> tuple[int, int]:
    of_a_node = cluster.gpus_per_node
    if count <= of_a_node:
        return 1, count
    if count % of_a_node:
        raise ValueError(
            f"{count} GPUs do not fill nodes of {of_a_node}; say how they were spread, as in "
            f"{-(-count // of_a_node)}x{of_a_node} (nodes x GPUs)"
        )
    return count // of_a_node, of_a_node


_READERS: dict[str, _Reader] = {
    "measured": _steps,
    "without_sync": _time_reader("without_sync", may_be_none=False),
    "exposed": _time_reader("exposed", may_be_none=True),
    "data_wait": _data_waits,
    "all_reduce": _all_reduces,
}
