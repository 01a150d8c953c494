"""The workload section: the model, its batch, and what is known of its times."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from ddpsim.errors import shown
from ddpsim.scenario import catalog
from ddpsim.scenario.base import Spec, fail, named, refuse, switched
from ddpsim.scenario.options.checkpointing import CheckpointingField
from ddpsim.scenario.options.linear_layers import Float8, Lora
from ddpsim.scenario.options.training_loop import (
    CheckpointWrite,
    DebugSettings,
    Evaluation,
    InputCopy,
)
from ddpsim.scenario.quantity import (
    Duration,
    SampleRate,
    Size,
    SourceField,
    SourceFileField,
)
from ddpsim.scenario.suggest import squashed

Precision = Literal["fp32", "tf32", "amp-fp16", "amp-bf16", "bf16"]
NO_LONGER_WITH_DDP = (
    "is no longer than the step without DDP, which DDP only adds to; measure both in turns, or "
    "leave it out"
)


def _no_recipe(value: Any) -> Any:
    """Refuse float8 as a precision: it is a way to compute products here; raises ValueError."""
    if isinstance(value, str) and squashed(value) in ("fp8", "float8"):
        meaning = "is how linear layers compute beside bf16"
        raise ValueError(f"{shown(value)} {meaning}; write float8: tensorwise with precision: bf16")
    return value


class StepTime(Spec):
    """A step of one micro-batch on one device without DDP, whole or in its three parts."""

    total_s: Duration | None = Field(
        None, alias="total", description="forward + backward + optimizer"
    )
    forward_s: Duration | None = Field(None, alias="forward", description="forward and loss")
    backward_s: Duration | None = Field(None, alias="backward", description="backward")
    optimizer_s: Duration | None = Field(None, alias="optimizer", description="optimizer step")
    with_ddp_s: Duration | None = Field(
        None,
        alias="with_ddp",
        description="the same step, whole, under DDP on that one device alone (torchrun "
        "--nproc-per-node 1), with torch's default bucket caps: what DDP itself costs",
    )

    @model_validator(mode="after")
    def _one_way(self) -> StepTime:
        parts = (self.forward_s, self.backward_s)
        if self.total_s is None and None in parts:
            raise fail("needs both forward and backward (optimizer is optional), or one total time")
        if self.total_s is not None and parts != (None, None):
            raise fail("has both a total and its parts; give one of them")
        for key, value_s in zip(
            ("total", "forward", "backward"), (self.total_s, *parts), strict=True
        ):
            if value_s is not None and value_s < 1e-6:
                raise fail("must be at least 1 us", key)
        if self.with_ddp_s is not None and self.with_ddp_s <= self.least_s:
            raise fail(NO_LONGER_WITH_DDP, "with_ddp")
        return self

    @property
    def least_s(self) -> float:
        """Seconds that are stated of the step without DDP, all parts together."""
        stated = (self.total_s, self.forward_s, self.backward_s, self.optimizer_s)
        return self.total_s or sum(seconds or 0.0 for seconds in stated)


class Optimizer(Spec):
    """What runs after the gradients are reduced; sets the optimizer's time and memory."""

    name: Literal["sgd", "adam", "adamw", "adafactor", "muon"] = Field(
        "sgd", description="torch.optim class; with muon AdamW takes what is no hidden matrix"
    )
    fused: bool = Field(
        default=False, description="fused=True; torch's default is foreach on a GPU"
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="SGD's momentum")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight decay, any optimizer"
    )

    state_bits: Literal[32, 8] = Field(
        32, description="8: moments in one byte, as AdamW8bit of bitsandbytes and torchao have them"
    )
    ns_steps: Annotated[int, Field(ge=0, le=99)] | None = Field(
        None, description="muon's Newton-Schulz iterations; default: 5"
    )
    adamw: tuple[str, ...] | None = Field(
        None,
        strict=False,
        description="modules whose matrices AdamW takes, not muon; default: embeddings and the "
        "output layer of a zoo model",
    )
    masters: bool = Field(
        default=False,
        description="float32 copies of parameters in 16 bits (precision: bf16), as the training "
        "loop or apex's O2 keeps them; it copies gradients to them and results back",
    )

    @model_validator(mode="after")
    def _momentum_is_sgds(self) -> Optimizer:
        if self.state_bits == 8 and (self.name not in ("adam", "adamw") or self.fused):
            reason = "8 is modelled of adam and adamw, with a kernel of its own; drop fused"
            raise fail(reason, "state_bits")
        if self.state_bits == 8 and self.masters:
            raise fail("is not modelled beside masters; drop one of the two", "state_bits")
        if self.momentum and self.name != "sgd":
            has = "has one that changes no time" if self.name == "muon" else "has none"
            raise fail(f"belongs to sgd; {self.name} {has}, remove it", "momentum")
        self._check_matrices()
        return self

    @property
    def by_parameter(self) -> bool:
        """Whether it goes from parameter to parameter, with kernels by their shapes."""
        return self.name in ("adafactor", "muon")

    @property
    def may_fuse(self) -> bool:
        """Whether torch has a fused kernel that is not taken, for it or the AdamW beside it."""
        return not self.fused and self.name != "adafactor"

    @property
    def is_fused_sgd(self) -> bool:
        """Whether it is the one fused kernel that torch has not for DTensors."""
        return self.fused and self.name == "sgd"

    def _check_matrices(self) -> None:
        """Raise for options that torch's Adafactor and Muon have not, and for Muon's of others."""
        if self.fused and self.name == "adafactor":
            raise fail("torch's Adafactor has no fused kernel; drop it", "fused")
        for key in ("ns_steps", "adamw"):
            if getattr(self, key) is not None and self.name != "muon":
                raise fail(f"belongs to muon; {self.name} has none, drop it", key)


