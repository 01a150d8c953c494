"""Configs of torchtitan, accelerate, transformers' Trainer, DeepSpeed and Lightning, as tables.

Every key has a rule in its program's table, or is named as not known. A rule gives the scenario's
settings that a value means, by dotted path. None: the value changes no step. Raises
NotModelledError: it changes one, but nothing here models it.
Keys and defaults as in pytorch/torchtitan (train_configs) and huggingface/accelerate
(examples/config_yaml_templates). Those of transformers (TrainingArguments), DeepSpeed (its JSON)
and Lightning (LightningCLI) are as documented; their code was not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from ddpsim.errors import ImportFailedError
from ddpsim.scenario.suggest import why_no_yaml

Settings = dict[str, Any]
Rule = Callable[[Any], Settings | None]
_MOST_KEYS = 5_000
_LEFT = ("auto", None)  # what leaves a key to the program


class NotModelledError(ValueError):
    """A value changes the step, in a way that is not modelled; `str()`: what to do instead."""


@dataclass(frozen=True)
class Program:
    """A program's config: keys by which it is known, its table, and what several keys say together.

    Keys of the table are dotted. One that ends in `*` holds for all that begin so; the longest
    counts. `marks`: a document with one of these keys is such a config.
    """

    name: str
    marks: tuple[str, ...]
    table: Mapping[str, Rule]
    together: Callable[[Mapping[str, Any]], Settings] = lambda _: {}


@dataclass(frozen=True)
class Config:
    """What a config says: `settings` of a scenario by dotted path, and what they leave out.

    `not_modelled`: keys with their values and what to do; `unknown`: keys of no rule.
    """

    program: str
    settings: Settings
    not_modelled: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def keys(self) -> dict[str, dict[str, Any]]:
        """The settings by section, as a scenario has them."""
        document: dict[str, dict[str, Any]] = {}
        for path, value in self.settings.items():
            *above, name = path.split(".")
            section: dict[str, Any] = document
            for each in above:
                section = section.setdefault(each, {})
            section[name] = value
        return document


def read_config(program: Program, document: Mapping[str, Any]) -> Config:
    """Read a document by a program's table; raises ValueError for one that is too large."""
    values = dict(flat(document))
    settings: Settings = {}
    left_out, unknown = [], []
    for key, value in values.items():
        rule = _rule(program, key)
        if rule is None:
            unknown.append(key)
            continue
        if value in _LEFT or value == []:
            continue
        try:
            settings |= rule(value) or {}
        except NotModelledError as error:
            left_out.append(f"{key}: {_written(value)}{error}")
    try:
        settings |= program.together(values)
    except NotModelledError as error:
        left_out.append(str(error))
    settings = {path: value for path, value in settings.items() if value is not None}
    return Config(program.name, settings, tuple(left_out), tuple(unknown))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A document's values by dotted key; lists are values. Raises ValueError for too many."""
    left, count = [(path, value)], 0
    while left:
        at, each = left.pop()
        count += 1
        if count > _MOST_KEYS:  # YAML's anchors may go round
            raise ValueError(f"has more than {_MOST_KEYS} keys")
        if not isinstance(each, Mapping):
            yield at, each
            continue
        left += reversed([(f"{at}.{key}".lstrip("."), inner) for key, inner in each.items()])


def _rule(program: Program, key: str) -> Rule | None:
    """The rule of a key: its own, or of the longest beginning."""
    if key in program.table:
        return program.table[key]
    begun = [each for each in program.table if each.endswith("*") and key.startswith(each[:-1])]
    return program.table[max(begun, key=len)] if begun else None


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def IDLE(value: Any) -> None:  # noqa: N802 -- a rule without a choice
    """Changes no step."""


def copied(path: str, kind: type = int) -> Rule:
    """A number as the scenario's key takes it."""

    def rule(value: Any) -> Settings:
        if isinstance(value, bool) is not (kind is bool):
            raise NotModelledError(", neither true nor false" if kind is bool else ", no number")
        try:
            number = kind(value)
        except (TypeError, ValueError, OverflowError):
            raise NotModelledError(", no number") from None
        if kind is not bool and number < 1:
            raise NotModelledError("")
        return {path: number}

    return rule


