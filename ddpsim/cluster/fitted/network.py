"""A cluster profile to a Network: fitted times, measured interference, and their doubts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import hypot, log, log2, sqrt

from ddpsim.cluster.fitted.ensemble import curve_of, for_cluster
from ddpsim.cluster.fitted.gloo_shards import UnmeasuredShards
from ddpsim.cluster.fitted.larger_messages import of_larger
from ddpsim.cluster.fitted.laws import AllReduceModel, FittedCost
from ddpsim.cluster.fitted.residuals import CorrectedCost, Correction
from ddpsim.cluster.interference import InterferingCost, Kept
from ddpsim.cluster.network import Network
from ddpsim.cluster.transfers import Operation
from ddpsim.cluster.wires import network_rate
from ddpsim.errors import InputError
from ddpsim.importers.profiles.cluster import (
    LEAST_BUCKET_BYTES,
    ClusterProfile,
    ComputeKept,
    Fitted,
    GlooRing,
    Interference,
    MeasuredSigma,
)
from ddpsim.importers.profiles.nccl import NcclModel
from ddpsim.importers.profiles.part import interpolated
from ddpsim.provenance import Z_80, Provenance, Trust, Uncertainty
from ddpsim.scenario.catalog import are_other_devices
from ddpsim.scenario.cluster import Cluster
from ddpsim.scenario.links import InterNode
from ddpsim.scenario.schema import Scenario
from ddpsim.units import format_bytes_per_s
from ddpsim.wording import counted

# of NCCL's times on ranks that were not measured, beside the draws' own spread: where the model is
# wrong, and what each doubling of the ranks adds, with other switches and other jobs, as a random
# walk. Larger layouts left out, 80 % ranges hold 63 to 94 % by group (docs/validation.md)
UNLIKE, PER_DOUBLING = 0.25, 0.20
_BANDS_BYTES = tuple(4**power for power in range(5, 17))
_OTHER_GLOO_RANKS = 0.15  # assumed
_USUAL_BYTES = 16 * 2**20
_LEAST_SIGMA = 0.02  # assumed: another day's network, where nothing was measured twice


def network_from_profile(scenario: Scenario, profile: ClusterProfile) -> Network:
    """The collective costs that a profile gives for a scenario's cluster; raises InputError."""
    cluster = scenario.cluster
    if profile.backend != scenario.ddp.backend:
        raise InputError(
            "cluster.profile",
            f"was measured with {profile.backend}, but ddp.backend is {scenario.ddp.backend}; "
            "measure with that backend, or set ddp.backend",
        )
    is_gloo = isinstance(profile.all_reduce, GlooRing)
    rate, collisions = _line_rate(cluster, scenario.run.seed) if is_gloo else (None, ())
    half = scenario.ddp.sent_dtype is not None  # bfloat16 is taken to cost what float16 does
    law = _law(profile, cluster, half=half)
    cost = _corrected(profile, law, cluster, rate)
    measured = frozenset({"all_reduce", *(operation for operation, _ in cost.others)})
    warnings = (*_of_the_fit(cluster, profile), *_warnings(cluster, profile, rate))
    interference = profile.interference
    sent = 2 * (cluster.world_size - 1) / cluster.world_size  # bytes a rank, of one of a message
    return Network(
        cost=InterferingCost(
            cost,
            compute=interference.compute_slowdown.value,
            comm=interference.comm_slowdown.value,
            kept=_kept(interference.kept(half=half), sent),
            kept_beside_single=_kept(interference.kept(half=False), sent) if half else (),
            comm_s2_per_byte2=interference.comm_slowdown_s2_per_byte2.value * sent**2,
            crowded_s_per_byte=interference.crowded_slowdown_s_per_byte.value * sent,
            comm_delay_s=interference.comm_delay_s.value,
            idle_link_use=interference.idle_link_use.value,
            scatter_turns=2 if is_gloo else 1,  # gloo all-reduces what it scatters
        )
        if interference
        else cost,
        uncertainty=_uncertainty(cluster, profile, rate),
        by_size=_by_size(cluster, profile, law, rate),
        measured_bytes=profile.valid.size_bytes,
        measured=measured,
        limit=f"the network as calibrated in {profile.name}",
        provenance=(*_provenance(cluster, profile, rate), *collisions),
        warnings=warnings,
        interference=_interference_uncertainty(profile, interference) if interference else None,
    )


def _others(
    profile: ClusterProfile, law: AllReduceModel, layout: tuple[int, int]
) -> tuple[tuple[Operation, Correction], ...]:
    """What corrects the times of collectives that were measured beside all-reduces."""
    others = []
    for operation, measured in profile.measured_others.items():
        correction = Correction.of(law, measured, *layout, operation)
        if correction.curves:
            others.append((operation, correction))
    return tuple(others)


