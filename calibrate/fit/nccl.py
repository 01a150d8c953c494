"""NCCL's figures from measured collectives: priors, updated by all layouts and operations at once.

The model is NCCL's own choice and price (`ddpsim.cluster.nccl`). Its figures are log-normal
(`ddpsim.cluster.nccl.figures`). Measured times have errors with heavy tails, so that a size at
which NCCL chose badly, or another job disturbed, does not bend the rest. The posterior is taken at
its mode, by Gauss and Newton's steps, as a normal distribution (Laplace).

What logs leave open (the GPU, NCCL's version, the NICs, the transport, LL128) is searched one
question after the other, and each answer counts by its evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np

from calibrate.fit.nccl_posterior import Fitted, Row, fitted, log_time
from calibrate.fit.samples import Fit, FitError, Sample, valid_range
from ddpsim.cluster.fitted.ensemble import USUAL_DEVICES
from ddpsim.cluster.nccl.figures import PRIORS, Figures
from ddpsim.importers.measured import Operation as Measured
from ddpsim.importers.profiles.nccl import (
    NcclFigure,
    NcclHypothesis,
    NcclLinks,
    NcclModel,
    NcclSetting,
)
from ddpsim.scenario.catalog import device_table, resolve
from ddpsim.scenario.device import PCIE_GENERATION, SLOT_BYTES_PER_S, Architecture

LEAST_SIZES = 5  # of messages, a layout
_BYTES = range(1024, 2**30 + 1)  # other messages tell no more
# of a GPU's usual bandwidth: less is another path; messages that tell of it; what PCIe has not
_MUCH_SLOWER, _TELLING_BYTES, _NVLINK_FROM = 0.4, 2**24, 30e9
_DRAWS, _MOST_SETTINGS = 20, 16
_FAR = 12.0  # evidence below the best by so much: kept only for what a scenario may state
_VERSIONS: dict[Architecture, tuple[str, ...]] = {
    "volta": ("2.8", "2.12", "2.18", "2.23", "2.30"),
    "ampere": ("2.8", "2.12", "2.18", "2.23", "2.30"),
    "hopper": ("2.18", "2.23", "2.30"),
    "blackwell": ("2.27", "2.30"),
}
# NICs of a node, and GB/s of one: 25 to 800 Gbit/s
_NICS = tuple(product((1, 2, 4, 8, 16, 32), (1.25, 3.125, 6.25, 12.5, 25.0, 50.0, 100.0)))
_USUAL_NIC: dict[Architecture, tuple[float, ...]] = {
    "volta": (12.5,),
    "ampere": (25.0,),
    "hopper": (50.0,),
    "blackwell": (50.0,),
}
_OTHER_NICS: dict[str, tuple[float, ...]] = {"efa": (12.5, 25.0), "slingshot": (25.0,)}
_COMMON = 12.5  # GB/s: few clusters with NCCL have slower NICs
_UNUSUAL = -3.0  # evidence of another NIC than machines of this GPU have (assumed)
_NICS_TRIED = 4
_TRANSPORTS = ("rdma", "efa", "slingshot")


def fit_nccl(
    samples: Sequence[Sample],
    others: Mapping[Measured, Sequence[Sample]] | None = None,
    gpu: str | None = None,
) -> Fit:
    """NCCL's model; raises FitError where no layout has enough sizes.

    `others`: reduce-scatters and all-gathers, by their size in all. `gpu`: the device's name, where
    it is known. The order of the samples does not matter.
    """
    kept, warnings = _with_enough_sizes(sorted(samples))
    rows = rows_of(kept, others or {})
    fits = _searched(rows, gpu)
    best = fits[0]
    return Fit(
        model=NcclModel(figures=_figures(best), hypotheses=tuple(_ensemble(fits))),
        sigma=float(1.4826 * np.median(np.abs(best.residuals))),  # humps do not count
        valid=valid_range(kept),
        warnings=(*warnings, *_warnings(kept, fits)),
        correlations={},
    )


def rows_of(samples: Sequence[Sample], others: Mapping[Measured, Sequence[Sample]]) -> list[Row]:
    """What is fitted: all-reduces, and of the others reduce-scatters and all-gathers."""
    rows = [Row("all_reduce", sample) for sample in samples]
    for operation, more in sorted(others.items()):
        if operation in ("reduce_scatter", "all_gather"):
            rows += [Row(operation, sample) for sample in sorted(more)]
    return [row for row in rows if row.sample.size_bytes in _BYTES] or rows


def _with_enough_sizes(samples: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """Keep samples of layouts with enough message sizes, and say which have too few.

    Raises FitError where none has enough.
    """
    sizes: dict[tuple[int, int], set[int]] = {}
    for sample in samples:
        sizes.setdefault((sample.nodes, sample.gpus_per_node), set()).add(sample.size_bytes)
    few = {layout: len(counts) for layout, counts in sizes.items() if len(counts) < LEAST_SIZES}
    warnings = [
        f"message sizes on {nodes} x {gpus} ranks are too few ({count}): measure {LEAST_SIZES} or "
        "more, from a few kB to the largest bucket"
        for (nodes, gpus), count in few.items()
    ]
    if len(few) == len(sizes) > 0:
        raise FitError(warnings[0])
    kept = [sample for sample in samples if (sample.nodes, sample.gpus_per_node) not in few]
    return kept, [f"{line}; these do not count" for line in warnings]


def _architectures(gpu: str | None) -> tuple[Architecture, ...]:
    """That of a GPU whose name is known; of another all."""
    try:
        architecture: Architecture = device_table(resolve("device", gpu or ""))["architecture"]
    except (ValueError, KeyError):
        return get_args(Architecture)
    return (architecture,)


def _searched(rows: Sequence[Row], gpu: str | None) -> list[Fitted]:
    """Settings that were tried, the most evident first."""
    architectures = _architectures(gpu)
    tried: dict[NcclSetting, Fitted] = {}

    def tries(settings: Iterable[NcclSetting], near: Fitted | None = None) -> None:
        for setting in settings:
            if setting not in tried:
                fit = fitted(setting, rows, near)
                tried[setting] = replace(fit, evidence=fit.evidence + _usual(setting))

    firsts = {each: _first(each, rows, gpu) for each in architectures}
    tries(firsts.values())
    likeliest = sorted(firsts, key=lambda each: -tried[firsts[each]].evidence)[:2]
    for architecture in likeliest:
        several = 3 if architecture == likeliest[0] else 1
        for question in (_transports, _nics, _versions, _switches, _transports):
            networks = several if question is _versions else 1
            of_it = (each for each in tried.values() if each.setting.architecture == architecture)
            for best in _best_networks(of_it)[:networks]:
                tries(question(best.setting, rows), best)
    kept = [each for each in tried.values() if each.setting.architecture in likeliest]
    return sorted(kept, key=lambda each: -each.evidence)


def _first(architecture: Architecture, rows: Sequence[Row], gpu: str | None) -> NcclSetting:
    version = "2.30" if architecture == "blackwell" else "2.18"
    links = _links_inside(architecture, rows, gpu)
    setting = NcclSetting(architecture=architecture, version=version, ll128=True, links=links)
    return next(_nics(setting, rows), setting)


def _links_inside(architecture: Architecture, rows: Sequence[Row], gpu: str | None) -> NcclLinks:
    """Links of one node: the GPU's usual ones, or as slow as was measured."""
    is_known = len(_architectures(gpu)) == 1
    name = resolve("device", gpu or "") if is_known else USUAL_DEVICES[architecture]
    usual = device_table(name)["intra_node"]
    slot = SLOT_BYTES_PER_S[PCIE_GENERATION[architecture]]
    usual_bytes_per_s = usual.get("bandwidth_bytes_per_s", slot)
    links = NcclLinks(
        intra_bytes_per_s=usual_bytes_per_s,
        intra_path=usual["path"],
        switch_bytes_per_s=usual.get("switch_bandwidth_bytes_per_s"),
    )
    inside = [row.sample for row in rows if row.sample.nodes == 1 and row.operation == "all_reduce"]
    if not inside:
        return links
    largest = max(inside, key=lambda sample: (sample.size_bytes, sample.gpus_per_node))
    ranks = largest.gpus_per_node
    bus = 2 * (ranks - 1) / ranks * largest.size_bytes / largest.time_s
    if bus > _MUCH_SLOWER * usual_bytes_per_s or largest.size_bytes < _TELLING_BYTES:
        return links
    rate, path = float(f"{bus:.3g}"), "pcie" if bus < _NVLINK_FROM else "nvlink"
    return NcclLinks.model_validate({"intra_bytes_per_s": rate, "intra_path": path})


