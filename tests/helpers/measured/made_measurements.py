"""All-reduce laws, samples and records made from known figures: every time is SYNTHETIC."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from calibrate.fit.samples import Sample
from calibrate.records.record import Environment, Layout, Measurement, Record
from ddpsim.cluster.fitted.laws import AllReduceModel, Point, collective_times_s
from ddpsim.cluster.nccl.figures import USUAL
from ddpsim.importers.profiles.cluster import Fitted, GlooRing
from ddpsim.importers.profiles.nccl import NcclFigure, NcclHypothesis, NcclLinks, NcclModel

SIZES = [2**k for k in range(10, 28)]
FEW_SIZES = [2**k for k in range(10, 28, 2)]
RATES = (62.5e6, 250e6, 1.25e9)


def all_reduce_s(
    model: AllReduceModel,
    size_bytes: float,
    nodes: int,
    gpus_per_node: int,
    line_rate: float | None = None,
) -> float:
    """Seconds of one all-reduce that is alone."""
    point = Point(size_bytes, nodes, gpus_per_node, line_rate)
    return collective_times_s("all_reduce", model, [point])[0]


def nccl_model(
    links: NcclLinks | None = None, *, version: str = "2.18", ll128: bool = True, **figures: float
) -> NcclModel:
    """One draw for certain: an A100's NCCL, with these multiples of the usual figures."""
    known = USUAL._replace(**figures)
    hypothesis = NcclHypothesis(
        architecture="ampere",
        version=version,
        ll128=ll128,
        links=links or NcclLinks(),
        weight=1.0,
        draws=(tuple(math.log(value) for value in known),),
    )
    named = (
        NcclFigure(name=name, prior=1.0, prior_sigma=0.4, value=value, sigma=0.01, samples=9)
        for name, value in known._asdict().items()
    )
    return NcclModel(figures=tuple(named), hypotheses=(hypothesis,))


def gloo_ring(
    queue: float = 2e-4,
    segment: float = 6e-5,
    wire: float = 1.045,
    reduce: float = 2.5e9,
    burst: float = 9e4,
    line_rate: float = 1.25e9,
) -> GlooRing:
    return GlooRing(
        queue_s=Fitted(value=queue),
        segment_s=Fitted(value=segment),
        wire_bytes_per_byte=Fitted(value=wire),
        reduce_bytes_per_s=Fitted(value=reduce),
        burst_bytes=Fitted(value=burst),
        line_rate_bytes_per_s=line_rate,
    )


def made_samples(
    model: AllReduceModel,
    layouts: Iterable[tuple[int, int]],
    sizes: Iterable[int] = SIZES,
    rates: Iterable[float | None] = (None,),
    noise: float = 0.0,
    seed: int = 0,
) -> list[Sample]:
    random = np.random.default_rng(seed)
    return [
        Sample(
            nodes,
            gpus,
            size,
            all_reduce_s(model, size, nodes, gpus, rate) * math.exp(noise * random.normal()),
            rate,
        )
        for nodes, gpus in layouts
        for rate in rates
        for size in sizes
    ]


TWO_HDR = NcclLinks(nics_per_node=2, nic_bytes_per_s=25e9)
NODE = nccl_model(start=1.3, intra_rate=0.9)
NODES = nccl_model(
    TWO_HDR, start=1.3, tree_hop_ll=1.4, tree_hop_ll128=1.3, net_rate=0.93, intra_rate=0.9
)


def gloo_environment(**changes: Any) -> Environment:
    known: dict[str, Any] = {
        "created": "2026-01-02T03:04:05Z",
        "machine": "SYNTHETIC, 2 cores",
        "device": "cpu",
        "torch": "2.13.0",
        "backend": "gloo",
        "library": "torch 2.13.0",
        "variables": {},
        "details": {},
    }
    return Environment(**known | changes)


def samples_around(middle: float, spread: float = 0.01, seed: int = 0) -> tuple[float, ...]:
    random = np.random.default_rng(seed)
    return tuple((middle * np.exp(spread * random.normal(size=21))).tolist())


def gloo_record(
    line_rate: float | None = 62.5e6,
    per_byte: float = 1e-9,
    constant: float = 1.0,
    model: AllReduceModel | None = None,
    **changes: Any,
) -> Record:
    """Compute is constant / (1 - per_byte x (bytes sent a second)) times longer, comm 1.2 times."""
    model = model or gloo_ring()

    def seconds(size: int) -> float:
        return all_reduce_s(model, size, 2, 1, line_rate)

    def measured(kind: Any, variant: str, time_s: float, **more: Any) -> Measurement:
        return Measurement(kind=kind, variant=variant, samples_s=samples_around(time_s), **more)

    pair = {"group": "world", "nodes": 2, "gpus_per_node": 1}
    found = [
        measured("all_reduce", "alone", seconds(size), size_bytes=size, **pair) for size in SIZES
    ]
    beside, largest_s = 2**22, seconds(2**22)
    sent = beside / (1.2 * largest_s)
    for name in ("gemm", "memory"):
        longer = constant / (1 - per_byte * sent)
        found += [
            measured("all_reduce", f"with {name}", 1.2 * largest_s, size_bytes=beside, **pair),
            measured("compute", f"{name} alone", 0.01, size_bytes=beside, **pair),
            measured(
                "compute", f"{name} with all_reduce", 0.01 * longer, size_bytes=beside, **pair
            ),
        ]
    found += [
        measured("ddp_hook", "without", 0.05, parameters=100),
        measured("ddp_hook", "with ddp", 0.0505, parameters=100),
        measured("ddp_hook", "without", 0.1, size_bytes=64_000_000, parameters=128),
        measured("ddp_hook", "with ddp", 0.14864, size_bytes=64_000_000, parameters=128),
        measured("device_cast", "compress", 0.002, size_bytes=4_000_000),
        measured("device_cast", "decompress", 0.001, size_bytes=4_000_000),
        measured("device_copy", "alone", 0.001, size_bytes=4_000_000),
        measured("device_copy", "alone", 0.0001, size_bytes=4_000),
    ]
    layout = Layout(nodes=2, gpus_per_node=1, line_rate_bytes_per_s=line_rate)
    return Record(environment=gloo_environment(**changes), layout=layout, measurements=tuple(found))


def jitter(iterations: int, sigma: float, memory: float = 0.0) -> Measurement:
    random = np.random.default_rng(5)
    ranks = []
    for middle in (0.010, 0.011):
        noise = random.normal(size=iterations)
        for i in range(1, iterations):
            noise[i] = memory * noise[i - 1] + math.sqrt(1 - memory**2) * noise[i]
        ranks.append(tuple((middle * np.exp(sigma * noise)).tolist()))
    return Measurement(kind="jitter", samples_s=ranks[0], samples_by_rank_s=tuple(ranks))
