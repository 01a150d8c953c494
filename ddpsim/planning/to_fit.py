"""The fewest settings with which a strategy fits into memory, its training left as it is."""

from __future__ import annotations

from collections.abc import Sequence

from ddpsim.errors import InputError, ScenarioError
from ddpsim.prediction.fitting import ways_to_fit
from ddpsim.prediction.resolve import resolve
from ddpsim.scenario.document import Document
from ddpsim.scenario.load import parse

__all__ = ["fit_in_words", "settings_to_fit"]

_WORDS = {
    "ddp.gradient_as_bucket_view": "gradient views",
    "ddp.fully_shard.offload_policy": "offloaded",
    "workload.checkpointing": "checkpointing",
    "ddp.accumulation_steps": "micro-batches",
}


def settings_to_fit(
    document: Document, settings: Sequence[str], size: tuple[int, int] | None = None
) -> tuple[str, ...]:
    """Micro-batches, checkpointing, offloading or views of buckets; none where it fits, or cannot.

    Of a document with settings, on so many nodes and GPUs of each, or on its own.
    """
    try:
        scenario = parse(document.changed(settings))
        if size is not None:
            update = {"cluster": scenario.cluster.resized(*size)}
            scenario = scenario.model_copy(update=update)
        ways = ways_to_fit(resolve(scenario), same_strategy=True)
        found = next((way.settings for way in ways if way.why.startswith("fits")), ())
        if found:
            parse(document.changed((*settings, *found)))
    except (InputError, ScenarioError):
        return ()
    return found


def fit_in_words(settings: Sequence[str]) -> str:
    """`checkpointing, 4 micro-batches`; empty without any."""
    values = dict(setting.split("=", 1) for setting in settings)
    found = [word for key, word in _WORDS.items() if key in values]
    steps = values.get("ddp.accumulation_steps")
    return ", ".join(f"{steps} {word}" if word == "micro-batches" else word for word in found)