def chosen(choices: Mapping[str, Settings], instead: str = "") -> Rule:
    """The settings of each value as YAML writes it, small; any other is not modelled."""

    def rule(value: Any) -> Settings:
        settings = choices.get(_written(value).lower())
        if settings is None:
            raise NotModelledError(f" ({instead})" if instead else "")
        return dict(settings)

    return rule


def only(*values: str, instead: str = "") -> Rule:
    """Values that change no step; any other is not modelled."""
    return chosen({value: {} for value in values}, instead)


_TYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": None}
_CLIPS: Settings = {"workload.clip_grad_norm": True}
_HALF = {"bf16": "bfloat16", "fp16": "float16"}
_REPLICA = "cluster.replica, with a step of one GPU's part"
_MODELS = {
    ("llama3", "8b"): "llama-8b",
    ("llama3", "70b"): "llama-70b",
}
_COMPILED: Settings = {"workload.compile": True}
_BLOCKS: Settings = {"workload.compile": "blocks"}  # as torchtitan compiles
_LAYERS = {"output": "lm_head"}  # torchtitan's names of the zoo's layers
_AMP = {
    "bf16": {"workload.precision": "amp-bf16"},
    "fp16": {"workload.precision": "amp-fp16"},
    "no": {},
}


def _idle(keys: str) -> dict[str, Rule]:
    """Keys that change no step, whatever their values."""
    return dict.fromkeys(keys.split(), IDLE)


def _clips(value: Any) -> Settings | None:
    return _CLIPS if isinstance(value, (int, float)) and value > 0 else None


def _optimizer(name: Any, *, fused: bool) -> Settings:
    """An optimizer by its class; torch's default is foreach.

    Adafactor and Muon by torch's own class alone: other packages have other ones.
    """
    package, _, kind = str(name).lower().rpartition(".")
    torchs = package == "torch.optim" and kind in ("adafactor", "muon")
    if kind not in ("sgd", "adam", "adamw") and not torchs:
        raise NotModelledError(" (no optimizer of that name; sgd, adam or adamw)")
    is_fused = fused and kind in ("adam", "adamw")  # torchtitan and DeepSpeed have no fused SGD
    return {"workload.optimizer": {"name": kind} | ({"fused": True} if is_fused else {})}


# torchtitan: fully_shard of blocks, computing in bfloat16 unless the config says otherwise


def _degree(values: Mapping[str, Any], kind: str, usual: int) -> int:
    """Degree of data parallelism; older configs have it under training."""
    keys = [f"{section}.data_parallel_{kind}_degree" for section in ("parallelism", "training")]
    value = next((values[key] for key in keys if key in values), usual)
    if not isinstance(value, int):
        raise NotModelledError(f"data_parallel_{kind}_degree: {value}, no number")
    return value


def _titan(values: Mapping[str, Any]) -> Settings:
    settings = _checkpoints(values) | _float8(values)
    settings |= _clips(values.get("training.max_norm", 1.0)) or {}
    model = str(values.get("model.name")).lower(), str(values.get("model.flavor")).lower()
    if model in _MODELS:
        settings["workload.model"] = _MODELS[model]
    if name := values.get("optimizer.name"):
        fused = values.get("optimizer.implementation", "fused") == "fused"
        settings |= _optimizer(name, fused=fused)
    copies, shards = _degree(values, "replicate", 1), _degree(values, "shard", -1)
    param = values.get("training.mixed_precision_param", "bfloat16")
    reduce = values.get("training.mixed_precision_reduce", "float32")
    types = {"param": _TYPES.get(param), "reduce": reduce if param in _HALF.values() else None}
    if types["param"]:
        settings["workload.precision"] = "amp-bf16" if param == "bfloat16" else "amp-fp16"
    if shards == 1:
        return settings | {"ddp.strategy": "ddp"}
    settings["ddp.strategy"] = "hsdp" if copies > 1 else "fully_shard"
    if copies > 1 and shards > 1:  # a copy a node
        settings |= {"cluster.nodes": copies, "cluster.gpus_per_node": shards}
    settings["ddp.fully_shard.mixed_precision"] = types if types["param"] else None
    if values.get("parallelism.fsdp_reshard_after_forward") == "never":
        settings["ddp.fully_shard.reshard_after_forward"] = False
    return settings


