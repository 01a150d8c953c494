"""Benchmarks as a table, kept, and held against kept ones.

python -m pytest benchmarks --benchmark-json=now.json
python benchmarks/report.py now.json                                    the table
python benchmarks/report.py now.json --page                             that of performance.md
python benchmarks/report.py now.json --save benchmarks/results/0.1.0.json
python benchmarks/report.py now.json --against benchmarks/results/0.1.0.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

SCHEMA = "ddpsim.benchmarks/1"
WORSE = 1.25  # a ratio that has grown by more fails
OWN = (
    "peak_mib",
    "messages_per_s",
    "transfers_per_s",
    "step_s",
    "each_ms",
    "user_cpu_s",
    "cpu_s",
    "loop_s",
    "simulated_s",
    "around_s",
    "p99_s",
    "worst_s",
)
LOOP_S = 0.6  # of the core to which the table's seconds are scaled
WANTED_S = {  # of them, at most
    "8-folded": 0.2,
    "1024-stragglers-auto": 0.4,
    "131072-stragglers-auto": 2,
    "llama-70b-fully-shard": 0.5,
    "gpt2-xl-hsdp-8192-stragglers": 2,
    "llama-70b-compare": 3,
    "llama-70b-report": 4,
    "resnet50-2x8-report": 1.5,
    "slow-job-diagnose": 1.5,
    "32-p4d-jitter-tune": 2,
}
ROWS = {  # of docs/explanation/performance.md
    "test_cold[8-folded]": "`run`, 8 ranks",
    "test_cold[1000000-folded]": "`run`, 1,000,000 ranks that are alike",
    "test_cold[1024-stragglers]": "`run`, 1,024 ranks, ring",
    "test_cold[1024-stragglers-auto]": "the same, NCCL's own choice",
    "test_cold[16384-stragglers]": "`run`, 16,384 ranks, ring",
    "test_cold[16384-stragglers-auto]": "the same, NCCL's own choice",
    "test_cold[131072-stragglers]": "`run`, 131,072 ranks, ring",
    "test_cold[131072-stragglers-auto]": "the same, NCCL's own choice",
    "test_cold[8192-hsdp-stragglers-jitter]": "`run`, 8,192 ranks of HSDP, with jitter too",
    "test_cold[llama-70b-fully-shard]": "`run`, 128 ranks of Llama 70B, `fully_shard`",
    "test_cold[llama-70b-fully-shard-8192]": "the same, 8,192 ranks",
    "test_cold[gpt2-xl-hsdp-8192-stragglers]": "`run`, 8,192 ranks of GPT-2 XL, HSDP",
    "test_cold[llama-70b-compare]": "`compare --each-strategy` of Llama 70B",
    "test_cold[llama-70b-report]": "`report` of Llama 70B",
    "test_cold[resnet50-2x8-report]": "`report` of ResNet-50, 16 ranks that are alike",
    "test_cold[slow-job-diagnose]": "`diagnose` with one number",
    "test_cold[32-p4d-shared]": "`run`, 32 ranks on p4d, another job's traffic",
    "test_cold[32-a3-mega-shared-direct]": "`run`, 32 ranks on a3-mega, the same, `direct`, stalls",
    "test_cold[24-gloo-stragglers]": "`run`, 24 gloo ranks, unused parameters",
    "test_cold[32-p4d-jitter-plan]": "`plan`, 32 ranks with jitter",
    "test_cold[32-p4d-shared-plan]": "`plan`, 32 ranks, another job's traffic",
    "test_cold[32-p4d-jitter-report]": "`report`, 32 ranks with jitter",
    "test_cold[32-p4d-shared-report]": "`report`, 32 ranks, another job's traffic",
    "test_cold[32-p4d-jitter-tune]": "`tune --global-batch 128`, 32 ranks with jitter",
    "test_cold[32-p4d-shared-tune]": "the same, another job's traffic",
    "test_cold[32-p4d-jitter-tune-4096]": "`tune --global-batch 4096`, 32 ranks with jitter",
}


def main() -> int:
    """Exit code 1 where a ratio is a quarter worse than in the kept results, or one is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="of pytest-benchmark, or kept ones")
    parser.add_argument("--save", type=Path, help="keep them, without their samples")
    parser.add_argument("--page", action="store_true", help="the table of performance.md")
    parser.add_argument("--against", type=Path, help="kept results")
    asked = parser.parse_args()
    results = read(asked.results)
    print(page(results) if asked.page else table(results))
    if asked.save:
        save(results, asked.save)
    if asked.against:
        worse = compared(read(asked.against)["benchmarks"], results["benchmarks"])
        print(*worse or ["no ratio is a quarter worse"], sep="\n")
        return 1 if worse else 0
    return 0


