"""Steps of one GPU and their hosts: the roofline, published hosts, a step by batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import median

from held_out.errors import (
    DEVICE_BOUND,
    HOST_BOUND,
    Held,
    constants,
    figures,
    held_out,
    published_operators,
)
from held_out.judging import Judged, judged, scaled
from held_out.presets import GENERATIONS, preset_operator_us
from published_hosts import published_hosts
from published_steps import error_of, published_steps

from ddpsim.prediction.one_device import on_one_rank
from ddpsim.prediction.program import compile_program
from ddpsim.result.summary import mean_step_s
from ddpsim.workload.model import Work
from validation.markdown import markdown
from validation.rows import job_of


@cache
def compiled_errors() -> tuple[float, ...]:
    """Of published steps under torch.compile, with the presets as they are."""
    return tuple(error_of(step) for step in published_steps() if step.compiled)


def held_out_table() -> str:
    """Each step predicted by other publishers': by regime, kind, precision and memory format."""
    head = ["regime", "model", "precision", "memory format", "steps", *_LEVELS]
    groups: dict[tuple[str, str, str, str], list[Held]] = {}
    for held in held_out():
        row = held.row
        precision = _PRECISIONS.get(row.precision, row.precision)
        kind = "convolutional" if row.is_convolutional else "attention"
        group = (held.regime, kind, precision, row.memory_format or "-")
        groups.setdefault(group, []).append(held)
    return markdown(head, ((*group, *_levels(held)) for group, held in sorted(groups.items())))


def regimes_table() -> str:
    """The same by regime alone, and by what others tell of the GPU."""
    head = ["steps held out", "steps", *_LEVELS]
    everything = {
        f"{regime}{of}": [h for h in held_out() if h.regime == regime and h.is_known in known]
        for regime in (DEVICE_BOUND, HOST_BOUND)
        for of, known in _KNOWN.items()
    }
    return markdown(head, ((name, *_levels(held)) for name, held in everything.items() if held))


def judging_table() -> str:
    """Steps that set nothing, by source, model and type of arithmetic."""
    head = ["steps", "GPUs", "arithmetic", "number", "median error", "bias", *_LEVELS[1:]]
    groups: dict[tuple[str, str], list[Judged]] = {}
    for one in judged():
        name = _JUDGED.get(one.step.model, one.step.model)
        arithmetic = "float32, TF32" if "32" in one.step.precision else "half"
        groups.setdefault((f"{name} ({one.step.source})", arithmetic), []).append(one)
    rows = []
    for (name, arithmetic), found in groups.items():
        errors = [one.error for one in found]
        gpus = len({one.step.device for one in found})
        worst = max(errors, key=abs)
        covered = sum(one.is_covered for one in found)
        rows.append(
            (
                *(name, f"{gpus}", arithmetic, f"{len(found)}"),
                *(f"{median(map(abs, errors)):.1%}", f"{median(errors):+.1%}", f"{worst:+.0%}"),
                f"{covered} of {len(found)}",
            )
        )
    return markdown(head, rows)


def judged_scaling_table() -> str:
    """Compiled steps under DDP that set nothing, from one GPU's."""
    head = ["model", "precision", "one GPU", "GPUs", "measured", "predicted", "error", "interval"]
    rows = (
        (
            *(_JUDGED[one.model], one.precision, f"{1e3 * one.one_s:.0f} ms", f"{one.gpus}"),
            *(f"{1e3 * step_s:.0f} ms" for step_s in (one.published, one.predicted)),
            f"{one.error:+.1%}",
            f"{1e3 * one.low:.0f} to {1e3 * one.high:.0f} ms",
        )
        for one in scaled()
    )
    return markdown(head, rows)


