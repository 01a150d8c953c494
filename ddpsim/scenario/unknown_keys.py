"""The key that is meant by an unknown one: misspelt, in another section, or of another program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddpsim.scenario.ddp import OF_HOOKS, OF_STRATEGIES
from ddpsim.scenario.document import Document, KeyPath
from ddpsim.scenario.keys import all_keys, keys_at, keys_named
from ddpsim.scenario.options.ddp_values import strategy_meant
from ddpsim.scenario.suggest import nearest, squashed

_MOST_NAMED = 3  # keys of one name, of which a message can list all
_OF_SECTIONS = 2  # steps to their keys; options within one are few, and a far name is no guess
_SHORT_NAME = 4  # letters, of which many names have some in common
# what other programs call keys of ours
_OTHER_NAMES = {
    **dict.fromkeys(
        ("batch", "batch_size", "micro_batch_size", "per_device_train_batch_size"),
        "workload.batch_per_rank",
    ),
    **dict.fromkeys(("lr", "base_lr"), "workload.learning_rate"),
    **dict.fromkeys(("amp", "dtype", "fp16", "bf16"), "workload.precision"),
    **dict.fromkeys(("gradient_checkpointing", "recompute"), "workload.checkpointing"),
    **dict.fromkeys(("gpu", "accelerator"), "cluster.device"),
    **dict.fromkeys(
        ("world_size", "num_gpus", "ngpus", "gpus", "ranks", "num_processes"),  # of all nodes
        "cluster.nodes and cluster.gpus_per_node",
    ),
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines"), "cluster.nodes"),
    **dict.fromkeys(("network", "interconnect"), "cluster.inter_node"),
    **dict.fromkeys(("max_length", "max_seq_length", "block_size"), "workload.seq_len"),
    "nproc_per_node": "cluster.gpus_per_node",
    "bucket_size": "ddp.bucket_cap_mb",
    "mixed_precision": "workload.precision",
    "epochs": "a target: ddpsim plan FILE --target '90 epochs of 1.28M samples'",
}
# the same within one section
_OF_SECTION = {
    ("fsdp1", "reshard_after_forward"): (
        "sharding_strategy, where FULL_SHARD is true and SHARD_GRAD_OP false"
    ),
    ("fully_shard", "sharding_strategy"): (
        "reshard_after_forward, where true is FULL_SHARD and false SHARD_GRAD_OP"
    ),
    ("fully_shard", "mp_policy"): "mixed_precision",
    ("power_sgd", "rank"): "matrix_approximation_rank",
    ("lora", "targets"): "modules",
    ("lora", "target_modules"): "modules",  # of LoraConfig
    ("lora", "r"): "rank",
}
# of launchers: which rank a process is
_OF_ONE_RANK = ("machine_rank", "node_rank", "local_rank", "global_rank", "rank")


def known_key(document: Document, path: KeyPath) -> str:
    """Say which key an unknown one stands for, here or in another section, or list all keys here.

    A key that the document's strategy cannot have is named with the strategy that has it.
    """
    ddp = document.data.get("ddp")
    chosen = _Chosen(ddp if isinstance(ddp, Mapping) else {})
    name, here = str(path[-1]), keys_at(path[:-1])
    section = ".".join(map(str, path[:-1]))
    near = nearest(name, [key for key in here if chosen.has(f"{section}.{key}")])
    is_part = near is not None and squashed(name).rstrip("s") in squashed(near)
    if path[:-1] == ("ddp",) and (strategy := strategy_meant(name)):
        return chosen.options_of(strategy)
    if not is_part and (advice := _by_others(path, _value(document, path))):
        return advice
    elsewhere = list(chosen.had(key for key, _ in keys_named(name)))
    if 0 < len(elsewhere) <= _MOST_NAMED and not is_part:
        return f"Write it as {' or '.join(map(chosen.in_words, elsewhere))}"
    if near:
        needed = chosen.needed(f"{section}.{near}")
        return f"Did you mean {near!r}?{f' It is an option of {needed}' if needed else ''}"
    if elsewhere:
        outer_first = sorted(elsewhere, key=lambda key: key.count("."))
        sections = (key.rpartition(".")[0] for key in outer_first)
        return f"Several sections have it, say which: {', '.join(sections)}"
    by_name = {key.rpartition(".")[2]: key for key in chosen.had(all_keys())}
    is_misplaced = len(name) > _SHORT_NAME and len(path) <= _OF_SECTIONS
    far = nearest(name, by_name) if is_misplaced else None
    listing = f"Known here: {', '.join(here)}"
    return f"Did you mean {chosen.in_words(by_name[far])}?" if far else listing


def _value(document: Document, path: KeyPath) -> object:
    value: object = document.data
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _by_others(path: KeyPath, value: object) -> str:
    """What to write for a key as other programs call it; empty for any other word."""
    section, name = str(path[-2]) if len(path) > 1 else "", str(path[-1]).lower()
    if (section, name) in _OF_SECTION:
        return f"Write it as {_OF_SECTION[section, name]}"
    if name in _OF_ONE_RANK:
        return "All ranks are simulated: drop it"
    if name in _OTHER_NAMES and not (name == "mixed_precision" and isinstance(value, Mapping)):
        return f"Write it as {_OTHER_NAMES[name]}"
    return ""


class _Chosen:
    """A document's strategy and hook, and the options that they have."""

    def __init__(self, ddp: Mapping[str, object]) -> None:
        self.strategy, self.hook = ddp.get("strategy", "ddp"), ddp.get("comm_hook", "none")

    def needed(self, key: str) -> str:
        """The strategy or hook, if another than the chosen one, that has an option."""
        section = f"{key}.".split(".")[1] if key.startswith("ddp.") else ""
        owners, hook = OF_STRATEGIES.get(section, ()), OF_HOOKS.get(section)
        if owners and self.strategy not in owners:
            return f"strategy: {owners[0]}"
        return f"comm_hook: {hook}" if hook and hook != self.hook else ""

    def has(self, key: str) -> bool:
        """Whether it has an option, or nothing is chosen against that."""
        needed = self.needed(key)
        return not needed or (self.strategy if "strategy" in needed else self.hook) in _NOTHING

    def had(self, keys: Iterable[str]) -> Iterable[str]:
        """Picks the names that are keys of it."""
        return filter(self.has, keys)

    def in_words(self, key: str) -> str:
        """A key, with the strategy or hook that it needs."""
        needed = self.needed(key)
        return f"{key}, with ddp.{needed}" if needed else key

    def options_of(self, meant: str) -> str:
        """Finds the options of the chosen strategy, or of one that a key is named after."""
        strategy = meant if self.strategy == "ddp" else self.strategy
        sections = [key for key, owners in OF_STRATEGIES.items() if strategy in owners]
        choose = "" if self.strategy == strategy else f"Write ddp.strategy: {strategy}. "
        if not sections:
            return f"{choose}{strategy} has no options"
        return f"{choose}The options of {strategy} are written under ddp.{sections[0]}"


_NOTHING = ("ddp", "none")
