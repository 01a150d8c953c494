"""Training steps of timm's models on one RTX 3090, and the operators of these models.

The steps are published (huggingface/pytorch-image-models, results/benchmark-train-amp-*-pt112-
cu113-rtx3090.csv; PyTorch 1.12, fp16 autocast, SGD with momentum, attention written out) and read
from the reference data. tests/data/timm-operators.json.gz has each model's operators at its batch,
which `python -m held_out.timm_steps` (in tools/) records anew; that needs timm. Operators that
multiply nothing are added up by kind and width, large ones and small ones apart.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ddpsim.workload.operators import KINDS, MULTIPLYING, Operator

__all__ = ["DEVICE", "OF_TIMM", "TimmStep", "timm_steps"]

FILE = Path(__file__).resolve().parent.parent.parent / "tests" / "data" / "timm-operators.json.gz"
PUBLISHED = Path("published") / "timm-train-rtx3090.csv"
DEVICE, OF_TIMM = "rtx-3090", 781  # the GPU, and how many steps
_LARGE_BYTES = 2**21  # more than the floor of a kernel moves
_SAME_PARAMETERS = 0.02  # today's timm has other models of some names


class TimmStep(NamedTuple):
    """A published step: its model, timm's file of it, and its operators with their numbers."""

    model: str
    family: str
    channels_last: bool
    step_s: float
    parameters: int
    operators: tuple[tuple[Operator, int], ...]


def timm_steps() -> list[TimmStep]:
    """All steps of models that timm still has; raises KeyError without the reference data."""
    models = _models()
    steps = []
    for row in _published():
        known = models.get(_key(row))
        if known is None or not _is_same(known["parameters"], row):
            continue
        is_last = row["memory_format"] == "channels_last"
        step_s = float(row["step_ms"]) / 1e3
        told = (row["model"], known["family"], is_last, step_s, known["parameters"])
        steps.append(TimmStep(*told, known["operators"]))
    return steps


def _published() -> list[dict[str, str]]:
    file = Path(os.environ["DDPSIM_REFERENCE_DATA"]) / PUBLISHED
    return list(csv.DictReader(file.read_text("utf-8").splitlines()))


def _key(row: dict[str, str]) -> str:
    return f"{row['model']} {row['batch']} x {row['image_size']}"


def _is_same(parameters: int, row: dict[str, str]) -> bool:
    return abs(parameters / 1e6 / float(row["params_million"]) - 1) <= _SAME_PARAMETERS


@cache
def _models() -> dict[str, dict[str, Any]]:
    table = json.loads(gzip.decompress(FILE.read_bytes()))
    return {
        key: model
        | {"operators": tuple((Operator(KINDS[k], *o), n) for k, *o, n in model["operators"])}
        for key, model in table.items()
    }


def _summed(operators: Counter[Operator]) -> Iterator[tuple[Operator, int]]:
    """Products one by one, with their numbers; others by kind, width and whether they are large."""
    sums: dict[tuple[Any, ...], tuple[int, int, int]] = {}
    for one, number in operators.items():
        if one.kind in MULTIPLYING:
            yield one, number
            continue
        is_large = one.bytes_read + one.bytes_written > _LARGE_BYTES
        key = (one.kind, one.item_bytes, is_large)
        read, written, before = sums.get(key, (0, 0, 0))
        read += int(number * one.bytes_read)
        written += int(number * one.bytes_written)
        sums[key] = (read, written, before + number)
    for (kind, item_bytes, is_large), (read, written, number) in sums.items():
        times = 1 if is_large else number
        moved = {"bytes_read": read // times, "bytes_written": written // times}
        yield Operator(kind, **moved, item_bytes=item_bytes), times


def _recorded(name: str, batch: int, size: int) -> dict[str, Any]:
    """A model's operators; raises RuntimeError if timm has none of the name."""
    import timm  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from timm.models import _registry  # noqa: PLC0415
    from torch.nn import functional  # noqa: PLC0415

    from calibrate.capture.record import record  # noqa: PLC0415

    renamed = _registry._deprecated_models.get(name) or name  # noqa: SLF001
    entry = renamed.partition(".")[0]
    with torch.device("meta"):
        try:
            model = timm.create_model(entry, img_size=size)
        except TypeError:  # convolutional ones take any size
            model = timm.create_model(entry)
        images, labels = torch.empty(batch, 3, size, size), torch.empty(batch, dtype=torch.long)

    def loss() -> Any:
        told = model(images)
        return functional.cross_entropy(told[0] if isinstance(told, tuple) else told, labels)

    step = record(model.train(), loss, "amp")
    operators = Counter(one for row in (*step.forward, *step.backward) for one in row)
    return {
        "family": _registry._model_to_module[entry],  # noqa: SLF001
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "operators": [[KINDS.index(one.kind), *one[1:], n] for one, n in _summed(operators)],
    }


def main() -> None:
    """Record all models, and write the file."""
    os.environ["TIMM_FUSED_ATTN"] = "0"
    table = {}
    for row in _published():
        if _key(row) in table:
            continue
        try:
            table[_key(row)] = _recorded(row["model"], int(row["batch"]), int(row["image_size"]))
        except RuntimeError as error:
            print(f"{row['model']}: {error}")
    text = json.dumps(table, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


if __name__ == "__main__":
    main()
