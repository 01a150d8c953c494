"""The ddp section: DistributedDataParallel's options, with torch's names and meanings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ddpsim.scenario.base import Spec, fail, refuse
from ddpsim.scenario.options.ddp_values import (
    FAILS_ON_GLOO,
    BucketCaps,
    BucketGroups,
    CommHook,
    KnownTorch,
    StrategyName,
)
from ddpsim.scenario.options.deepspeed import DeepSpeed
from ddpsim.scenario.options.fsdp1 import Fsdp1
from ddpsim.scenario.options.fully_shard import CpuOffload, FullyShard
from ddpsim.scenario.options.hooks import DdpMixedPrecision, PowerSgd, TopK
from ddpsim.scenario.options.loops import (
    DistributedOptimizer,
    GradientHooks,
    JoinField,
    LocalSgd,
    ParameterServers,
    PostLocalSgd,
)
from ddpsim.scenario.options.zero_redundancy import ZeroRedundancy
from ddpsim.scenario.other_strategies import other_strategies


def _know_newer_names(schema: dict[str, Any]) -> None:
    options = schema["properties"]
    options["forward_sync_buffers"] = options["broadcast_buffers"]


WRAPPED = ("ddp", "zero1")  # strategies that wrap the module in DDP
_FULLY_SHARDED = ("fully_shard", "hsdp")
OMIT_SYNC = (*WRAPPED, "per_parameter", "fsdp1", *_FULLY_SHARDED)  # strategies with a no_sync
_OF_TORCH_1 = ("ddp", "naive", "naive_flat", "parameter_server")
OF_STRATEGIES = {  # sections of options, and whose they are
    **{key: (key,) for key in ("local_sgd", "per_parameter", "parameter_server", "zero1")},
    **{key: (key,) for key in ("distributed_optimizer", "deepspeed")},
    "fully_shard": _FULLY_SHARDED,
    "fsdp1": ("fsdp1",),
    "bucket_groups": ("naive_flat",),
}
# hooks that all-reduce gradients, in 16 bits or not
PLAIN_HOOKS = ("none", "allreduce", "fp16_compress", "bf16_compress")
OF_HOOKS = {"power_sgd": "powerSGD", "top_k": "top_k", "post_local_sgd": "post_localSGD"}
OF_DDP_ALONE = (
    *("bucket_cap_mb", "gradient_as_bucket_view", "find_unused_parameters", "static_graph"),
    *("bucket_order", "broadcast_buffers", "comm_hook", "post_local_sgd", "power_sgd", "top_k"),
    *("join", "mixed_precision", "optimizer_in_backward", "optimize_ddp", "reduced_again"),
)


def _of_another(kind: str, chosen: str, *owners: str) -> str:
    """What is wrong with an option of another strategy or hook than the one that is `chosen`."""
    owned = f"is an option of {kind} {' or '.join(owners)}, and {kind} is {chosen}"
    return f"{owned}; remove it, or write {kind}: {owners[0]}"


class OtherOptions(Spec):
    """Keyword arguments of a strategy that another package brings."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, bool | int | float | str]


