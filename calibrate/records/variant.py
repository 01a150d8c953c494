"""One way to train on several ranks, as rounds measure it. Knows nothing of torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from calibrate.files import Part
from ddpsim.errors import shown
from ddpsim.scenario.options.ddp_values import name_here
from ddpsim.scenario.options.fully_shard import BySize, Units
from ddpsim.scenario.options.zero_redundancy import HookName

CAPS = (None, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0)  # MiB; None: torch's default
CommHook = Literal["none", "fp16_compress", "bf16_compress", "powerSGD"]
_Names = Literal[
    "ddp", "naive", "naive_flat", "per_parameter", "zero1", "fully_shard", "hsdp", "fsdp1"
]
DDP = ("ddp", "zero1")  # strategies that wrap the module in DDP
SHARDED = ("fully_shard", "hsdp", "fsdp1")
_REDUCED_ONCE = ("naive", "naive_flat")  # whatever the micro-batches of a step
_OF_SHARDED = ("reshard_after_forward", "units")
_OF_ZERO1 = ("overlap_with_ddp", "hook", "shard_buckets")
_OF_DDP = ("bucket_cap_mb", "comm_hook", "gradient_as_bucket_view", "find_unused_parameters")


def _from_yaml(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return YAML(typ="safe", pure=True).load(value)
    except YAMLError:
        raise ValueError("units is no YAML; write [layers.0, layers.1]") from None


def _by_other_names(value: Any) -> Any:
    """Another program's name of a strategy is told its name here, where that is measured."""
    here = name_here(value) if isinstance(value, str) else None
    meant = next(
        (word for word in re.findall(r"\w+", here or "") if word in get_args(_Names)), None
    )
    if here and meant:
        kept = ",reshard_after_forward=false" if "reshard_after_forward: false" in here else ""
        raise ValueError(f"{shown(value)} has another name here: write strategy={meant}{kept}")
    return value


StrategyName = Annotated[_Names, BeforeValidator(_by_other_names)]