def _checkpoints(values: Mapping[str, Any]) -> Settings:
    """Reads checkpointing: by block, by every so many blocks, or by operator."""
    mode = str(values.get("activation_checkpoint.mode", "selective")).lower()
    option = str(values.get("activation_checkpoint.selective_ac_option", "2"))
    if "activation_checkpoint.mode" not in values or mode == "none":
        return {}
    if mode == "memory_budget":  # of torch.compile
        budget = values.get("activation_checkpoint.memory_budget", 0.5)
        return {"workload.checkpointing": {"memory_budget": budget}}
    if mode == "full" or option == "op":
        return {"workload.checkpointing": mode}
    if option.isdecimal() and int(option) > 0:
        return {"workload.checkpointing": {"every": int(option)}}
    raise NotModelledError(f"activation_checkpoint.selective_ac_option: {option}")


def _float8(values: Mapping[str, Any]) -> Settings:
    """Options of float8 where model.converters names it: a section of that name has them."""
    converters = values.get("model.converters") or []
    names = [converters] if isinstance(converters, str) else list(converters)
    of_float8 = {"float8", "quantize.linear.float8", "quantize.dense.float8"}
    if not names or names == [""]:
        return {}
    if len(names) > 1 or names[0] not in of_float8:
        raise NotModelledError(f"model.converters: {converters} (float8 alone)")
    at = f"{names[0]}."
    recipe = str(values.get(f"{at}recipe_name") or "tensorwise")
    if recipe not in ("tensorwise", "rowwise"):
        raise NotModelledError(f"{at}recipe_name: {recipe} (tensorwise or rowwise)")
    skipped = values.get(f"{at}filter_fqns") or []
    listed = skipped.split(",") if isinstance(skipped, str) else map(str, skipped)
    skip = [_LAYERS.get(each, each) for each in listed]
    gathers = values.get(f"{at}enable_fsdp_float8_all_gather") is True
    scales = values.get(f"{at}precompute_float8_dynamic_scale_for_fsdp") is True
    options: Settings = {"recipe": recipe, "skip": skip, "all_gather": gathers}
    options["precompute_scales"] = scales
    return {"workload.float8": {key: value for key, value in options.items() if value}}


_TITAN: dict[str, Rule] = {
    "training.local_batch_size": copied("workload.batch_per_rank"),
    "training.batch_size": copied("workload.batch_per_rank"),
    "training.global_batch_size": only("-1", instead="ddp.accumulation_steps"),
    "training.seq_len": copied("workload.seq_len"),
    "training.compile": chosen({"true": _BLOCKS, "false": {}}),
    "training.enable_cpu_offload": chosen(
        {"true": {"ddp.fully_shard.offload_policy": "CPUOffloadPolicy"}, "false": {}}
    ),
    "training.deterministic": only("false"),
    "training.tensor_parallel_degree": only("1", instead=_REPLICA),
    "parallelism.fsdp_reshard_after_forward": only("default", "always", "never"),
    **{
        f"parallelism.{kind}_parallel_degree": only("1", instead=_REPLICA)
        for kind in ("tensor", "pipeline", "context", "expert")
    },
    "parallelism.enable_async_tensor_parallel": only("false", instead=_REPLICA),
    **_idle(  # read by _titan, or of what the degrees above and model.converters switch on
        "training.max_norm training.mixed_precision_* training.data_parallel_* model.name "
        "parallelism.data_parallel_* activation_checkpoint.memory_budget model.flavor "
        "activation_checkpoint.selective_ac_option model.converters optimizer.name "
        "optimizer.implementation parallelism.pipeline_parallel_* parallelism.expert_* "
        "parallelism.module_fqns_per_model_part parallelism.context_parallel_* "
        "parallelism.disable_loss_parallel float8.* quantize.* mx.*"
    ),
    "activation_checkpoint.mode": only("none", "full", "selective", "memory_budget"),  # _titan
    "activation_checkpoint.early_stop": only("false"),
    "compile.enable": chosen({"true": _BLOCKS, "false": {}}),
    "optimizer.early_step_in_backward": only("false"),
    **_idle(
        "training.gc_freq training.steps training.dataset* training.seed "
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns "
        "compile.components compile.backend model.tokenizer_path model.hf_assets_path "
        "model.print_after_conversion model.norm_type optimizer.lr optimizer.beta* "
        "optimizer.eps optimizer.weight_decay job.* profiling.* metrics.* lr_scheduler.* "
        "checkpoint.* comm.* experimental.* validation.* fault_tolerance.* "
        "memory_estimation.*"
    ),
}