def _corrected(
    profile: ClusterProfile, law: AllReduceModel, cluster: Cluster, rate: float | None
) -> CorrectedCost:
    """A law on a cluster's ranks, with what was measured there."""
    layout = cluster.nodes, cluster.gpus_per_node
    fitted = profile.all_reduce if isinstance(law, GlooRing) else law
    return CorrectedCost(
        FittedCost(law, *layout, rate),
        Correction.of(fitted, profile.measured, *layout),
        _others(profile, fitted, layout),
        UnmeasuredShards.of(profile, cluster.world_size),
    )


def _kept(points: Sequence[ComputeKept], sent: float) -> tuple[Kept, ...]:
    """By the bytes of a message that move in a second, of which a rank sends the share `sent`."""
    return tuple(
        Kept(
            point.sent_bytes_per_s / sent,
            point.share.value,
            point.spread,
            point.beside_one.value if point.beside_one else None,
        )
        for point in points
        if sent
    )


def _law(profile: ClusterProfile, cluster: Cluster, *, half: bool) -> AllReduceModel:
    """NCCL's model as the scenario narrows it; gloo's with its slower addition of float16."""
    law = profile.all_reduce
    if isinstance(law, NcclModel):
        return for_cluster(law, cluster)
    if not (half and law.reduce_half_bytes_per_s):
        return law
    return law.model_copy(update={"reduce_bytes_per_s": law.reduce_half_bytes_per_s})


def _line_rate(cluster: Cluster, seed: int) -> tuple[float | None, tuple[Provenance, ...]]:
    """The rate of a node's link as the scenario states it, and how flows collide beyond it."""
    if cluster.nodes == 1 or cluster.inter_node is None:
        return None, ()
    stated = cluster.link("inter_node")
    if not isinstance(stated, InterNode) or stated.bandwidth_bytes_per_s is None:
        raise InputError("cluster.inter_node", "no preset says its bandwidth; state it")
    return network_rate(stated, cluster.nodes, seed)


def _uncertainty(cluster: Cluster, profile: ClusterProfile, rate: float | None) -> Uncertainty:
    if not _is_measured(cluster, profile):
        return _beyond_measured(_fitted_sigma(profile), cluster, profile)
    basis = "the residuals of the profile's fit"
    if profile.measured_sigma:
        basis = "the profile's measurements, each left out in turn or made twice"
    return Uncertainty(measured_sigma(profile, rate), basis)


def _fitted_sigma(profile: ClusterProfile) -> float:
    return max(profile.all_reduce_sigma, _LEAST_SIGMA)


def _beyond_measured(sigma: float, cluster: Cluster, profile: ClusterProfile) -> Uncertainty:
    """On ranks that were not measured: the further from those that were, the wider."""
    if isinstance(profile.all_reduce, GlooRing):
        basis = "the residuals of the profile's fit, and assumed for ranks that were not measured"
        if (crowd := _ranks_a_core(cluster, profile)) > 1:
            basis = "assumed: up to the square of the ranks that share a core"
        return Uncertainty(hypot(sigma, _OTHER_GLOO_RANKS, 2 * log(crowd) / Z_80), basis)
    return _of_ensemble(0.0, cluster, profile)


def _ranks_a_core(cluster: Cluster, profile: ClusterProfile) -> float:
    """How many ranks share a core of the machine, more than measured ones did; 1 if they do not."""
    cores, ranks = profile.provenance.cores, cluster.gpus_per_node
    if cores is None or ranks <= max(cores, *(each for _, each in profile.valid.layouts)):
        return 1.0
    return ranks / cores


def _of_ensemble(sigma: float, cluster: Cluster, profile: ClusterProfile) -> Uncertainty:
    """The draws' spread, and what other ranks add to it."""
    basis = "the calibrated figures' spread, and what published sweeps of more nodes add to it"
    return Uncertainty(hypot(sigma, unlike_sigma(cluster.world_size, profile.valid.layouts)), basis)


def unlike_sigma(ranks: int, layouts: Sequence[tuple[int, int]]) -> float:
    """How far NCCL's times on ranks that were not measured may be from the model's, as a sigma."""
    return hypot(UNLIKE, PER_DOUBLING * sqrt(doublings(ranks, layouts)))


