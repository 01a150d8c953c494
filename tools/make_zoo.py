"""Capture the zoo's models and write ddpsim/data/zoo/<name>.json, as `calibrate capture` does."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from zoo.models import ZOO

from calibrate.capture.capture import capture
from calibrate.capture.document import render
from ddpsim.files import write_atomically

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
    for name in options.name or ZOO:
        start = time.perf_counter()
        document = capture(ZOO[name]())
        text = render(document) + "\n"
        write_atomically(options.out / f"{name}.json", text)
        seconds = time.perf_counter() - start
        print(f"{name}: {len(text)} bytes, {seconds:.1f} s, {document['size']}", flush=True)


if __name__ == "__main__":
    main()
