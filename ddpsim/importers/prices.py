"""List prices of machines: the table of the package, or a CSV like it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Literal

from ddpsim.errors import InputError, shown
from ddpsim.importers.text import ForeignFile, read_text
from ddpsim.scenario.catalog import resolve
from ddpsim.scenario.quantity import SourceFile

Term = Literal["on-demand", "spot", "one-year"]
TERMS: tuple[Term, ...] = ("on-demand", "spot", "one-year")
_TABLE = Path(__file__).parent.parent / "data" / "prices.csv"


@dataclass(frozen=True)
class ListPrice:
    """What a provider asks for an hour of a whole machine; None: not known.

    `date`: when the `source` said so. `machine` is one of our presets.
    """

    machine: str
    provider: str
    region: str
    gpus: int
    on_demand: float | None
    spot: float | None
    one_year: float | None
    currency: str
    date: str
    source: str

    def gpu_hour(self, term: Term) -> float | None:
        """The price of one GPU's hour."""
        whole = {"on-demand": self.on_demand, "spot": self.spot, "one-year": self.one_year}[term]
        return None if whole is None else whole / self.gpus


COLUMNS = tuple(field.name for field in fields(ListPrice))


def read_prices(path: Path | None = None) -> list[ListPrice]:
    """The rows of a table, of the package's own by default; raises ImportFailedError by line."""
    given = SourceFile("prices.csv" if path is None else str(path), path or _TABLE)
    lines = read_text(given, f"a CSV of {','.join(COLUMNS)}").splitlines()
    file = ForeignFile(given.given)
    return [_row(file, line, cells) for line, cells in file.table(lines, COLUMNS)]


def _row(file: ForeignFile, line: int, cells: dict[str, str]) -> ListPrice:
    def price(key: str) -> float | None:
        return file.number(line, cells[key], key, above_zero=True) if cells[key] else None

    try:
        machine = resolve("machine", cells["machine"])
        date.fromisoformat(cells["date"])
    except ValueError as error:
        raise file.wrong(str(error), line) from None
    if not cells["source"].strip():
        raise file.wrong("has no source; wanted where the price was read", line)
    return ListPrice(
        machine=machine,
        provider=cells["provider"],
        region=cells["region"],
        gpus=file.whole(line, cells["gpus"], "gpus"),
        on_demand=price("on_demand"),
        spot=price("spot"),
        one_year=price("one_year"),
        currency=cells["currency"],
        date=cells["date"],
        source=cells["source"],
    )


def merged(older: Iterable[ListPrice], newer: Iterable[ListPrice]) -> list[ListPrice]:
    """Both tables; of the same machine, provider and region the later row."""
    rows: dict[tuple[str, str, str], ListPrice] = {}
    for row in (*older, *newer):
        key = (row.machine, row.provider, row.region)
        if key not in rows or row.date >= rows[key].date:
            rows[key] = row
    return list(rows.values())


def listed_price(rows: Iterable[ListPrice], machine: str | None, term: Term) -> ListPrice:
    """The latest row of a machine that has a price for the term; raises InputError."""
    rows = tuple(rows)
    offers = [row for row in rows if row.machine == machine and row.gpu_hour(term) is not None]
    if not offers:
        machines = sorted({row.machine for row in rows if row.gpu_hour(term) is not None})
        what = f"cluster.machine {shown(machine)}" if machine else "a cluster without a machine"
        raise InputError(
            "price",
            f"no {term} price of {what} is known; write --price '2.50 USD', or add a row to "
            f"--prices. Known: {', '.join(machines) or 'none'}",
        )
    return max(offers, key=lambda row: row.date)