# FSDP as accelerate and the Trainer set it up


_RESHARDS = {"true": True, "full_shard": True, "false": False, "shard_grad_op": False}
_FSDP: dict[str, Rule] = {  # read by _fsdp
    "version": only("1", "2"),
    "reshard_after_forward": only(*_RESHARDS),
    **_idle(
        "sharding_strategy offload_params auto_wrap_policy transformer_layer_cls_to_wrap "
        "min_num_params use_orig_params backward_prefetch forward_prefetch state_dict_type "
        "activation_checkpointing cpu_ram_efficient_loading sync_module_states ignored_parameters"
    ),
}


def _fsdp(values: Mapping[str, Any], at: str, precision: str) -> Settings:
    """FSDP1 or, with version 2, fully_shard: `at` begins its keys."""

    def text(key: str, usual: str) -> str:
        value = values.get(f"{at}{key}")
        return usual if value is None else str(value)

    def holds(key: str, usual: str = "false") -> bool:
        return text(key, usual).lower() == "true"

    half = _HALF.get(precision)
    types = {"param": half, "reduce": half} if half else None
    offloads = holds("offload_params")
    if text("version", "1") == "2":
        settings: Settings = {"ddp.strategy": "fully_shard"}
        path = "ddp.fully_shard"
        reshards = text("reshard_after_forward", "true").lower()
        settings[f"{path}.reshard_after_forward"] = _RESHARDS.get(reshards, "default")
        settings[f"{path}.offload_policy"] = "CPUOffloadPolicy" if offloads else None
    else:
        settings, path = {"ddp.strategy": "fsdp1"}, "ddp.fsdp1"
        settings[f"{path}.sharding_strategy"] = _sharding(text("sharding_strategy", "FULL_SHARD"))
        for key, usual in (("use_orig_params", "true"), ("forward_prefetch", "false")):
            settings[f"{path}.{key}"] = holds(key, usual)
        prefetch = text("backward_prefetch", "BACKWARD_PRE").upper()
        settings[f"{path}.backward_prefetch"] = prefetch if prefetch.startswith("BACK") else None
        settings[f"{path}.cpu_offload"] = True if offloads else None
    settings[f"{path}.mixed_precision"] = types
    if holds("activation_checkpointing"):
        settings["workload.checkpointing"] = "full"
    least = values.get(f"{at}min_num_params")
    if isinstance(least, (int, float)) and least >= 1:
        settings[f"{path}.units"] = {"min_parameters": int(least)}
    return settings


def _sharding(value: Any) -> str:
    """Names FSDP1's sharding strategy by torch's name, or its number in older configs."""
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    name = names[int(value) - 1] if str(value) in tuple("12345") else str(value).upper()
    return f"_{name}" if name == names[-1] else name


# DeepSpeed: its JSON, alone or inside another config


def _zero(values: Mapping[str, Any], at: str = "") -> Settings:
    stage = values.get(f"{at}zero_optimization.stage", 0)
    if values.get(f"{at}fp16.enabled") is True:
        raise NotModelledError(f"{at}fp16.enabled: true (bf16 is, and fp32)")
    half = values.get(f"{at}bf16.enabled") in (True, "auto")
    settings: Settings = {"workload.precision": "amp-bf16" if half else None}
    if stage == 3:
        offloads = any(
            values.get(f"{at}zero_optimization.offload_{what}.device") in ("cpu", "nvme")
            for what in ("param", "optimizer")
        )
        settings["ddp.strategy"] = "fully_shard"
        settings["ddp.fully_shard.offload_policy"] = "CPUOffloadPolicy" if offloads else None
        if half:
            settings["ddp.fully_shard.mixed_precision"] = {
                "param": "bfloat16",
                "reduce": "bfloat16",
            }
        return settings
    if stage not in (1, 2):
        return settings | {"ddp.strategy": "ddp"}
    settings |= {"ddp.strategy": "deepspeed", "ddp.deepspeed.stage": stage}
    for key in ("overlap_comm", "reduce_scatter", "reduce_bucket_size", "round_robin_gradients"):
        value = values.get(f"{at}zero_optimization.{key}")
        if isinstance(value, float) and value.is_integer():  # JSON's 5e8
            value = int(value)
        settings[f"ddp.deepspeed.{key}"] = None if value == "auto" else value
    if half:
        settings |= {"ddp.deepspeed.params": "bfloat16", "workload.precision": "bf16"}
    return settings


