"""Steps of GPUs that `calibrate device` measured, as others' steps and as presets have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from held_out.errors import constants, held_out
from held_out.records import RECORDED
from held_out.rows import OWN, Row

from validation.markdown import markdown

__all__ = ["device_table"]


def device_table() -> str:
    """Levels by device, kind of model and precision, as Markdown."""
    head = ("GPU", "steps", "number", "others: median", "bias", "worst", "preset: median")
    return markdown(head, [row for device in RECORDED for row in _rows(device)])


def _rows(device: str) -> Iterator[tuple[str, ...]]:
    groups = defaultdict[str, list[tuple[float, float]]](list)
    for held in held_out():
        if held.row.publisher == OWN and held.row.device == device:
            groups[_kind(held.row)].append((held.error, _error_of_preset(held.row)))
    for kind, errors in sorted(groups.items()):
        yield device, kind, *_levels(errors)
    yield device, "all", *_levels([each for errors in groups.values() for each in errors])


def _kind(row: Row) -> str:
    return f"{'convolutions' if row.is_convolutional else 'attention'}, {row.precision}"


def _error_of_preset(row: Row) -> float:
    return row.on(constants().of(row)).step_s() / row.step_s - 1


def _levels(errors: list[tuple[float, float]]) -> tuple[str, ...]:
    others = [error for error, _ in errors]
    of_preset = median(abs(error) for _, error in errors)
    return (
        f"{len(errors)}",
        f"{median(map(abs, others)):.0%}",
        f"{median(others):+.0%}",
        f"{max(others, key=abs):+.0%}",
        f"{of_preset:.0%}",
    )
