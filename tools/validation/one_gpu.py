"""Steps of one GPU and their hosts: the roofline, published hosts, a step by batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from published_hosts import published_hosts, usual_s
from published_steps import (
    PublishedStep,
    error_of,
    family,
    left_out_errors,
    other_devices_errors,
    published_steps,
    rms,
)

from ddpsim.prediction.ddp_overhead import on_one_rank
from ddpsim.prediction.program import compile_program
from ddpsim.result.summary import mean_step_s
from ddpsim.workload.model import Work
from validation.markdown import markdown
from validation.rows import job_of


@cache
def roofline() -> dict[str, tuple[int, float]]:
    """Of the roofline against published steps of one GPU: how many rows, and the error's RMS.

    As it is, as other sources and as other devices tell of a row, and of compiled models.
    """
    eager = [step for step in published_steps() if not step.compiled]
    compiled = [step for step in published_steps() if step.compiled]
    errors = {
        "as it is": [error_of(step) for step in eager],
        "by other sources": left_out_errors(eager),
        "by other devices": other_devices_errors(eager),
        "compiled": [error_of(step) for step in compiled],
    }
    return {name: (len(found), rms(found)) for name, found in errors.items()}


def roofline_table() -> str:
    """Errors of the roofline, a row a device, a precision and a kind of model."""
    head = ["device", "precision", "models", "steps", "RMS", "from", "to", "sources"]
    groups: dict[tuple[str, str, str], list[PublishedStep]] = {}
    for step in published_steps():
        kind = f"{family(step)}s{', compiled' if step.compiled else ''}"
        groups.setdefault((step.device, step.precision, kind), []).append(step)
    rows = []
    for group, steps in sorted(groups.items()):
        errors = [error_of(step) for step in steps]
        sources = ", ".join(sorted({step.source for step in steps}))
        lowest, highest = min(errors), max(errors)
        told = (f"{len(steps)}", f"{rms(errors):.2f}", f"{lowest:+.0%}", f"{highest:+.0%}", sources)
        rows.append((*group, *told))
    return markdown(head, rows)


def hosts_table() -> str:
    """What an operator takes on each published host."""
    head = ["host", "year", "us an operator", "of"]
    rows = (
        (host.name, f"{host.year}", f"{1e6 * host.operator_s:.0f}", ", ".join(host.ran))
        for host in published_hosts()
    )
    return markdown(head, rows)


def operator_us_since(year: int, *, before: bool = False) -> str:
    """Microseconds that an operator usually takes on the hosts since a year, or before it."""
    hosts = [host for host in published_hosts() if (host.year < year) == before]
    return f"{1e6 * usual_s(hosts):.0f}"


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