def _inside(rules: Mapping[str, Rule], at: str) -> dict[str, Rule]:
    """A table's rules for the same keys in another config's section."""
    return {f"{at}{key}": rule for key, rule in rules.items()}


_OFFLOAD = "offloading by torch alone: ddp.fully_shard.offload_policy"
_ZERO: dict[str, Rule] = {
    "train_micro_batch_size_per_gpu": copied("workload.batch_per_rank"),
    "gradient_accumulation_steps": copied("ddp.accumulation_steps"),
    "train_batch_size": IDLE,  # of the two above and the ranks
    "data_types.grad_accum_dtype": only("bf16", instead="gradients of another type"),
    "gradient_clipping": IDLE,  # the norm is taken anyway
    "optimizer.type": lambda value: _optimizer(value, fused=True),
    "bf16.*": IDLE,  # _zero
    "fp16.*": IDLE,  # _zero
    "zero_optimization.stage": only("0", "1", "2", "3"),
    **{
        f"zero_optimization.offload_{what}.device": only("none", "cpu", instead=_OFFLOAD)
        for what in ("param", "optimizer")
    },
    "zero_optimization.contiguous_gradients": only("true"),
    "zero_optimization.zero_quantized_*": only("false", instead="ZeRO++"),
    "zero_optimization.zero_hpz_partition_size": only("1", instead="ZeRO++"),
    "zero_optimization.*": IDLE,  # _zero, or of no effect
    "activation_checkpointing.*": IDLE,  # how, where the model asks for it
    "compression_training.*": only("false", instead="compression"),
    **_idle(
        "optimizer.params.* scheduler.* zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown dump_state "
        "tensorboard.* wandb.* csv_monitor.* flops_profiler.* comms_logger.*"
    ),
}


# accelerate


def _accelerate(values: Mapping[str, Any]) -> Settings:
    settings: Settings = {}
    machines, processes = values.get("num_machines", 1), values.get("num_processes")
    if isinstance(machines, int) and machines > 0:
        settings["cluster.nodes"] = machines
        if isinstance(processes, int) and processes >= machines and processes % machines == 0:
            settings["cluster.gpus_per_node"] = processes // machines
    precision = str(values.get("mixed_precision", "no")).lower()
    settings |= _AMP.get(precision, {})
    kind = str(values.get("distributed_type", "NO")).upper()
    if kind == "FSDP":
        return settings | _fsdp(values, "fsdp_config.fsdp_", precision)
    if kind != "DEEPSPEED":
        return settings
    inside = {
        "zero_optimization.stage": values.get("deepspeed_config.zero_stage", 2),
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
        **{
            f"zero_optimization.offload_{what}.device": values.get(
                f"deepspeed_config.offload_{what}_device", "none"
            )
            for what in ("param", "optimizer")
        },
    }
    return settings | _zero(inside)