class Variant(Part):
    """One way to share gradients, with the names and meanings of a scenario's ddp section."""

    bucket_cap_mb: float | None = Field(None, gt=0, description="MiB; None: torch's default")
    accumulation_steps: int = Field(1, ge=1, description="micro-batches a step")
    comm_hook: CommHook = "none"
    strategy: StrategyName = "ddp"
    no_sync: bool = Field(default=True, description="on all micro-batches but the last")
    matrix_approximation_rank: int = Field(1, ge=1, description="of powerSGD")
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    reshard_after_forward: Annotated[
        bool | None, BeforeValidator(lambda value: None if value == "default" else value)
    ] = Field(None, description="of sharded parameters; false is SHARD_GRAD_OP of fsdp1")
    units: Annotated[Units, BeforeValidator(_from_yaml)] = Field(
        "blocks", description="modules whose parameters are sharded on their own"
    )
    overlap_with_ddp: bool = Field(default=False, description="of zero1, with NCCL")
    hook: HookName = Field("hook_with_zero_step", description="of overlap_with_ddp")
    shard_buckets: bool = Field(default=False, description="of overlap_with_ddp")

    @model_validator(mode="before")
    @classmethod
    def _without_what_records_held(cls, given: Any) -> Any:
        """Older records hold true for all strategies, whatever they shard."""
        if not isinstance(given, dict) or given.get("strategy") in SHARDED:
            return given
        reshards = given.get("reshard_after_forward") is True
        return {k: v for k, v in given.items() if not reshards or k != "reshard_after_forward"}

    @model_validator(mode="after")
    def _options_are_its_own(self) -> Variant:
        usual = {name: field.default for name, field in Variant.model_fields.items()}
        given = {name for name, value in self if value != usual[name]}
        if self.strategy not in DDP and (wrong := given.intersection(_OF_DDP)):
            raise ValueError(f"{self.strategy} has no {min(wrong)}, an option of DDP; drop one")
        if self.strategy not in SHARDED and (wrong := given.intersection(_OF_SHARDED)):
            problem = f"{self.strategy} has no {min(wrong)}"
            raise ValueError(f"{problem}; drop it, or write strategy=fully_shard")
        if self.strategy != "zero1" and (wrong := given.intersection(_OF_ZERO1)):
            problem = f"{self.strategy} has no {min(wrong)}"
            overlaps = "" if "overlap_with_ddp" in wrong else ",overlap_with_ddp=true"
            raise ValueError(f"{problem}; drop it, or write strategy=zero1{overlaps}")
        if self.comm_hook != "powerSGD" and self.matrix_approximation_rank > 1:
            problem = f"{self.comm_hook} has no matrix_approximation_rank"
            raise ValueError(f"{problem}; drop it, or write comm_hook=powerSGD")
        if not self.no_sync and (self.accumulation_steps == 1 or self.strategy in _REDUCED_ONCE):
            raise ValueError(f"{self.strategy} reduces once in this step, without no_sync too")
        return self

    @model_validator(mode="after")
    def _overlaps_as_torch_can(self) -> Variant:
        if not self.overlap_with_ddp:
            if self.shard_buckets or self.hook != "hook_with_zero_step":
                raise ValueError("hook and shard_buckets need overlap_with_ddp=true; write it too")
            return self
        reasons = {
            "goes around all-reduces; drop powerSGD": self.comm_hook == "powerSGD",
            "never updates under find_unused_parameters; drop one": self.find_unused_parameters,
            "updates in each backward that reduces; drop no_sync=false": not self.no_sync,
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise ValueError(f"overlap_with_ddp {reason}")
        return self

    @property
    def sharding_strategy(self) -> Literal["FULL_SHARD", "SHARD_GRAD_OP"]:
        """What fsdp1 calls its resharding."""
        return "SHARD_GRAD_OP" if self.reshard_after_forward is False else "FULL_SHARD"

    @property
    def is_bucket_choice(self) -> bool:
        """Whether it is plain DDP, but for its bucket cap."""
        return self == Variant(bucket_cap_mb=self.bucket_cap_mb)

    @property
    def plain(self) -> Variant:
        """DDP by default with as many micro-batches."""
        return Variant(accumulation_steps=self.accumulation_steps)

    @property
    def forward(self) -> object:
        """What the forward does: the same in variants of which this is equal."""
        kind = self.strategy if self.strategy in SHARDED else self.strategy in DDP
        keys = (self.find_unused_parameters, self.reshard_after_forward, self.units, self.no_sync)
        return self.accumulation_steps, kind, *keys

    @property
    def label(self) -> str:
        """Short, for tables: "25", "default x2 fp16_compress", "fully_shard keep"."""
        cap = "default" if self.bucket_cap_mb is None else f"{self.bucket_cap_mb:g}"
        words = [cap if self.strategy == "ddp" else self.strategy]
        if self.strategy == "zero1" and self.bucket_cap_mb is not None:
            words.append(cap)
        if self.accumulation_steps > 1:
            words.append(f"x{self.accumulation_steps}")
        parts = {
            "synced": not self.no_sync,
            self.comm_hook: self.comm_hook != "none",
            f"rank {self.matrix_approximation_rank}": self.comm_hook == "powerSGD",
            "view": self.gradient_as_bucket_view,
            "find_unused": self.find_unused_parameters,
            "keep": self.reshard_after_forward is False,
            "with root": bool(self.reshard_after_forward),
            self._units_label: self.units != "blocks",
            "interleaved" if self.hook.endswith("interleaved") else "overlapped": (
                self.overlap_with_ddp
            ),
            "in shards": self.shard_buckets,
        }
        return " ".join([*words, *(word for word, holds in parts.items() if holds)])

    @property
    def _units_label(self) -> str:
        if isinstance(self.units, BySize):
            return f"units from {self.units.min_parameters}"
        return f"{len(self.units)} units" if self.units else "root alone"
