"""Print the package's list prices with newer rows: python tools/merge_prices.py NEWER.csv."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from ddpsim.importers.prices import COLUMNS, ListPrice, merged, read_prices


def written(rows: Iterable[ListPrice]) -> str:
    """A table as CSV, which `read_prices` reads."""
    file = StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return file.getvalue()


if __name__ == "__main__":
    print(written(merged(read_prices(), read_prices(Path(sys.argv[1])))), end="")
