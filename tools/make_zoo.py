"""Capture the zoo's models and write ddpsim/data/zoo, each table as `calibrate capture` makes it.

A family has one file: a line of JSON for each model, in the order of names.json.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.models import ZOO

from calibrate.capture.capture import capture, render
from ddpsim.files import write_atomically
from ddpsim.scenario.catalog import model_names, zoo_document

OUTPUT = Path(__file__).resolve().parent.parent / "ddpsim" / "data" / "zoo"


def main(arguments: Sequence[str] | None = None) -> None:
    """Regenerate the named tables, or all; one line is printed per model."""
    parser = argparse.ArgumentParser(description="Capture zoo models and write their tables.")
    parser.add_argument("name", nargs="*", help=f"of {', '.join(ZOO)} (default: all)")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder to write to")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.name if name not in ZOO]
    if unknown:
        parser.error(f"unknown model: {', '.join(unknown)}")
    documents = {name: zoo_document(name) for name in model_names() if name in ZOO}
    for name in options.name or ZOO:
        start = time.perf_counter()
        documents[name] = capture(ZOO[name]())
        seconds = time.perf_counter() - start
        print(f"{name}: {seconds:.1f} s, {documents[name]['captured']['size']}", flush=True)
    _write(options.out, [documents[name] for name in ZOO if name in documents])


def _write(folder: Path, documents: Sequence[dict[str, Any]]) -> None:
    families: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        families.setdefault(document["family"], []).append(document)
    for family, members in families.items():
        text = "\n".join(json.dumps(one, separators=(",", ":")) for one in members)
        packed = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
        write_atomically(folder / f"{family}.jsonl.xz", packed)
    names = {family: [one["name"] for one in members] for family, members in families.items()}
    write_atomically(folder / "names.json", render(names) + "\n")


if __name__ == "__main__":
    main()
