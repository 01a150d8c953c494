"""The page of the fields of results, from their dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from validation.markdown import escaped as table

__all__ = ["results_page"]

_RESULTS = {  # the JSON of each command: its schema, and the dataclass that it lists
    "run": ("ddpsim.result/1", "model", "Result"),
    "sweep": ("ddpsim.sweep/1", "sweep", "Sweep"),
    "compare": ("ddpsim.comparison/1", "changes", "Comparison"),
    "explain-step": ("ddpsim.explanation/1", "changes", "Explanation"),
    "tune": ("ddpsim.tuning/1", "changes", "Tuning"),
    "plan": ("ddpsim.plan/1", "capacity", "CapacityPlan"),
    "diagnose": ("ddpsim.diagnosis/1", "diagnosis", "Diagnosis"),
    "replay": ("ddpsim.replay/1", "replay", "Replay"),
}
_JSON = {  # what a command's JSON has otherwise than its dataclass
    "run": "`memory_bytes_per_gpu` also has `total`. `--measured` adds `verdict`: the measured "
    "time (`measured_s`), its `difference` from the prediction as a share, whether it is `normal`, "
    "the `explanations` in words, their `causes` (see `diagnose`), and `stretches`: how many times "
    "as long one term alone would have to take.",
    "sweep": "Each of the `axes` has its `keys` and their `values`. `points` and `own` are flat: "
    "the dotted keys of the axes, `world_size`, `iteration_time_s` with `_p10`, `_p50` and `_p90`, "
    "`throughput_samples_per_s`, `throughput_per_gpu`, `scaling_efficiency`, `comm_time_s`, "
    "`exposed_comm_s`, `memory_bytes_per_gpu`, `fits` and `problem`; a point also says whether it "
    "is the `best` or on the `front`. CSV and Parquet files have the same columns. `flat` lists "
    "for each axis the `values` `within` 0.2 % of the best, or the `noise`, and under `keep` the "
    "ones to take.",
    "compare": "Each change also has `is_sure`: it is larger than its uncertainty.",
    "explain-step": "In place of `result` there are its `name`, `iteration_time_s` (the mean), "
    "`bottleneck` and `warnings`.",
    "tune": "`pick` and `fastest` also have `is_sure`; `within` is the share that counts as equal: "
    "0.2 %, or the `noise`.",
    "plan": "`knee_efficiency` is the criterion of the knee.",
    "diagnose": "`healthy` says whether nothing is likelier than that nothing is wrong. `factors` "
    "are of `compute`, `host` or `network`.",
    "replay": "`error` is the median over steps of how far the simulated step is off. `document` "
    "is the scenario, as `-o` writes it.",
}
_UNITS = {  # by the end of a field's name
    "_samples_per_s": "samples/s",
    "_bytes_per_s": "bytes/s",
    "_bytes_per_gpu": "bytes",
    "_bytes": "bytes",
    "throughput_per_gpu": "samples/s",
    "_hours": "GPU-hours",
    "_s": "s",
}
_PURE = ("level",)  # fields that have no unit in a part that has one


def results_page() -> str:
    """Every field of every result, with its type and unit."""
    written: set[type] = set()
    parts = ["# Result fields\n\n" + _RESULTS_INTRODUCTION]
    for command, (schema, module, name) in _RESULTS.items():
        root = getattr(import_module(f"ddpsim.result.{module}"), name)
        parts.append(f"\n## {command}: {schema}\n\n{_JSON[command]}\n")
        parts += [_fields(each, unit) for each, unit in _reached(root, "", written)]
    return "\n".join(parts)


_RESULTS_INTRODUCTION = """\
`--json` prints the answer of a command with every figure, and its `schema`. Times are seconds,
sizes bytes, rates samples or bytes per second. Field names end in their unit. In Python the answer
is the dataclass of the same fields.
"""


def _reached(kind: type, unit: str, written: set[type]) -> Iterator[tuple[type, str]]:
    """A dataclass and those that it holds, each once, with the unit of the field that holds it."""
    if kind in written:
        return
    written.add(kind)
    yield kind, unit
    for name, hint in typing.get_type_hints(kind).items():
        for inner in _dataclasses_in(hint):
            yield from _reached(inner, unit_of(name), written)


def _dataclasses_in(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for inner in typing.get_args(hint):
        yield from _dataclasses_in(inner)


def _fields(kind: type, unit: str) -> str:
    """The table of a dataclass; its plain numbers are in `unit` where their names have none."""
    hints = typing.get_type_hints(kind)
    types = {field.name: type_of(hints[field.name]) for field in dataclasses.fields(kind)}
    rows = ((f"`{name}`", said, unit_of(name, said, unit)) for name, said in types.items())
    text = inspect.cleandoc(kind.__doc__ or "")
    return f"### {kind.__name__}\n\n{text}\n\n" + table(("field", "type", "unit"), rows)


def type_of(hint: Any) -> str:
    """A type as JSON has it."""
    if hint is type(None):
        return "null"
    inner = [type_of(one) for one in typing.get_args(hint) if one is not Ellipsis]
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return ", ".join(f'`"{one}"`' for one in typing.get_args(hint))
    if origin in (tuple, list, Sequence):
        return f"list of {inner[0]}"
    if inner and origin is not dict:
        return " or ".join(dict.fromkeys(inner))
    names = {str: "text", bool: "true, false", int: "whole number", float: "number"}
    name = names.get(hint) or getattr(hint, "__name__", str(hint))
    return f"[{name}](#{name.lower()})" if dataclasses.is_dataclass(hint) else name


def unit_of(name: str, said: str = "", inherited: str = "") -> str:
    """The unit that a field's name ends in; of a plain number without one the inherited one."""
    for end, unit in _UNITS.items():
        if name.endswith(end):
            return unit
    return inherited if "number" in said and name not in _PURE else ""