def read(path: Path) -> dict[str, Any]:
    """Kept results; those of pytest-benchmark are brought into that form."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found.get("schema") == SCHEMA:
        return found
    cpu = found["machine_info"].get("cpu", {}).get("brand_raw", "unknown")
    return {
        "schema": SCHEMA,
        "machine": {"cpu": cpu, "python": found["machine_info"]["python_version"]},
        "created": found["datetime"],
        "benchmarks": {one["name"]: figures(one) for one in found["benchmarks"]},
    }


def figures(one: dict[str, Any]) -> dict[str, Any]:
    """Of one benchmark: seconds, and as many yardsticks (100,000 bare SimPy events) long."""
    stats, extra = one["stats"], one["extra_info"]
    known = {"median_s": stats["median"], "min_s": stats["min"], "max_s": stats["max"]}
    known = {name: round(value, 6) for name, value in known.items()}
    known |= {"rounds": stats["rounds"], "ratio": extra["ratio"]}
    known |= {"yardstick_s": extra["yardstick_s"]}
    return known | {name: extra[name] for name in OWN if name in extra}


def table(results: dict[str, Any]) -> str:
    """A line a benchmark."""
    lines = [f"{results['machine']['cpu']}, Python {results['machine']['python']}"]
    lines.append(f"{'':<36}{'median':>10}  {'min .. max':<22}{'ratio':>8}")
    for name, one in results["benchmarks"].items():
        spread = f"{one['min_s']:.4f} .. {one['max_s']:.4f} s"
        own = "  ".join(f"{one[key]:,} {key}" for key in OWN if key in one)
        times = f"{one['median_s']:>8.4f} s  {spread:<22}{one['ratio']:>8.3f}"
        lines.append(f"{name.removeprefix('test_'):<36}{times}  {own}")
    return "\n".join(lines)


def page(results: dict[str, Any]) -> str:
    """CPU seconds of whole processes as Markdown, and scaled to a core of a known loop."""
    known = results["benchmarks"]
    lines = [
        f"On {results['machine']['cpu']}, Python {results['machine']['python']}:",
        "",
        f"| command | CPU seconds | scaled to a loop of {LOOP_S:g} s | wanted | peak MiB |",
        "|---|---|---|---|---|",
    ]
    for name, what in ROWS.items():
        if name in known:
            one = known[name]
            scaled_s = one["cpu_s"] * LOOP_S / one["loop_s"]
            wanted_s = WANTED_S.get(name.removeprefix("test_cold[").removesuffix("]"), "")
            times = f"{one['cpu_s']:.2f} | {scaled_s:.2f} | {wanted_s}"
            lines.append(f"| {what} | {times} | {one['peak_mib']} |")
    loops_s = {one["loop_s"] for one in known.values() if "loop_s" in one}
    lines += ["", f"The loop takes {' to '.join(f'{s:.2f}' for s in sorted(loops_s))} s."]
    for ranks in (1024, 16_384, 131_072):
        if one := known.get(f"test_around_the_step[{ranks}]"):
            around_s, simulated_s = one["around_s"], one["simulated_s"]
            lines.append(f"{ranks:,} ranks: steps {simulated_s} s, all around them {around_s} s.")
    return "\n".join(lines)


def compared(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What has become worse, in words."""
    worse = []
    for name, kept in before.items():
        if name not in now:
            worse.append(f"{name}: missing")
        elif now[name]["ratio"] > WORSE * kept["ratio"]:
            change = now[name]["ratio"] / kept["ratio"] - 1
            worse.append(f"{name}: {kept['ratio']:.3f} -> {now[name]['ratio']:.3f} ({change:+.0%})")
    return worse


def save(results: dict[str, Any], path: Path) -> None:
    """Write them whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
