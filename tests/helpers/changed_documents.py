"""Documents of scenarios by name, and the flags of DDP compared on them."""

from __future__ import annotations

from pathlib import Path

import ddpsim
from ddpsim.prediction.api import predict
from ddpsim.scenario.document import Document, load
from ddpsim.scenario.load import parse

ROOT = Path(__file__).resolve().parent.parent.parent


def document(name: str, *settings: str) -> Document:
    return load(ROOT / "scenarios" / f"{name}.yaml", settings)


def alone(name: str, *settings: str) -> ddpsim.Result:
    return predict(parse(document(name, *settings)))
