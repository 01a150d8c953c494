"""What to measure next: the sweep or the fact that would make predictions surest.

A profile's hypotheses each have a normal posterior of their figures' logarithms. Logarithms of
times are taken as linear in them. So a further measurement has a known effect before anybody makes
it: each posterior narrows alike whatever is found, and hypotheses gain or lose weight by what each
expects. The latter is averaged over made measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, exp, hypot
from typing import NamedTuple

import numpy as np

from calibrate.fit.nccl import LEAST_SIZES, rows_of
from calibrate.fit.nccl_posterior import NOISE_VARIANCE, Row, linear, precision
from calibrate.fit.samples import Sample
from calibrate.fit.solve import Floats
from ddpsim.cluster.fitted.ensemble import likely
from ddpsim.cluster.fitted.network import measured_sigma, unlike_sigma
from ddpsim.cluster.transfers import Operation
from ddpsim.importers.measured import Operation as Measured
from ddpsim.importers.profiles.cluster import ClusterProfile, MeasuredTime
from ddpsim.importers.profiles.nccl import NcclHypothesis, NcclModel
from ddpsim.provenance import Z_80
from ddpsim.units import MIB
from ddpsim.wording import counted, ranks

Layout = tuple[int, int]

_KIB = 1024
_OPERATIONS: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather")
_WANTED = tuple(MIB * 2**power for power in range(0, 9, 2))  # of DDP's and FSDP's buckets
_SWEPT = tuple(_KIB * 2**power for power in range(6, 21, 2))
# each of these sizes stands for two of a sweep, whose sizes double
_NOISE_VARIANCE, _LEAST_SWEPT = NOISE_VARIANCE / 2, ceil(LEAST_SIZES / 2)
_FURTHER, _BOOKED = 8, 4  # times the nodes measured: what is predicted, and what is measured
_ROWS = 3  # of a screen
_LEAST_GAIN = 0.01  # of the spread: less is worth no line, and no other operation
_GIVEN_UP = 0.1  # of what a sweep narrows, for a shorter one
_MADE = 64  # measurements, a hypothesis
# what NCCL says of itself, and what tells hypotheses apart by it
_FACTS: dict[str, Callable[[NcclHypothesis], object]] = {
    "the GPU": lambda member: member.architecture,
    "NCCL's version": lambda member: member.version,
    "the NICs": lambda member: (
        member.links.nics_per_node,
        member.links.nic_bytes_per_s,
        member.links.transport,
    ),
    "GPUDirect (LL128)": lambda member: member.ll128,
}


class Target(NamedTuple):
    """Ranks that are predicted, and the most nodes that can be measured."""

    nodes: int
    gpus_per_node: int
    up_to: int

    @classmethod
    def of(cls, profile: ClusterProfile, nodes: int | None, up_to: int | None) -> Target:
        """Like the most ranks that were measured; by default 8 times the nodes, of which half."""
        most, gpus = max(profile.valid.layouts)
        nodes = nodes or _FURTHER * most
        return cls(nodes, gpus, min(nodes, up_to or _BOOKED * most))


class Step(NamedTuple):
    """Something to find out: by a command on so many nodes, or (None) in NCCL's log.

    `sigma`: the standard deviation that is then expected of the logarithm of a predicted time.
    """

    nodes: int | None
    what: str
    sigma: float


@dataclass(frozen=True)
class _Posterior:
    """One hypothesis: its posterior, and the rows that are asked for as lines in its figures."""

    weight: float
    precision: Floats
    logs: Floats
    slopes: Floats


class _Ensemble:
    """Hypotheses, with the rows that are wanted first."""

    def __init__(
        self,
        model: NcclModel,
        measured: Sequence[Row],
        wanted: Sequence[Row],
        sweeps: Sequence[Row],
    ) -> None:
        self._hypotheses, self._wanted = likely(model), len(wanted)
        whole = sum(hypothesis.weight for hypothesis in self._hypotheses)
        self._members = []
        for each in self._hypotheses:
            setting, mode = each.setting, np.mean(each.draws, axis=0)
            lines = linear(setting, (*wanted, *sweeps), mode)
            weight = each.weight / whole
            self._members.append(_Posterior(weight, precision(setting, measured, mode), *lines))
        random = np.random.default_rng(0)
        self._random = random.standard_normal((len(self._members), len(sweeps), _MADE))
        self._weights = np.array([member.weight for member in self._members])

    def variance(self, fact: Callable[[NcclHypothesis], object] = lambda _: 0) -> float:
        """Expected, where the answer to a question is known; by default to none."""
        answers = [fact(hypothesis) for hypothesis in self._hypotheses]
        expected = 0.0
        for answer in set(answers):
            chosen = np.array([each == answer for each in answers])
            weights = self._weights[chosen] / self._weights[chosen].sum()
            members = [each for each, is_it in zip(self._members, chosen, strict=True) if is_it]
            logs = np.array([each.logs[: self._wanted] for each in members])
            within = np.array([self._variances(each, each.precision) for each in members])
            mixed = weights @ (within + (logs - weights @ logs) ** 2)
            expected += self._weights[chosen].sum() * float(mixed.mean())
        return expected

    def variance_after(self, places: Sequence[int]) -> float:
        """Expected, where these of the rows that are asked for were measured."""
        at = self._wanted + np.array(places)
        noise = _NOISE_VARIANCE * np.eye(len(at))
        within, gains, roots = [], [], []
        for member in self._members:
            slopes = member.slopes[at]
            after = member.precision + slopes.T @ slopes / _NOISE_VARIANCE
            within.append(self._variances(member, after))
            wanted = member.slopes[: self._wanted]
            gains.append(wanted @ np.linalg.solve(after, slopes.T) / _NOISE_VARIANCE)
            spread = slopes @ np.linalg.solve(member.precision, slopes.T)
            roots.append(np.linalg.cholesky(spread + noise))
        expected = 0.0
        for true, root, random in zip(self._members, roots, self._random, strict=True):
            made = true.logs[at, None] + root @ random[: len(at)]
            evidence, middles = [], []
            for member, gain, factor in zip(self._members, gains, roots, strict=True):
                missed = made - member.logs[at, None]
                score = np.square(np.linalg.solve(factor, missed)).sum(axis=0) / 2
                evidence.append(-score - np.log(np.diag(factor)).sum() + np.log(member.weight))
                middles.append(member.logs[: self._wanted, None] + gain @ missed)
            odds = np.exp(np.array(evidence) - np.max(evidence, axis=0))
            odds /= odds.sum(axis=0)
            middle = np.einsum("hs,hws->ws", odds, middles)
            apart = np.einsum("hs,hws->ws", odds, np.square(middles - middle))
            deviations = np.array(within).T @ odds
            expected += true.weight * float((deviations + apart).mean())
        return expected

    def _variances(self, member: _Posterior, precise: Floats) -> Floats:
        """Variances of the wanted times under one hypothesis."""
        slopes = member.slopes[: self._wanted]
        return np.asarray(np.einsum("wf,fw->w", slopes, np.linalg.solve(precise, slopes.T)))


def _measured(profile: ClusterProfile) -> list[Row]:
    """What the profile was fitted to."""
    of_others: dict[Measured, list[Sample]] = {
        operation: _samples(times) for operation, times in profile.measured_others.items()
    }
    samples = _samples(profile.measured)
    kept = [s for s in samples if (s.nodes, s.gpus_per_node) in profile.valid.layouts]
    return rows_of(kept, of_others)


def _samples(times: Sequence[MeasuredTime]) -> list[Sample]:
    return [Sample(t.nodes, t.gpus_per_node, t.size_bytes, t.time_s) for t in times]


def _rows(operation: Operation, layout: Layout, sizes: Sequence[int]) -> list[Row]:
    """Rows of one second, whose residuals are the logarithms of what a model says."""
    return [Row(operation, Sample(*layout, size_bytes, 1.0)) for size_bytes in sizes]


def show_next(profile: ClusterProfile, target: Target) -> Iterator[str]:
    """Lines that say what to measure next, or why nothing can be said; none of gloo."""
    model = profile.all_reduce
    if not isinstance(model, NcclModel):
        return
    layout = ranks(target.nodes, target.gpus_per_node)
    if max(profile.valid.layouts)[0] == 1:
        sweep = _command("all_reduce", _SWEPT)
        yield f"measure next: {sweep} on two nodes; one node tells nothing of the network"
        return
    if (target.nodes, target.gpus_per_node) in profile.valid.layouts:
        words = _range(measured_sigma(profile))
        yield f"measure next: {layout} were measured (80 % range {words}); name others with --for"
        return
    now, steps = next_measurements(profile, model, target)
    smallest, largest = (size // MIB for size in (_WANTED[0], _WANTED[-1]))
    sizes = f"{smallest} to {largest} MiB on {layout}"
    yield f"measure next, to predict {sizes}; --for NODES asks for others"
    yield f"    {'nodes':<7}{'run':<42} 80 % range"
    yield f"    {'':<7}{'now':<42} {_range(now)}"
    for step in steps:
        yield f"    {step.nodes or 'a log':<7}{step.what:<42} {_range(step.sigma)}"
    if not steps:
        yield f"    nothing on up to {counted(target.up_to, 'node')} narrows it: raise --up-to"


def _range(sigma: float) -> str:
    low, high = (100 * (exp(sign * Z_80 * sigma) - 1) for sign in (-1, 1))
    return f"{low:+.0f} to {high:+.0f} %"


def next_measurements(
    profile: ClusterProfile, model: NcclModel, target: Target
) -> tuple[float, list[Step]]:
    """The sigma of times on the target's ranks now, and what would narrow it most.

    The best sweep of each of three numbers of nodes, of those that were not measured yet; then what
    a log may tell.
    """
    layout, measured = (target.nodes, target.gpus_per_node), profile.valid.layouts
    wanted = _rows("all_reduce", layout, _WANTED)  # which set the interval of all collectives
    sweeps = list(_sweeps(profile, target))
    rows = [row for sweep in sweeps for row in sweep]
    ensemble = _Ensemble(model, _measured(profile), wanted, rows)
    now = ensemble.variance()

    def sigma(variance: float, *more: Layout) -> float:
        if layout in more:
            return measured_sigma(profile)
        return hypot(
            variance**0.5, unlike_sigma(target.nodes * target.gpus_per_node, [*measured, *more])
        )

    def swept(places: range) -> Step:
        operation, sample = rows[places[0]]
        # only all-reduces count as ranks that were measured (`ddpsim.cluster.fitted.network`)
        more = [(sample.nodes, sample.gpus_per_node)] if operation == "all_reduce" else []
        sizes = [rows[place].sample.size_bytes for place in places]
        after = sigma(ensemble.variance_after(places), *more)
        return Step(sample.nodes, _command(operation, sizes), after)

    best: dict[int | None, tuple[float, range]] = {}
    start = 0
    for sweep in sweeps:
        places = range(start, start := start + len(sweep))
        step = swept(places)
        if step.nodes not in best or step.sigma < (1 - _LEAST_GAIN) * best[step.nodes][0]:
            best[step.nodes] = step.sigma, places
    before = sigma(now)
    likeliest = sorted(best.values(), key=lambda each: each[0])[:_ROWS]
    steps = [swept(_shorter(ensemble, places, now)) for _, places in likeliest]
    facts = [
        Step(None, f"NCCL_DEBUG=INFO: {name}", sigma(ensemble.variance(fact)))
        for name, fact in _FACTS.items()
    ]
    steps_and_facts = [*steps, *sorted(facts, key=lambda step: step.sigma)]
    return before, [step for step in steps_and_facts if step.sigma < (1 - _LEAST_GAIN) * before]


def _sweeps(profile: ClusterProfile, target: Target) -> Iterator[list[Row]]:
    """Sizes that were not measured, of each operation and power of two of nodes."""
    measured = _measured(profile)
    doubled = {2**power for power in range(target.up_to.bit_length())}
    for nodes in sorted(doubled | {target.up_to}):
        if nodes * target.gpus_per_node == 1:
            continue
        for operation in _OPERATIONS:
            rows = _rows(operation, (nodes, target.gpus_per_node), _SWEPT)
            if new := [row for row in rows if not any(_is_near(row, each) for each in measured)]:
                yield new


def _is_near(row: Row, measured: Row) -> bool:
    """Whether the same was measured, of half to twice the bytes."""
    one, other = row.sample, measured.sample
    is_alike = (one.nodes, one.gpus_per_node) == (other.nodes, other.gpus_per_node)
    near = one.size_bytes / 2 <= other.size_bytes <= 2 * one.size_bytes
    return row.operation == measured.operation and is_alike and near


def _shorter(ensemble: _Ensemble, places: range, now: float) -> range:
    """Without the smallest messages, then the largest, as long as it narrows nearly as much."""
    enough = ensemble.variance_after(places)
    enough += _GIVEN_UP * (now - enough)
    for first, last in ((1, 0), (0, 1)):
        while len(places) > _LEAST_SWEPT:
            tried = range(places.start + first, places.stop - last)
            if ensemble.variance_after(tried) > enough:
                break
            places = tried
    return places


def _command(operation: str, sizes: Sequence[int]) -> str:
    smallest, largest = (_binary(size) for size in (sizes[0], sizes[-1]))
    return f"{operation}_perf -b {smallest} -e {largest} -f 2"


def _binary(size_bytes: int) -> str:
    """A power of two as nccl-tests reads it."""
    units = ((_KIB * MIB, "G"), (MIB, "M"), (_KIB, "K"))
    unit, name = next(each for each in units if size_bytes >= each[0])
    return f"{size_bytes // unit}{name}"
