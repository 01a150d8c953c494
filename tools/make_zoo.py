"""Measure the zoo models on the meta device and write ddpsim/data/zoo/<name>.json.

Every number comes from running one real training step (forward, loss, backward) of the real
module on torch.device("meta"): shapes flow, no memory is allocated and nothing is computed.
A dispatch mode sees each aten operator and adds up its cost:

* FLOPs: 2 per multiply-add, from torch.utils.flop_counter. A causal mask does not halve them.
* elements: read plus written per operator, whatever their dtype, from real storages (a broadcast
  operand counts once); a tensor that is updated in place is both read and written.
* kernels: one per operator that launches something.

Costs are then fitted exactly as fixed + batch * (c0 + c1 * x + c2 * x**2).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from zoo.models import ZOO
from zoo.tables import make_table, render, write

OUTPUT = Path(__file__).resolve().parent.parent / "ddpsim" / "data" / "zoo"


def main(arguments: Sequence[str] | None = None) -> None:
    """Regenerate the named tables, or all; one line is printed per model."""
    parser = argparse.ArgumentParser(description="Measure zoo models and write their tables.")
    parser.add_argument("name", nargs="*", help=f"of {', '.join(ZOO)} (default: all)")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder to write to")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.name if name not in ZOO]
    if unknown:
        parser.error(f"unknown model: {', '.join(unknown)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.name or ZOO:
        start = time.perf_counter()
        table = make_table(ZOO[name])
        text = render(table.content) + "\n"
        write(options.out / f"{name}.json", text)
        seconds = time.perf_counter() - start
        print(f"{name}: {len(text)} bytes, {seconds:.1f} s, {table.exactness}", flush=True)


if __name__ == "__main__":
    main()
