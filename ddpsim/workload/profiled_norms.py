"""The batch norms of a profile, which names parameters and buffers' sizes, but no layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ddpsim.importers.profiles.model import ModelProfile
from ddpsim.workload.model import BatchNorm, Parameter, Work, total_s

_FLOATS = ("float32", "float16", "bfloat16", "float64")


def profiled_batch_norms(
    profile: ModelProfile, parameters: Sequence[Parameter], ready_order: Sequence[int]
) -> tuple[BatchNorm, ...]:
    """In the order of registration, each found by its buffers and its parameters.

    A batch norm has a running mean and a running variance of C floats, then a count (nn/modules/
    batchnorm.py), and a weight and a bias of C elements. Rows are those of `forward_rows`.
    """
    ready = {index: row for row, index in enumerate(ready_order)}
    modules = iter(_with_weight_and_bias(parameters))
    found: list[BatchNorm] = []
    for channels in _running_means(profile):
        for name, weight, bias in modules:
            if parameters[weight].numel == channels and {weight, bias} <= ready.keys():
                row = min(ready[weight], ready[bias])
                found.append(BatchNorm(name, channels, len(ready_order) - row, row))
                break
    return tuple(found)


def forward_rows(forward_s: float, backward: Sequence[Work]) -> tuple[Work, ...]:
    """A forward whose layers share its time as they share the backward's, in reverse (assumed)."""
    whole_s = total_s(backward)
    return tuple(Work(forward_s * work.device_s / whole_s) for work in reversed(backward))


def _running_means(profile: ModelProfile) -> Iterator[int]:
    """The channels of each run of two buffers of floats and a count."""
    buffers = profile.buffers
    for (mean, channels), (variance, others), (count, one) in zip(
        buffers, buffers[1:], buffers[2:], strict=False
    ):
        is_norm = mean in _FLOATS and variance == mean and channels == others
        if is_norm and (count, one) == ("int64", 1):
            yield channels


def _with_weight_and_bias(parameters: Sequence[Parameter]) -> Iterator[tuple[str, int, int]]:
    """Modules whose next parameters are a weight and a bias of as many elements."""
    for index, (weight, bias) in enumerate(pairwise(parameters)):
        module, _, kind = weight.name.rpartition(".")
        is_pair = kind == "weight" and bias.name == f"{module}.bias"
        if is_pair and weight.numel == bias.numel:
            yield module, index, index + 1
