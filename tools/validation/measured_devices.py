"""Steps of GPUs that `calibrate device` measured, as others' steps and as presets have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain
from statistics import median

from held_out.errors import constants, held_out
from held_out.records import RECORDED, record_of
from held_out.rows import OWN, Row

from calibrate.fit.device.fit import errors_of_halves
from validation.markdown import markdown

__all__ = ["device_table", "errors_by_model", "halves_table"]


def halves_table() -> str:
    """Levels of device files that half of the models set, on the other half, as Markdown."""
    head = ["model"]
    for device in RECORDED:
        head += [f"{device}: steps", "median", "bias", "worst"]
    errors = [errors_by_model(device) for device in RECORDED]
    models = sorted({model for of_device in errors for model in of_device})
    rows = [
        (model, *chain.from_iterable(_levels_of(each[model]) for each in errors))
        for model in models
    ]
    everything = [list(chain.from_iterable(each.values())) for each in errors]
    rows.append(("all", *chain.from_iterable(map(_levels_of, everything))))
    return markdown(head, rows)


@cache
def errors_by_model(device: str) -> dict[str, list[float]]:
    """Of each model's steps, as half of the models predict them."""
    found = defaultdict[str, list[float]](list)
    for step, error in errors_of_halves(record_of(device)):
        found[step.model].append(error)
    return found


def device_table() -> str:
    """Levels by device, kind of model and precision, as Markdown."""
    head = ("GPU", "steps", "number", "others: median", "bias", "worst", "preset: median")
    return markdown(head, [row for device in RECORDED for row in _rows(device)])


def _rows(device: str) -> Iterator[tuple[str, ...]]:
    groups = defaultdict[str, list[tuple[float, float]]](list)
    for held in held_out():
        if held.row.publisher == OWN and held.row.device == device:
            row = held.row
            kind = _kind(row.precision, convolutional=row.is_convolutional)
            groups[kind].append((held.error, _error_of_preset(row)))
    for kind, errors in sorted(groups.items()):
        yield device, kind, *_levels(errors)
    yield device, "all", *_levels([each for errors in groups.values() for each in errors])


def _kind(precision: str, *, convolutional: bool) -> str:
    return f"{'convolutions' if convolutional else 'attention'}, {precision}"


def _error_of_preset(row: Row) -> float:
    return row.on(constants().of(row)).step_s() / row.step_s - 1


def _levels(errors: list[tuple[float, float]]) -> tuple[str, ...]:
    of_preset = median(abs(error) for _, error in errors)
    return *_levels_of([error for error, _ in errors]), f"{of_preset:.0%}"


def _levels_of(errors: list[float]) -> tuple[str, ...]:
    """Number, median, bias and worst."""
    if not errors:
        return "0", "", "", ""
    return (
        f"{len(errors)}",
        f"{median(map(abs, errors)):.0%}",
        f"{median(errors):+.0%}",
        f"{max(errors, key=abs):+.0%}",
    )
