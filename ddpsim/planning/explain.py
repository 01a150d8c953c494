"""Why is a step as long as it is, and what would shorten it?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from ddpsim.cluster.link_sources import algorithm_choices
from ddpsim.cluster.nccl.cost import NcclCost
from ddpsim.cluster.what_if_links import quickened, widened
from ddpsim.cluster.wires import link_of, rate_of
from ddpsim.planning.compare import Option, compare, each_flag, option
from ddpsim.prediction.api import simulate
from ddpsim.prediction.job import Job
from ddpsim.prediction.resolve import resolve
from ddpsim.progress import stage
from ddpsim.result.changes import Change, Explanation, Phase, Sensitivity
from ddpsim.result.model import CriticalPart, Result
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.document import Document
from ddpsim.scenario.links import InterNode, IntraNode, LinkKind
from ddpsim.scenario.load import parse
from ddpsim.settings import Setting
from ddpsim.units import format_duration

_WORTH = 0.01  # of the step
_HELPS = 3
_ENDLESS = 1e6
_MORE = (1.1, 1.5, 2.0)  # times the bandwidth between nodes
_SHORT = 0.001  # of the step
_MOST_PHASES = 24
_DISTURBED = {
    "stragglers": "stragglers",
    "weak_links": "weak links",
    "background": "other traffic",
    "other_nodes": "other kinds of nodes",
}


def explain_step(document: Document) -> Explanation:
    """The critical path, the sensitivities, and the changes that shorten the step most.

    Raises ScenarioError.
    """
    scenario = parse(document)
    with stage("parts of the explanation", 3) as progress:
        result = simulate(scenario)
        progress.findings = [f"the step takes {format_duration(result.iteration_time_s.mean)}"]
        progress.advance()
        job = resolve(scenario)
        sensitive = tuple(sensitivities(job))
        progress.findings += [f"{each.what}: {each.change:+.1%}" for each in sensitive]
        progress.advance()
        helps = _helps(document, result)
        progress.advance()
    words = {**_WORDS, **job.program.strategy.phases}
    phases = tuple(_phases(result.critical_path, words))
    return Explanation(result, phases, sensitive, helps)


def sensitivities(job: Job) -> Iterator[Sensitivity]:
    """The step without noise, with one input at a time changed."""
    faster = [{term: 1 / 1.1} for term in ("compute", "host", "network")]
    endless = [{"data": 1 / _ENDLESS}] if job.program.loader else []
    whole_s, *_ = job.steps_s([{}, *faster, {"network": 1 / _ENDLESS}, *endless])

    def effect(what: str, step_s: float) -> Sensitivity:
        return Sensitivity(what, step_s - whole_s, step_s / whole_s - 1)

    yield effect("compute 10 % faster", job.step_s(compute=1 / 1.1))
    if (launched_s := job.step_s(host=1 / 1.1)) < whole_s:
        yield effect("a host that launches 10 % faster", launched_s)
    yield from (effect(*changed) for changed in _networks(job, whole_s))
    if job.program.loader:
        yield effect("a loader that never waits", job.step_s(data=1 / _ENDLESS))
    data = job.scenario.workload.data
    if data and data.sample_bytes:
        local = data.having(sample_bytes=None)
        without = resolve(job.scenario.having("workload", data=local))
        yield effect("samples on a disk of each node", without.step_s())
    for key, what in _DISTURBED.items():
        if getattr(job.scenario.cluster, key):
            without = resolve(job.scenario.having("cluster", **{key: None}))
            yield effect(f"no {what}", without.step_s())


def _networks(job: Job, whole_s: float) -> Iterator[tuple[str, float]]:
    """Other networks, in words, and the step with each."""
    if job.scenario.cluster.world_size == 1:
        return
    network = job.network
    networks = (
        ("10 % more bandwidth on every link", widened(network, 1.1)),
        ("half the latency", quickened(network, 0.5)),
        ("endless bandwidth: latency alone", widened(network, _ENDLESS)),
    )
    for what, changed in networks:
        if changed is not None:
            yield what, replace(job, network=changed).step_s()
    sent = "collectives" if job.scenario.ddp.scatters_gradients else "all-reduces"
    yield f"{sent} 10 % faster", job.step_s(network=1 / 1.1)
    yield "a network that takes no time, nor slows compute", job.step_s(network=1 / _ENDLESS)
    yield from _slower_with_more(job, whole_s)


def _slower_with_more(job: Job, whole_s: float) -> Iterator[tuple[str, float]]:
    """The least bandwidth with which NCCL chooses worse, and what binds; the step with it."""
    scenario, network = job.scenario, job.network
    link = link_of(scenario.cluster, "inter_node") if scenario.cluster.nodes > 1 else None
    if not (link and rate_of(link) and isinstance(network.plain_cost, NcclCost)):
        return
    for more in _MORE:
        wider = link.with_bandwidth(more * rate_of(link))
        other = resolve(scenario.having("cluster", inter_node=wider))
        if (step_s := other.step_s()) > (1 + _WORTH) * whole_s:
            before, after = (_algorithms(each) for each in (job, other))
            chosen = "other channels" if before == after else f"{after} in place of {before}"
            what = f"{100 * (more - 1):.0f} % more bandwidth between nodes: NCCL takes {chosen}"
            yield f"{what}, and {other.network.bottleneck} binds", step_s
            return


def _algorithms(job: Job) -> str:
    cost, sizes_bytes = job.network.plain_cost, {each.size_bytes for each in job.sent}
    return algorithm_choices(cost, sizes_bytes) if isinstance(cost, NcclCost) else ""


def _phases(path: Sequence[CriticalPart], words: Mapping[str, str]) -> Iterator[Phase]:
    """Consecutive parts of the same kind as one phase, in words; very short parts join it.

    Where layers take turns with something else, all parts of a kind are one phase.
    """
    short_s = _SHORT * (path[-1].end_s - path[0].start_s)
    kinds: list[str] = []
    for part in path:
        follows = bool(kinds) and part.end_s - part.start_s < short_s
        kinds.append(kinds[-1] if follows else _kind(part.kind))
    phases = [
        (kind, [part for _, part in group])
        for kind, group in groupby(zip(kinds, path, strict=True), key=itemgetter(0))
    ]
    if takes_turns := len(phases) > _MOST_PHASES:
        whole: dict[str, list[CriticalPart]] = defaultdict(list)
        for part in path:
            whole[_kind(part.kind)].append(part)
        phases = [*whole.items()]
    for kind, parts in phases:
        several = f", in {len(parts)} parts" if takes_turns and len(parts) > 1 else ""
        whole_s = sum(part.end_s - part.start_s for part in parts)
        yield Phase(_in_words(kind, parts, words) + several, whole_s)


def _kind(kind: str) -> str:
    merged = {"bucket_copy": "backward", "broadcast": "buffers"} | _AROUND_OPTIMIZER
    operation = kind.partition(" of bucket ")[0]
    return operation if operation in _REDUCTIONS else merged.get(kind, kind)


_REDUCTIONS = ("all_reduce", "reduce_scatter")


_AROUND_OPTIMIZER = dict.fromkeys(("unscale", "clip", "zero_grad", "item"), "optimizer")
_WORDS = {
    "input_copy": "the inputs' copy to the device",
    "buffers": "the buffers' broadcast, with its copies",
    "sync_batch_norm": "statistics of SyncBatchNorm from all ranks",
    "forward": "forward",
    "backward": "backward, with the gradients' copies into buckets",
    "copy_back": "copies from buckets back to gradients",
    "comm_hook": "casts and copies around collectives",
    "optimizer": "optimizer",
    "data_wait": "waiting for the data loader",
    "stall": "standing still",
    "host": "waiting for the host",
}


def _in_words(kind: str, parts: list[CriticalPart], words: Mapping[str, str]) -> str:
    if kind != "all_reduce" or kind in words:
        return words.get(kind, kind.replace("_", " "))
    numbers = [p.kind.rpartition(" ")[2] for p in parts if p.kind.startswith(kind)]
    if len(numbers) == 1:
        return f"all-reduce of bucket {numbers[0]}"
    return f"all-reduces of buckets {numbers[0]} to {numbers[-1]}, one after another"


def _helps(document: Document, result: Result) -> tuple[Change, ...]:
    """The single changes that surely shorten the step by 1 % or more, best first."""
    options = [*each_flag(document), *_machines(document)]
    if result.bottleneck.kind == "host" and resolve(parse(document)).model.basis == "roofline":
        options.append(option(document, "workload.compile=true", note="torch.compile"))
    changes = compare(parse(document), options).changes
    useful = [c for c in changes if c.change <= -_WORTH and c.is_sure and c.fits and not c.problem]
    best: dict[str, Change] = {}
    for change in sorted(useful, key=lambda change: change.change_s):
        best.setdefault(Setting.parse(change.settings[0]).key, change)
    return tuple(best.values())[:_HELPS]


def _twice_as_wide(cluster: Cluster, key: LinkKind, link: IntraNode | InterNode) -> Iterator[str]:
    """Settings for twice the bandwidth of a link.

    Where the link is a device preset's, stating it replaces all of it: then its other fields too.
    """
    bandwidth = "bandwidth_bytes_per_s"
    wider = link.with_bandwidth(2 * rate_of(link))
    yield f"cluster.{key}.bandwidth={_gbit_per_s(rate_of(wider))}"
    stated = getattr(cluster, key)
    if cluster.machine or (stated and stated.bandwidth_bytes_per_s):
        return
    for name, field in type(link).model_fields.items():
        value = getattr(wider, name)
        if name not in (bandwidth, "latency_s") and value != field.default:
            written = _gbit_per_s(value) if name.endswith("bytes_per_s") else value
            yield f"cluster.{key}.{field.alias or name}={written}"


def _gbit_per_s(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e9:.6g} Gbit/s"


def _machines(document: Document) -> Iterator[Option]:
    """Options of the machine: twice the bandwidth, no disturbance, a loader twice as fast."""
    scenario = parse(document)
    cluster, data = scenario.cluster, scenario.workload.data
    for key in () if cluster.is_measured else cluster.links_used:
        link = link_of(cluster, key)
        if link and link.bandwidth_bytes_per_s:
            wider, *rest = _twice_as_wide(cluster, key, link)
            yield option(document, wider, *rest, title=wider, note="twice as much")
    for disturbed, what in _DISTURBED.items():
        if getattr(cluster, disturbed):
            yield option(document, f"cluster.{disturbed}=null", note=f"no {what}")
    if data:
        faster = f"workload.data.rate={2 * data.rate_samples_per_s:.6g} samples/s"
        yield option(document, faster, note="twice as many")
