"""How compute and communication lengthen each other, from the measurements of records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from calibrate.fit.estimates import (
    ZERO,
    at_least,
    at_most,
    averaged,
    difference,
    error,
    least_squares,
    line,
    pooled,
    ratio,
    shares_kept,
    shifted,
    trimmed_mean,
    usual_time,
)
from calibrate.fit.samples import find
from calibrate.records.record import HALF, LAYER, WORKS, Measurement, Record
from ddpsim.cluster.fitted.laws import AllReduceModel, FittedCost
from ddpsim.cluster.fitted.residuals import CorrectedCost, Correction
from ddpsim.importers.profiles.cluster import ComputeKept, Fitted, Interference, MeasuredTime
from ddpsim.units import NS_PER_S

_LAW_ERROR = 0.02
_ONE = Fitted(value=1.0)
_MIDDLE_80 = 2.563  # standard deviations between the 10th and the 90th percentile
_ALIKE = 1.5  # squares closer than this are of one message, measured beside several works
_ONE_IN_FLIGHT = "one all_reduce"  # in a variant: in flight alone, and not two of a queue
_HALF_MEASURED = (
    "not enough data for interference: measure compute and all_reduce, alone and together"
)


def fit_interference(
    records: Sequence[Record], model: AllReduceModel, measured: Sequence[MeasuredTime] = ()
) -> tuple[Interference | None, tuple[str, ...]]:
    """How much compute and communication lengthen each other, and warnings; None: not measured.

    `model` is the law of the records' all-reduces, which with those `measured` tells how long their
    bytes take the link.

    The figures are means over records and the pieces of compute, whose differences count as error:
    for what compute suffers those of layers, as steps are made of them, or where these were not
    measured matrix products and memory traffic. With NCCL the slowdowns are constants. With gloo
    compute keeps what is left of a processor that moves the bytes too, as measured at each line
    rate beside two in flight and beside one; a transfer is delayed once, as its threads wait for
    the processor, and slowed down with the square of those bytes; and two in flight crowd each
    other in proportion to them.
    """
    records = _comparable(_over_nodes(records))
    pieces = _of_steps(records)
    comm = [piece for record in records for piece in _comm_pieces(record)]
    if not pieces and not comm:
        return None, ()
    if not pieces or not comm:
        return None, (_HALF_MEASURED,)
    warnings = []
    half, one = _of_steps(records, HALF), _of_steps(records, beside=_ONE_IN_FLIGHT)
    for of, measured_pieces in (("", pieces), (" of float16", half)):
        if len({piece.is_layer for piece in measured_pieces}) > 1:
            warnings.append(
                f"what layers suffer beside all-reduces{of} was not measured at every line rate: "
                "at others matrix products and memory traffic stand for them, which suffer less"
            )
    rates, half_rates, one_rates = (
        {piece.line_rate for piece in each} for each in (pieces, half, one)
    )
    if half and half_rates != rates:
        warnings.append(
            "interference of float16 was not measured at every line rate: below those it is taken "
            "to go with float32's, between and above them it is interpolated"
        )
    if one and one_rates != rates:
        warnings.append(
            "what compute keeps beside one all-reduce was not measured at every line rate: at "
            "others it is taken to keep what it does beside two"
        )
    constant = at_least(pooled([piece.ratio for piece in pieces]), 1.0)
    comm_constant = at_least(pooled([piece.ratio for piece in comm]), 1.0)
    queue = _Queue(_ONE, ZERO, ZERO, ZERO)
    kept: tuple[ComputeKept, ...] = ()
    half_kept: tuple[ComputeKept, ...] = ()
    if records[0].environment.backend == "gloo":
        constant = comm_constant = _ONE
        kept = _kept(pieces, one)
        half_kept = _kept(half, _of_steps(records, HALF, _ONE_IN_FLIGHT))
        queue = _queue(records, comm, _Links(model, measured))
        if len(rates) == 1:
            warnings.append(
                "one line rate: all of gloo's interference is taken as proportional to the bytes "
                "sent a second"
            )
    interference = Interference(
        compute_slowdown=constant,
        compute_kept=kept,
        half_compute_kept=half_kept,
        comm_slowdown=comm_constant,
        comm_slowdown_s2_per_byte2=queue.squared,
        comm_delay_s=queue.delay,
        idle_link_use=queue.idle_link_use,
        crowded_slowdown_s_per_byte=queue.crowded,
    )
    return interference, tuple(warnings)


def _over_nodes(records: Sequence[Record]) -> Sequence[Record]:
    """With gloo those of several nodes, if there are any: inside one no link is taken."""
    over = [record for record in records if record.layout.nodes > 1]
    return over if over and records[0].environment.backend == "gloo" else records


def _comparable(records: Sequence[Record]) -> list[Record]:
    """Records that hold both sides of a comparison, each for itself: every one of them counts.

    The others are put into the first of their layout and line rate, as what is compared may have
    been measured in two; what both have counts from that one. So nothing is compared with another
    hour's that was measured twice.
    """
    each = [(record, any(_pieces(record)) and any(_comm_pieces(record))) for record in records]
    alike = [record for record, alone in each if alone]
    for record in (record for record, alone in each if not alone):
        first = next((i for i, other in enumerate(alike) if other.layout == record.layout), None)
        if first is None:
            alike.append(record)
            continue
        held = {m.key for m in alike[first].measurements}
        more = (m for m in record.measurements if m.key not in held)
        both = (*alike[first].measurements, *more)
        alike[first] = alike[first].model_copy(update={"measurements": both})
    return alike


@dataclass(frozen=True)
class _Piece:
    """Compute or a transfer beside others, and alone, at so many bytes sent a second."""

    together: Measurement
    alone: Measurement
    sent_bytes_per_s: float
    line_rate: float | None
    layout: tuple[int, int]
    size_bytes: int

    @property
    def is_layer(self) -> bool:
        """Whether the compute is a layer's, as in a step."""
        return self.together.variant.startswith(LAYER)

    @property
    def alone_s(self) -> float:
        """What it usually takes alone."""
        return trimmed_mean(self.alone.samples_s)

    @property
    def ratio(self) -> Fitted:
        """How many times as long it takes beside the others."""
        return ratio(self.together, self.alone)

    @property
    def longer(self) -> Fitted:
        """How many seconds longer it takes beside them."""
        return difference(self.together, self.alone)

    @property
    def kept(self) -> Fitted:
        """The share of its speed that it keeps beside them."""
        return _speed_kept(self.together, self.alone)