def _counts(value: Any) -> None:
    """Whole numbers from 1, which `_accelerate` takes; raises NotModelledError for others."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise NotModelledError(", no number from 1")


_ACCELERATE: dict[str, Rule] = {
    "distributed_type": only("multi_gpu", "fsdp", "deepspeed", "no"),
    "mixed_precision": only("no", "bf16", "fp16", instead="float8"),
    **dict.fromkeys(("num_machines", "num_processes"), _counts),  # _accelerate
    **_inside(_FSDP, "fsdp_config.fsdp_"),
    "gradient_accumulation_steps": copied("ddp.accumulation_steps"),
    "deepspeed_config.gradient_accumulation_steps": copied("ddp.accumulation_steps"),
    "deepspeed_config.deepspeed_config_file": only(instead="import that file too"),
    "deepspeed_config.offload_*": only("none", "cpu", instead=_OFFLOAD),
    **_inside(
        _idle(  # read by _zero
            "zero_stage gradient_clipping zero3_init_flag zero3_save_16bit_model "
            "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_moe_layer_cls_names"
        ),
        "deepspeed_config.",
    ),
    "dynamo_config.dynamo_backend": chosen({"inductor": _COMPILED, "no": {}}),
    "dynamo_backend": chosen({"inductor": _COMPILED, "no": {}}),
    "megatron_lm_config.*": only(instead="Megatron-LM"),
    "parallelism_config.*": only("1", instead=_REPLICA),
    "fp8_config.*": IDLE,  # of mixed_precision: fp8
    **_idle(
        "dynamo_config.* compute_environment debug machine_rank main_* rdzv_* same_network "
        "gpu_ids use_cpu tpu_* enable_cpu_affinity downcast_bf16 command_file commands "
        "deepspeed_hostfile"
    ),
}


# TrainingArguments of transformers


def _trainer(values: Mapping[str, Any]) -> Settings:
    """What TrainingArguments say together."""
    precision = "bf16" if values.get("bf16") is True else "fp16" if values.get("fp16") else "no"
    settings: Settings = dict(_AMP[precision])
    if precision == "no" and values.get("tf32") is True:
        settings["workload.precision"] = "tf32"
    optim = str(values.get("optim", "adamw_torch_fused"))
    if optim in ("adamw_torch", "adamw_torch_fused", "sgd"):
        settings |= _optimizer(optim.split("_", maxsplit=1)[0], fused=optim.endswith("fused"))
    if any(key.startswith("deepspeed.") for key in values):
        of_args = {"deepspeed.bf16.enabled": precision == "bf16"}
        args = values if values.get("deepspeed.bf16.enabled") != "auto" else {**values, **of_args}
        return settings | _zero(args, "deepspeed.")
    fsdp = values.get("fsdp") or ""
    words = fsdp.split() if isinstance(fsdp, str) else [str(each) for each in fsdp]
    if not words:
        return settings
    inside = {"sharding_strategy": words[0].upper(), "offload_params": "offload" in words}
    options = {key.removeprefix("fsdp_config."): value for key, value in values.items()}
    options = {key.removeprefix("fsdp_"): value for key, value in options.items()}
    return settings | _fsdp(inside | options, "", precision)


_DDP_KEYS: dict[str, Rule] = {
    "ddp_find_unused_parameters": copied("ddp.find_unused_parameters", bool),
    "ddp_bucket_cap_mb": copied("ddp.bucket_cap_mb"),
    "ddp_broadcast_buffers": copied("ddp.broadcast_buffers", bool),
    "ddp_backend": chosen({name: {"ddp.backend": name} for name in ("nccl", "gloo")}),
    "ddp_timeout": IDLE,
}
_OPTIM = "8-bit, paged and other optimizers"
_TRAINER: dict[str, Rule] = {
    "per_device_train_batch_size": copied("workload.batch_per_rank"),
    "gradient_accumulation_steps": copied("ddp.accumulation_steps"),
    "gradient_checkpointing": chosen({"true": {"workload.checkpointing": "full"}, "false": {}}),
    "max_grad_norm": _clips,
    **dict.fromkeys(("bf16", "fp16", "tf32", "fsdp", "fsdp_min_num_params"), IDLE),  # _trainer
    **_inside(_FSDP, "fsdp_config."),
    **_inside(_FSDP, "fsdp_config.fsdp_"),
    **{f"fsdp_config.{key}": IDLE for key in ("limit_all_gathers", "xla*")},
    "optim": only("adamw_torch", "adamw_torch_fused", "sgd", instead=_OPTIM),
    "torch_compile": chosen({"true": _COMPILED, "false": {}}),
    "deepspeed": only(instead="import that file too"),
    **_inside(_ZERO, "deepspeed."),
    **_DDP_KEYS,
    "use_liger_kernel": only("false", instead="fused kernels"),
    "parallelism_config": only(instead=_REPLICA),
    **_idle(
        "gradient_checkpointing_kwargs.* fsdp_transformer_layer_cls_to_wrap optim_args "
        "torch_compile_* neftune_noise_alpha output_dir overwrite_output_dir do_* "
        "prediction_loss_only seed eval_* evaluation_strategy per_device_eval_batch_size "
        "logging_* learning_rate lr_scheduler_* warmup_* weight_decay adam_* num_* save_* "
        "push_to_hub* hub_* report_to run_name metric_* greater_* load_best_* dataloader_* "
        "remove_unused_columns label_* group_by_length length_column_name data_seed "
        "resume_from_checkpoint disable_tqdm _* max_steps log_level* log_on_each_node "
        "ignore_data_skip include_* auto_find_batch_size full_determinism past_index "
        "local_rank no_cuda use_cpu use_mps_device skip_memory_metrics torchdynamo "
        "accelerator_* batch_eval_metrics average_tokens_across_devices "
        "half_precision_backend fp16_* bf16_full_eval tpu_* debug restore_callback* "
        "mp_parameters project trackio_space_id jit_mode_eval use_legacy_* ray_scope "
        "torch_empty_cache_steps"
    ),
}


# LightningCLI

_LIGHTNING_PRECISION: dict[str, Settings] = {
    **{name: {} for name in ("32-true", "32")},
    **{name: {"workload.precision": "amp-fp16"} for name in ("16-mixed", "16")},
    **{name: {"workload.precision": "amp-bf16"} for name in ("bf16-mixed", "bf16")},
    "bf16-true": {"workload.precision": "bf16"},
}
_ZERO_2: Settings = {"ddp.strategy": "deepspeed", "ddp.deepspeed.stage": 2}
_STRATEGIES: dict[str, Settings] = {
    **{name: {"ddp.strategy": "ddp"} for name in ("auto", "ddp", "ddpstrategy")},
    "ddp_find_unused_parameters_true": {
        "ddp.strategy": "ddp",
        "ddp.find_unused_parameters": True,
    },
    **{name: {"ddp.strategy": "fsdp1"} for name in ("fsdp", "fsdpstrategy")},
    "deepspeed_stage_1": {"ddp.strategy": "deepspeed"},
    **dict.fromkeys(("deepspeed", "deepspeedstrategy", "deepspeed_stage_2"), _ZERO_2),
    "deepspeed_stage_3": {"ddp.strategy": "fully_shard"},
}


def _strategy(value: Any) -> Settings | None:
    return chosen(_STRATEGIES)(str(value).rpartition(".")[2])


def _lightning(values: Mapping[str, Any]) -> Settings:
    """FSDP sends what Lightning's precision plugin casts to."""
    name = values.get("trainer.strategy") or values.get("trainer.strategy.class_path", "")
    strategy = str(name).rpartition(".")[2].lower()
    precision = str(values.get("trainer.precision", "32-true"))
    half = {"bf16": "bfloat16", "16": "float16"}.get(precision.removesuffix("-mixed"))
    of_zero = ("deepspeed", "deepspeedstrategy", "deepspeed_stage_1", "deepspeed_stage_2")
    if half and strategy in of_zero:
        if half == "float16":
            raise NotModelledError("trainer.precision: 16 under DeepSpeed (write bf16-mixed)")
        return {"ddp.deepspeed.params": half, "workload.precision": "bf16"}
    if strategy not in ("fsdp", "fsdpstrategy", "deepspeed_stage_3") or not half:
        return {}
    sharding = "fully_shard" if strategy == "deepspeed_stage_3" else "fsdp1"
    return {f"ddp.{sharding}.mixed_precision": {"param": half, "reduce": half}}