_JUDGED = {
    "own-vit": "ViT-B/16, captured, compiled",
    "own-unet": "U-Net, captured, compiled",
    "own-ddpm": "diffusion model, captured, compiled",
    "resnet50": "ResNet-50",
    "vit_b_16": "ViT-B/16",
    "bert-base": "BERT-base",
}
_LEVELS = ("median error", "worst", "80 % interval holds")
_KNOWN = {
    "": (True, False),
    ", other publishers have steps of the GPU": (True,),
    ", they have none": (False,),
}
_PRECISIONS = {"apex-o2": "half model", "half": "half model", "bf16": "half model"}


def _levels(held: list[Held]) -> tuple[str, str, str, str]:
    count, middle, worst, covered = figures(held)
    return f"{count}", f"{middle:.1%}", f"{worst:.0%}", f"{covered:.0%}"


def publishers_table() -> str:
    """The same by the publisher that was left out."""
    head = ["publisher left out", "device-bound steps", *_LEVELS]
    groups: dict[str, list[Held]] = {}
    for held in held_out():
        if held.regime == DEVICE_BOUND:
            groups.setdefault(held.row.publisher, []).append(held)
    return markdown(head, ((name, *_levels(held)) for name, held in sorted(groups.items())))


def operators_table() -> str:
    """What an operator takes hosts, by the generation of their GPUs."""
    head = ["GPUs", "hosts", "us an operator", "preset"]
    rows = []
    for name, title in GENERATIONS.items():
        found = [1e6 * h.operator_s for h in published_operators() if h.generation == name]
        preset_us = preset_operator_us(constants().operators_s[name])
        span = f"{min(found):.0f} to {max(found):.0f}"
        rows.append((title, f"{len(found)}", span, f"{preset_us}"))
    return markdown(head, rows)


def hosts_table() -> str:
    """What an operator takes on each published host."""
    head = ["host", "year", "us an operator", "of"]
    rows = (
        (host.name, f"{host.year}", f"{1e6 * host.operator_s:.0f}", ", ".join(host.ran))
        for host in published_hosts()
    )
    return markdown(head, rows)


# milliseconds of three steps by batch (pytorch/benchmark, pull request 706)
TORCHBENCH = {1: 89.033, 2: 92.854, 4: 93.676, 8: 105.099, 16: 167.292, 32: 297.315, 64: 561.262}


@cache
def torchbench_rows() -> tuple[tuple[int, float, float, float], ...]:
    """ResNet-50's step on a V100 by batch: published, as estimated, and with its Adam; seconds."""
    return tuple(
        (batch, three_ms / 3e3, *_on_v100(batch)) for batch, three_ms in TORCHBENCH.items()
    )


def _on_v100(batch: int) -> tuple[float, float]:
    workload = {"model": "resnet50", "batch_per_rank": batch, "optimizer": {"name": "adam"}}
    cluster = {"nodes": 1, "gpus_per_node": 1, "device": "v100-sxm-32gb"}
    job = job_of({"workload": workload | {"precision": "fp32"}, "cluster": cluster})
    device, model = job.scenario.cluster.device, job.model
    kernels = 9 * len(model.parameters)  # eight operators each, and its gradient set to zero
    device_s = max(model.optimizer.device_s, kernels * device.kernel_floor_s)
    optimizer = Work(device_s, kernels, 18e-6 * len(model.parameters))
    estimated, single = (
        compile_program(job.scenario, variant, ddp=False)
        for variant in (model, replace(model, optimizer=optimizer))
    )
    return mean_step_s(on_one_rank(estimated)), mean_step_s(on_one_rank(single))


def by_batch_table() -> str:
    """A published step by batch, beside the estimate and that with the source's own Adam."""
    head = ["batch", "published", "estimated", "with its Adam", "error"]
    rows = (
        (
            f"{batch}",
            *(f"{1e3 * step_s:.1f} ms" for step_s in (published_s, estimated_s, single_s)),
            f"**{single_s / published_s - 1:+.0%}**",
        )
        for batch, published_s, estimated_s, single_s in torchbench_rows()
    )
    return markdown(head, rows)