def _of_steps(
    records: Sequence[Record], dtype: str = "", beside: str = "all_reduce"
) -> list[_Piece]:
    """Compute beside all-reduces: at each line rate of layers, if there are any, or else of all."""
    pieces = [piece for record in records for piece in _pieces(record, dtype, beside)]
    layers = {piece.line_rate for piece in pieces if piece.is_layer}
    return [piece for piece in pieces if piece.is_layer or piece.line_rate not in layers]


def _pieces(record: Record, dtype: str = "", beside: str = "all_reduce") -> Iterator[_Piece]:
    """Compute beside all-reduces of a dtype, as variants end, over compute alone."""
    for name in WORKS:
        for together in find(record, "compute", f"{name} with {beside}{dtype}"):
            alone = _of_size(find(record, "compute", f"{name} alone{dtype}"), together)
            sending = _of_size(find(record, "all_reduce", f"with {name}{dtype}"), together)
            sending += _of_size(find(record, "all_reduce", f"alone{dtype}"), together)
            if alone and sending:
                yield _piece(record, together, alone[0], sending[0])


def _comm_pieces(record: Record) -> Iterator[_Piece]:
    """All-reduces of a queue under compute over one that is alone, or else over the queue's."""
    for name in WORKS:
        for together in find(record, "all_reduce", f"with {name}"):
            alone = _one_by_one(record, name, together)
            alone += _of_size(find(record, "all_reduce", f"beside {name}"), together)
            if alone:
                yield _piece(record, together, alone[0], alone[0])


def _one_by_one(record: Record, name: str, like: Measurement) -> list[Measurement]:
    """All-reduces of this size that were alone; those that took turns with the others first."""
    reduced = find(record, "all_reduce", f"in turn with {name}")
    return _of_size([*reduced, *find(record, "all_reduce", "alone")], like)


def _piece(record: Record, together: Measurement, alone: Measurement, sent: Measurement) -> _Piece:
    ranks = sent.nodes * sent.gpus_per_node
    sent_bytes = 2 * (ranks - 1) / ranks * sent.size_bytes
    return _Piece(
        together=together,
        alone=alone,
        sent_bytes_per_s=sent_bytes / trimmed_mean(sent.samples_s),
        line_rate=record.layout.line_rate_bytes_per_s,
        layout=(sent.nodes, sent.gpus_per_node),
        size_bytes=sent.size_bytes,
    )


def _of_size(each: Sequence[Measurement], like: Measurement) -> list[Measurement]:
    ranks = (like.nodes, like.gpus_per_node)
    return [
        m for m in each if m.size_bytes == like.size_bytes and (m.nodes, m.gpus_per_node) == ranks
    ]


def _kept(pieces: Sequence[_Piece], beside_one: Sequence[_Piece]) -> tuple[ComputeKept, ...]:
    """One point a line rate: the mean over messages and works, and over the bytes they send."""
    ones = _by_rate(beside_one)
    points = []
    for rate, alike in _by_rate(pieces).items():
        share = _share_of(alike)
        one = at_least(_share_of(ones[rate]), share.value) if rate in ones else None
        points.append(
            ComputeKept(
                sent_bytes_per_s=float(np.mean([piece.sent_bytes_per_s for piece in alike])),
                share=share,
                beside_one=one,
                spread=_spread(alike),
            )
        )
    return tuple(sorted(points, key=lambda point: point.sent_bytes_per_s))


def _by_rate(pieces: Sequence[_Piece]) -> dict[float | None, list[_Piece]]:
    by_rate: dict[float | None, list[_Piece]] = {}
    for piece in pieces:
        by_rate.setdefault(piece.line_rate, []).append(piece)
    return by_rate