_AT = "trainer.strategy.init_args."
_LIGHTNING: dict[str, Rule] = {
    "trainer.num_nodes": copied("cluster.nodes"),
    "trainer.devices": copied("cluster.gpus_per_node"),
    "trainer.precision": chosen(_LIGHTNING_PRECISION),
    "trainer.accumulate_grad_batches": copied("ddp.accumulation_steps"),
    "trainer.gradient_clip_val": _clips,
    "trainer.sync_batchnorm": copied("workload.sync_batch_norm", bool),
    "trainer.strategy": _strategy,
    "trainer.strategy.class_path": _strategy,
    **{f"{_AT}{key.removeprefix('ddp_')}": rule for key, rule in _DDP_KEYS.items()},
    f"{_AT}static_graph": copied("ddp.static_graph", bool),
    f"{_AT}gradient_as_bucket_view": copied("ddp.gradient_as_bucket_view", bool),
    f"{_AT}sharding_strategy": lambda value: {"ddp.fsdp1.sharding_strategy": _sharding(value)},
    f"{_AT}cpu_offload": chosen({"true": {"ddp.fsdp1.cpu_offload": True}, "false": {}}),
    f"{_AT}use_orig_params": copied("ddp.fsdp1.use_orig_params", bool),
    f"{_AT}forward_prefetch": copied("ddp.fsdp1.forward_prefetch", bool),
    f"{_AT}limit_all_gathers": copied("ddp.fsdp1.limit_all_gathers", bool),
    f"{_AT}stage": chosen(
        {"1": {}, "2": {"ddp.deepspeed.stage": 2}}, "stage 3: write deepspeed_stage_3"
    ),
    f"{_AT}process_group_backend": _DDP_KEYS["ddp_backend"],
    f"{_AT}state_dict_type": IDLE,
    "data.init_args.batch_size": copied("workload.batch_per_rank"),
    "data.batch_size": copied("workload.batch_per_rank"),
    "optimizer.class_path": lambda value: _optimizer(value, fused=False),
    **_idle(
        "data.* model.* optimizer.* lr_scheduler.* seed_everything ckpt_path "
        "trainer.overfit_batches trainer.accelerator trainer.logger* trainer.callbacks* "
        "trainer.max_* trainer.min_* trainer.limit_* trainer.check_val_* trainer.num_sanity_* "
        "trainer.val_check_interval trainer.log_every_n_steps trainer.enable_* "
        "trainer.deterministic trainer.benchmark trainer.inference_mode "
        "trainer.use_distributed_sampler trainer.profiler* trainer.detect_anomaly "
        "trainer.barebones trainer.plugins trainer.reload_* trainer.default_* "
        "trainer.fast_dev_run trainer.gradient_clip_algorithm trainer.model_registry"
    ),
}