class ClipGradNorm(Spec):
    """torch.nn.utils.clip_grad_norm_ before the optimizer."""

    error_if_nonfinite: bool = Field(
        default=False, description="the host waits for the norm, to raise an error"
    )


def _clip_grad_norm(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(
            f"{shown(value)}: the largest norm changes no time; write true, or "
            "{error_if_nonfinite: true}"
        )
    return switched(value)


class DataLoader(Spec):
    """The input pipeline of one rank."""

    rate_samples_per_s: SampleRate = Field(
        alias="rate", description="samples per second that one rank's loader delivers, all workers"
    )
    workers: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1, description="DataLoader num_workers per rank"
    )
    prefetch: Annotated[int, Field(ge=1, le=10_000)] = Field(
        2, description="DataLoader prefetch_factor"
    )
    sample_bytes: Size | None = Field(
        None,
        alias="sample_size",
        description="of a sample read over the nodes' network; omitted: from a disk of the node",
    )


class Dataset(Spec):
    """The data set of one epoch: it changes no step, but says how many there are."""

    samples: Annotated[int, Field(ge=1, le=10**15)] = Field(description="samples of one epoch")
    drop_last: bool = Field(
        default=False,
        description="of DistributedSampler and DataLoader: what does not divide is left out, "
        "not padded",
    )


class LearningRate(Spec):
    """What the learning rate was found with: it changes no step, but is scaled as advice."""

    base_batch: Annotated[int, Field(ge=1, le=10**9)] = Field(
        description="global batch with which it was found"
    )
    value: Annotated[float, Field(gt=0, le=1e6)] | None = Field(None, description="the rate itself")
    warmup_epochs: Annotated[float, Field(ge=0, le=1000)] = Field(
        5.0, description="epochs in which it rises; 5 in Goyal et al. 2017"
    )


def _step_time(value: Any) -> Any:
    return {"total": value} if isinstance(value, (str, int, float)) else value


def _recipe(value: Any) -> Any:
    """A word is a recipe."""
    return {"recipe": value} if isinstance(value, str) else value


def _lora(value: Any) -> Any:
    """A number is a rank."""
    is_rank = isinstance(value, int) and not isinstance(value, bool)
    return {"rank": value} if is_rank else value


MEASURED: tuple[Literal["step_time", "profile", "trace"], ...] = ("step_time", "profile", "trace")


