"""Turn the recorded testbed rounds into what a scenario takes: a model profile and a CSV.

The rounds are ours: gloo DDP over a network of namespaces, 2 ranks with one compute thread each.
Per rate: `scenarios/testbed/transformer-<rate>.json` (schema ddpsim.model/3; medians over
both ranks' single-device iterations) and `all-reduce-<rate>.csv` (medians of the slower rank).

    python tools/make_testbed_inputs.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from calibrate.capture.capture import render

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = ROOT / "tests" / "data" / "testbed"
TARGET = ROOT / "scenarios" / "testbed"


def main() -> None:
    """Write the inputs of every recorded rate."""
    TARGET.mkdir(exist_ok=True)
    for rate in ("500mbit", "2gbit"):
        ranks = [
            json.loads((ROUNDS / f"transformer-2ranks-{rate}-rank{rank}.json").read_text("utf-8"))
            for rank in (0, 1)
        ]
        profile = render(_profile(ranks)) + "\n"
        (TARGET / f"transformer-{rate}.json").write_text(profile, "utf-8")
        (TARGET / f"all-reduce-{rate}.csv").write_text(_all_reduce(ranks), "utf-8")
        print(f"{rate}: {len(ranks[0]['param_numel'])} parameters")


def _profile(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    samples = [sample for rank in ranks for sample in rank["single_device_profile"]]
    caps = [rank["iterations_s_by_bucket_cap_mb"].values() for rank in ranks]
    optimizer = [row[3] for rows in caps for cap in rows for row in cap]
    numels = ranks[0]["param_numel"]
    return {
        "schema": "ddpsim.model/3",
        "parameters": {"name": [f"parameter.{i}" for i in range(len(numels))], "shape": numels},
        "measured": {
            "source": f"recorded testbed round, {ranks[0]['rate']}: {ranks[0]['model']}; medians "
            f"of {len(samples)} iterations on both ranks without DDP, optimizer from the DDP "
            "iterations",
            "batch_per_rank": 4,
            "forward_s": round(median(sample[0] for sample in samples), 6),
            "backward_s": round(median(sample[1] for sample in samples), 6),
            "optimizer_s": round(median(optimizer), 6),
            "ready_origin": "backward_start",
            "ready_s": [
                round(median(sample[2][i] for sample in samples), 6) for i in range(len(numels))
            ],
        },
    }


def _all_reduce(ranks: list[dict[str, Any]]) -> str:
    """An all-reduce ends on its slower rank: the longer of both, sample by sample."""
    rows = [f"# recorded testbed round, {ranks[0]['rate']}, gloo, 2 ranks on 2 hosts: medians"]
    rows.append("size_bytes,time_us,nodes,gpus_per_node")
    for size, first in ranks[0]["all_reduce_s_by_bytes"].items():
        second = ranks[1]["all_reduce_s_by_bytes"][size]
        slower = median(max(pair) for pair in zip(first, second, strict=True))
        rows.append(f"{size},{slower * 1e6:.0f},2,1")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