PROGRAMS = (
    Program(
        "torchtitan",
        ("model.flavor", "parallelism.data_parallel_shard_degree", "job.dump_folder"),
        _TITAN,
        _titan,
    ),
    Program("accelerate", ("distributed_type",), _ACCELERATE, _accelerate),
    Program("transformers' Trainer", ("per_device_train_batch_size",), _TRAINER, _trainer),
    Program(
        "DeepSpeed",
        ("zero_optimization.stage", "train_micro_batch_size_per_gpu"),
        _ZERO,
        _zero,
    ),
    Program(
        "Lightning",
        ("trainer.strategy", "trainer.strategy.class_path", "trainer.devices", "trainer.precision"),
        _LIGHTNING,
        _lightning,
    ),
)


LARGEST_CONFIG = 2**20
_TOML = re.compile(r"^\[(?:training|model|parallelism|job)\]", re.MULTILINE)
_YAML = re.compile(r"^(?:distributed_type|trainer)[ \t]*:", re.MULTILINE)


def config_text(name: str, text: str) -> Config | None:
    """The config that a text of TOML or YAML is; None for another text.

    Raises ImportFailedError for one that cannot be read.
    """
    is_toml = _TOML.search(text) is not None
    if len(text) > LARGEST_CONFIG or not (is_toml or _YAML.search(text)):
        return None
    try:
        loads = import_module("tomllib").loads if is_toml else YAML(typ="safe", pure=True).load
        document = loads(text)
    except ImportError:
        raise ImportFailedError(name, "is TOML, which Python reads from 3.11 on") from None
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        problem = f"looks like a config, but is no YAML: {why_no_yaml(error)}"
        raise ImportFailedError(name, problem, line) from None
    except (YAMLError, ValueError, RecursionError) as error:
        kind = "TOML" if is_toml else "YAML"
        why = " ".join(str(error).split())[:200]
        raise ImportFailedError(name, f"looks like a config, but is no {kind}: {why}") from None
    return config_of(name, document) if isinstance(document, Mapping) else None


def config_of(name: str, document: Mapping[str, Any]) -> Config | None:
    """What a config says; None for a document of no known program.

    Raises ImportFailedError for one that is too large.
    """
    try:
        keys = {key for key, _ in flat(document)}
        for program in PROGRAMS:
            if keys.intersection(program.marks):
                return read_config(program, document)
    except ValueError as error:
        raise ImportFailedError(name, str(error)) from None
    return None