class Workload(Spec):
    """The model, its batch, and what is known of its times."""

    example: ClassVar[str] = "{model: resnet50, batch_per_rank: 64}"
    model: Annotated[str, BeforeValidator(catalog.model_name)] | None = Field(
        None, description="a model of the zoo, or a file of `calibrate capture` or `profile`"
    )
    profile: SourceFileField | None = Field(
        None, description="measured gradient-ready times: of `calibrate profile`, or CSV"
    )
    trace: SourceField | None = Field(
        None,
        description="a trace of PyTorch's profiler (prof.export_chrome_trace), or a folder with "
        "one a rank; add model or parameters if it was recorded without shapes",
    )
    parameters: SourceFileField | None = Field(
        None, description="CSV of a model of one's own: name, shape, dtype in registration order"
    )
    ready_origin: Literal["first_gradient", "backward_start"] | None = Field(
        None, description="what the ready times of a CSV profile count from"
    )
    batch_per_rank: Annotated[int, Field(ge=1, le=10**9)] = Field(
        description="samples in one micro-batch of one rank"
    )
    seq_len: Annotated[int, Field(ge=1, le=10**7)] | None = Field(
        None, description="tokens per sample; default: the model's usual one"
    )
    image_size: Annotated[int, Field(ge=1, le=10**5)] | None = Field(
        None, description="pixels on a side; default: the model's usual one"
    )
    compile: bool | Literal["blocks"] = Field(
        default=False,
        description="the model runs under torch.compile, or each of its blocks, and a step_time is "
        "of that; the gradients of a compiled graph come at once",
    )
    precision: Annotated[Precision, BeforeValidator(_no_recipe)] = Field(
        "fp32",
        description="torch's arithmetic; amp keeps fp32 gradients, and fp32 leaves convolutions to "
        "TF32 where a GPU has it, as torch does unless told not to",
    )
    float8: (
        Annotated[Float8, BeforeValidator(_recipe, json_schema_input_type=Float8 | str)] | None
    ) = Field(
        None,
        description="a zoo model's linear layers in float8, as torchao trains them: a recipe's "
        "name, or options; a step_time is of that",
    )
    frozen: tuple[str, ...] = Field(
        (),
        strict=False,
        description="modules of a zoo model that are not trained (requires_grad_(False)): they get "
        "no gradient and no optimizer state; a step_time is of that",
    )
    lora: Annotated[Lora | None, BeforeValidator(_lora, json_schema_input_type=Lora | int)] = Field(
        None,
        description="LoRA of a zoo model's linear layers: its rank, or its options; the adapters "
        "alone are trained; a step_time is of that",
    )
    memory_format: Literal["contiguous", "channels_last"] | None = Field(
        None,
        description="of a convolutional zoo model, as torch.memory_format; default: contiguous, as "
        "torch; half precision is faster in channels_last",
    )
    attention: Literal["sdpa", "eager"] | None = Field(
        None,
        description="of a zoo model with tokens: fused (default), or written out, as "
        "transformers' attn_implementation calls them",
    )
    step_time: (
        Annotated[StepTime, BeforeValidator(_step_time, json_schema_input_type=StepTime | str)]
        | None
    ) = Field(
        None,
        description="forward + backward + optimizer of one micro-batch on one device, "
        "no DDP, no data wait; anchors the compute side",
    )
    optimizer: Annotated[
        Optimizer, BeforeValidator(named, json_schema_input_type=Optimizer | str | None)
    ] = Field(default_factory=Optimizer, description="its name, or its options; default: plain SGD")
    checkpointing: CheckpointingField = Field(
        None,
        description="torch.utils.checkpoint (use_reentrant=False) of a zoo model's blocks: none, "
        "full, selective (attention and every second product stay), a list of blocks, or "
        "options; a step_time is of that",
    )
    sync_batch_norm: bool = Field(
        default=False,
        description="torch.nn.SyncBatchNorm in place of every batch norm: statistics of all ranks",
    )
    set_to_none: bool = Field(
        default=True,
        description="of optimizer.zero_grad; false: gradients are filled with zeros, to which "
        "every backward adds; a step_time is of that",
    )
    grad_scaler: bool | None = Field(
        None,
        description="torch.amp.GradScaler: gradients are unscaled, and the host waits for the "
        "device once a step unless the optimizer is fused; default: with amp-fp16",
    )
    clip_grad_norm: (
        Annotated[
            ClipGradNorm | None,
            BeforeValidator(_clip_grad_norm, json_schema_input_type=ClipGradNorm | bool | None),
        ]
        | None
    ) = Field(
        None, description="true, or its options: clip_grad_norm_ of all gradients; default: none"
    )
    read_loss_every: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None,
        description="the loop calls loss.item() at the end of every so many steps, where the host "
        "waits for the device; default: never",
    )
    barrier_every: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None,
        description="the loop calls dist.barrier() at the end of every so many steps, where all "
        "ranks meet and each host waits for its device; default: never",
    )
    debug: DebugSettings | None = Field(
        None, description="debug settings of torch and NCCL that were left on; default: none"
    )
    input_copy: InputCopy | None = Field(
        None, description="copies of the inputs to the device; omitted: they take no time"
    )
    data: DataLoader | None = Field(None, description="omitted: the step never waits for data")
    dataset: Dataset | None = Field(
        None, description="one epoch's samples: the answer then says its steps and its time"
    )
    evaluation: Evaluation | None = Field(
        None, description="an evaluation now and then: the answer says its time"
    )
    checkpoint_write: CheckpointWrite | None = Field(
        None, description="a checkpoint now and then: the answer says its time"
    )
    learning_rate: LearningRate | None = Field(
        None, description="the answer then says what it becomes for the global batch"
    )

    @property
    def measured_by(self) -> Literal["step_time", "profile", "trace"] | None:
        """The key that says how long a step takes; None: it is estimated."""
        return next((key for key in MEASURED if getattr(self, key)), None)

    @property
    def sample_size(self) -> tuple[Literal["seq_len", "image_size"], int] | None:
        """The key that sets what a sample is, and its value; None: it has none, or is unknown."""
        if self.model is None or (size := catalog.model_table(self.model)["size"]) is None:
            return None
        return size["key"], getattr(self, size["key"]) or int(size["default"])

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a sample; None where it has none, or nobody knows."""
        key, size = self.sample_size or ("", 0)
        return size if key == "seq_len" else None

    @property
    def scales_loss(self) -> bool:
        """Whether a GradScaler is at work."""
        return self.precision == "amp-fp16" if self.grad_scaler is None else self.grad_scaler

    @model_validator(mode="before")
    @classmethod
    def _measured_alone(cls, given: Any, info: ValidationInfo) -> Any:
        """A model's file in which nothing is captured is a profile."""
        if not isinstance(given, dict) or not catalog.is_measured_alone(given.get("model"), info):
            return given
        return {"profile": given["model"]} | {k: v for k, v in given.items() if k != "model"}

    @model_validator(mode="after")
    def _one_source(self) -> Workload:
        given = [
            key for key in ("model", "profile", "parameters") if getattr(self, key) is not None
        ]
        if not given and not self.trace:
            raise fail(
                "needs one of model (a zoo name), profile (a file), trace (a file) or parameters "
                "(a file)"
            )
        if self.trace and self.profile:
            raise fail("trace and profile are both given; keep one of them", "trace")
        if len(given) > 1:
            raise fail(f"{' and '.join(given)} are both given; keep one of them", given[1])
        if self.parameters and not self.step_time and not self.trace:
            raise fail("a parameter list says nothing of time; give step_time too", "parameters")
        return self

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Workload:
        keys = ("seq_len", "image_size", "memory_format", "attention", "float8", "frozen", "lora")
        for key in keys:
            if self.model is None and getattr(self, key) not in (None, ()):
                raise fail("has no effect without a zoo model: times are measured; drop it", key)
        self._check_language_options()
        if not self.set_to_none and (self.trace or self.profile):
            raise fail(
                "a trace's or a profile's times are those of its own zero_grad; drop it",
                "set_to_none",
            )
        if self.input_copy and self.model is None and self.input_copy.sample_bytes is None:
            raise fail(
                "needs sample_size, the bytes of a sample's inputs, as only a zoo model tells it",
                "input_copy",
            )
        if self.sync_batch_norm and self.trace:
            raise fail(
                "needs the layers' places in the forward, which a trace does not tell; give a zoo "
                "model or a profile without it",
                "sync_batch_norm",
            )
        if self.grad_scaler and self.precision != "amp-fp16":
            raise fail(
                f"scales float16 gradients, which {self.precision} has none of; drop it, or write "
                "precision: amp-fp16",
                "grad_scaler",
            )
        if self.ready_origin and not self.profile:
            raise fail("has no effect without a profile; drop it", "ready_origin")
        if self.compile == "blocks" and self.model is None:
            raise fail("nobody says which modules are the blocks without a zoo model", "compile")
        if self.compile and self.trace:
            raise fail(
                "has no effect beside a trace, which shows the gradients as they came; drop it",
                "compile",
            )
        return self

    def _check_language_options(self) -> None:
        """Raise for what needs bfloat16, and where nobody knows what would be run again."""
        if self.float8 and self.precision not in ("amp-bf16", "bf16"):
            raise fail(
                "casts bfloat16 to float8; write workload.precision: bf16 or amp-bf16", "float8"
            )
        self._check_fine_tuning()
        if self.checkpointing is None:
            return
        if self.checkpointing.memory_budget is not None and not self.compile:
            reason = "is torch.compile's; write workload.compile: true or blocks"
            raise fail(reason, "checkpointing.memory_budget")
        reasons = {
            "a trace shows what was run again; drop it": self.trace,
            "a profile's times and memory are those of the model as it ran; profile it with its "
            "checkpoints, and drop this": self.profile,
            "a parameter list tells no blocks; give a zoo model, or drop it": self.parameters,
            "would synchronise a batch norm twice in a step, which is not modelled; drop one of "
            "the two": self.sync_batch_norm,
        }
        refuse("checkpointing", reasons)

    def _check_fine_tuning(self) -> None:
        """Raise for what is frozen twice, and for adapters beside what has no model with them."""
        if self.trace and (self.frozen or self.lora):
            raise fail("a trace shows what was trained; drop it", "lora" if self.lora else "frozen")
        if self.lora is None:
            return
        if self.frozen:
            raise fail("lora freezes all but its adapters; drop it", "frozen")
        if self.float8:
            raise fail("is not modelled beside float8 layers; drop one of the two", "lora")
