"""What was asked: schema `ddpsim/1` as frozen models. Defaults live here and nowhere else.

YAML keys are torch's and the field's own words; attributes add the SI unit of what they hold.
"""

from __future__ import annotations

from json import dumps
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ddpsim.scenario.base import Spec, fail, given, refuse
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.ddp import PLAIN_HOOKS, Ddp
from ddpsim.scenario.options.reliability import Reliability
from ddpsim.scenario.run import Run
from ddpsim.scenario.workload import Workload
from ddpsim.wording import counted

# others shard the optimizer, or have masters of their own
_WITH_MASTERS = ("ddp", "naive", "naive_flat", "per_parameter")
# that cut matrices, or share them out
_CUTTING = ("zero1", "parameter_server", "distributed_optimizer", "deepspeed", "fsdp1", "hsdp")
_NO_ADAFACTOR = (
    "torch's Adafactor stops on sharded parameters (\"in-place operations that require placement "
    'changes are not supported"); write adamw or muon, or ddp.strategy: ddp'
)
_NO_FUSED_SGD = (
    'torch has no fused SGD of sharded parameters ("Operator aten._fused_sgd_.default does not '
    'have a sharding strategy registered"); write false, or optimizer.name: adamw'
)


class Scenario(Spec):
    """One question to ddpsim: a workload, its DDP options, a cluster, and how to run."""

    schema_: Literal["ddpsim/1"] = Field(
        alias="schema", description="ddpsim/1, the version of this format"
    )
    name: str = Field("unnamed", description="shown in the answer")
    workload: Workload = Field(description="the model, its batch, and what is known of its times")
    ddp: Annotated[Ddp, BeforeValidator(given, json_schema_input_type=Ddp | None)] = Field(
        default_factory=Ddp, description="omitted: torch's defaults"
    )
    cluster: Cluster = Field(description="nodes, GPUs and the links between them")
    run: Annotated[Run, BeforeValidator(given, json_schema_input_type=Run | None)] = Field(
        default_factory=Run, description="iterations, seed and noise"
    )
    reliability: Reliability | None = Field(
        None, description="failures and restarts that `plan` counts; omitted: none"
    )

    @property
    def samples_per_rank(self) -> int:
        """Samples that a rank works on in one step."""
        return self.workload.batch_per_rank * self.ddp.accumulation_steps

    @property
    def global_batch(self) -> int:
        """Samples of one step, on all ranks."""
        return self.samples_per_rank * self.cluster.world_size

    @property
    def may_leave_unused(self) -> bool:
        """Whether training goes on where some parameters get no gradient."""
        is_ddp = self.cluster.algorithm != "data_parallel" and self.ddp.is_ddp
        if self.ddp.mixed_precision:  # its hook casts a gradient of each
            return False
        return not is_ddp or self.ddp.find_unused_parameters or self.ddp.static_graph

    @model_validator(mode="after")
    def _fits_together(self) -> Scenario:
        kind, backend = self.cluster.device.kind, self.ddp.backend
        if (kind, backend) == ("cpu", "nccl"):
            raise fail(
                "is a CPU, but ddp.backend is nccl (its default), which needs GPUs; "
                "write ddp.backend: gloo",
                "cluster.device",
            )
        algorithm = self.cluster.algorithm
        if backend == "gloo" and algorithm in ("tree", "nvls", "data_parallel"):
            raise fail(f"{algorithm} is NCCL's; gloo has its ring: write auto", "cluster.algorithm")
        if algorithm == "data_parallel":
            self._check_data_parallel()
        self._check_servers()
        self._check_synced_norms()
        self._check_zeroed_gradients()
        self._check_optimizer_in_backward()
        self._check_overlapping_optimizer()
        self._check_mixed_precision()
        if self.workload.optimizer.masters and self.ddp.strategy not in _WITH_MASTERS:
            reason = f"is modelled with {', '.join(_WITH_MASTERS)}; drop it"
            raise fail(reason, "workload.optimizer.masters")
        self._check_optimizer_by_matrix()
        if self.workload.optimizer.is_fused_sgd and self.ddp.is_fully_sharded:
            raise fail(_NO_FUSED_SGD, "workload.optimizer.fused")
        if kind == "cpu" and self.workload.input_copy:
            raise fail("a CPU computes in its host's memory; drop it", "workload.input_copy")
        if self.workload.compile and self.ddp.is_torch_1:
            reason = f"torch {self.ddp.torch} had no torch.compile; choose a newer ddp.torch"
            raise fail(reason, "workload.compile")
        if (
            self.workload.float8
            and self.workload.float8.all_gather
            and not self.ddp.is_fully_sharded
        ):
            reason = f"{self.ddp.strategy} gathers no float8: write fully_shard or hsdp, or drop it"
            raise fail(reason, "workload.float8.all_gather")
        self._check_gloo_on_gpus()
        self._check_checkpoints()
        self._check_replica()
        if self.ddp.backend == "gloo" and self.workload.debug and self.workload.debug.nccl_line_s:
            raise fail("gloo has no log of NCCL; drop it", "workload.debug.nccl_line")
        return self

    @model_validator(mode="after")
    def _computes_in_what_is_gathered(self) -> Scenario:
        workload = self.workload
        sent = self.ddp.gathered_type
        section = "fsdp1" if self.ddp.strategy == "fsdp1" else "fully_shard"
        key = f"{section}.mixed_precision.param"
        if self.ddp.has_own_masters:
            sent, key = self.ddp.optimized_type, f"{self.ddp.strategy}.params"
        wanted = {"bfloat16": ("amp-bf16", "bf16"), "float16": ("amp-fp16",)}
        if self.ddp.mixed_precision:  # of parameters in fp32
            sent, key = self.ddp.mixed_precision.param, "mixed_precision.param"
            wanted["bfloat16"] = ("amp-bf16",)
        if sent and workload.model and workload.precision not in wanted[sent]:
            raise fail(
                f"{sent} is computed in, but the times would be those of workload.precision "
                f"{workload.precision}; {self._precision_instead(*wanted[sent])}",
                f"ddp.{key}",
            )
        return self

    @model_validator(mode="after")
    def _casts_what_is_in_bfloat16(self) -> Scenario:
        """Raise for what is cast from or to the 16 bits of a model that is in float32."""
        workload = self.workload
        if workload.precision == "bf16":
            return self
        instead = self._precision_instead("bf16")
        if workload.optimizer.masters:
            precision = workload.precision
            reason = f"copies parameters in 16 bits, but those of {precision} are in float32"
            raise fail(f"{reason}; {instead}", "workload.optimizer.masters")
        if workload.lora and workload.lora.base:
            reason = "is cast to bfloat16 for each product"
            raise fail(f"{reason}; {instead}", "workload.lora.base")
        return self

    def _precision_instead(self, *wanted: str) -> str:
        """What to write: the first of some precisions that the device has, or nothing."""
        device, rate = self.cluster.device, wanted[0].removeprefix("amp-")
        precisions = {f"{kind}{rate}" for rate in device.peak_flops_per_s for kind in ("", "amp-")}
        precision = next((each for each in wanted if each in precisions), None)
        if precision is None:
            return f"drop it, as {device.name} has no {rate}"
        return f"write workload.precision: {precision}"

    def _check_optimizer_by_matrix(self) -> None:
        """Raise where Adafactor or Muon meet parts of matrices, or what is not modelled."""
        ddp, optimizer = self.ddp, self.workload.optimizer
        if not optimizer.by_parameter:
            return
        key = "workload.optimizer.name"
        if optimizer.name == "adafactor" and ddp.is_fully_sharded:
            raise fail(_NO_ADAFACTOR, key)
        if ddp.strategy in _CUTTING:
            also = " or fully_shard" if optimizer.name == "muon" else ""
            reason = f"{optimizer.name} is not modelled with {ddp.strategy}; write adamw, or choose"
            raise fail(f"{reason} ddp.strategy: ddp{also}", key)
        reason = f"is not modelled for {optimizer.name}; drop it"
        if ddp.optimizer_in_backward:
            raise fail(reason, "ddp.optimizer_in_backward")
        if ddp.host_copies:
            raise fail(reason, "ddp.fully_shard.offload_policy")

    def _check_data_parallel(self) -> None:
        """Raise where DataParallel is asked for what it does not have, or for what is not known."""
        ddp = self.ddp
        reducers = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
        reasons = {
            "strategy": (
                "cluster.algorithm: data_parallel is a strategy of its own; drop one",
                ddp.strategy != "ddp",
            ),
            "comm_hook": (
                "DataParallel has no communication hooks; drop it",
                ddp.comm_hook != "none",
            ),
            "join": ("DataParallel has no join; drop it", ddp.join is not None),
            "reduced_again": ("DataParallel has no ranks to do so; drop it", ddp.reduced_again),
            "accumulation_steps": (
                "micro-batches are not modelled under DataParallel, which has no no_sync; write 1",
                ddp.accumulation_steps > 1,
            ),
        } | {key: ("DataParallel has no reducer; drop it", getattr(ddp, key)) for key in reducers}
        for key, (reason, holds) in reasons.items():
            refuse(f"ddp.{key}", {reason: holds})
        if self.workload.barrier_every:
            raise fail("DataParallel is one process, and has no barrier", "workload.barrier_every")

    def _check_mixed_precision(self) -> None:
        """Raise where DDP's own mixed precision meets what is not modelled beside it."""
        reasons = {
            "DataParallel has none; drop it": self.cluster.algorithm == "data_parallel",
            "is not modelled beside workload.sync_batch_norm; drop one": (
                self.workload.sync_batch_norm
            ),
            "is not modelled beside workload.compile; drop one": self.workload.compile,
        }
        refuse("ddp.mixed_precision", reasons if self.ddp.mixed_precision else {})

    def _check_optimizer_in_backward(self) -> None:
        """Raise where the loop looks at gradients that DDP's hook has used up."""
        if not self.ddp.optimizer_in_backward:
            return
        workload = self.workload
        reasons = {
            "DataParallel has no hooks; drop it": self.cluster.algorithm == "data_parallel",
            "leaves GradScaler no gradients; write workload.grad_scaler: false": (
                workload.scales_loss
            ),
            "leaves no gradients to clip; drop workload.clip_grad_norm": workload.clip_grad_norm,
            "drops the gradients itself; drop workload.set_to_none": not workload.set_to_none,
        }
        refuse("ddp.optimizer_in_backward", reasons)

    def _check_overlapping_optimizer(self) -> None:
        """Raise where torch stops, or trains what nobody wants (ddp_zero_hook.py), or it is new."""
        ddp, workload = self.ddp, self.workload
        if not ddp.overlaps_optimizer:
            return
        reasons = {
            "needs NCCL, torch stops in 'Gloo backend using Overlapping DDP with ZeRO may meet "
            "hangs'; write ddp.backend: nccl": ddp.backend == "gloo",
            "waits for the buckets' rebuild, which never comes under find_unused_parameters: torch "
            "updates nothing; write false, or ddp.static_graph: true": ddp.finds_unused,
            f"is not modelled around comm_hook: {ddp.comm_hook}; write none, allreduce, "
            "fp16_compress or bf16_compress": ddp.comm_hook not in PLAIN_HOOKS,
            "updates parameters in each backward that reduces; write ddp.no_sync: true": (
                ddp.accumulation_steps > 1 and not ddp.no_sync
            ),
            "takes functional optimizers, none of which is fused: torch stops in 'torch.jit.script "
            "not supported with fused optimizers'; write workload.optimizer.fused: false": (
                workload.optimizer.fused
            ),
            "updates parameters before GradScaler unscales gradients; write workload.grad_scaler: "
            "false": workload.scales_loss,
            "updates parameters before gradients are clipped; drop workload.clip_grad_norm": (
                workload.clip_grad_norm is not None
            ),
        }
        refuse("ddp.zero1.overlap_with_ddp", reasons)

    @property
    def copies_through_host(self) -> bool:
        """Whether gloo sends what is on GPUs."""
        return (self.cluster.device.kind, self.ddp.backend) == ("gpu", "gloo")

    def _check_gloo_on_gpus(self) -> None:
        """Raise where gloo's way from GPU to GPU is not known, or not modelled."""
        if not self.copies_through_host or self.cluster.world_size == 1:
            return
        cluster, key = self.cluster, "ddp.backend"
        measured = cluster.profile or cluster.all_reduce
        if cluster.gpus_per_node > 1 and cluster.intra_node is None and not measured:
            raise fail(
                "gloo sends through sockets, not over a GPU's links; state cluster.intra_node, or "
                "write nccl",
                key,
            )
        if self.ddp.shards_model or self.workload.sync_batch_norm:
            what = self.ddp.strategy if self.ddp.shards_model else "SyncBatchNorm"
            raise fail(f"{what} on GPUs is modelled with NCCL alone; write nccl", key)

    def _check_checkpoints(self) -> None:
        """Raise where nothing says how often to save, or there is no neighbour to save to."""
        write, cluster = self.workload.checkpoint_write, self.cluster
        if write is None:
            return
        key, failures = "workload.checkpoint_write", self.reliability
        fails = failures and (
            failures.crash_per_s(cluster.world_size, cluster.nodes) or failures.spot
        )
        if write.every == "auto" and not fails:
            raise fail("auto needs failures; state reliability.mtbf, or a number", f"{key}.every")
        if write.mode == "neighbour" and cluster.nodes == 1:
            raise fail("one node has no neighbour; write sync or async", f"{key}.mode")

    def _check_replica(self) -> None:
        """Raise where a step is not that of one GPU's part, or what is counted by the node."""
        replica, workload = self.cluster.replica, self.workload
        if replica is None or replica.gpus == 1:
            return
        if workload.model and not workload.model.endswith(".json"):
            raise fail(
                "is a step of the whole model, and a GPU of a replica has a part of it; give the "
                "part's: parameters and step_time, a profile, a trace or a captured model",
                "workload.model",
            )
        reads = workload.data and workload.data.sample_bytes
        for key, holds in (
            ("reliability", self.reliability),
            ("workload.checkpoint_write", workload.checkpoint_write),
            ("workload.data.sample_bytes", reads),
        ):
            if holds:
                raise fail("is not modelled with cluster.replica; drop one", key)

    def _check_servers(self) -> None:
        """Raise where there are more parameter servers than ranks."""
        spec, ranks = self.ddp.parameter_server, self.cluster.world_size
        if spec and spec.servers > ranks:
            raise fail(
                f"{spec.servers} is more than the {ranks} ranks; write at most that",
                "ddp.parameter_server.servers",
            )

    @model_validator(mode="after")
    def _reshards_to_a_divisor(self) -> Scenario:
        """Checks what torch checks (_fsdp_init.py, _get_post_forward_mesh_info)."""
        share = self.sharding_ranks
        if self.ddp.reshards_among(share):
            return self
        divisors = [str(n) for n in range(2, share) if share % n == 0]
        raise fail(
            f"{self.ddp.sharding.reshard_after_forward} does not divide the "
            f"{counted(share, 'rank')} that share a copy; write "
            f"{', '.join([*divisors, 'default', 'true'])} or false",
            "ddp.fully_shard.reshard_after_forward",
        )

    @model_validator(mode="after")
    def _deepspeed_clips_itself(self) -> Scenario:
        """Raise where the loop would do what DeepSpeed does in its step."""
        if self.ddp.strategy != "deepspeed":
            return self
        if self.workload.clip_grad_norm:
            reason = "DeepSpeed's step takes the norm anyway, and gradient_clipping costs no more"
            raise fail(f"{reason}; drop it", "workload.clip_grad_norm")
        if self.workload.scales_loss:
            reason = "DeepSpeed scales the loss itself, which is not modelled"
            instead = self._precision_instead("bf16", "fp32")
            raise fail(f"{reason}; {instead}", "workload.grad_scaler")
        return self

    @model_validator(mode="after")
    def _offloads_what_is_known(self) -> Scenario:
        """Raise where there is nothing to offload, or the host would do what is not priced."""
        if self.ddp.host_copies is None:
            return self
        workload, device = self.workload, self.cluster.device.name
        reasons = {
            f"the parameters of a CPU ({device}) are on the host already; drop one": (
                self.cluster.device.kind == "cpu"
            ),
            "workload.clip_grad_norm would run on the host, which is not modelled; drop one": (
                workload.clip_grad_norm
            ),
            "workload.grad_scaler would run on the host, which is not modelled; drop one": (
                workload.scales_loss
            ),
            "ddp.no_sync: false adds gradients on the host, which is not modelled; drop one": (
                self.ddp.accumulation_steps > 1 and not self.ddp.no_sync
            ),
        }
        is_flat = self.ddp.strategy == "fsdp1"
        refuse(f"ddp.{'fsdp1.cpu_offload' if is_flat else 'fully_shard.offload_policy'}", reasons)
        return self

    @model_validator(mode="after")
    def _all_reduces_what_is_scattered(self) -> Scenario:
        """Raise where no micro-batch scatters gradients without an all-reduce that could wait."""
        ddp = self.ddp
        reasons = {
            f"is an option of strategy hsdp, and {ddp.strategy} has no all-reduce; remove it, or "
            "write ddp.strategy: hsdp": ddp.strategy != "hsdp",
            "needs micro-batches; write ddp.accumulation_steps, or drop it": (
                ddp.accumulation_steps == 1
            ),
            "needs gradients that each micro-batch scatters; write ddp.no_sync: false": ddp.no_sync,
        }
        if ddp.sharding.all_reduce_last_only:
            refuse("ddp.fully_shard.all_reduce_last_only", reasons)
        return self

    @model_validator(mode="after")
    def _flattens_what_torch_can(self) -> Scenario:
        """torch shards over one rank as NO_SHARD does, among that rank alone: nothing is summed.

        It compiles the module's own parameters alone (torch/_dynamo/variables/builder.py).
        """
        ddp, cluster = self.ddp, self.cluster
        if self.workload.compile and ddp.strategy == "fsdp1" and not ddp.flat.use_orig_params:
            reason = "torch.compile leaves a module of flat parameters as it is; write true"
            raise fail(reason, "ddp.fsdp1.use_orig_params")
        alone = cluster.nodes > 1 and cluster.gpus_per_node == 1
        if alone and ddp.shards_in_nodes and ddp.strategy == "fsdp1":
            reason = f"{ddp.flat.sharding_strategy} shards inside a node, and a node has one GPU: "
            raise fail(
                f"{reason}torch then sums no gradients between nodes; write FULL_SHARD",
                "ddp.fsdp1.sharding_strategy",
            )
        return self

    @property
    def sharding_ranks(self) -> int:
        """How many ranks share a copy of the model under fully_shard, hsdp or fsdp1."""
        cluster, ddp = self.cluster, self.ddp
        if ddp.strategy == "fsdp1" and ddp.flat.sharding_strategy == "NO_SHARD":
            return 1
        return cluster.gpus_per_node if ddp.shards_in_nodes else cluster.world_size

    @property
    def keeping_ranks(self) -> int:
        """How many ranks keep a copy of the parameters between forward and backward."""
        return self.ddp.sharding.kept_by or self.sharding_ranks

    @property
    def keeps_a_part(self) -> bool:
        """Whether those are fewer than share the model, and more than one: torch keeps all then."""
        return self.ddp.is_fully_sharded and 1 < self.keeping_ranks < self.sharding_ranks

    @property
    def sends_in_groups(self) -> bool:
        """Whether some collectives are among a part of the ranks."""
        if self.ddp.averages_after_hook:
            return self.cluster.nodes > 1
        several = self.cluster.world_size > 1
        return several and (self.ddp.shards_in_nodes or self.keeps_a_part)

    def _check_zeroed_gradients(self) -> None:
        """Raise where gradients that stay are not modelled."""
        alone = self.cluster.algorithm == "data_parallel"
        if not self.workload.set_to_none and (alone or self.ddp.scatters_gradients):
            name = "DataParallel" if alone else self.ddp.strategy
            raise fail(
                f"gradients that stay from step to step are not modelled under {name}; drop it",
                "workload.set_to_none",
            )

    def _check_synced_norms(self) -> None:
        """Raise where torch or ddpsim has no SyncBatchNorm."""
        if not self.workload.sync_batch_norm:
            return
        is_alone = self.cluster.algorithm == "data_parallel"
        reasons = {
            "torch refuses a CPU's tensors (nn/modules/batchnorm.py); drop it": (
                self.cluster.device.kind == "cpu"
            ),
            "needs a process for each GPU, and DataParallel has one for all; drop it": is_alone,
            f"is not modelled under {self.ddp.strategy}; drop it": self.ddp.scatters_gradients,
            "sends in the forward, which ddp.join does not shadow; drop it": self.ddp.join,
            f"is not known of torch {self.ddp.torch} (a newer ddp.torch has it); drop it": (
                self.ddp.is_torch_1
            ),
        }
        refuse("workload.sync_batch_norm", reasons)


def json_schema() -> str:
    """The format as JSON Schema, as text; `$id` names its version."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:ddpsim:scenario:1",
    }
    return dumps(head | Scenario.model_json_schema(by_alias=True), indent=2)
