"""What the page's controls offer, and where they stand in a scenario."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from ddpsim.cluster.wires import link_of
from ddpsim.scenario import catalog
from ddpsim.scenario.ddp import Ddp
from ddpsim.scenario.links import InterNode
from ddpsim.scenario.options.checkpointing import WORDS as WORDS_OF_CHECKPOINTING
from ddpsim.scenario.options.checkpointing import Checkpointing
from ddpsim.scenario.options.ddp_values import OWN_STRATEGIES, CommHook
from ddpsim.scenario.other_strategies import other_strategies
from ddpsim.scenario.schema import Scenario
from ddpsim.scenario.set_aside import set_aside
from ddpsim.scenario.workload import Precision
from ddpsim.units import format_bytes_per_s, format_duration

_GBIT = 0.125e9  # bytes per second
_ROUND = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_RATES = (1, 2.5, 5, 10, 25, 40, 50, 100, 200, 400, 800)
_CAPS = [round(each * 10**power, 2) for power in range(-1, 3) for each in _ROUND] + [1000]
_SIGMAS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
_NONE = ("none", "null")
_EVERY = 8  # steps, of local SGD where nothing is said


def controls(most_ranks: int) -> list[dict[str, Any]]:
    """Every control: its key, name, group and kind, and what it offers, as words and value.

    A slider's `stops` go from small to large; a list's `options` may be in groups.
    """
    nodes = [n for n in (*_COUNTS, 2048) if n * 8 <= most_ranks]
    return [
        _list("workload.model", "Model", "Job", catalog.model_names()),
        _slider("workload.batch_per_rank", "Batch per rank", "Job", _numbers(_COUNTS)),
        _list("workload.precision", "Precision", "Job", get_args(Precision)),
        _list("workload.checkpointing", "Checkpointing", "Job", WORDS_OF_CHECKPOINTING),
        _list("ddp.strategy", "Strategy", "DDP", (*OWN_STRATEGIES, *other_strategies())),
        _slider("ddp.bucket_cap_mb", "Bucket cap", "DDP", _caps()),
        _list("ddp.comm_hook", "Hook", "DDP", get_args(CommHook)),
        _slider("ddp.accumulation_steps", "Accumulation", "DDP", _numbers(_COUNTS[:8])),
        _hardware(),
        _slider("cluster.nodes", "Nodes", "Cluster", _numbers(nodes)),
        _slider("cluster.gpus_per_node", "GPUs per node", "Cluster", _numbers(_COUNTS[:8])),
        _slider("cluster.inter_node.bandwidth", "NIC rate", "Cluster", _rates()),
        _slider("cluster.inter_node.nics_per_node", "NICs", "Cluster", _numbers(_COUNTS[:8])),
        _slider("cluster.inter_node.latency", "Latency", "Cluster", _latencies()),
        _slider("cluster.stragglers", "Stragglers", "Disturbed by", _stragglers()),
        _slider("cluster.background", "Other traffic", "Disturbed by", _background()),
    ]  # fmt: skip


def places(scenario: Scenario) -> dict[str, Any]:
    """Return the place of each control: `[words, number]`, or `[words, null]` without a number.

    Numbers say between which stops of a slider a value lies.
    """
    workload, ddp, cluster = scenario.workload, scenario.ddp, scenario.cluster
    inter, machine = link_of(cluster, "inter_node"), cluster.machine
    cap, sigma = ddp.bucket_cap_mb, cluster.stragglers and cluster.stragglers.sigma
    stragglers = "none" if not cluster.stragglers else f"{sigma:g}" if sigma else "listed"
    rate = cluster.background and cluster.background.rate_bytes_per_s
    dials: dict[str, tuple[str, float | None]] = {
        "workload.model": (workload.model or "its own", None),
        "workload.batch_per_rank": _number(workload.batch_per_rank),
        "workload.precision": (workload.precision, None),
        "workload.checkpointing": (_word(workload.checkpointing), None),
        "ddp.strategy": (ddp.strategy, None),
        "ddp.bucket_cap_mb": (_cap(cap), None if isinstance(cap, tuple) else cap or 0.0),
        "ddp.comm_hook": (ddp.comm_hook, None),
        "ddp.accumulation_steps": _number(ddp.accumulation_steps),
        "cluster.device": ((machine or cluster.device).name, None),
        "cluster.nodes": _number(cluster.nodes),
        "cluster.gpus_per_node": _number(cluster.gpus_per_node),
        "cluster.stragglers": (stragglers, sigma or (0.0 if not cluster.stragglers else None)),
        "cluster.background": (format_bytes_per_s(rate) if rate else "none", rate or 0.0),
    }
    if isinstance(inter, InterNode) and cluster.nodes > 1:
        usual, late = inter.bandwidth_bytes_per_s, inter.latency_s
        dials["cluster.inter_node.nics_per_node"] = _number(inter.nics_per_node)
        if usual:
            dials["cluster.inter_node.bandwidth"] = (f"{usual / _GBIT:.3g} Gbit/s", usual)
        words = format_duration(late) if late else "NCCL's own"
        dials["cluster.inter_node.latency"] = (words, late)
    if not ddp.is_ddp:
        del dials["ddp.bucket_cap_mb"], dials["ddp.comm_hook"]
    if cluster.nodes == 1:
        del dials["cluster.background"]
    return {key: list(place) for key, place in dials.items()}


def leaving(ddp: Ddp) -> list[str]:
    """Settings that drop the options which only the scenario's strategy has."""
    return [*set_aside(dict(ddp), "")]