def _by_size(
    cluster: Cluster, profile: ClusterProfile, law: AllReduceModel, rate: float | None
) -> tuple[tuple[int, Uncertainty], ...]:
    """Uncertainty by size; empty: alike for all sizes.

    Of gloo's messages, and of NCCL's all-reduces on ranks that were not measured.
    """
    if isinstance(law, GlooRing):
        usual, largest = _uncertainty(cluster, profile, rate), profile.valid.size_bytes[1]
        small = usual.sigma
        if _is_measured(cluster, profile):
            of_small = [each_rate.small for each_rate in profile.measured_sigma]
            small = max(small, _between_rates(profile, of_small, rate))
        by_size = ((0, replace(usual, sigma=small)), (LEAST_BUCKET_BYTES, usual))
        cost = FittedCost(law, cluster.nodes, cluster.gpus_per_node, rate)
        larger = of_larger(usual, law, cost, largest)
        return (*(each for each in by_size if each[0] <= largest), *larger)
    if _is_measured(cluster, profile):
        return ()
    curve = curve_of(law, "all_reduce", cluster.nodes, cluster.gpus_per_node)
    return tuple(
        (size, _of_ensemble(curve.sigma(size), cluster, profile)) for size in (0, *_BANDS_BYTES)
    )


def doublings(ranks: int, layouts: Sequence[tuple[int, int]]) -> float:
    """How often the measured ranks must be doubled, or halved, to become as many; 0 between."""
    over_nodes = [nodes * gpus for nodes, gpus in layouts if nodes > 1]
    measured = over_nodes or [nodes * gpus for nodes, gpus in layouts]
    return max(0.0, log2(ranks / max(measured)), log2(min(measured) / ranks))


def measured_sigma(profile: ClusterProfile, rate: float | None = None) -> float:
    """How sure a profile is of all-reduces on ranks that it was measured on.

    Between measured line rates linearly in their logarithms; beyond them as at the nearest. A law
    that asks for no line rate: the largest.
    """
    sigmas = profile.measured_sigma
    if not sigmas:
        return _fitted_sigma(profile)
    each = [max(sigma.left_out, _again_sigma(sigma)) for sigma in sigmas]
    return _between_rates(profile, each, rate)


def _between_rates(
    profile: ClusterProfile, each: Sequence[float | None], rate: float | None
) -> float:
    """One of the profile's uncertainties, at a line rate; 0 where none was measured."""
    law = profile.all_reduce
    points = [
        (sigma, rate_sigma.line_rate_bytes_per_s)
        for sigma, rate_sigma in zip(each, profile.measured_sigma, strict=True)
        if sigma is not None
    ]
    if not isinstance(law, GlooRing) or not points:
        return max((sigma for sigma, _ in points), default=0.0)
    usual = law.line_rate_bytes_per_s
    measured = sorted((log(of_rate or usual), sigma) for sigma, of_rate in points)
    rates, sigmas = zip(*measured, strict=True)
    return interpolated(log(rate or usual), rates, sigmas)


def _again_sigma(rate_sigma: MeasuredSigma) -> float:
    return _LEAST_SIGMA if rate_sigma.repeated is None else rate_sigma.repeated


def _is_measured(cluster: Cluster, profile: ClusterProfile) -> bool:
    return (cluster.nodes, cluster.gpus_per_node) in profile.valid.layouts


def _is_beyond_one_node(cluster: Cluster, profile: ClusterProfile) -> bool:
    """Whether these ranks are on several nodes, and none that were measured."""
    return cluster.nodes > 1 and all(nodes == 1 for nodes, _ in profile.valid.layouts)


def _of_the_fit(cluster: Cluster, profile: ClusterProfile) -> Iterator[str]:
    """The first of a profile's own warnings, and the command that shows the others."""
    first, more = profile.warnings[:1], len(profile.warnings) - 1
    file = cluster.profile.given if cluster.profile else "PROFILE"
    hint = f"; its fit has {counted(more, 'more warning')}: python -m calibrate show {file}"
    yield from (f"profile {profile.name}: {each}{hint if more else ''}" for each in first)


def _warnings(cluster: Cluster, profile: ClusterProfile, rate: float | None) -> tuple[str, ...]:
    warnings = []
    if are_other_devices(profile.provenance.machine, cluster.device.name):
        warnings.append(
            f"profile {profile.name} was measured on {profile.provenance.machine}, and its times "
            f"are taken for {cluster.device.name}'s"
        )
    if _is_beyond_one_node(cluster, profile):
        taken = (
            "cluster.inter_node's figures are taken as they are"
            if cluster.inter_node
            else "its own are taken; state cluster.inter_node"
        )
        warnings.append(f"profile {profile.name} was measured on one node: between nodes {taken}")
    elif not _is_measured(cluster, profile):
        measured = ", ".join(f"{nodes} x {gpus}" for nodes, gpus in profile.valid.layouts)
        warnings.append(
            f"profile {profile.name} was measured on {measured} ranks: {cluster.nodes} x "
            f"{cluster.gpus_per_node} is predicted from {_rests(profile)}"
        )
    if _ranks_a_core(cluster, profile) > 1:
        cores = counted(profile.provenance.cores or 1, "core")
        warnings.append(
            f"{cluster.gpus_per_node} ranks of a node would share the {cores} of the machine "
            f"that profile {profile.name} was measured on: how they wait for each other is not "
            "modelled, so measure as many ranks there"
        )
    if unused := _unused_links(cluster, profile):
        warnings.append(
            f"{' and '.join(unused)} {'is' if len(unused) == 1 else 'are'} not used: profile "
            f"{profile.name} tells what the links do"
        )
    rates = profile.valid.line_rates_bytes_per_s
    law = profile.all_reduce
    if not rate and cluster.nodes > 1 and isinstance(law, GlooRing) and len(rates) > 1:
        warnings.append(
            f"cluster.inter_node is not stated: profile {profile.name} was measured on "
            f"{len(rates)} kinds of links, of which those of "
            f"{format_bytes_per_s(law.line_rate_bytes_per_s)} are taken"
        )
    if rate and rates and not min(rates) <= rate <= max(rates):
        warnings.append(
            f"profile {profile.name} was measured on links of {format_bytes_per_s(min(rates))} to "
            f"{format_bytes_per_s(max(rates))}, not of {format_bytes_per_s(rate)}"
        )
    return tuple(warnings)


