"""The scenarios that `ddpsim init` prints: those of the project's `scenarios/` folder."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

from ddpsim.errors import InputError
from ddpsim.scenario.options.model_file import read_model_file
from ddpsim.scenario.schema import json_schema
from ddpsim.scenario.suggest import did_you_mean
from ddpsim.wording import counted

_BATCH = 8
_FILE = re.compile(
    r"^\s+(?:all_reduce|reduce_scatter|all_gather|profile|trace|parameters"
    r"|device(?=:\s*\S+\.json$)):\s*(\S+)",
    re.MULTILINE,
)


_SCHEMA = "ddpsim.schema.json"
_EDITORS = f"# yaml-language-server: $schema={_SCHEMA}\n"


def presets() -> dict[str, str]:
    """Names of the scenarios, with what each shows."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in _folder().glob("*.yaml")}
    return {name: texts[name].splitlines()[0].lstrip("# ") for name in sorted(texts)}


def preset_text(name: str) -> str:
    """The YAML of a preset scenario; raises InputError with the nearest name."""
    scenarios = presets()
    if name not in scenarios:
        hint = did_you_mean(name, scenarios)
        raise InputError("preset", f"unknown preset {name!r}.{hint} Known: {', '.join(scenarios)}")
    return (_folder() / f"{name}.yaml").read_text(encoding="utf-8")


def preset_files(name: str) -> tuple[str, ...]:
    """The files that a preset names, relative to it."""
    return tuple(_FILE.findall(preset_text(name)))


def copy_preset(name: str, folder: Path) -> tuple[Path, ...]:
    """Write a preset, the files that it names, and the schema that editors check it by.

    Raises InputError if one of the preset's files exists.
    """
    files = (*preset_files(name), f"{name}.yaml")
    written = tuple(folder / file for file in files)
    for path in written:
        if path.exists():
            raise InputError("folder", f"{path} exists already; nothing was written")
    try:
        for file, path in zip(files, written, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as copy:
                copy.write((_folder() / file).read_bytes())
        text = _EDITORS + preset_text(name)
        written[-1].write_text(text, encoding="utf-8")
        (folder / _SCHEMA).write_text(f"{json_schema()}\n", encoding="utf-8")
    except OSError as error:
        raise InputError("folder", f"{error.filename}: {error.strerror}") from None
    return (*written, folder / _SCHEMA)


def captured_text(path: Path) -> str:
    """The YAML of a scenario with a model's file; raises InputError for what is none."""
    try:
        model = read_model_file(str(path), path)
    except ValueError as error:
        raise InputError("model", str(error)) from None
    table, measured = model.table or {}, model.measured
    title = model.document.get("title") or path.stem
    only, size = table.get("batch"), table.get("size")
    batch = measured.batch_per_rank if measured else only["only"] if only else _BATCH
    by = "profile` measured" if measured else "capture` recorded"
    lines = [
        f"# {title}, as `calibrate {by} it",
        "schema: ddpsim/1",
        f"name: {json.dumps(title)}",
        "workload:",
        f"  model: {json.dumps(str(path))}",
        f"  batch_per_rank: {batch}    # samples of one micro-batch",
        *([] if measured else ["  precision: amp-bf16"]),
    ]
    if size:
        free = f"{size['min']} to {size['max']}" if size["min"] < size["max"] else "no other"
        lines.append(f"  {size['key']}: {size['default']}    # {free}")
    if unused := model.unused:
        some = f"{counted(len(unused), 'parameter')} without a gradient (first: {unused[0]})"
        lines.append(f"ddp: {{find_unused_parameters: true}}    # {some}")
    machine = "cluster: {machine: dgx-h100, nodes: 2}    # the machines that you ask about"
    return "\n".join((*lines, machine)) + "\n"


def _folder() -> Path:
    """Folder of the scenarios: in a wheel beside the other data, in a checkout at its top."""
    package = Path(str(resources.files("ddpsim")))
    packed = package / "data" / "scenarios"
    return packed if packed.is_dir() else package.parent / "scenarios"