def _list(key: str, name: str, group: str, values: Iterable[str]) -> dict[str, Any]:
    needed = {"local_sgd": [f"ddp.local_sgd.every={_EVERY}"]}  # beside the value itself
    options = [
        {"words": value, "settings": [f"{key}={value}", *needed.get(value, [])]} for value in values
    ]
    return {"key": key, "name": name, "group": group, "kind": "list", "options": options}


def _slider(
    key: str, name: str, group: str, stops: Iterable[tuple[str, str, float]]
) -> dict[str, Any]:
    """`stops`: words, value and number of each."""
    listed = [{"words": words, "value": value, "number": at} for words, value, at in stops]
    return {"key": key, "name": name, "group": group, "kind": "slider", "stops": listed}


def _hardware() -> dict[str, Any]:
    """Machines bring their network and number of GPUs; of a device alone these stay as they are."""
    bare = [f"cluster.{key}=null" for key in ("gpus_per_node", "intra_node", "inter_node", "host")]
    machines = [
        {"words": name, "group": "Machines"}
        | {"settings": [f"cluster.machine={name}", "cluster.device=null", *bare]}
        for name in catalog.machine_names()
    ]
    devices = [
        {"words": name, "group": "Devices", "keep": ["cluster.gpus_per_node"]}
        | {"settings": [f"cluster.device={name}", "cluster.machine=null"]}
        for name in catalog.device_names()
    ]
    return {"key": "cluster.device", "name": "Machine or device", "group": "Cluster"} | {
        "kind": "list",
        "options": [*machines, *devices],
    }


def _numbers(values: Iterable[int]) -> Iterator[tuple[str, str, float]]:
    return ((f"{value}", f"{value}", value) for value in values)


def _caps() -> Iterator[tuple[str, str, float]]:
    yield _cap(None), "default", 0.0
    yield from ((_cap(cap), f"{cap:g}", cap) for cap in _CAPS)


def _rates() -> Iterator[tuple[str, str, float]]:
    return ((f"{rate:g} Gbit/s", f"{rate:g} Gbit/s", rate * _GBIT) for rate in _RATES)


def _latencies() -> Iterator[tuple[str, str, float]]:
    for us in (each * 10**power for power in range(3) for each in (1, 2, 3, 5, 7)):
        yield format_duration(us * 1e-6), f"{us} us", us * 1e-6


def _stragglers() -> Iterator[tuple[str, str, float]]:
    yield *_NONE, 0.0
    for sigma in _SIGMAS:
        yield f"{sigma:g}", f"{{distribution: lognormal, sigma: {sigma:g}}}", sigma


def _background() -> Iterator[tuple[str, str, float]]:
    yield *_NONE, 0.0
    for rate in _RATES:
        yield f"{rate:g} Gbit/s", f"{{rate: {rate:g} Gbit/s}}", rate * _GBIT


def _number(value: int) -> tuple[str, float | None]:
    return f"{value:,}", value


def _cap(cap: float | tuple[float, ...] | None) -> str:
    if cap is None:
        return "1, then 25 MiB"
    if isinstance(cap, tuple):
        return f"{', '.join(f'{each:g}' for each in cap)} MiB"
    return f"{cap:g} MiB"


def _word(checkpointing: Checkpointing | None) -> str:
    words = (word for word, policy in WORDS_OF_CHECKPOINTING.items() if policy == checkpointing)
    return next(words, "a policy of its own")