def _share_of(pieces: Sequence[_Piece]) -> Fitted:
    return at_most(pooled([piece.kept for piece in pieces]), 1.0)


def _spread(pieces: Sequence[_Piece]) -> float:
    """The standard deviation of what one rank's compute keeps, from burst to burst.

    Of the middle four fifths of a normal distribution, so that a stolen moment does not count; the
    mean over messages, works and ranks. 0 where ranks were not measured apart, for the slower one's
    mean then holds what unevenness costs.
    """
    each = [
        float(np.subtract(*np.percentile(shares, (90, 10)))) / _MIDDLE_80
        for piece in pieces
        if piece.together.samples_by_rank_s
        for shares in _shares_kept(piece.together, piece.alone)
    ]
    return float(np.mean(each)) if each else 0.0


def _speed_kept(together: Measurement, alone: Measurement) -> Fitted:
    """The share of its usual speed that work has beside other work, the mean over the ranks.

    The mean of speeds, not of times: in a second of a backward the fast moments and the slow ones
    add up to what was done. A rank's speed beside gloo varies twofold from message to message.
    """
    return averaged([usual_time(shares) for shares in _shares_kept(together, alone)])


def _shares_kept(together: Measurement, alone: Measurement) -> Iterator[list[float]]:
    """Shares of each rank, one a sample; of the slower one where they were not measured apart."""
    besides = together.samples_by_rank_s or (together.samples_s,)
    alones = alone.samples_by_rank_s or (alone.samples_s,)
    for alone_s, beside_s in zip(alones, besides, strict=True):
        yield shares_kept(alone_s, beside_s)


@dataclass(frozen=True)
class _Links:
    """How long the bytes of all-reduces are on the link, as predictions take it."""

    model: AllReduceModel
    measured: Sequence[MeasuredTime]

    def idle_s(self, piece: _Piece) -> float:
        """Seconds of a transfer in which its bytes are not on the link."""
        law = FittedCost(self.model, *piece.layout, piece.line_rate)
        cost = CorrectedCost(law, Correction.of(self.model, self.measured, *piece.layout))
        on_link_s = cost.transfer("all_reduce", piece.size_bytes).transfer_ns / NS_PER_S
        return max(0.0, piece.alone_s - on_link_s)


@dataclass(frozen=True)
class _Queue:
    """Transfers two at a time: what one uses of the other's idle link, and what lengthens both."""

    idle_link_use: Fitted
    crowded: Fitted
    delay: Fitted
    squared: Fitted


def _queue(records: Sequence[Record], under_compute: Sequence[_Piece], links: _Links) -> _Queue:
    """A queue against one by one, then a queue under compute against the queue so modelled.

    A transfer of T seconds that leaves the link idle for I of them takes, in a queue,
    T - use I + crowded r T, for r bytes sent a second; under compute delay + squared r^2 of that
    longer. One message at one rate tells delay and squared not apart: all is then the latter.
    """
    alone = [
        _piece(record, queued, one[0], one[0])
        for record, name in product(records, WORKS)
        for queued in find(record, "all_reduce", f"beside {name}")
        if (one := _one_by_one(record, name, queued))
    ]
    use, crowded = _use_and_crowded(alone, links) if alone else (_ONE, ZERO)

    def queued_s(piece: _Piece) -> float:
        crowd = 1 + crowded.value * piece.sent_bytes_per_s
        return piece.alone_s * crowd - use.value * links.idle_s(piece)

    squares = [piece.sent_bytes_per_s**2 * queued_s(piece) for piece in under_compute]
    longer = [
        _of_a_law(shifted(piece.longer, piece.alone_s - queued_s(piece)), piece)
        for piece in under_compute
    ]
    if max(squares) < _ALIKE * min(squares):
        each = [time.times(1 / square) for time, square in zip(longer, squares, strict=True)]
        return _Queue(use, crowded, ZERO, at_least(pooled(each), 0.0))
    return _Queue(use, crowded, *line(squares, longer))


def _use_and_crowded(pieces: Sequence[_Piece], links: _Links) -> tuple[Fitted, Fitted]:
    """From -longer = use x idle - crowded r T, by weighted least squares, both at least zero."""
    idle = np.array([links.idle_s(piece) for piece in pieces])
    rates = np.array([piece.sent_bytes_per_s * piece.alone_s for piece in pieces])
    target = np.array([-piece.longer.value for piece in pieces])
    errors = np.array([error(_of_a_law(piece.longer, piece)) for piece in pieces])
    use, crowded = least_squares(np.column_stack([idle, -rates]), target, errors)
    return at_most(use, 1.0), crowded


def _of_a_law(time: Fitted, piece: _Piece) -> Fitted:
    """With the error that a simple law leaves of a transfer, else the longest decide all."""
    stderr_s = time.stderr or 0.0
    return Fitted(value=time.value, stderr=math.hypot(stderr_s, _LAW_ERROR * piece.alone_s))
