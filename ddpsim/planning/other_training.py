"""How one training differs from another: what it is fed, and what is trained by which rule."""

from __future__ import annotations

from collections.abc import Iterator

from ddpsim.scenario.ddp import OF_HOOKS, PLAIN_HOOKS, Ddp
from ddpsim.scenario.options.linear_layers import Float8, Lora
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.workload import Optimizer, Workload

_SOURCES = ("model", "profile", "trace", "parameters")
# keys of an optimizer that leave its rule alone; `ddpsim.workload.numerics` names masters
_NO_RULE = {"fused", "masters"}


def other_training(first: Scenario, other: Scenario) -> Iterator[str]:
    """Names what makes the second training another one than the first, types aside, in words.

    Options that change time or memory alone are not named, such as checkpointing or buckets.
    """
    yield from _other_input(first, other)
    yield from _other_parameters(first.workload, other.workload)
    yield from _other_updates(first, other)


def _other_input(first: Scenario, other: Scenario) -> Iterator[str]:
    """Other models, batches, samples and machines."""
    ours, theirs = first.workload, other.workload
    if any(getattr(ours, k) != getattr(theirs, k) for k in _SOURCES):
        yield "another model"
    elif ours.sample_size and theirs.sample_size and ours.sample_size != theirs.sample_size:
        (_, was), (key, size) = ours.sample_size, theirs.sample_size
        yield f"{key} {size:,} in place of {was:,}"
    if ours.batch_per_rank != theirs.batch_per_rank:
        yield "another batch"
    elif first.ddp.accumulation_steps != other.ddp.accumulation_steps:
        yield "another global batch"
    if ours.dataset and theirs.dataset and ours.dataset.samples != theirs.dataset.samples:
        yield "another dataset"
    if ours.step_time != theirs.step_time:
        yield "another step_time"
    if first.cluster.device.name != other.cluster.device.name:
        yield "another device"
    if _gpus(first) != _gpus(other):
        yield "other GPUs"


def _gpus(scenario: Scenario) -> tuple[int, int]:
    """Numbers of GPUs, and of data-parallel ranks."""
    return scenario.cluster.gpus, scenario.cluster.world_size


def _other_parameters(ours: Workload, theirs: Workload) -> Iterator[str]:
    """Other parameters that are trained, and other layers that compute with them."""
    if set(ours.frozen) != set(theirs.frozen):
        yield "other frozen modules"
    if bool(ours.lora) != bool(theirs.lora):
        yield "LoRA" if theirs.lora else "all parameters in place of LoRA's"
    elif ours.lora and theirs.lora:
        yield from _other_adapters(ours.lora, theirs.lora)
    if bool(ours.float8) != bool(theirs.float8):
        yield "float8 layers" if theirs.float8 else "no float8 layers"
    elif _products(ours.float8) != _products(theirs.float8):
        yield "other float8 layers"
    if ours.sync_batch_norm != theirs.sync_batch_norm:
        whose = "all ranks" if theirs.sync_batch_norm else "each rank alone"
        yield f"statistics of {whose}"


def _other_adapters(ours: Lora, theirs: Lora) -> Iterator[str]:
    if (ours.rank, ours.modules) != (theirs.rank, theirs.modules):
        yield "other adapters of LoRA"
    if ours.base != theirs.base:
        yield f"the base is {'rounded' if theirs.base else 'not rounded'}"


def _products(float8: Float8 | None) -> object:
    """What float8 layers compute, however their weights are gathered."""
    return float8 and (float8.recipe, set(float8.skip))


def _other_updates(first: Scenario, other: Scenario) -> Iterator[str]:
    """Other rules by which gradients change the parameters."""
    ours, theirs = first.workload, other.workload
    if ours.optimizer.name != theirs.optimizer.name:
        yield "another optimizer"
    elif _rule(ours.optimizer) != _rule(theirs.optimizer):
        yield "another rule of the optimizer"
    clip_themselves = "deepspeed" in (first.ddp.strategy, other.ddp.strategy)
    if bool(ours.clip_grad_norm) != bool(theirs.clip_grad_norm) and not clip_themselves:
        yield f"gradients are {'' if theirs.clip_grad_norm else 'not '}clipped"
    if ours.precision == theirs.precision and ours.scales_loss != theirs.scales_loss:
        yield f"the loss is {'' if theirs.scales_loss else 'not '}scaled"
    if _hook(first.ddp) != _hook(other.ddp):
        yield "another comm_hook"
    if first.ddp.local_sgd != other.ddp.local_sgd:
        yield "another training"


def _rule(optimizer: Optimizer) -> dict[str, object]:
    return optimizer.model_dump(exclude=_NO_RULE)


def _hook(ddp: Ddp) -> tuple[str, object]:
    """A hook that sends something else than gradients, with its options."""
    hook = ddp.comm_hook
    if hook in PLAIN_HOOKS:
        return "", None
    return hook, [getattr(ddp, key) for key, owner in OF_HOOKS.items() if owner == hook]
