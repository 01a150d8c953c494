"""The constants of measured steps, written into ddpsim/data/devices.json.

python -m held_out.presets (in tools/); a test says whether that would change anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from held_out.efficiency import Place, chip_of
from held_out.errors import Constants, constants, steps_of_place
from held_out.records import RECORDED
from held_out.rows import generation
from held_out.timm_steps import DEVICE, OF_TIMM

__all__ = ["GENERATIONS", "devices_told", "preset_operator_us"]

FILE = Path(__file__).resolve().parent.parent.parent / "ddpsim" / "data" / "devices.json"
_BY_JUDGEMENT = ("mi250x-gcd", "mi300x", "mi325x", "mi355x")  # the line is of NVIDIA's chips
_STEP_US = 5  # hosts differ by more
_METHOD = "(docs/validation.md, section 3; tools/held_out)"
GENERATIONS = {
    "early": "Volta and Turing",
    "ampere": "Ampere",
    "later": "Ada, Hopper and Blackwell",
}


def devices_told(devices: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The presets with what measured steps say of them."""
    told = constants()
    return {name: _told(name, table, told) for name, table in devices.items()}


def preset_operator_us(operator_s: float) -> int:
    """Microseconds of an operator, launch and all, as presets have them."""
    return _STEP_US * round(1e6 * operator_s / _STEP_US)


def _told(name: str, table: dict[str, Any], told: Constants) -> dict[str, Any]:
    if table["kind"] == "cpu":
        return table
    which = "ampere" if name == "mi250x-gcd" else generation(name)
    operator_us = preset_operator_us(told.operators_s[which])
    table = table | {"operator_s": (operator_us - 5) * 1e-6}
    sources = table["sources"] | {
        "operator_s": f"Assumed {operator_us - 5} us beside the launch, of the host and not of the "
        f"device: hosts of {GENERATIONS[which]} GPUs take {operator_us} us an operator, "
        f"within a factor of two {_METHOD}."
    }
    if name in _BY_JUDGEMENT:
        return table | {"sources": sources}
    rates = [rate for rate in table["peak_flops"] if rate != "fp8"]  # no step was measured in it
    chip = chip_of(name)
    places = [
        {rate: Place(chip, _rate(rate), convolution=of_them) for rate in rates}
        for of_them in (False, True)
    ]
    keys = ("matmul_efficiency", "convolution_efficiency")
    for key, of_rates in zip(keys, places, strict=True):
        values = {rate: round(told.reached.of(place), 2) for rate, place in of_rates.items()}
        table = table | {key: values}
        sources |= {key: _source(of_rates, recorded=name in RECORDED)}
    counts = {rate: sum(steps_of_place(of_rates[rate]) for of_rates in places) for rate in rates}
    if name == DEVICE:
        counts |= {rate: counts[rate] + OF_TIMM for rate in ("fp16", "bf16")}
    return table | {"sources": sources, "published_steps": counts}


def _rate(rate: str) -> str:
    return rate if rate in ("fp32", "tf32") else "half"


def _source(places: dict[str, Place], *, recorded: bool) -> str:
    counted = {place.rate: steps_of_place(place) for place in places.values()}
    known = ", ".join(f"{rate} {count}" for rate, count in counted.items() if count)
    own = f"of this chip: {known}" if known else "none of this chip"
    if recorded:
        own += ", those of its device record among them"
    return f"Set by all measured steps, and products in fp32, together {_METHOD}; {own}."


def main() -> None:
    """Write the file anew."""
    content = json.loads(FILE.read_text("utf-8"))
    content["devices"] = devices_told(content["devices"])
    FILE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
