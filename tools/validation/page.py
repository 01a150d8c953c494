"""The page of the documentation: its template, filled with figures."""

from __future__ import annotations

from math import exp
from statistics import median

import nccl_carried
import nccl_sweeps
from held_out import nccl_presets, published_runs
from held_out.errors import (
    device_sigma,
    host_sigma,
    published_operators,
    usual_efficiency_errors,
)
from held_out.sharded_steps import levels_table
from held_out.user_jobs import deepspeed_steps, shared_weight_steps, steps_table
from published_steps import rms

from ddpsim.prediction.interval import ROOFLINE
from ddpsim.provenance import Z_80
from validation.benchmark import GPU_SIGMA, benchmark_rows
from validation.bucket_sweep import cs336_rows
from validation.campaign_tables import by_rate_table, goals_table, variants_table
from validation.folders import TEMPLATE
from validation.measured_devices import device_table, halves_table
from validation.misses import misses
from validation.one_gpu import (
    by_batch_table,
    compiled_errors,
    held_out_table,
    hosts_table,
    judged_scaling_table,
    judging_table,
    operators_table,
    publishers_table,
    regimes_table,
)
from validation.presets import machines_table, preset_sigma, preset_table, tcp_table
from validation.recorded import BLIND, SHARDED, STRATEGIES, UNSEEN
from validation.rows import in_words, levels_knowing_ddp, levels_text, row_table
from validation.scaling import covered_text, scaled_table, synthetic, synthetic_table, unequal_ranks
from validation.two_hosts import testbed_rows


def page() -> str:
    """The page as Markdown: its template with the figures."""
    text = TEMPLATE.read_text("utf-8")
    for key, figure in _figures().items():
        text = text.replace(f"@{key}@", figure)
    return text


def _figures() -> dict[str, str]:
    """By the names that the template has for them."""
    bucket25, bucket1 = benchmark_rows(25), benchmark_rows(1)
    equal = [abs(row.error(row.equal_gpus_s)) for row in bucket25]
    steps = tuple(step for step, _ in testbed_rows())
    backwards = tuple(backward for _, backward in testbed_rows())
    single = [row for row in bucket25 if row.case == "1"]
    return {
        "GPU_SIGMA": f"{GPU_SIGMA:.2%}",
        "ALL_LEVELS": levels_text(bucket25),
        "EQUAL_LEVELS": f"median {median(equal):.1%}, worst {max(equal):.1%}",
        "SINGLE_LEVELS": levels_text(tuple(single)),
        "BUCKET1_LEVELS": levels_text(bucket1),
        "KNOWING_LEVELS": in_words(*levels_knowing_ddp(bucket25)),
        "KNOWING_LEVELS1": in_words(*levels_knowing_ddp(bucket1)),
        "BUCKET25": row_table(bucket25, "GPUs"),
        "BUCKET1": row_table(bucket1, "GPUs"),
        "SCALED": scaled_table(),
        "SCALED_COVERED": covered_text(reading_images=True),
        "SYNTHETIC": synthetic_table(),
        "SYNTHETIC_COVERED": covered_text(reading_images=False),
        "SYNTHETIC_HALF": f"{synthetic()[0]:.1%}",
        "SYNTHETIC_MOST": f"{synthetic()[1]:.0%}",
        "UNEQUAL_HALF": f"{unequal_ranks()[0]:.0%}",
        "UNEQUAL_MOST": f"{unequal_ranks()[1]:.0%}",
        "TIED_STEPS": steps_table(shared_weight_steps()),
        "DEEPSPEED_STEPS": steps_table(deepspeed_steps()),
        "TESTBED": row_table(steps, "cap, MiB"),
        "BACKWARD": row_table(backwards, "cap, MiB"),
        "HELD_OUT": held_out_table(),
        "REGIMES": regimes_table(),
        "PUBLISHERS": publishers_table(),
        "JUDGING": judging_table(),
        "JUDGED_SCALING": judged_scaling_table(),
        "LANGUAGE_STEPS": levels_table(),
        **_sigmas(),
        "CLUSTER_FAILURES": published_runs.failures_table(),
        "CLUSTER_LEVELS": published_runs.failures_summary(),
        "LONG_RUNS": published_runs.runs_table(),
        "USUAL_MTBF": f"{published_runs.usual_gpu_hours():,.0f}",
        "USUAL_FACTOR": f"{exp(Z_80 * published_runs.sigma_of_another()):.2g}",
        "USUAL_SIGMA": f"{published_runs.sigma_of_another():.2f}",
        "HOSTS": hosts_table(),
        "OPERATORS": operators_table(),
        "BY_BATCH": by_batch_table(),
        **misses(),
        "GOALS": goals_table(),
        "BY_RATE": by_rate_table(),
        "STRATEGIES": variants_table(STRATEGIES),
        "SHARDED": variants_table(SHARDED),
        "UNSEEN": variants_table(UNSEEN),
        "BLIND": variants_table(BLIND),
        "PRESETS": preset_table(),
        "SWEEPS": "\n".join(nccl_sweeps.table()),
        "MEASURED_DEVICES": device_table(),
        "HALVES": halves_table(),
        "MACHINES": machines_table(),
        "TCP": tcp_table(),
        "CARRIED": "\n".join(nccl_carried.carried_table()),
        "LEFT_OUT": "\n".join(nccl_presets.table()),
        "SWEEP_LEVELS": "\n".join(f"- {k}: {v}" for k, v in nccl_carried.levels().items()),
        "CS336": row_table(cs336_rows(), "bucket, MB"),
        "CS336_LEVELS": levels_text(cs336_rows()),
        "NODE_SIGMA": f"{preset_sigma(several_nodes=False):.2f}",
        "NETWORK_SIGMA": f"{preset_sigma(several_nodes=True):.2f}",
    }


def _sigmas() -> dict[str, str]:
    """What the interval takes of estimates."""
    found = {
        f"{kind.upper()}_{name}": figure
        for kind in ROOFLINE
        for name, figure in zip(("STEPS", "SIGMA"), _counted(*device_sigma(kind)), strict=True)
    }
    compiled, usual = compiled_errors(), usual_efficiency_errors()
    return found | {
        "USED_ATTENTION_SIGMA": f"{ROOFLINE['attention'].sigma:.2f}",
        "ANY_STEPS": f"{len(usual)}",
        "ANY_SIGMA": f"{rms(usual):.2f}",
        "COMPILED_STEPS": f"{len(compiled)}",
        "COMPILED_SIGMA": f"{rms(compiled):.2f}",
        "HOST_SIGMA": f"{host_sigma():.2f}",
        "HOST_COUNT": f"{len(published_operators())}",
    }


def _counted(count: int, sigma: float) -> tuple[str, str]:
    return f"{count}", f"{sigma:.2f}"