class Ddp(Spec):
    """How gradients are shared: DistributedDataParallel's options, or another strategy."""

    model_config = ConfigDict(json_schema_extra=_know_newer_names)
    example: ClassVar[str] = "{bucket_cap_mb: 25}"

    backend: Literal["nccl", "gloo"] = Field("nccl", description="process-group backend")
    torch: KnownTorch = Field("2.15", description="the version whose rules are followed")
    strategy: StrategyName = Field(
        "ddp",
        description="ddp; naive: one all-reduce per gradient, after the backward; naive_flat: one "
        "of all gradients, or of buckets, after it; per_parameter: one a gradient, from its hook; "
        "parameter_server: gradients are reduced to servers, which send parameters back; "
        "local_sgd: parameters are averaged every few steps; fully_shard: parameters, gradients "
        "and optimizer are sharded (FSDP2, ZeRO-3); hsdp: fully_shard inside each node, an "
        "all-reduce between nodes; fsdp1: FullyShardedDataParallel, the older FSDP; zero1: ddp "
        "with ZeroRedundancyOptimizer; distributed_optimizer: ZeRO-1 of Megatron, with "
        "reduce-scatters and all-gathers; deepspeed: ZeRO-1 and ZeRO-2 of DeepSpeed; or one that "
        "another package brings",
    )
    local_sgd: LocalSgd | None = Field(None, description="of strategy: local_sgd, which needs it")
    per_parameter: GradientHooks | None = Field(
        None, description="of strategy: per_parameter; omitted: hooks that do not wait"
    )
    parameter_server: ParameterServers | None = Field(
        None, description="of strategy: parameter_server; omitted: one server"
    )
    fully_shard: FullyShard | None = Field(
        None,
        description="of strategy: fully_shard or hsdp; omitted: torch's defaults, blocks as units",
    )
    fsdp1: Fsdp1 | None = Field(
        None, description="of strategy: fsdp1; omitted: torch's defaults, blocks as units"
    )
    zero1: ZeroRedundancy | None = Field(
        None, description="of strategy: zero1; omitted: the defaults of ZeroRedundancyOptimizer"
    )
    distributed_optimizer: DistributedOptimizer | None = Field(
        None, description="of strategy: distributed_optimizer; omitted: Megatron's defaults"
    )
    deepspeed: DeepSpeed | None = Field(
        None, description="of strategy: deepspeed; omitted: DeepSpeed's defaults, stage 1"
    )
    options: OtherOptions | None = Field(
        None, description="of a strategy that another package brings: its keyword arguments"
    )
    bucket_cap_mb: BucketCaps = Field(
        None,
        description="MiB, as torch: default = 1 MiB first, then 25; a number = that for the first "
        "bucket too; a list = cap by cap, the last repeats (bucket_cap_mb_list); naive_flat: none",
    )
    bucket_groups: BucketGroups = Field(
        None,
        description="of strategy: naive_flat: a list for each flat tensor, of its parameters or "
        "their modules; they are reduced in this order",
    )
    reduced_again: Literal["hooks", "after_backward"] | None = Field(
        None,
        description="what DDP reduces is reduced by the loop, too. hooks: each gradient's own hook "
        "calls a blocking all_reduce before DDP's (register_hook); after_backward: a loop over all "
        "gradients calls it once DDP is done; default: not",
    )
    gradient_as_bucket_view: bool = Field(default=False, description="saves the copy back")
    find_unused_parameters: bool = Field(default=False, description="buckets are never rebuilt")
    static_graph: bool = Field(default=False, description="buckets are rebuilt one step later")
    bucket_order: Literal["ready", "reversed"] = Field(
        "ready", description="reversed: gradients came the other way in the first step"
    )
    broadcast_buffers: bool = Field(
        default=True, description="every forward; also accepted as forward_sync_buffers (2.13)"
    )
    comm_hook: CommHook = Field(
        "none", description="torch.distributed.algorithms.ddp_comm_hooks; top_k is not torch's"
    )
    post_local_sgd: PostLocalSgd | None = Field(
        None, description="of comm_hook: post_localSGD, which needs it"
    )
    power_sgd: PowerSgd | None = Field(None, description="of comm_hook: powerSGD")
    top_k: TopK | None = Field(None, description="of comm_hook: top_k")
    join: JoinField | None = Field(
        None,
        description="true, or its options: the loop runs within DDP's join(), for uneven inputs",
    )
    mixed_precision: DdpMixedPrecision | None = Field(
        None,
        description="DDP's own (torch's _MixedPrecision): forward and backward use copies of the "
        "parameters in half precision",
    )
    optimizer_in_backward: bool = Field(
        default=False,
        description="torch's _apply_optimizer_in_backward: DDP's hook updates the parameters of a "
        "bucket once it is reduced",
    )
    optimize_ddp: bool = Field(
        default=True,
        description="torch._dynamo.config's: under torch.compile the graph is split where buckets "
        "fill (DDPOptimizer); false: all gradients come at the end of the backward",
    )
    accumulation_steps: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1,
        description="micro-batches per optimizer step, no_sync (set_requires_gradient_sync(False) "
        "of fully_shard) on all but the last",
    )
    no_sync: bool = Field(
        default=True, description="false: every micro-batch reduces its gradients (no no_sync)"
    )

    @property
    def is_torch_1(self) -> bool:
        """Whether the rules are those of torch 1.4 to 1.8."""
        return self.torch in ("1.4", "1.7")

    @property
    def is_ddp(self) -> bool:
        """Whether the module is wrapped in DistributedDataParallel."""
        return self.strategy in WRAPPED

    @property
    def sharding(self) -> FullyShard:
        """How fully_shard shards."""
        return self.fully_shard or FullyShard()

    @property
    def flat(self) -> Fsdp1:
        """How FullyShardedDataParallel shards."""
        return self.fsdp1 or Fsdp1()

    @property
    def gathered_type(self) -> str | None:
        """Type in which gathered parameters are computed; None: as the optimizer has them."""
        return (self.flat if self.strategy == "fsdp1" else self.sharding).mixed_precision.param

    @property
    def host_copies(self) -> CpuOffload | None:
        """How parameters, gradients and optimizer are offloaded; None: they are not."""
        flat = self.strategy == "fsdp1"
        return self.flat.cpu_offload if flat else self.sharding.offload_policy

    @property
    def gathers_half(self) -> bool:
        """Whether a module's weights come in half precision, of which the optimizer's are not."""
        if self.shards_model:
            return self.gathered_type is not None
        return (self.optimized_type or self.mixed_precision) is not None

    @property
    def optimized_type(self) -> str | None:
        """What Megatron or DeepSpeed computes in, with float32 masters; None: as parameters are."""
        if self.strategy == "deepspeed":
            return self.zero.params
        return self.shards.params if self.shards_optimizer else None

    @property
    def zero(self) -> DeepSpeed:
        """The options of DeepSpeed."""
        return self.deepspeed or DeepSpeed()

    @property
    def shards(self) -> DistributedOptimizer:
        """The options of Megatron's distributed optimizer."""
        return self.distributed_optimizer or DistributedOptimizer()

    @property
    def shards_optimizer(self) -> bool:
        """Whether it is Megatron's DDP with its distributed optimizer."""
        return self.strategy == "distributed_optimizer"

    @property
    def has_own_masters(self) -> bool:
        """Whether Megatron or DeepSpeed shards the optimizer, with float32 masters of its own."""
        return self.strategy in ("distributed_optimizer", "deepspeed")

    @property
    def scatters_gradients(self) -> bool:
        """Whether gradients are reduced and scattered, as in all sharding but ZeRO-1 of torch."""
        return self.shards_model or self.has_own_masters

    @property
    def is_fully_sharded(self) -> bool:
        """Whether torch's fully_shard parts parameters, gradients and optimizer."""
        return self.strategy in _FULLY_SHARDED

    def reshards_among(self, ranks: int) -> bool:
        """Whether so many ranks, which share a copy, divide by those that keep one."""
        kept = self.sharding.kept_by if self.is_fully_sharded else None
        return kept is None or ranks % kept == 0

    @property
    def overlaps_optimizer(self) -> bool:
        """Whether ZeroRedundancyOptimizer updates parameters in DDP's hook."""
        return self.zero1 is not None and self.zero1.overlap_with_ddp

    @property
    def shards_model(self) -> bool:
        """Whether torch's FSDP, the first or the second, parts them."""
        return self.is_fully_sharded or self.strategy == "fsdp1"

    @property
    def shards_in_nodes(self) -> bool:
        """Whether the ranks of each node share a copy of the model."""
        return self.strategy == "hsdp" or (self.strategy == "fsdp1" and self.flat.is_hybrid)

    @property
    def splits_graphs(self) -> bool:
        """Whether torch splits a compiled graph where buckets fill."""
        return self.is_ddp and self.optimize_ddp

    @property
    def finds_unused(self) -> bool:
        """Whether every iteration looks for unused parameters: a static graph does so once."""
        return self.find_unused_parameters and not self.static_graph

    @property
    def powers(self) -> PowerSgd | None:
        """The options of PowerSGD; None where it is not the hook."""
        return (self.power_sgd or PowerSgd()) if self.comm_hook == "powerSGD" else None

    @property
    def sent_dtype(self) -> Literal["float16", "bfloat16"] | None:
        """What a compressing hook, or a wrapper, casts to; None: gradients stay as they are."""
        hook = self.powers.wrapper if self.powers else self.comm_hook
        if hook == "fp16_compress":
            return "float16"
        return "bfloat16" if hook == "bf16_compress" else None

    @model_validator(mode="before")
    @classmethod
    def _newer_names(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "forward_sync_buffers" not in data:
            return data
        if "broadcast_buffers" in data:
            raise fail(
                "is the new name of broadcast_buffers; give one of them", "forward_sync_buffers"
            )
        renamed = dict(data)
        renamed["broadcast_buffers"] = renamed.pop("forward_sync_buffers")
        return renamed

    @field_validator(*OF_DDP_ALONE)
    @classmethod
    def _of_ddp_alone(cls, value: Any, info: ValidationInfo) -> Any:
        strategy = info.data.get("strategy", "ddp")
        has = (*WRAPPED, "naive_flat") if info.field_name == "bucket_cap_mb" else WRAPPED
        if strategy not in has and value != cls.model_fields[str(info.field_name)].default:
            owned = [key for key, owners in OF_STRATEGIES.items() if strategy in owners]
            if info.field_name == "mixed_precision" and strategy in (*_FULLY_SHARDED, "fsdp1"):
                raise fail(f"is an option of DDP; write it as ddp.{owned[0]}.mixed_precision")
            raise fail(f"is an option of DDP, and strategy: {strategy} has none; leave it out")
        return value

    @field_validator("no_sync")
    @classmethod
    def _reduces_in_the_backward(cls, value: Any, info: ValidationInfo) -> Any:
        strategy = info.data.get("strategy", "ddp")
        if not value and strategy == "distributed_optimizer":
            raise fail("Megatron reduces with the last micro-batch alone; leave it out")
        if not value and strategy == "deepspeed":
            raise fail("stage 2 reduces every micro-batch, stage 1 the last alone; leave it out")
        if not value and strategy not in OMIT_SYNC:
            raise fail(
                f"strategy: {strategy} reduces nothing in a backward, so it has no no_sync; "
                "leave it out"
            )
        return value

    @model_validator(mode="after")
    def _strategy_is_whole(self) -> Ddp:
        if self.strategy == "local_sgd" and self.local_sgd is None:
            raise fail("local_sgd needs local_sgd: {every: STEPS}", "strategy")
        if self.options and self.strategy not in other_strategies():
            raise fail(f"is of a strategy of another package, not {self.strategy}", "options")
        for key, strategies in OF_STRATEGIES.items():
            if self.strategy not in strategies and getattr(self, key) is not None:
                raise fail(_of_another("strategy", self.strategy, *strategies), key)
        if self.bucket_groups and self.bucket_cap_mb is not None:
            raise fail("and bucket_cap_mb both say what goes together; drop one", "bucket_groups")
        if self.join and self.strategy == "zero1":
            raise fail("is not modelled beside ZeroRedundancyOptimizer (zero1); drop one", "join")
        return self

    @model_validator(mode="after")
    def _hook_is_whole(self) -> Ddp:
        for key, hook in OF_HOOKS.items():
            if getattr(self, key) and self.comm_hook != hook:
                raise fail(_of_another("comm_hook", self.comm_hook, hook), key)
        if self.backend == "gloo" and self.comm_hook in FAILS_ON_GLOO:
            raise fail(
                f"{self.comm_hook} {FAILS_ON_GLOO[self.comm_hook]}; write none, allreduce, "
                "fp16_compress, bf16_compress or top_k",
                "comm_hook",
            )
        return self

    @model_validator(mode="after")
    def _reduces_again_what_is_there(self) -> Ddp:
        reasons = {
            "is not modelled within join, whose joined ranks would have to call it; drop one": (
                self.join
            ),
            "is not modelled with DDP's mixed_precision; drop one": self.mixed_precision,
            "finds no gradients after optimizer_in_backward; drop one": self.optimizer_in_backward,
            "is not modelled with zero1.overlap_with_ddp; drop one": self.overlaps_optimizer,
        }
        refuse("reduced_again", reasons if self.reduced_again else {})
        return self

    @property
    def averages_after_hook(self) -> bool:
        """Whether gradients are reduced in each node, and parameters averaged now and then."""
        return self.comm_hook == "post_localSGD"

    @model_validator(mode="after")
    def _post_local_sgd_is_whole(self) -> Ddp:
        if self.averages_after_hook and self.post_local_sgd is None:
            raise fail("post_localSGD needs post_local_sgd: {period: STEPS}", "comm_hook")
        if self.averages_after_hook and self.strategy != "ddp":
            raise fail("post_localSGD is modelled for DDP alone; drop one", "comm_hook")
        if self.averages_after_hook and not self.no_sync:
            raise fail("is not modelled with post_localSGD; drop one", "no_sync")
        return self

    @model_validator(mode="after")
    def _optimizes_in_its_own_hook(self) -> Ddp:
        """DDP takes one hook (distributed.py: register_comm_hook); gloo's would wait in it."""
        reasons = {
            f"is a hook itself, and DDP takes one; drop comm_hook: {self.comm_hook}": self.comm_hook
            != "none",
            "has no place for ZeroRedundancyOptimizer; drop one": self.strategy != "ddp",
            "is not modelled within join; drop one": self.join,
            "is modelled with NCCL alone: torch 2.13's hook asks for a GPU's stream; write false": (
                self.backend == "gloo"
            ),
        }
        refuse("optimizer_in_backward", reasons if self.optimizer_in_backward else {})
        return self

    @model_validator(mode="after")
    def _mixes_what_torch_can(self) -> Ddp:
        """What torch 2.13 refuses, or gets wrong; each was seen with two processes on CPUs."""
        twice = "torch stops in 'Expected to mark a variable ready only once'"
        reasons = {
            f"is a hook itself, and DDP takes one; drop comm_hook: {self.comm_hook}": self.comm_hook
            != "none",
            "is a hook itself, and DDP takes one; drop optimizer_in_backward": (
                self.optimizer_in_backward
            ),
            "asks for a GPU's streams, and is modelled with NCCL alone; write backend: nccl": (
                self.backend == "gloo"
            ),
            "is modelled for DDP alone; drop it, or write strategy: ddp": self.strategy != "ddp",
            "hooks the copies, where find_unused_parameters looks for the parameters' own hooks: "
            "torch stops in an AttributeError; write find_unused_parameters: false": (
                self.find_unused_parameters and not self.static_graph
            ),
            "takes the gradients out of the bucket's view: torch reduces those of an earlier step "
            "again; write gradient_as_bucket_view: false": self.gradient_as_bucket_view,
            f"hooks every forward anew, also under no_sync: {twice}; write no_sync: false": (
                self.accumulation_steps > 1 and self.no_sync
            ),
            "hooks what a joined rank does not run: torch stops in 'Final callbacks can only be "
            "installed during backward pass'; drop join": self.join is not None,
        }
        refuse("mixed_precision", reasons if self.mixed_precision else {})
        return self

    @model_validator(mode="after")
    def _known_together(self) -> Ddp:
        if self.is_torch_1:
            newer = {
                "strategy": self.strategy not in _OF_TORCH_1,
                "gradient_as_bucket_view": self.gradient_as_bucket_view and self.torch == "1.4",
                "static_graph": self.static_graph,
                "comm_hook": self.comm_hook != "none",
                "join": self.join is not None,
                "optimizer_in_backward": self.optimizer_in_backward,
                "mixed_precision": self.mixed_precision is not None,
                "bucket_cap_mb": isinstance(self.bucket_cap_mb, tuple),
            }
            for key, used in newer.items():
                refuse(key, {f"torch {self.torch} is modelled without it; take a newer one": used})
        return self
