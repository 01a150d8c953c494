"""Cluster profiles as dictionaries, and the networks that they describe."""

from __future__ import annotations

from typing import Any


def fitted(value: float, stderr: float | None = 0.0) -> dict[str, Any]:
    return {"value": value, "stderr": stderr}


def profile(**changes: Any) -> dict[str, Any]:
    """gloo on two hosts at 1 Gbit/s: no latency, a payload of 94 % of the line rate."""
    return {
        "schema": "ddpsim.profile/1",
        "name": "two hosts",
        "backend": "gloo",
        "all_reduce": {
            "kind": "gloo-ring",
            "queue_s": fitted(0.0),
            "segment_s": fitted(0.0),
            "wire_bytes_per_byte": fitted(1 / 0.94),
            "reduce_bytes_per_s": fitted(1e12),
            "burst_bytes": fitted(0.0),
            "line_rate_bytes_per_s": 125e6,
        },
        "all_reduce_sigma": 0.03,
        "valid": {
            "size_bytes": [1024, 2**30],
            "layouts": [[2, 1]],
            "line_rates_bytes_per_s": [62.5e6, 375e6],
        },
        "interference": None,
        "overheads": {},
        "jitter": None,
        "provenance": {
            "created": "2026-11-21",
            "machine": "a test",
            "software": "torch",
            "sources": ["record.json"],
        },
    } | changes


def kept(per_byte: float) -> list[dict[str, Any]]:
    """A byte sent a second takes so much of the processor."""
    return [{"sent_bytes_per_s": 1e8, "share": fitted(1 - 1e8 * per_byte)}]


def both(compute: float, comm: float, per_byte: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "interference": {
            "compute_slowdown": fitted(compute, 0.01),
            "compute_kept": kept(per_byte),
            "comm_slowdown": fitted(comm, 0.01),
        }
        | more
    }
