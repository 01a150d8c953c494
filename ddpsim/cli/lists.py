"""The command `list`: names that a scenario may use. Heavy imports wait until it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from ddpsim.cli.typer_app import app

Table = Mapping[str, Any]
_KINDS = ("models", "devices", "machines", "failures", "prices")
_HEADS = {
    "models": ("model", "parameters", "family", "input"),
    "devices": ("device", "memory", "bandwidth", "fp32", "bf16", "is"),
    "machines": ("machine", "GPUs of a node", "NICs of a node", "is"),
    "failures": ("failures", "mean time between", "is"),
    "prices": ("machine", "of", "on-demand", "spot", "one-year", "read on", "in"),
}


def _complete(incomplete: str) -> list[str]:
    return [kind for kind in _KINDS if kind.startswith(incomplete)]


@app.command("list", rich_help_panel="Files")
def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=", ".join(_KINDS) + "; omitted: these words.",
            autocompletion=_complete,
            show_default=False,
        ),
    ] = None,
    words: Annotated[
        list[str] | None, typer.Argument(help="Rows that hold all of these words alone.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List models, devices, machines and others to name.

    \b
    ddpsim list models llama
    ddpsim list devices h100
    ddpsim list machines h100 efa
    ddpsim list prices a100
    """
    from ddpsim.glossary import lookup
    from ddpsim.scenario.keys import keys_named
    from ddpsim.scenario.suggest import did_you_mean

    if kind is None:
        print(*_KINDS, sep="\n")
        return
    if kind not in _KINDS:
        hint = did_you_mean(kind, _KINDS)
        if lookup(kind) or any(keys_named(kind)):
            hint = f" ddpsim explain {kind} tells of it"
        raise typer.BadParameter(
            f"{kind!r} is none of {', '.join(_KINDS)}.{hint}", param_hint="KIND"
        )
    wanted = [word.lower() for word in words or ()]
    rows = [
        row
        for names, row in _rows(kind)
        if all(word in " ".join((*names, *row)).lower() for word in wanted)
    ]
    if not rows:
        raise typer.BadParameter(
            f"none of the {kind} holds {' and '.join(map(repr, words or ()))}", param_hint="WORDS"
        )
    head = _HEADS[kind]
    if as_json:
        print(json.dumps([dict(zip(head, row, strict=True)) for row in rows], indent=2))
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _rows(kind: str) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """All other spellings of each name, and its row."""
    from ddpsim.scenario import catalog

    if kind == "prices":
        yield from _prices()
        return
    if kind == "failures":
        for name in catalog.failure_names():
            yield [], (name, *_failures(catalog.failures_of(name)))
        return
    columns: dict[str, tuple[Callable[[str], Table], Callable[[Table], tuple[str, ...]]]] = {
        "models": (catalog.model_table, _model),
        "devices": (catalog.device_table, _device),
        "machines": (catalog.machine_table, _machine),
    }
    table, row = columns[kind]
    for name, spellings in catalog.spellings(kind.removesuffix("s")).items():
        yield spellings, (name, *row(table(name)))


def _model(table: Table) -> tuple[str, ...]:
    from ddpsim.units import format_number

    size = table["size"]
    parameters = f"{format_number(table['parameter_count'] / 1e6)} M"
    taken = "one size"
    if size:
        limit = f", to {size['max']:,}" if size["max"] > size["min"] else ""
        taken = f"{size['key']} {size['default']}{limit}"
    return parameters, table["family"], taken


def _device(table: Table) -> tuple[str, ...]:
    from ddpsim.units import format_bytes, format_bytes_per_s

    peaks = table["peak_flops"]
    rates = (
        f"{peaks[rate] / 1e12:.4g} TFLOP/s" if rate in peaks else "-" for rate in ("fp32", "bf16")
    )
    memory = format_bytes(table["memory_bytes"])
    return (
        memory,
        format_bytes_per_s(table["memory_bandwidth_bytes_per_s"]),
        *rates,
        table["title"],
    )


def _machine(table: Table) -> tuple[str, ...]:
    link = table["inter_node"]
    rate = f"{8 * link['bandwidth_bytes_per_s'] / 1e9:.4g} Gbit/s"
    nics = f"{link.get('nics_per_node', 1)} x {rate} {link['transport']}"
    return f"{table['gpus_per_node']} x {table['device']}", nics, table["title"]


def _failures(table: Table) -> tuple[str, ...]:
    from ddpsim.units import format_number

    unit = "gpu" if "gpu_mtbf_s" in table else "node"
    hours = format_number(table[f"{unit}_mtbf_s"] / 3600)
    return f"{hours} h a {'GPU' if unit == 'gpu' else unit}", table["title"]


def _prices() -> Iterator[tuple[list[str], tuple[str, ...]]]:
    from ddpsim.importers.prices import TERMS, read_prices

    for row in read_prices():
        each = (row.gpu_hour(term) for term in TERMS)
        prices = ("-" if price is None else f"{price:.2f}" for price in each)
        unit = f"{row.currency} a GPU-hour, {row.region}"
        yield [row.source], (row.machine, row.provider, *prices, row.date, unit)
