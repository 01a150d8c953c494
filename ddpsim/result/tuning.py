"""What a search for options found: which to change, and what is as good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ddpsim.result.changes import Change
from ddpsim.result.drawn import Drawn
from ddpsim.result.model import rounded
from ddpsim.result.sweep import FLAT


@dataclass(frozen=True)
class Tuning(Drawn):
    """The options to take, compared with a scenario as it is.

    `pick` changes the fewest keys of all that are `within` of the fastest found, per sample, and
    fit into memory; without settings the scenario is as good as any. `fastest` is the fastest
    itself; `flat_caps` the bucket caps that with the other options of `pick` are `within` of it,
    none where it has no buckets.
    `own_regret` and `default_regret`: by how much the scenario's own options (None where they do
    not keep to the limits), and torch's default caps with the other options of `pick`, take longer
    than `fastest`. `tried` scenarios were simulated, of which `unfit` do not keep to the limits.
    `warnings`: what `run` warns of with the options of `pick`. `noise`: by how much two runs of the
    scenario differ by chance, relative; `within` is that, or FLAT where it is more. `refused`: what
    cannot be simulated, and why.
    """

    name: str
    world_size: int
    pick: Change
    fastest: Change
    flat_caps: tuple[str, ...]
    own_regret: float | None
    default_regret: float | None
    tried: int
    unfit: int
    constraints: tuple[str, ...]
    warnings: tuple[str, ...]
    noise: float = 0.0
    within: float = FLAT
    refused: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        said = f"{self.pick.title}, {self.pick.change:+.1%}" if self.pick.settings else "as it is"
        return f"<Tuning of {self.name}: {said}>"

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types (schema `ddpsim.tuning/1`)."""
        changes = {
            key: asdict(change) | {"is_sure": change.is_sure}
            for key, change in (("pick", self.pick), ("fastest", self.fastest))
        }
        return {"schema": "ddpsim.tuning/1", **rounded(asdict(self) | changes)}