def _transports(setting: NcclSetting, rows: Sequence[Row]) -> Iterator[NcclSetting]:
    for transport in _TRANSPORTS if any(row.sample.nodes > 1 for row in rows) else ():
        yield setting.changed({"transport": transport}, ll128=transport != "slingshot")


def _nics(setting: NcclSetting, rows: Sequence[Row]) -> Iterator[NcclSetting]:
    """Networks whose usual figures come near the largest messages, with LL128 and without."""
    largest = [row for row in rows if row.sample.nodes > 1 and row.operation == "all_reduce"]
    largest = sorted(largest, key=lambda row: -row.sample.size_bytes)[:6]
    if not largest:
        return
    fewest = min(row.sample.gpus_per_node for row in largest)
    misses = []
    for nics, rate in _NICS:
        if nics > 4 * fewest:
            continue
        trial = setting.changed({"nics_per_node": nics, "nic_bytes_per_s": 1e9 * rate})
        miss = np.median([log_time(trial, row) - np.log(row.sample.time_s) for row in largest])
        usual = rate in _USUAL_NIC[trial.architecture]
        misses.append((abs(float(miss)) - 0.2 * usual + 0.1 * (nics > fewest), nics, rate, trial))
    for *_, trial in sorted(misses, key=lambda each: each[:3])[:_NICS_TRIED]:
        yield trial
        if trial.links.transport != "slingshot":  # which has none
            yield trial.changed({}, ll128=not trial.ll128)