def _rests(profile: ClusterProfile) -> str:
    """What a profile says of ranks that were not measured."""
    if isinstance(profile.all_reduce, GlooRing):
        return "its figures"
    return "the links and hops that were measured, and NCCL's own choice"


def _unused_links(cluster: Cluster, profile: ClusterProfile) -> list[str]:
    """Keys that are stated and that a profile answers for; gloo's takes the line rate."""
    if isinstance(profile.all_reduce, GlooRing):
        return []
    answered = ["algorithm", "intra_node"]
    if not _is_beyond_one_node(cluster, profile):
        answered.append("inter_node")
    return [
        f"cluster.{key}"
        for key in answered
        if key in cluster.model_fields_set and getattr(cluster, key) not in (None, "auto")
    ]


def _provenance(
    cluster: Cluster, profile: ClusterProfile, rate: float | None
) -> tuple[Provenance, ...]:
    origin, law = profile.provenance, profile.all_reduce
    source = f"profile {profile.name}: {origin.machine}, {origin.created}"
    trust: Trust = "measured"
    if not _is_measured(cluster, profile):
        source += f"; carried to {cluster.nodes} x {cluster.gpus_per_node} ranks"
        trust = "assumed"
    entries = [Provenance("all-reduce time", source, trust)]
    layout = cluster.nodes, cluster.gpus_per_node
    for operation, measured in profile.measured_others.items():
        if any((each.nodes, each.gpus_per_node) == layout for each in measured):
            name = operation.replace("_", "-")
            entries.append(Provenance(f"{name} time", source, "measured"))
    if rate:
        stated = f"{format_bytes_per_s(rate)}; stated in the scenario, efficiency from the profile"
        entries.append(Provenance("cluster.inter_node", stated, "stated"))
    elif cluster.inter_node and _is_beyond_one_node(cluster, profile):
        stated = f"as stated, beyond the one node of profile {profile.name}"
        entries.append(Provenance("cluster.inter_node", stated, "stated"))
    elif cluster.nodes > 1 and isinstance(law, GlooRing):
        taken = f"{format_bytes_per_s(law.line_rate_bytes_per_s)}, as in profile {profile.name}"
        entries.append(Provenance("cluster.inter_node", taken, "assumed"))
    if profile.interference:
        entries.append(Provenance("interference", source, "measured"))
    return tuple(entries)


def _interference_uncertainty(profile: ClusterProfile, effect: Interference) -> Uncertainty:
    """The relative standard error of all that is added, to a usual message on the fastest link."""
    rate = max(profile.valid.line_rates_bytes_per_s, default=0.0)
    added = (  # value, standard error, and what makes a slowdown of it
        (effect.compute_slowdown.value - 1, effect.compute_slowdown.stderr, 1.0),
        (effect.comm_slowdown.value - 1, effect.comm_slowdown.stderr, 1.0),
        *((1 - most.share.value, most.share.stderr, 1.0) for most in effect.kept(half=False)[-1:]),
        (*_figure(effect.comm_slowdown_s2_per_byte2), rate**2),
        (*_figure(effect.comm_delay_s), rate / _USUAL_BYTES),
        (*_figure(effect.crowded_slowdown_s_per_byte), rate),
    )
    whole = sum(value * weight for value, _, weight in added)
    # half of it is assumed where the fit could not tell
    errors = [
        (0.5 * value if stderr is None else stderr) * weight
        for value, stderr, weight in added
        if value > 0
    ]
    sigma = min(1.0, hypot(*errors) / whole) if whole > 0 else 0.0
    return Uncertainty(sigma, "the standard error of the calibration")


def _figure(fitted: Fitted) -> tuple[float, float | None]:
    return fitted.value, fitted.stderr