def _switches(setting: NcclSetting, _: Sequence[Row]) -> Iterator[NcclSetting]:
    """Without NVLS, which may be switched off, or want all GPUs of a node."""
    if setting.links.switch_bytes_per_s:
        yield setting.changed({"switch_bytes_per_s": None})


def _versions(setting: NcclSetting, _: Sequence[Row]) -> Iterator[NcclSetting]:
    for version in _VERSIONS[setting.architecture]:
        yield setting.changed({}, version=version)


def _best_networks(fits: Iterable[Fitted]) -> list[Fitted]:
    """The likeliest setting of each network, the most evident first."""
    best: dict[object, Fitted] = {}
    for each in sorted(fits, key=lambda each: -each.evidence):
        best.setdefault((each.setting.links, each.setting.ll128), each)
    return list(best.values())


def _usual(setting: NcclSetting) -> float:
    """Evidence that no log gives: machines of a GPU have NICs of its time."""
    rate = (setting.links.nic_bytes_per_s or 0.0) / 1e9
    usual = _OTHER_NICS.get(setting.links.transport, _USUAL_NIC[setting.architecture])
    if not rate or rate in usual:
        return 0.0
    return _UNUSUAL if rate >= _COMMON else 2 * _UNUSUAL


def _ensemble(fits: Sequence[Fitted]) -> Iterator[NcclHypothesis]:
    """Draws of each setting by its weight; a few of those that a scenario may state."""
    evidence = np.array([each.evidence for each in fits])
    weights = np.exp(evidence - evidence.max())
    weights /= weights.sum()
    random = np.random.default_rng(0)
    for each, weight in list(zip(fits, weights.tolist(), strict=True))[:_MOST_SETTINGS]:
        if each.evidence < fits[0].evidence - _FAR:
            break
        count = max(4, round(_DRAWS * weight))
        normal = random.standard_normal((count, len(each.mode)))
        normal -= normal.mean(axis=0)
        draws = each.mode + normal @ np.linalg.cholesky(each.covariance).T
        yield NcclHypothesis(
            **dict(each.setting),
            weight=max(weight, 1e-9),
            draws=tuple(tuple(float(f"{v:.4g}") for v in draw) for draw in draws),
        )


def _figures(best: Fitted) -> tuple[NcclFigure, ...]:
    prior = PRIORS[best.setting.links.transport]
    errors = np.sqrt(np.diag(best.covariance))
    return tuple(
        NcclFigure(
            name=name,
            prior=prior.medians[i],
            prior_sigma=prior.sigmas[i],
            value=float(np.exp(best.mode[i])),
            sigma=float(errors[i]),
            samples=best.counted[i],
        )
        for i, name in enumerate(Figures._fields)
    )


def _warnings(samples: Sequence[Sample], fits: Sequence[Fitted]) -> Iterator[str]:
    """What other measurements would decide."""
    layouts = sorted({(sample.nodes, sample.gpus_per_node) for sample in samples})
    if len(layouts) == 1:
        nodes, gpus = layouts[0]
        yield (
            f"one layout was measured ({nodes} x {gpus}): steps inside nodes and between them "
            "cannot be told apart; measure another number of nodes too"
        )
    near = [each for each in fits if each.evidence > fits[0].evidence - 1.0]
    networks = {(e.setting.links.nics_per_node, e.setting.links.nic_bytes_per_s) for e in near}
    if len(networks) > 1:
        words = ", ".join(
            f"{nics} x {8 * (rate or 0) / 1e9:g} Gbit/s" for nics, rate in sorted(networks)
        )
        yield (
            f"the times suit several networks ({words}): state cluster.inter_node in the scenario, "
            "with bandwidth and nics_per_node"
        )
